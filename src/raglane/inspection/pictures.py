"""Pictures of batches for a page: drawn by ``rl.plot``, small, and in the page's colours."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from raglane import plot
from raglane.drawing import DARK

__all__ = ["LAYOUTS", "draw"]

LAYOUTS: dict[str, tuple[str, Callable[[Sequence[int]], Any]]] = {
    "padded": ("one row per sequence, as long as the longest; what is hatched is padding", plot.padded),
    "packed": ("at each step the sequences that still have one, the longest first", plot.packed),
    "lanes": ("where one sequence ends, the next begins; what is grey is idle", plot.lanes),
}
"""What is drawn of a batch: what it shows, and who draws it."""


def draw(lengths: Sequence[int], layout: str, prefix: str) -> str:
    """A batch as an SVG that stands in a page.

    Args:
        lengths: of its sequences.
        layout: a key of ``LAYOUTS``.
        prefix: of the names in it, since those in a page are all different.

    Returns:
        The element ``svg``, hidden from a screen reader: the page says in words what it shows.

    Raises:
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> drawn = draw([3, 1], "padded", "a")
        >>> drawn[:4], "var(--paper)" in drawn, "<?xml" in drawn
        ('<svg', True, False)
    """
    # No colour of data is one of the dark theme, whose colours the page can so replace by its own.
    with plot.theme("dark"):
        svg = LAYOUTS[layout][1](lengths)._repr_svg_()
    for name, color in asdict(DARK).items():
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
