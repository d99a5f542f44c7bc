"""The Vega-Lite charts of a page; colours are CSS variables, so that they follow its light or dark
theme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from raglane._utils.messages import require
from raglane.planner import Row
from raglane.runs.inspection.inspect import Inspection

alt: Any = require("altair", "report")

ORDER_COLORS = {"random": "var(--blue)", "bucketed": "var(--vermilion)", "sorted": "var(--green)"}
"""The colour of each order of sequences."""

_SHAPES = {"random": "circle", "bucketed": "square", "sorted": "triangle-up"}
_DASHES = {"random": [1, 0], "bucketed": [6, 3], "sorted": [2, 2]}
_HEIGHT = 280
_UPRIGHT = alt.Axis(labelAngle=0, format=",d")
_LEGEND = alt.Legend(title=None, orient="top", symbolSize=90)


def script() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script."""
    bundle: str = require("vl_convert", "report").javascript_bundle()
    # Unescaped, this would end the script element.
    return bundle.replace("</script", "<\\/script")


def lengths(inspection: Inspection) -> dict[str, Any]:
    """Return the histogram of lengths with the cumulative share and quantiles."""
    grows = (
        len({interval.high - interval.low for interval in inspection.bins}) > 1
    )  # then the axis is logarithmic
    least = 1 if grows else inspection.bins[0].low
    scale = alt.Scale(
        type="log" if grows else "linear", domain=[least, inspection.bins[-1].high + 1], nice=False
    )
    axis = alt.Axis(
        title="steps of a sequence" + (", logarithmic" if grows else ""), format=",d", grid=False
    )
    bars = [
        {
            "from": max(interval.low, least),
            "to": interval.high + 1,
            "none": 0,
            "steps": str(interval),
            "sequences": interval.count,
        }
        for interval in inspection.bins
        if interval.high >= least
    ]
    histogram = (
        alt.Chart(alt.Data(values=bars))
        .mark_rect(color="var(--blue)", opacity=0.75, stroke="var(--paper)", strokeWidth=1)
        .encode(
            x=alt.X("from:Q", scale=scale, axis=axis),
            x2="to:Q",
            y=alt.Y("sequences:Q", title="sequences", axis=alt.Axis(format="~s", tickMinStep=1)),
            y2="none:Q",
            tooltip=["steps:N", alt.Tooltip("sequences:Q", format=",")],
        )
    )
    shares = [
        {"length": max(length, least), "share": percent / 100}
        for percent, length in enumerate(inspection.percentiles)
    ]
    curve = (
        alt.Chart(alt.Data(values=shares))
        .mark_line(color="var(--vermilion)", strokeWidth=2, interpolate="step-after")
        .encode(
            x=alt.X("length:Q", scale=scale),
            y=alt.Y(
                "share:Q",
                title="share at most as long",
                axis=alt.Axis(format="%", orient="right", grid=False),
            ),
            tooltip=[
                alt.Tooltip("length:Q", title="at most", format=","),
                alt.Tooltip("share:Q", format=".0%"),
            ],
        )
    )
    rules, names = _quantiles(inspection, least, scale)
    return _finish(
        alt.layer(alt.layer(histogram, rules, names), curve).resolve_scale(y="independent")
    )


def _quantiles(inspection: Inspection, least: int, scale: Any) -> tuple[Any, Any]:
    """Return vertical lines at the median, 95 % and 99 %, and their labels."""
    numbers = inspection.summary
    # Equal quantiles share a label.
    labels: dict[int, list[str]] = {}
    for name, length in (("median", numbers.median), ("95%", numbers.p95), ("99%", numbers.p99)):
        labels.setdefault(max(length, least), []).append(name)
    values = [
        {"length": length, "name": f"{', '.join(names)}: {length:,}", "row": row}
        for row, (length, names) in enumerate(labels.items())
    ]
    base = alt.Chart(alt.Data(values=values)).encode(x=alt.X("length:Q", scale=scale))
    low, high = scale.domain
    transform = math.log if scale.type == "log" else float
    names = []
    for row, length in enumerate(labels):
        # In the right half to the left of the line, where there is room, and below the curve.
        is_right = 2 * transform(length) > transform(low) + transform(high)
        text = base.transform_filter(f"datum.row == {row}").mark_text(
            align="right" if is_right else "left",
            dx=-4 if is_right else 4,
            color="var(--ink)",
            fontSize=12,
        )
        names.append(text.encode(text="name:N", y=alt.value((130 if is_right else 10) + 16 * row)))
    return base.mark_rule(color="var(--ink)", strokeDash=[3, 3]), alt.layer(*names)


def densities(inspection: Inspection) -> dict[str, Any]:
    """Return the density of padded batches against their size, by order."""
    values = [
        {"size": density.batch_size, "order": density.order, "density": density.density}
        for density in inspection.densities
    ]
    orders = list(dict.fromkeys(density.order for density in inspection.densities))
    base = alt.Chart(alt.Data(values=values)).encode(
        x=alt.X("size:O", title="sequences in a batch", axis=_UPRIGHT),
        y=alt.Y(
            "density:Q",
            title="real elements",
            scale=alt.Scale(domain=[0, 1]),
            axis=alt.Axis(format="%"),
        ),
        color=_colors(orders),
        tooltip=[
            "order:N",
            alt.Tooltip("size:O", title="batch"),
            alt.Tooltip("density:Q", format=".1%"),
        ],
    )
    dashes = alt.StrokeDash("order:N", legend=_LEGEND, scale=_scale(orders, _DASHES))
    shapes = alt.Shape("order:N", scale=_scale(orders, _SHAPES), legend=_LEGEND)
    line = base.mark_line(strokeWidth=2).encode(strokeDash=dashes)
    return _finish(line + base.mark_point(size=70, filled=True, opacity=1).encode(shape=shapes))


def steps(rows: Sequence[Row]) -> dict[str, Any]:
    """Return median, 90th percentile and maximum of a training step, by batch size and order."""
    points = [
        {"size": row.batch_size, "order": _order(row), "time": name, "ms": 1000 * seconds}
        for row in rows
        for name, seconds in (
            ("median", row.step_p50),
            ("90%", row.step_p90),
            ("longest", row.step_max),
        )
    ]
    spans = [
        {
            "size": row.batch_size,
            "order": _order(row),
            "from": 1000 * row.step_p50,
            "to": 1000 * row.step_max,
        }
        for row in rows
    ]
    orders = list(dict.fromkeys(map(_order, rows)))
    x = alt.X(
        "size:O", title="sequences in a batch", axis=_UPRIGHT, scale=alt.Scale(paddingInner=0.3)
    )
    y = alt.Y("ms:Q", title="milliseconds")
    shared = {"xOffset": alt.XOffset("order:N", sort=orders), "color": _colors(orders)}
    span = alt.Chart(alt.Data(values=spans)).mark_rule(strokeWidth=2)
    shapes = alt.Scale(
        domain=["median", "90%", "longest"], range=["circle", "diamond", "triangle-up"]
    )
    point = (
        alt.Chart(alt.Data(values=points))
        .mark_point(size=80, filled=True, opacity=1, strokeWidth=2)
        .encode(
            shape=alt.Shape("time:N", scale=shapes, legend=_LEGEND),
            tooltip=[
                "order:N",
                alt.Tooltip("size:O", title="batch"),
                "time:N",
                alt.Tooltip("ms:Q", format=".3~f"),
            ],
        )
    )
    return _finish(
        span.encode(x=x, y=alt.Y("from:Q", title="milliseconds"), y2="to:Q", **shared)
        + point.encode(x=x, y=y, **shared)
    )


def spreads(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the time of a step of several processes relative to their mean, by batch size and
    order.
    """
    values = [
        {"size": row.batch_size, "order": _order(row), "more": row.rank_spread - 1} for row in rows
    ]
    orders = list(dict.fromkeys(map(_order, rows)))
    chart = (
        alt.Chart(alt.Data(values=values))
        .mark_bar()
        .encode(
            x=alt.X("size:O", title="sequences in a batch of one process", axis=_UPRIGHT),
            xOffset=alt.XOffset("order:N", sort=orders),
            y=alt.Y("more:Q", title="longer than the mean", axis=alt.Axis(format="%")),
            color=_colors(orders),
            tooltip=[
                "order:N",
                alt.Tooltip("size:O", title="batch"),
                alt.Tooltip("more:Q", format=".1%"),
            ],
        )
    )
    return _finish(chart)


def _order(row: Row) -> str:
    return "bucketed" if row.bucketed else "random"


def _scale(orders: Sequence[str], values: dict[str, Any]) -> Any:
    return alt.Scale(domain=list(orders), range=[values[order] for order in orders])


def _colors(orders: Sequence[str]) -> Any:
    return alt.Color("order:N", scale=_scale(orders, ORDER_COLORS), legend=_LEGEND)


def _finish(chart: Any) -> dict[str, Any]:
    """Return a chart with the width, colours and font of the page."""
    text = {
        "aria": False,
        **dict.fromkeys(("labelColor", "titleColor"), "var(--ink)"),
        **dict.fromkeys(("labelFontSize", "titleFontSize"), 12),
    }
    config = {
        "background": "transparent",
        "font": "system-ui, sans-serif",
        # The page has its own text alternatives and tables.
        "aria": False,
        "mark": {"aria": False},
        "view": {"stroke": None},
        "axis": {
            **text,
            "titleFontWeight": "normal",
            "gridColor": "var(--grid)",
            "domainColor": "var(--faint)",
            "tickColor": "var(--faint)",
        },
        # Legends below each other fit on a phone.
        "legend": {
            **text,
            "layout": {"top": {"direction": "vertical", "anchor": "start"}},
            "symbolBaseFillColor": "var(--ink)",
            "symbolBaseStrokeColor": "var(--ink)",
        },
    }
    sized = chart.properties(
        width="container", height=_HEIGHT, autosize={"type": "fit-x", "contains": "padding"}
    )
    spec: dict[str, Any] = sized.to_dict(validate=False)
    return spec | {"config": config}
