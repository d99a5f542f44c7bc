"""Everything that ``raglane inspect`` finds out, in one object: terminal, JSON and page say the same facts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from raglane._utils.memory import FLOAT, TRAINED_TENSOR, check_memory
from raglane.data.jobs import Progress
from raglane.data.lengths import Bin, Bucket, Distribution, Summary, bins, buckets, summary
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner import Plan, Row, plan
from raglane.planner.machine import facts
from raglane.planner.rows import thin_out
from raglane.planner.words import seconds_in_words
from raglane.runs.inspection.batches import Example, Fill, examples, fills
from raglane.runs.inspection.command import recommended, train_line
from raglane.runs.inspection.contents import Contents
from raglane.training.model import ModelConfig
from raglane.training.settings import ModelSettings, Settings



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
