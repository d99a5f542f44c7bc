"""An inspection, and its text, JSON, charts and page."""

from __future__ import annotations

import functools
import html
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from made_datasets import changed, dataset
from made_plans import make_plan
from raglane._utils.table import PrintedTable
from raglane.data import records
from raglane.data.columns import Columns
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.records import offsets_of
from raglane.data.store.conversion import Progress
from raglane.errors import ArgumentError
from raglane.report.page import Chart, Page, Part
from raglane.runs.configuration import words_of
from raglane.runs.inspection import charts, page
from raglane.runs.inspection.inspect import (
    ORDERS,
    Inspection,
    as_json,
    batch_sizes,
    data_facts,
    examples,
    inspect,
    layer_of,
    lines,
    recommended,
    train_line,
)
from raglane.runs.inspection.reading import ChannelFacts, Contents, contents_of, labels_of
from raglane.runs.sources import SequenceSource
from raglane.training.model import ModelConfig
from raglane.training.settings import Settings

_ODD = '</script><b>&"\u202e'


def _inspect(contents: Contents, ranks: int = 1, **settings: Any) -> Inspection:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("raglane.runs.inspection.inspect.plan", make_plan)
        more: dict[str, Any] = {
            "source": SequenceSource(None, None),
            "fresh": False,
            "progress": Progress(),
        }
        return inspect(contents, Settings(**settings), ranks=ranks, **more)


def _contents(count: int = 600) -> Contents:
    lengths = np.random.default_rng(3).integers(0, 40, count)
    labels = labels_of("sequence", {"x": 3, _ODD: 2})
    features = ChannelFacts("a", 0), ChannelFacts(_ODD, 7)
    return Contents(
        _ODD, Path("my data.csv"), lengths, "features", features, labels=labels, notes=(_ODD,)
    )


@pytest.fixture(scope="module", autouse=True)
def one_script() -> Iterator[None]:
    """Bundle the script of the charts once, which takes a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts, "script", functools.cache(charts.script))
        yield


def _undrawn(found: Inspection) -> str:
    """Return a page without the pictures of batches, which take most of its time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_pictures", lambda _: [])
        return page.as_page(found).decode()


@pytest.fixture(scope="module")
def drawn() -> str:
    return page.as_page(_inspect(_contents(1500), ranks=4)).decode()


def test_the_gain_that_is_told_is_the_gain_of_the_table() -> None:
    found = _inspect(_contents())
    text, read = "\n".join(lines(found, "#")), json.loads(as_json(found))["plan"]
    for piece in (
        "sequences  600",
        "7 of ",
        "2 different, one per sequence: 'x' 3",
        ">  cpu",
        "####",
        found.sentence,
    ):
        assert piece in text, piece
    assert "best: cpu, lanes" in text
    assert found.plan.others.keys() <= set(re.findall(r"\w+", text))
    of_torch = min(row["train_seconds"] for row in read["rows"] if row["backend"] == "torch")
    gain = f"{of_torch / read['best']['train_seconds']:.1f} times as fast as the fastest of torch"
    for told in (text, read["why"], _undrawn(found)):
        assert re.findall(r"[\d.]+ times as fast as the fastest of torch", told) == [gain]


def test_the_layer_is_what_training_builds() -> None:
    tokens = Contents("", None, np.array([3, 2]), "tokens", vocabulary=9)
    layer = layer_of(
        Settings(cell="lstm", hidden_size=8, num_layers=2, bidirectional=True), tokens, 16
    )
    assert (layer.input_size, layer.hidden_size, layer.num_layers, layer.bidirectional) == (
        16,
        8,
        2,
        True,
    )
    assert type(layer).__name__ == "LSTM"
    assert type(layer_of(Settings(layer_norm=True), tokens, 16)).__name__ == "LayerNormGRU"
    # Training adds a channel for each feature with missing values.
    assert layer_of(Settings(), _contents(), 16).input_size == 4


def test_features_with_columns_of_their_own_are_counted_and_part_of_the_layer() -> None:
    lengths, words = np.array([2, 1]), np.array(["red", "", "blue"], dtype=object)
    beside = (
        records.Feature("age", np.array([31, 58], np.float32), per_sequence=True),
        records.Feature("colour", words),
    )
    numbers = dataset(
        np.ones((3, 2), np.float32), offsets_of(lengths), channels=("a", "b"), features=beside
    )
    tokens = dataset(np.array(["x", "y", "x"], dtype=object), offsets_of(lengths), features=beside)
    for read in (numbers, tokens):
        contents = contents_of(read.records, None)
        for missing in ("zero", "elapsed"):
            fitted = Preprocessor.fit(
                changed(read, labels=("p", "q")), task="classify", missing=missing
            )
            built = ModelConfig.of(Settings(missing=missing), fitted).encoder().recurrent
            assert (
                layer_of(Settings(missing=missing), contents, Settings().embedding).input_size
                == built.input_size
            )
        told = "'age' (numbers per sequence), 'colour' (categories per element, 2 different, 1 missing)"
        assert dict(data_facts(contents))["other features"] == told
    assert json.loads(as_json(_inspect(contents)))["data"]["beside"] == [
        {"name": "age", "per": "sequence", "categories": None, "missing": 0},
        {"name": "colour", "per": "element", "categories": 2, "missing": 1},
    ]
    assert "categories per element, 2 different" in _undrawn(_inspect(contents))


def test_sizes_beyond_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raglane._utils.memory.available_memory", lambda: 1e9)
    with pytest.raises(ArgumentError, match="a model of"):
        layer_of(Settings(hidden_size=20_000), _contents(), 16)
    long = replace(_contents(), lengths=np.array([10_000_000]))
    with pytest.raises(ArgumentError, match="a sequence of 10,000,000 elements"):
        layer_of(Settings(), long, 16)


def test_the_command_has_what_differs_from_the_defaults() -> None:
    settings = Settings(cell="lstm", hidden_size=256, bidirectional=True, num_layers=2, task="tag")
    words = [
        "--task",
        "tag",
        "--cell",
        "lstm",
        "--hidden-size",
        "256",
        "--num-layers",
        "2",
        "--bidirectional",
    ]
    assert words_of(settings) == words
    source = SequenceSource(
        None, "csv", Columns(label="my label", features=("a", "b"), tokens=False)
    )
    line = train_line(Path("-odd name.csv"), "features", source, Settings())
    columns = "--label-column 'my label' --feature-column a --feature-column b --tokens no"
    assert line == f"raglane train './-odd name.csv' --batch-size 32 {columns} --format csv"
    default = train_line(None, "features", SequenceSource(None, None), Settings(batch_size=8))
    lengths = train_line(Path("a.txt"), "lengths", SequenceSource(None, None), Settings())
    assert (default, lengths) == (
        "raglane demo --batch-size 8",
        "raglane train DATA --batch-size 32",
    )


def test_the_command_follows_the_recommendation() -> None:
    found = _inspect(_contents(), hidden_size=32)
    best = found.plan.best
    assert (
        (found.settings.batch_size, found.settings.bucket)
        == (best.batch_size, best.bucketed)
        == (256, True)
    )
    options = "--hidden-size 32 --batch-size 256 --bucket --missing zero --threads 2"
    assert found.command == f"raglane train 'my data.csv' {options}"
    plain = recommended(
        Settings(bucket=True), replace(best, bucketed=False), replace(_contents(), features=())
    )
    assert (plain.bucket, plain.missing) == (False, "raise")


def test_json_is_strict_and_says_what_was_found() -> None:
    found = _inspect(_contents(), ranks=4)
    read = json.loads(as_json(found), parse_constant=pytest.fail)
    assert (read["format"], read["version"]) == ("raglane inspection", 1)
    assert set(read) == {
        "format",
        "version",
        "summary",
        "data",
        "lengths",
        "batches",
        "plan",
        "command",
        "machine",
    }
    assert read["data"]["features"] == [{"name": "a", "missing": 0}, {"name": _ODD, "missing": 7}]
    assert read["data"]["labels"] == {"of": "sequence", "different": 2, "counts": {"x": 3, _ODD: 2}}
    assert read["lengths"]["count"] == 600
    assert len(read["lengths"]["percentiles"]) == 101
    assert sum(one["count"] for one in read["lengths"]["histogram"]) == 600
    assert len(read["plan"]["rows"]) == len(found.plan.rows)
    assert read["plan"]["best"] in read["plan"]["rows"]
    assert read["plan"]["ranks"] == 4
    assert read["command"] == found.command
    odd = replace(found.plan, best=replace(found.plan.best, train_seconds=float("nan")))
    assert json.loads(as_json(replace(found, plan=odd)))["plan"]["best"]["train_seconds"] is None


def test_the_page_is_one_file_with_one_script_of_charts(drawn: str) -> None:
    assert len(drawn) < 5_000_000
    assert drawn.count("vegaEmbed=") == 1
    assert len(re.findall(r'class="chart"', drawn)) == 4
    # All addresses are inside the page.
    for address in re.findall(r'(?:src|href)="([^"]*)"', drawn.split("<script>")[0]):
        assert address.startswith(("#", "data:,")), address
    assert "@import" not in drawn
    assert "url(http" not in drawn
    assert _ODD not in drawn
    assert "&lt;/script&gt;&lt;b&gt;&amp;&#34;\\u202e" in drawn
    assert "\u202e" not in drawn


def test_names_in_a_page_are_one_of_a_kind_and_all_tags_close(drawn: str) -> None:
    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []
            self.open: list[str] = []
            self.headings: list[int] = []

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.names += [value for name, value in attributes if name == "id" and value]
            if re.fullmatch("h[1-6]", tag):
                self.headings.append(int(tag[1]))
            if tag not in ("meta", "link", "input"):
                self.open.append(tag)

        def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.handle_starttag(tag, attributes)
            self.open.pop()

        def handle_endtag(self, tag: str) -> None:
            assert self.open.pop() == tag

    reader = Reader()
    reader.feed(drawn)
    assert reader.open == []
    assert len(reader.names) == len(set(reader.names))
    referred = set(re.findall(r'(?:href="|url\()#([^")]+)', drawn.split("<script>")[0]))
    assert referred <= set(reader.names)
    assert reader.headings[0] == reader.headings.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(reader.headings))


def test_a_chart_cannot_end_its_script() -> None:
    chart = Chart("name", {"data": _ODD}, _ODD, _ODD, PrintedTable(_ODD, [_ODD], [[_ODD]]))
    page = Page(
        _ODD, _ODD, _ODD, [(_ODD, _ODD)], [Part(_ODD, [chart], "part")], _ODD, _ODD, notes=[_ODD]
    )
    drawn = page.html().decode()
    # One is the script of the page.
    assert drawn.count("</script>") == 2
    assert "<b>" not in drawn
    content: Any = re.search(r'id="name-chart">(.*?)</script>', drawn)
    assert json.loads(content[1]) == {"data": _ODD}


def test_a_page_of_one_process_and_of_batches_too_large_to_draw() -> None:
    text = page.as_page(
        _inspect(replace(_contents(), lengths=np.full(300, 60_000), labels=None))
    ).decode()
    assert "too many elements to draw" in text
    assert "One process trains" in text
    assert len(re.findall(r'class="chart"', text)) == 3


LENGTHS = np.arange(1, 101).repeat(5)
CONTENTS = Contents(
    "data.csv",
    Path("data.csv"),
    np.random.default_rng(5).permutation(LENGTHS),
    "features",
    (ChannelFacts("a", 0), ChannelFacts("b", 505)),
    labels=labels_of("sequence", {"x": 300, "y": 200}),
)


@pytest.fixture(scope="module")
def found() -> Inspection:
    return _inspect(CONTENTS, 4, hidden_size=8)


@pytest.fixture(scope="module")
def tables(found: Inspection) -> str:
    return _undrawn(found)


def _table(text: str, caption: str) -> list[list[str]]:
    """The cells of a table of a page, without its headings and bars."""
    body = text.split(f'<table aria-label="{caption}">')[1].split("<tbody>")[1].split("</tbody>")[0]
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in body.split("</tr>")[:-1]]
    return [[html.unescape(cell) for cell in row if not cell.startswith("<span")] for row in rows]


def _values(chart: Any) -> list[dict[str, Any]]:
    """The points of a chart, in all of its layers."""
    if isinstance(chart, dict):
        own = chart.get("data", {}).get("values", []) if isinstance(chart.get("data"), dict) else []
        return [*own, *(one for part in chart.values() for one in _values(part))]
    return [one for part in chart for one in _values(part)] if isinstance(chart, list) else []


def test_percentiles_are_lengths_that_so_many_do_not_exceed() -> None:
    assert _inspect(replace(CONTENTS, lengths=np.arange(1, 1001))).percentiles == (
        1,
        *range(10, 1001, 10),
    )


def test_rows_of_batch_sizes_are_those_of_the_recommended_way(found: Inspection) -> None:
    sizes = [8, 16, 32, 64, 128, 256]
    assert [(row.batch_size, row.bucketed) for row in found.spreads] == [
        (n, g) for n in sizes for g in (False, True)
    ]
    assert {row.way for row in found.spreads} == {found.plan.best.way}


def test_examples_are_of_the_recommended_batches(found: Inspection) -> None:
    assert found.plan.best.bucketed
    assert found.examples == examples(
        CONTENTS.lengths, found.plan.best.batch_size or 0, bucketed=True
    )
    assert found.examples != examples(
        CONTENTS.lengths, found.plan.best.batch_size or 0, bucketed=False
    )


def test_sizes_are_those_that_the_sequences_fill() -> None:
    assert [batch_sizes(count) for count in (7, 8, 9, 64)] == [[7], [8], [8], [8, 16, 32, 64]]


def test_the_sentence_has_the_padding_of_both(found: Inspection) -> None:
    sparse = replace(found, summary=replace(found.summary, density=0.2))
    assert (
        "and no padding; one padded batch of all sequences would be 80% padding." in sparse.sentence
    )
    padded = replace(found.plan.best, schedule="padded", elements=1000, waste=200)
    assert "and 20% padding; one" in replace(found, plan=replace(found.plan, best=padded)).sentence


def test_the_text_counts_what_exists(found: Inspection) -> None:
    told = lines(found, "#")
    assert any(
        line.endswith("50.5% of one padded batch of all sequences would be real") for line in told
    )
    for order in ORDERS:
        wanted = [f"{one.density:.0%}" for one in found.densities if one.order == order]
        assert next(line for line in told if line.startswith(f"  {order} ")).split()[1:] == wanted


def test_the_json_counts_what_exists(found: Inspection) -> None:
    read = json.loads(as_json(found))
    for one in read["lengths"]["buckets"]:
        # Lengths from low to high, five times each.
        elements = 5 * sum(range(one["low"], one["high"] + 1))
        assert one["elements"] == elements
        assert one["density"] == pytest.approx(elements / (one["count"] * one["high"]))
    assert read["data"]["labels"]["counts"] == {"x": 300, "y": 200}
    assert read["batches"]["sequences_looked_at"] == 500
    long = _inspect(replace(CONTENTS, lengths=np.arange(70_000) % 9 + 1))
    assert json.loads(as_json(long))["batches"]["sequences_looked_at"] == 1 << 16


def test_the_tables_of_the_page_are_shares_of_the_right_whole(
    found: Inspection, tables: str
) -> None:
    buckets = _table(tables, "Buckets with similar numbers of sequences")
    assert [row[-1] for row in buckets] == [f"{one.elements / 25_250:.0%}" for one in found.buckets]
    assert [row[3] for row in buckets] == [f"{one.density:.0%}" for one in found.buckets]
    features = _table(tables, "Features, with their NaN or infinite elements")
    assert features == [["a", "0", "0.0%"], ["b", "505", "2.0%"]]  # of 25,250 elements
    assert _table(tables, "Labels, one per sequence") == [
        ["x", "300", "60.0%"],
        ["y", "200", "40.0%"],
    ]
    bins = _table(tables, "Sequences by length")
    assert sum(float(row[2].rstrip("%")) for row in bins) == pytest.approx(100, abs=1)


def test_the_page_marks_the_best_and_says_what_waiting_costs(
    found: Inspection, tables: str
) -> None:
    best = found.plan.best
    marked = re.findall(r'<tr class="best">(.*?)</tr>', tables)
    assert len(marked) == 1
    assert "256 sequences, bucketed" in marked[0]
    assert f"as recommended {best.rank_spread - 1:.0%} more." in tables
    waits = _table(tables, "Time of a step relative to the mean of its processes")
    assert [row[2] for row in waits] == [f"{row.rank_spread:.2f}" for row in found.spreads]


def test_charts_have_the_numbers_of_the_rows(found: Inspection) -> None:
    steps = [one for one in _values(charts.steps(found.spreads)) if "ms" in one]
    for row in found.spreads:
        order = "bucketed" if row.bucketed else "random"
        times = {
            one["time"]: one["ms"]
            for one in steps
            if (one["size"], one["order"]) == (row.batch_size, order)
        }
        wanted = {"median": row.step_p50, "90%": row.step_p90, "longest": row.step_max}
        assert times == pytest.approx({name: 1000 * seconds for name, seconds in wanted.items()})
    assert {
        (one["size"], one["order"]): one["more"] for one in _values(charts.spreads(found.spreads))
    } == {
        (row.batch_size, "bucketed" if row.bucketed else "random"): pytest.approx(
            row.rank_spread - 1
        )
        for row in found.spreads
    }


def test_the_chart_of_lengths_has_the_quantiles(found: Inspection) -> None:
    values = _values(charts.lengths(found))
    shares = {one["length"]: one["share"] for one in values if "share" in one}
    assert shares == {length: pytest.approx(length / 100) for length in range(1, 101)}
    assert {one["name"] for one in values if "name" in one} == {"median: 50", "95%: 95", "99%: 99"}
    assert sum(one["sequences"] for one in values if "sequences" in one) == 500
