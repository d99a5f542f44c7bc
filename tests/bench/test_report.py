"""The tables and the picture of a benchmark: all rows, and marks on those that matter."""

from __future__ import annotations

import csv
import io
import sys

import pytest
from harness import tables
from harness.cases import SIZES, Case
from harness.chart import ratios_png
from harness.lengths import LENGTHS
from harness.results import CaseResult, Row
from harness.run import Report
from matplotlib import image


def _case(suite: str = "grid", mode: str = "train", threads: int = 1, place: int = 0) -> Case:
    return Case(suite, "lstm", SIZES[place], LENGTHS["ewt"], mode, "float32", threads)


@pytest.fixture
def report() -> Report:
    """Cases that are won, lost, faulty, busy and of memory."""
    packed, padded = Row("torch-packed", 4.0, 1.0, 0.5, 0.2), Row("torch-padded", 8.0, 0.5, 0.25, 0.1)
    jax = Row("jax", 1.0, 4.0, 2.0, 0.8)
    won = CaseResult(_case(), 100, 20, 0.5, (Row("ours", 2.0, 2.0, 1.0, 0.4), packed, padded), 2e11, 7, 0.5, peak=4e11)
    lost = CaseResult(
        _case(place=1), 100, 20, 0.5, (Row("ours", 2.0, 2.0, 1.0, 0.4), packed, padded, jax), 2e11, 7, 9.5, True
    )
    faulty = CaseResult(
        _case(mode="infer"), 100, 20, 0.5, (Row("ours", fault="wrong output | off"), packed), 2e11, 7, 0.5
    )
    slow = Row("torch-packed", 9e4, 1.0, 0.5, 0.2, is_once=True)
    wide = CaseResult(_case(threads=4), 100, 20, 0.5, (Row("ours", 1.0, 4.0, 1.0, 0.4), slow), 2e11, 7, 0.5)
    held = CaseResult(_case("memory"), 9, 3, 0.5, (Row("ours", ratio=2.0, of_ours=1.0, memory=7.25),))
    facts = {"processor": "a processor", "torch": "2"}
    return Report(facts, ("torch-packed",), ["jax takes no part"], [won, lost, faulty, wide, held])


def test_csv_has_a_row_for_everybody_on_every_case(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(report))))
    assert tuple(rows[0]) == tuple(tables.COLUMNS)
    expected = [(result.case.name, row.competitor) for result in report.results for row in result.rows]
    found = [(f"{r['cell']} {r['batch']}x{r['hidden']}x{r['input']} {r['lengths']}", r["competitor"]) for r in rows]
    assert found == expected
    assert (rows[0]["milliseconds"], rows[0]["ratio"], rows[0]["share"]) == ("2", "2", "0.4")
    # 0.4 of the rate of torch.mm, which is half of the peak.
    assert (rows[0]["of_peak"], rows[3]["of_peak"]) == ("0.2", "")
    assert (rows[0]["ahead"], rows[3]["ahead"]) == ("", "jax")
    faulty = next(row for row in rows if row["mode"] == "infer" and row["competitor"] == "ours")
    assert (faulty["milliseconds"], faulty["note"]) == ("", "wrong output | off")
    assert next(row for row in rows if row["threads"] == "4" and row["competitor"] != "ours")["note"] == "timed once"
    assert (rows[-1]["floats_per_unit"], rows[-1]["load"]) == ("7.25", "")


def test_markdown_leaves_nothing_out_and_marks_what_is_bad(report: Report) -> None:
    text = tables.markdown(report)
    lines = text.splitlines()
    table = [line for line in lines if line.startswith(("| lstm 8x64x64 |", "| lstm 32x128x128 |"))]
    assert len(table) == sum(len(result.rows) for result in report.results)
    assert sum("not the fastest: jax is" in line for line in lines) == 1
    assert "**Warning: the load was above the number of processors in 1 of 5 cases" in text
    assert sum(line.endswith("busy |") for line in table) == 4
    assert sum("wrong output / off" in line for line in table) == 1
    assert sum("timed once" in line for line in table) == 1
    assert "- jax takes no part" in lines
    assert any("200 GF/s meanwhile (200 to 200), 0.50 of the peak: fused multiply-adds in" in line for line in lines)
    assert "| grid | train | float32 | 1 | lstm | 2 | 2.00 | 2.00 | lstm 32x128x128 ewt | **in 1** |" in lines
    # Twice as fast on four times the threads.
    assert any("2 (1.00) | 1 (0.50)" in line for line in lines)
    for block in text.split("\n\n"):
        assert len({line.count("|") for line in block.splitlines() if line.startswith("|")}) <= 1, block


def test_lines_for_a_terminal(report: Report) -> None:
    won, lost, faulty, _, held = (tables.case_line(result) for result in report.results)
    assert won.startswith("lstm 8x64x64 ewt")
    assert "torch-packed 2.00, torch-padded 4.00" in won
    assert "<<" not in won
    assert "<< jax is ahead" in lost
    assert "(load 9.5)" in lost
    assert "<< ours: wrong output" in faulty
    assert "7.2 N*H" in held
    assert len(tables.summary_lines(report)) == 3


def test_the_picture_grows_with_the_cases_and_touches_no_global_state(report: Report) -> None:
    sys.modules.pop("matplotlib.pyplot", None)
    # All cases, one, and one without a ratio.
    pictures = [ratios_png(results, "a run") for results in (report.results, report.results[:1], report.results[2:3])]
    whole, one, _ = (image.imread(io.BytesIO(picture)).shape[0] for picture in pictures)
    assert whole > one > 150
    assert len(pictures[0]) > 10_000
    assert "matplotlib.pyplot" not in sys.modules
