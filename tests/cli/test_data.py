"""Data on the command line: features, limits of batches, empty sequences, names and bad rows."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

import raglane as rl
from commands import FAST, Capsys, fails, prints, read_rows, tree, write_rows, write_steps
from raglane.cli import main
from raglane.data import read
from raglane.errors import ArgumentError
from raglane.runs.parts import hold_out


def test_features_from_training_to_prediction(tmp_path: Path, capsys: Capsys) -> None:
    rows = [
        {
            "load": [float(step % 3) for step in range(number % 3 + 1)],
            "zone": [step % 2 for step in range(number % 3 + 1)],
            "town": ["Rome", "Bonn"][number % 2],
            "age": number,
            "kind": "ab"[number % 2],
        }
        for number in range(12)
    ]
    data, run = tmp_path / "meters.jsonl", tmp_path / "run"
    data.write_text("\n".join(map(json.dumps, rows)))
    named = ["--sequence-column", "load", "--feature-column", "zone", "--static-column", "town"]
    named += ["--static-column", "age", "--categorical-column", "zone", "--label-column", "kind"]
    printed = prints(["train", str(data), "--output", str(run), *named, *FAST], capsys)
    told = "of 1 channel and zone (categories per element), town (categories per sequence), age (numbers per sequence)"
    assert told in printed
    # The run knows its columns, and Python tells the same.
    assert main(["predict", str(run), str(data), "-o", str(tmp_path / "p.jsonl"), "--quiet"]) == 0
    shares = [row["probability"] for row in read_rows(tmp_path / "p.jsonl")]
    assert rl.load(run).predict(data)["probability"] == shares
    columns: dict[str, Any] = {"sequence": "load", "features": ["zone"], "static": ["town", "age"]}
    settings: dict[str, Any] = {
        "label": "kind",
        "categorical": ["zone"],
        "epochs": 2,
        "hidden_size": 4,
        "threads": 1,
    }
    own = rl.fit(data, output=tmp_path / "own", **columns, **settings)
    assert tree(tmp_path / "own" / "best") == tree(run / "best")
    assert own.preprocessor.categories == (3, 3)
    assert main(["evaluate", str(run), str(data)]) == 0
    assert main(["train", "--resume", "--output", str(run), "--epochs", "3", "--quiet"]) == 0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sequences of 1 to 5 steps."""
    return write_steps(tmp_path_factory.mktemp("data") / "steps.csv")


def test_batches_of_elements(data: Path, tmp_path: Path, capsys: Capsys) -> None:
    for place, (flags, words) in enumerate(
        (
            (["--batch-elements", "9", "--bucket"], None),
            (["--batch-elements", "3", "--too-long", "drop", "--largest-first"], "left out"),
            (["--batch-elements", "3", "--too-long", "chunk"], "cut into chunks"),
            (
                ["--batch-elements", "3", "--too-long", "alone", "--task", "forecast"],
                "batches of their own",
            ),
        )
    ):
        out = tmp_path / f"{place}"
        shown = prints(["train", str(data), *flags, "--output", str(out), *FAST], capsys)
        assert ("longer than a batch" in shown) == (words is not None)
        if words is not None:
            assert f"sequences, {words}\n" in shown
            assert "longer than a batch of 3 elements: " in shown
        assert json.loads((out / "run.json").read_text())["settings"]["batch_elements"] == int(
            flags[1]
        )


def test_mistakes_are_one_line_and_leave_nothing(
    data: Path, tmp_path: Path, capsys: Capsys
) -> None:
    train = ["train", str(data), "--output", str(tmp_path / "run"), *FAST]
    for flags, words in (
        (
            ["--batch-elements", "3"],
            ("at most the size of a batch, 3 elements", "--too-long chunk"),
        ),
        (["--too-long", "drop"], ("too-long must be ... got 'drop'", "Pass --batch-elements")),
        (
            ["--batch-elements", "30", "--batch-size", "auto"],
            ("batch-size must be ... got auto", "Leave one of them"),
        ),
    ):
        fails([*train, *flags], capsys, *words)
        assert tree(tmp_path) == {}


_NOTE = "class follows from the initial state only"


def _write(path: Path, lengths: list[int]) -> Path:
    return write_rows(
        path, ({"x": [0.5] * length, "y": "ab"[row % 2]} for row, length in enumerate(lengths))
    )


def _said(capsys: Capsys, *arguments: object, of: str = "initial state") -> list[str]:
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if of in line]


def test_empty_sequences_with_a_class_are_named_once(tmp_path: Path, capsys: Capsys) -> None:
    full, some = (
        _write(tmp_path / "full.jsonl", [2] * 8),
        _write(tmp_path / "some.jsonl", [2, 1, 0, 3, 0, 1, 2, 1]),
    )
    one = _write(tmp_path / "one.jsonl", [0, 2, 1, 1])
    two = "2 of 8 sequences are empty (the first: row 2): their " + _NOTE
    assert [note for note in read(some).notes if "initial" in note] == [two]
    run = tmp_path / "run"
    assert _said(capsys, "train", full, "--output", run, *FAST) == []
    lines = _said(
        capsys,
        "train",
        some,
        "--validation",
        one,
        "--test",
        some,
        "--output",
        tmp_path / "other",
        *FAST,
    )
    assert lines == [
        two,
        f"{one}: 1 of 4 sequences is empty (row 0): its {_NOTE}",
        f"{some}: {two}",
    ]
    assert _said(capsys, "evaluate", run, full) == []
    assert _said(capsys, "evaluate", run, some) == [two]
    assert _said(capsys, "predict", run, some, "-o", tmp_path / "p.csv") == [two]
    assert _said(capsys, "predict", run, some, "-o", tmp_path / "p.csv", "-q") == []


def test_categories_unseen_in_training_are_counted(tmp_path: Path, capsys: Capsys) -> None:
    seen, other, run = tmp_path / "seen.csv", tmp_path / "other.csv", tmp_path / "run"
    seen.write_text(
        "id,x,town,y\n"
        + "".join(f"{row},{row},{('Oslo', 'Bergen')[row % 2]},{row % 2}\n" for row in range(8))
    )
    assert main(["train", str(seen), "-o", str(run), *FAST, "-q", "--label-column", "y"]) == 0
    other.write_text("id,x,town,y\n0,1,Oslo,0\n0,2,Oslo,0\n1,3,Roma,1\n2,3,Oslo,1\n2,3,Roma,1\n")
    line = "categories of 'town' unseen in training: 2 of 5 ('Roma')"
    for command in (["evaluate", run], ["predict", run, "-o", tmp_path / "p.csv"]):
        for data, lines in ((seen, []), (other, [line])):
            assert _said(capsys, *command[:2], data, *command[2:], of="of 'town'") == lines
            assert _said(
                capsys,
                *command[:2],
                data,
                *command[2:],
                of="no time column: rows keep the order of the file",
            )
    seen.write_text("text,y\n" + "hot day,a\ncold night,b\n" * 9)
    other.write_text("text,y\nHot day,a\nnight,b\n")
    assert main(["train", str(seen), "-o", str(run), *FAST, "-q", "--overwrite"]) == 0
    line = "tokens that are not in the vocabulary: 1 of 3 ('Hot')"
    assert [_said(capsys, "evaluate", run, data, of="vocabulary") for data in (seen, other)] == [
        [],
        [line],
    ]


def test_ids_beyond_64_bits_are_written_as_text(tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    ids = [2**63, 10**30, 5, 6]
    data.write_text(
        "id,x,y\n" + "".join(f"{name},1,{'ab'[row % 2]}\n" for row, name in enumerate(ids))
    )
    run = tmp_path / "run"
    assert (
        main(["train", str(data), "--output", str(run), *FAST, "-q", "--validation-fraction", "0"])
        == 0
    )
    for kind in ("csv", "jsonl", "parquet"):
        assert main(["predict", str(run), str(data), "-o", str(tmp_path / f"p.{kind}"), "-q"]) == 0
    assert (tmp_path / "p.csv").read_text().splitlines()[2].startswith(f"{10**30},")


def test_a_name_that_is_not_utf8_goes_through_a_run(tmp_path: Path) -> None:
    data = tmp_path / "caf\udce9.jsonl"
    _write(data, [2] * 8)
    run = tmp_path / "\udce9$^{"
    assert main(["train", str(data), "--test", str(data), "--output", str(run), *FAST, "-q"]) == 0
    assert main(["train", "--resume", "--output", str(run), "--epochs", "3", "-q"]) == 0
    assert main(["evaluate", str(run), "-q"]) == 0


def test_the_held_out_part_has_no_sequence_of_the_training_part(tmp_path: Path) -> None:
    data = write_rows(
        tmp_path / "data.jsonl", ({"id": row, "x": [1.0], "y": "ab"[row % 2]} for row in range(40))
    )
    training, validation = hold_out(read(data), 0.3, 0)
    assert len(validation) == 12
    assert sorted([*(training.ids or ()), *(validation.ids or ())]) == list(range(40))


def test_a_long_label_takes_its_room_once(tmp_path: Path) -> None:
    """NumPy's arrays of strings would allocate its length for every row."""
    labels = ["l" * 10**5, *"ab" * 500]
    records = read(
        write_rows(tmp_path / "data.jsonl", ({"x": [1.0], "y": label} for label in labels))
    )
    tracemalloc.start()
    training, validation = hold_out(records, 0.1, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6
    assert len(training) + len(validation) == 1001


def _write_rows(name: str, bad: dict[int, str]) -> None:
    rows = [{"x": [float(row % 3), 1.0], "y": float(row % 5)} for row in range(30)]
    Path(name).write_text(
        "\n".join([bad.get(place, json.dumps(row)) for place, row in enumerate(rows)])
    )


def _places(path: Path) -> list[tuple[str, str]]:
    return [(row["location"], row["place"]) for row in read_rows(path)]


def test_bad_rows_are_left_out_counted_and_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    _write_rows("a.jsonl", {4: "{", 9: '{"x": [1.0], "y": "high"}'})
    _write_rows("b.jsonl", {2: "]"})
    fails(
        ["train", "a.jsonl", "--output", "run"], capsys, "a.jsonl, line 5 must be ... got bad JSON"
    )
    assert not Path("run").exists()
    skip = ["--on-bad-row", "skip"]
    train = [
        "train",
        "a.jsonl",
        "--validation",
        "b.jsonl",
        "--test",
        "b.jsonl",
        "--output",
        "run",
        *FAST,
        *skip,
    ]
    said = prints(train, capsys)
    # The task of most rows: only one has a class.
    assert "task: regress (guessed" in said
    assert "rows left out, because they break a rule: 2 of 30; the first: line 5" in said
    assert "rows left out: 3, listed with reasons in run/skipped.jsonl" in said
    listed = [("a.jsonl", "line 5"), ("a.jsonl", "line 10"), ("b.jsonl", "line 3")]
    assert _places(Path("run", "skipped.jsonl")) == listed
    assert "Invalid rows left out: 3; skipped.jsonl lists them." in Path("run/card.md").read_text()
    # The run goes on in the same way, and is repeated so.
    prints(["train", "--resume", "--output", "run", "--epochs", "2"], capsys, "rows left out: 3,")
    assert 'on-bad-row = "skip"' in Path("run/run.toml").read_text()
    # Other data is not skipped by default.
    fails(["evaluate", "run", "b.jsonl"], capsys, "b.jsonl, line 3 must be ... got bad JSON")
    assert main(["evaluate", "run", "b.jsonl", *skip]) == 0
    assert "rows left out: 1, listed with reasons in run/evaluation.json" in capsys.readouterr().out
    evaluation = json.loads(Path("run/evaluation.json").read_text())
    assert (evaluation["sequences"], evaluation["skipped"][0]["place"]) == (29, "line 3")
    fails(
        ["predict", "run", "b.jsonl", "-o", "p.csv"],
        capsys,
        "b.jsonl, line 3 must be ... got bad JSON",
    )
    assert main(["predict", "run", "b.jsonl", "-o", "p.csv", *skip]) == 0
    assert "rows left out: 1, listed with reasons in p.skipped.jsonl" in capsys.readouterr().out
    assert _places(Path("p.skipped.jsonl")) == [("b.jsonl", "line 3")]
    ids = [line.partition(",")[0] for line in Path("p.csv").read_text().splitlines()[1:]]
    assert ids == [str(row) for row in range(30) if row != 2]
    Path("b.jsonl").rename("p.skipped.jsonl")
    fails(
        ["predict", "run", "p.skipped.jsonl", "-o", "p.csv", *skip],
        capsys,
        "a file other than the data",
    )
    # A run that replaces this one, and leaves nothing out, has no such file.
    _write_rows("a.jsonl", {})
    prints(
        ["train", "a.jsonl", "--output", "run", "--overwrite", *FAST, *skip],
        capsys,
        "rows left out: 0\n",
    )
    assert not Path("run", "skipped.jsonl").exists()


def test_data_in_memory_has_no_rows_to_skip() -> None:
    with pytest.raises(ArgumentError, match="on_bad_row"):
        rl.fit([[0.1, 0.2], [0.3]] * 4, ["a", "b"] * 4, on_bad_row="skip", epochs=1)
