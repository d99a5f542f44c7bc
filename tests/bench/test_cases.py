"""The cases of the benchmark, how long their sequences are, and the numbers in their batches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness.batch import Batch
from harness.cases import (
    CELLS,
    DTYPES,
    ELEMENTWISE,
    MODES,
    SIZES,
    SUITES,
    TORCH_CELLS,
    Case,
    Size,
    operations,
    select,
)
from harness.competitors import COMPETITORS, RIVALS, TORCH
from harness.lengths import LENGTHS, QUANTILES, Lengths, draw_like

from raglane.errors import ArgumentError

_MIXED = Lengths("mixed", "unsorted, with ties and a one", lambda count: [3, 1, 5, 3, 7, 1, 5][:count])


def _case(cell: str = "gru", mode: str = "train", dtype: str = "float32", **other: object) -> Case:
    case = Case("grid", cell, Size(7, 6, 4), _MIXED, mode, dtype, 1)
    return replace(case, **other)  # type: ignore[arg-type]


# -- cases ------------------------------------------------------------------------------------------------------------


def _everything(threads: list[int]) -> list[Case]:
    return select(
        list(SUITES),
        cells=list(CELLS),
        sizes=None,
        lengths=[LENGTHS["equal"], LENGTHS["ewt"]],
        modes=MODES,
        dtypes=DTYPES,
        threads=threads,
    )


def test_the_registry_is_complete_and_has_no_case_twice() -> None:
    cases = _everything([1, 2])
    assert len(set(cases)) == len(cases)
    grid = [case for case in cases if case.suite == "grid"]
    assert len(grid) == len(TORCH_CELLS) * len(SIZES) * 2 * len(MODES) * len(DTYPES) * 2
    assert {case.suite for case in cases} == set(SUITES)
    assert {case.mode for case in cases if case.suite == "memory"} == {"train"}


def test_what_the_suites_name_exists() -> None:
    for suite in SUITES.values():
        assert set(suite.lengths) <= set(LENGTHS)
        assert set(suite.cells) <= set(CELLS)
        assert set(suite.competitors) <= set(COMPETITORS) - set(RIVALS)
    assert all(name == competitor.name for name, competitor in COMPETITORS.items())
    assert all(name == lengths.name for name, lengths in LENGTHS.items())
    assert set(TORCH) < set(RIVALS)


def test_a_batch_too_small_for_its_lengths_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"lengths fill-0\.1 need at least 32 sequences"):
        select(["fill"], cells=["gru"], sizes=[SIZES[0]], lengths=[], modes=MODES, dtypes=DTYPES, threads=[1])
    with pytest.raises(ArgumentError, match="at least one case"):
        select(["own-cell"], cells=["lstm"], sizes=None, lengths=[], modes=MODES, dtypes=DTYPES, threads=[1])
    with pytest.raises(ArgumentError, match="at least one case"):
        select(["memory"], cells=["gru"], sizes=None, lengths=[], modes=["infer"], dtypes=DTYPES, threads=[1])


@pytest.mark.parametrize(("cell", "gates"), [("lstm", 4), ("gru", 3), ("rnn_tanh", 1)])
def test_operations_are_those_of_the_matrix_products(cell: str, gates: int) -> None:
    weights = Batch.of(_case(cell)).weights
    counted = sum(2 * weights[name].numel() for name in ("weight_ih_l0", "weight_hh_l0"))
    assert operations(cell, Size(7, 6, 4), "infer") == counted == 2 * gates * 6 * (4 + 6)
    assert operations(cell, Size(7, 6, 4), "train") == 3 * counted


@pytest.mark.parametrize(("cell", "products"), [("indrnn_tanh", 1), ("mingru", 2), ("minlstm", 3), ("sru", 4)])
def test_an_elementwise_cell_has_input_products_alone(cell: str, products: int) -> None:
    assert cell in ELEMENTWISE
    assert operations(cell, Size(7, 6, 4), "infer") == 2 * products * 6 * 4


# -- lengths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("count", [32, 33, 256])
def test_every_rule_gives_the_same_lengths_each_time(name: str, count: int) -> None:
    drawn = LENGTHS[name].draw(count)
    assert len(drawn) == count
    assert all(type(length) is int and length >= 1 for length in drawn)
    torch.manual_seed(5)
    assert LENGTHS[name].draw(count) == drawn


@pytest.mark.parametrize("count", [32, 64, 256, 257])
def test_a_filled_batch_has_as_many_elements_as_an_equal_one(count: int) -> None:
    lengths = LENGTHS["fill-0.1"].draw(count)
    assert sum(lengths) == sum(LENGTHS["equal"].draw(count)) == 30 * count
    assert sum(lengths) / (count * max(lengths)) == pytest.approx(0.1)


@pytest.mark.parametrize("name", QUANTILES)
def test_lengths_like_real_data_follow_its_quantiles(name: str) -> None:
    quantiles = QUANTILES[name]
    assert len(quantiles) == 101
    assert list(quantiles) == sorted(quantiles)
    drawn = sorted(draw_like(quantiles, 20_000, seed=3))
    assert quantiles[0] <= drawn[0]
    assert drawn[-1] <= quantiles[100]
    for percent in (10, 25, 50, 75, 90):
        assert drawn[percent * 200] == pytest.approx(quantiles[percent], rel=0.05, abs=0.6)


# -- batches ----------------------------------------------------------------------------------------------------------


def test_a_batch_does_not_depend_on_mode_dtype_or_threads() -> None:
    first, second = Batch.of(_case()), Batch.of(_case(mode="infer", threads=2))
    rounded = Batch.of(_case(dtype="bfloat16"))
    for name, weight in first.weights.items():
        assert torch.equal(weight, second.weights[name])
        assert torch.equal(weight.bfloat16(), rounded.weights[name])
    assert torch.equal(first.values, second.values)
    assert torch.equal(first.gradient.bfloat16(), rounded.gradient)
    assert not torch.equal(first.values, Batch.of(_case("lstm")).values)
    assert (first.elements, first.longest, first.fill) == (25, 7, 25 / 49)


def test_views_of_a_batch() -> None:
    batch = Batch.of(_case(lengths=LENGTHS["fill-0.1"], size=Size(40, 6, 4)))
    equal = COMPETITORS["ours-equal"].view(batch)
    assert equal.lengths.tolist() == [30] * 40
    assert torch.equal(equal.values, batch.values)
    assert COMPETITORS["ours-element"].view(batch).values.shape == (1, 4)
    rounded = Batch.of(_case(dtype="bfloat16"))
    assert torch.equal(COMPETITORS["ours-float32"].view(rounded).values, rounded.values.float())
