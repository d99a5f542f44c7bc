"""The commands ``benchmarks/layers.py`` and ``benchmarks/programs.py``: output, files, errors,
tables and picture.
"""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import layers
import pytest
import torch
from harness import run, tables
from harness.batch import Batch
from harness.cases import SIZES, Case
from harness.chart import ratios_png
from harness.competitors import COMPETITORS, ours
from harness.competitors.base import Runner
from harness.lengths import LENGTHS
from harness.results import CaseResult, Row
from harness.run import Report
from matplotlib import image

import commands
import programs
from raglane._utils import files
from yardsticks import short_samples  # noqa: F401

pytestmark = pytest.mark.usefixtures("short_samples", "any_threads")

_TINY = [
    "--cells",
    "gru",
    "--sizes",
    "3x5x4",
    "--lengths",
    "trec",
    "--rounds",
    "1",
    "--threads",
    "1",
]
fails = partial(commands.fails, run=layers.main, name="layers.py")
_FEW = ["--competitors", "torch-packed", "--modes", "infer"]


def test_a_run_writes_a_table_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "bench"
    assert (
        layers.main(
            [*_TINY, "--out", str(out), "--competitors", "torch-packed,torch-padded,torch-sorted"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert sorted(path.name for path in out.iterdir()) == [
        "results.csv",
        "results.md",
        "results.png",
    ]
    rows = commands.read_csv(out / "results.csv")
    assert [(row["mode"], row["competitor"]) for row in rows] == [
        (mode, name)
        for mode in ("train", "infer")
        for name in ("ours", "torch-packed", "torch-padded", "torch-sorted")
    ]
    assert all(float(row["ratio"]) > 0 and float(row["milliseconds"]) > 0 for row in rows)
    assert (out / "results.png").read_bytes()[:4] == b"\x89PNG"
    for words in ("gru 3x5x4 trec", "cases: 2, rounds: 1", f"written: {out / 'results.csv'}"):
        assert words in printed
    assert [path.name for path in out.parent.iterdir()] == ["bench"]


def test_lengths_of_a_file_and_several_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("4\n9\n2\n")
    arguments = [*_TINY, *_FEW, "--lengths", f"{tmp_path / 'mine.txt'},ewt", "--threads", "1,2"]
    assert layers.main([*arguments, "--out", str(tmp_path / "b"), "--quiet"]) == 0
    rows = [
        row
        for row in commands.read_csv(tmp_path / "b" / "results.csv")
        if row["competitor"] == "ours"
    ]
    assert [row["lengths"] + row["threads"] for row in rows] == ["mine1", "ewt1", "mine2", "ewt2"]
    assert rows[0]["elements"] == "15"
    assert "## Threads" in (tmp_path / "b" / "results.md").read_text()
    assert capsys.readouterr() == ("", "")


def test_suites_bring_their_own_lengths_and_variants(tmp_path: Path) -> None:
    arguments = [
        *_TINY,
        *_FEW,
        "--suites",
        "tiny,drop-in",
        "--dtypes",
        "all",
        "--out",
        str(tmp_path / "b"),
        "--quiet",
    ]
    assert layers.main(arguments) == 0
    rows = commands.read_csv(tmp_path / "b" / "results.csv")
    found = {(row["suite"], row["lengths"], row["dtype"], row["competitor"]) for row in rows}
    expected = {
        ("tiny", "tens", name) for name in ("ours", "ours-kernel", "ours-element", "torch-packed")
    }
    expected |= {
        ("drop-in", "trec", name) for name in ("ours", "ours-packed", "ours-padded", "torch-packed")
    }
    assert found == {
        (*one[:2], dtype, one[2]) for one in expected for dtype in ("float32", "bfloat16")
    }


def test_results_are_replaced_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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
        (
            ["--competitors", "tensorflow"],
            ["competitors must be ... got 'tensorflow'", "torch-packed"],
        ),
        (["--suites", "density"], ["sizes must be ... got 3x5x4", "at least 32 sequences"]),
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
    words = {"..": "or one of results", "file": "or one of results", "file/below": ""}.get(
        out, "than the current one"
    )
    fails([*_TINY, *_FEW, "--out", out, "--overwrite"], capsys, "out must be ", words)
    assert [path.read_text() for path in folder.iterdir()] == ["mine"] * ("file" in out)


def test_competitors_chosen_by_name_must_be_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        COMPETITORS, "jax", replace(COMPETITORS["jax"], modules=("no_such_module",))
    )
    command = [*_TINY, "--modes", "infer", "--out", str(tmp_path / "b")]
    fails(
        [*command, "--competitors", "jax"],
        capsys,
        "no_such_module is not installed",
        "raglane[bench]",
    )
    assert layers.main(command) == 0
    assert "jax takes no part: no_such_module not installed" in capsys.readouterr().out
    assert "jax takes no part" in (tmp_path / "b" / "results.md").read_text()


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (OSError(errno.ENOSPC, "full"), 2)],
    ids=["ctrl-c", "disk"],
)
def test_a_run_that_ends_early_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(
        *((run, "measure_case") if code == 130 else (files, "_write_to_disk")), fail
    )
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
    assert commands.read_csv(tmp_path / "b" / "results.csv")[0]["note"].startswith("wrong output")


def test_every_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def here(command: list[str], **_: Any) -> SimpleNamespace:
        """What a command prints that would take seconds to start."""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            programs.main([*command[2:], "--threads", "1"])
        return SimpleNamespace(stdout=printed.getvalue())

    monkeypatch.setattr("subprocess.run", here)
    threads = torch.get_num_threads()
    programs.main(["--tiny", "--threads", "1"])
    assert torch.get_num_threads() == threads
    sizes = {name: make(3, 8).output_size for name, (make, _) in programs.LAYERS.items()}
    read = {"fast weights": 2, "slots": 2}  # as wide as the matrix
    assert sizes == dict.fromkeys(sizes, 8) | read
    lines = capsys.readouterr().out.splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in lines
        if line.startswith("| ")
    ]
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


def _case(suite: str = "grid", mode: str = "train", threads: int = 1, place: int = 0) -> Case:
    return Case(suite, "lstm", SIZES[place], LENGTHS["ewt"], mode, "float32", threads)


@pytest.fixture
def report() -> Report:
    """Cases that are won, lost, faulty, busy and of memory."""
    packed, padded = (
        Row("torch-packed", 4.0, 1.0, 0.5, 0.2),
        Row("torch-padded", 8.0, 0.5, 0.25, 0.1),
    )
    jax = Row("jax", 1.0, 4.0, 2.0, 0.8)
    won = CaseResult(
        _case(),
        100,
        20,
        0.5,
        (Row("ours", 2.0, 2.0, 1.0, 0.4), packed, padded),
        2e11,
        7,
        0.5,
        peak=4e11,
    )
    lost = CaseResult(
        _case(place=1),
        100,
        20,
        0.5,
        (Row("ours", 2.0, 2.0, 1.0, 0.4), packed, padded, jax),
        2e11,
        7,
        9.5,
        True,
    )
    faulty = CaseResult(
        _case(mode="infer"),
        100,
        20,
        0.5,
        (Row("ours", fault="wrong output | off"), packed),
        2e11,
        7,
        0.5,
    )
    slow = Row("torch-packed", 9e4, 1.0, 0.5, 0.2, is_once=True)
    wide = CaseResult(
        _case(threads=4), 100, 20, 0.5, (Row("ours", 1.0, 4.0, 1.0, 0.4), slow), 2e11, 7, 0.5
    )
    held = CaseResult(
        _case("memory"), 9, 3, 0.5, (Row("ours", ratio=2.0, of_ours=1.0, memory=7.25),)
    )
    facts = {"processor": "a processor", "torch": "2"}
    return Report(facts, ("torch-packed",), ["jax takes no part"], [won, lost, faulty, wide, held])


def test_csv_has_a_row_for_everybody_on_every_case(report: Report) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(report))))
    assert tuple(rows[0]) == tuple(tables.COLUMNS)
    expected = [
        (result.case.name, row.competitor) for result in report.results for row in result.rows
    ]
    found = [
        (f"{r['cell']} {r['batch']}x{r['hidden']}x{r['input']} {r['lengths']}", r["competitor"])
        for r in rows
    ]
    assert found == expected
    assert (rows[0]["milliseconds"], rows[0]["ratio"], rows[0]["share"]) == ("2", "2", "0.4")
    # 0.4 of the rate of torch.mm, which is half of the peak.
    assert (rows[0]["of_peak"], rows[3]["of_peak"]) == ("0.2", "")
    assert (rows[0]["ahead"], rows[3]["ahead"]) == ("", "jax")
    faulty = next(row for row in rows if row["mode"] == "infer" and row["competitor"] == "ours")
    assert (faulty["milliseconds"], faulty["note"]) == ("", "wrong output | off")
    assert (
        next(row for row in rows if row["threads"] == "4" and row["competitor"] != "ours")["note"]
        == "timed once"
    )
    assert (rows[-1]["floats_per_unit"], rows[-1]["load"]) == ("7.25", "")


def test_markdown_leaves_nothing_out_and_marks_what_is_bad(report: Report) -> None:
    text = tables.markdown(report)
    lines = text.splitlines()
    table = [line for line in lines if line.startswith(("| lstm 8x64x64 |", "| lstm 32x128x128 |"))]
    assert len(table) == sum(len(result.rows) for result in report.results)
    assert sum("not the fastest: jax is" in line for line in lines) == 1
    assert "**Warning: the load was above the number of processors in 1 of 5 cases" in text
    assert sum(line.endswith("busy |") for line in table) == 4
    assert sum("wrong output / off" in line for line in table) == 1
    assert sum("timed once" in line for line in table) == 1
    assert "- jax takes no part" in lines
    assert any(
        "200 GF/s meanwhile (200 to 200), 0.50 of the peak: fused multiply-adds in" in line
        for line in lines
    )
    assert (
        "| grid | train | float32 | 1 | lstm | 2 | 2.00 | 2.00 | lstm 32x128x128 ewt | **in 1** |"
        in lines
    )
    # Twice as fast on four times the threads.
    assert any("2 (1.00) | 1 (0.50)" in line for line in lines)
    for block in text.split("\n\n"):
        assert len({line.count("|") for line in block.splitlines() if line.startswith("|")}) <= 1, (
            block
        )


def test_lines_for_a_terminal(report: Report) -> None:
    won, lost, faulty, _, held = (tables.case_line(result) for result in report.results)
    assert won.startswith("lstm 8x64x64 ewt")
    assert "torch-packed 2.00, torch-padded 4.00" in won
    assert "<<" not in won
    assert "<< jax is ahead" in lost
    assert "(load 9.5)" in lost
    assert "<< ours: wrong output" in faulty
    assert "7.2 N*H" in held
    assert len(tables.summary_lines(report)) == 3


def test_the_picture_grows_with_the_cases_and_touches_no_global_state(report: Report) -> None:
    sys.modules.pop("matplotlib.pyplot", None)
    # All cases, one, and one without a ratio.
    pictures = [
        ratios_png(results, "a run")
        for results in (report.results, report.results[:1], report.results[2:3])
    ]
    whole, one, _ = (image.imread(io.BytesIO(picture)).shape[0] for picture in pictures)
    assert whole > one > 150
    assert len(pictures[0]) > 10_000
    assert "matplotlib.pyplot" not in sys.modules
