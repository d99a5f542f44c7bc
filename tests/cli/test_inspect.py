"""``raglane inspect``: output, files and errors."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from commands import Capsys, fails, prints, tree, write_steps
from made_plans import made_plans  # noqa: F401
from raglane.cli import main


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return write_steps(Path("ok.csv"))


def test_it_prints_the_facts_and_ends_in_a_command(data: Path, capsys: Capsys) -> None:
    assert (
        main(["inspect", "ok.csv", "--cell", "lstm", "--hidden-size", "8", "--processes", "3"]) == 0
    )
    out, err = capsys.readouterr()
    assert (
        err
        == "measuring this layer on this machine, for a minute or two; later inspections reuse it\n"
    )
    for piece in (
        "data      ok.csv",
        "sequences  12",
        "'x' 6",
        "LSTM(2, 8)",
        "on one of 3 processes",
        "best: cpu, lanes",
    ):
        assert piece in out, piece
    assert out.splitlines()[-1] == (
        "raglane train ok.csv --cell lstm --hidden-size 8 --batch-size 8 --bucket --threads 2"
    )
    assert tree(Path()).keys() == {"ok.csv"}
    options = [
        "--hidden-size",
        "4",
        "--bidirectional",
        "--label-column",
        "label",
        "--format",
        "csv",
    ]
    words = shlex.split(
        prints(["inspect", str(data.rename("my data.csv")), *options], capsys).splitlines()[-1]
    )
    assert words[:3] == ["raglane", "train", "my data.csv"]
    assert main([*words[1:], "--epochs", "1", "--output", "run", "--quiet"]) == 0


def test_every_format_and_the_default(data: Path, capsys: Capsys) -> None:
    Path("words.jsonl").write_text('{"s": ["p", "q"], "l": "x"}\n{"s": [], "l": "y"}\n')
    Path("lengths.txt").write_text("4\n2\n9\n")
    Path("one.txt").write_text("7\n")
    Path("names.txt").mkdir()
    Path("names.txt", "cat.txt").write_text("tom\n")
    Path("names.txt", "dog.txt").write_text("rex\n")
    for name, piece in (
        ("words.jsonl", "tokens  2 different"),
        ("lengths.txt", "sequences  3"),
        ("one.txt", "One sequence of 7 steps trains fastest"),
        ("names.txt", "tokens  6 different"),
    ):
        assert piece in prints(["inspect", name], capsys), name
    assert prints(["inspect"], capsys).splitlines()[-1].startswith("raglane demo --batch-size 256")


def test_json_goes_to_a_file_or_to_the_standard_output(data: Path, capsys: Capsys) -> None:
    out = prints(["inspect", "ok.csv", "--json", "found.json"], capsys, "written: found.json")
    assert out.splitlines()[-1].startswith("raglane train ok.csv")
    assert main(["inspect", "ok.csv", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    found = json.loads(printed.out)
    assert found == json.loads(Path("found.json").read_text())
    assert found["data"]["name"] == "ok.csv"
    assert tree(Path()).keys() == {"ok.csv", "found.json"}


def test_a_page_replaces_an_older_one(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setattr(
        "raglane.runs.inspection.page._pictures", lambda _: []
    )  # which take seconds
    Path("report.html").write_text("old")
    assert main(["inspect", "ok.csv", "--html", "report.html", "-q"]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["inspect", "ok.csv", "--html", "report.html", "--json", "found.json"]) == 0
    assert Path("report.html").read_text().startswith("<!doctype html>")
    assert "written: found.json, report.html" in capsys.readouterr().out
    assert tree(Path()).keys() == {"ok.csv", "found.json", "report.html"}
    monkeypatch.setitem(sys.modules, "altair", None)
    fails(["inspect", "ok.csv", "--html", "report.html"], capsys, "pip install 'raglane[report]'")


def test_a_terminal_without_blocks_has_bars(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", newline="\n")
    monkeypatch.setattr(sys, "stdout", stream)
    assert main(["inspect", "ok.csv"]) == 0
    stream.seek(0)
    told = stream.read()
    assert "####" in told
    assert "\\u" not in told


def test_bad_input_ends_in_one_line_and_leaves_nothing(data: Path, capsys: Capsys) -> None:
    Path("nothing").mkdir()
    Path("words.txt").write_text("4\n5\nfive\n")
    Path("zeros.txt").write_text("0\n0\n")
    Path("two.jsonl").write_text('{"a": [1], "b": [2], "l": "x"}\n')
    to_files = ["--html", "report.html", "--json", "found.json"]
    before = tree(Path())
    for arguments, pieces in (
        (["missing.csv"], ["missing.csv must be ... got no such file"]),
        (["nothing"], ["nothing must be ... got an empty folder"]),
        (["words.txt"], ["words.txt, line 3 must be ... got 'five'"]),
        (["zeros.txt"], ["2 sequences, none of which has an element"]),
        (["two.jsonl"], ["2 candidates for the sequence column", "--sequence-column"]),
        (["ok.csv", "--label-column", "kind"], ["no column 'kind'"]),
        (["ok.csv", "--processes", "0"], ["--processes must be ... got 0"]),
        (["ok.csv", "--hidden-size", "0"], ["--hidden-size must be ... got 0"]),
        (["ok.csv", "--hidden-size", "1000000"], ["memory must be ... got a model of"]),
        (["ok.csv", "--task", "forecast", "--bidirectional"], ["--bidirectional"]),
        (
            ["--task", "tag"],
            ["--task must be ... got 'tag'", "'classify' for the default data, Japanese vowels"],
        ),
        (["ok.csv", "--format", "nope"], ["--format must be ... got 'nope'"]),
    ):
        fails(["inspect", *arguments, *to_files], capsys, *pieces)
        assert tree(Path()) == before, arguments


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_read(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    Path("folder").mkdir()
    Path("link.html").symlink_to("ok.csv")
    os.mkfifo("pipe")

    def never(*_: object) -> None:
        raise AssertionError("read")

    monkeypatch.setattr("raglane.runs.inspection.reading.read", never)
    before = tree(Path())
    for arguments, pieces in (
        (["--html", "folder"], ["--html must be ... got 'folder'", "a file, not a folder"]),
        (["--json", "folder"], ["--json must be ... got 'folder'"]),
        (
            ["--html", "nowhere/report.html"],
            ["a file in a folder that exists", "mkdir -p 'nowhere'"],
        ),
        (["--html", "ok.csv/report.html"], ["--html must be ... got 'ok.csv/report.html'"]),
        (["--html", "ok.csv"], ["the file of the data"]),
        (["--json", "link.html"], ["the file of the data"]),
        (["--html", "a", "--json", "./a"], ["--json must be ... got 'a', which is the page"]),
        (["--html", "pipe"], ["--html must be ... got 'pipe', a FIFO"]),
        (["--html", ""], ["--html"]),
    ):
        fails(["inspect", "ok.csv", *arguments], capsys, *pieces)
        assert tree(Path()) == before
