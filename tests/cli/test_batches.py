"""Batches limited by elements, on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import FAST, fails, tree, undrawn_pictures, write_steps  # noqa: F401
from raglane.cli import main


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of 1 to 5 steps."""
    return write_steps(tmp_path_factory.mktemp("data") / "steps.csv")


def test_batches_of_elements(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for place, (flags, words) in enumerate(
        (
            (["--batch-elements", "9", "--bucket"], None),
            (["--batch-elements", "3", "--too-long", "drop", "--largest-first"], "left out"),
            (["--batch-elements", "3", "--too-long", "split"], "split"),
            (["--batch-elements", "3", "--too-long", "alone", "--task", "forecast"], "batches of their own"),
        )
    ):
        out = tmp_path / f"{place}"
        assert main(["train", str(data), *flags, "--out", str(out), *FAST]) == 0
        shown = capsys.readouterr().out
        assert ("longer than a batch" in shown) == (words is not None)
        if words is not None:
            assert f"sequences, {words}\n" in shown
            assert "longer than a batch of 3 elements: " in shown
        settings = json.loads((out / "run.json").read_text())["settings"]
        assert settings["batch_elements"] == int(flags[1])


def test_mistakes_are_one_line_and_leave_nothing(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", str(data), "--out", str(tmp_path / "run"), *FAST]
    for flags, words in (
        (["--batch-elements", "3"], ("at most the size of a batch, 3 elements", "--too-long split")),
        (["--batch-elements", "0"], ("batch-elements must be ... got 0", "at least 1")),
        (["--too-long", "drop"], ("too-long must be ... got 'drop'", "give --batch-elements")),
        (["--too-long", "keep", "--batch-elements", "3"], ("keep",)),
        (
            ["--batch-elements", "30", "--batch-size", "auto"],
            ("batch-size must be ... got auto", "leave one of them out"),
        ),
    ):
        fails([*train, *flags], capsys, *words)
        assert tree(tmp_path) == {}
