"""Products of rows with a weight, an entry of the C interface."""

from __future__ import annotations

import pytest
import torch

from cpu_networks import LIBRARY, POISON, Use
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.cpu.programs import times
from raglane.native import library

SHAPES = [(1, 1, 1, 1), (7, 1, 9, 64), (31, 3, 5, 17), (200, 1, 300, 65)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.usefixtures("two_threads")
def test_values_and_bits(isa: str, shape: tuple[int, ...], use: Use) -> None:
    use(isa, POISON)
    rows, groups, width, depth = shape
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        values = torch.randn(rows, groups * depth, dtype=dtype)
        weight = torch.randn(groups, width, depth, dtype=dtype)
        found = times(values, weight)
        wanted = torch.einsum("ngd,gwd->ngw", values.view(rows, groups, depth), weight)
        torch.testing.assert_close(found, wanted.flatten(1), rtol=tolerance, atol=tolerance)
        use(isa, 0)
        for row in {0, rows // 2, rows - 1}:
            assert times(values[row : row + 1], weight).equal(found[row : row + 1])
        turned = weight.mT.contiguous().mT  # read where it is
        assert times(values, turned).equal(found)


def test_rows_of_bfloat16_are_read_as_float32() -> None:
    values = torch.randn(5, 6).bfloat16()
    weight = torch.randn(1, 4, 6)
    assert times(values, weight).equal(times(values.float(), weight))


def test_no_rows() -> None:
    assert times(torch.zeros(0, 6), torch.zeros(2, 4, 3)).shape == (0, 8)


def test_wrong_arguments() -> None:
    weight = torch.zeros(2, 4, 3)
    for rows in (torch.zeros(5, 7), torch.zeros(5), torch.zeros(5, 6).long(), torch.zeros(5, 6, 1)):
        with pytest.raises(ShapeError, match=r"rows must be"):
            times(rows, weight)
    with pytest.raises(ShapeError, match=r"weight must be .*, got shape \(4, 3\)"):
        times(torch.zeros(5, 6), weight[0])
    with pytest.raises(ShapeError, match=r"weight must be"):
        times(torch.zeros(5, 6), weight.double())


def test_c_refuses_wrong_sizes() -> None:
    head = [*library.program_preamble(torch.float32), 5, 1, 4, 6]
    rows, weight, output = torch.zeros(5, 6), torch.zeros(1, 4, 6), torch.zeros(5, 4)
    tensors = [
        *(rows.data_ptr(), 0, 6, 0, 0),
        *(weight.data_ptr(), 0, 24, 6, 1),
        *(output.data_ptr(), 0, 4, 0, 0),
    ]
    pack = library.packer("raglane_factors")
    library.call("raglane_product", pack(*head, *tensors))
    wrong = [
        (0, 1, "abi must be"),
        (2, 2, "dtype must be float32 or float64"),
        (4, 0, "threads must be at least 1"),
        (5, -1, "elements must be at least 0"),
        (6, 0, "groups, width and depth must be at least 1"),
        (7, 1 << 21, "sizes must be at most"),
        (9, 0, "data of a tensor must be an address"),
        (21, 3, "strides of a tensor must be at least 4"),
    ]
    for place, number, words in wrong:
        fields = [*head, *tensors]
        fields[place] = number
        with pytest.raises(ArgumentError, match=words):
            library.call("raglane_product", pack(*fields))
