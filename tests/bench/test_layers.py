"""``benchmarks/layers.py`` called as a user would: what it prints and writes, and what it refuses."""

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
    """The command ends with 2 and one line that holds the pieces."""
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
    assert "gru 3x5x4 trec" in printed
    assert "cases: 2, rounds: 1" in printed
    assert f"written: {out / 'results.csv'}" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert [path.name for path in out.parent.iterdir()] == ["bench"]


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.main([*_TINY, *_FEW, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


def test_lengths_of_a_file_and_several_threads(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("4\n9\n2\n")
    arguments = [*_TINY, *_FEW, "--lengths", f"{tmp_path / 'mine.txt'},ewt", "--threads", "1,2"]
    assert layers.main([*arguments, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    rows = [row for row in _rows(tmp_path / "b") if row["competitor"] == "ours"]
    assert [(row["lengths"], row["threads"]) for row in rows] == [
        ("mine", "1"),
        ("ewt", "1"),
        ("mine", "2"),
        ("ewt", "2"),
    ]
    assert rows[0]["elements"] == "15"
    assert "## Threads" in (tmp_path / "b" / "results.md").read_text()


def test_suites_bring_their_own_lengths_and_variants(tmp_path: Path) -> None:
    arguments = [*_TINY, *_FEW, "--suites", "tiny,drop-in", "--dtypes", "all", "--out", str(tmp_path / "b"), "--quiet"]
    assert layers.main(arguments) == 0
    found = {(row["suite"], row["lengths"], row["dtype"], row["competitor"]) for row in _rows(tmp_path / "b")}
    for dtype in ("float32", "bfloat16"):
        for name in ("ours", "ours-kernel", "ours-element", "torch-packed"):
            assert ("tiny", "tens", dtype, name) in found
        for name in ("ours", "ours-packed", "ours-padded", "torch-packed"):
            assert ("drop-in", "trec", dtype, name) in found
    assert len(found) == 16


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
        (["--cells", ""], ["cells must be ... got ''"]),
        (["--cells", "lstm,,gru"], ["cells must be ... got 'lstm,,gru'"]),
        (["--suites", "everything"], ["suites must be ... got 'everything'", "one-long"]),
        (["--modes", "test"], ["modes must be ... got 'test'"]),
        (["--dtypes", "float16"], ["dtypes must be ... got 'float16'"]),
        (["--sizes", "8x64"], ["sizes must be ... got '8x64'", "64x256x256"]),
        (["--sizes", "0x4x4"], ["sizes must be ... got '0x4x4'"]),
        (["--sizes", "99999999999x4x4"], ["sizes must be "]),
        (["--sizes", "４x4x4"], ["sizes must be "]),
        (["--lengths", "poisson"], ["lengths must be ... got 'poisson'", "lognormal"]),
        (["--lengths", "one-long"], ["lengths must be ... got 'one-long'"]),
        (["--lengths", "no/such/file.txt"], ["no/such/file.txt", "cannot be read"]),
        (["--threads", "0"], ["threads must be ... got '0'", "from 1 to"]),
        (["--threads", "1,two"], ["threads must be ... got 'two'"]),
        (["--threads", "100000"], ["threads must be ... got '100000'"]),
        (["--rounds", "0"], ["rounds must be ... got 0"]),
        (["--rounds", "many"], ["rounds"]),
        (["--competitors", "tensorflow"], ["competitors must be ... got 'tensorflow'", "torch-packed"]),
        (["--suites", "fill"], ["sizes must be ... got 3x5x4", "at least 32 sequences"]),
        (["--suites", "memory", "--modes", "infer"], ["suites must be ... got memory"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_wrong_options_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], pieces: list[str]
) -> None:
    fails([*_TINY, *_FEW, "--out", str(tmp_path / "x" / "b"), *options], capsys, *pieces)
    assert list(tmp_path.iterdir()) == []


def test_out_that_is_a_file_or_below_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    for out in (file, file / "below"):
        fails([*_TINY, *_FEW, "--out", str(out), "--overwrite"], capsys, "out must be ")
    assert file.read_text() == "mine"


def test_results_are_never_the_current_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for out in (".", str(tmp_path), f"../{tmp_path.name}"):
        fails([*_TINY, *_FEW, "--out", out, "--overwrite"], capsys, "the current folder or one above it")
    assert list(tmp_path.iterdir()) == []


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
