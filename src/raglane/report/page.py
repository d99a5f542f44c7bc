"""The frame of a page: one file that asks nothing of the network, dark or light, on a screen or on paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files

from raglane._utils.drawing import BLUE, DARK, GREEN, LIGHT, VERMILION, Look
from raglane.report import html
from raglane.report.html import shown

COLORS = {"blue": BLUE, "vermilion": VERMILION, "green": GREEN}
"""The colours of data by the names of the page, which is dark or light."""

# The colours that pictures have no use for.
_LIGHT = {
    "ground": "#F6F7F9",
    "link": "#005A8C",
    "mark": "#E6F1F8",
    **COLORS,
}
_DARK = {
    "ground": "#0D0F12",
    "link": "#7CC4F0",
    "mark": "#1B3344",
    "blue": "#3D9BD6",
    "vermilion": "#F08040",
    "green": "#1DB98F",
}

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="raglane {version}">
<meta name="description" content="{sentence}">
<link rel="icon" href="data:,">
<title>{name} - {kind}</title>
<style>
{style}
</style>
</head>
<body>
<a class="skip" href="#main">To the content</a>
<header>
<p class="kind">{kind}</p>
<h1>{name}</h1>
<p class="lead">{sentence}</p>
<nav aria-label="Parts of this page"><ul>
{links}
</ul></nav>
</header>
<main id="main">
{facts}
{sections}
</main>
<footer>
<p>{footer}</p>
</footer>
{scripts}
</body>
</html>
"""


def page(
    kind: str,
    name: str,
    sentence: str,
    facts: str,
    parts: Mapping[str, tuple[str, str]],
    footer: str,
    version: str,
    charts: str = "",
) -> bytes:
    """A page of a command."""
    scripts = [text for text in (charts, _asset("page.js")) if text]
    return _PAGE.format(
        kind=shown(kind),
        version=shown(version),
        name=shown(name),
        sentence=shown(sentence),
        style=_style(),
        links="\n".join(f'<li><a href="#{part}">{title}</a></li>' for part, (title, _) in parts.items()),
        facts=facts,
        sections="\n".join(html.section(part, title, inside) for part, (title, inside) in parts.items()),
        footer=shown(footer),
        scripts="\n".join(f"<script>\n{text}\n</script>" for text in scripts),
    ).encode()


def _style() -> str:
    def colors(look: Look, more: dict[str, str]) -> str:
        return " ".join(f"--{name}: {color};" for name, color in {**asdict(look), **more}.items())

    light, dark = colors(LIGHT, _LIGHT), colors(DARK, _DARK)
    themes = f":root {{ {light} }}\n@media screen and (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
    return themes + _asset("page.css")


def _asset(name: str) -> str:
    return files("raglane.report").joinpath(name).read_text(encoding="utf-8").strip()
