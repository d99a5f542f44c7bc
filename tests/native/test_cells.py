"""The kernels' facts about cells, against the cells in Python."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from raglane.cells import CELLS
from raglane.cells.elementwise import ElementwiseWeights
from raglane.errors import MissingExtraError
from raglane.kernels.contract import Traits
from raglane.kernels.cpu.backend import BACKEND
from raglane.kernels.cpu.layer import kind_of
from raglane.native import library as native_library
from raglane.native import missing_kernels

needs_kernels = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation without the kernels."""

    def fail() -> None:
        raise MissingExtraError("the cpu kernels are missing. Install them.")

    monkeypatch.setattr(native_library, "library", fail)
    native_library.cell_facts.cache_clear()
    yield
    native_library.cell_facts.cache_clear()


def traits(cell: str) -> Traits:
    return Traits(CELLS[cell], 5, 2, torch.float32, torch.device("cpu"))


@needs_kernels
def test_facts_match_the_cells() -> None:
    facts = native_library.cell_facts()
    assert len(facts) > 0
    assert all(kind_of(name) is not None for name in facts)
    assert [cell.number for cell in facts.values()] == list(range(len(facts)))
    for name, cell in facts.items():
        spec = CELLS[name]
        assert cell.is_elementwise == (spec.weights_type is ElementwiseWeights), name
        assert (cell.gates, 1 + cell.has_c) == (len(spec.gates), len(spec.states)), name


@needs_kernels
def test_facts_match_the_shapes_of_weights() -> None:
    for name, cell in native_library.cell_facts().items():
        first, second, third, fourth = CELLS[name].shapes(5, 2).values()
        assert first == (2 * cell.gates, 5), name
        if cell.is_elementwise:
            recurrent, skip = (2 * cell.factors,) if cell.factors else None, (2, 5) if cell.skips else None
            assert (second, third, fourth) == (recurrent, (2 * cell.biases,), skip), name
        else:
            assert (second, third, fourth) == ((2 * cell.gates, 2), (2 * cell.biases,), (2 * cell.biases,)), name


@needs_kernels
def test_a_cell_that_the_kernels_do_not_have_is_refused_by_name() -> None:
    refusal = BACKEND.refuses(traits("peephole_lstm"), "lanes")
    assert refusal == "the cpu kernels do not support the cell 'peephole_lstm'"
    assert BACKEND.refuses(traits("gru"), "lanes") is None


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_every_cell_is_refused_for_that_reason() -> None:
    assert not native_library.has_cell("gru")
    for cell in CELLS:
        assert BACKEND.refuses(traits(cell), "lanes") == "the cpu kernels are missing. Install them"
