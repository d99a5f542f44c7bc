"""An inspection as JSON: a program reads there what a person reads on the page.

``docs/inspect.md`` describes it. Whoever takes an entry away, or changes what one means, raises ``VERSION``; a new
entry does not.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from raglane.runs.inspection.inspect import Inspection
from raglane.training.stored import finite, to_json


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
