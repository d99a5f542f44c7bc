"""How a ragged batch shows itself: one line of text, and a small picture of the lengths in a notebook."""

from __future__ import annotations

from raglane._utils.drawing import LIGHT, PALETTE

_SHOWN = 10  # lengths written out before an ellipsis
_ROWS = 24  # rows drawn before the rest is only counted
_WIDTH, _ROW = 240, 8  # pixels


def describe(shape: str, dtype: str, device: str, lengths: list[int] | None, fill: float | None) -> str:
    """The text of ``repr``."""
    if lengths is None or fill is None:
        # NOTE: a repr never waits for a device, or looking at a batch in a debugger would change its timing.
        return f"Ragged(shape={shape}, dtype={dtype}, device={device}, lengths=on the device)"
    shown = ", ".join(map(str, lengths[:_SHOWN])) + (", ..." if len(lengths) > _SHOWN else "")
    return f"Ragged(shape={shape}, dtype={dtype}, device={device}, lengths=[{shown}], fill={fill:.3g})"


def picture(title: str, lengths: list[int]) -> str:
    """An HTML picture: one bar per sequence, coloured as long as it is, grey where padding would be."""
    from html import escape  # a notebook needs it, and it costs as much to load as half of Raglane

    rows = lengths[:_ROWS]
    longest = max([1, *rows])
    bars = []
    for row, length in enumerate(rows):
        top = row * (_ROW + 2)
        width = length / longest * _WIDTH
        colour = PALETTE[row % len(PALETTE)]
        bars.append(
            f'<rect x="0" y="{top}" width="{_WIDTH}" height="{_ROW}" fill="{LIGHT.padding}"/>'
            f'<rect x="0" y="{top}" width="{width:.1f}" height="{_ROW}" fill="{colour}"/>'
            f'<text x="{_WIDTH + 6}" y="{top + _ROW}" font-size="9" fill="currentColor">{length}</text>'
        )
    height = len(rows) * (_ROW + 2)
    more = f"<div>and {len(lengths) - _ROWS} more</div>" if len(lengths) > _ROWS else ""
    return (
        f"<div><code>{escape(title)}</code></div>"
        f'<svg width="{_WIDTH + 60}" height="{height}" role="img" aria-label="lengths">{"".join(bars)}</svg>{more}'
    )
