from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from raglane.cli import main
from raglane.data.formats import read
from raglane.planner import plan
from raglane.training import planned
from raglane.training.planned import plan_batches
from raglane.training.run import load_description
from raglane.training.settings import Settings


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "steps.jsonl"
    lines = [f'{{"values": {[float(i)] * (i % 7 + 1)}, "label": "{"ab"[i % 2]}"}}' for i in range(160)]
    path.write_text("\n".join(lines))
    return path


def test_batches_are_those_of_the_plan(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def watched(lengths: torch.Tensor, layer: torch.nn.Module, **options: object) -> object:
        asked.update(options, lengths=lengths, layer=layer)
        return plan(lengths, layer, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(planned, "plan", watched)
    training = read(data)
    settings, found = plan_batches(Settings(layer="lstm", hidden=5, layers=2), training)
    assert (settings.batch_size, settings.bucket) == (found.best.batch_size, found.best.grouped)
    assert settings.batch_size in (8, 16)
    assert (settings.layer, settings.hidden) == ("lstm", 5)
    assert asked["lengths"].tolist() == [i % 7 + 1 for i in range(160)]
    assert (asked["layer"].hidden_size, asked["layer"].num_layers) == (5, 2)
    assert asked["threads"] == [torch.get_num_threads()]
    assert {row.backend for row in found.rows} == {"cpu"}


def test_auto_on_the_command_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", str(data), "--hidden", "4", "--epochs", "1", "--out"]
    assert main([*words, str(tmp_path / "planned"), "--batch-size", "auto"]) == 0
    line = re.search(
        r"batches: (\d+) sequences (in random order|of similar lengths)\. An epoch", capsys.readouterr().out
    )
    assert line is not None
    settings = load_description(tmp_path / "planned").settings
    assert settings.batch_size == int(line[1])
    # Planning takes no random numbers: the same training as with that number.
    chosen = ["--batch-size", line[1], *(["--bucket"] if settings.bucket else [])]
    assert main([*words, str(tmp_path / "given"), *chosen]) == 0
    weights = [(tmp_path / name / "best" / "weights.safetensors").read_bytes() for name in ("planned", "given")]
    assert weights[0] == weights[1]


def test_a_batch_size_that_is_none(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for word, rule in (("x", "not a whole number, and not 'auto'"), ("1.5", "not a whole number"), ("0", "at least 1")):
        assert main(["train", str(data), "--out", str(tmp_path / "run"), "--batch-size", word]) == 2
        assert rule in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
