"""Pictures of the activity of a network at each element: attention, gates, and norms of states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raglane._utils.checks import check_kind
from raglane._utils.drawing import VERMILION
from raglane._utils.messages import count_of, printable, quote, require
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.plot import cells
from raglane.plot.picture import SMALL, TEXT, TITLE, Box, Picture, label, look, picture_in, width_of
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged
from raglane.segments import offsets_from_lengths

# Perceptually uniform, in greyscale and for any colour vision too.
_COLORS = "viridis"
_ROUNDING = 1e-3  # a share in few bits may exceed 1 by this
_MOST_TEXTS = 600  # of a part
_MOST_SHAPES = 10_000  # of a part; more are an image


def attention(weights: Ragged, *, labels: Any = None, axes: Any = None) -> Picture:
    """Draw the attention weight of each element: a row per sequence, a column per step, a part per
    head.

    Colours follow the square root of a weight, so that small weights differ too.

    Args:
        weights: ``(N,)`` or ``(N, heads)``, from 0 to 1, e.g. of
            ``rl.nn.AttentionPooling.weights``.
        labels: the texts of the elements: a list per sequence, or a Ragged of one number per
            element. None writes the weights.
        axes: one per head; None makes a figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: ``weights`` is not a Ragged of floats, or ``labels`` or ``axes`` have the
            wrong type.
        ShapeError: elements have several dimensions, or the number of labels or axes is wrong.
        ArgumentError: a weight is outside 0 to 1, or the batch has too many elements for a picture.

    Example:
        >>> import raglane as rl
        >>> weights = rl.Ragged([torch.tensor([0.2, 0.8]), torch.tensor([1.0])])
        >>> picture = rl.plot.attention(weights, labels=[["good", "movie"], ["bad"]])
        >>> [text.get_text() for text in picture.axes[0].texts]
        ['good', 'movie', 'bad']
    """
    read = _read("weights", weights, (0, 1))
    heads = {
        f"attention, head {head}": read.with_values(values)
        for head, values in enumerate(read.values.unbind(1))
    }
    if not weights.feature_shape:
        heads = {"attention": read.with_values(read.values[:, 0])}
    return _draw(heads, _largest(heads), labels, axes, gamma=0.5)


def gates(
    activity: Ragged | Mapping[str, Ragged], *, labels: Any = None, axes: Any = None
) -> Picture:
    """Draw the activity of the gates of a cell, from 0 to 1: the mean over the units, for each
    element.

    Args:
        activity: a Ragged ``(N, units)`` or ``(N,)`` of numbers from 0 to 1, or a dict of these by
            the gate's name.
        labels: as for :func:`attention`; None writes the means.
        axes: one per gate; None makes a figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: a gate is not a Ragged of floats, or ``labels`` or ``axes`` have the
            wrong type.
        ShapeError: elements have several dimensions or size 0, the lengths of gates differ, or the
            number of labels or axes is wrong.
        ArgumentError: there is no gate, an activity is outside 0 to 1, or the batch is too large
            for a picture.

    Example:
        >>> import raglane as rl
        >>> forget = rl.Ragged([torch.tensor([[0.0, 1.0], [0.5, 1.0]])])
        >>> [text.get_text() for text in rl.plot.gates({"forget": forget}).axes[0].texts]
        ['0.5', '0.75']
    """
    batches = _named("activity", activity, "gate", (0, 1))
    means = {name: batch.map(lambda values: values.mean(1)) for name, batch in batches.items()}
    return _draw(means, 1.0, labels, axes)


def norms(
    states: Ragged | Mapping[str, Ragged], *, labels: Any = None, axes: Any = None
) -> Picture:
    """Draw the Euclidean norm of a state at each element.

    Elements whose norm is not finite are red, and the title counts them.

    Args:
        states: a Ragged ``(N, units)``, e.g. of ``layer.with_states``, or a dict of
            these by name.
        labels: as for :func:`attention`; None writes the norms.
        axes: one per state; None makes a figure.

    Raises:
        MissingExtraError: matplotlib is not installed.
        ArgumentTypeError: a state is not a Ragged of floats, or ``labels`` or ``axes`` have the
            wrong type.
        ShapeError: elements have several dimensions, the lengths of states differ, or the number of
            labels or axes is wrong.
        ArgumentError: there is no state, or the batch has too many elements for a picture.

    Example:
        >>> import raglane as rl
        >>> states = rl.Ragged([torch.tensor([[3.0, 4.0], [0.0, 1.0]])])
        >>> [text.get_text() for text in rl.plot.norms({"h": states}).axes[0].texts]
        ['5', '1']
    """
    batches = _named("states", states, "norm of", None)
    lengths = {
        name: batch.map(lambda values: values.norm(dim=1)) for name, batch in batches.items()
    }
    return _draw(lengths, _largest(lengths), labels, axes)


def _largest(batches: Mapping[str, Ragged]) -> float:
    """Return the largest finite number, or 1 if none is above 0."""
    finite = [batch.values[torch.isfinite(batch.values)] for batch in batches.values()]
    return max((float(values.max()) for values in finite if values.numel()), default=0.0) or 1.0


def _named(name: str, value: Any, what: str, bounds: tuple[int, int] | None) -> dict[str, Ragged]:
    """Return checked batches by the titles of their parts."""
    if isinstance(value, Ragged):
        return {f"{what} {name}" if what.endswith("of") else name: _read(name, value, bounds)}
    fix = "pass a Ragged, or a dict of them"
    check_kind(name, value, Mapping, "a Ragged, or a mapping from names to Ragged", fix)
    if not value:
        raise ArgumentError(name, "none", "at least one Ragged", fix)
    for key in value:
        check_kind(f"a name in {name}", key, str, "a text", fix)
    return {
        f"{what} {printable(key)}": _read(f"{name}[{key!r}]", batch, bounds)
        for key, batch in value.items()
    }


def _read(name: str, batch: Any, bounds: tuple[int, int] | None) -> Ragged:
    """Return a checked batch as ``(N, units)`` float64 on the CPU."""
    check_ragged(name, batch)
    if not batch.values.is_floating_point():
        fix = "convert the batch with .to(torch.float32)"
        raise ArgumentTypeError(name, str(batch.dtype), "of a floating-point dtype", fix)
    if len(batch.feature_shape) > 1 or 0 in batch.feature_shape:
        rule = "one number or one vector per element"
        raise ShapeError(
            name,
            f"elements of shape {tuple(batch.feature_shape)}",
            rule,
            "choose or flatten features",
        )
    values = batch.values.detach().to("cpu", torch.float64)
    if bounds is not None:
        outside = ~((values >= bounds[0]) & (values <= bounds[1] + _ROUNDING))
        if bool(outside.any()):
            got = quote(float(values[outside][0]))
            rule = f"numbers from {bounds[0]} to {bounds[1]}"
            raise ArgumentError(name, got, rule, "apply softmax or sigmoid first")
    return Ragged.from_flat(
        values if batch.feature_shape else values.unsqueeze(1), lengths=batch.lengths_cpu
    )


def _draw(
    batches: Mapping[str, Ragged], most: float, labels: Any, axes: Any, gamma: float = 1.0
) -> Picture:
    """Draw parts below each other with the same rows, columns and colours; ``gamma`` is the
    exponent of colours.
    """
    require("matplotlib.colors", "plot")
    from matplotlib.colors import PowerNorm

    norm = PowerNorm(gamma, 0, most)
    first_name, first = next(iter(batches.items()))
    for name, batch in batches.items():
        batch._needs_lengths_of(name, first, first_name)
    sample = cells.Sample.read(first, labels)
    tables = {name: _table(batch, sample) for name, batch in batches.items()}
    texts = sample.labels
    rows = len(sample.lengths)
    columns = sample.steps
    has_texts = rows * columns <= _MOST_TEXTS
    few = [text for line in texts or () for text in line] if has_texts else []
    widest = max(map(width_of, [*sorted(few, key=len)[-20:], "0.00"]))
    width, height, shown = cells.grid_size(columns, rows, widest if has_texts else 0.0)
    left = cells.room_for_names(sample.names())
    room = height + cells.ABOVE + cells.BELOW
    boxes = [
        Box(left, (len(tables) - 1 - at) * room + cells.BELOW, width, height)
        for at in range(len(tables))
    ]
    titles = [_title(name, batch, sample) for name, batch in batches.items()]
    remark = "; colours: square root" if gamma != 1 and columns else ""
    below = f"step{remark}{sample.remark}"
    texts_wide = [*(width_of(title, TITLE) for title in titles), width_of(below, TEXT)]
    scale = 0.4 + max(width_of(_number(most / 2)), width_of(_number(most)))
    whole = left + max(width + scale, max(texts_wide) + 0.2)
    picture = picture_in(axes, (whole, room * len(tables)), boxes)
    for plot, title, table in zip(picture.axes, titles, tables.values(), strict=True):
        plot.set_xlim(0, max(columns, 1) if picture.is_given else shown)
        plot.set_ylim(max(rows, 1), 0)
        _draw_table(plot, table, norm)
        if has_texts:
            _write(plot, table, norm, texts)
        _draw_scale(plot, norm)
        cells.mark_rows(plot, sample.names())
        cells.mark_steps(plot, columns)
        label(plot, title, below, "sequence")
    return picture


def _title(name: str, batch: Ragged, sample: cells.Sample) -> str:
    title = f"{name}: {count_of(len(sample.all), 'sequence')}"
    wrong = int((~torch.isfinite(batch.values)).sum())
    return title + (f", not finite at {count_of(wrong, 'element')} (red)" if wrong else "")


def _table(batch: Ragged, sample: cells.Sample) -> npt.NDArray[np.float64]:
    """Return one number per drawn sequence and step, masked past the end of a sequence."""
    starts = offsets_from_lengths(sample.all)[sample.index]
    step = torch.arange(sample.steps, device="cpu")
    exists = step < sample.lengths.unsqueeze(1)
    table = torch.zeros(exists.shape, dtype=torch.float64, device="cpu")
    table[exists] = batch.values[(starts.unsqueeze(1) + step)[exists]]
    return np.ma.array(table.numpy(), mask=~exists.numpy())


def _number(number: float) -> str:
    """Return a number with two or three significant digits."""
    return f"{number:.3g}" if abs(number) >= 1 else f"{number:.2g}"


def _draw_table(axes: Any, table: Any, norm: Any) -> None:
    """Draw colours as shapes, or as an image if there are many; numbers that are not finite are
    red.
    """
    from matplotlib import colormaps
    from matplotlib.colors import to_rgba

    rows, columns = table.shape
    if not table.size:
        return
    colors = colormaps[_COLORS](norm(np.clip(np.nan_to_num(table.filled(0.0)), 0, norm.vmax)))
    colors[~np.isfinite(table.filled(0.0))] = to_rgba(VERMILION)
    colors[np.ma.getmaskarray(table)] = 0.0
    if table.size <= _MOST_SHAPES:
        edge = {
            "edgecolors": look().paper,
            "linewidth": min(0.8, 72 * 0.12 * min(cells.pitch(axes))),
        }
        axes.pcolormesh(np.arange(columns + 1), np.arange(rows + 1), colors, zorder=2, **edge)
    else:
        smooth: dict[str, Any] = {"interpolation": "antialiased", "interpolation_stage": "rgba"}
        axes.imshow(colors, extent=(0, columns, rows, 0), aspect="auto", zorder=2, **smooth)
        axes.set_ylim(rows, 0)


def _write(axes: Any, table: Any, norm: Any, texts: list[list[str]] | None) -> None:
    """Write the label or number of each element where it fits."""
    from matplotlib import colormaps

    wide, high = cells.pitch(axes)
    if high < cells.LINE:
        return
    for row, column in np.argwhere(~np.ma.getmaskarray(table)).tolist():
        number = float(table[row, column])
        text = _number(number)
        if texts is not None:
            text = cells.fitting(texts[row][column], wide - 0.03)
        elif width_of(text) > wide - 0.03:
            text = ""
        color = colormaps[_COLORS](float(norm(number))) if np.isfinite(number) else VERMILION
        if text:
            cells.write_on(axes, column + 0.5, row + 0.5, text, color)


def _draw_scale(axes: Any, norm: Any) -> None:
    """Draw the colour bar on the right."""
    from matplotlib.cm import ScalarMappable

    height = axes.bbox.height / axes.figure.dpi
    inch = axes.figure.dpi / axes.bbox.width
    scale = axes.inset_axes((1 + 0.1 * inch, 0, 0.12 * inch, 1))
    bar = axes.figure.colorbar(ScalarMappable(norm, _COLORS), cax=scale)
    ticks = [0, norm.vmax] if height < 0.6 else [0, norm.vmax / 2, norm.vmax]
    bar.set_ticks(ticks, labels=[_number(tick) for tick in ticks])
    bar.outline.set_visible(False)
    scale.tick_params(length=2, colors=look().ink, labelsize=SMALL)
