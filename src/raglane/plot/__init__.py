"""Pictures: what batches look like, what they cost, and what a network does with them. Reached as ``rl.plot``.

    >>> picture = padded([9, 8, 6, 4, 3, 2])
    >>> picture.axes[0].get_title(loc="left")
    '6 sequences, padded: 54 elements, 22 of them padding'

Each function returns a :class:`Picture`. A notebook shows it; ``picture.save("padded.svg")`` writes an SVG, and a name
that ends in ``.png`` a PNG; ``picture.figure`` and ``picture.axes`` are matplotlib's. With ``axes=`` a function draws
into axes of yours instead. ``with theme("dark"):`` draws light on dark.

Lengths are what :func:`raglane.cost` takes: a list, a tensor, an array, or a Ragged. Up to 200 sequences are drawn; of
more, 200 evenly spaced ones, and the picture says so.

What is computed in vain is hatched, and what is idle is plain grey. The colours are those that people with any colour
vision tell apart; where there are more sequences than colours, numbers tell them apart, in print too.

The pictures need matplotlib: ``pip install 'raglane[plot]'``.
"""

from __future__ import annotations

from raglane.plot.charts import histogram, roofline, times, waste
from raglane.plot.elements import attention, gates, norms
from raglane.plot.layouts import lanes, packed, padded, schedules
from raglane.plot.picture import Picture, theme

__all__ = [
    "Picture",
    "attention",
    "gates",
    "histogram",
    "lanes",
    "norms",
    "packed",
    "padded",
    "roofline",
    "schedules",
    "theme",
    "times",
    "waste",
]
