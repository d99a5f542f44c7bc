"""The result of ``raglane inspect`` as an object, as text and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from raglane._utils.json import finite, to_json
from raglane._utils.memory import FLOAT, TRAINED_TENSOR, check_memory
from raglane._utils.messages import count_of, first_of, quote, shorten
from raglane._utils.table import aligned
from raglane.data.order import BatchLimit, BatchSampler, EpochOrder
from raglane.data.prepare.lengths import (
    Bin,
    Bucket,
    LengthCounts,
    Summary,
    batch_density,
    bins,
    buckets,
    summary,
)
from raglane.data.prepare.statistics import FeatureCounts
from raglane.data.store.conversion import Progress
from raglane.native.machine import facts
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner import Plan, Row, plan
from raglane.planner.predicted import thin_out
from raglane.planner.texts import range_in_words
from raglane.runs.configuration import words_of
from raglane.runs.inspection.reading import Contents
from raglane.runs.sources import SequenceSource
from raglane.training.model import ModelConfig
from raglane.training.settings import ModelSettings, Settings

ORDERS = {
    "random": EpochOrder.random(),
    "bucketed": EpochOrder.bucketed(),
    "sorted": EpochOrder.sorted(),
}
"""The orders of sequences that are compared; ``--bucket`` groups them."""

_SIZES = (8, 16, 32, 64, 128, 256, 512)
MEASURING = "measuring this machine"
"""The stage that measures the layer, unless the measurement is cached."""

_Integers = npt.NDArray[np.int64]


class Density(NamedTuple):
    """The share of real elements in padded batches of a size and order."""

    batch_size: int
    order: str
    density: float


class Example(NamedTuple):
    """A batch that the page draws."""

    name: str
    density: float
    lengths: tuple[int, ...]


def batch_sizes(count: int) -> list[int]:
    """Return the compared sizes of batches: powers of two up to the number of sequences."""
    return [size for size in _SIZES if size <= count] or [count]


def densities(lengths: _Integers) -> tuple[Density, ...]:
    """Return the density of padded batches by size and order."""
    return tuple(
        Density(
            size,
            name,
            batch_density(
                lengths, *BatchSampler(lengths, BatchLimit(sequences=size), order).whole()
            ),
        )
        for size in batch_sizes(len(lengths))
        for name, order in ORDERS.items()
    )


def examples(lengths: _Integers, batch_size: int, *, bucketed: bool) -> tuple[Example, ...]:
    """Return the padded batches of an epoch with the lowest, median and highest density."""
    order = ORDERS["bucketed" if bucketed else "random"]
    batches = [
        lengths[batch] for batch in BatchSampler(lengths, BatchLimit(sequences=batch_size), order)
    ]
    full = [batch for batch in batches if len(batch) == batch_size and batch.any()]
    full = full or [batch for batch in batches if batch.any()]
    ranked = sorted(full, key=_fill)
    last = len(ranked) - 1
    ranks = {"median": 0} if last == 0 else {"worst": 0, "median": len(ranked) // 2, "best": last}
    return tuple(
        Example(name, _fill(ranked[index]), tuple(sorted(ranked[index].tolist(), reverse=True)))
        for name, index in ranks.items()
    )


def _fill(lengths: _Integers) -> float:
    return float(lengths.sum() / (len(lengths) * lengths.max()))


@dataclass(frozen=True, eq=False)
class Inspection:
    """The results of an inspection of data, a layer and this machine."""

    contents: Contents
    summary: Summary
    percentiles: tuple[int, ...]
    bins: tuple[Bin, ...]
    buckets: tuple[Bucket, ...]
    looked_at: int
    densities: tuple[Density, ...]
    examples: tuple[Example, ...]
    plan: Plan
    settings: Settings
    command: str
    machine: dict[str, str]

    @property
    def spreads(self) -> tuple[Row, ...]:
        """The rows of the recommended backend and schedule that limit sequences, by ascending batch
        size.
        """
        rows = [
            row
            for row in self.plan.rows
            if row.way == self.plan.best.way and row.batch_size is not None
        ]
        return tuple(sorted(rows, key=lambda row: (row.batch_size or 0, row.bucketed)))

    @property
    def known_densities(self) -> tuple[list[int], dict[tuple[int, str], float]]:
        """The sizes of batches, and the density by size and order."""
        density_of = {
            (density.batch_size, density.order): density.density for density in self.densities
        }
        return sorted({size for size, _ in density_of}), density_of

    @property
    def sentence(self) -> str:
        """The result as one sentence."""
        numbers = self.summary
        best = self.plan.best
        spread = f"{numbers.minimum:,} to {numbers.maximum:,} steps"
        if numbers.minimum == numbers.maximum:
            spread = f"{count_of(numbers.maximum, 'step')} each"
        if numbers.count == 1:
            who = f"One sequence of {count_of(numbers.maximum, 'step')} trains"
        else:
            who = f"{numbers.count:,} sequences of {spread} train"
        size = f"{best.batch_size:,}" if best.batch_size else f"{best.batch_elements:,} elements"
        batches = (
            f"batches of {size} bucketed by length,"
            if best.bucketed
            else f"random batches of {size}"
        )
        padding = f"{best.waste / best.elements:.0%} padding" if best.waste else "no padding"
        return (
            f"{who} fastest in {batches} with the schedule {best.schedule}: "
            f"{range_in_words(best.train_range)} per epoch of the layer and {padding}; one padded batch of all "
            f"sequences would be {1 - numbers.density:.0%} padding."
        )


def layer_of(settings: Settings, contents: Contents, embedding: int) -> RecurrentLayer:
    """Return the recurrent layer that training would build for this data."""
    chosen = {name: getattr(settings, name) for name in ModelSettings.__dataclass_fields__}
    numbers, categories = contents.inputs(settings.missing)
    if numbers or categories:
        sizes = {
            "input_size": numbers + len(categories),
            "embedding": embedding if categories else None,
        }
        config = ModelConfig(**{**chosen, **sizes}, categories=categories, output_size=1)
    else:
        # The size of the vocabulary does not affect the recurrent layer.
        config = ModelConfig(**chosen, input_size=1, output_size=1, embedding=embedding)
    weights, tensors = config.count()
    # The model, the copy that is measured, and the gradients of both.
    needed = 4 * FLOAT * weights + TRAINED_TENSOR * tensors
    check_memory(
        f"a model of {weights:,} weights", needed, "make hidden, layers or embedding smaller"
    )
    layer = config.encoder().recurrent
    longest = int(contents.lengths.max())
    input_bytes = FLOAT * longest * (layer.input_size + layer.output_size)
    check_memory(
        f"a step on a sequence of {longest:,} elements",
        input_bytes,
        "cut sequences that are so long",
    )
    return layer


def inspect(
    contents: Contents,
    settings: Settings,
    *,
    source: SequenceSource,
    ranks: int,
    fresh: bool,
    progress: Progress,
) -> Inspection:
    """Summarise data, and measure the layer that would train on it."""
    progress.stage("counting lengths")
    lengths = LengthCounts.of(contents.lengths)
    sample = thin_out(torch.from_numpy(contents.lengths))[0].numpy()
    drawn = densities(sample)
    progress.stage(MEASURING)
    layer = layer_of(settings, contents, settings.embedding)
    advice = plan(
        torch.from_numpy(contents.lengths),
        layer,
        processes=ranks,
        fresh=fresh,
        progress=progress.done,
    )
    chosen = recommended(settings, advice.best, contents)
    return Inspection(
        contents,
        summary(lengths),
        tuple(lengths.quantile(percent / 100) for percent in range(101)),
        bins(lengths),
        buckets(lengths),
        len(sample),
        drawn,
        examples(sample, advice.best.batch_size or 1, bucketed=advice.best.bucketed),
        advice,
        chosen,
        train_line(contents.path, contents.kind, source, chosen),
        facts(),
    )


def recommended(settings: Settings, best: Row, contents: Contents) -> Settings:
    """Return settings that follow a recommendation."""
    chosen = replace(
        settings, batch_size=best.batch_size or settings.batch_size, threads=best.threads
    )
    chosen = replace(chosen, bucket=best.bucketed)
    return (
        replace(chosen, missing="zero")
        if contents.missing and chosen.missing == "raise"
        else chosen
    )


def train_line(path: Path | None, kind: str, source: SequenceSource, settings: Settings) -> str:
    """Return the command ``raglane train``, or ``raglane demo`` without a path, for a shell."""
    chosen = words_of(settings, "batch_size")
    if path is None:
        return shlex.join(["raglane", "demo", *chosen])
    data = "DATA" if kind == "lengths" else f"{path}"
    if data.startswith("-"):
        data = f"./{path}"  # Otherwise the path would be parsed as an option.
    named = [*words_of(source.columns), *words_of(source)]
    if source.format is not None:
        named += ["--format", source.format]
    return shlex.join(["raglane", "train", data, *chosen, *named])


QUANTILES = {
    "minimum": "minimum",
    "q1": "quarter",
    "median": "median",
    "q3": "three quarters",
    "p95": "95%",
    "p99": "99%",
    "maximum": "maximum",
}
"""The labels of the quantiles of a summary."""

# The most listed columns or labels.
_LISTED = 12
# The most characters of a bar.
_WIDE = 40
# The most characters of a name.
_NAME = 40


def lines(inspection: Inspection, bar: str = "█") -> list[str]:
    """Return an inspection as lines for a terminal, without the recommended command."""
    parts = [
        aligned([("data", inspection.contents.name), *data_facts(inspection.contents)], words=2),
        [*map("; ".join, filter(None, inspection.contents.roles))],
        [f"note: {note}" for note in inspection.contents.notes],
        aligned(length_facts(inspection), words=2),
        histogram(inspection.bins, bar),
        _densities(inspection),
        str(inspection.plan).splitlines(),
        [inspection.sentence],
    ]
    return [line for block in parts if block for line in (*block, "")]


def data_facts(contents: Contents) -> list[tuple[str, str]]:
    """Return labelled descriptions of features, tokens and labels."""
    described = []
    if contents.kind == "features":
        elements = int(contents.lengths.sum())
        listed = [
            _quoted(feature.name)
            + (f" ({feature.missing:,} of {elements:,} are missing)" if feature.missing else "")
            for feature in contents.features
        ]
        described.append(
            ("features", first_of(listed, _LISTED) or "none, since no sequence has an element")
        )
    elif contents.kind == "tokens":
        described.append(("tokens", f"{contents.vocabulary:,} different"))
    beside = [
        f"{_quoted(name)} ({what_beside(counts)}{f', {counts.missing:,} missing' if counts.missing else ''})"
        for name, counts in contents.beside.items()
    ]
    described += [("other features", first_of(beside, _LISTED))] if beside else []
    if contents.labels is not None:
        counts = contents.labels.counts
        often = first_of(
            [f"{_quoted(label)} {count:,}" for label, count in counts.items()], _LISTED
        )
        described.append(
            ("labels", f"{len(counts):,} different, one per {contents.labels.of}: {often}")
        )
    return described


def length_facts(inspection: Inspection) -> list[tuple[str, str]]:
    """Return labelled statistics of the lengths."""
    numbers = inspection.summary
    listed = ", ".join(f"{name} {getattr(numbers, field):,}" for field, name in QUANTILES.items())
    return [
        (
            "sequences",
            f"{numbers.count:,}" + (f", {numbers.empty:,} of them empty" if numbers.empty else ""),
        ),
        ("elements", f"{numbers.elements:,}, {numbers.mean:,.1f} per sequence"),
        ("lengths", listed),
        ("density", f"{numbers.density:.1%} of one padded batch of all sequences would be real"),
    ]


def histogram(bins: Sequence[Bin], bar: str) -> list[str]:
    """Return a histogram as lines of text."""
    rows = [("length", "sequences"), *((str(interval), f"{interval.count:,}") for interval in bins)]
    highest = max(interval.count for interval in bins)
    bars = [
        "",
        *(
            bar * max(round(_WIDE * interval.count / highest), interval.count > 0)
            for interval in bins
        ),
    ]
    return [
        f"  {line}  {drawn}".rstrip()
        for line, drawn in zip(aligned(rows, words=0), bars, strict=True)
    ]


def _densities(inspection: Inspection) -> list[str]:
    """Return a table of the density of padded batches, a line per order."""
    sizes, density_of = inspection.known_densities
    rows = [["real share of padded batches", *(f"{size:,}" for size in sizes)]]
    rows += [
        [f"  {order}", *(f"{density_of[size, order]:.0%}" for size in sizes)] for order in ORDERS
    ]
    return aligned(rows)


def _quoted(name: str) -> str:
    return shorten(quote(name), _NAME)


def what_beside(counts: FeatureCounts) -> str:
    """Describe a feature in a column of its own."""
    per = "sequence" if counts.per_sequence else "element"
    return (
        f"numbers per {per}"
        if counts.categories is None
        else f"categories per {per}, {counts.categories:,} different"
    )


# docs/inspect.md describes the JSON. Removing an entry or changing its meaning requires a new
# version.
FORMAT = "raglane inspection"
VERSION = 1

# The most labels in the JSON.
_LABELS = 1000


def as_json(inspection: Inspection) -> bytes:
    """Return an inspection as strict JSON, without NaN and infinity."""
    return to_json(finite(as_document(inspection)))


def as_document(inspection: Inspection) -> dict[str, Any]:
    """Return an inspection as JSON values."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "summary": inspection.sentence,
        "data": _data(inspection),
        "lengths": {
            **asdict(inspection.summary),
            "percentiles": list(inspection.percentiles),
            "histogram": [asdict(interval) for interval in inspection.bins],
            "buckets": [
                {**asdict(bucket), "density": bucket.density} for bucket in inspection.buckets
            ],
        },
        "batches": {
            "sequences_looked_at": inspection.looked_at,
            "density": [density._asdict() for density in inspection.densities],
            "examples": [
                {**interval._asdict(), "lengths": list(interval.lengths)}
                for interval in inspection.examples
            ],
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
        labels = {
            "of": contents.labels.of,
            "different": len(counts),
            "counts": dict(counts[:_LABELS]),
        }
    return {
        "name": contents.name,
        "path": None if contents.path is None else str(contents.path.absolute()),
        "kind": contents.kind,
        "features": [feature._asdict() for feature in contents.features],
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
        "roles": [note for notes in contents.roles for note in notes],
        "notes": list(contents.notes),
    }


def _plan(inspection: Inspection) -> dict[str, Any]:
    plan = inspection.plan
    of_rows = {"best": asdict(plan.best), "best_by_elements": asdict(plan.best_by_elements)}
    plain = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {**plain, **of_rows, "rows": [asdict(row) for row in plan.rows]}
