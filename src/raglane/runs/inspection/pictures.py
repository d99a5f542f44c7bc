"""Pictures of batches for a page: drawn by ``rl.plot``, small, and in the page's colours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raglane import plot
from raglane.report.svg import inline


LAYOUTS: dict[str, tuple[str, Callable[[Sequence[int]], Any]]] = {
    "padded": ("one row per sequence, as long as the longest; what is hatched is padding", plot.padded),
    "packed": ("at each step the sequences that still have one, the longest first", plot.packed),
    "lanes": ("where one sequence ends, the next begins; what is grey is idle", plot.lanes),
}
"""What is drawn of a batch: what it shows, and who draws it."""


def draw(lengths: Sequence[int], layout: str, prefix: str) -> str:
    """A batch as an SVG that stands in a page."""
    with plot.theme("dark"):
        svg = LAYOUTS[layout][1](lengths)._repr_svg_()
    return inline(svg, prefix)
