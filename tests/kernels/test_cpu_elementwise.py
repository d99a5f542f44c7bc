"""The element-wise cells on the cpu kernels: against the reference in float64, and what they promise in bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch
from torch import Tensor

from cpu_networks import (
    ELEMENTWISE_CELLS,
    LENGTHS,
    LIBRARY,
    NO_TEAM,
    POISON,
    TEAM,
    TOLERANCE,
    Network,
    Use,
    assert_close,
    assert_same_bits,
    leaf_if,
    make,
    squares,
    sums_between_bfloat16,
    truth,
    with_gradients,
)
from looped import looped
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.kernels import reference
from raglane.kernels.contract import Backend, Request
from raglane.kernels.cpu.backend import BACKEND
from raglane.segments import offsets_from_lengths

# (D, H, no projection); an SRU has a skip product where the two differ.
SIZES = [(3, 1, 0), (5, 5, 0), (5, 17, 0), (17, 17, 0), (4, 33, 0), (7, 100, 0), (64, 64, 0)]

every_cell = pytest.mark.parametrize("cell", ELEMENTWISE_CELLS)
every_isa = pytest.mark.parametrize("isa", LIBRARY.isas)


@pytest.fixture
def any_threads() -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, for one test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- values and gradients ---------------------------------------------------------------------------------------


@every_cell
@every_isa
@looped("dtype", TOLERANCE)
@pytest.mark.usefixtures("two_threads")
def test_agrees_with_the_reference(cell: str, isa: str, dtype: torch.dtype, use: Use) -> None:
    if dtype is torch.bfloat16 and cell == "indrnn_relu":
        return  # rounding turns units on and off, and with them their gradients
    names = cycle(LENGTHS)
    for sizes, directions in product(SIZES, (1, 2)):
        use(isa, POISON | (TEAM if sizes[1] % 4 == directions else NO_TEAM))
        network, wanted = truth(cell, next(names), sizes, directions, dtype is torch.bfloat16, need_states=True)
        got = with_gradients(network.map(lambda t: t.to(dtype)), BACKEND, need_states=True)
        assert {part.dtype for part in got} == {dtype}
        assert_close(got, wanted, TOLERANCE[dtype])


@every_cell
@looped("directions", [1, 2])
@looped(("lengths", "bias"), [("mixed", True), ("equal", False), ("none", True)])
def test_layers(cell: str, directions: int, lengths: str, bias: bool) -> None:
    network = make(cell, LENGTHS[lengths], layers=2, directions=directions, bias=bias)
    assert_close(with_gradients(network, BACKEND), with_gradients(network, reference.BACKEND), 1e-11)


@every_cell
def test_long_sequences(cell: str, use: Use, any_threads: Callable[[int], None]) -> None:
    """So long that rows are walked in several chunks, and sums gathered from several groups."""
    network = make(cell, [97, 0, 1, 260, 96, 2, 95, 192], (3, 21, 0), directions=2)
    wanted = with_gradients(network, reference.BACKEND)
    any_threads(2)
    for isa, division in product(LIBRARY.isas, (TEAM, NO_TEAM)):
        use(isa, POISON | division)
        assert_close(with_gradients(network, BACKEND), wanted, 1e-11)


@every_cell
def test_without_output_or_gradients(cell: str) -> None:
    network = make(cell, LENGTHS["mixed"], layers=2, directions=2)
    with torch.no_grad():
        for states in (False, True):
            got, wanted = [network.run(b, need_output=False, need_states=states) for b in (BACKEND, reference.BACKEND)]
            assert_close(got, wanted, 1e-11)


@every_cell
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


@looped("dtype", [torch.float32, torch.float64])
@every_isa
def test_closed_gates_of_a_minlstm(dtype: torch.dtype, isa: str, use: Use) -> None:
    """Where both gates close, f / (f + i) is 0 / 0 unless it is computed by differences."""
    use(isa, POISON)
    gates = [-1000.0, -200.0, -104.0, -90.0, 0.0, 90.0, 200.0, 1000.0]
    pairs = torch.tensor([(f, i) for f in gates for i in (*gates, f + 1, f - 3)], dtype=torch.float64)
    size = len(pairs)
    bias = torch.cat([pairs.t().reshape(-1), torch.linspace(-2, 2, size, dtype=torch.float64)])
    network = make("minlstm", [3, 1], (2, size, 0))
    weights = network.weights[0]._replace(bias=bias, input=torch.zeros_like(network.weights[0].input))
    network = replace(network, weights=(weights,))
    got = with_gradients(network.map(lambda t: t.to(dtype)), BACKEND)
    assert all(bool(part.isfinite().all()) for part in got)
    assert_close(got, with_gradients(network, reference.BACKEND), 1e-6 if dtype is torch.float32 else 1e-13)


# ---- isolation --------------------------------------------------------------------------------------------------


@every_cell
@every_isa
def test_nan_stays_in_its_sequence(cell: str, isa: str, use: Use) -> None:
    """In values, outputs and states, and in the gradients of all that belongs to one sequence."""
    use(isa, POISON)
    clean = make(cell, [4, 3, 5, 1, 6], (19, 19, 0), directions=2)
    bounds = offsets_from_lengths(clean.lengths).tolist()
    values = clean.values.clone()
    for sequence in (0, 2, 4):
        values[bounds[sequence] : bounds[sequence + 1]] = torch.nan
    found = [with_gradients(network, BACKEND) for network in (replace(clean, values=values), clean)]
    count = 2 * (1 + len(clean.state))  # results, then the gradients of values and states
    for a, b in zip(*(parts[:count] for parts in found), strict=True):
        for sequence in (1, 3):
            rows = slice(bounds[sequence], bounds[sequence + 1])
            assert_same_bits(*([part[rows] if a.dim() == 2 else part[:, sequence]] for part in (a, b)))
    output = found[0][0]
    assert bool(output[bounds[2] : bounds[3]].isnan().all())


@every_cell
def test_gradients_of_a_sequence_are_its_own(cell: str) -> None:
    network = make(cell, [4, 3, 5], directions=2).map(lambda t: t.clone().requires_grad_())
    output, *state = network.run(BACKEND)
    bad = torch.ones_like(output)
    bad[:4] = torch.nan
    (grad,) = torch.autograd.grad([output, *state], [network.values], [bad, *(torch.ones_like(s) for s in state)])
    assert bool(grad[:4].isnan().any())
    assert bool(grad[4:].isfinite().all())


# ---- bits -------------------------------------------------------------------------------------------------------


def alone(network: Network, sequence: int) -> Network:
    begin, end = offsets_from_lengths(network.lengths).tolist()[sequence : sequence + 2]
    return replace(
        network,
        values=network.values[begin:end],
        lengths=network.lengths[sequence : sequence + 1],
        state=tuple(part[:, sequence : sequence + 1] for part in network.state),
    )


@every_cell
@every_isa
@looped("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_batch_invariance(
    cell: str, isa: str, dtype: torch.dtype, use: Use, any_threads: Callable[[int], None]
) -> None:
    """A sequence's outputs and states are bit-identical alone and in any batch, at any number of threads."""
    lengths = [9, 1, 30, 0, 5, 5, 14, 2, 2, 130, 21]
    network = make(cell, lengths, (9, 37, 0), directions=2).map(lambda t: t.to(dtype))
    bounds = offsets_from_lengths(network.lengths).tolist()
    use(isa, POISON | NO_TEAM)
    with torch.no_grad():
        together = network.run(BACKEND, need_states=True)
        for threads in (1, 2, 3, 4):
            any_threads(threads)
            for division in (TEAM, NO_TEAM):
                use(isa, POISON | division)
                assert_same_bits(network.run(BACKEND, need_states=True), together)
        for sequence in range(len(lengths)):
            rows = slice(bounds[sequence], bounds[sequence + 1])
            wanted = [part[rows] if part.dim() == 2 else part[:, sequence : sequence + 1] for part in together]
            assert_same_bits(alone(network, sequence).run(BACKEND, need_states=True), wanted)
    # What is kept for a backward pass changes nothing either.
    assert_same_bits(with_gradients(network, BACKEND, need_states=True)[: len(together)], together)


@every_cell
@looped("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_bits_from_run_to_run(
    cell: str, dtype: torch.dtype, use: Use, any_threads: Callable[[int], None]
) -> None:
    lengths = [*torch.randint(1, 20, (200,)).tolist(), 700]
    network = make(cell, lengths, (20, 40, 0), directions=2).map(lambda t: t.to(dtype))
    use(flags=POISON | NO_TEAM)
    any_threads(2)
    first = with_gradients(network, BACKEND)
    for _ in range(3):
        assert_same_bits(with_gradients(network, BACKEND), first)
    # Those of vectors are sums of the kernels' own: the same at any number of threads.
    for threads, division in ((1, NO_TEAM), (3, NO_TEAM), (3, TEAM)):
        any_threads(threads)
        use(flags=POISON | division)
        again = with_gradients(network, BACKEND)
        results = 1 + len(network.state)
        vectors = [results + i for i, tensor in enumerate(network.tensors()) if tensor.dim() != 2]
        assert len(vectors) >= 3
        assert_same_bits([again[i] for i in vectors], [first[i] for i in vectors])


@pytest.mark.parametrize("cell", ["mingru", "sru"])
def test_backward_twice_through_a_kept_graph(cell: str) -> None:
    network = make(cell, [3, 0, 5]).map(lambda t: t.clone().requires_grad_())
    results = network.run(BACKEND, need_states=True)
    before = [part.detach().clone() for part in results]
    first = torch.autograd.grad(squares(results), network.tensors(), retain_graph=True)
    assert_same_bits(list(torch.autograd.grad(squares(results), network.tensors())), list(first))
    assert_same_bits([part.detach() for part in results], before)


# ---- PyTorch's machinery ----------------------------------------------------------------------------------------


@every_cell
def test_second_derivatives(cell: str) -> None:
    def penalty(backend: Backend, network: Network) -> list[Tensor]:
        network = network.map(lambda t: t.clone().requires_grad_())
        results = network.run(backend, need_states=True)
        grads = torch.autograd.grad(squares(results), network.tensors(), create_graph=True)
        return list(torch.autograd.grad(squares(grads), network.tensors()))

    network = make(cell, [3, 0, 2], (2, 3, 0), directions=2)
    assert_close(penalty(BACKEND, network), penalty(reference.BACKEND, network), 1e-10)


@every_cell
def test_against_finite_differences(cell: str) -> None:
    network = make(cell, [2, 0, 1], (2, 2, 0))

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        given = iter(tensors)
        return tuple(network.map(lambda _: next(given)).run(BACKEND, need_states=True))

    inputs = []
    network.map(lambda t: inputs.append(t.clone().requires_grad_()) or t)  # type: ignore[func-returns-value]
    assert torch.autograd.gradcheck(run, inputs)
    assert torch.autograd.gradgradcheck(run, inputs)


@every_cell
def test_compiled_without_breaks_or_recompiling(cell: str) -> None:
    spec = make(cell, [1], (5, 6, 0), directions=2).map(lambda t: t.float().requires_grad_())
    graphs = []

    def count(module: torch.fx.GraphModule, example_inputs: object) -> Callable[..., object]:
        graphs.append(module)
        return module.forward

    def run(values: Tensor, offsets: Tensor, lengths: Tensor, *state: Tensor) -> Tensor:
        request = Request(spec.cell, values, offsets, lengths, state, spec.weights, directions=2, need_states=True)
        result = BACKEND.run(request, "lanes")
        (states,) = result.states or ()
        return torch.cat([part.reshape(-1) for part in (result.output, *result.state, *states) if part is not None])

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend=count)
    leaves = [t for w in spec.weights for t in w if t is not None]
    for lengths in ([3, 2, 4], [5, 1, 1, 7], [2] * 9):
        network = make(cell, lengths, (5, 6, 0), directions=2).map(Tensor.float)
        values = network.values.requires_grad_()
        arguments = (values, offsets_from_lengths(network.lengths), network.lengths, *network.state)
        found = []
        for function in (run, compiled):
            out = function(*arguments)
            found.append([out.detach(), *torch.autograd.grad(out.square().sum(), [values, *leaves])])
        assert_same_bits(*found)
    assert len(graphs) == 1


@every_cell
def test_autocast_takes_bfloat16(cell: str) -> None:
    network = make(cell, [3, 6]).map(lambda t: t.float().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        results = network.run(BACKEND)
    assert {part.dtype for part in results} == {torch.bfloat16}
    grads = torch.autograd.grad(squares([part.float() for part in results]), network.tensors())
    assert {grad.dtype for grad in grads} == {torch.float32}
    rounded = network.map(lambda t: t.detach().bfloat16())
    with torch.no_grad():
        assert_same_bits([part.detach() for part in results], rounded.run(BACKEND))


def test_tensors_with_gaps() -> None:
    network = make("sru", [3, 0, 2], (17, 17, 0), directions=2)
    apart = network.map(lambda t: torch.stack([t, t], -1)[..., 0])
    assert not apart.values.is_contiguous()
    assert_same_bits(with_gradients(apart, BACKEND), with_gradients(network, BACKEND))


def test_bad_arguments_are_exceptions() -> None:
    network = make("mingru", [3, 2])
    request = replace(network.request(), offsets=torch.tensor([0, 4, 3]))
    with pytest.raises(ArgumentError, match=r"offsets\[2\] must be .*got 3 after 4"):
        BACKEND.run(request, "lanes")
    weights = make("sru", [3, 2]).weights[0]._replace(skip=None)
    request = replace(make("sru", [3, 2]).request(), weights=(weights,))
    with pytest.raises(ArgumentTypeError, match=r"weight_skip_l0 must be .*got a NoneType"):
        BACKEND.run(request, "lanes")


@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_bfloat16_is_rounded_as_torch_rounds(isa: str, use: Use) -> None:
    """To nearest, ties to even: of sums that float32 holds exactly, which an SRU whose gate is shut lets past it."""
    use(isa)
    sums, values = sums_between_bfloat16()
    network = make("sru", [1] * len(values), (2, 17, 0)).map(Tensor.bfloat16)
    shut = torch.full_like(network.weights[0].bias, -1e4)
    weights = network.weights[0]._replace(bias=shut, skip=torch.ones(17, 2).bfloat16())
    output, h, _ = replace(network, values=values, weights=(weights,)).run(BACKEND)
    wanted = sums.bfloat16().unsqueeze(1).expand(-1, 17)
    assert_same_bits([output, h[0]], [wanted, wanted])
