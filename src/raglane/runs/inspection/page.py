"""The page of ``raglane inspect --html``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from raglane import plot
from raglane._utils.table import PrintedTable
from raglane._utils.words import bytes_in_words, seconds_in_words
from raglane.errors import ArgumentError
from raglane.planner import texts
from raglane.report.page import (
    Block,
    Chart,
    CommandLines,
    Heading,
    InlinePicture,
    Page,
    Part,
    Picker,
    Text,
    inline,
)
from raglane.runs.inspection import charts
from raglane.runs.inspection.inspect import (
    ORDERS,
    QUANTILES,
    Inspection,
    data_facts,
    length_facts,
    what_beside,
)

# The most features or labels that a page lists.
_LISTED = 100

# The layouts of a batch, with their descriptions and functions.
_LAYOUTS: dict[str, tuple[str, Callable[[Sequence[int]], Any]]] = {
    "padded": ("one row per sequence, padded to the longest; padding is hatched", plot.padded),
    "packed": ("at each step all sequences that have one, the longest first", plot.packed),
    "lanes": ("the next sequence begins where one ends; idle steps are grey", plot.lanes),
}


def as_page(inspection: Inspection) -> bytes:
    """Return an inspection as an HTML page."""
    numbers = inspection.summary
    best = inspection.plan.best
    machine = inspection.machine
    versions = ", ".join(f"{name} {machine[name]}" for name in ("raglane", "torch", "Python"))
    page = Page(
        kind="raglane inspect",
        name=inspection.contents.name,
        sentence=inspection.sentence,
        facts=[
            ("sequences", f"{numbers.count:,}"),
            ("elements", f"{numbers.elements:,}"),
            ("median length", f"{numbers.median:,}"),
            ("longest", f"{numbers.maximum:,}"),
            ("real elements of one padded batch", f"{numbers.density:.0%}"),
            ("epoch of the layer", texts.range_in_words(best.train_range)),
        ],
        parts=[
            Part("Recommendation", _advice(inspection), "advice"),
            Part("Lengths", _lengths(inspection), "lengths"),
            Part("Batches and padding", _batches(inspection), "batches"),
            Part("Example batches", _pictures(inspection), "look", is_wide=True),
            Part("Backends and schedules", _ways(inspection), "ways", is_wide=True),
            Part("Time of a step", _steps(inspection), "steps"),
            Part("Several processes", _ranks(inspection), "ranks"),
            Part("Contents of the data", _data(inspection), "data"),
        ],
        footer=f"Measured with {versions} on {machine['processor']}, {machine['processors']} processors.",
        version=machine["raglane"],
        script=charts.script(),
    )
    return page.html()


def _advice(inspection: Inspection) -> list[Block]:
    plan = inspection.plan
    parts: list[Block] = [
        Text(f"Best: {plan.best}."),
        Text(plan.why),
        CommandLines([inspection.command]),
    ]
    parts.append(Text(f"A training step fits into memory up to {plan.most_elements:,} elements."))
    if plan.tail:
        parts.append(Text(plan.tail))
    if plan.busy:
        parts.append(
            Text(
                "Other programs used this machine during the measurement: the times may be too long.",
                is_note=True,
            )
        )
    if plan.others:
        rows = [(name, str(ratio)) for name, ratio in plan.others.items()]
        what = "Training time with other cells of this width, relative to this one: median, range"
        parts += [Heading("Other cells"), PrintedTable(what, ["cell", "time"], rows)]
    return parts


def _lengths(inspection: Inspection) -> list[Block]:
    numbers = inspection.summary
    total = inspection.summary.elements
    bins = [
        (str(interval), interval.count, f"{interval.count / numbers.count:.1%}")
        for interval in inspection.bins
    ]
    quantiles = [(name, getattr(numbers, field)) for field, name in QUANTILES.items()]
    buckets = [
        (
            f"{interval.low:,}"
            if interval.low == interval.high
            else f"{interval.low:,} to {interval.high:,}",
            interval.count,
            interval.elements,
            f"{interval.density:.0%}",
            f"{interval.elements / total:.0%}",
        )
        for interval in inspection.buckets
    ]
    columns = ["lengths", "sequences", "elements", "real if padded", "share of all elements"]
    return [
        Chart(
            "lengths-drawn",
            charts.lengths(inspection),
            f"Histogram of {numbers.count:,} lengths from {numbers.minimum:,} to {numbers.maximum:,}, half of them at "
            f"most {numbers.median:,}, 95% at most {numbers.p95:,}, 99% at most {numbers.p99:,}.",
            "Bars: the number of sequences by length. Line: the share of sequences of at most this length.",
            PrintedTable("Sequences by length", ["length", "sequences", "share"], bins),
        ),
        PrintedTable("Quantiles of the lengths", ["share", "length"], quantiles, is_folded=True),
        PrintedTable(
            "Buckets with similar numbers of sequences", columns, buckets, bars=4, is_folded=True
        ),
    ]


def _batches(inspection: Inspection) -> list[Block]:
    sizes, density_of = inspection.known_densities
    rows = [
        (f"{size:,}", *(f"{density_of[size, order]:.1%}" for order in ORDERS)) for size in sizes
    ]
    least, most = (
        f"{density_of[size, 'random']:.0%} of {size:,}" for size in (sizes[-1], sizes[0])
    )
    caption = (
        "The share of real elements in padded batches: sequences at random, bucketed by length within pools of 200 "
        "batches (raglane train --bucket), or all sorted by length."
    )
    if inspection.looked_at < inspection.summary.count:
        caption += f" Based on a random sample of {inspection.looked_at:,} sequences."
    return [
        Chart(
            "densities-drawn",
            charts.densities(inspection),
            f"Share of real elements by size of the batch. Random batches: {most} sequences, {least} sequences.",
            caption,
            PrintedTable(
                "Real elements of padded batches", ["sequences in a batch", *ORDERS], rows
            ),
        )
    ]


def _pictures(inspection: Inspection) -> list[Block]:
    names = {
        example.name: f"{example.name} ({example.density:.0%} real)"
        for example in inspection.examples
    }
    groups = {
        "batch": ("Batch, with the share of real elements if padded", names),
        "layout": ("Layout", {layout: layout for layout in _LAYOUTS}),
    }
    pictures: list[InlinePicture] = []
    for number, example in enumerate(inspection.examples):
        for layout, (what, draw) in _LAYOUTS.items():
            lengths = example.lengths
            caption = (
                f"The {example.name} batch, {layout}: {what}. {len(lengths):,} sequences of "
                f"{lengths[-1]:,} to {lengths[0]:,} steps, {sum(lengths):,} elements; "
                f"{example.density:.0%} of the padded batch is real."
            )
            try:
                with plot.theme("dark"):
                    svg = inline(draw(example.lengths)._repr_svg_(), f"{layout}{number}-")
            except ArgumentError:
                return [Text("These batches have too many elements to draw.")]
            pictures.append(
                InlinePicture(
                    svg, caption, caption, name=f"{example.name}-{layout}", is_hidden=bool(pictures)
                )
            )
    best = inspection.plan.best
    kind = "bucketed by length" if best.bucketed else "random"
    about = f"Three of the recommended batches ({best.batch_size:,} sequences, {kind}). Each sequence has a colour."
    return [Text(about), Picker(groups, pictures)]


def _ways(inspection: Inspection) -> list[Block]:
    plan = inspection.plan
    rows = texts.shown(plan.rows, plan.best)
    about = (
        f"An epoch of the layer {plan.layer}: time of training and of inference, the 90th percentile of a step's time, "
        "the memory of a step, computed elements, and their share of padding. The best row is marked."
    )
    about += f" {texts.ROUGH}." if any(row.is_rough for row in rows) else ""
    caption = "The best batches of each backend and schedule, and all sizes of the recommended one"
    best = next((index for index, row in enumerate(rows) if row is plan.best), None)
    return [
        Text(about),
        PrintedTable(
            caption, texts.COLUMNS, [texts.fields(row) for row in rows], words=2, best=best
        ),
    ]


def _steps(inspection: Inspection) -> list[Block]:
    rows = inspection.spreads
    best = inspection.plan.best
    listed = [
        (
            f"{row.batch_size:,}",
            "bucketed" if row.bucketed else "random",
            *map(seconds_in_words, (row.step_p50, row.step_p90, row.step_max)),
            bytes_in_words(row.peak_bytes),
        )
        for row in rows
    ]
    columns = ["sequences in a batch", "order", "median", "90%", "longest", "memory"]
    return [
        Chart(
            "steps-drawn",
            charts.steps(rows),
            f"Time of a training step by size of the batch; as recommended {seconds_in_words(best.step_p50)} at "
            f"the median and {seconds_in_words(best.step_max)} at most.",
            f"The time of a training step of the layer with {best.way}: median, 90th percentile and maximum.",
            PrintedTable("Training steps", columns, listed, words=2),
        )
    ]


def _ranks(inspection: Inspection) -> list[Block]:
    ranks = inspection.plan.ranks
    rows = inspection.spreads
    best = inspection.plan.best
    if ranks == 1:
        return [
            Text(
                "One process trains, and never waits. With --processes 8, this section shows the waiting time of 8."
            )
        ]
    listed = [
        (f"{row.batch_size:,}", "bucketed" if row.bucketed else "random", f"{row.rank_spread:.2f}")
        for row in rows
    ]
    caption = "Time of a step relative to the mean of its processes"
    return [
        Chart(
            "ranks-drawn",
            charts.spreads(rows),
            f"Time that {ranks:,} processes wait, by size of the batch; as recommended {best.rank_spread - 1:.0%} "
            "more.",
            f"A step of {ranks:,} processes takes as long as the slowest of them: the time above their mean.",
            PrintedTable(caption, ["sequences in a batch", "order", "time"], listed, words=2),
        )
    ]


def _data(inspection: Inspection) -> list[Block]:
    contents = inspection.contents
    elements = inspection.summary.elements
    facts = [*data_facts(contents), *length_facts(inspection)]
    parts: list[Block] = [PrintedTable("Facts", ["what", "value"], facts, words=2)]
    if contents.features:
        rows = [
            (feature.name, feature.missing, f"{feature.missing / elements:.1%}")
            for feature in contents.features[:_LISTED]
        ]
        what = _some("Features, with their NaN or infinite elements", len(contents.features))
        parts += [Heading("Features"), PrintedTable(what, ["feature", "missing", "share"], rows)]
    if contents.beside:
        listed = list(contents.beside.items())[:_LISTED]
        others = [(name, what_beside(counted), counted.missing) for name, counted in listed]
        what = _some("Features in columns of their own", len(contents.beside))
        parts += [
            Heading("Other features"),
            PrintedTable(what, ["feature", "what", "missing"], others, words=2),
        ]
    if contents.labels is not None:
        counts = contents.labels.counts
        total = sum(counts.values())
        labels = [
            (label, count, f"{count / total:.1%}")
            for label, count in list(counts.items())[:_LISTED]
        ]
        what = _some(f"Labels, one per {contents.labels.of}", len(counts))
        parts += [
            Heading("Labels"),
            PrintedTable(what, ["label", "count", "share"], labels, bars=2),
        ]
    if contents.notes:
        parts += [Heading("Notes of the reader"), *map(Text, contents.notes)]
    return parts


def _some(what: str, count: int) -> str:
    return f"{what}: the first {_LISTED} of {count:,}" if count > _LISTED else what
