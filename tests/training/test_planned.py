"""The batch size that the planner chooses."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import Capsys, fails
from made_datasets import changed
from made_plans import BRIEF_LOOKS
from planner.made_up import make_up
from raglane import planner
from raglane.cli import main
from raglane.data import read
from raglane.planner import plan
from raglane.training.machine import plan_batches
from raglane.training.run import load_description
from raglane.training.settings import Settings


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("raglane.planner.calibration._LOOKS", BRIEF_LOOKS)
    path = tmp_path / "steps.jsonl"
    lines = [
        f'{{"values": {[float(i)] * (i % 7 + 1)}, "label": "{"ab"[i % 2]}"}}' for i in range(160)
    ]
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments and the result of the last call of the planner, with made-up costs."""
    make_up(monkeypatch)
    known: dict[str, Any] = {}

    def watched(lengths: torch.Tensor, layer: torch.nn.Module, **options: object) -> object:
        known.update(options, lengths=lengths, layer=layer)
        known["found"] = plan(lengths, layer, **options)  # type: ignore[arg-type]
        return known["found"]

    monkeypatch.setattr(planner, "plan", watched)
    return known


def test_batches_are_those_of_the_plan(data: Path, planned: dict[str, Any]) -> None:
    training = read(data)
    chosen = Settings(cell="lstm", hidden_size=5, num_layers=2)
    settings, why = plan_batches(chosen, training)
    found = planned["found"]
    assert (settings.batch_size, settings.bucket, why) == (
        found.best.batch_size,
        found.best.bucketed,
        found.why,
    )
    assert planned["lengths"].tolist() == [i % 7 + 1 for i in range(160)]
    assert (planned["layer"].hidden_size, planned["layer"].num_layers) == (5, 2)
    assert (planned["threads"], planned["processes"]) == ([torch.get_num_threads()], 1)
    assert {row.backend for row in found.rows} == {"cpu"}
    settings, why = plan_batches(replace(chosen, batch_elements=9), training, "batch_elements")
    best = planned["found"].best_by_elements
    assert (settings.batch_elements, settings.bucket) == (
        max(best.batch_elements, 7),
        best.bucketed,
    )
    assert best.batch_elements in {row.batch_elements for row in found.rows} - {None}
    assert "larger batches" in why or best.batch_elements == max(
        row.size for row in found.rows if not row.batch_size
    )


def test_ranks_share_a_batch_that_is_planned_for_one(data: Path, planned: dict[str, Any]) -> None:
    training = read(data)
    chosen = Settings(cell="lstm", hidden_size=5, num_layers=2, processes=2)
    settings, why = plan_batches(chosen, training)
    assert (planned["processes"], planned["threads"]) == (
        2,
        [max(len(os.sched_getaffinity(0)) // 2, 1)],
    )
    assert {row.batch_size for row in planned["found"].rows} == {8, None}
    assert settings.batch_size == 2 * 8
    assert "the slowest of 2 processes" in why
    settings, _ = plan_batches(replace(chosen, batch_elements=9), training, "batch_elements")
    # At least three of the longest sequences per rank.
    assert settings.batch_elements == max(
        2 * planned["found"].best_by_elements.batch_elements, 2 * 3 * 7
    )
    # The ranks share the memory of the machine.
    of_one = plan(
        planned["lengths"],
        planned["layer"],
        backends=planned["backends"],
        threads=planned["threads"],
    )
    assert 0.4 < planned["found"].most_elements / of_one.most_elements < 0.6
    # With chunks, the batch size is the number of streams, at most that of sequences.
    few = changed(training.subset(range(9)), labels=None)
    settings, _ = plan_batches(
        Settings("forecast", cell="lstm", hidden_size=5, num_layers=2, bptt_steps=3, processes=2),
        few,
    )
    assert planned["lengths"].max() == 3
    assert (settings.batch_size, settings.bucket) == (9, False)


def test_auto_on_the_command_line(data: Path, tmp_path: Path, capsys: Capsys) -> None:
    words = ["train", str(data), "--hidden-size", "4", "--epochs", "1", "--output"]
    assert main([*words, str(tmp_path / "planned"), "--batch-size", "auto"]) == 0
    line: Any = re.search(
        r"batches: (\d+) sequences (in random order|of similar lengths)\. An epoch",
        capsys.readouterr().out,
    )
    settings = load_description(tmp_path / "planned").settings
    assert settings.batch_size == int(line[1])
    # Planning draws no random numbers.
    chosen = ["--batch-size", line[1], *(["--bucket"] if settings.bucket else [])]
    assert main([*words, str(tmp_path / "given"), *chosen]) == 0
    weights = [
        (tmp_path / name / "best" / "weights.safetensors").read_bytes()
        for name in ("planned", "given")
    ]
    assert weights[0] == weights[1]


@pytest.mark.usefixtures("planned")
def test_elements_on_the_command_line(data: Path, tmp_path: Path, capsys: Capsys) -> None:
    words = [
        "train",
        str(data),
        "--hidden-size",
        "4",
        "--epochs",
        "1",
        "--output",
        str(tmp_path / "run"),
    ]
    assert main([*words, "--batch-elements", "auto", "--too-long", "drop", "--show-config"]) == 0
    assert 'batch-elements = "auto"' in capsys.readouterr().out
    assert main([*words, "--batch-elements", "auto", "--too-long", "drop"]) == 0
    line: Any = re.search(r"batches: up to (\d+) elements ", capsys.readouterr().out)
    assert load_description(tmp_path / "run").settings.batch_elements == int(line[1])


@pytest.mark.parametrize(
    ("word", "rule"), [("x", "neither a whole number nor 'auto'"), ("0", "at least 1")]
)
def test_an_invalid_batch_size(
    data: Path, tmp_path: Path, capsys: Capsys, word: str, rule: str
) -> None:
    fails(
        ["train", str(data), "--output", str(tmp_path / "run"), "--batch-size", word], capsys, rule
    )
    assert not (tmp_path / "run").exists()
