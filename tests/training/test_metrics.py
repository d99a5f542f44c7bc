"""Accuracy, macro-F1 and the confusion matrix against slow and obvious ones."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from raglane.training.tasks.labels import accuracy, confusion_matrix, f1_scores, macro_f1

_PAIRS = st.integers(1, 5).flatmap(
    lambda classes: st.tuples(
        st.just(classes),
        st.lists(st.tuples(st.integers(0, classes - 1), st.integers(0, classes - 1)), min_size=0, max_size=40),
    )
)


@given(_PAIRS)
def test_against_counting(case: tuple[int, list[tuple[int, int]]]) -> None:
    classes, pairs = case
    targets = torch.tensor([true for true, _ in pairs], dtype=torch.int64)
    predictions = torch.tensor([predicted for _, predicted in pairs], dtype=torch.int64)
    matrix = confusion_matrix(targets, predictions, classes)
    assert matrix.tolist() == [[pairs.count((true, guess)) for guess in range(classes)] for true in range(classes)]
    if not pairs:
        assert math.isnan(accuracy(matrix))
        assert math.isnan(macro_f1(matrix))
        return
    assert accuracy(matrix) == sum(true == guess for true, guess in pairs) / len(pairs)
    scores = []
    for name in range(classes):
        right = pairs.count((name, name))
        true = sum(pair[0] == name for pair in pairs)
        predicted = sum(pair[1] == name for pair in pairs)
        if true + predicted == 0:
            assert math.isnan(float(f1_scores(matrix)[name]))
            continue
        precision = right / predicted if predicted else 0.0
        recall = right / true if true else 0.0
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    assert math.isclose(macro_f1(matrix), sum(scores) / len(scores), rel_tol=1e-12, abs_tol=1e-12)
