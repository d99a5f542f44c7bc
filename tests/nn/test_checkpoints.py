"""``checkpoint_every``: layers that recompute gates in the backward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import LAYERS, a_batch, build, gradients, parts
from own_cells import Leaky
from raglane.errors import ArgumentError
from raglane.native import missing_kernels

needs_kernels = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))


def pair(kind: str = "LSTM", **options: Any) -> tuple[Any, Any]:
    """Build a layer, and a copy without checkpoint_every."""
    torch.manual_seed(0)
    layer = getattr(rl.nn, kind)(5, 7, checkpoint_every=2, **options)
    plain = copy.deepcopy(layer)
    plain.checkpoint_every = None
    return layer, plain


def batch(dtype: torch.dtype = torch.float32) -> rl.Ragged:
    torch.manual_seed(1)
    return rl.Ragged.from_flat(
        torch.randn(15, 5, dtype=dtype).requires_grad_(), lengths=[4, 0, 1, 8, 2]
    )


def trained(layer: Any, given: Any, **options: Any) -> list[Tensor]:
    """Return the outputs, and all gradients of their squares."""
    torch.manual_seed(2)
    out, final = layer(given, **options)
    values = out.values if isinstance(out, rl.Ragged) else out
    loss = torch.stack([part.float().square().sum() for part in (values, *parts(final))]).sum()
    leaf = given.values if isinstance(given, rl.Ragged) else given
    return [values.detach(), *torch.autograd.grad(loss, [leaf, *layer.parameters()])]


@needs_kernels
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_in_every_use_of_a_layer(kind: str) -> None:
    uses: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"num_layers": 2, "bidirectional": True, "dropout": 0.3}, {}),
        ({"weight_dropout": 0.3, "input_dropout": 0.3, "num_layers": 2}, {}),
        ({"initial_state": "learned", "bias": False}, {}),
        ({"bidirectional": True}, {"resets": batch()._like(torch.arange(15) % 3 == 0)}),
        ({"dtype": torch.float64}, {}),
    ]
    for options, call in uses:
        layer, plain = pair(kind, **options)
        given = batch(options.get("dtype", torch.float32))
        assert rl.explain(layer, given).backend == "cpu"
        torch.testing.assert_close(
            trained(layer, given, **call), trained(plain, given, **call), rtol=1e-4, atol=1e-5
        )
    layer, plain = pair(kind)
    padded = torch.randn(6, 3, 5, requires_grad=True)
    for options in ({}, {"lengths": [6, 0, 2]}):
        torch.testing.assert_close(
            trained(layer, padded, **options), trained(plain, padded, **options)
        )
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(
            trained(layer, padded), trained(plain, padded), rtol=0.1, atol=0.1
        )


@pytest.mark.filterwarnings("ignore:The cell .* runs in plain torch:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_gives_the_same_with_it(name: str) -> None:
    """Layers without such a kernel run in plain torch."""
    layer, given = build(name, 2, bidirectional=True), a_batch()
    wanted = [given.values, *layer.parameters()]
    found = []
    for every in (None, 2):
        layer.checkpoint_every = every
        out, _ = layer(given)
        found.append([out.values, *gradients([out.values], wanted)])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)
    torch.no_grad()([*layer.parameters()][1].zero_)()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.values.sum().backward()
    assert str(rl.explain(layer, given)).endswith(
        "; backward recomputes the gates, 2 steps at a time"
    )
    assert rl.explain(layer, given).backend in ("cpu", "reference")


@needs_kernels
def test_explain_and_warnings() -> None:
    layer, _ = pair("GRU")
    assert rl.explain(layer, batch()).backend == "cpu"

    class Fresh(Leaky):
        """A cell without an earlier warning."""

    other: Any = rl.nn.Recurrent(Fresh, 5, 7, checkpoint_every=3)
    with pytest.warns(
        UserWarning,
        match=r"runs in plain torch, step by step: checkpoint_every has kernels for RNN",
    ):
        other(batch(torch.float64))
    other = rl.nn.MinGRU(5, 7, checkpoint_every=3)
    choice = rl.explain(other, batch())
    assert choice.backend == "reference"
    for words in (
        "the cpu kernels do not recompute gates of the cell 'mingru'",
        "programs save all that backward needs",
        "torch has no kernel for the cell 'mingru'",
        "3 steps at a time",
    ):
        assert words in choice.reason
    with torch.no_grad():  # without a backward pass, the layer is one without checkpoints
        assert rl.explain(other, batch()).backend == "cpu"
        output = other(batch())[0].values
        other.checkpoint_every = None
        assert torch.equal(output, other(batch())[0].values)
    with pytest.raises(rl.errors.DispatchError, match="torch's kernels do not recompute"):
        rl.nn.LSTM(5, 7, checkpoint_every=3, backend="torch")(batch())


@needs_kernels
def test_compiled_and_transformed() -> None:
    layer, plain = pair(bidirectional=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(trained(compiled, batch()), trained(plain, batch()))

    def loss(values: Tensor, of: Any = layer) -> Tensor:
        out: rl.Ragged = of(rl.Ragged.from_flat(values, lengths=[4, 0, 1, 8, 2]))[0]
        return out.values.square().sum()

    values = batch().values.detach()
    torch.testing.assert_close(torch.func.grad(loss)(values), torch.func.grad(loss)(values, plain))


@needs_kernels
def test_accelerate() -> None:
    model: Any = nn.Sequential(nn.Linear(5, 5), nn.LSTM(5, 7), rl.nn.GRU(7, 7))
    rl.accelerate(model, checkpoint_every=3)
    assert [each.checkpoint_every for each in model[1:]] == [3, 3]
    given = torch.randn(6, 2, 5, requires_grad=True)
    assert "3 steps at a time" in rl.explain(model[1], given).reason
    trained(model[1], given)
    assert [each.checkpoint_every for each in rl.accelerate(model)[1:]] == [3, 3]
    assert not hasattr(rl.to_torch(model)[1], "checkpoint_every")
    with pytest.raises(ArgumentError, match=r"checkpoint_every must be .*got 0"):
        rl.accelerate(nn.Sequential(nn.LSTM(5, 7)), checkpoint_every=0)


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "8", True, 1 << 40])
def test_wrong_numbers_of_steps(wrong: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"checkpoint_every must be (a whole number|at most).*, got .*"
    ):
        rl.nn.LSTM(5, 7, checkpoint_every=wrong)
    layer = rl.nn.LSTM(5, 7)
    layer(batch())  # the cached plan must not be used after the change
    layer.checkpoint_every = wrong
    with pytest.raises(ArgumentError, match=r"checkpoint_every must be .*got "):
        layer(batch())


@needs_kernels
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize("both", [False, True])
def test_derivatives_of_all_states(both: bool, size: int, every: int | None) -> None:
    """Second derivatives and batched gradients of the states of every step."""
    layer: Any = rl.nn.LSTM(
        3, 4, proj_size=size, bidirectional=both, dtype=torch.float64, checkpoint_every=every
    )
    plain = copy.deepcopy(layer)
    layer.backend, plain.backend, plain.checkpoint_every = "cpu", "reference", None
    values = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for each in (layer, plain):
        *_, states = each.with_states(rl.Ragged.from_flat(values, lengths=[1, 0, 3]))
        c, wanted = states[0][1].values, [values, *each.parameters()]
        (grad,) = torch.autograd.grad(c.sin().sum(), values, create_graph=True)
        second = torch.autograd.grad(grad.square().sum(), wanted, retain_graph=True)
        pushed = torch.stack([torch.ones_like(c), 2 * torch.ones_like(c)])
        found.append([*second, *torch.autograd.grad(c, values, pushed, is_grads_batched=True)])
    torch.testing.assert_close(found[0], found[1])
