"""Figures and tables: what they hold, and that they disturb nothing."""

from __future__ import annotations

import struct
import sys

import pytest

from raglane.report.figures import confusion_png, confusion_table, curves


def _size(png: bytes) -> tuple[int, int]:
    assert png[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", png[16:24])
    return width, height


def _row(epoch: int, validation: bool, metric: str) -> dict[str, float]:
    row = {"epoch": epoch, "train_loss": 1 / epoch, f"train_{metric}": 1 - 1 / epoch}
    if validation:
        row |= {"validation_loss": 2 / epoch, f"validation_{metric}": 0.5}
    if metric == "MAE":
        row |= {"persistence_MAE": 0.7}
    return row | {"seconds": 1.0, "elements_per_second": 10.0}


@pytest.mark.parametrize(
    ("metric", "validation", "epochs"), [("accuracy", True, 7), ("MAE", False, 7), ("accuracy", False, 1)]
)
def test_curves(metric: str, validation: bool, epochs: int) -> None:
    history = [_row(epoch + 1, validation, metric) for epoch in range(epochs)]
    plain = curves(history, metric, "a run")
    assert _size(plain) == (1350, 540)
    assert curves(history, metric, "a run", best_epoch=1) != plain


@pytest.mark.parametrize("classes", [1, 9, 60])
def test_confusion_grows_with_the_classes(classes: int) -> None:
    matrix = [[1234567 if row == column else 0 for column in range(classes)] for row in range(classes)]
    sys.modules.pop("matplotlib.pyplot", None)
    width, height = _size(confusion_png(matrix, [f"class {place}" * 20 for place in range(classes)], "a run"))
    assert width > height > 600
    assert height <= 3600
    assert "matplotlib.pyplot" not in sys.modules


def test_table_without_counts_has_dashes() -> None:
    assert confusion_table([[0]], ["a"]).text().splitlines()[1].split() == ["a", ".", "-", "-", "-"]
