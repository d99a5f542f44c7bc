"""The benchmark of programs runs, on small sizes."""

from __future__ import annotations

import pytest
import torch

import programs


def test_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    programs.main(["--tiny", "--threads", "1"])
    assert torch.get_num_threads() == threads
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


def test_every_layer_can_be_made() -> None:
    for make, _ in programs.LAYERS.values():
        assert make(3, 4).output_size == 4
