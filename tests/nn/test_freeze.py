"""A frozen layer gives the same bits from packed weights, until a change of the weights is seen."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import KINDS, D, H, a_batch, build
from looped import looped
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError
from raglane.kernels.cpu.layer import layer_of
from raglane.native import missing_kernels
from raglane.native.library import has_cell

if missing := missing_kernels():
    pytest.skip(missing, allow_module_level=True)

FAST = [kind for kind in KINDS if has_cell(kind.cell)]
NAMES = [kind.cell for kind in FAST] + ["lstm projected"]


def numbers(result: Any) -> list[Tensor]:
    """Output and states, flat."""
    output, state = result
    values = output.values if isinstance(output, rl.Ragged) else output
    return [values, *(state if isinstance(state, tuple) else (state,))]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(numbers(one), numbers(other), strict=True))


@torch.no_grad()
def forget(layer: Any) -> None:
    """Change all weights where PyTorch keeps no record of it, so that only what was packed remembers them."""
    for weight in layer.parameters():
        weight.data.fill_(7.0)


@looped("name", NAMES)
def test_a_frozen_layer_gives_the_same_bits_without_its_weights(name: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for options in ({}, {"num_layers": 2, "bidirectional": True}, {"bias": False}):
            layer = build(name, units=21, **options).to(dtype).eval()
            batch = a_batch([4, 0, 1, 7], dtype)
            with torch.no_grad():
                wanted = layer(batch)
                rl.freeze(layer)
                forget(layer)
                assert same(layer(batch), wanted)


def test_steps_of_a_frozen_layer() -> None:
    layer = build("lstm", 2).eval()
    with torch.inference_mode():
        x = torch.randn(5, D, dtype=torch.float64)
        first = layer.step(x)
        second = layer.step(x, first[1])
        rl.freeze(layer)
        forget(layer)
        again = layer.step(x)
        assert same(again, first)
        assert same(layer.step(x, again[1]), second)


def in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.weight_hh_l0[0, 0] += 1


def by_optimizer(layer: Any) -> None:
    layer(a_batch())[0].values.sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()


def by_a_fused_optimizer(layer: Any) -> None:
    layer(a_batch())[0].values.sum().backward()
    torch.optim.Adam(layer.parameters(), 0.1, fused=True).step()


def turned(weight: torch.Tensor) -> torch.Tensor:
    """The same memory, in which what stands in other rows is read as a weight of the same shape."""
    return weight.as_strided(weight.shape, (1, weight.shape[0]))


@looped(
    "change",
    [
        in_place,
        by_optimizer,
        by_a_fused_optimizer,
        lambda layer: layer.load_state_dict(build("lstm", 2).state_dict()),
        lambda layer: setattr(layer.weight_ih_l1, "data", torch.ones_like(layer.weight_ih_l1)),
        lambda layer: setattr(layer, "bias_hh_l0", nn.Parameter(torch.ones_like(layer.bias_hh_l0))),
        lambda layer: layer.float().double(),
        lambda layer: setattr(layer.weight_hh_l0, "data", turned(layer.weight_hh_l0.data)),
        lambda layer: setattr(layer.weight_hh_l0, "data", torch._neg_view(layer.weight_hh_l0.data)),
        lambda layer: nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0"),
    ],
)
def test_a_change_that_is_seen_ends_it(change: Callable[[Any], Any]) -> None:
    layer = rl.freeze(build("lstm", 2).eval())
    batch = a_batch()
    with torch.no_grad():
        layer(batch)
    change(layer)
    with torch.no_grad():
        wanted = copy.deepcopy(layer)(batch)
        assert same(layer(batch), wanted)


def test_torchs_default_device_is_none_of_a_layers_own() -> None:
    layer, batch = build("lstm").eval(), a_batch()
    with torch.no_grad():
        wanted = layer(batch)
        with torch.device("meta"):
            rl.freeze(layer)
        forget(layer)
        assert same(layer(batch), wanted)


def test_no_other_weights_come_to_lie_where_packed_ones_were() -> None:
    class Memory(bytearray):
        """Which can be watched."""

    layer, memory = build("gru").eval(), Memory(8 * 3 * H)
    watched = weakref.ref(memory)
    layer.bias_hh_l0.data = torch.frombuffer(memory, dtype=torch.float64)
    del memory
    rl.freeze(layer)
    layer.bias_hh_l0.data = torch.ones(3 * H, dtype=torch.float64)
    assert watched() is not None
    batch = a_batch()
    with torch.no_grad():
        assert same(layer(batch), copy.deepcopy(layer)(batch))
    assert watched() is None  # the change was seen


def test_explain_says_whether_a_layer_is_frozen() -> None:
    layer, batch = build("gru").eval(), a_batch()
    plain = rl.explain(layer, batch).reason
    assert "frozen" not in plain
    rl.freeze(layer)
    assert rl.explain(layer, batch).reason == f"{plain}; frozen: its weights are packed already"
    in_place(layer)
    assert rl.explain(layer, batch).reason == f"{plain}; no longer frozen: its weights have changed"


def test_weights_of_one_call_do_not_end_it() -> None:
    layer = rl.freeze(build("gru").eval())
    batch, other = a_batch(), build("gru").eval()
    with torch.no_grad():
        wanted = layer(batch)
        found = torch.func.functional_call(layer, dict(other.named_parameters()), (batch,))
        assert same(found, other(batch))
        forget(layer)
        assert same(layer(batch), wanted)


def test_gradients_are_of_the_weights_as_they_are() -> None:
    layer, batch = rl.freeze(build("lstm").eval()), a_batch()
    forget(layer)
    new = build("lstm").eval()
    forget(new)
    for each in (layer, new):
        each(batch)[0].values.square().sum().backward()
    for mine, theirs in zip(layer.parameters(), new.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_what_casts_or_compiles_reads_the_weights_themselves() -> None:
    layer = rl.nn.LSTM(D, H).eval()
    batch = a_batch(dtype=torch.float32).detach()
    rl.freeze(layer)
    forget(layer)
    new = rl.nn.LSTM(D, H).eval()
    forget(new)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert same(layer(batch), new(batch))
    with torch.no_grad():
        assert same(torch.compile(layer, backend="eager")(batch), new(batch))


def test_copies_have_weights_of_their_own() -> None:
    layer, batch = rl.freeze(build("sru").eval()), a_batch()
    with torch.no_grad():
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            forget(twin)
            assert not same(twin(batch), layer(batch))
            assert "frozen" not in rl.explain(twin, batch).reason


def test_freezing_again_packs_what_is_there_now() -> None:
    layer, batch = rl.freeze(build("mingru").eval()), a_batch()
    forget(layer)
    new = build("mingru").eval()
    forget(new)
    with torch.no_grad():
        assert not same(layer(batch), new(batch))
        assert same(rl.freeze(layer)(batch), new(batch))


def test_what_cannot_be_frozen() -> None:
    with pytest.raises(ArgumentTypeError, match=r"model must be .*got list"):
        rl.freeze([])  # type: ignore[type-var]
    with pytest.raises(DispatchError, match=r"no recurrent layer of rl\.nn"):
        rl.freeze(nn.Linear(2, 2))
    with pytest.raises(DispatchError, match=r"backend (program|reference) runs it"):
        rl.freeze(build("layernorm_gru"))
    with pytest.raises(DispatchError, match="anew in each call"):
        rl.freeze(nn.utils.parametrizations.weight_norm(build("gru"), "weight_hh_l0"))
    with torch.inference_mode():
        made = build("gru")
    with pytest.raises(DispatchError, match="inference_mode"):
        rl.freeze(made)
    # One that can is enough; the others stay as they are.
    model = rl.freeze(nn.Sequential(build("gru"), build("layernorm_gru")))
    assert "frozen" in rl.explain(model[0], a_batch()).reason
    assert "frozen" not in rl.explain(model[1], a_batch()).reason


def test_accelerated_layers_can_be_frozen() -> None:
    layer = rl.freeze(rl.accelerate(nn.LSTM(D, H).eval()))
    x = torch.randn(4, 2, D)
    with torch.no_grad():
        wanted = layer(x)
        forget(layer)
        assert same(layer(x), wanted)


def test_packed_weights_of_another_layer_are_refused() -> None:
    def of(name: str, **options: Any) -> tuple[Any, tuple[Any, ...]]:
        layer = build(name, **options)
        weights = tuple(part for own in layer._weights() for part in own)
        tensors = (a_batch().values.detach(), *weights)
        directions = 2 if layer.bidirectional else 1
        return layer_of(name, a_batch().offsets, tensors, len(weights), layer.state_sizes, directions), tensors

    mine, tensors = of("lstm")
    packed = mine.packed(tensors[1:])
    for name, options in (("lstm", {"units": 5}), ("lstm", {"bidirectional": True}), ("gru", {})):
        other, others = of(name, **options)
        admitted = other.admit(a_batch().offsets, others)
        with pytest.raises(ArgumentError, match="packed: got weights of another layer"):
            other.forward(admitted, need_output=True, save=False, need_c=False, packed=packed)
    moved = torch.empty(packed.numel() + 64, dtype=torch.uint8)[8:][: packed.numel()].copy_(packed)
    admitted = mine.admit(a_batch().offsets, tensors)
    with pytest.raises(ArgumentError, match="64-byte aligned"):
        mine.forward(admitted, need_output=True, save=False, need_c=False, packed=moved)


def test_threads_share_what_is_packed() -> None:
    layer, batch = rl.freeze(build("lstm", 2).eval()), a_batch()
    with torch.no_grad():
        wanted = layer(batch)
    found: list[Any] = []

    def call() -> None:
        with torch.no_grad():
            found.extend(layer(batch) for _ in range(20))

    threads = [Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(same(result, wanted) for result in found)
