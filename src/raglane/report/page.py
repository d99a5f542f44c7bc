"""Pages made of blocks: rendered by ``page.html`` as one HTML file, or written as Markdown."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, TypeAlias

from raglane._utils.drawing import BLUE, DARK, GREEN, LIGHT, VERMILION
from raglane._utils.messages import printable, require
from raglane._utils.table import PrintedTable, escaped

DATA_COLORS = {"blue": BLUE, "vermilion": VERMILION, "green": GREEN}
"""The colours of data by their CSS variable; a page overrides them in dark mode."""

_LIGHT = {
    **LIGHT._asdict(),
    "ground": "#F6F7F9",
    "link": "#005A8C",
    "mark": "#E6F1F8",
    **DATA_COLORS,
}
_DARK = {
    **DARK._asdict(),
    "ground": "#0D0F12",
    "link": "#7CC4F0",
    "mark": "#1B3344",
    "blue": "#3D9BD6",
    "vermilion": "#F08040",
    "green": "#1DB98F",
}


class Heading(NamedTuple):
    """A heading within a section."""

    text: str


class Text(NamedTuple):
    """A paragraph."""

    text: str
    is_note: bool = False


class CommandLines(NamedTuple):
    """Lines of code, with a copy button."""

    lines: Sequence[str]
    language: str = "sh"

    def markdown(self) -> str:
        """Return the lines as a fenced code block."""
        return "\n".join([f"```{self.language}", *map(printable, self.lines), "```"])


class CountMatrix(NamedTuple):
    """A table of counts, each cell shaded by its share of the row."""

    title: str
    caption: str
    names: Sequence[str]
    counts: Sequence[Sequence[int]]

    @property
    def rows(self) -> list[tuple[str, Sequence[int]]]:
        """The rows with their names."""
        return list(zip(self.names, self.counts, strict=True))


class InlinePicture(NamedTuple):
    """An SVG from :func:`inline`, its text alternative, and its replacement in Markdown."""

    svg: str
    words: str
    caption: str
    in_markdown: str = ""
    name: str = ""  # refers to it in a Picker
    is_hidden: bool = False

    def markdown(self) -> str:
        """Return the replacement in Markdown."""
        return self.in_markdown


class Chart(NamedTuple):
    """A Vega-Lite chart with its text alternative and a table of its numbers."""

    name: str
    spec: Mapping[str, Any]
    words: str
    caption: str
    numbers: PrintedTable


class Picker(NamedTuple):
    """Pictures, one shown at a time, selected by groups of radio buttons."""

    # By name: the legend, and the labels by value.
    groups: Mapping[str, tuple[str, Mapping[str, str]]]
    pictures: Sequence[InlinePicture]


Block: TypeAlias = (
    Heading | Text | CommandLines | PrintedTable | CountMatrix | InlinePicture | Chart | Picker
)


class Part(NamedTuple):
    """A section of a page, with a heading; a wide screen has two columns of them."""

    title: str
    blocks: Sequence[Block]
    name: str
    is_wide: bool = False  # it spans both columns


class Page(NamedTuple):
    """The results of a command, as HTML or Markdown; texts from users are escaped in both."""

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
        """Return the page as one self-contained file, for screens (light and dark) and print."""
        return render("report/page.html", page=self)

    def markdown(self) -> str:
        """Return the page without its facts and the blocks that have no form in Markdown."""
        blocks = [f"# {escaped(self.name)}", *map(escaped, (self.sentence, *self.notes))]
        for section in self.parts:
            written = (
                block.markdown()
                for block in section.blocks
                if isinstance(block, CommandLines | PrintedTable | InlinePicture)
            )
            blocks += [f"## {section.title}", *filter(None, written)]
        return "\n\n".join([*blocks, escaped(self.footer)]) + "\n"


def render(template: str, **values: Any) -> bytes:
    """Return a template of the package, with the colours of pages as ``light`` and ``dark``."""
    text: str = _environment().get_template(template).render(light=_LIGHT, dark=_DARK, **values)
    return text.encode()


@cache
def _environment() -> Any:
    jinja = require("jinja2", "report")
    environment = jinja.Environment(
        loader=jinja.FunctionLoader(
            lambda name: files("raglane").joinpath(name).read_text(encoding="utf-8")
        ),
        autoescape=True,
        # A file name may contain lone surrogates, which UTF-8 cannot encode.
        finalize=lambda value: printable(value) if type(value) is str else value,
        undefined=jinja.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def picture(
    svg: bytes, prefix: str, words: str, caption: str, in_markdown: str = ""
) -> InlinePicture:
    """Return an SVG of :mod:`raglane.report.figures` as a block."""
    return InlinePicture(inline(svg.decode(), prefix, DATA_COLORS), words, caption, in_markdown)


def inline(svg: str, prefix: str, colors: Mapping[str, str] | None = None) -> str:
    """Return an SVG of matplotlib for a page: colours are CSS variables, and IDs begin with a
    prefix.
    """
    for name, color in {**DARK._asdict(), **(colors or {})}.items():
        svg = re.sub(re.escape(color), f"var(--{name})", svg, flags=re.IGNORECASE)
    return _rename_ids(_minify(svg[svg.index("<svg") :]), prefix)


def _minify(svg: str) -> str:
    """Remove metadata, comments, styles and spaces, and round to a hundredth of a point."""
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"\b(\d*[1-9]\d*\.\d\d)\d+", r"\1", svg)
    size = re.search(r'width="([\d.]+)pt" height="([\d.]+)pt"', svg)
    if size is not None:
        svg = svg.replace(
            size[0], f'style="--wide: {size[1]}pt" aria-hidden="true" focusable="false"', 1
        )
    return re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", svg)).strip()


def _rename_ids(svg: str, prefix: str) -> str:
    """Replace IDs that are referred to by short ones, unique in the page, and remove the others."""
    used = dict.fromkeys(re.findall(r'(?:href="|url\()#([^")]+)', svg))
    short = {name: f"{prefix}{number}" for number, name in enumerate(used)}

    def name(match: re.Match[str]) -> str:
        return f' id="{short[match[1]]}"' if match[1] in short else ""

    svg = re.sub(r' id="([^"]*)"', name, svg)
    svg = re.sub(r'href="#([^"]+)"', lambda match: f'href="#{short[match[1]]}"', svg)
    svg = re.sub(r"url\(#([^)]+)\)", lambda match: f"url(#{short[match[1]]})", svg)
    return svg.replace("xlink:href", "href")
