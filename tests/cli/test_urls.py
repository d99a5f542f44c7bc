"""Commands on data and runs at URLs, whose copies are in the user's cache folder."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

import raglane as rl
from commands import FAST, Capsys, prints
from raglane.cli import main
from raglane.data.sources import locations

_DATA = "sequence,kind\naab,x\nabb,y\nba,x\nbb,y\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("urls")
    (folder / "data.csv").write_text(_DATA)
    options: dict[str, Any] = {
        "sequence": "sequence",
        "label": "kind",
        "epochs": 1,
        "hidden_size": 2,
    }
    rl.fit(folder / "data.csv", output=folder / "run", validation_fraction=0, **options)
    return folder / "run"


@pytest.fixture
def run(trained: Path) -> str:
    """The URL of a run."""
    store = fsspec.filesystem("memory")
    store.put(str(trained), "/there/run", recursive=True)
    store.pipe("/there/data.csv", _DATA.encode())
    return "memory://there/run"


def _age(days: float) -> None:
    """Let all copies be older."""
    for place in locations.copies().iterdir():
        os.utime(place, (time.time() - days * 86400,) * 2)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RAGLANE_CACHE", "../cache")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def test_results_of_a_run_at_a_url_are_in_the_current_folder(run: str) -> None:
    assert main(["evaluate", run, "memory://there/data.csv"]) == 0
    assert {path.name for path in Path().iterdir()} == {
        "evaluation.json",
        "confusion.png",
        "confusion.txt",
    }
    assert not list(locations.copies().rglob("evaluation.json"))
    assert main(["predict", run, "memory://there/data.csv", "-o", "predictions.csv"]) == 0
    assert len(Path("predictions.csv").read_text().splitlines()) == 5


def test_results_are_in_the_folder_of_the_option(trained: Path, capsys: Capsys) -> None:
    Path("data.csv").write_text(_DATA)
    evaluate = ["evaluate", str(trained), "data.csv"]
    prints(
        [*evaluate, "-o", "new/results"],
        capsys,
        f"written: {Path('new', 'results', 'evaluation.json')}, ",
    )
    assert Path("new/results/confusion.txt").is_file()
    assert not (trained / "evaluation.json").exists()
    assert main([*evaluate, "-o", "data.csv"]) == 2
    assert "--output must be in a writable folder" in capsys.readouterr().err
    assert main(evaluate) == 0
    assert (trained / "evaluation.json").is_file()


def test_old_copies_are_removed_when_another_is_made(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = [
        "train",
        "memory://there/data.csv",
        "--sequence-column",
        "sequence",
        *FAST,
        "--validation-fraction",
        "0",
    ]
    assert main([*train, "--output", "one", "--epochs", "1"]) == 0
    (place,) = locations.copies().iterdir()

    def kept_after_another() -> bool:
        locations.fetched("memory://there/run")
        return place.exists()

    _age(29)
    assert kept_after_another()
    with monkeypatch.context() as full:
        full.setattr(locations, "_ROOM", 0)
        _age(1)
        assert kept_after_another()
        _age(3)
        assert not kept_after_another()
    locations.fetched("memory://there/data.csv")
    assert kept_after_another()
    _age(31)
    assert not kept_after_another()
    # The copy that is fetched remains, however large it is.
    assert len(list(locations.copies().iterdir())) == 1
    # A run whose data was removed is resumed with the URL.
    assert main([*train, "--output", "one", "--epochs", "2", "--resume"]) == 0
