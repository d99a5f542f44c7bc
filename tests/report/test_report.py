"""The figures and tables of a report."""

from __future__ import annotations

import io
import math
import re
import sys
from html import unescape
from typing import Any

import pytest
from matplotlib import image

from raglane._utils.table import PrintedTable, aligned, as_csv, as_markdown, as_text, escaped
from raglane.report.figures import class_rows, confusion_png, confusion_table, curves
from raglane.report.page import (
    Block,
    CommandLines,
    CountMatrix,
    Heading,
    InlinePicture,
    Page,
    Part,
    Text,
    inline,
)


def _size(png: bytes) -> Any:
    return image.imread(io.BytesIO(png)).shape[1::-1]


def _row(epoch: int, validation: bool, metric: str) -> dict[str, float]:
    row = {"epoch": epoch, "train_loss": 1 / epoch, f"train_{metric}": 1 - 1 / epoch}
    if validation:
        row |= {"validation_loss": 2 / epoch, f"validation_{metric}": 0.5}
    if metric == "mae":
        row |= {"persistence_mae": 0.7}
    return row | {"seconds": 1.0, "elements_per_second": 10.0}


@pytest.mark.parametrize(
    ("epochs", "validation", "metric"),
    [(1, True, "accuracy"), (1, False, "mae"), (7, False, "accuracy"), (7, True, "mae")],
)
def test_curves(epochs: int, validation: bool, metric: str) -> None:
    history = [_row(epoch + 1, validation, metric) for epoch in range(epochs)]
    plain = curves(history, metric, "a run")
    assert _size(plain) == (1350, 540)
    assert curves(history, metric, "a run", best_epoch=1) != plain


def _axes_of(
    history: list[dict[str, float]], metric: str, monkeypatch: pytest.MonkeyPatch
) -> list[Any]:
    """Return the axes of the loss and the metric."""
    drawn: list[Any] = []

    def keep(figure: Any) -> bytes:
        drawn.append(figure)
        return b""

    monkeypatch.setattr("raglane.report.figures.png", keep)
    curves(history, metric, "a run", best_epoch=1)
    drawn[0].draw_without_rendering()
    return list(drawn[0].axes)


def test_the_axes_of_curves_are_as_long_as_what_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    flat = [
        {
            "epoch": epoch,
            "train_loss": 0.7 - epoch / 1000,
            "train_accuracy": 0.95 + epoch / 1000,
            "majority_accuracy": 0.5,
        }
        for epoch in range(1, 11)
    ]
    loss, accuracy = _axes_of(flat, "accuracy", monkeypatch)
    assert loss.get_ylim() == pytest.approx((0.69 - 0.00045, 0.699 + 0.00045))
    assert accuracy.get_ylim() == pytest.approx((0.951 - 0.00045, 0.96 + 0.00045))
    assert "majority (0.5)" in [text.get_text() for text in accuracy.get_legend().get_texts()]
    near = [{**row, "majority_accuracy": 0.945} for row in flat]
    assert _axes_of(near, "accuracy", monkeypatch)[1].get_ylim()[0] < 0.945
    wide = [{**row, "train_loss": 3 * 0.5 ** row["epoch"]} for row in flat]
    loss, _ = _axes_of(wide, "accuracy", monkeypatch)
    assert loss.get_yscale() == "log"
    shown = [tick.get_text() for tick in loss.get_yticklabels()]
    assert {"0.01", "0.1", "1"} <= set(shown)
    odd = [{**row, "train_loss": math.nan} for row in flat]
    assert _axes_of(odd, "accuracy", monkeypatch)[0].get_yscale() == "linear"


def test_one_epoch_is_a_whole_number(monkeypatch: pytest.MonkeyPatch) -> None:
    loss, _ = _axes_of([_row(1, True, "accuracy")], "accuracy", monkeypatch)
    low, high = loss.get_xlim()
    assert [tick for tick in loss.get_xticks() if low <= tick <= high] == [1]


@pytest.mark.parametrize("classes", [1, 2, 40])
def test_confusion_grows_with_the_classes(classes: int) -> None:
    matrix = [[3 if row == column else 0 for column in range(classes)] for row in range(classes)]
    width, height = _size(
        confusion_png(matrix, [f"class {place}" for place in range(classes)], "a run")
    )
    assert width > height > 600
    assert height <= 3600


def test_huge_counts_and_long_labels_without_pyplot() -> None:
    sys.modules.pop("matplotlib.pyplot", None)
    curves([_row(1, True, "accuracy")], "accuracy", "a run")
    _size(confusion_png([[1234567, 0], [1, 7654321]], ["a" * 200, "b"], "a run"))
    assert "matplotlib.pyplot" not in sys.modules


def test_confusion_as_a_table_and_rows() -> None:
    first = class_rows([[3, 1], [0, 2]], ["a", "b"])[0]
    assert first == {
        "label": "a",
        "recall": 0.75,
        "precision": 1.0,
        "f1": pytest.approx(6 / 7),
        "count": 4,
    }
    lines = (
        confusion_table([[10, 0, 0], [2, 0, 0], [0, 1, 7]], ["a", "long label", "c"])
        .text()
        .splitlines()
    )
    assert len({len(line) for line in lines}) == 1
    assert lines[0].split() == [
        "true",
        "\\",
        "predicted",
        "a",
        "long",
        "label",
        "c",
        "recall",
        "precision",
        "F1",
    ]
    assert lines[1].split() == ["a", "10", ".", ".", "1.000", "0.833", "0.909"]
    assert lines[2].split() == ["long", "label", "2", ".", ".", "0.000", "0.000", "0.000"]
    assert lines[3].split() == ["c", ".", "1", "7", "0.875", "1.000", "0.933"]
    assert confusion_table([[0]], ["a"]).text().splitlines()[1].split() == ["a", ".", "-", "-", "-"]


_ROWS = [
    {"label": "jazz", "F1_score": 0.5, "count": 4000},
    {"label": "a|b", "F1_score": math.nan, "count": None},
]


def test_text_lines_up_and_markdown_groups_digits() -> None:
    table = PrintedTable.of("Numbers", _ROWS)
    assert table.text().splitlines() == [
        "label  F1 score  count",
        "jazz      0.500   4000",
        "a|b           -      -",
    ]
    assert table.markdown().splitlines() == [
        "Numbers:",
        "",
        "| label | F1 score | count |",
        "| :-- | --: | --: |",
        "| jazz | 0.500 | 4,000 |",
        "| a\\|b | - | - |",
    ]
    assert aligned([("sequences", "8"), ("fill", "70%")], words=2) == [
        "sequences  8",
        "fill       70%",
    ]
    assert (
        as_text([table, table]).count("Numbers\n"),
        as_markdown([table, table]).count("Numbers:\n"),
    ) == (2, 2)
    assert escaped("a|b <i> *c*") == "a\\|b \\<i\\> \\*c\\*"
    assert PrintedTable.of("None", []).rows == []


def test_csv_has_every_digit_and_no_formula() -> None:
    two = [
        PrintedTable("=a", ["run", "x"], [["+b", 1 / 3]]),
        PrintedTable("c", ["run", "y"], [["d", None]]),
    ]
    assert as_csv(two).decode().splitlines() == [
        "data,run,x,y",
        "'=a,'+b,0.3333333333333333,",
        "c,d,,",
    ]


def test_every_block_of_a_page_takes_a_text_as_text() -> None:
    odd = '</p><b>"&\u202e'
    blocks: list[Block] = [
        Heading(odd),
        Text(odd, is_note=True),
        CommandLines([f"raglane train {odd}", "two"]),
        CountMatrix(odd, odd, ["a", odd], [[3, 1], [0, 2]]),
        PrintedTable(odd, [odd, "share"], [[odd, "40%"], ["b", "60%"]], best=1, bars=1),
        InlinePicture("<svg></svg>", odd, odd),
    ]
    page = Page(
        "raglane inspect",
        odd,
        odd,
        [(odd, odd)],
        [Part("A part", blocks, "part")],
        odd,
        "1.0",
        notes=[odd],
    )
    drawn, written = page.html().decode(), page.markdown()
    assert "<b>" not in drawn
    assert "<b>" not in written.replace("\\<b\\>", "")[: written.index("```")]
    assert "\u202e" not in drawn + written
    assert "&lt;/p&gt;&lt;b&gt;&#34;&amp;\\u202e\ntwo</code>" in drawn
    assert '<td style="--share: 75%">3</td>' in drawn
    assert '<td style="--share: 0%">.</td>' in drawn
    assert drawn.count('<tr class="best"><th scope="row" class="word">b</th>') == 1
    assert 'style="width: 60%"' in drawn
    assert '<div class="wide" tabindex="0" role="img" aria-label="&lt;/p&gt;' in drawn


def test_a_picture_has_the_colours_and_names_of_its_page() -> None:
    assert inline(
        '<?xml?><svg width="9pt" height="3pt"><a fill="#15181d" id="x"/><b href="#x"/></svg>', "p"
    ) == (
        '<svg style="--wide: 9pt" aria-hidden="true" focusable="false">'
        '<a fill="var(--paper)" id="p0"/><b href="#p0"/></svg>'
    )


def test_an_option_of_a_command_is_one_piece() -> None:
    line = "raglane train 'a  b.csv' --output FOLDER -o x"
    part = Part("use", [CommandLines([line, "  two"])], "use")
    html = Page("kind", "name", "sentence", (), [part], "footer", "1").html().decode()
    code = html.partition("<code>")[2].partition("</code>")[0]
    options = re.findall(r'<span class="option">([^<]*)</span>', code)
    assert options == ["--output", "-o"]
    # What is copied is the command.
    assert unescape(re.sub("<[^>]*>", "", code)) == f"{line}\n  two"
    assert ".option { white-space: nowrap; }" in html
    notes = ("try --dropout 0.3",)
    html = Page("kind", "name", "sentence", (), [part], "footer", "1", notes).html().decode()
    assert '<p class="note">try <span class="option">--dropout</span> 0.3</p>' in html
