"""Mistakes in data, files and options end in one line, and change no file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from commands import FAST, Capsys, fails, read_rows, tree, write_rows, write_steps
from raglane.cli import main
from small_files import put


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    write_steps(folder / "ok.csv")
    rows = [
        {"seq": ["p", "q", "r"][: number % 4], "kind": "xy"[number % 2]} for number in range(12)
    ]
    write_rows(folder / "words.jsonl", rows)
    for data, name in (("ok.csv", "run"), ("words.jsonl", "words")):
        assert (
            main(["train", str(folder / data), "--output", str(folder / name), *FAST, "--quiet"])
            == 0
        )
    return folder


def test_predictions_never_replace_the_data_or_the_model(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    data = write_steps(tmp_path / "data.csv")
    link, hard, dangling = tmp_path / "link.csv", tmp_path / "hard.csv", tmp_path / "to-new.csv"
    link.symlink_to(data)
    hard.hardlink_to(data)
    dangling.symlink_to(work / "run" / "best" / "new.csv")
    before, model = tree(tmp_path), tree(work)
    monkeypatch.chdir(tmp_path)
    command = ["predict", str(work / "run")]
    for output in (
        "data.csv",
        str(data),
        "./../" + tmp_path.name + "/data.csv",
        "link.csv",
        "hard.csv",
    ):
        fails(
            [*command, str(data), "-o", output],
            capsys,
            "output must be ",
            "a file other than the data",
        )
    fails([*command, "link.csv", "-o", "data.csv"], capsys, "output must be ", "the data")
    fails([*command, "link.csv", "-o", "link.csv"], capsys, "output must be ", "the data")
    for output in ("best/p.csv", "last/p.jsonl", "curves.csv"):
        fails(
            [*command, str(data), "-o", str(work / "run" / output)],
            capsys,
            "a file that is not of the run",
        )
    fails([*command, str(data), "-o", str(dangling)], capsys, "a file that is not of the run")
    command = ["predict", str(work / "run/best"), "data.csv"]
    fails([*command, "-o", str(work / "run/best/p.csv")], capsys, "a file that is not of")
    assert (tree(tmp_path), tree(work)) == (before, model)
    for output in ("new.csv", "new.csv", str(work / "run" / "p.csv")):
        assert main([*command, "-o", output, "-q"]) == 0
    (work / "run" / "p.csv").unlink()


def test_columns_given_twice_are_joined_or_refused(tmp_path: Path, capsys: Capsys) -> None:
    rows = [f"{a},{b},{t},{t}\n" for a in "xy" for b in "uv" for t in range(4)]
    (tmp_path / "data.csv").write_text("a,b,time,z\n" + "".join(rows))
    command = ["train", str(tmp_path / "data.csv"), "--task", "forecast", *FAST]
    out = ["--output", str(tmp_path / "run")]
    assert main([*command, *out, "--id-column", "a", "--id-column=b"]) == 0
    assert "4 sequences, 16 elements: id column: 'a', 'b' (named)" in capsys.readouterr().out
    twice = ["--sequence-column", "a", "--sequence-column", "b"]
    fails([*command, *twice], capsys, "--sequence-column must be given once", "'a' and 'b'")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("row", [0, 11])
def test_a_missing_value_is_named_by_its_row_in_the_file(
    tmp_path: Path, capsys: Capsys, kind: str, row: int
) -> None:
    series = [[1.0, 2.0 + number, 3.0] for number in range(12)]
    series[row][1] = float("nan")
    path = tmp_path / f"data.{kind}"
    if kind == "jsonl":
        write_rows(path, ({"x": x, "y": "ab"[n % 2]} for n, x in enumerate(series)))
        place = f"row {row}, step 1"
    else:
        lines = [f"n{n},{value},{'ab'[n % 2]}\n" for n, x in enumerate(series) for value in x]
        path.write_text("id,x,y\n" + "".join(lines))
        place = f"row {row} (id 'n{row}'), step 1"
    command = [
        "train",
        str(path),
        "--output",
        str(tmp_path / "run"),
        "--validation-fraction",
        "0.5",
    ]
    fails(
        command,
        capsys,
        place,
        "(1 of 36 features is missing)",
        "train with --missing zero or --missing forward",
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "options", "flag"),
    [
        ("id,x,y,z\n1,1,a,b\n", [], "Name one with --label-column."),
        ("id,y\n1,a\n", [], "name it with --feature-column; without labels, pass --task forecast."),
        ("id,time,x,y\n1,noon at 12,1,a\n", [], "name another column with --time-column"),
        ("id,x,y\n1,1,a\n1,2,b\n", ["--label-column", "y"], "pass --task tag"),
        ("id,x,y\n1,1,a\n", [], "hold nothing out with --validation-fraction 0."),
    ],
)
def test_errors_of_data_name_the_flag(
    tmp_path: Path, capsys: Capsys, text: str, options: list[str], flag: str
) -> None:
    fails(
        [
            "train",
            str(put(tmp_path / "data.csv", text)),
            "--output",
            str(tmp_path / "run"),
            *options,
        ],
        capsys,
        flag,
    )


@pytest.mark.parametrize(
    ("cells", "piece"),
    [({"a": ""}, "id 's1'"), ({"label": "zebra", "id": "z"}, "'zebra'")],
    ids=["nan", "label"],
)
def test_the_test_part_is_checked_before_the_first_epoch(
    tmp_path: Path, capsys: Capsys, cells: dict[str, str], piece: str
) -> None:
    data, test = write_steps(tmp_path / "ok.csv"), write_steps(tmp_path / "test.csv", cells=cells)
    before = tree(tmp_path)
    command = ["train", str(data), "--output", str(tmp_path / "run"), *FAST, "--test", str(test)]
    fails(command, capsys, piece, "test.csv")
    assert tree(tmp_path) == before
    command[-1] = str(put(tmp_path / "narrow.csv", "id,t,a,label\ns,0,1,x\n"))
    fails(command, capsys, "narrow.csv", "'a', 'b'")


def test_a_run_that_fails_in_its_first_epoch_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    from raglane.training.model import SequenceModel

    def full(self: Any, inputs: Any) -> Any:
        raise RuntimeError(
            "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 12 bytes."
        )

    command = [
        "train",
        str(write_steps(tmp_path / "ok.csv")),
        "--output",
        str(tmp_path / "deep" / "run"),
        *FAST,
    ]
    with monkeypatch.context() as patched:
        patched.setattr(SequenceModel, "forward", full)
        fails(command, capsys, "12 bytes more are needed")
    assert [path.name for path in tmp_path.iterdir()] == ["ok.csv"]
    # What the user has put in a folder of its own stays, and the command works once it is
    # corrected.
    (tmp_path / "deep").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(SequenceModel, "forward", full)
        fails(command, capsys, "Memory is exhausted", "Reduce --hidden-size")
    assert list((tmp_path / "deep").iterdir()) == []
    assert main([*command, "--quiet"]) == 0


def test_sequences_of_length_0_are_of_every_kind(work: Path, tmp_path: Path) -> None:
    empty, output = tmp_path / "empty.jsonl", tmp_path / "p.jsonl"
    empty.write_text('{"seq": []}\n{"seq": []}\n')
    for model in ("run", "words"):
        command = [
            "predict",
            str(work / model),
            str(empty),
            "--sequence-column",
            "seq",
            "-o",
            str(output),
            "-q",
        ]
        assert main(command) == 0
        rows = read_rows(output)
        assert [row["id"] for row in rows] == [0, 1]
        assert {row["prediction"] for row in rows} <= {"x", "y"}


def test_a_sequence_column_takes_the_place_of_features(tmp_path: Path, capsys: Capsys) -> None:
    path, output = tmp_path / "data.csv", tmp_path / "p.jsonl"
    rows = [f"s{n // 2},{'ab'[n % 2]},{n % 3},{'xy'[n // 2 % 2]}\n" for n in range(24)]
    path.write_text("id,word,code,label\n" + "".join(rows))
    named = ["--feature-column", "word", "--categorical-column", "word"]
    assert (
        main(["train", str(path), *named, "--output", str(tmp_path / "run"), *FAST, "--quiet"]) == 0
    )
    lists = put(
        tmp_path / "lists.jsonl",
        '{"seq": ["a", "b"], "word": ["b"]}\n{"seq": ["b"], "word": ["a"]}\n',
    )
    command = ["predict", str(tmp_path / "run"), str(lists), "-o", str(output), "-q"]
    for named in ([], ["--sequence-column", "seq"], ["--sequence-column", "word"]):
        assert main([*command, *named]) == 0
    lists.write_text('{"seq": ["a", "b"]}\n')
    fails(command, capsys, "no column 'word'")
    assert main([*command, "--sequence-column", "seq"]) == 0


def test_one_sequence_alone(tmp_path: Path, capsys: Capsys) -> None:
    path = put(tmp_path / "one.csv", "id,t,a,label\ns0,0,1.5,x\ns0,1,2.5,y\n")
    command = [
        "train",
        str(path),
        "--task",
        "tag",
        "--label-column",
        "label",
        "--output",
        str(tmp_path / "run"),
        *FAST,
    ]
    fails(command, capsys, "got 1 sequence", "--validation-fraction 0")
    assert main([*command, "--validation-fraction", "0", "--quiet"]) == 0


@pytest.mark.parametrize(
    ("file", "place", "value"),
    [
        ("run.json", "settings.lr", "x"),
        ("run.json", "data.columns.time", [1, 2]),
        ("run.json", "data.test", KeyError),
        ("run.json", "fingerprint", KeyError),
        ("last/training.json", "state.epoch", 1),
        ("last/training.json", "state.history.0.train_loss", "x"),
        ("last/training.json", "state.best_epoch", 9),
        ("last/training.json", "optimizer.param_groups.0.lr", "x"),
        ("last/training.json", "optimizer.param_groups.0.params", [0]),
        ("last/training.json", "optimizer.numbers", {"0": {"momentum": "x"}}),
        ("best/config.json", "model.dropout", 7),
        ("best/config.json", "model.task", "tag"),
        ("best/config.json", "preprocessor.labels", ["x", "y", "z"]),
        ("best/config.json", "preprocessor.channels", ["a"]),
        ("best/config.json", "columns.time", [1, 2]),
        ("best/config.json", "columns.features", [1]),
    ],
)
def test_a_file_whose_json_is_whole_and_whose_content_is_not(
    work: Path, tmp_path: Path, capsys: Capsys, file: str, place: str, value: Any
) -> None:
    run = shutil.copytree(work / "run", tmp_path / "run")
    content = part = json.loads((run / file).read_text())
    *keys, last = place.split(".")
    for key in keys:
        part = part[int(key) if key.isdecimal() else key]
    del part[last]
    if value is not KeyError:
        part[last] = value
    (run / file).write_text(json.dumps(content))
    damaged = tree(tmp_path)
    if file.startswith("best"):
        command = ["predict", str(run), str(work / "ok.csv"), "-o", str(tmp_path / "p.csv")]
    else:
        command = ["train", "--resume", "--output", str(run), "--epochs", "3"]
    fails(command, capsys, str(run))
    assert tree(tmp_path) == damaged


def test_without_the_cli_extra(monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "typer" else found(name, *rest),
    )
    fails(["train"], capsys, "pip install 'raglane[cli]'")


@pytest.mark.parametrize("given", [["--epochs", "1e99"], ["--epochs=many"], ["--lr", "fast"]])
def test_an_option_that_is_no_number_is_told_what_it_got(given: list[str], capsys: Capsys) -> None:
    name, value = " ".join(given).replace("=", " ").split()
    fails(
        ["train", *given],
        capsys,
        f"{name} must be a ... got {value!r}",
        "Write it in digits, such as",
    )


def test_parts_that_cannot_be_had_are_refused_before_anything_is_read(
    work: Path, tmp_path: Path, capsys: Capsys
) -> None:
    (tmp_path / "bad.csv").write_text("nothing of the kind")
    command = ["train", str(tmp_path / "bad.csv"), "--output", str(tmp_path / "run"), *FAST]
    for part in ("--validation", "--test"):
        fails(
            [*command, part, str(tmp_path / "none.csv")],
            capsys,
            "none.csv must be ... got no such file",
        )
    both = ["--validation", str(work / "ok.csv"), "--validation-fraction", "0.2"]
    fails(
        [*command, *both],
        capsys,
        "--validation-fraction must be ... got it with --validation",
        "Leave one out",
    )


def test_ctrl_c_prints_one_line(capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "raglane.data.sources.locations.fetched", mock.Mock(side_effect=KeyboardInterrupt)
    )
    assert main(["inspect", "s3://a/b.csv"]) == 130
    assert capsys.readouterr().err.strip() == "raglane: error: stopped"
