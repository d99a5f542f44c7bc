"""A run that an earlier format wrote: it loads, and training continues."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import raglane as rl
from raglane.cli import main
from raglane.data import Columns
from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.runs.sources import SequenceSource

# Of the version that wrote the files.
PREDICTED = [0.46759355, 0.49740472, 0.44843954, 0.49205408]
FOLDER = Path(__file__).parent / "files" / "run_of_format_2"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "run"))


def test_the_model_gives_the_same_predictions(run: Path) -> None:
    loaded = rl.load(run)
    assert loaded.model.config.pooling == "final"
    found = loaded.predict(run / "walks.csv", probabilities=True)["p_up"][:4]
    assert found == pytest.approx(PREDICTED, abs=1e-6)


def test_training_continues(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    assert main(["train", "--resume", "--output", str(run), "--epochs", "3", "--quiet"]) == 0
    assert json.loads((run / "run.json").read_text())["format_version"] == 3
    assert json.loads((run / "run.json").read_text())["settings"]["pooling"] == "final"
    lines = (run / "curves.csv").read_text().splitlines()
    assert len(lines) == 4


def test_its_options_are_a_config(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    again = ["train", "--config", "run.toml", "--output", "again", "--epochs", "1", "--quiet"]
    assert main(again) == 0
    settings = json.loads((run / "again" / "run.json").read_text())["settings"]
    assert (settings["pooling"], settings["too_long"], settings["missing"]) == (
        "final",
        "chunk",
        "raise",
    )
    assert settings["processes"] == 1


def test_columns_are_those_that_earlier_versions_stored() -> None:
    stored = {"features": ["a", "b"], "tokens": "no", "label": "y", "on_bad_row": "skip"}
    source = SequenceSource(None, None).chosen(stored)
    assert source.columns == Columns(features=("a", "b"), tokens=False, label="y")
    assert source.on_bad_row == "skip"
    again = json.loads(json.dumps(source.stored))
    assert SequenceSource(None, None).chosen(again) == source
    assert not {"task", "need_labels"} & set(again)
    for wrong in ({"tokens": "maybe"}, {"features": [3]}, {"sizes": "a"}, {"on_bad_row": "drop"}):
        with pytest.raises((ArgumentError, ArgumentTypeError)):
            SequenceSource(None, None).chosen(wrong)
