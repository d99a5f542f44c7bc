"""Everything that ``raglane inspect`` finds out, in one object, for a terminal and as JSON; the page says the same."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from raglane._utils.memory import FLOAT, TRAINED_TENSOR, check_memory
from raglane._utils.messages import quote, shorten
from raglane._utils.table import aligned
from raglane.data.conversion import Progress
from raglane.data.lengths import Bin, Bucket, Distribution, Summary, batch_fill, bins, buckets, summary
from raglane.data.order import BatchLimit, BatchSampler, EpochOrder
from raglane.data.statistics import FeatureCounts
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner import Plan, Row, plan
from raglane.planner.machine import facts
from raglane.planner.rows import thin_out
from raglane.planner.words import seconds_in_words
from raglane.runs.inspection.reading import Contents
from raglane.training.model import ModelConfig
from raglane.training.options import flag_of, options
from raglane.training.settings import ModelSettings, Settings
from raglane.training.stored import finite, to_json

ORDERS = {"random": EpochOrder.random(), "grouped": EpochOrder.grouped(), "sorted": EpochOrder.sorted()}
"""In which order sequences come to batches: by chance, as ``--bucket`` does, by length."""

_SIZES = (8, 16, 32, 64, 128, 256, 512)

_Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fill:
    """How full padded batches are."""

    batch_size: int
    order: str
    fill: float


@dataclass(frozen=True)
class Example:
    """A batch to look at."""

    name: str
    fill: float
    lengths: tuple[int, ...]


def batch_sizes(count: int) -> list[int]:
    """The sizes that are compared: powers of two that the sequences fill."""
    return [size for size in _SIZES if size <= count] or [count]


def fills(lengths: _Integers) -> tuple[Fill, ...]:
    """How full padded batches are, by their size and order."""
    return tuple(
        Fill(size, name, batch_fill(lengths, *BatchSampler(lengths, BatchLimit(sequences=size), order).whole()))
        for size in batch_sizes(len(lengths))
        for name, order in ORDERS.items()
    )


def examples(lengths: _Integers, batch_size: int, *, grouped: bool) -> tuple[Example, ...]:
    """The worst, the median and the best padded batch of an epoch, by their fill."""
    order = ORDERS["grouped" if grouped else "random"]
    batches = [lengths[batch] for batch in BatchSampler(lengths, BatchLimit(sequences=batch_size), order)]
    full = [batch for batch in batches if len(batch) == batch_size and batch.any()]
    full = full or [batch for batch in batches if batch.any()]
    ranked = sorted(full, key=_fill)
    last = len(ranked) - 1
    places = {"median": 0} if last == 0 else {"worst": 0, "median": len(ranked) // 2, "best": last}
    return tuple(
        Example(name, _fill(ranked[place]), tuple(sorted(ranked[place].tolist(), reverse=True)))
        for name, place in places.items()
    )


def _fill(lengths: _Integers) -> float:
    return float(lengths.sum() / (len(lengths) * lengths.max()))


@dataclass(frozen=True, eq=False)
class Inspection:
    """What was found out about data, a layer and this machine."""

    contents: Contents
    summary: Summary
    percentiles: tuple[int, ...]
    bins: tuple[Bin, ...]
    buckets: tuple[Bucket, ...]
    looked_at: int
    fills: tuple[Fill, ...]
    examples: tuple[Example, ...]
    plan: Plan
    settings: Settings
    command: str
    machine: dict[str, str]

    @property
    def spreads(self) -> tuple[Row, ...]:
        """The rows of the recommended way with so many sequences in a batch: the smallest batches first."""
        rows = [row for row in self.plan.rows if row.way == self.plan.best.way and row.batch_size is not None]
        return tuple(sorted(rows, key=lambda row: (row.batch_size or 0, row.grouped)))

    @property
    def known_fills(self) -> tuple[list[int], dict[tuple[int, str], float]]:
        """The sizes of batches, and how full they are by size and order."""
        known = {(one.batch_size, one.order): one.fill for one in self.fills}
        return sorted({size for size, _ in known}), known

    @property
    def sentence(self) -> str:
        """The result in one sentence."""
        numbers, best = self.summary, self.plan.best
        spread = f"{numbers.minimum:,} to {numbers.maximum:,} steps"
        if numbers.minimum == numbers.maximum:
            spread = f"{numbers.maximum:,} step{'s' * (numbers.maximum != 1)} each"
        if numbers.count == 1:
            who = f"One sequence of {numbers.maximum:,} steps trains"
        else:
            who = f"{numbers.count:,} sequences of {spread} train"
        size = f"{best.batch_size:,}" if best.batch_size else f"{best.batch_elements:,} elements"
        batches = f"batches of {size} grouped by length," if best.grouped else f"random batches of {size}"
        padding = f"{best.waste / best.elements:.0%} padding" if best.waste else "no padding"
        return (
            f"{who} fastest in {batches} with the schedule {best.schedule}: "
            f"{seconds_in_words(best.train_seconds)} per epoch of the layer and {padding}, where one padded batch "
            f"of all would be {1 - numbers.fill:.0%} padding."
        )


def layer_of(settings: Settings, contents: Contents, embedding: int) -> RecurrentLayer:
    """The recurrent layer that training would build for this data."""
    chosen = {name: getattr(settings, name) for name in ModelSettings.__dataclass_fields__}
    numbers, categories = contents.inputs(settings.missing)
    if numbers or categories:
        sizes = {"input_size": numbers + len(categories), "embedding": embedding if categories else None}
        config = ModelConfig(**{**chosen, **sizes}, categories=categories, output_size=1)
    else:
        # The vocabulary is no part of the recurrent layer: one token stands for all.
        config = ModelConfig(**chosen, input_size=1, output_size=1, embedding=embedding)
    weights, tensors = config.count()
    # Those of the model, of the copy that is measured, and the gradients of both.
    needed = 4 * FLOAT * weights + TRAINED_TENSOR * tensors
    check_memory(f"a model of {weights:,} weights", needed, "make hidden, layers or embedding smaller")
    layer = config.encoder().recurrent
    longest = int(contents.lengths.max())
    held = FLOAT * longest * (layer.input_size + layer.output_size)
    check_memory(f"a step on a sequence of {longest:,} elements", held, "cut sequences that are so long")
    return layer


def inspect(
    contents: Contents,
    settings: Settings,
    *,
    columns: Any,
    format: str | None,
    ranks: int,
    fresh: bool,
    progress: Progress,
) -> Inspection:
    """Find out everything."""
    progress.stage("looking at the lengths")
    lengths = Distribution.of(contents.lengths)
    part = thin_out(torch.from_numpy(contents.lengths))[0].numpy()
    filled = fills(part)
    progress.stage("measuring this machine")
    layer = layer_of(settings, contents, settings.embedding)
    found = plan(torch.from_numpy(contents.lengths), layer, ranks=ranks, fresh=fresh, progress=progress.done)
    chosen = recommended(settings, found.best, contents)
    return Inspection(
        contents,
        summary(lengths),
        tuple(lengths.quantile(percent / 100) for percent in range(101)),
        bins(lengths),
        buckets(lengths),
        len(part),
        filled,
        examples(part, found.best.batch_size or 1, grouped=found.best.grouped),
        found,
        chosen,
        train_line(contents.path, contents.kind, format, columns, chosen),
        facts(),
    )


def words_of(chosen: Any, always: str = "") -> list[str]:
    """The flags and values that choose what an object of options has, but for what is the default."""
    words: list[str] = []
    known = options(chosen)
    for field in fields(chosen):
        value = getattr(chosen, field.name)
        is_default = value == field.default and field.name != always
        if field.name not in known or value is None or is_default:
            continue
        flag = flag_of(type(chosen), field.name)
        if value is True:
            words.append(flag)
        else:
            for entry in value if isinstance(value, list | tuple) else [value]:
                words += [flag, str(entry)]
    return words


def recommended(settings: Settings, best: Row, contents: Contents) -> Settings:
    """The settings of a training that follows a recommendation."""
    chosen = replace(settings, batch_size=best.batch_size or settings.batch_size, threads=best.threads)
    chosen = replace(chosen, bucket=best.grouped)
    return replace(chosen, missing="zero") if contents.missing and chosen.missing == "error" else chosen


def train_line(path: Path | None, kind: str, format: str | None, columns: Any, settings: Settings) -> str:
    """``raglane train`` for a shell."""
    # No path is taken for an option.
    data = (
        [] if path is None else ["DATA"] if kind == "lengths" else [f"./{path}" if str(path)[0] == "-" else f"{path}"]
    )
    named = [] if format is None else ["--format", format]
    return shlex.join(["raglane", "train", *data, *words_of(settings, "batch_size"), *words_of(columns), *named])


# -- lines for a terminal, and JSON: the facts of the page for a program -----------------------------------------------


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
    sizes, known = inspection.known_fills
    rows = [["real share of padded batches", *(f"{size:,}" for size in sizes)]]
    rows += [[f"  {order}", *(f"{known[size, order]:.0%}" for size in sizes)] for order in ORDERS]
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


# ``docs/inspect.md`` describes the JSON. Whoever takes an entry away, or changes what one means, raises the version; a
# new entry does not.
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
