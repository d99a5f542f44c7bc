"""The model card of a run: its numbers against an obvious second count, for every task."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from commands import CARD_PICTURES, write_rows, write_steps
from raglane._utils.messages import metric_words
from raglane._utils.table import PrintedTable
from raglane.report import figures
from raglane.report.page import Page
from raglane.runs.card import make_card
from raglane.training.per_sequence import measure_sequences

_ODD = '</script><b>|`*&"'


def _card(
    monkeypatch: pytest.MonkeyPatch, data: Any, labels: Any = None, **options: Any
) -> tuple[rl.runs.run.Run, Page]:
    """Return a run and its card."""
    made: list[Page] = []

    def keep(*arguments: Any) -> Page:
        made.append(make_card(*arguments))
        return made[-1]

    monkeypatch.setattr("raglane.runs.card.make_card", keep)
    return rl.fit(
        data, labels, epochs=2, hidden_size=4, threads=1, progress=False, **options
    ), made[-1]


def _tables(card: Page) -> dict[str, PrintedTable]:
    """Return the first table of each part."""
    return {
        part.title: block
        for part in card.parts
        for block in reversed(part.blocks)
        if isinstance(block, PrintedTable)
    }


def test_a_card_of_every_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "svg", lambda _: b"<svg></svg>")
    for name in CARD_PICTURES:
        monkeypatch.setattr(f"raglane.runs.card.{name}", getattr(figures, name))
    random = np.random.default_rng(0)
    sequences = [
        random.normal(size=(length, 2)).tolist() for length in [1, 2, 3, 5, 8, 2, 4, 9, 1, 6]
    ]
    words = [[f"w{step % 3}" for step in range(len(one))] for one in sequences]
    tasks: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "classify": (sequences, ["a", _ODD] * 5, {}),
        "tag": (sequences, [["x" if row[0] > 0 else "y" for row in one] for one in sequences], {}),
        "regress": (sequences, [float(len(one)) for one in sequences], {}),
        "multilabel": (sequences, [["p"], ["p", "q"], [], ["q"], ["p"]] * 2, {}),
        "forecast": ([one + one for one in sequences], None, {}),
        "language": (words, None, {}),
        "transcribe": (words, [list("ab")[: len(one)] for one in sequences], {}),
    }
    for task, (data, labels, more) in tasks.items():
        test = (data, labels) if labels is not None else data
        run, card = _card(
            monkeypatch, data, labels, task=task, output=tmp_path / task, test=test, **more
        )
        text, page = (
            (tmp_path / task / "card.md").read_text(),
            (tmp_path / task / "report.html").read_text(),
        )
        numbers = run.evaluate(data, labels).numbers
        tables = _tables(card)
        hardest, by_length = tables["Hardest sequences"], tables["By length"]
        rows = {row[0]: row[-1] for row in tables["Results"].rows}
        expected = {metric_words(name): number for name, number in numbers.items()}
        assert {name: rows[name] for name in expected} == pytest.approx(expected, nan_ok=True), (
            task,
            rows,
        )
        assert "_" not in card.sentence
        assert hardest.columns[0] == "row"
        assert ("trained as a language model of data in memory" in text) == (task == "language")
        assert sum(row[1] for row in by_length.rows) == len(data)
        assert [row[-2] for row in hardest.rows] == sorted(
            (row[-2] for row in hardest.rows), reverse=True
        )
        assert "| lengths | sequences | loss |" in text
        assert task in text
        assert {"Results", "By length", "Hardest sequences", "Data", "Settings"} <= set(
            re.findall(r"^## (.*)$", text, re.M)
        )
        assert page.count("<svg") >= 3
        assert "http://" not in page.replace("http://www.w3.org", "")
        title = {"classify": "By class", "tag": "By class", "multilabel": "By label"}.get(task)
        assert [name for name in tables if name.startswith("By ")] == [
            *filter(None, [title]),
            "By length",
        ], task
        assert ("Errors" in tables) == ("Examples" in tables) == (task == "transcribe"), task
        if task == "classify":
            assert "</script><b>" not in page
            assert "\\</script\\>\\<b\\>\\|\\`\\*" in text


def test_scores_of_sequences_are_those_of_each_alone(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    metrics = {
        "classify": "accuracy",
        "tag": "accuracy",
        "forecast": "mae",
        "multilabel": "exact_match",
    }
    task: Any
    for task, metric in metrics.items():
        lengths = [3, 2, 5, 4, 7, 2]
        data = [random.normal(size=(length, 1)).tolist() for length in lengths]
        known: dict[str, Any] = {
            "classify": list("ababab"),
            "tag": [list("ab" * 4)[: len(one)] for one in data],
        }
        known["multilabel"] = [["a"], [], ["a", "b"], ["b"], ["a"], []]
        labels = known.get(task)
        run = rl.fit(
            data, labels, task=task, epochs=1, hidden_size=3, progress=False, validation_fraction=0
        )
        if task == "multilabel":  # no label is predicted, but some are at thresholds of a half
            run.model.get_buffer("thresholds").fill_(0.9)
        each = measure_sequences(run.saved, run.read(data, labels), torch.device("cpu"))
        alone = [run.evaluate([one], labels and [labels[place]]) for place, one in enumerate(data)]
        assert each.loss == pytest.approx([one["loss"] for one in alone], rel=1e-5), task
        assert each.metric == pytest.approx([one[metric] for one in alone], rel=1e-5), task
        whole = run.evaluate(data, labels)["loss"]
        assert each.loss @ each.count / each.count.sum() == pytest.approx(whole, rel=1e-5), task
        ranges = each.ranges()
        assert sum(one.sequences for one in ranges) == len(data)
        first = [
            place
            for place, length in enumerate(lengths)
            if ranges[0].low <= length <= ranges[0].high
        ]
        part = run.evaluate(
            [data[place] for place in first], labels and [labels[place] for place in first]
        )
        assert ranges[0].loss == pytest.approx(part["loss"], rel=1e-5), task


def test_of_many_sequences_some_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raglane.training.per_sequence._MOST", 4)
    data = [[0.1] * length for length in (1, 2, 3, 4, 5, 6)]
    run = rl.fit(
        data, list("ababab"), epochs=1, hidden_size=2, progress=False, validation_fraction=0
    )
    each = measure_sequences(run.saved, run.read(data, list("ababab")), torch.device("cpu"))
    assert len(each.rows) == 4
    assert sorted(each.rows.tolist()) == each.rows.tolist()
    assert each.lengths.tolist() == (each.rows + 1).tolist()
    hard = each.hardest(run.saved, torch.device("cpu"), 2)
    assert [one.length for one in hard] == [int(one.id) + 1 for one in hard]


def test_the_card_of_a_converted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raglane.training.per_sequence._MOST", 9)
    steps = write_steps(tmp_path / "steps.csv", 40)
    words = write_rows(
        tmp_path / "words.jsonl", ({"words": ["a", "b", "c"][: row % 4]} for row in range(40))
    )
    columns = {
        "classify": rl.data.Columns(label="label", id="id"),
        "language": rl.data.Columns(task="language", sequence="words"),
    }
    for task, data in (("classify", steps), ("language", words)):
        rl.data.convert(data, tmp_path / task, columns[task])
        run, card = _card(
            monkeypatch,
            tmp_path / task,
            None,
            task=task,
            output=tmp_path / f"run-{task}",
            batch_size=4,
        )
        results = _tables(card)["Results"]
        assert results.columns == ("metric", "training", "validation")
        assert not any("easured" in note for note in card.notes)
        assert "Hardest sequences" in _tables(card)
        rows = {row[0]: row for row in results.rows}
        best = run.result.state.history[run.result.state.best_epoch - 1]
        assert rows["loss"][2] == pytest.approx(best["validation_loss"], rel=1e-5)
    monkeypatch.setattr("raglane.training.per_sequence._MOST", 2)
    _, card = _card(monkeypatch, tmp_path / "classify", None, output=tmp_path / "some")
    assert card.notes[0] == "Measured on 2 of the 4 sequences of the validation part."
    assert sum(int(row[1]) for row in _tables(card)["By length"].rows) == 2


def test_a_card_says_what_it_could_not_measure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, labels = [[0.1], [0.2, 0.3], [0.5]], ["a", "b", "a"]
    _, card = _card(monkeypatch, data, labels, output=tmp_path / "all", validation_fraction=0)
    assert "Nothing was held out" in card.notes[0]
    assert _tables(card)["Results"].columns == ("metric", "training")
    text = (tmp_path / "all" / "card.md").read_text()
    assert "| seed | 0 |" in text
    assert "| epochs | 2 |" in text
