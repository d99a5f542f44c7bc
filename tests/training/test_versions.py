"""A model folder of another version of Raglane says which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import raglane as rl
from raglane.errors import CheckpointError
from raglane.training.checkpoint import own_version

_DATA: Any = [[0.1, 0.5, 0.9], [0.9, 0.4]] * 2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    run = rl.fit(_DATA, ["up", "down"] * 2, epochs=1, hidden_size=3, validation_fraction=0)
    run.save(tmp_path / "model")
    return tmp_path / "model"


def _change(folder: Path, **entries: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_a_model_has_the_version_that_wrote_it(model: Path) -> None:
    assert own_version() == rl.__version__
    assert json.loads((model / "config.json").read_text())["raglane"] == rl.__version__
    assert rl.load(model).notes == ()


@pytest.mark.parametrize("version", ["0.0.1", "9.5"])
def test_another_version_that_can_be_read_is_a_note(model: Path, version: str) -> None:
    expected = rl.load(model).predict(_DATA).columns
    _change(model, raglane=version)
    loaded = rl.load(model)
    assert loaded.notes == (f"written by Raglane {version}; this is {rl.__version__}",)
    assert loaded.predict(_DATA).columns == expected


def test_a_model_that_cannot_be_read_names_both_versions(model: Path) -> None:
    _change(model, raglane="9.5", format_version=4)
    words = r"format version 4.*It was written by Raglane 9\.5; this is "
    with pytest.raises(CheckpointError, match=words):
        rl.load(model)
    _change(model, raglane="9.5", format_version=3, model={"cell": "gru", "new_entry": 1})
    with pytest.raises(CheckpointError, match=r"It was written by Raglane 9\.5; this is "):
        rl.load(model)
    # A folder of this version that is damaged has no other version.
    _change(model, raglane=rl.__version__)
    with pytest.raises(CheckpointError) as error:
        rl.load(model)
    assert "written by" not in str(error.value)


def test_a_format_without_versions_is_named() -> None:
    folder = Path(__file__).parents[1] / "runs/files/run_of_format_2"
    assert rl.load(folder).notes == (f"written by Raglane with format 2; this is {rl.__version__}",)
