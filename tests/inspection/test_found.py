"""Inspections: the layer, the recommended command, JSON and page."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from made_datasets import changed, dataset
from raglane._utils.table import Table
from raglane.data import records
from raglane.data.conversion import Progress
from raglane.data.preprocess import Preprocessor
from raglane.data.records import offsets_of
from raglane.errors import ArgumentError
from raglane.report.page import Chart, Page, Part
from raglane.runs.inspection import page
from raglane.runs.inspection.inspect import (
    Inspection,
    as_json,
    data_facts,
    inspect,
    layer_of,
    lines,
    recommended,
    train_line,
    words_of,
)
from raglane.runs.inspection.reading import Contents, Feature, contents_of, labels_of
from raglane.runs.sources import ColumnNames
from raglane.training.model import ModelConfig
from raglane.training.settings import Settings

_ODD = '</script><b>&"\u202e'


def _inspect(contents: Contents, ranks: int = 1, fresh: bool = False, **settings: object) -> Inspection:
    chosen = Settings(**settings)  # type: ignore[arg-type]
    return inspect(contents, chosen, columns=ColumnNames(), format=None, ranks=ranks, fresh=fresh, progress=Progress())


def _contents(count: int = 600) -> Contents:
    lengths = np.random.default_rng(3).integers(0, 40, count)
    labels = labels_of("sequence", {"x": 3, _ODD: 2})
    features = Feature("a", 0), Feature(_ODD, 7)
    return Contents(_ODD, Path("my data.csv"), lengths, "features", features, labels=labels, notes=(_ODD,))


@pytest.fixture(scope="module")
def drawn() -> str:
    with pytest.MonkeyPatch.context() as patch:
        from made_plans import make_plan

        patch.setattr("raglane.runs.inspection.inspect.plan", make_plan)
        return page.as_page(_inspect(_contents(1500), ranks=4)).decode()


def test_the_gain_that_is_told_is_the_gain_of_the_table() -> None:
    found = _inspect(_contents())
    text, read = "\n".join(lines(found, "#")), json.loads(as_json(found))["plan"]
    of_torch = min(row["train_seconds"] for row in read["rows"] if row["backend"] == "torch")
    gain = f"{of_torch / read['best']['train_seconds']:.1f} times as fast as the fastest of torch"
    for told in (text, read["why"], page.as_page(found).decode()):
        assert re.findall(r"[\d.]+ times as fast as the fastest of torch", told) == [gain]


def test_the_layer_is_what_training_builds() -> None:
    tokens = Contents("", None, np.array([3, 2]), "tokens", vocabulary=9)
    layer = layer_of(Settings(cell="lstm", hidden_size=8, num_layers=2, bidirectional=True), tokens, 16)
    assert (layer.input_size, layer.hidden_size, layer.num_layers, layer.bidirectional) == (16, 8, 2, True)
    assert type(layer).__name__ == "LSTM"
    assert type(layer_of(Settings(layer_norm=True), tokens, 16)).__name__ == "LayerNormGRU"
    # Training adds a flag per channel, because values are missing.
    assert layer_of(Settings(), _contents(), 16).input_size == 4


def test_features_with_columns_of_their_own_are_counted_and_part_of_the_layer() -> None:
    lengths, words = np.array([2, 1]), np.array(["red", "", "blue"], dtype=object)
    beside = (
        records.Feature("age", np.array([31, 58], np.float32), per_sequence=True),
        records.Feature("colour", words),
    )
    numbers = dataset(np.ones((3, 2), np.float32), offsets_of(lengths), channels=("a", "b"), features=beside)
    tokens = dataset(np.array(["x", "y", "x"], dtype=object), offsets_of(lengths), features=beside)
    for read in (numbers, tokens):
        contents = contents_of(read.records, None)
        for missing in ("zero", "elapsed"):
            fitted = Preprocessor.fit(changed(read, labels=("p", "q")), task="classify", missing=missing)
            built = ModelConfig.of(Settings(missing=missing), fitted).encoder().recurrent
            assert layer_of(Settings(missing=missing), contents, Settings().embedding).input_size == built.input_size
        told = dict(data_facts(contents))
        assert (
            told["other features"]
            == "'age' (numbers per sequence), 'colour' (categories per element, 2 different, 1 missing)"
        )
    found = json.loads(as_json(_inspect(contents)))["data"]["beside"]
    assert found == [
        {"name": "age", "per": "sequence", "categories": None, "missing": 0},
        {"name": "colour", "per": "element", "categories": 2, "missing": 1},
    ]
    assert "categories per element, 2 different" in page.as_page(_inspect(contents)).decode()


def test_what_no_memory_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raglane._utils.memory.available_memory", lambda: 1e9)
    with pytest.raises(ArgumentError, match="a model of"):
        layer_of(Settings(hidden_size=20_000), _contents(), 16)
    long = replace(_contents(), lengths=np.array([10_000_000]))
    with pytest.raises(ArgumentError, match="a sequence of 10,000,000 elements"):
        layer_of(Settings(), long, 16)


def test_the_command_has_what_differs_from_the_defaults() -> None:
    settings = Settings(cell="lstm", hidden_size=256, bidirectional=True, num_layers=2, task="tag")
    words = ["--task", "tag", "--cell", "lstm", "--hidden-size", "256", "--num-layers", "2", "--bidirectional"]
    assert words_of(settings) == words
    names = ColumnNames(label="my label", features=["a", "b"])
    line = train_line(Path("-odd name.csv"), "features", "csv", names, Settings())
    assert line == (
        "raglane train './-odd name.csv' --batch-size 32 --label-column 'my label' --feature-column a "
        "--feature-column b --format csv"
    )
    default = train_line(None, "features", None, ColumnNames(), Settings(batch_size=8))
    assert default == "raglane train --batch-size 8"
    lengths = train_line(Path("a.txt"), "lengths", None, ColumnNames(), Settings())
    assert lengths == "raglane train DATA --batch-size 32"


def test_the_command_follows_the_recommendation() -> None:
    found = _inspect(_contents(), hidden_size=32)
    best = found.plan.best
    assert (found.settings.batch_size, found.settings.bucket) == (best.batch_size, best.grouped) == (256, True)
    assert found.command == (
        "raglane train 'my data.csv' --hidden-size 32 --batch-size 256 --bucket --missing zero --threads 2"
    )
    plain = recommended(Settings(bucket=True), replace(best, grouped=False), replace(_contents(), features=()))
    assert (plain.bucket, plain.missing) == (False, "error")


def test_json_is_strict_and_documented() -> None:
    found = _inspect(_contents(), ranks=4)
    odd = replace(found.plan, best=replace(found.plan.best, train_seconds=float("nan")))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    read = json.loads(as_json(replace(found, plan=odd)), parse_constant=refuse)
    assert (read["format"], read["version"]) == ("raglane inspection", 1)
    assert set(read) == {"format", "version", "summary", "data", "lengths", "batches", "plan", "command", "machine"}
    assert read["data"]["features"] == [{"name": "a", "missing": 0}, {"name": _ODD, "missing": 7}]
    assert read["data"]["labels"] == {"of": "sequence", "different": 2, "counts": {"x": 3, _ODD: 2}}
    assert len(read["plan"]["rows"]) == len(found.plan.rows)
    assert read["plan"]["best"]["train_seconds"] is None
    assert read["command"] == found.command


def test_the_page_is_one_file_with_one_script_of_charts(drawn: str) -> None:
    assert len(drawn) < 5_000_000
    assert drawn.count("vegaEmbed=") == 1
    assert len(re.findall(r'class="chart"', drawn)) == 4
    # Nothing is loaded: no address but those that name a format.
    for address in re.findall(r'(?:src|href)="([^"]*)"', drawn.split("<script>")[0]):
        assert address.startswith(("#", "data:,")), address
    assert "@import" not in drawn
    assert "url(http" not in drawn
    # Texts of the data are escaped.
    assert _ODD not in drawn
    assert "\u202e" not in drawn


def test_names_in_a_page_are_one_of_a_kind_and_all_tags_close(drawn: str) -> None:
    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []
            self.open: list[str] = []
            self.headings: list[int] = []

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            found = dict(attributes)
            self.names += [name for name in [found.get("id")] if name]
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
    assert reader.headings[0] == 1
    assert reader.headings.count(1) == 1
    assert all(later <= earlier + 1 for earlier, later in pairwise(reader.headings))


def test_a_chart_cannot_end_its_script() -> None:
    chart = Chart("name", {"data": _ODD}, _ODD, _ODD, Table(_ODD, [_ODD], [[_ODD]]))
    page = Page(_ODD, _ODD, _ODD, [(_ODD, _ODD)], [Part(_ODD, [chart], "part")], _ODD, _ODD, notes=[_ODD])
    drawn = page.html().decode()
    # The other one is the script of the page.
    assert drawn.count("</script>") == 2
    assert "<b>" not in drawn
    content = re.search(r'id="name-chart">(.*?)</script>', drawn)
    assert content is not None
    assert json.loads(content[1]) == {"data": _ODD}


def test_one_process_does_not_wait() -> None:
    found = _inspect(replace(_contents(30), labels=None))
    text = page.as_page(found).decode()
    assert "One process trains" in text
    assert len(re.findall(r'class="chart"', text)) == 3


def test_batches_too_large_to_draw_leave_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _inspect(replace(_contents(), lengths=np.full(300, 60_000)))
    assert "too many elements to draw" in page.as_page(found).decode()
