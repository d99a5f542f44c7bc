"""What fits into rows of cells: texts, colours, places, and which sequences are drawn."""

from __future__ import annotations

import pytest
import torch

from raglane.data.lengths import round_up
from raglane.plot.cells import Run, Sample, color_of, fitting, grid, grid_size, ink_on, room_for_names, runs_of, spaced
from raglane.plot.charts import _engineering
from raglane.plot.picture import look, width_of
from raglane.schedules import SCHEDULES

pytest.importorskip("matplotlib")


def test_numbers_are_rounded_up_to_few_digits() -> None:
    assert [round_up(least) for least in (0.3, 3, 501)] == [1, 5, 1000]
    assert list(spaced(7, 0.1, 0.15)) == [0, 2, 4, 6]
    assert [_engineering(number) for number in (2.5e9, 100, 0.01)] == ["2.5 G", "100 ", "0.01 "]


def test_colours_are_lighter_then_darker_and_ink_reads_on_them() -> None:
    assert [color_of(sequence) for sequence in (0, 7, 14, 21)] == ["#0072B2", "#99c7e0", "#004a74", "#0072B2"]
    assert (ink_on("#F0E442"), ink_on("#0072B2"), look().paper) == ("#000000", "#FFFFFF", "#FFFFFF")


def test_a_text_is_cut_where_it_has_no_room() -> None:
    assert [fitting("recurrent", inches) for inches in (1.0, 0.4, 0.1)] == ["recurrent", "recur…", ""]
    assert 0.1 < width_of("17") < 0.2
    assert room_for_names(["10"]) > room_for_names(["1"]) > 0.4


def test_the_size_of_rows_of_cells() -> None:
    width, height, shown = grid_size(columns=10, rows=2, widest=0.2)
    assert (round(width, 2), round(height, 2), shown) == (2.8, 0.52, 10)
    assert grid(None, ("a title", "step", "row"), 10, 2, 0.2, ["0", "1"]).axes[0].get_ylabel() == "row"


def test_many_sequences_are_drawn_in_part() -> None:
    sample = Sample.read([3] * 1000)
    assert (len(sample.lengths), sample.index[-1].item(), sample.remark) == (200, 999, "; 200 of 1,000 sequences drawn")
    assert Sample.read([2, 1], ["ab", ["c"]]).labels == [["a", "b"], ["c"]]


def test_a_run_is_the_elements_of_a_sequence() -> None:
    lengths = torch.tensor([1, 2])
    first = runs_of(SCHEDULES["padded"].table(lengths), lengths)[0]
    assert first == Run(sequence=0, row=0, start=0, real=1, computed=2)
