"""Sequences to sequences: recognition of speech or writing, transliteration, normalisation of texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from raglane._utils.messages import argument, count_of, message
from raglane.data.dataset import Dataset
from raglane.data.preprocess import Preprocessor
from raglane.data.splitting import join_tokens
from raglane.errors import ArgumentError, DataError
from raglane.ragged import Ragged
from raglane.segments import offsets_from_lengths
from raglane.training.batches import Batch
from raglane.training.settings import ModelSettings
from raglane.training.tasks.base import Measured, Score, Task

# The beam of a search for several hypotheses, unless it is chosen.
_BEAM = 16
# A label that training has not seen, in a text; no prediction has it.
_UNSEEN = "\ufffd"


class Transcribe(Task):
    """A sequence of labels per sequence: minus the log-probability of the target, and errors, per label.

    A label that training has not seen is 0 in the targets. It is left out of the loss, and an error of any prediction.
    """

    metric = "token_error_rate"
    options: ClassVar[tuple[str, ...]] = ("beam", "n_best")

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """Return the number of labels and the blank."""
        return preprocessor.class_count + 1

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:  # noqa: ARG002
        """Return the loss of the decoder, and the errors of a greedy search."""
        outputs, targets = _outputs(output, batch), sequences_of(batch)
        losses = self.model.decoder.loss(outputs, _seen(targets))
        with torch.no_grad():
            found = self.model.decoder.answer(outputs.detach(), 1).best()
        errors = edit_distance(found, targets).sum()
        return Score(losses.sum(), errors, torch.as_tensor(targets.values.shape[0]), torch.zeros(()))

    def meter(self, model: Any, records: Dataset, beam: int | None = None) -> _Errors:  # noqa: ARG002
        """Return a meter of error rates; the baseline is the commonest target."""
        return _Errors(self, beam or 1)

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """Raise, because the outputs of elements are no predictions."""
        rule = "another task for predictions of single elements"
        raise ArgumentError(message("task", "'transcribe'", rule, "pass whole sequences to run.predict"))

    def predict(
        self,
        model: Any,
        batches: Iterable[Ragged],
        *,
        beam: int | None = None,
        n_best: int = 1,
        **options: Any,  # noqa: ARG002
    ) -> dict[str, list[Any]]:
        """Return text or labels, log-probability and, if the decoder has them, times; with ``n_best`` lists of each."""
        columns: dict[str, list[Any]] = {"prediction": [], "score": []}
        columns |= {"times": []} if model.decoder.has_times else {}
        columns |= {"n_best": [], "n_best_scores": []} if n_best > 1 else {}
        beam = beam or (1 if n_best == 1 else max(_BEAM, n_best))
        for inputs in batches:
            found = model.decoder.answer(model(inputs), beam, n_best)
            texts = [self.text(places) for places in _lists(found.tokens)]
            scores, times = found.scores.tolist(), [] if found.times is None else _lists(found.times)
            for start, end in pairwise(found.offsets.tolist()):
                none, of = start == end, slice(start, end)
                columns["prediction"].append(self.text([]) if none else texts[start])
                columns["score"].append(None if none else scores[start])
                if "times" in columns:
                    columns["times"].append([] if none else times[start])
                if n_best > 1:
                    columns["n_best"].append(texts[of])
                    columns["n_best_scores"].append(scores[of])
        return columns

    def text(self, places: Sequence[int]) -> Any:
        """Return a sequence of labels as a text, or as a list if the targets are lists."""
        fitted = self.preprocessor
        words = [fitted.answers[place - 1] if place else _UNSEEN for place in places]
        return words if fitted.label_split is None else join_tokens(words, fitted.label_split)  # type: ignore[arg-type]

    @staticmethod
    def notes(training: Dataset, validation: Dataset | None, settings: ModelSettings) -> list[str]:
        """Return lines about labels that only the validation part has, and about sequences too short for CTC."""
        lines = []
        known = training.statistics.labels
        if validation is not None and validation.is_in_memory:
            odd = Counter(label for label in _labels(validation) if label not in known)
            if odd:
                found = f"labels that only the validation part has: {len(odd):,}, in {count_of(odd.total(), 'place')}"
                lines.append(f"{found}; they are left out of the loss, and are errors of any prediction")
        if settings.decoder_name == "ctc" and training.is_in_memory and training.targets is not None:
            lines += _too_short(training)
        return lines


def _labels(records: Dataset) -> Iterator[str]:
    """Yield the labels of all targets."""
    for labels in () if records.targets is None else records.targets.values:
        yield from labels


def _too_short(training: Dataset) -> list[str]:
    """Return a line on sequences without an alignment: with fewer elements than labels and repeated labels."""
    assert training.targets is not None  # noqa: S101
    needed = [len(own) + sum(a == b for a, b in pairwise(own)) for own in training.targets.values]
    short = [row for row, (most, least) in enumerate(zip(training.element_counts, needed, strict=True)) if most < least]
    if not short:
        return []
    first = training.records.describe_row(short[0])
    got = f"{len(short):,} of {count_of(len(training), 'training sequence')} with fewer elements than labels ({first})"
    fix = f"split the inputs further, e.g. with {argument('split', 'characters', of='Columns')}"
    if len(short) == len(training):
        rule = "data with at least one element per label, and one more between equal labels, for CTC"
        raise DataError(message("data", got, rule, fix))
    return [f"{got}: CTC cannot write their targets, and they are left out of the loss; to use them, {fix}"]


def sequences_of(batch: Batch) -> Ragged:
    """Return the target sequences of a batch; raise if it has none."""
    if not isinstance(batch.targets, Ragged):
        raise ArgumentError(message("batch", "no targets", "a batch with targets", "pass data with labels"))
    return batch.targets


def _outputs(output: Tensor | Ragged, batch: Batch) -> Ragged:
    return output if isinstance(output, Ragged) else batch.inputs.to(output.device).with_values(output)


def _lists(ragged: Ragged) -> list[Any]:
    """Return the sequences as lists."""
    values = ragged.values.tolist()
    return [values[start:end] for start, end in pairwise(ragged.offsets.tolist())]


def _seen(targets: Ragged) -> Ragged:
    """Return the targets without unseen labels."""
    kept = targets.values > 0
    if bool(kept.all()):
        return targets
    counts = torch.bincount(targets.segment_ids[kept], minlength=len(targets))
    return Ragged.from_flat(targets.values[kept], offsets=offsets_from_lengths(counts))


class _Errors:
    """Counts insertions, deletions and substitutions of labels and, for texts, of characters and words."""

    def __init__(self, task: Transcribe, beam: int) -> None:
        self.task, self.beam = task, beam
        # Per unit: insertions, deletions, substitutions, and units of the targets.
        self.counts = {unit: torch.zeros(4, dtype=torch.int64) for unit in ("token", *_units(task.preprocessor))}
        self.exact = 0
        self.targets: Counter[tuple[int, ...]] = Counter()

    def add(self, output: Tensor, batch: Batch) -> None:
        outputs, targets = _outputs(output, batch), sequences_of(batch).to("cpu")
        found = self.task.model.decoder.answer(outputs, self.beam).best().to("cpu")
        errors = edit_distance(found, targets)
        self._count("token", errors, targets)
        self.exact += int((errors.sum(1) == 0).sum())
        known = list(map(tuple, _lists(targets)))
        self.targets.update(known)
        texts, others = [[self.task.text(own) for own in each] for each in (_lists(found), known)]
        for unit, split in _units(self.task.preprocessor).items():
            pair = _numbered([*map(split, texts)], [*map(split, others)])
            self._count(unit, edit_distance(*pair), pair[1])

    def _count(self, unit: str, errors: Tensor, targets: Ragged) -> None:
        self.counts[unit] += torch.cat([errors.sum(0), torch.tensor([targets.values.shape[0]])])

    def measured(self) -> Measured:
        """Return the rates, and a row per kind of error."""
        rates = {unit: int(counts[:3].sum()) / max(int(counts[3]), 1) for unit, counts in self.counts.items()}
        numbers = {"token_error_rate": rates.pop("token"), **rates}
        count = self.targets.total()
        numbers["exact_match"] = self.exact / count if count else float("nan")
        numbers["commonest_token_error_rate"] = self._commonest()
        kinds = zip(("insertions", "deletions", "substitutions"), self.counts["token"].tolist(), strict=False)
        total = max(int(self.counts["token"][3]), 1)
        table = tuple({"errors": kind, "count": errors, "per label": errors / total} for kind, errors in kinds)
        return Measured(numbers, table=table)

    def _commonest(self) -> float:
        """Return the rate of predicting the commonest target of the same data, or the shortest of several, for all."""
        known = list(self.targets)
        if not known:
            return float("nan")
        best = min(known, key=lambda own: (-self.targets[own], len(own), own))
        pair = [Ragged([torch.tensor(own, dtype=torch.int64) for own in each]) for each in ([best] * len(known), known)]
        times = torch.tensor([self.targets[own] for own in known])
        labels = pair[1].lengths @ times
        return float((edit_distance(*pair).sum(1) @ times) / labels.clamp(min=1))


def _units(preprocessor: Preprocessor) -> dict[str, Any]:
    """Return the units of errors in texts, in addition to labels, with the functions that split texts into them."""
    split = preprocessor.label_split
    if split is None:
        return {}
    return {"WER": str.split} if split == "words" else {"CER": list, "WER": str.split}


def _numbered(*sides: list[list[str]]) -> tuple[Ragged, ...]:
    """Return lists of words as batches of numbers, equal for equal words."""
    places: dict[str, int] = {}
    return tuple(
        Ragged(
            [torch.tensor([places.setdefault(word, len(places)) for word in own], dtype=torch.int64) for own in side]
        )
        for side in sides
    )


def edit_distance(hypotheses: Ragged, references: Ragged) -> Tensor:
    """Return the numbers of insertions, deletions and substitutions ``(B, 3)`` int64 between pairs of sequences."""
    return torch.tensor([_edits(*pair) for pair in zip(_lists(hypotheses), _lists(references), strict=True)]).view(
        -1, 3
    )


def _edits(found: list[int], known: list[int]) -> tuple[int, int, int]:
    row = [(place, place, 0, 0) for place in range(len(found) + 1)]
    for label in known:
        before, row = row, [(row[0][0] + 1, row[0][1], row[0][2] + 1, row[0][3])]
        for place, other in enumerate(found):
            diagonal, left, up = before[place], row[-1], before[place + 1]
            if label == other:
                row.append(diagonal)
                continue
            cost = min(diagonal[0], left[0], up[0]) + 1
            if diagonal[0] + 1 == cost:
                row.append((cost, diagonal[1], diagonal[2], diagonal[3] + 1))
            elif left[0] + 1 == cost:
                row.append((cost, left[1] + 1, left[2], left[3]))
            else:
                row.append((cost, up[1], up[2] + 1, up[3]))
    return row[-1][1:]
