"""The element-wise cells on the cpu kernels against the reference in float64, their bits, and cells
with a relu.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, pairwise, product
from typing import Any

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
from raglane.kernels import reference
from raglane.kernels.contract import Request, Result
from raglane.kernels.cpu.backend import BACKEND

# (D, H, no projection); an SRU has a skip product where the two differ.
SIZES = [(3, 1, 0), (5, 5, 0), (5, 17, 0), (17, 17, 0), (4, 33, 0), (7, 100, 0), (64, 64, 0)]

every_isa = pytest.mark.parametrize("isa", LIBRARY.isas)


@pytest.mark.parametrize("cell", ELEMENTWISE_CELLS)
@every_isa
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("two_threads")
def test_agrees_with_the_reference(cell: str, isa: str, dtype: torch.dtype, use: Use) -> None:
    if dtype is torch.bfloat16 and cell == "indrnn_relu":
        pytest.skip("rounding turns units on and off, and with them their gradients")
    names = cycle(LENGTHS)
    for sizes, directions in product(SIZES, (1, 2)):
        use(isa, POISON | (TEAM if sizes[1] % 4 == directions else NO_TEAM))
        network, wanted = truth(
            cell, next(names), sizes, directions, dtype is torch.bfloat16, need_states=True
        )
        got = with_gradients(network.map(lambda t: t.to(dtype)), BACKEND, need_states=True)
        assert {part.dtype for part in got} == {dtype}
        assert_close(got, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@every_isa
def test_closed_gates_of_a_minlstm(dtype: torch.dtype, isa: str, use: Use) -> None:
    """Where both gates close, f / (f + i) is 0 / 0 unless it is computed by differences."""
    use(isa, POISON)
    gates = [-1000.0, -200.0, -104.0, -90.0, 0.0, 90.0, 200.0, 1000.0]
    pairs = torch.tensor(
        [(f, i) for f in gates for i in (*gates, f + 1, f - 3)], dtype=torch.float64
    )
    size = len(pairs)
    bias = torch.cat([pairs.t().reshape(-1), torch.linspace(-2, 2, size, dtype=torch.float64)])
    network = make("minlstm", [3, 1], (2, size, 0))
    weights = network.weights[0]._replace(
        bias=bias, input=torch.zeros_like(network.weights[0].input)
    )
    network = replace(network, weights=(weights,))
    got = with_gradients(network.map(lambda t: t.to(dtype)), BACKEND)
    assert all(bool(part.isfinite().all()) for part in got)
    assert_close(
        got, with_gradients(network, reference.BACKEND), 1e-6 if dtype is torch.float32 else 1e-13
    )


def test_tensors_with_gaps() -> None:
    network = make("sru", [3, 0, 2], (17, 17, 0), directions=2)
    apart = network.map(lambda t: torch.stack([t, t], -1)[..., 0])
    assert not apart.values.is_contiguous()
    assert_same_bits(with_gradients(apart, BACKEND), with_gradients(network, BACKEND))


@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_bfloat16_is_rounded_as_torch_rounds(isa: str, use: Use) -> None:
    """To nearest, ties to even: of sums that float32 holds exactly, which an SRU whose gate is shut
    lets past it.
    """
    use(isa)
    sums, values = sums_between_bfloat16()
    network = make("sru", [1] * len(values), (2, 17, 0)).map(Tensor.bfloat16)
    shut = torch.full_like(network.weights[0].bias, -1e4)
    weights = network.weights[0]._replace(bias=shut, skip=torch.ones(17, 2).bfloat16())
    output, h, _ = replace(network, values=values, weights=(weights,)).run(BACKEND)
    wanted = sums.bfloat16().unsqueeze(1).expand(-1, 17)
    assert_same_bits([output, h[0]], [wanted, wanted])


#
# A rounding turns units near 0 on or off, and with them their gradients. So cells with a relu are
# compared with float64 in which the same units are on: only the rounding of numbers remains.


@dataclass(frozen=True)
class SameUnits:
    """A backend of one layer with a relu: a unit is on where it is on in this output, ``(N,
    directions * H)``.
    """

    output: Tensor

    def run(self, request: Request, _: str) -> Result:
        """One sequence after the other, by the cell's own equations."""
        cell: Any = copy.copy(request.cell)
        outputs, finals = [], []
        for direction, weights in enumerate(request.weights):
            prepared = cell.prepare(weights, request.values, request.offsets)
            on = self.output.chunk(request.directions, dim=1)[direction] > 0
            rows, ends = list(prepared.split(1)), []
            for place, (start, end) in enumerate(pairwise(request.offsets.tolist())):
                state: tuple[Tensor, ...] = (request.state[0][direction, place : place + 1],)
                for row in range(start, end)[:: -1 if direction else 1]:
                    cell._activation = partial(torch.mul, on[row])
                    rows[row], state = cell.step(weights, prepared[row : row + 1], state)
                ends.append(state[0])
            outputs.append(torch.cat(rows))
            finals.append(torch.cat(ends))
        return Result(torch.cat(outputs, dim=1), (torch.stack(finals),))


@pytest.mark.parametrize("lengths", [[2] * 9, [11, 0, 1, 7, 11, 3], [1], [40, *[3] * 20]])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("cell", ["rnn_relu", "indrnn_relu"])
def test_only_rounding_differs(
    cell: str, isa: str, directions: int, lengths: list[int], use: Use
) -> None:
    use(isa, POISON)
    for sizes in ((5, 17, 0), (40, 64, 0)):
        network = make(cell, lengths, sizes, directions=directions).map(Tensor.bfloat16)
        got = with_gradients(network, BACKEND)
        # 5 units in the last place; where other units are on, up to 0.35 was seen.
        truth: Any = SameUnits(got[0])
        assert_close(got, with_gradients(network.map(Tensor.double), truth), 0.02)
