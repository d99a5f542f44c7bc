"""The numbers of an inspection, counted by hand: in its object, its text, its JSON, its charts and its page."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_plans import make_plan
from raglane.data.conversion import Progress
from raglane.runs.inspection import charts
from raglane.runs.inspection.inspect import ORDERS, Inspection, as_json, batch_sizes, examples, inspect, lines
from raglane.runs.inspection.page import as_page
from raglane.runs.inspection.reading import Contents, Feature, labels_of
from raglane.runs.sources import ColumnNames
from raglane.training.settings import Settings

LENGTHS = np.arange(1, 101).repeat(5)
CONTENTS = Contents(
    "data.csv",
    Path("data.csv"),
    np.random.default_rng(5).permutation(LENGTHS),
    "features",
    (Feature("a", 0), Feature("b", 505)),
    labels=labels_of("sequence", {"x": 300, "y": 200}),
)


@pytest.fixture(scope="module")
def found() -> Inspection:
    return _inspect()


def _inspect(contents: Contents = CONTENTS) -> Inspection:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raglane.runs.inspection.inspect.plan", make_plan)
        more: dict[str, Any] = {"columns": ColumnNames(), "format": None, "fresh": False, "progress": Progress()}
        return inspect(contents, Settings(hidden_size=8), ranks=4, **more)


@pytest.fixture(scope="module")
def drawn(found: Inspection) -> str:
    return as_page(found).decode()


def _table(page: str, caption: str) -> list[list[str]]:
    """The cells of a table of a page, without its headings and bars."""
    body = page.split(f'<table aria-label="{caption}">')[1].split("<tbody>")[1].split("</tbody>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("</tr>")[:-1]]
    return [[html.unescape(cell) for cell in row if not cell.startswith("<span")] for row in rows]


def _values(chart: Any) -> list[dict[str, Any]]:
    """The points of a chart, in all of its layers."""
    if isinstance(chart, dict):
        own = chart.get("data", {}).get("values", []) if isinstance(chart.get("data"), dict) else []
        return [*own, *(one for part in chart.values() for one in _values(part))]
    return [one for part in chart for one in _values(part)] if isinstance(chart, list) else []


def test_percentiles_are_lengths_that_so_many_do_not_exceed() -> None:
    assert _inspect(replace(CONTENTS, lengths=np.arange(1, 1001))).percentiles == (1, *range(10, 1001, 10))


def test_rows_of_batch_sizes_are_those_of_the_recommended_way(found: Inspection) -> None:
    sizes = [8, 16, 32, 64, 128, 256]
    assert [(row.batch_size, row.grouped) for row in found.spreads] == [(n, g) for n in sizes for g in (False, True)]
    assert {row.way for row in found.spreads} == {found.plan.best.way}


def test_examples_are_of_the_recommended_batches(found: Inspection) -> None:
    assert found.plan.best.grouped
    assert found.examples == examples(CONTENTS.lengths, found.plan.best.batch_size or 0, grouped=True)
    assert found.examples != examples(CONTENTS.lengths, found.plan.best.batch_size or 0, grouped=False)


def test_the_median_example_is_between_the_others() -> None:
    some = examples(np.arange(1, 101), 10, grouped=True)
    assert [one.name for one in some] == ["worst", "median", "best"]
    assert some[0].fill < some[1].fill < some[2].fill


def test_sizes_are_those_that_the_sequences_fill() -> None:
    assert [batch_sizes(count) for count in (7, 8, 9, 64)] == [[7], [8], [8], [8, 16, 32, 64]]


def test_the_sentence_has_the_padding_of_both(found: Inspection) -> None:
    sparse = replace(found, summary=replace(found.summary, fill=0.2))
    assert "and no padding; one padded batch of all sequences would be 80% padding." in sparse.sentence
    padded = replace(found.plan.best, schedule="padded", elements=1000, waste=200)
    assert "and 20% padding; one" in replace(found, plan=replace(found.plan, best=padded)).sentence


def test_the_text_counts_what_exists(found: Inspection) -> None:
    told = lines(found, "#")
    assert any(line.endswith("50.5% of one padded batch of all sequences would be real") for line in told)
    for order in ORDERS:
        wanted = [f"{one.fill:.0%}" for one in found.fills if one.order == order]
        assert next(line for line in told if line.startswith(f"  {order} ")).split()[1:] == wanted


def test_the_json_counts_what_exists(found: Inspection) -> None:
    read = json.loads(as_json(found))
    for one in read["lengths"]["buckets"]:
        # Lengths from low to high, five times each.
        elements = 5 * sum(range(one["low"], one["high"] + 1))
        assert one["elements"] == elements
        assert one["fill"] == pytest.approx(elements / (one["count"] * one["high"]))
    assert read["data"]["labels"]["counts"] == {"x": 300, "y": 200}
    assert read["batches"]["sequences_looked_at"] == 500
    long = _inspect(replace(CONTENTS, lengths=np.arange(70_000) % 9 + 1))
    assert json.loads(as_json(long))["batches"]["sequences_looked_at"] == 1 << 16


def test_the_tables_of_the_page_are_shares_of_the_right_whole(found: Inspection, drawn: str) -> None:
    buckets = _table(drawn, "Buckets with similar numbers of sequences")
    assert [row[-1] for row in buckets] == [f"{one.elements / 25_250:.0%}" for one in found.buckets]
    assert [row[3] for row in buckets] == [f"{one.fill:.0%}" for one in found.buckets]
    features = _table(drawn, "Features, with their NaN or infinite elements")
    assert features == [["a", "0", "0.0%"], ["b", "505", "2.0%"]]  # of 25,250 elements
    assert _table(drawn, "Labels, one per sequence") == [["x", "300", "60.0%"], ["y", "200", "40.0%"]]
    bins = _table(drawn, "Sequences by length")
    assert sum(float(row[2].rstrip("%")) for row in bins) == pytest.approx(100, abs=1)


def test_the_page_marks_the_best_and_says_what_waiting_costs(found: Inspection, drawn: str) -> None:
    best = found.plan.best
    marked = re.findall(r'<tr class="best">(.*?)</tr>', drawn)
    assert len(marked) == 1
    assert "256 sequences, grouped" in marked[0]
    assert f"as recommended {best.rank_spread - 1:.0%} more." in drawn
    waits = _table(drawn, "Time of a step relative to the mean of its processes")
    assert [row[2] for row in waits] == [f"{row.rank_spread:.2f}" for row in found.spreads]


def test_charts_have_the_numbers_of_the_rows(found: Inspection) -> None:
    steps = [one for one in _values(charts.steps(found.spreads)) if "ms" in one]
    for row in found.spreads:
        order = "grouped" if row.grouped else "random"
        times = {one["time"]: one["ms"] for one in steps if (one["size"], one["order"]) == (row.batch_size, order)}
        wanted = {"median": row.step_p50, "90%": row.step_p90, "longest": row.step_max}
        assert times == pytest.approx({name: 1000 * seconds for name, seconds in wanted.items()})
    waits = {(one["size"], one["order"]): one["more"] for one in _values(charts.spreads(found.spreads))}
    assert waits == {
        (row.batch_size, "grouped" if row.grouped else "random"): pytest.approx(row.rank_spread - 1)
        for row in found.spreads
    }


def test_the_chart_of_lengths_has_the_quantiles(found: Inspection) -> None:
    values = _values(charts.lengths(found))
    shares = {one["length"]: one["share"] for one in values if "share" in one}
    assert shares == {length: pytest.approx(length / 100) for length in range(1, 101)}
    names = {one["name"] for one in values if "name" in one}
    assert names == {"median: 50", "95%: 95", "99%: 99"}
    assert sum(one["sequences"] for one in values if "sequences" in one) == 500
