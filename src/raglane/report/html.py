"""Pieces of a page: text that is safe in it, tables, charts with their numbers, a picker of pictures."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from raglane.errors import printable


def shown(text: object) -> str:
    """A text as a page shows it, whatever is in it."""
    # Half a surrogate pair, which a file's name may hold, has no place in UTF-8.
    return escape(printable(str(text)))


def paragraphs(*texts: str, kind: str = "") -> str:
    """Each text as a paragraph."""
    begin = f'<p class="{kind}">' if kind else "<p>"
    return "\n".join(f"{begin}{shown(text)}</p>" for text in texts)


def section(name: str, title: str, *parts: str) -> str:
    """A part of the page with a heading."""
    inside = "\n".join(part for part in parts if part)
    heading = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">\n{heading}\n{inside}\n</section>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Names and numbers, large."""
    items = "\n".join(f"<div><dt>{shown(name)}</dt><dd>{shown(what)}</dd></div>" for name, what in pairs)
    return f'<dl class="facts">\n{items}\n</dl>'


def table(
    caption: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    words: int = 1,
    best: Callable[[int], bool] = lambda _: False,
    bars: int | None = None,
) -> str:
    """A table that scrolls sideways where there is no room."""

    def kind(place: int) -> str:
        return ' class="word"' if place < words else ""

    head = "".join(f'<th scope="col"{kind(place)}>{shown(name)}</th>' for place, name in enumerate(columns))
    head += "" if bars is None else '<td aria-hidden="true"></td>'
    lines = []
    for number, row in enumerate(rows):
        cells = "".join(f"<td{kind(place)}>{shown(cell)}</td>" for place, cell in enumerate(row) if place > 0)
        if bars is not None:
            share = float(str(row[bars]).rstrip("%")) / 100
            cells += f'<td class="drawn" aria-hidden="true"><span class="bar" style="width: {share:.0%}"></span></td>'
        marked = ' class="best"' if best(number) else ""
        lines.append(f'<tr{marked}><th scope="row"{kind(0)}>{shown(row[0])}</th>{cells}</tr>')
    body = "\n".join(lines)
    name = shown(caption)
    # What scrolls must be reached with the keyboard.
    return (
        f'<p class="caption">{name}</p>\n<div class="wide" tabindex="0" role="region" aria-label="{name}">\n'
        f'<table aria-label="{name}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>'
    )


def command(*lines: str) -> str:
    """Lines for a shell or for Python, with a button that copies them."""
    code = "\n".join(map(shown, lines))
    return (
        f'<div class="command"><pre><code>{code}</code></pre><button type="button">Copy</button></div>'
        '<p class="copied" role="status"></p>'
    )


def chart(name: str, spec: dict[str, Any], alternative: str, caption: str, numbers: str) -> str:
    """A chart, what it shows in words, and its numbers as a table."""
    # A "<" would end the script where one like "</script>" follows.
    content = json.dumps(spec, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure>\n<div class="chart" id="{name}" role="img" aria-label="{shown(alternative)}"></div>\n'
        f'<script type="application/json" id="{name}-chart">{content}</script>\n'
        f"<figcaption>{shown(caption)}</figcaption>\n"
        f"<details><summary>The numbers of this chart</summary>\n{numbers}\n</details>\n</figure>"
    )


def matrix(caption: str, names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """A table of counts, each on a ground that is the darker, the larger its share of the row."""
    head = "".join(f'<th scope="col">{shown(name)}</th>' for name in names)
    lines = []
    for name, row in zip(names, counts, strict=True):
        total = max(sum(row), 1)
        cells = "".join(f'<td style="--share: {count / total:.0%}">{count or "."}</td>' for count in row)
        lines.append(f'<tr><th scope="row" class="word">{shown(name)}</th>{cells}</tr>')
    body, title = "\n".join(lines), shown(caption)
    return (
        f'<p class="caption">{title}</p>\n<div class="wide" tabindex="0" role="region" aria-label="{title}">\n'
        f'<table class="matrix" aria-label="{title}">\n<thead><tr><td></td>{head}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def picture(drawing: str, words: str, caption: str) -> str:
    """A drawing in the page."""
    return (
        '<figure class="picture">\n'
        f'<div class="wide" tabindex="0" role="img" aria-label="{shown(words)}">{drawing}</div>\n'
        f"<figcaption>{shown(caption)}</figcaption>\n</figure>"
    )


def picker(groups: dict[str, tuple[str, dict[str, str]]], pictures: Mapping[tuple[str, ...], tuple[str, str]]) -> str:
    """Pictures of which the reader picks one, by groups of radio buttons."""
    fields = []
    for group, (question, answers) in groups.items():
        choices = "".join(
            f'<label><input type="radio" name="{group}" value="{value}"{" checked" if place == 0 else ""}>'
            f"{shown(answer)}</label>"
            for place, (value, answer) in enumerate(answers.items())
        )
        fields.append(f"<fieldset><legend>{shown(question)}</legend>{choices}</fieldset>")
    figures = [
        f'<figure class="picture" data-name="{"-".join(picked)}"{" hidden" if number else ""}>\n'
        f'<div class="wide" tabindex="0" role="img" aria-label="{shown(words)}">{drawing}</div>\n'
        f"<figcaption>{shown(words)}</figcaption>\n</figure>"
        for number, (picked, (drawing, words)) in enumerate(pictures.items())
    ]
    return (
        f'<form id="pick" autocomplete="off">{"".join(fields)}</form>\n<div aria-live="polite">{"".join(figures)}</div>'
    )
