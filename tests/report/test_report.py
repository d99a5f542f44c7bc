"""Figures and tables: what they hold, and that they disturb nothing."""

from __future__ import annotations

import struct
import sys

import pytest

from looped import looped
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


@looped("metric", ["accuracy", "MAE"])
@looped("validation", [True, False])
@pytest.mark.parametrize("epochs", [1, 7])
def test_curves(metric: str, validation: bool, epochs: int) -> None:
    history = [_row(epoch + 1, validation, metric) for epoch in range(epochs)]
    plain = curves(history, metric, "a run")
    assert _size(plain) == (1350, 540)
    assert curves(history, metric, "a run", best_epoch=1) != plain


@looped("classes", [1, 2, 9, 60])
def test_confusion_grows_with_the_classes(classes: int) -> None:
    matrix = [[3 if row == column else 0 for column in range(classes)] for row in range(classes)]
    width, height = _size(confusion_png(matrix, [f"class {place}" for place in range(classes)], "a run"))
    assert width > height > 600
    assert height <= 3600


def test_confusion_of_huge_counts_and_long_labels() -> None:
    _size(confusion_png([[1234567, 0], [1, 7654321]], ["a" * 200, "b"], "a run"))


def test_no_global_state_of_pyplot() -> None:
    sys.modules.pop("matplotlib.pyplot", None)
    curves([_row(1, True, "accuracy")], "accuracy", "a run")
    confusion_png([[1]], ["a"], "a run")
    assert "matplotlib.pyplot" not in sys.modules


def test_table_lines_up() -> None:
    table = confusion_table([[10, 0, 0], [2, 0, 0], [0, 1, 7]], ["a", "long label", "c"])
    lines = table.text().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == ["true", "\\", "predicted", "a", "long", "label", "c", "recall", "precision", "F1"]
    assert lines[1].split() == ["a", "10", ".", ".", "1.000", "0.833", "0.909"]
    assert lines[2].split() == ["long", "label", "2", ".", ".", "0.000", "0.000", "0.000"]
    assert lines[3].split() == ["c", ".", "1", "7", "0.875", "1.000", "0.933"]


def test_table_without_counts_has_dashes() -> None:
    assert confusion_table([[0]], ["a"]).text().splitlines()[1].split() == ["a", ".", "-", "-", "-"]
