"""Pictures of batches, of their cost, and of the activity of a network: ``rl.plot``.

    >>> picture = padded([9, 8, 6, 4, 3, 2])
    >>> picture.axes[0].get_title(loc="left")
    '6 sequences, padded: 54 elements, 22 of them padding'

Each function returns a picture. A notebook shows it; ``picture.save("padded.svg")`` writes
an SVG, and a name that ends in ``.png`` a PNG; ``picture.figure`` and ``picture.axes`` are
matplotlib's. With ``axes=`` a function draws into existing axes. ``with theme("dark"):`` draws
light on dark.

Lengths are a list, a tensor, an array, or a Ragged, as for :func:`raglane.cost`. Of more than 200
sequences, 200 evenly spaced ones are drawn, and the picture states this.

Padding is hatched, and idle lanes are plain grey. The colours are distinct for any colour vision;
if there are more sequences than colours, numbers distinguish them, in print too.

The pictures require matplotlib: ``pip install 'raglane[plot]'``.
"""

# The files: layouts.py (batches and schedules, drawn by cells.py), charts.py (datasets),
# elements.py (activity of a network), picture.py (the class of all pictures, and their themes).

from __future__ import annotations

from raglane.plot.charts import histogram, waste
from raglane.plot.elements import attention, gates, norms
from raglane.plot.layouts import lanes, packed, padded, schedules
from raglane.plot.picture import theme

__all__ = [
    "attention",
    "gates",
    "histogram",
    "lanes",
    "norms",
    "packed",
    "padded",
    "schedules",
    "theme",
    "waste",
]
