"""``--on-bad-row skip``: training, evaluation and prediction without invalid rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import raglane as rl
from commands import FAST, fails, undrawn_pictures  # noqa: F401
from raglane.cli import main
from raglane.errors import ArgumentError


def _write(name: str, bad: dict[int, str]) -> None:
    rows = [{"x": [float(row % 3), 1.0], "y": float(row % 5)} for row in range(30)]
    lines = [bad.get(place, json.dumps(row)) for place, row in enumerate(rows)]
    Path(name).write_text("\n".join(lines))


def _places(path: Path) -> list[tuple[str, str]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [(row["location"], row["place"]) for row in rows]


def test_bad_rows_are_left_out_counted_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    _write("a.jsonl", {4: "{", 9: '{"x": [1.0], "y": "high"}'})
    _write("b.jsonl", {2: "]"})
    fails(["train", "a.jsonl", "--out", "run"], capsys, "a.jsonl, line 5 must be ... got bad JSON")
    assert not Path("run").exists()
    skip = ["--on-bad-row", "skip"]
    train = ["train", "a.jsonl", "--validation", "b.jsonl", "--test", "b.jsonl", "--out", "run", *FAST, *skip]
    assert main(train) == 0
    said = capsys.readouterr().out
    # The task of most rows: only one has a class.
    assert "task: regress (guessed" in said
    assert "rows left out, because they break a rule: 2 of 30; the first: line 5" in said
    assert "rows left out: 3, listed with reasons in run/skipped.jsonl" in said
    listed = [("a.jsonl", "line 5"), ("a.jsonl", "line 10"), ("b.jsonl", "line 3")]
    assert _places(Path("run", "skipped.jsonl")) == listed
    assert "Invalid rows left out: 3; skipped.jsonl lists them." in Path("run/card.md").read_text()
    # The run goes on in the same way, and is repeated so.
    assert main(["train", "--resume", "--out", "run", "--epochs", "2"]) == 0
    assert "rows left out: 3," in capsys.readouterr().out
    assert 'on-bad-row = "skip"' in Path("run/run.toml").read_text()
    # Other data is not skipped by default.
    fails(["evaluate", "run", "b.jsonl"], capsys, "b.jsonl, line 3 must be ... got bad JSON")
    assert main(["evaluate", "run", "b.jsonl", *skip]) == 0
    assert "rows left out: 1, listed with reasons in run/evaluation.json" in capsys.readouterr().out
    evaluation = json.loads(Path("run/evaluation.json").read_text())
    assert (evaluation["sequences"], evaluation["skipped"][0]["place"]) == (29, "line 3")
    fails(["predict", "run", "b.jsonl", "-o", "p.csv"], capsys, "b.jsonl, line 3 must be ... got bad JSON")
    assert main(["predict", "run", "b.jsonl", "-o", "p.csv", *skip]) == 0
    assert "rows left out: 1, listed with reasons in p.skipped.jsonl" in capsys.readouterr().out
    assert _places(Path("p.skipped.jsonl")) == [("b.jsonl", "line 3")]
    ids = [line.partition(",")[0] for line in Path("p.csv").read_text().splitlines()[1:]]
    assert ids == [str(row) for row in range(30) if row != 2]
    Path("b.jsonl").rename("p.skipped.jsonl")
    fails(["predict", "run", "p.skipped.jsonl", "-o", "p.csv", *skip], capsys, "a file other than the data")
    # A run that replaces this one, and leaves nothing out, has no such file.
    _write("a.jsonl", {})
    assert main(["train", "a.jsonl", "--out", "run", "--overwrite", *FAST, *skip]) == 0
    assert "rows left out: 0\n" in capsys.readouterr().out
    assert not Path("run", "skipped.jsonl").exists()


def test_what_a_program_holds_has_no_rows_to_leave_out() -> None:
    with pytest.raises(ArgumentError, match="on_bad_row"):
        rl.fit([[0.1, 0.2], [0.3]] * 4, ["a", "b"] * 4, on_bad_row="skip", epochs=1)
