"""The element-wise cells on the cpu kernels against the reference in float64, and their bits."""

from __future__ import annotations

from dataclasses import replace
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
    Use,
    assert_close,
    assert_same_bits,
    make,
    sums_between_bfloat16,
    truth,
    with_gradients,
)
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.kernels import reference
from raglane.kernels.cpu.backend import BACKEND

# (D, H, no projection); an SRU has a skip product where the two differ.
SIZES = [(3, 1, 0), (5, 5, 0), (5, 17, 0), (17, 17, 0), (4, 33, 0), (7, 100, 0), (64, 64, 0)]

every_cell = pytest.mark.parametrize("cell", ELEMENTWISE_CELLS)
every_isa = pytest.mark.parametrize("isa", LIBRARY.isas)


# ---- values and gradients ---------------------------------------------------------------------------------------


@every_cell
@every_isa
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("two_threads")
def test_agrees_with_the_reference(cell: str, isa: str, dtype: torch.dtype, use: Use) -> None:
    if dtype is torch.bfloat16 and cell == "indrnn_relu":
        pytest.skip("rounding turns units on and off, and with them their gradients")
    names = cycle(LENGTHS)
    for sizes, directions in product(SIZES, (1, 2)):
        use(isa, POISON | (TEAM if sizes[1] % 4 == directions else NO_TEAM))
        network, wanted = truth(cell, next(names), sizes, directions, dtype is torch.bfloat16, need_states=True)
        got = with_gradients(network.map(lambda t: t.to(dtype)), BACKEND, need_states=True)
        assert {part.dtype for part in got} == {dtype}
        assert_close(got, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
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
