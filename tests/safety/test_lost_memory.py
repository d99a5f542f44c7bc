"""Tensors without memory, and tensors that lose their memory during a call."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

import raglane as rl
from raglane.errors import RaglaneError, ShapeError
from raglane.kernels.cpu import programs, transduction
from raglane.native import library, missing_kernels
from raglane.programs.program import Block, Instruction, Operand, Program
from raglane.serve import Engine

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))


class Wrapped(Tensor):
    """A wrapper of another tensor, as quantized and distributed tensors are."""

    of: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Tensor) -> None:
        self.of = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        given = tree_map(
            lambda part: part.of if isinstance(part, Wrapped) else part, (args, kwargs or {})
        )
        found = func(*given[0], **given[1])
        return tree_map(lambda part: Wrapped(part) if isinstance(part, Tensor) else part, found)


@pytest.mark.parametrize("kind", [rl.nn.GRU, rl.nn.SRU])
def test_a_tensor_without_memory_is_refused(kind: Callable[..., Any]) -> None:
    """Its null address would mean a missing bias or state, and give wrong results without an
    error.
    """
    layer = kind(3, 4)
    given = rl.Ragged.from_flat(torch.randn(5, 3), lengths=[3, 0, 2])
    out, final = layer(given)
    state = final if isinstance(final, tuple) else (final,)
    weights = {name: part.detach() for name, part in layer.named_parameters()}
    calls: dict[str, Callable[[], Any]] = {
        name: lambda name=name: torch.func.functional_call(
            layer, {**weights, name: Wrapped(weights[name])}, (given,)
        )  # type: ignore[misc]
        for name in weights
    }
    calls["input"] = lambda: layer(rl.Ragged._make(Wrapped(given.values), given.offsets, None))
    calls["offsets"] = lambda: layer(rl.Ragged._make(given.values, Wrapped(given.offsets), None))
    wrapped = tuple(Wrapped(part.detach()) for part in state)
    calls["hx"] = lambda: layer(given, wrapped if len(state) > 1 else wrapped[0])
    calls["gradient"] = lambda: torch.autograd.grad(
        out.values, layer.weight_ih_l0, Wrapped(torch.ones(5, 4))
    )
    for name, call in calls.items():
        for grad in (True, False):
            if name == "gradient" and not grad:
                continue
            with torch.set_grad_enabled(grad), pytest.raises(RaglaneError, match="without storage"):
                call()


def test_zeros_without_memory() -> None:
    layer, given = rl.nn.LSTM(3, 4), torch.randn(1, 5, 3)
    nothing = torch._efficientzerotensor((1, 5, 4))
    found, wanted = (layer(given, (state, state))[0] for state in (nothing, torch.zeros(1, 5, 4)))
    assert found.equal(wanted)
    weights = {**layer.state_dict(), "weight_hh_l0": torch._efficientzerotensor((16, 4))}
    found, _ = torch.func.functional_call(layer, weights, (given,))
    with torch.no_grad():
        nn.init.zeros_(layer.get_parameter("weight_hh_l0"))
    assert found.equal(layer(given)[0])


class Memory(bytearray):
    """A bytearray that supports weak references."""


@pytest.mark.parametrize("grad", [False, True])
def test_memory_that_another_thread_frees_lives_until_the_call_ends(
    grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's ``.to()`` in another thread replaces the memory of weights while C reads them."""
    monkeypatch.setattr(library, "operators", lambda: None)
    layer, given = rl.nn.GRU(3, 4), rl.Ragged.from_flat(torch.randn(5, 3), lengths=[3, 0, 2])
    wanted = layer(given)[0].values
    plain, lived = library.answer, []

    def answer(*arguments: Any) -> Any:
        replace_weights(layer)
        lived.append([memory() is not None for memory in watched])
        return plain(*arguments)

    monkeypatch.setattr(library, "answer", answer)
    watched = watched_weights(layer)
    with torch.set_grad_enabled(grad):
        out = layer(given)[0].values
    assert out.equal(wanted)
    if grad:
        watched = watched_weights(layer)
        out.sum().backward()
    assert lived == [[True] * 4] * (1 + grad)
    assert not any(memory() is not None for memory in watched)


@pytest.mark.skipif(
    library.operators() is None, reason="raglane was installed without torch's operators"
)
@pytest.mark.parametrize(("operator", "name"), [(0, "cpu"), (2, "program")])
def test_so_does_what_an_operator_reads(
    operator: int, name: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, given = (
        rl.nn.GRU(3, 16, backend=name),
        rl.Ragged.from_flat(torch.randn(10**6, 3), lengths=[10**6]),
    )
    layer(given[:1].truncate(2))  # a program is compared with torch before its first use
    watched, finite, begun = watched_weights(layer), [], threading.Event()
    loaded = library.operators()
    assert loaded is not None
    operators = [*loaded]
    real = operators[operator]

    def announced(*arguments: Any) -> Any:
        begun.set()
        return real(*arguments)

    operators[operator] = announced
    monkeypatch.setattr(library, "operators", lambda: library.Operators(*operators))
    reader = threading.Thread(
        target=lambda: finite.append(bool(layer(given)[0].values.isfinite().all()))
    )
    reader.start()
    begun.wait()
    time.sleep(0.02)  # the operator then runs for ten times as long
    replace_weights(layer)
    lived = [memory() is not None for memory in watched]
    assert reader.is_alive()
    reader.join()
    assert finite == [True]
    assert lived == [True] * 4
    assert not any(memory() is not None for memory in watched)


def replace_weights(layer: nn.Module) -> None:
    for part in layer.parameters():
        part.data = part.data.clone()


def watched_weights(layer: nn.Module) -> list[weakref.ref[Memory]]:
    """Give each weight memory of its own; return references to the memory."""
    made = []
    for part in layer.parameters():
        memory = Memory(part.numel() * 4)
        there = torch.frombuffer(memory, dtype=torch.float32).view_as(part)
        part.data = there.copy_(part.detach())
        made.append(weakref.ref(memory))
    return made


def test_so_does_what_a_program_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "operators", lambda: None)
    blocks = Block("element", 1), Block("state", 1), Block("local", 1)
    add = Instruction("add", (Operand(2),), (Operand(0), Operand(1)), width=1)
    sums = Program(blocks, (), (add,), ((Operand(2), 1),), (Operand(2),))
    memory = Memory(12)
    watched = weakref.ref(memory)
    given = nn.Parameter(torch.frombuffer(memory, dtype=torch.float32).view(3, 1).fill_(1.0))
    del memory
    plain, lived = library.call, []

    def call(*arguments: Any) -> None:
        given.data = torch.zeros(3, 1)
        lived.append(watched() is not None)
        plain(*arguments)

    monkeypatch.setattr(programs, "call", call)
    with torch.no_grad():
        outputs, _ = programs.run(
            sums, offsets=torch.tensor([0, 3]), elements=[given], states=[torch.zeros(1, 1)]
        )
    assert outputs[0].flatten().tolist() == [1.0, 2.0, 3.0]
    assert lived == [True]
    assert watched() is None


def shrunk(tensor: Tensor, size: int) -> Tensor:
    """Return a copy whose storage has fewer bytes than its shape."""
    copy = tensor.clone()
    copy.untyped_storage().resize_(size)
    return copy


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [0, 3])
def test_frames_without_memory(dtype: torch.dtype, size: int) -> None:
    engine = Engine(rl.nn.LSTM(3, 4, dtype=dtype).eval(), max_streams=4)
    streams = [engine.open(), engine.open()]
    values, offsets = torch.randn(7, 3, dtype=dtype), torch.tensor([0, 4, 7])
    frames = torch.randn(2, 3, dtype=dtype)
    for run in (
        lambda: streams[0].push(shrunk(frames, size)),
        lambda: engine.push(streams, shrunk(frames, size)),
        lambda: engine.run(rl.Ragged._make(shrunk(values, size), offsets, None)),
    ):
        with pytest.raises(ShapeError, match=f"frames must be .* got a storage of {size} bytes"):
            run()
    with pytest.raises(ShapeError, match=f"offsets must be .* got a storage of {size} bytes"):
        engine.run(rl.Ragged._make(values, shrunk(offsets, size), None))
    streams[0].push(frames)
    assert streams[0].queued == 2


def test_packs_and_lengths_without_memory() -> None:
    packing = rl.packing
    padded, lengths = torch.randn(4, 3, 2), torch.tensor([1, 4, 2])
    packed = packing.pack_padded_sequence(padded, lengths, enforce_sorted=False)
    calls: list[Callable[[], Any]] = [
        lambda: packing.pack_padded_sequence(shrunk(padded, 0), lengths, enforce_sorted=False),
        lambda: packing.pack_padded_sequence(padded, shrunk(lengths, 0), enforce_sorted=False),
        lambda: packing.unpad_sequence(padded, shrunk(lengths, 0)),
        lambda: packing.invert_permutation(shrunk(torch.tensor([0, 2, 1]), 0)),
        lambda: rl.Ragged.from_padded(padded, shrunk(lengths, 0), batch_first=False),
        lambda: rl.Ragged.from_padded(shrunk(padded, 0), lengths, batch_first=False),
        lambda: rl.Ragged.from_flat(torch.randn(7, 2), lengths=shrunk(lengths, 0)),
        lambda: rl.Ragged.from_flat(torch.randn(7, 2), offsets=shrunk(torch.tensor([0, 7]), 0)),
    ]
    for name in ("data", "batch_sizes", "sorted_indices"):
        other = packed._replace(**{name: shrunk(getattr(packed, name), 0)})
        functions = packing.pad_packed_sequence, packing.unpack_sequence, rl.Ragged.from_packed
        calls += [partial(function, other) for function in functions]
    for call in calls:
        with pytest.raises(ShapeError, match="got a storage of 0 bytes"):
            call()


def test_soft_dtw_of_offsets_without_memory() -> None:
    costs, offsets = torch.zeros(6, dtype=torch.float64), torch.tensor([0, 2])
    with pytest.raises(ShapeError, match=r"offsets must be .* got a storage of 0 bytes"):
        transduction.soft_dtw(costs, shrunk(offsets, 0), torch.tensor([0, 3]), 1.0)
