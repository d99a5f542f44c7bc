"""Sequences to sequences: recognition of speech or writing, transliteration, normalisation of
texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from raglane._utils.messages import argument, count_of
from raglane.data.columns import option
from raglane.data.dataset import Dataset
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.splitting import join_tokens
from raglane.errors import ArgumentError, DataError
from raglane.nn.transduction.pairs import Edits, edit_distance
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
    """A sequence of labels per sequence: minus the log-probability of the target, and errors, per
    label.

    A label that training has not seen is 0 in the targets. It is left out of the loss, and an error
    of any prediction.
    """

    options: ClassVar[tuple[str, ...]] = ("beam_size", "n_best")

    @staticmethod
    def output_size(preprocessor: Preprocessor) -> int:
        """Return the number of labels and the blank."""
        return preprocessor.class_count + 1

    def score(self, output: Tensor | Ragged, batch: Batch, *, training: bool = False) -> Score:
        """Return the loss of the decoder, and the errors of a greedy search, in training estimated
        on a part.
        """
        outputs = _outputs(output, batch)
        targets = sequences_of(batch)
        decoder = self.model.decoder
        count = targets.values.shape[0]
        loss = decoder.loss(outputs, _seen(targets))
        longest = None
        outputs = outputs.detach()
        if training:
            # Answers that do not end are cut, to save time.
            rows = torch.arange(0, len(targets), decoder.measures_every)
            outputs = outputs.select(rows)
            targets = targets.select(rows)
            longest = 2 * targets.lengths + 5
        with torch.no_grad():
            edits = edit_distance(decoder.answer(outputs, longest=longest).best(), targets)
        measured = targets.values.shape[0]
        # Predictions for empty targets are errors too.
        errors = edits.total.sum() * (count / measured if measured else 1)
        return Score(loss, errors, torch.as_tensor(count), torch.zeros(()))

    def meter(self, model: Any, records: Dataset, beam_size: int | None = None) -> _EditCounts:  # noqa: ARG002
        """Return a meter of error rates; the baseline is the commonest target."""
        return _EditCounts(self, beam_size or 1)

    def columns(self, output: Tensor, model: Any, *, probabilities: bool) -> dict[str, list[Any]]:  # noqa: ARG002
        """Raise, because the outputs of elements are no predictions."""
        rule = "another task for predictions of single elements"
        raise ArgumentError("task", "'transcribe'", rule, "pass whole sequences to run.predict")

    def predict(
        self,
        model: Any,
        batches: Iterable[Ragged],
        *,
        beam_size: int | None = None,
        n_best: int = 1,
        **options: Any,  # noqa: ARG002
    ) -> dict[str, list[Any]]:
        """Return text or labels, log-probability and, if the decoder has them, times; with
        ``n_best`` lists of each.
        """
        columns: dict[str, list[Any]] = {"prediction": [], "score": []}
        columns |= {"times": []} if model.decoder.has_times else {}
        columns |= {"n_best": [], "n_best_scores": []} if n_best > 1 else {}
        beam_size = beam_size or (1 if n_best == 1 else max(_BEAM, n_best))
        for inputs in batches:
            hypotheses = model.decoder.answer(model(inputs), beam_size, n_best)
            texts = [self.text(tokens) for tokens in _lists(hypotheses.tokens)]
            scores = hypotheses.scores.tolist()
            times = [] if hypotheses.times is None else _lists(hypotheses.times)
            for start, end in pairwise(hypotheses.offsets.tolist()):
                none = start == end
                of = slice(start, end)
                columns["prediction"].append(self.text([]) if none else texts[start])
                columns["score"].append(None if none else scores[start])
                if "times" in columns:
                    columns["times"].append([] if none else times[start])
                if n_best > 1:
                    columns["n_best"].append(texts[of])
                    columns["n_best_scores"].append(scores[of])
        return columns

    def text(self, tokens: Sequence[int]) -> Any:
        """Return a sequence of labels as a text, or as a list if the targets are lists."""
        fitted = self.preprocessor
        words = [fitted.answers[token - 1] if token else _UNSEEN for token in tokens]
        return words if fitted.label_split is None else join_tokens(words, fitted.label_split)  # type: ignore[arg-type]

    @staticmethod
    def notes(training: Dataset, validation: Dataset | None, settings: ModelSettings) -> list[str]:
        """Return lines about labels that only the validation part has, and about sequences too
        short for CTC.
        """
        lines = []
        counts = training.statistics.labels
        if validation is not None and validation.is_in_memory:
            odd = Counter(label for label in _labels(validation) if label not in counts)
            if odd:
                note = f"labels that only the validation part has: {len(odd):,}, in {count_of(odd.total(), 'place')}"
                lines.append(
                    f"{note}; they are left out of the loss, and are errors of any prediction"
                )
        count, got = _too_short(training) if settings.decoder_name == "ctc" else (0, "")
        if count:
            split = option("split", "characters")
            decoder = argument("decoder", "attention")
            fix = f"pass {decoder}, or split the inputs further, e.g. with {split}"
            if count == len(training):
                rule = "data with at least one element per label, and one more between equal labels, for CTC"
                raise DataError("data", got, rule, fix)
            lines.append(
                f"{got}: CTC cannot write their targets, and they are left out of the loss; {fix}"
            )
        return lines


def _labels(records: Dataset) -> Iterator[str]:
    """Yield the labels of all targets."""
    for labels in () if records.targets is None else records.targets.values:
        yield from labels


def _too_short(training: Dataset) -> tuple[int, str]:
    """Return the number of training sequences whose targets CTC cannot write, also as a text; 0 for
    data on disk.

    They have fewer elements than labels and repeated labels.
    """
    if not training.is_in_memory or training.targets is None:
        return 0, ""
    needed = [
        len(tokens) + sum(a == b for a, b in pairwise(tokens)) for tokens in training.targets.values
    ]
    short = [
        row
        for row, (most, least) in enumerate(zip(training.element_counts, needed, strict=True))
        if most < least
    ]
    if not short:
        return 0, ""
    first = training.records.describe_row(short[0])
    of = f"{count_of(len(training), 'training sequence')} with fewer elements than labels ({first})"
    return len(short), f"{len(short):,} of {of}"


def sequences_of(batch: Batch) -> Ragged:
    """Return the target sequences of a batch; raise if it has none."""
    if not isinstance(batch.targets, Ragged):
        raise ArgumentError("batch", "no targets", "a batch with targets", "pass data with labels")
    return batch.targets


def _outputs(output: Tensor | Ragged, batch: Batch) -> Ragged:
    return (
        output if isinstance(output, Ragged) else batch.inputs.to(output.device).with_values(output)
    )


def _lists(ragged: Ragged) -> list[Any]:
    """Return the sequences as lists."""
    values = ragged.values.tolist()
    return [values[start:end] for start, end in pairwise(ragged.offsets.tolist())]


def _seen(targets: Ragged) -> Ragged:
    """Return the targets without unseen labels."""
    is_known = targets.values > 0
    if bool(is_known.all()):
        return targets
    counts = torch.bincount(targets.segment_ids[is_known], minlength=len(targets))
    return Ragged.from_flat(targets.values[is_known], offsets=offsets_from_lengths(counts))


class _EditCounts:
    """Counts insertions, deletions and substitutions of labels and, for texts, of characters and
    words.
    """

    def __init__(self, task: Transcribe, beam_size: int) -> None:
        self.task = task
        self.beam_size = beam_size
        # Per unit: insertions, deletions, substitutions, and units of the targets.
        self.counts = {
            unit: torch.zeros(4, dtype=torch.int64)
            for unit in ("token", *_units(task.preprocessor))
        }
        self.exact = 0
        self.targets: Counter[tuple[int, ...]] = Counter()

    def add(self, output: Tensor, batch: Batch) -> None:
        outputs = _outputs(output, batch)
        targets = sequences_of(batch).to("cpu")
        best = self.task.model.decoder.answer(outputs, self.beam_size).best().to("cpu")
        errors = edit_distance(best, targets)
        self._count("token", errors)
        self.exact += int((errors.total == 0).sum())
        true = list(map(tuple, _lists(targets)))
        self.targets.update(true)
        texts, others = [
            [self.task.text(tokens) for tokens in each] for each in (_lists(best), true)
        ]
        for unit, split in _units(self.task.preprocessor).items():
            self._count(
                unit, edit_distance(*_numbered([*map(split, texts)], [*map(split, others)]))
            )

    def _count(self, unit: str, errors: Edits) -> None:
        self.counts[unit] += torch.stack(errors).sum(1)

    def measured(self) -> Measured:
        """Return the rates, and a row per kind of error."""
        rates = {
            unit: int(counts[:3].sum()) / max(int(counts[3]), 1)
            for unit, counts in self.counts.items()
        }
        numbers = {"token_error_rate": rates.pop("token"), **rates}
        count = self.targets.total()
        numbers["exact_match"] = self.exact / count if count else float("nan")
        numbers["commonest_token_error_rate"] = self._commonest()
        kinds = zip(
            ("insertions", "deletions", "substitutions"),
            self.counts["token"].tolist(),
            strict=False,
        )
        total = max(int(self.counts["token"][3]), 1)
        table = tuple(
            {"errors": kind, "count": errors, "per label": errors / total} for kind, errors in kinds
        )
        return Measured(numbers, table=table)

    def _commonest(self) -> float:
        """Return the rate of predicting the commonest target of the same data, or the shortest of
        several, for all.
        """
        distinct = list(self.targets)
        if not distinct:
            return float("nan")
        best = min(distinct, key=lambda target: (-self.targets[target], len(target), target))
        pair = _numbered([best] * len(distinct), distinct)
        times = torch.tensor([self.targets[target] for target in distinct])
        errors = edit_distance(*pair)
        return float((errors.total @ times) / (errors.lengths @ times).clamp(min=1))


def _units(preprocessor: Preprocessor) -> dict[str, Any]:
    """Return the units of errors in texts, in addition to labels, with the functions that split
    texts into them.
    """
    split = preprocessor.label_split
    if split is None:
        return {}
    return {"wer": str.split} if split == "words" else {"cer": list, "wer": str.split}


def _numbered(*sides: Sequence[Sequence[Any]]) -> tuple[Ragged, ...]:
    """Return sequences of words as batches of numbers, equal for equal words."""
    number_of: dict[Any, int] = {}
    return tuple(
        Ragged.from_flat(
            torch.tensor(
                [number_of.setdefault(word, len(number_of)) for words in side for word in words],
                dtype=torch.int64,
            ),
            lengths=list(map(len, side)),
        )
        for side in sides
    )
