"""``raglane bench``: output, files and errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import Capsys, fails, prints, read_csv
from raglane.cli import main
from raglane.planner import probe

_TINY = ["bench", "--cells", "gru", "--sizes", "3x5x4", "--modes", "infer"]


@pytest.fixture(autouse=True)
def one_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(probe, "_BENCH_ROUNDS", 1)
    monkeypatch.setattr("raglane.native.machine.load", lambda: 0.0)


def test_a_table_is_printed_and_written(tmp_path: Path, capsys: Capsys) -> None:
    out = tmp_path / "times.csv"
    title, heading, *lines = prints(
        ["bench", "--sizes", "3x5x4,2x3x1", "-o", str(out)], capsys
    ).splitlines()
    assert title.startswith("lognormal lengths, ")
    assert (
        heading.split()
        == "cell size mode elements ours ms packed ms padded ms times faster".split()
    )
    rows = read_csv(out)
    assert [(row["cell"], row["size"], row["mode"]) for row in rows] == [
        (cell, size, mode)
        for cell in ("lstm", "gru", "rnn")
        for size in ("3x5x4", "2x3x1")
        for mode in ("train", "infer")
    ]
    assert [line.split()[:3] for line in lines] == [
        [row["cell"], row["size"], row["mode"]] for row in rows
    ]
    for row in rows:
        ours, packed, padded = (float(row[f"{name}_ms"]) for name in ("ours", "packed", "padded"))
        assert min(ours, packed, padded) > 0
        # The tests have one round.
        assert float(row["times_faster"]) == pytest.approx(min(packed, padded) / ours)


def test_lengths_of_a_file(tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_text("4\n9\n2\n")
    out = tmp_path / "times.md"
    printed = prints(
        [*_TINY, "--lengths", str(tmp_path / "mine.txt"), "-o", str(out)], capsys
    ).splitlines()
    assert printed[0].startswith("lengths of mine.txt, ")
    assert printed[2].split()[:4] == ["gru", "3x5x4", "infer", "15"]
    assert "| gru | 3x5x4 | infer | 15 |" in out.read_text()
    monkeypatch.setattr("raglane.native.machine.load", lambda: 1e4)
    assert "the load exceeds the number of processors" in prints(_TINY, capsys).splitlines()[-1]
    assert main([*_TINY, "--quiet"]) == 0
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (["--cells", "lstm,foo"], ["cells must be ... got 'foo'", "lstm, gru, rnn"]),
        (["--cells", "lstm,,gru"], ["cells must be ... got 'gru,lstm,,gru'"]),
        (["--modes", "test"], ["modes must be ... got 'test'"]),
        (["--sizes", "8x64"], ["sizes must be ... got '8x64'", "64x256x256"]),
        (["--sizes", "0x4x4"], ["sizes must be ... got '0x4x4'"]),
        (["--sizes", "４x4x4"], ["sizes must be "]),
        (["--lengths", "no/such/file.txt"], ["no/such/file.txt", "cannot be read"]),
        (["-o", "times.png"], ["--output must be ... got 'times.png'", ".csv, .md"]),
        (["-o", "no/such/folder/times.csv"], ["--output must be ", "a folder that exists"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("-") else "",
)
def test_wrong_options_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: Capsys, options: list[str], pieces: list[str]
) -> None:
    fails([*_TINY, *options], capsys, *pieces)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_answer_of_ours_is_a_failure(
    capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, torchs = probe.CELLS["gru"]

    def wrong(width: int, units: int) -> object:
        layer = ours(width, units)
        layer.register_forward_hook(lambda _, __, found: (found[0] * 1.01, found[1]))
        return layer

    monkeypatch.setitem(probe.CELLS, "gru", (wrong, torchs))
    fails(_TINY, capsys, "gru 3x5x4: outputs differ", "internal error", code=1)
