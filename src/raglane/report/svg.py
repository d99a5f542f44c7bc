"""Pictures of matplotlib that stand in a page, in the page's colours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict

from raglane._utils.drawing import DARK


def inline(svg: str, prefix: str, colors: Mapping[str, str] | None = None) -> str:
    """An SVG that stands in a page."""
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
