"""A page: its parts as blocks, shown by ``page.html`` in one file, or written as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import Any, TypeAlias

from raglane._utils.drawing import BLUE, DARK, GREEN, LIGHT, VERMILION
from raglane._utils.messages import printable, require
from raglane._utils.table import Table, escaped

DATA_COLORS = {"blue": BLUE, "vermilion": VERMILION, "green": GREEN}
"""The colours of data by their names in a page, which is dark or light."""

_LIGHT = {**asdict(LIGHT), "ground": "#F6F7F9", "link": "#005A8C", "mark": "#E6F1F8", **DATA_COLORS}
_DARK = {
    **asdict(DARK),
    "ground": "#0D0F12",
    "link": "#7CC4F0",
    "mark": "#1B3344",
    "blue": "#3D9BD6",
    "vermilion": "#F08040",
    "green": "#1DB98F",
}


@dataclass(frozen=True)
class Heading:
    """A heading within a part."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    is_note: bool = False


@dataclass(frozen=True)
class Command:
    """Lines of code, with a button that copies them."""

    lines: Sequence[str]
    language: str = "sh"

    def markdown(self) -> str:
        """The lines as a block of code."""
        return "\n".join([f"```{self.language}", *map(printable, self.lines), "```"])


@dataclass(frozen=True)
class Matrix:
    """Counts on a ground that is the darker, the larger their share of the row."""

    title: str
    caption: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]

    @property
    def rows(self) -> list[tuple[str, Sequence[int]]]:
        """Each row with its name."""
        return list(zip(self.names, self.counts, strict=True))


@dataclass(frozen=True)
class Picture:
    """An SVG from :func:`inline`, what it shows in words, and what Markdown has in its place."""

    svg: str
    words: str
    caption: str
    in_markdown: str = ""
    name: str = ""  # by which a picker finds it
    is_hidden: bool = False

    def markdown(self) -> str:
        """What is in its place."""
        return self.in_markdown


@dataclass(frozen=True)
class Chart:
    """A chart of Vega-Lite, what it shows in words, and its numbers."""

    name: str
    spec: Mapping[str, Any]
    words: str
    caption: str
    numbers: Table


@dataclass(frozen=True)
class Picker:
    """Pictures of which the reader picks one, by groups of radio buttons."""

    groups: Mapping[str, tuple[str, Mapping[str, str]]]  # a question, and its answers by their values
    pictures: Sequence[Picture]


Block: TypeAlias = Heading | Text | Command | Table | Matrix | Picture | Chart | Picker


@dataclass(frozen=True)
class Part:
    """A part of a page, with a heading."""

    title: str
    blocks: Sequence[Block]
    name: str


@dataclass(frozen=True)
class Page:
    """What a command found, for a browser or as Markdown. A user's texts are never markup, in neither of them."""

    kind: str
    name: str
    sentence: str
    facts: Sequence[tuple[str, str]]
    parts: Sequence[Part]
    footer: str
    version: str
    notes: Sequence[str] = ()
    script: str = ""

    def html(self) -> bytes:
        """The page as one file that loads nothing, dark or light, for a screen or for paper."""
        text: str = _environment().get_template("page.html").render(page=self, light=_LIGHT, dark=_DARK)
        return text.encode()

    def markdown(self) -> str:
        """The page without facts, and without the blocks that Markdown does not have."""
        parts = [f"# {escaped(self.name)}", *map(escaped, (self.sentence, *self.notes))]
        for part in self.parts:
            written = (block.markdown() for block in part.blocks if isinstance(block, Command | Table | Picture))
            parts += [f"## {part.title}", *filter(None, written)]
        return "\n\n".join([*parts, escaped(self.footer)]) + "\n"


@cache
def _environment() -> Any:
    jinja = require("jinja2", "report")
    found = jinja.Environment(
        loader=jinja.FunctionLoader(lambda name: files("raglane.report").joinpath(name).read_text(encoding="utf-8")),
        autoescape=True,
        # Half a surrogate pair, which a file's name may hold, has no place in UTF-8.
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return found


def inline(svg: str, prefix: str, colors: Mapping[str, str] | None = None) -> str:
    """An SVG of matplotlib as part of a page, in the page's colours, with names that begin with a prefix."""
    for name, color in {**asdict(DARK), **(colors or {})}.items():
        svg = re.sub(re.escape(color), f"var(--{name})", svg, flags=re.IGNORECASE)
    return _named(_shortened(svg), prefix)


def _shortened(svg: str) -> str:
    """The element alone, without what no browser needs, to a hundredth of a point."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\b(\d*[1-9]\d*\.\d\d)\d+", r"\1", svg)
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    if size is not None:
        svg = svg.replace(size[0], f'style="--wide: {size[1]}pt" aria-hidden="true" focusable="false"', 1)
    return re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", svg)).strip()


def _named(svg: str, prefix: str) -> str:
    """With short names that no other picture of the page has, for what is referred to, and none for the rest."""
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    short = {name: f"{prefix}{place}" for place, name in enumerate(used)}

    def name(match: re.Match[str]) -> str:
        return f' id="{short[match[1]]}"' if match[1] in short else ""

    svg = re.sub(r' id="([^"]*)"', name, svg)
    svg = re.sub(r'href="#([^"]+)"', lambda match: f'href="#{short[match[1]]}"', svg)
    return re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{short[match[1]]})", svg).replace("xlink:href", "href")
