"""One table as text, Markdown, CSV and part of a page."""

from __future__ import annotations

import math

import pytest

from raglane._utils.table import Table, aligned, as_csv, as_markdown, as_text, escaped
from raglane.report.figures import class_rows, confusion_table
from raglane.report.page import Block, Command, Heading, Matrix, Page, Part, Picture, Text, inline

_ROWS = [{"label": "jazz", "F1_score": 0.5, "count": 4000}, {"label": "a|b", "F1_score": math.nan, "count": None}]


def test_text_lines_up_and_markdown_groups_digits() -> None:
    table = Table.of("Numbers", _ROWS)
    assert table.text().splitlines() == ["label  F1 score  count", "jazz      0.500   4000", "a|b           -      -"]
    assert table.markdown().splitlines() == [
        "Numbers:",
        "",
        "| label | F1 score | count |",
        "| :-- | --: | --: |",
        "| jazz | 0.500 | 4,000 |",
        "| a\\|b | - | - |",
    ]
    assert aligned([("sequences", "8"), ("fill", "70%")], words=2) == ["sequences  8", "fill       70%"]
    assert (as_text([table, table]).count("Numbers\n"), as_markdown([table, table]).count("Numbers:\n")) == (2, 2)
    assert escaped("a|b <i> *c*") == "a\\|b \\<i\\> \\*c\\*"
    assert Table.of("None", []).rows == []


def test_csv_has_every_digit_and_no_formula() -> None:
    two = [Table("=a", ["run", "x"], [["+b", 1 / 3]]), Table("c", ["run", "y"], [["d", None]])]
    assert as_csv(two).decode().splitlines() == ["data,run,x,y", "'=a,'+b,0.3333333333333333,", "c,d,,"]


def test_a_confusion_matrix_with_its_scores() -> None:
    assert confusion_table([[3, 1], [0, 2]], ["a", "b"]).text().splitlines() == [
        "true \\ predicted  a  b  recall  precision     F1",
        "a                 3  1   0.750      1.000  0.857",
        "b                 .  2   1.000      0.667  0.800",
    ]
    first = class_rows([[3, 1], [0, 2]], ["a", "b"])[0]
    assert first == {"label": "a", "recall": 0.75, "precision": 1.0, "F1": pytest.approx(6 / 7), "count": 4}


def test_every_block_of_a_page_takes_a_text_as_text() -> None:
    odd = '</p><b>"&\u202e'
    blocks: list[Block] = [
        Heading(odd),
        Text(odd, is_note=True),
        Command([f"raglane train {odd}", "two"]),
        Matrix(odd, odd, ["a", odd], [[3, 1], [0, 2]]),
        Table(odd, [odd, "share"], [[odd, "40%"], ["b", "60%"]], best=1, bars=1),
        Picture("<svg></svg>", odd, odd),
    ]
    page = Page("raglane inspect", odd, odd, [(odd, odd)], [Part("A part", blocks, "part")], odd, "1.0", notes=[odd])
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
    drawn = inline('<?xml?><svg width="9pt" height="3pt"><a fill="#15181d" id="x"/><b href="#x"/></svg>', "p")
    assert drawn == (
        '<svg style="--wide: 9pt" aria-hidden="true" focusable="false">'
        '<a fill="var(--paper)" id="p0"/><b href="#p0"/></svg>'
    )
