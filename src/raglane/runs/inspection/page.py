"""The page of ``raglane inspect --html``."""

from __future__ import annotations

from raglane.errors import ArgumentError
from raglane.runs.inspection import charts
from raglane.runs.inspection.batches import ORDERS
from raglane.runs.inspection.inspect import Inspection
from raglane.runs.inspection.pictures import LAYOUTS, draw
from raglane.runs.inspection.text import QUANTILES, data_facts, length_facts, what_beside
from raglane.report import html
from raglane.report.page import page
from raglane.planner import words



def as_page(inspection: Inspection) -> bytes:
    """An inspection as a page."""
    parts = {
        "advice": ("Recommendation", _advice(inspection)),
        "lengths": ("Lengths", _lengths(inspection)),
        "batches": ("Batches and padding", _batches(inspection)),
        "look": ("Batches to look at", _pictures(inspection)),
        "ways": ("Ways to run the layer", _ways(inspection)),
        "steps": ("How long a step takes", _steps(inspection)),
        "ranks": ("Several processes", _ranks(inspection)),
        "data": ("What is in the data", _data(inspection)),
    }
    machine = inspection.machine
    made = ", ".join(f"{name} {machine[name]}" for name in ("raglane", "torch", "Python"))
    return page(
        "raglane inspect",
        inspection.contents.name,
        inspection.sentence,
        _facts(inspection),
        parts,
        f"Measured with {made} on {machine['processor']}, {machine['processors']} processors.",
        machine["raglane"],
        charts.script(),
    )


def _facts(inspection: Inspection) -> str:
    numbers, best = inspection.summary, inspection.plan.best
    return html.facts(
        [
            ("sequences", f"{numbers.count:,}"),
            ("elements", f"{numbers.elements:,}"),
            ("median length", f"{numbers.median:,}"),
            ("longest", f"{numbers.maximum:,}"),
            ("real elements of one padded batch", f"{numbers.fill:.0%}"),
            ("epoch of the layer", words.seconds_in_words(best.train_seconds)),
        ]
    )


def _advice(inspection: Inspection) -> str:
    plan = inspection.plan
    parts = [html.paragraphs(f"Best: {plan.best}.", plan.why), html.command(inspection.command)]
    parts.append(html.paragraphs(f"A training step fits into memory up to {plan.most_elements:,} elements."))
    if plan.tail:
        parts.append(html.paragraphs(plan.tail))
    if plan.busy:
        parts.append(html.paragraphs("Other programs kept this machine busy: the times may be too long.", kind="note"))
    if plan.others:
        rows = [(name, f"{ratio:.2f}") for name, ratio in plan.others.items()]
        what = "Time of training with other cells of this width, in proportion"
        parts += ["<h3>Other cells</h3>", html.table(what, ["cell", "time"], rows)]
    return "\n".join(parts)


def _lengths(inspection: Inspection) -> str:
    numbers, total = inspection.summary, inspection.summary.elements
    bins = [(str(one), f"{one.count:,}", f"{one.count / numbers.count:.1%}") for one in inspection.bins]
    drawn = html.chart(
        "lengths-drawn",
        charts.lengths(inspection),
        f"Histogram of {numbers.count:,} lengths from {numbers.minimum:,} to {numbers.maximum:,}, half of them at most "
        f"{numbers.median:,}, 95% at most {numbers.p95:,}, 99% at most {numbers.p99:,}.",
        "Bars: how many sequences have which length. Line: the share of the sequences that is at most as long.",
        html.table("Sequences by length", ["length", "sequences", "share"], bins),
    )
    quantiles = [(name, f"{getattr(numbers, field):,}") for field, name in QUANTILES.items()]
    columns = ["lengths", "sequences", "elements", "real if padded", "share of all elements"]
    rows = [
        (
            f"{one.low:,}" if one.low == one.high else f"{one.low:,} to {one.high:,}",
            f"{one.count:,}",
            f"{one.elements:,}",
            f"{one.fill:.0%}",
            f"{one.elements / total:.0%}",
        )
        for one in inspection.buckets
    ]
    return "\n".join(
        [
            drawn,
            "<h3>Quantiles</h3>",
            html.table("Lengths that such a share of the sequences does not exceed", ["share", "length"], quantiles),
            "<h3>Buckets</h3>",
            html.table("Buckets of about as many sequences each", columns, rows, bars=4),
        ]
    )


def _batches(inspection: Inspection) -> str:
    sizes = sorted({one.batch_size for one in inspection.fills})
    known = {(one.batch_size, one.order): one.fill for one in inspection.fills}
    rows = [(f"{size:,}", *(f"{known[size, order]:.1%}" for order in ORDERS)) for size in sizes]
    least, most = (f"{known[size, 'random']:.0%} of {size:,}" for size in (sizes[-1], sizes[0]))
    caption = (
        "The share of real elements in padded batches: sequences by chance, grouped by length within pools of 200 "
        "batches (raglane train --bucket), or all sorted by length."
    )
    if inspection.looked_at < inspection.summary.count:
        caption += f" Counted on {inspection.looked_at:,} sequences drawn by chance."
    return html.chart(
        "fills-drawn",
        charts.fills(inspection),
        f"Share of real elements by size of the batch. Random batches: {most} sequences, {least} sequences.",
        caption,
        html.table("Real elements of padded batches", ["sequences in a batch", *ORDERS], rows),
    )


def _pictures(inspection: Inspection) -> str:
    names = {one.name: f"{one.name} ({one.fill:.0%} real)" for one in inspection.examples}
    groups = {
        "batch": ("Batch, by the share that is real if padded", names),
        "layout": ("Drawn", {layout: layout for layout in LAYOUTS}),
    }
    pictures: dict[tuple[str, ...], tuple[str, str]] = {}
    for number, one in enumerate(inspection.examples):
        for layout, (what, _) in LAYOUTS.items():
            caption = (
                f"The {one.name} batch, {layout}: {what}. {len(one.lengths):,} sequences of {one.lengths[-1]:,} to "
                f"{one.lengths[0]:,} steps, {sum(one.lengths):,} elements; {one.fill:.0%} of the padded batch is real."
            )
            try:
                pictures[one.name, layout] = draw(one.lengths, layout, f"{layout}{number}-"), caption
            except ArgumentError:
                return html.paragraphs("These batches have more elements than a picture can hold.")
    kind = "grouped by length" if inspection.plan.best.grouped else "random"
    about = (
        f"Of the recommended batches ({inspection.plan.best.batch_size:,} sequences, {kind}). A colour is a sequence."
    )
    return html.paragraphs(about) + "\n" + html.picker(groups, pictures)


def _ways(inspection: Inspection) -> str:
    plan = inspection.plan
    rows = words.shown(plan.rows, plan.best)
    about = (
        f"The layer {plan.layer} over all sequences once: elements computed, the share of them that does not exist, "
        "training, inference, the step that nine of ten do not exceed, and the memory of a step. The best is marked."
    )
    about += f" {words.ROUGH}." if any(row.is_rough for row in rows) else ""
    return (
        html.paragraphs(about)
        + "\n"
        + html.table(
            "The best batches of each way, and each size of the recommended way",
            words.COLUMNS,
            [words.fields(row) for row in rows],
            words=4,
            best=lambda place: rows[place] is plan.best,
        )
    )


def _steps(inspection: Inspection) -> str:
    rows = inspection.spreads
    listed = [
        (
            f"{row.batch_size:,}",
            "grouped" if row.grouped else "random",
            *map(words.seconds_in_words, (row.step_p50, row.step_p90, row.step_max)),
            words.bytes_in_words(row.peak_bytes),
        )
        for row in rows
    ]
    best = inspection.plan.best
    columns = ["sequences in a batch", "order", "median", "90%", "longest", "memory"]
    return html.chart(
        "steps-drawn",
        charts.steps(rows),
        f"Time of a training step by size of the batch; as recommended {words.seconds_in_words(best.step_p50)} at the "
        f"median and {words.seconds_in_words(best.step_max)} at most.",
        f"A training step of the layer with {best.way}: the median, what nine of ten steps do not exceed, and the "
        "longest.",
        html.table("Training steps", columns, listed, words=2),
    )


def _ranks(inspection: Inspection) -> str:
    ranks, rows = inspection.plan.ranks, inspection.spreads
    if ranks == 1:
        return html.paragraphs(
            "One process trains: no step waits for another. With --ranks 8, this part says what waiting costs with 8."
        )
    listed = [(f"{row.batch_size:,}", "grouped" if row.grouped else "random", f"{row.rank_spread:.2f}") for row in rows]
    best = inspection.plan.best
    return html.chart(
        "ranks-drawn",
        charts.spreads(rows),
        f"Time that {ranks:,} processes wait, by size of the batch; as recommended {best.rank_spread - 1:.0%} more.",
        f"A step of {ranks:,} processes takes as long as the slowest of them. Drawn is how much longer that is than "
        "the mean.",
        html.table(
            "Time of a step in proportion to the mean of its processes",
            ["sequences in a batch", "order", "time"],
            listed,
            words=2,
        ),
    )


def _data(inspection: Inspection) -> str:
    contents = inspection.contents
    elements = inspection.summary.elements
    parts = [html.table("Facts", ["what", "value"], [*data_facts(contents), *length_facts(inspection)], words=2)]
    if contents.features:
        rows = [
            (feature.name, f"{feature.missing:,}", f"{feature.missing / elements:.1%}")
            for feature in contents.features[:_LISTED]
        ]
        what = _some("Features, and where they are NaN or infinite", len(contents.features))
        parts += ["<h3>Features</h3>", html.table(what, ["feature", "missing", "share"], rows)]
    if contents.beside:
        others = [
            (name, what_beside(counted), f"{counted.missing:,}")
            for name, counted in list(contents.beside.items())[:_LISTED]
        ]
        what = _some("Features in columns of their own", len(contents.beside))
        parts += ["<h3>Features beside them</h3>", html.table(what, ["feature", "what", "missing"], others, words=2)]
    if contents.labels is not None:
        counts = contents.labels.counts
        all_of_them = sum(counts.values())
        labels = [
            (label, f"{count:,}", f"{count / all_of_them:.1%}") for label, count in list(counts.items())[:_LISTED]
        ]
        what = _some(f"Labels, one per {contents.labels.of}", len(counts))
        parts += ["<h3>Labels</h3>", html.table(what, ["label", "count", "share"], labels, bars=2)]
    if contents.notes:
        parts += ["<h3>Notes of the reader</h3>", html.paragraphs(*contents.notes)]
    return "\n".join(parts)


# Features and labels that a page lists.
_LISTED = 100


def _some(what: str, count: int) -> str:
    return f"{what}: the first {_LISTED} of {count:,}" if count > _LISTED else what
