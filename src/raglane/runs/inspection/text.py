"""An inspection as lines for a terminal, and as JSON: the facts of the page for a program.

``docs/inspect.md`` describes the JSON. Whoever takes an entry away, or changes what one means, raises ``VERSION``; a
new entry does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from raglane._utils.table import aligned
from raglane.data.lengths import Bin
from raglane.data.statistics import FeatureCounts
from raglane.errors import quote, shorten
from raglane.runs.inspection.inspect import ORDERS, Inspection
from raglane.runs.inspection.reading import Contents
from raglane.training.stored import finite, to_json

QUANTILES = {
    "minimum": "minimum",
    "q1": "quarter",
    "median": "median",
    "q3": "three quarters",
    "p95": "95%",
    "p99": "99%",
    "maximum": "maximum",
}
"""What the quantiles of a summary are called."""

# Columns and labels that are listed; a bar's characters, and those of a name.
_LISTED, _WIDE, _NAME = 12, 40, 40


def lines(inspection: Inspection, bar: str = "█") -> list[str]:
    """An inspection for a terminal, but for the command that it ends in."""
    parts = [
        aligned([("data", inspection.contents.name), *data_facts(inspection.contents)], words=2),
        [f"note: {note}" for note in inspection.contents.notes],
        aligned(length_facts(inspection), words=2),
        histogram(inspection.bins, bar),
        _fills(inspection),
        str(inspection.plan).splitlines(),
        [inspection.sentence],
    ]
    return [line for part in parts if part for line in (*part, "")]


def data_facts(contents: Contents) -> list[tuple[str, str]]:
    """What elements and labels are, by name."""
    found = []
    if contents.kind == "features":
        elements = int(contents.lengths.sum())
        listed = [
            _quoted(feature.name) + (f" ({feature.missing:,} of {elements:,} are missing)" if feature.missing else "")
            for feature in contents.features
        ]
        found.append(("features", _first(listed) or "none, since no sequence has an element"))
    elif contents.kind == "tokens":
        found.append(("tokens", f"{contents.vocabulary:,} different"))
    beside = [
        f"{_quoted(name)} ({what_beside(counts)}{f', {counts.missing:,} missing' if counts.missing else ''})"
        for name, counts in contents.beside.items()
    ]
    found += [("besides", _first(beside))] if beside else []
    if contents.labels is not None:
        counts = contents.labels.counts
        often = _first([f"{_quoted(label)} {count:,}" for label, count in counts.items()])
        found.append(("labels", f"{len(counts):,} different, one per {contents.labels.of}: {often}"))
    return found


def length_facts(inspection: Inspection) -> list[tuple[str, str]]:
    """The numbers of the lengths, by name."""
    numbers = inspection.summary
    listed = ", ".join(f"{name} {getattr(numbers, field):,}" for field, name in QUANTILES.items())
    return [
        ("sequences", f"{numbers.count:,}" + (f", {numbers.empty:,} of them empty" if numbers.empty else "")),
        ("elements", f"{numbers.elements:,}, {numbers.mean:,.1f} per sequence"),
        ("lengths", listed),
        ("fill", f"{numbers.fill:.1%} of one padded batch of all sequences would be real"),
    ]


def histogram(bins: Sequence[Bin], bar: str) -> list[str]:
    r"""A histogram in characters."""
    rows = [("length", "sequences"), *((str(one), f"{one.count:,}") for one in bins)]
    highest = max(one.count for one in bins)
    bars = ["", *(bar * max(round(_WIDE * one.count / highest), one.count > 0) for one in bins)]
    return [f"  {line}  {drawn}".rstrip() for line, drawn in zip(aligned(rows, words=0), bars, strict=True)]


def _fills(inspection: Inspection) -> list[str]:
    """How full padded batches are, a line per order."""
    sizes = sorted({one.batch_size for one in inspection.fills})
    by_size = {(one.batch_size, one.order): one.fill for one in inspection.fills}
    rows = [["real share of padded batches", *(f"{size:,}" for size in sizes)]]
    rows += [[f"  {order}", *(f"{by_size[size, order]:.0%}" for size in sizes)] for order in ORDERS]
    return aligned(rows)


def _quoted(name: str) -> str:
    return shorten(quote(name), _NAME)


def what_beside(counts: FeatureCounts) -> str:
    """What a feature is that has a column of its own."""
    per = "sequence" if counts.per_sequence else "element"
    return (
        f"numbers per {per}" if counts.categories is None else f"categories per {per}, {counts.categories:,} different"
    )


def _first(listed: Sequence[str]) -> str:
    more = f" and {len(listed) - _LISTED:,} more" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more


FORMAT, VERSION = "raglane inspection", 1

# Labels of which the counts are given.
_LABELS = 1000


def as_json(inspection: Inspection) -> bytes:
    """The document as strict JSON: no NaN, no infinity."""
    return to_json(finite(as_document(inspection)))


def as_document(inspection: Inspection) -> dict[str, Any]:
    """An inspection as values of JSON."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "summary": inspection.sentence,
        "data": _data(inspection),
        "lengths": {
            **asdict(inspection.summary),
            "percentiles": list(inspection.percentiles),
            "histogram": [asdict(one) for one in inspection.bins],
            "buckets": [{**asdict(bucket), "fill": bucket.fill} for bucket in inspection.buckets],
        },
        "batches": {
            "sequences_looked_at": inspection.looked_at,
            "fill": [asdict(fill) for fill in inspection.fills],
            "examples": [{**asdict(one), "lengths": list(one.lengths)} for one in inspection.examples],
        },
        "plan": _plan(inspection),
        "command": inspection.command,
        "machine": inspection.machine,
    }


def _data(inspection: Inspection) -> dict[str, Any]:
    contents = inspection.contents
    labels = None
    if contents.labels is not None:
        counts = list(contents.labels.counts.items())
        labels = {"of": contents.labels.of, "different": len(counts), "counts": dict(counts[:_LABELS])}
    return {
        "name": contents.name,
        "path": None if contents.path is None else str(contents.path.absolute()),
        "kind": contents.kind,
        "features": [asdict(feature) for feature in contents.features],
        "beside": [
            {
                "name": name,
                "per": "sequence" if counts.per_sequence else "element",
                "categories": counts.categories,
                "missing": counts.missing,
            }
            for name, counts in contents.beside.items()
        ],
        "vocabulary": contents.vocabulary,
        "labels": labels,
        "notes": list(contents.notes),
    }


def _plan(inspection: Inspection) -> dict[str, Any]:
    plan = inspection.plan
    of_rows = {"best": asdict(plan.best), "best_by_elements": asdict(plan.best_by_elements)}
    plain = {name: getattr(plan, name) for name in (field.name for field in fields(plan)) if name not in of_rows}
    return {**plain, **of_rows, "rows": [asdict(row) for row in plan.rows]}
