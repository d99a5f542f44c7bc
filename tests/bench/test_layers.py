"""The commands ``benchmarks/layers.py`` and ``benchmarks/programs.py``: their output, files and errors."""

from __future__ import annotations

import csv
import errno
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import layers
import pytest
import torch
from harness import run
from harness.batch import Batch
from harness.competitors import COMPETITORS, ours
from harness.competitors.base import Runner

import programs
from raglane._utils import files
from yardsticks import short_samples  # noqa: F401

pytestmark = pytest.mark.usefixtures("short_samples")

_TINY = ["--cells", "gru", "--sizes", "3x5x4", "--lengths", "trec", "--rounds", "1", "--threads", "1"]
_FEW = ["--competitors", "torch-packed", "--modes", "infer"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def fails(arguments: list[str], capsys: pytest.CaptureFixture[str], *pieces: str) -> None:
    """The command prints one line with the pieces, and returns 2."""
    capsys.readouterr()
    assert layers.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("layers.py: error: ")
    for piece in pieces:
        assert re.search(".*".join(map(re.escape, piece.split("..."))), lines[0]), (piece, lines[0])


def _rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_run_writes_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "bench"
    assert layers.main([*_TINY, "--out", str(out), "--competitors", "torch-packed,torch-padded,torch-sorted"]) == 0
    printed = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == ["results.csv", "results.md", "results.png"]
    rows = _rows(out)
    assert [(row["mode"], row["competitor"]) for row in rows] == [
        (mode, name) for mode in ("train", "infer") for name in ("ours", "torch-packed", "torch-padded", "torch-sorted")
    ]
    assert all(float(row["ratio"]) > 0 and float(row["milliseconds"]) > 0 for row in rows)
    assert (out / "results.png").read_bytes()[:4] == b"\x89PNG"
    for words in ("gru 3x5x4 trec", "cases: 2, rounds: 1", f"written: {out / 'results.csv'}"):
        assert words in printed
    assert [path.name for path in out.parent.iterdir()] == ["bench"]


def test_lengths_of_a_file_and_several_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("4\n9\n2\n")
    arguments = [*_TINY, *_FEW, "--lengths", f"{tmp_path / 'mine.txt'},ewt", "--threads", "1,2"]
    assert layers.main([*arguments, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    rows = [row for row in _rows(tmp_path / "b") if row["competitor"] == "ours"]
    assert [row["lengths"] + row["threads"] for row in rows] == ["mine1", "ewt1", "mine2", "ewt2"]
    assert rows[0]["elements"] == "15"
    assert "## Threads" in (tmp_path / "b" / "results.md").read_text()
    assert capsys.readouterr() == ("", "")


def test_suites_bring_their_own_lengths_and_variants(tmp_path: Path) -> None:
    arguments = [*_TINY, *_FEW, "--suites", "tiny,drop-in", "--dtypes", "all", "--out", str(tmp_path / "b"), "--quiet"]
    assert layers.main(arguments) == 0
    found = {(row["suite"], row["lengths"], row["dtype"], row["competitor"]) for row in _rows(tmp_path / "b")}
    expected = {("tiny", "tens", name) for name in ("ours", "ours-kernel", "ours-element", "torch-packed")}
    expected |= {("drop-in", "trec", name) for name in ("ours", "ours-packed", "ours-padded", "torch-packed")}
    assert found == {(*one[:2], dtype, one[2]) for one in expected for dtype in ("float32", "bfloat16")}


def test_results_are_replaced_only_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "b"
    command = [*_TINY, *_FEW, "--quiet", "--out", str(out)]
    assert layers.main(command) == 0
    (out / "results.md").write_text("mine")
    fails(command, capsys, "out must be ", "where results are already", "--overwrite")
    assert (out / "results.md").read_text() == "mine"
    assert layers.main([*command, "--overwrite"]) == 0
    assert (out / "results.md").read_text().startswith("# ")
    (out / "notes.txt").write_text("keep me")
    fails([*command, "--overwrite"], capsys, "a new folder, or one of results")
    assert (out / "notes.txt").read_text() == "keep me"


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--cells", "lstm,foo"], ["cells must be ... got 'foo'", "lstm, gru, rnn_tanh"]),
        (["--suites", "everything"], ["suites must be ... got 'everything'", "one-long"]),
        (["--sizes", "8x64"], ["sizes must be ... got '8x64'", "64x256x256"]),
        (["--lengths", "poisson"], ["lengths must be ... got 'poisson'", "lognormal"]),
        (["--lengths", "no/such/file.txt"], ["no/such/file.txt", "cannot be read"]),
        (["--threads", "1,100000"], ["threads must be ... got '100000'", "from 1 to"]),
        (["--rounds", "0"], ["rounds must be ... got 0"]),
        (["--competitors", "tensorflow"], ["competitors must be ... got 'tensorflow'", "torch-packed"]),
        (["--suites", "fill"], ["sizes must be ... got 3x5x4", "at least 32 sequences"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_wrong_options_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], pieces: list[str]
) -> None:
    fails([*_TINY, *_FEW, "--out", str(tmp_path / "x" / "b"), *options], capsys, *pieces)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("out", [".", "..", "../here", "file", "file/below"])
def test_results_are_neither_a_file_nor_the_current_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    folder = tmp_path / "here"
    folder.mkdir()
    if "file" in out:
        (folder / "file").write_text("mine")
    monkeypatch.chdir(folder)
    words = {"..": "or one of results", "file": "or one of results", "file/below": ""}.get(out, "than the current one")
    fails([*_TINY, *_FEW, "--out", out, "--overwrite"], capsys, "out must be ", words)
    assert [path.read_text() for path in folder.iterdir()] == ["mine"] * ("file" in out)


def test_who_is_asked_for_by_name_must_be_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMPETITORS, "jax", replace(COMPETITORS["jax"], modules=("no_such_module",)))
    command = [*_TINY, "--modes", "infer", "--out", str(tmp_path / "b")]
    fails([*command, "--competitors", "jax"], capsys, "no_such_module is not installed", "raglane[bench]")
    assert layers.main(command) == 0
    assert "jax takes no part: no_such_module not installed" in capsys.readouterr().out
    assert "jax takes no part" in (tmp_path / "b" / "results.md").read_text()


@pytest.mark.parametrize(
    ("error", "code"), [(KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "full"), 2)], ids=["ctrl-c", "disk"]
)
def test_a_run_that_ends_early_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: BaseException, code: int
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(*((run, "measure_case") if code == 130 else (files, "_write_to_disk")), fail)
    assert layers.main([*_TINY, *_FEW, "--out", str(tmp_path / "b")]) == code
    assert len(capsys.readouterr().err.splitlines()) == (1 if code == 2 else 0)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_answer_of_ours_is_written_and_is_a_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(batch: Batch, mode: str, threads: int) -> Runner:
        runner, truth = ours.ragged(batch, mode, threads), ours.reference(batch, mode)
        return Runner(runner.call, lambda: replace(truth, output=-truth.output))

    monkeypatch.setitem(COMPETITORS, "ours", replace(COMPETITORS["ours"], prepare=wrong))
    assert layers.main([*_TINY, *_FEW, "--out", str(tmp_path / "b")]) == 1
    assert "wrong: gru 3x5x4 trec, infer, float32: ours: wrong output" in capsys.readouterr().out
    assert _rows(tmp_path / "b")[0]["note"].startswith("wrong output")


def test_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    programs.main(["--tiny", "--threads", "1"])
    assert torch.get_num_threads() == threads
    assert all(make(3, 4).output_size == 4 for make, _ in programs.LAYERS.values())
    lines = capsys.readouterr().out.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    reached = [row for row in rows if row[0] == "LayerNormLSTM" and len(row) == 9]
    assert [row[1:4] for row in reached] == [
        [rule, "8", mode] for rule in ("lognormal", "ewt") for mode in ("training", "inference")
    ]
    for row in reached:
        now, before, times = map(float, row[5:8])
        assert now > 0
        assert times == pytest.approx(before / now, rel=0.2, abs=0.5)
    assert [line for line in lines if line.startswith("## ")] == [
        "## The LSTM as a program and by hand",
        "## The sLSTM against its authors' package",
        "## The first call",
    ]
    assert len([row for row in rows if row[0] == "LayerNormLSTM" and len(row) == 7]) == 1
