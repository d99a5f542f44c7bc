"""Scores of entities, compared with those of seqeval 1.2.2 in its default mode."""

from __future__ import annotations

import pytest
import torch

from raglane.ragged import Ragged
from raglane.training.batches import Batch
from raglane.training.tasks.tags import Entities, are_entities

# True labels, predicted labels, and seqeval's F1, precision and recall.
_CASES = {
    "IOB1": (
        ("I-PER I-PER B-PER O I-LOC", "O I-ORG I-ORG I-LOC"),
        ("I-PER I-PER I-PER O I-LOC", "O I-ORG I-ORG I-LOC"),
        (0.6666666666666665, 0.75, 0.6),
    ),
    "IOB2": (
        ("B-PER I-PER O B-LOC", "O B-ORG I-ORG B-ORG O", "", "B-LOC"),
        ("B-PER I-PER O B-PER", "O B-ORG I-ORG I-ORG O", "", "I-LOC"),
        (0.4444444444444445, 0.5, 0.4),
    ),
    "IOB2 with errors": (
        ("B-PER I-PER I-PER O", "B-LOC O O B-LOC I-LOC"),
        ("O I-PER B-PER I-LOC", "I-LOC I-PER O I-LOC B-LOC"),
        (0.2, 0.14285714285714285, 0.3333333333333333),
    ),
    "BIOES": (
        ("S-LOC B-PER I-PER E-PER", "B-ORG E-ORG S-ORG O"),
        ("S-LOC B-PER E-PER E-PER", "B-ORG E-ORG S-ORG S-LOC"),
        (0.6, 0.5, 0.75),
    ),
    "types with a hyphen": (
        ("B-A-B I-A-B O",),
        ("B-A-B I-A O",),
        (0.0, 0.0, 0.0),
    ),
}


@pytest.mark.parametrize("scheme", _CASES)
def test_entities_are_scored_as_seqeval_scores_them(scheme: str) -> None:
    true, predicted, expected = _CASES[scheme]
    rows = [[line.split() for line in lines] for lines in (true, predicted)]
    labels = tuple(sorted({label for lines in rows for row in lines for label in row}))
    lengths = list(map(len, rows[0]))
    classes = [
        torch.tensor([labels.index(label) for row in lines for label in row]) for lines in rows
    ]
    meter = Entities(labels, 1)
    # Two batches, the second of which is empty.
    inputs = Ragged([torch.zeros(length, 1) for length in lengths])
    logits = torch.nn.functional.one_hot(classes[1], len(labels)).float()
    meter.add(logits, Batch(inputs, classes[0], torch.arange(len(lengths))))
    empty = Ragged([torch.zeros(0, 1)])
    meter.add(logits[:0], Batch(empty, classes[0][:0], torch.arange(1)))
    numbers = meter.measured().numbers
    scores = [numbers[f"entity_{name}"] for name in ("f1", "precision", "recall")]
    assert scores == pytest.approx(expected, abs=1e-12)
    assert next(iter(numbers)) == "accuracy"


def test_a_table_has_a_row_per_type() -> None:
    meter = Entities(("B-LOC", "B-PER", "I-PER", "O"), 1)
    targets = torch.tensor([1, 2, 3, 0, 0])
    logits = torch.nn.functional.one_hot(torch.tensor([1, 2, 3, 0, 3]), 4).float()
    meter.add(logits, Batch(Ragged([torch.zeros(5, 1)]), targets, torch.arange(1)))
    rows = {
        row["label"]: (row["precision"], row["recall"], row["count"])
        for row in meter.measured().table
    }
    assert rows == {"LOC": (1.0, 0.5, 2), "PER": (1.0, 1.0, 1)}


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (("B-PER", "I-PER", "O"), True),
        (("I-PER", "O"), True),
        (("L-X", "U-X", "B-X", "O"), True),
        (("S", "O", "E"), False),
        (("NOUN", "O"), False),
        (("B-side", "A-side"), False),
        ((), False),
    ],
)
def test_labels_of_entities_have_marks_and_types(labels: tuple[str, ...], expected: bool) -> None:
    assert are_entities(labels) == expected
