"""The cpu kernels against the reference in float64, on every instruction set here, and what they promise in bits."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from threading import Thread

import numpy as np
import pytest
import torch
from torch import Tensor

import raglane as rl
from raglane.cells import CELLS
from raglane.cells.spec import CellSpec, Weights
from raglane.errors import ArgumentError
from raglane.kernels import reference
from raglane.kernels.contract import Backend, Request
from raglane.kernels.cpu import BACKEND, missing_kernels
from raglane.kernels.cpu.library import Library, library
from raglane.segments import offsets_from_lengths

if missing := missing_kernels():
    pytest.skip(missing, allow_module_level=True)
_LIBRARY = library()

FOLD, PREPARE, TEAM, NO_TEAM, POISON = 2, 4, 8, 16, 1
DIVISIONS = {"fold": FOLD | NO_TEAM, "prepare": PREPARE | NO_TEAM, "team": PREPARE | TEAM, "team-fold": FOLD | TEAM}
LENGTHS = {
    "mixed": [3, 0, 1, 7, 2],
    "equal": [5] * 4,
    "one long": [25] + [2] * 29,
    "all empty": [0, 0],
    "none": [],
    "one": [1],
}
# (D, H, P): no multiples of any vector's width, and some that are.
SIZES = [(3, 1, 0), (5, 17, 0), (1, 3, 0), (4, 33, 0), (7, 100, 0), (16, 64, 0), (5, 17, 6), (3, 8, 40)]
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 0.1}


@dataclass(frozen=True)
class Network:
    """A network and a batch, in float64."""

    cell: CellSpec
    values: Tensor
    lengths: Tensor
    state: tuple[Tensor, ...]
    weights: tuple[Weights, ...]
    layers: int
    directions: int

    def map(self, f: Callable[[Tensor], Tensor]) -> Network:
        weights = tuple(Weights(*(None if p is None else f(p) for p in w)) for w in self.weights)  # type: ignore[arg-type]
        return replace(self, values=f(self.values), state=tuple(f(s) for s in self.state), weights=weights)

    def tensors(self) -> list[Tensor]:
        return [self.values, *self.state, *(p for w in self.weights for p in w if p is not None)]

    def run(self, backend: Backend, need_output: bool = True) -> list[Tensor]:
        offsets = offsets_from_lengths(self.lengths)
        request = Request(
            self.cell,
            self.values,
            offsets,
            self.lengths,
            self.state,
            self.weights,
            layers=self.layers,
            directions=self.directions,
            need_output=need_output,
        )
        result = backend.run(request, "lanes")
        return [part for part in (result.output, *result.state) if part is not None]


def make(
    cell: str,
    lengths: list[int],
    sizes: tuple[int, int, int] = (5, 17, 0),
    layers: int = 1,
    directions: int = 1,
    bias: bool = True,
) -> Network:
    spec, (features, hidden, projection) = CELLS[cell], sizes

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64) / math.sqrt(shape[-1])

    width, gates = projection or hidden, len(spec.gates) * hidden
    weights = []
    for layer in range(layers):
        for _ in range(directions):
            inputs = features if layer == 0 else directions * width
            weights.append(
                Weights(
                    normal(gates, inputs),
                    normal(gates, width),
                    normal(gates) if bias else None,
                    normal(gates) if bias else None,
                    normal(projection, hidden) if projection else None,
                )
            )
    state = tuple(
        torch.randn(layers * directions, len(lengths), size, dtype=torch.float64)
        for size in spec.state_sizes(hidden, projection)
    )
    values = torch.randn(sum(lengths), features, dtype=torch.float64)
    return Network(spec, values, torch.tensor(lengths, dtype=torch.int64), state, tuple(weights), layers, directions)


def with_gradients(network: Network, backend: Backend) -> list[Tensor]:
    """Outputs, final states, and the gradients of everything for a fixed loss."""
    network = network.map(lambda t: t.detach().clone().requires_grad_())
    results = network.run(backend)
    pushed = [torch.linspace(-1, 2, max(1, r.numel()))[: r.numel()].view(r.shape).to(r.dtype) for r in results]
    grads = torch.autograd.grad(results, network.tensors(), pushed)
    return [r.detach() for r in results] + list(grads)


def assert_close(got: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    assert len(got) == len(wanted)
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.shape == b.shape
        if a.numel():
            error = ((a.double() - b).abs().max() / (1 + b.abs().max())).item()
            assert error < tolerance, (index, error)


def assert_same_bits(got: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(got) == len(wanted)
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert torch.equal(a, b), index


@cache
def truth(
    cell: str, lengths: str, sizes: tuple[int, int, int], directions: int, rounded: bool
) -> tuple[Network, list[Tensor]]:
    """A network and what the reference makes of it, computed once for all instruction sets; ``rounded`` to bfloat16."""
    network = make(cell, LENGTHS[lengths], sizes, directions=directions)
    if rounded:
        network = network.map(lambda t: t.bfloat16().double())
    return network, with_gradients(network, reference.BACKEND)


def leaf_if(chosen: Tensor, tensor: Tensor) -> Tensor:
    return tensor.clone().requires_grad_() if tensor is chosen else tensor


def squares(parts: Iterable[Tensor]) -> Tensor:
    return torch.stack([part.square().sum() for part in parts]).sum()


Use = Callable[..., None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Use:
    """Set the instruction set and how the work is divided, for one test."""

    def choose(isa: str = _LIBRARY.isa, flags: int = 0) -> None:
        chosen: Library = replace(_LIBRARY.with_isa(isa), flags=flags)
        monkeypatch.setattr("raglane.kernels.cpu.library.library", lambda: chosen)

    return choose


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


# ---- values and gradients ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("isa", _LIBRARY.isas)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.usefixtures("two_threads")
def test_agrees_with_the_reference(cell: str, isa: str, division: str, dtype: torch.dtype, use: Use) -> None:
    use(isa, DIVISIONS[division] | POISON)
    if dtype is torch.bfloat16 and cell == "rnn_relu":
        pytest.skip("rounding turns units on and off, and with them their gradients")
    for sizes in SIZES:
        if sizes[2] and cell != "lstm":
            continue
        for directions in (1, 2):
            # Each pair of a size and a direction meets two of the lists of lengths.
            for name in list(LENGTHS)[(sizes[1] + directions) % 2 :: 2][:2]:
                network, wanted = truth(cell, name, sizes, directions, dtype is torch.bfloat16)
                got = with_gradients(network.map(lambda t: t.to(dtype)), BACKEND)
                assert {part.dtype for part in got} == {dtype}
                assert_close(got, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.usefixtures("two_threads")
def test_layers(cell: str, directions: int, lengths: str, use: Use) -> None:
    use(flags=NO_TEAM)
    for bias in (True, False):
        network = make(cell, LENGTHS[lengths], layers=3, directions=directions, bias=bias)
        assert_close(with_gradients(network, BACKEND), with_gradients(network, reference.BACKEND), 1e-11)


@pytest.mark.parametrize("cell", CELLS)
def test_without_output_or_gradients(cell: str) -> None:
    network = make(cell, LENGTHS["mixed"], layers=2, directions=2)
    with torch.no_grad():
        assert_close(network.run(BACKEND, need_output=False), network.run(reference.BACKEND, need_output=False), 1e-11)


@pytest.mark.parametrize("cell", CELLS)
def test_ten_thousand_steps(cell: str) -> None:
    network = make(cell, [10_000, 3], (2, 5, 0))
    assert_close(with_gradients(network, BACKEND), with_gradients(network, reference.BACKEND), 1e-9)


# ---- isolation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("isa", _LIBRARY.isas)
@pytest.mark.parametrize("cell", CELLS)
def test_nan_stays_in_its_sequence(cell: str, isa: str, use: Use) -> None:
    use(isa, POISON)
    clean = make(cell, [4, 3, 5, 1, 6], (5, 19, 0), directions=2)
    values = clean.values.clone()
    bounds = offsets_from_lengths(clean.lengths).tolist()
    for sequence in (0, 2, 4):
        values[bounds[sequence] : bounds[sequence + 1]] = torch.nan
    with torch.no_grad():
        for a, b in zip(replace(clean, values=values).run(BACKEND), clean.run(BACKEND), strict=True):
            for sequence in (1, 3):
                rows = slice(bounds[sequence], bounds[sequence + 1])
                same = (a[rows], b[rows]) if a.dim() == 2 else (a[:, sequence], b[:, sequence])
                assert torch.equal(*same)
            broken = a[bounds[2] : bounds[3]] if a.dim() == 2 else a[:, 2]
            assert bool(broken.isnan().all())


def test_gradients_of_a_sequence_are_its_own() -> None:
    network = make("lstm", [4, 3, 5], directions=2).map(lambda t: t.clone().requires_grad_())
    output, h, c = network.run(BACKEND)
    bad = torch.zeros_like(output)
    bad[:4] = torch.nan
    (grad,) = torch.autograd.grad([output, h, c], [network.values], [bad, torch.ones_like(h), torch.ones_like(c)])
    assert bool(grad[:4].isnan().all())
    assert bool(grad[4:].isfinite().all())


# ---- bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("isa", _LIBRARY.isas)
@pytest.mark.parametrize("cell", CELLS)
def test_batch_invariance(cell: str, isa: str, dtype: torch.dtype, use: Use) -> None:
    """A sequence's outputs and states are the same bits alone, in any company, and however the work is divided."""
    network = make(cell, [9, 1, 30, 0, 5, 5, 14, 2, 2, 2, 21], (9, 37, 0), directions=2).map(lambda t: t.to(dtype))
    bounds = offsets_from_lengths(network.lengths).tolist()
    use(isa, NO_TEAM)
    before = torch.get_num_threads()
    try:
        with torch.no_grad():
            together = network.run(BACKEND)
            for threads in (1, 2, 3, 4):
                torch.set_num_threads(threads)
                for flags in DIVISIONS.values():
                    use(isa, flags)
                    assert_same_bits(network.run(BACKEND), together)
            for b in range(len(network.lengths)):
                alone = replace(
                    network,
                    values=network.values[bounds[b] : bounds[b + 1]],
                    lengths=network.lengths[b : b + 1],
                    state=tuple(part[:, b : b + 1] for part in network.state),
                )
                output, *state = alone.run(BACKEND)
                assert torch.equal(output, together[0][bounds[b] : bounds[b + 1]])
                assert_same_bits(state, [part[:, b : b + 1] for part in together[1:]])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.usefixtures("two_threads")
def test_gradients_are_the_same_bits_from_run_to_run(cell: str, use: Use) -> None:
    network = make(cell, torch.randint(1, 20, (60,)).tolist(), (20, 40, 0), directions=2).map(Tensor.float)
    use(flags=NO_TEAM)
    first = with_gradients(network, BACKEND)
    for _ in range(5):
        assert_same_bits(with_gradients(network, BACKEND), first)


# ---- exp, tanh, sigmoid -----------------------------------------------------------------------------------------

TRUTH = {"exp": torch.exp, "tanh": torch.tanh, "sigmoid": torch.sigmoid}


def ulps(function: str, x: Tensor, kernels: Library) -> float:
    """The largest error of a function in units in the last place of the true value."""
    got, truth = kernels.apply(function, x), TRUTH[function](x.double())
    rounded = truth.float()
    assert torch.equal(got.isnan(), x.isnan())
    finite = rounded.isfinite() & got.isfinite()
    # Where one of the two overflows the other must be within a few ulp of it.
    edge = ~finite & ~x.isnan() & (got != rounded)
    assert bool((truth[edge] > 3.4028e38).all())
    spacing = np.abs(np.spacing(rounded[finite].numpy())).astype(np.float64)
    error = (got[finite].double() - truth[finite]).abs().numpy() / spacing
    return float(error.max()) if error.size else 0.0


def floats(first: int, last: int, step: int) -> Tensor:
    """Floats by the integers that their bits are."""
    return torch.from_numpy(np.arange(first, last, step, dtype=np.int64).astype(np.uint32).view(np.float32))


@pytest.mark.parametrize("isa", _LIBRARY.isas)
@pytest.mark.parametrize("function", TRUTH)
def test_within_four_ulp(function: str, isa: str) -> None:
    kernels = _LIBRARY.with_isa(isa)
    assert ulps(function, floats(0, 1 << 32, 9973), kernels) <= 4
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3e38, -3e38, 88.72, -103.9])
    assert ulps(function, special, kernels) <= 4
    assert ulps(function, torch.linspace(-110, 110, 500_001), kernels) <= 4
    wide = torch.linspace(-800, 800, 100_001, dtype=torch.float64)
    truth = TRUTH[function](wide)
    normal = truth.abs() > 1e-300
    assert torch.allclose(kernels.apply(function, wide)[normal], truth[normal], rtol=2e-15, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("isa", _LIBRARY.isas)
@pytest.mark.parametrize("function", TRUTH)
def test_within_four_ulp_nearly_everywhere(function: str, isa: str) -> None:
    kernels, block = _LIBRARY.with_isa(isa), 1 << 26
    worst = max(ulps(function, floats(begin, begin + block, 7), kernels) for begin in range(0, 1 << 32, block))
    assert worst <= 4, worst


# ---- PyTorch's machinery ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_second_derivatives(cell: str) -> None:
    def penalty(backend: Backend) -> list[Tensor]:
        torch.manual_seed(3)
        network = make(cell, [3, 0, 2], (2, 3, 0), directions=2).map(lambda t: t.clone().requires_grad_())
        results = network.run(backend)
        grads = torch.autograd.grad(squares(results), network.tensors(), create_graph=True)
        return list(torch.autograd.grad(squares(grads), network.tensors()))

    assert_close(penalty(BACKEND), penalty(reference.BACKEND), 1e-10)


@pytest.mark.parametrize("cell", CELLS)
def test_backward_twice_through_a_kept_graph(cell: str) -> None:
    network = make(cell, [3, 0, 5]).map(lambda t: t.clone().requires_grad_())
    loss = squares(network.run(BACKEND))
    first = torch.autograd.grad(loss, network.tensors(), retain_graph=True)
    assert_same_bits(list(torch.autograd.grad(loss, network.tensors())), list(first))


@pytest.mark.parametrize("cell", CELLS)
def test_some_gradients_only(cell: str) -> None:
    network = make(cell, [3, 0, 5], directions=2)
    for tensor in network.tensors():
        wanted = []
        for backend in (BACKEND, reference.BACKEND):
            copy = network.map(partial(leaf_if, tensor))
            (leaf,) = (t for t in copy.tensors() if t.requires_grad)
            wanted.append([torch.autograd.grad(copy.run(backend)[0].sum(), leaf)[0]])
        assert_close(wanted[0], wanted[1], 1e-11)


def test_autocast_takes_bfloat16() -> None:
    layer = rl.nn.LSTM(5, 7, backend="cpu")
    batch = rl.Ragged([torch.randn(3, 5), torch.randn(6, 5)])
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = layer(batch)
    assert out.values.dtype is torch.bfloat16
    out.values.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in layer.parameters())


@pytest.mark.parametrize("cell", CELLS)
def test_compiled_without_breaks_or_recompiling(cell: str) -> None:
    spec_weights = make(cell, [1], (5, 6, 0), directions=2).map(Tensor.float)
    graphs = []

    def count(module: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    def run(values: Tensor, offsets: Tensor, lengths: Tensor, *state: Tensor) -> Tensor:
        request = Request(CELLS[cell], values, offsets, lengths, state, spec_weights.weights, layers=1, directions=2)
        result = BACKEND.run(request, "lanes")
        return torch.cat([part.reshape(-1) for part in (result.output, *result.state) if part is not None])

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    for lengths in ([3, 2, 4], [5, 1, 1, 7], [2] * 9):
        network = make(cell, lengths, (5, 6, 0), directions=2).map(Tensor.float)
        values = network.values.requires_grad_()
        arguments = (values, offsets_from_lengths(network.lengths), network.lengths, *network.state)
        grads = []
        for function in (run, compiled):
            out = function(*arguments)
            (grad,) = torch.autograd.grad(out.square().sum(), values)
            grads.append([out.detach(), grad])
        assert_same_bits(*grads)
    assert len(graphs) == 1


def test_operators_are_what_torch_expects() -> None:
    network = make("lstm", [3, 0, 2], (2, 3, 0)).map(lambda t: t.clone().requires_grad_())
    (weights,) = network.weights
    arguments = ("lstm", network.values, offsets_from_lengths(network.lengths), *network.state, *weights, *[None] * 5)
    torch.library.opcheck(
        torch.ops.raglane.recurrence.default, (*arguments, True, True), test_utils=["test_schema", "test_faketensor"]
    )


# ---- processes, threads, errors ---------------------------------------------------------------------------------


def test_one_openmp_runtime() -> None:
    with open("/proc/self/maps") as maps:
        runtimes = {line.split()[-1] for line in maps if "libgomp" in line or "libiomp" in line or "libomp" in line}
    assert len(runtimes) == 1, runtimes


@pytest.mark.usefixtures("two_threads")
def test_several_python_threads_at_once(use: Use) -> None:
    use(flags=NO_TEAM)
    network = make("gru", [30, 2, 9, 9], (8, 40, 0), directions=2).map(Tensor.float)
    wanted, found = with_gradients(network, BACKEND), []
    threads = [Thread(target=lambda: found.append(with_gradients(network, BACKEND))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    for results in found:
        assert_same_bits(results, wanted)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
@pytest.mark.usefixtures("two_threads")
def test_after_fork(use: Use) -> None:
    network = make("lstm", [30, 2, 9, 9], (8, 40, 0)).map(Tensor.float)
    with torch.no_grad():
        wanted = network.run(BACKEND)
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if all(map(torch.equal, network.run(BACKEND), wanted)) else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_bad_arguments_are_exceptions() -> None:
    network = make("lstm", [3, 2])
    request = Request(
        network.cell,
        network.values,
        torch.tensor([0, 4, 3]),
        network.lengths,
        network.state,
        network.weights,
    )
    with pytest.raises(ArgumentError, match=r"offsets\[2\]: got 3 after 4"):
        BACKEND.run(request, "lanes")
    with pytest.raises(ArgumentError, match=r"RAGLANE_ISA.*mmx.*portable"):
        _LIBRARY.with_isa("mmx")
