"""The cpu kernels within PyTorch: autograd, torch.compile, threads, processes, and failures as
exceptions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch import config as functorch
from torch.autograd import forward_ad
from torch.utils.data import DataLoader

import raglane as rl
from cell_requests import squares
from cpu_networks import (
    KERNEL_CELLS,
    LIBRARY,
    NO_TEAM,
    Encoded,
    Network,
    Use,
    assert_close,
    assert_same_bits,
    leaf_if,
    make,
    with_gradients,
)
from processes import CONTEXT
from raglane.kernels import reference
from raglane.kernels import torch as torch_kernels
from raglane.kernels.contract import Backend
from raglane.kernels.cpu import layer_operator
from raglane.kernels.cpu.backend import BACKEND
from raglane.kernels.cpu.layer import layer_of
from raglane.native.library import call, preamble
from raglane.segments import offsets_from_lengths
from scripts import Script


@pytest.mark.parametrize("cell", KERNEL_CELLS)
def test_second_derivatives(cell: str) -> None:
    def penalty(backend: Backend, network: Network) -> list[Tensor]:
        network = network.map(lambda t: t.clone().requires_grad_())
        results = network.run(backend, need_states=True)
        grads = torch.autograd.grad(squares(results), network.tensors(), create_graph=True)
        return list(torch.autograd.grad(squares(grads), network.tensors()))

    network = make(cell, [3, 0, 2], (2, 3, 0), directions=2)
    assert_close(penalty(BACKEND, network), penalty(reference.BACKEND, network), 1e-10)


@pytest.mark.parametrize("cell", KERNEL_CELLS)
def test_backward_twice_through_a_kept_graph(cell: str) -> None:
    network = make(cell, [3, 0, 5]).map(lambda t: t.clone().requires_grad_())
    results = network.run(BACKEND, need_states=True)
    before = [part.detach().clone() for part in results]
    first = torch.autograd.grad(squares(results), network.tensors(), retain_graph=True)
    assert_same_bits(list(torch.autograd.grad(squares(results), network.tensors())), list(first))
    assert_same_bits([part.detach() for part in results], before)


@pytest.mark.parametrize("cell", KERNEL_CELLS)
def test_some_gradients_only(cell: str) -> None:
    network = make(cell, [3, 0, 5], directions=2)
    for tensor in network.tensors():
        found = []
        for backend in (BACKEND, reference.BACKEND):
            copy = network.map(partial(leaf_if, tensor))
            (leaf,) = (t for t in copy.tensors() if t.requires_grad)
            results = [part for part in copy.run(backend) if part.requires_grad]
            found.append([torch.autograd.grad(squares(results), leaf)[0]])
        assert_close(found[0], found[1], 1e-11)


def test_operators_are_what_torch_expects() -> None:
    network = make("lstm", [3, 0, 2], (2, 3, 0)).map(lambda t: t.clone().requires_grad_())
    (weights,) = network.weights
    arguments = (
        "lstm",
        network.values,
        offsets_from_lengths(network.lengths),
        *network.state,
        *weights,
        *[None] * 5,
    )
    torch.library.opcheck(
        layer_operator.recurrence,
        (*arguments, True, True, False, 0),
        test_utils=["test_schema", "test_faketensor"],
    )


def test_dead_wrappers_of_torch_func() -> None:
    """A tensor that a transformation wrapped is one like any other when the transformation is
    over.
    """
    layer, values = rl.nn.LSTM(5, 7, backend="cpu"), torch.randn(4, 5)
    left: list[Tensor] = []

    def leave(given: Tensor) -> Tensor:
        left.append(given)
        return given.sum()

    torch.func.grad(leave)(values.requires_grad_())
    for requires_grad in (False, True):
        layer.requires_grad_(requires_grad)
        found = layer(rl.Ragged.from_flat(left[0], lengths=[3, 1]))[0].values
        wanted = layer(rl.Ragged.from_flat(values, lengths=[3, 1]))[0].values
        assert torch.equal(found, wanted)
        assert torch.equal(*[torch.autograd.grad(out.sum(), values)[0] for out in (found, wanted)])


def test_one_openmp_runtime() -> None:
    with open("/proc/self/maps") as maps:
        runtimes = {
            line.split()[-1]
            for line in maps
            if "libgomp" in line or "libiomp" in line or "libomp" in line
        }
    # Packages such as scikit-learn bring a private one, under another name.
    shared = {path for path in runtimes if ".libs/" not in path}
    assert len(shared) == 1, runtimes


@pytest.mark.usefixtures("two_threads")
def test_several_python_threads_at_once(use: Use) -> None:
    use(flags=NO_TEAM)
    network = make("gru", [30, 2, 9, 9], (8, 40, 0), directions=2).map(Tensor.float)
    wanted, found = with_gradients(network, BACKEND), []
    threads = [
        Thread(target=lambda: found.append(with_gradients(network, BACKEND))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for results in found:
        assert_same_bits(results, wanted)


# One that is spawned takes seconds to import torch; one of this server gets the layer in the same
# way, pickled.
@pytest.mark.parametrize(("start", "workers"), [("fork", 2), (CONTEXT, 1)], ids=["fork", "server"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.usefixtures("two_threads")
def test_workers_of_a_data_loader(start: Any, workers: int) -> None:
    data = Encoded(
        rl.nn.GRU(8, 40, backend="cpu"), [torch.randn(length, 8) for length in (30, 1, 9, 12)]
    )
    here = [
        data[index] for index in range(len(data))
    ]  # the kernels' threads run before the workers start
    assert_same_bits(
        list(DataLoader(data, batch_size=None, num_workers=workers, multiprocessing_context=start)),
        here,
    )


def test_a_process_reads_the_environment_before_it_loads_the_kernels(script: Script) -> None:
    """And a wrong word there is named at the first call."""
    code = (
        "import os; from raglane.native.library import library; print(library().isa); library.cache_clear();"
        "os.environ[{name!r}] = 'mmx'; library()"
    )
    for name in ("RAGLANE_ISA", "RAGLANE_THREADS"):
        done = script(code.format(name=name), RAGLANE_ISA=LIBRARY.isas[-1])
        assert done.stdout == f"{LIBRARY.isas[-1]}\n", done.stderr
        assert f"{name} must be" in done.stderr
        assert ", got 'mmx'" in done.stderr


def test_too_little_memory_is_an_exception() -> None:
    """Scratch is reserved before any memory is read, so the tensors need not have the sizes of the
    call.
    """
    network = make("lstm", [3, 2])
    (weights,) = network.weights
    offsets = offsets_from_lengths(network.lengths)
    tensors = (network.values, *network.state, *weights)
    layer = layer_of("lstm", offsets, tensors, len(weights), (17, 17), 1)
    *_, addresses, _storages = layer.admit(offsets, tensors)
    some = network.values.data_ptr()
    whole = LIBRARY.structs["raglane_layer"].formats
    fields = dict.fromkeys(whole, 0)
    head = *preamble(layer.number, layer.dtype), 1, 2, 5
    # No slots; then D, H, no projection, the row length of the gates, no checkpoints.
    fields |= dict(zip(fields, (*head, 0, 1 << 22, 1 << 22, 0, 1 << 24, 0), strict=False))
    inputs = "offsets", "values", "initial_h", "initial_c"
    given = (*inputs, *(name for name in fields if name.startswith("weights[0]")))
    fields |= dict(zip(given, addresses, strict=False)) | dict.fromkeys(
        ("output", "final_h", "final_c"), some
    )
    with pytest.raises(MemoryError, match="not enough memory for the kernel's scratch"):
        call("raglane_forward", struct.pack("=" + "".join(whole.values()), *fields.values()))


Change = Callable[[Tensor], Tensor]


def tangents_of(
    run: Callable[[Change], list[Tensor]], tensor: Tensor, direction: Tensor
) -> list[Tensor | None]:
    """Return the tangents of results if only ``tensor`` has one."""
    with forward_ad.dual_level():
        duals = run(lambda part: forward_ad.make_dual(part, direction) if part is tensor else part)
        found = [forward_ad.unpack_dual(part).tangent for part in duals]
        return [None if part is None else part.clone() for part in found]


@pytest.mark.filterwarnings(
    "ignore:`torch.jit:DeprecationWarning"
)  # torch's own, when the first dual tensor is made
@pytest.mark.parametrize("backend", [BACKEND, torch_kernels.BACKEND])
@pytest.mark.parametrize("trained", [False, True])
def test_derivatives_forward_in_any_tensor(backend: Backend, trained: bool) -> None:
    """In one weight or state, with an input without a tangent."""
    network = make("lstm", [3, 0, 2], (3, 4, 0), layers=2).map(
        lambda t: t.clone().requires_grad_(trained)
    )
    schedule = backend.schedules[0]

    def run(change: Change) -> list[Tensor]:
        result = backend.run(network.map(change).request(), schedule)
        return [part for part in (result.output, *result.state) if part is not None]

    for place, tensor in enumerate(network.tensors()):
        direction, epsilon = torch.randn_like(tensor), 1e-6
        steps = [{id(tensor): tensor.detach() + sign * epsilon * direction} for sign in (1, -1)]
        ends = [
            run(partial(lambda moved, part: moved.get(id(part), part), moved)) for moved in steps
        ]
        slope = [(a - b).detach() / (2 * epsilon) for a, b in zip(*ends, strict=True)]
        tangents = tangents_of(run, tensor, direction)
        found = [
            torch.zeros_like(s) if t is None else t for t, s in zip(tangents, slope, strict=True)
        ]
        assert any(bool(part.any()) for part in found), place
        assert_close(found, slope, 1e-7)


@pytest.mark.parametrize("kind", ["LSTM", "SRU"])
def test_a_compiled_layer_goes_backward_twice_through_a_kept_graph(kind: str) -> None:
    """Saved tensors must still exist in the second pass, which torch allows only without donated
    buffers.
    """
    layer = getattr(rl.nn, kind)(5, 7, bidirectional=True, backend="cpu", dtype=torch.float64)
    values = torch.randn(9, 5, dtype=torch.float64, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    found = []
    with functorch.patch(donated_buffer=False):
        for network in (layer, compiled):
            out, _ = network(rl.Ragged.from_flat(values, lengths=[4, 0, 5]))
            loss, leaves = out.values.square().sum(), [values, *layer.parameters()]
            found += [torch.autograd.grad(loss, leaves, retain_graph=True) for _ in range(2)]
            found.append(torch.autograd.grad(loss, leaves))
    for again in found[1:]:
        assert_close(list(again), list(found[0]), 1e-12)
    assert_same_bits(list(found[3]), list(found[4]))
    assert_same_bits(list(found[3]), list(found[5]))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_derivatives_forward_where_torch_has_no_rule() -> None:
    """In float32, torch's kernel for padded tensors is oneDNN's, which has none."""
    network = make("lstm", [3, 3], (3, 4, 0)).map(Tensor.float)

    def run(backend: Backend, change: Change) -> list[Tensor]:
        output = backend.run(network.map(change).request(), "padded").output
        assert output is not None
        return [output]

    for tensor in network.tensors():
        direction = torch.randn_like(tensor)
        found = [
            tangents_of(partial(run, by), tensor, direction)[0]
            for by in (torch_kernels.BACKEND, reference.BACKEND)
        ]
        torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
