"""Every expression of the table, against torch for each sequence alone: values, types, gradients."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import face_cases as cases
import raglane as rl
from face_cases import BATCHES, numbers_of, others_of
from raglane.errors import RaglaneError


def evaluate(expression: str, **names: Any) -> Any:
    """Return the value of an expression, or its exception."""
    scope = {"torch": torch, "F": F, "nn": nn, "np": np, **names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return eval(expression, scope)
        except Exception as error:  # any kind shows that torch does not accept it either
            return error


def parts_of(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple | list) else [result]


def gradient(outputs: list[Tensor], values: Tensor) -> Tensor:
    """Return the gradient of a weighted sum of outputs."""
    weighed = [
        (out.double() * torch.arange(1.0, out.numel() + 1).view(out.shape)).sum()
        for out in outputs
        if out.requires_grad
    ]
    if not weighed:
        return torch.zeros_like(values)
    (result,) = torch.autograd.grad(torch.stack(weighed).sum(), values, allow_unused=True)
    return torch.zeros_like(values) if result is None else result


def joined(results: list[Any], like: Any, count: int) -> Any:
    """Return results of single sequences in the form of one of the batch."""
    if isinstance(like, rl.Ragged):
        assert [part.shape[1] for part in results] == like.lengths.tolist()
        return torch.cat([part[0] for part in results])
    if isinstance(like, Tensor):
        assert like.shape[0] == count
        return torch.cat(results)
    return all(results)


def check(expression: str, kind: str) -> None:
    lengths, _ = BATCHES[kind]
    flat, others = numbers_of(kind), others_of(kind)
    ours, theirs = (flat["x"].clone().requires_grad_() for _ in range(2))
    if kind == "strided":
        ours = flat["x"].requires_grad_()
    batches = {
        name: rl.Ragged.from_flat(ours if name == "x" else values, lengths=lengths)
        for name, values in flat.items()
    }
    result = evaluate(expression, **batches, **others)
    if len(BATCHES[kind][1]) < cases.FEATURES.get(expression, 0):
        assert isinstance(result, RaglaneError), result
        return
    singles, start = [], 0
    for b, length in enumerate(lengths):
        rows = {
            name: (theirs if name == "x" else values)[None, start : start + length]
            for name, values in flat.items()
        }
        alone = {
            name: value[b : b + 1] if name in ("h", "g", "lens") else value
            for name, value in others.items()
        }
        singles.append(evaluate(expression, **rows, **alone))
        start += length
    errors = [single for single in singles if isinstance(single, Exception)]
    if errors:
        assert isinstance(result, Exception), f"accepts what torch refuses: {errors[0]}"
        return
    if not lengths:
        dense = {name: values.new_zeros(0, 2, *values.shape[1:]) for name, values in flat.items()}
        compare_nothing(result, evaluate(expression, **dense, **others))
        return
    if isinstance(result, Exception):
        raise result
    found = parts_of(result)
    expected = [
        joined([parts_of(single)[place] for single in singles], part, len(lengths))
        for place, part in enumerate(found)
    ]
    assert len(found) == len(parts_of(singles[0]))
    if type(singles[0]) is not type(result):
        assert isinstance(singles[0], Tensor), type(singles[0])
        assert isinstance(result, rl.Ragged), type(result)
    compare(found, expected, ours, theirs)


def compare_nothing(result: Any, expected: Any) -> None:
    """Compare the shapes of results for no sequence with those of dense tensors ``(0, 2, ...)``."""
    if isinstance(expected, Exception):
        return
    if isinstance(result, Exception):
        raise result
    for one, other in zip(parts_of(result), parts_of(expected), strict=True):
        if isinstance(other, Tensor):
            sizes = [size for size in one.shape if size is not None]
            others = [
                size for size, ours in zip(other.shape, one.shape, strict=True) if ours is not None
            ]
            assert sizes == others
            assert one.dtype == other.dtype


def compare(found: list[Any], expected: list[Any], ours: Tensor, theirs: Tensor) -> None:
    flat = [part.values if isinstance(part, rl.Ragged) else part for part in found]
    for one, other in zip(flat, expected, strict=True):
        if not isinstance(other, Tensor):
            assert one == other
            continue
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)
    if isinstance(expected[0], Tensor):
        torch.testing.assert_close(
            gradient(flat, ours), gradient(expected, theirs), rtol=1e-8, atol=1e-8, equal_nan=True
        )


PER_SEQUENCE = [
    expression
    for text in (cases.EACH, cases.REDUCTIONS, cases.ALONG, cases.INDEX, cases.JOINS)
    for expression in cases.expressions(text)
]


@pytest.mark.parametrize("expression", PER_SEQUENCE)
def test_of_each_sequence(expression: str) -> None:
    for kind in BATCHES:
        try:
            check(expression, kind)
        except Exception as error:
            error.add_note(f"in a batch of {kind}")
            raise


@pytest.mark.parametrize("expression", cases.expressions(cases.WHOLE + cases.LOSSES))
def test_of_all_real_elements(expression: str) -> None:
    """Without ``dim``, and losses: those of the flat rows."""
    for kind in BATCHES:
        try:
            check_flat(expression, kind)
        except Exception as error:
            error.add_note(f"in a batch of {kind}")
            raise


def check_flat(expression: str, kind: str) -> None:
    lengths, _ = BATCHES[kind]
    flat, others = numbers_of(kind), others_of(kind)
    ours, theirs = (flat["x"].clone().requires_grad_() for _ in range(2))
    batches = {
        name: rl.Ragged.from_flat(ours if name == "x" else values, lengths=lengths)
        for name, values in flat.items()
    }
    is_loss = expression in cases.expressions(cases.LOSSES)
    rows = {**flat, "x": theirs}
    plain = expression.replace("x, 2)", "x, 1)") if is_loss else expression
    if not is_loss:
        rows = {name: values[None] for name, values in rows.items()}
    expected = evaluate(plain, **rows, **others)
    result = evaluate(expression, **batches, **others)
    if isinstance(expected, Exception):
        assert isinstance(result, Exception), f"accepts what torch refuses: {expected}"
        return
    if is_loss and not BATCHES[kind][1] and isinstance(result, rl.errors.ShapeError):
        assert "classes" in str(result)  # N elements would be the classes of one
        return
    if isinstance(result, Exception):
        raise result
    compare(parts_of(result), parts_of(expected), ours, theirs)


@pytest.mark.parametrize("lengths", [[2, 0, 3], [1, 1, 1]])
@pytest.mark.parametrize(
    "call",
    [
        lambda out, labels: F.cross_entropy(out, labels),
        lambda out, labels: nn.CrossEntropyLoss()(out, labels),
        lambda out, labels: F.nll_loss(out, labels),
        lambda out, labels: F.mse_loss(out, labels[:, None].expand(-1, 4).double()),
        lambda out, labels: F.l1_loss(out, labels[:, None, None].expand(-1, 1, 4).double()),
    ],
)
def test_labels_of_sequences_do_not_meet_steps(call: Any, lengths: list[int]) -> None:
    """A forgotten last() would train silently, also where each sequence has one step."""
    rows = torch.randn(sum(lengths), 4, dtype=torch.float64)
    out = rl.Ragged.from_flat(rows, lengths=lengths)
    with pytest.raises(RaglaneError, match=r"last\(\) or a pooling"):
        call(out, torch.tensor([0, 2, 1]))
