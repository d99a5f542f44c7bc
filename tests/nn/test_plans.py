"""The plan that a layer caches between calls: a changed layer runs as a new one does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import KINDS, a_batch, assert_same, build, results_of, watch_backends
from own_cells import Leaky
from raglane.cells import CELLS
from raglane.errors import ArgumentError, DispatchError, RaglaneError
from raglane.kernels.triton import launch
from raglane.nn.mixers.block import BlockLayer
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.regularisation import Regularisation
from raglane.nn.recurrent.stack import plans


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "backend", "reference"),
        lambda layer: setattr(layer, "schedule", "padded"),
        lambda layer: setattr(layer, "regularisation", Regularisation(zoneout=0.3)),
        lambda layer: layer.float(),
        lambda layer: nn.init.constant_(layer.weight_hh_l0, 0.25),
        lambda layer: setattr(
            layer, "weight_ih_l0", nn.Parameter(torch.ones_like(layer.weight_ih_l0))
        ),
        lambda layer: nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0"),
    ],
)
def test_a_changed_layer_runs_as_a_new_one_does(change: Callable[[Any], Any]) -> None:
    used, new = build("lstm", 2).eval(), build("lstm", 2).eval()
    new.load_state_dict(used.state_dict())
    batch = a_batch([3, 0, 2])
    used(batch)
    for layer in (used, new):
        change(layer)
    batch = batch.to(next(new.parameters()).dtype)
    assert_same(results_of(used(batch)), results_of(new(batch)), 0.0)
    assert rl.explain(used, batch) == rl.explain(new, batch)


_PREPARED: list[dict[str, bool]] = [{}, {"resets": True}, {"with_states": True}]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (kind, options)
        for number, kind in enumerate(KINDS)
        for options in (_PREPARED if kind.cell in ("lstm", "gru") else [_PREPARED[number % 3]])
    ],
)
def test_warm_up_changes_nothing_that_a_user_sees(kind: Any, options: dict[str, bool]) -> None:
    layer = build(kind, 2, bidirectional=True, dropout=0.5, zoneout=0.2)
    layer.register_forward_hook(lambda *_: pytest.fail("a hook ran"))
    before, state = (
        torch.get_rng_state(),
        {name: part.clone() for name, part in layer.state_dict().items()},
    )
    torch.inference_mode(not options)(layer.warm_up)(
        **options
    )  # in which it computes gradients all the same
    assert torch.equal(before, torch.get_rng_state())
    assert all(part.grad is None for part in layer.parameters())
    assert_same(list(layer.state_dict().values()), list(state.values()), 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_values_copied_from_inference_mode_are_trained_on(kind: Any) -> None:
    """Whose offsets are tensors of inference mode, which autograd cannot save."""
    with torch.inference_mode():
        made = a_batch([3, 0, 2])
    layer, copied = build(kind, 2, bidirectional=True), made.map(torch.clone)
    given = (
        copied,
        made.to(made.dtype, copy=True),
        rl.Ragged.from_flat(copied.values, lengths=[3, 0, 2]),
    )
    found = [
        torch.autograd.grad(layer(each)[0].values.sum(), [*layer.parameters()]) for each in given
    ]
    assert_same([*found[0], *found[1]], [*found[2]] * 2, 0.0)


def test_a_kernel_that_cannot_be_compared_now_is_not_refused_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer, batch = build("gru"), a_batch([2, 1])
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(launch, "why_not_now", lambda: "a graph is captured")
    layer(batch)
    assert layer not in plans
    monkeypatch.setattr(launch, "why_not_now", lambda: "")
    layer(batch)
    assert layer in plans


@pytest.mark.filterwarnings("ignore")
def test_a_call_of_another_kind_is_planned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """After another call, a layer chooses a backend or raises as a new layer does."""
    x, ran = torch.randn(2, 3, 3), watch_backends(monkeypatch)
    dense, batch = (lambda layer: layer(x)), rl.Ragged(list(x))
    flat = partial(lambda layer, **options: layer(batch, **options))
    each = rl.use_backend(backend="reference", schedule="each")(flat)
    narrow, half = (torch.autocast("cpu", dtype)(flat) for dtype in (torch.bfloat16, torch.float16))
    for kind, options, first, then in (
        ("lstm", {"backend": "torch"}, flat, dense),
        ("lstm", {"backend": "torch"}, flat, partial(flat, _with_states=True)),
        ("sru", {"checkpoint_every": 2}, torch.no_grad()(flat), flat),
        ("gru", {}, narrow, half),
        ("gru", {}, flat, each),
        ("gru", {}, each, flat),
        ("lstm", {}, dense, lambda layer: torch.jit.trace(layer, (x,))),
    ):
        seen = []
        for calls in ((first, then), (then,)):
            layer: Any = build(kind, dtype=torch.float32, **options)
            for call in calls:
                ran.clear()
                with suppress(DispatchError):
                    call(layer)
            seen.append([*ran])
        assert seen[0] == seen[1], kind


def test_every_kind_of_call_agrees_with_the_reference() -> None:
    """With and without gradients, for all kinds of input and state, and any strides."""
    layer, batch, padded = (
        build("lstm").eval(),
        a_batch([3, 0, 2]),
        torch.randn(4, 2, 3, dtype=torch.float64),
    )
    h, c = (torch.randn(1, 3, 4, dtype=torch.float64) for _ in range(2))
    marks = rl.Ragged.from_flat(torch.tensor([False, True, False, False, True]), lengths=[3, 0, 2])
    calls: list[Callable[[Any], Any]] = [
        lambda layer: layer(batch),
        lambda layer: layer(batch, (h, c)),
        lambda layer: layer(batch, [h, c]),
        lambda layer: layer(batch, (h.transpose(1, 2).contiguous().transpose(1, 2), c)),
        lambda layer: layer(padded),
        lambda layer: layer(padded[:, 0].clone()),
        lambda layer: layer(padded[:, 0].clone(), (h[:, 0], c[:, 0])),
        lambda layer: layer(batch, resets=marks),
        lambda layer: layer(batch, (h, c), resets=marks),
        lambda layer: layer.with_states(batch),
    ]
    layers = [layer, build("lstm", initial_state="learned").eval(), build("lstm", 2).eval()]
    for layer in layers:
        for call in calls[: 1 if layer.num_layers > 1 else None]:
            with rl.use_backend(backend="reference"):
                wanted = results_of(call(layer))
            assert_same(results_of(call(layer)), wanted, 1e-12)
            with torch.no_grad():
                assert_same(results_of(call(layer)), wanted, 1e-12)


@pytest.mark.filterwarnings("ignore:.*nested tensors is in prototype stage")
def test_every_backend_raises_the_same_for_a_wrong_state() -> None:
    lstm, gru = build("lstm"), build("gru")
    batch, single = a_batch([3, 0, 2]), torch.randn(4, 3, dtype=torch.float64)
    nested = torch.nested.nested_tensor([torch.zeros(4, dtype=torch.float64)])
    for layer, given, wrong in (
        (lstm, batch, ()),
        (lstm, single, ()),
        (lstm, single, (torch.zeros(()), torch.zeros(()))),
        (gru, single, torch.zeros((), dtype=torch.float64)),
        (gru, single, torch.zeros(1, 1, 4, dtype=torch.float64)),
        (gru, single, torch.zeros(4, dtype=torch.float64)),
        (gru, single, nested),
        (gru, batch, nested),
    ):
        with rl.use_backend(backend="reference"), pytest.raises(RaglaneError, match="hx") as wanted:
            layer(given, wrong)
        with pytest.raises(type(wanted.value)) as found:
            layer(given, wrong)
        assert str(found.value) == str(wanted.value)


def test_a_replaced_cell() -> None:
    layer, batch = rl.nn.Recurrent(Leaky(3, 4)), a_batch([2, 3])
    layer(batch)
    begun: Any = Leaky(3, 4)
    begun.initial_state = lambda count: torch.ones(count, 4, dtype=torch.float64)
    layer.cells[0] = begun
    assert_same(results_of(layer(batch)), results_of(rl.nn.Recurrent(layer.cells[0])(batch)), 0.0)
    layer.cells.append(Leaky(3, 4))
    with pytest.raises(ArgumentError, match="num_layers, bidirectional"):
        layer(batch)


@pytest.mark.parametrize("backend", [None, "torch"])
def test_weights_are_read_once_per_call(backend: str | None) -> None:
    """A random parametrization is evaluated once per call."""

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            self.calls += 1
            return weight * torch.rand(())

    layer = build("gru", backend=backend or "auto")
    drawn = Drawn()
    nn.utils.parametrize.register_parametrization(layer, "weight_hh_l0", drawn)
    batch = a_batch([3, 2])
    padded, lengths = batch.to_padded(batch_first=False)
    layer(batch)  # plans
    for given, options in (
        (batch, {}),
        (batch.to_packed(), {}),
        (padded, {}),
        (padded, {"lengths": lengths}),
    ):
        drawn.calls = 0
        layer(given, **options)
        assert drawn.calls == 1, type(given)


def test_every_layer_is_tested() -> None:
    made = [getattr(rl.nn, name) for name in rl.nn.__all__]
    layers = {
        each.__name__
        for each in made
        if isinstance(each, type) and issubclass(each, RecurrentLayer)
    }
    # Blocks have cells of their own, which tests/nn/test_mixers.py runs in all these ways.
    blocks = {
        each.__name__ for each in made if isinstance(each, type) and issubclass(each, BlockLayer)
    }
    assert len(blocks) == 5
    assert {kind.layer for kind in KINDS} == layers - blocks - {"CausalConv1d", "Recurrent"}
    assert {kind.cell for kind in KINDS} == set(CELLS)
    assert all(build(kind).cell.name == kind.cell for kind in KINDS)
