"""Losses compared with padded losses whose padding is masked, and reductions with sums by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import raglane as rl
from padded_losses import CASES, CLASSES, REDUCTIONS, largest_tensor, padded_loss
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn import losses
from strategies import lengths


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12)
@given(
    lengths=lengths(),
    reduction=st.sampled_from(REDUCTIONS),
    weighing=st.sampled_from(["", "element", "sequence"]),
)
def test_against_a_padded_loss_masked_by_hand(
    name: str,
    dtype: torch.dtype,
    tolerance: float,
    lengths: list[int],
    reduction: str,
    weighing: str,
    device: torch.device,
) -> None:
    case = CASES[name]
    drawn, target_values = case.draw(sum(lengths))
    values = drawn.to(dtype).requires_grad_()
    if target_values.is_floating_point():
        target_values = target_values.to(dtype)
    batch = rl.Ragged.from_flat(values, lengths=lengths)
    target = rl.Ragged.from_flat(target_values, lengths=lengths)
    size = {"": 0, "element": sum(lengths), "sequence": len(lengths)}[weighing]
    weights = (2 * torch.rand(size) - 0.5).clamp(min=0)  # a quarter of them 0
    per_element = weights if weighing == "element" else None
    per_sequence = weights if weighing == "sequence" else None
    given_weights = (
        per_sequence if per_element is None else rl.Ragged.from_flat(per_element, lengths=lengths)
    )
    result = case.call(batch, target, sample_weight=given_weights, reduction=reduction)
    if isinstance(result, rl.Ragged):
        assert result.lengths.tolist() == lengths
        result = result.values
    if not lengths:
        assert result.sum() == 0
        return
    # The truth in float64, so that the tolerance measures one rounding and not two.
    exact = values.detach().double().requires_grad_()
    if target_values.is_floating_point():
        target = target.to(torch.float64)
    expected = padded_loss(case, batch._like(exact), target, reduction, per_element, per_sequence)
    assert result.dtype is dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    upstream = torch.randn_like(expected)
    (ours,) = torch.autograd.grad(result, values, upstream.to(dtype))
    (theirs,) = torch.autograd.grad(expected, exact, upstream.to(dtype).double())
    torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


EVERY = pytest.mark.parametrize("name", CASES)
EVERY_REDUCTION = pytest.mark.parametrize("reduction", REDUCTIONS)


def call(
    name: str,
    values: Tensor,
    target: Tensor,
    counts: list[int],
    reduction: str,
    weights: Any = None,
) -> Tensor:
    """Call a loss on sequences of these lengths, and return its values."""
    batch, targets = (rl.Ragged.from_flat(part, lengths=counts) for part in (values, target))
    result = CASES[name].call(batch, targets, sample_weight=weights, reduction=reduction)
    return result.values if isinstance(result, rl.Ragged) else result


@EVERY_REDUCTION
@EVERY
def test_gradients(name: str, reduction: str) -> None:
    values, target = CASES[name].draw(4)

    def function(values: Tensor) -> Tensor:
        return call(name, values, target, [2, 0, 1, 1], reduction).square()

    assert torch.autograd.gradcheck(function, values.requires_grad_())
    assert torch.autograd.gradgradcheck(function, values, fast_mode=True)


@pytest.mark.parametrize("reduction", ["mean", "sequence_mean"])
@EVERY
def test_a_nan_stays_in_its_sequence(name: str, reduction: str) -> None:
    clean, target = CASES[name].draw(6)
    poisoned = clean.clone()
    poisoned[[0, 1, 5]] = float("nan")
    gradients, single = [], []
    for values in (clean.requires_grad_(), poisoned.requires_grad_()):
        gradients.append(
            torch.autograd.grad(call(name, values, target, [2, 3, 1], reduction), values)[0][2:5]
        )
        single.append(call(name, values, target, [2, 3, 1], "none")[2:5])
    assert torch.equal(*gradients)
    assert torch.equal(*single)


@EVERY_REDUCTION
@pytest.mark.parametrize(
    ("name", "per_sequence"), [(name, place % 2 == 0) for place, name in enumerate(CASES)]
)
def test_elements_of_weight_zero_may_be_nan(name: str, reduction: str, per_sequence: bool) -> None:
    clean, target = CASES[name].draw(5)
    poisoned, poisoned_target = clean.clone(), target.clone()
    poisoned[:2] = float("nan")
    if target.is_floating_point():
        poisoned_target[:2] = float("nan")
    mask = (
        torch.tensor([False, True])
        if per_sequence
        else rl.Ragged([[False, False], [True, True, True]])
    )
    results = []
    for values, targets in ((clean, target), (poisoned, poisoned_target)):
        loss = call(name, values.requires_grad_(), targets, [2, 3], reduction, mask)
        results.append([loss, torch.autograd.grad(loss.sum(), values)[0]])
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)
    assert torch.equal(results[0][1][:2], torch.zeros_like(clean[:2]))


@EVERY
@pytest.mark.parametrize(
    ("reduction", "counts"),
    [("mean", []), ("sequence_mean", [0, 0]), ("sum", [0]), ("mean", [2, 0, 1])],
)
def test_where_nothing_counts_the_loss_is_zero(
    name: str, reduction: str, counts: list[int]
) -> None:
    """Empty batches, and one whose weights are all 0."""
    values, target = CASES[name].draw(sum(counts))
    weights = torch.zeros(len(counts)) if sum(counts) else None
    result = call(name, values.requires_grad_(), target, counts, reduction, weights)
    assert (result.shape, result.item()) == ((), 0)
    assert torch.equal(torch.autograd.grad(result, values)[0], torch.zeros_like(values))


@EVERY_REDUCTION
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("function", [losses.cross_entropy, losses.nll_loss])
def test_all_ignored_is_zero(
    function: Callable[..., Any], is_weighted: bool, reduction: str
) -> None:
    values = torch.randn(3, CLASSES, requires_grad=True)
    batch, target = (
        rl.Ragged.from_flat(values, lengths=[2, 0, 1]),
        rl.Ragged([[-100, -100], [], [-100]]),
    )
    result = function(
        batch, target, torch.ones(CLASSES) if is_weighted else None, reduction=reduction
    )
    result = result.values if isinstance(result, rl.Ragged) else result
    assert torch.equal(result, torch.zeros_like(result))
    assert torch.equal(torch.autograd.grad(result.sum(), values)[0], torch.zeros_like(values))


def test_reductions_by_hand() -> None:
    """Squared errors 1, 4, 9 in one sequence, 16 in another, none in a third."""
    batch = rl.Ragged([torch.tensor([1.0, 2.0, 3.0]), torch.empty(0), torch.tensor([4.0])])
    zeros = batch * 0
    per_element = rl.Ragged([torch.tensor([1.0, 0.0, 3.0]), torch.empty(0), torch.tensor([2.0])])
    per_sequence = torch.tensor([1.0, 5.0, 3.0])

    def loss(weights: Any, reduction: Any) -> Any:
        return losses.mse_loss(batch, zeros, sample_weight=weights, reduction=reduction)

    assert loss(None, "mean").item() == pytest.approx(30 / 4)
    assert loss(None, "sequence_mean").item() == pytest.approx((14 / 3 + 16) / 2)
    assert loss(None, "none").values.tolist() == [1, 4, 9, 16]
    assert loss(None, "sum").item() == 30
    assert loss(per_element, "sum").item() == 1 + 27 + 32
    assert loss(per_sequence, "sum").item() == 14 + 48
    assert loss(per_element, "mean").item() == pytest.approx((1 + 27 + 32) / 6)
    assert loss(per_element, "sequence_mean").item() == pytest.approx((28 / 4 + 16) / 2)
    assert loss(per_element, "none").values.tolist() == [1, 0, 27, 32]
    assert loss(per_sequence, "mean").item() == pytest.approx((14 + 48) / 6)
    assert loss(per_sequence, "sequence_mean").item() == pytest.approx((14 / 3 + 48) / 4)
    assert loss(per_sequence, "none").values.tolist() == [1, 4, 9, 48]


def test_a_sequence_that_is_ignored_does_not_count_as_one() -> None:
    logits = rl.Ragged([torch.zeros(2, 3), torch.tensor([[0.0, 100.0, 0.0]]), torch.zeros(2, 3)])
    target = rl.Ragged([[0, -100], [-100], [2, 1]])
    assert losses.cross_entropy(
        logits, target, reduction="sequence_mean"
    ).exp().item() == pytest.approx(3)


def test_class_weights_by_hand() -> None:
    """The mean divides by the weights of the classes, as torch's does, within a sequence too."""
    logits = rl.Ragged.from_flat(torch.randn(3, 2, dtype=torch.float64), lengths=[2, 1])
    target = rl.Ragged([[0, 1], [1]])
    weight = torch.tensor([1.0, 3.0], dtype=torch.float64)
    single = losses.cross_entropy(logits, target, reduction="none")
    assert isinstance(single, rl.Ragged)
    a, b, c = single.values.tolist()
    assert losses.cross_entropy(logits, target, weight).item() == pytest.approx(
        (a + 3 * b + 3 * c) / 7
    )
    sequence = losses.cross_entropy(logits, target, weight, reduction="sequence_mean").item()
    assert sequence == pytest.approx(((a + 3 * b) / 4 + c) / 2)


@pytest.mark.parametrize("counts", [[2, 0, 3], [1, 1, 1]])
@EVERY
def test_one_target_a_sequence_is_refused(name: str, counts: list[int]) -> None:
    """Repeated over the steps, labels would train a model whose last() was forgotten."""
    predictions = rl.Ragged.from_flat(CASES[name].draw(sum(counts))[0], lengths=counts)
    target = CASES[name].draw(3)[1]
    with pytest.raises(
        ArgumentTypeError, match=r"one target per element.*out\.last\(\) or a pooling"
    ):
        CASES[name].call(predictions, target)
    CASES[name].call(predictions, predictions.broadcast(target))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["mse_loss", "l1_loss", "huber_loss"])
def test_reductions_are_those_of_torch(name: str, reduction: str) -> None:
    values, targets = torch.randn(2, 7, 3, dtype=torch.float64)
    batch, target = (rl.Ragged.from_flat(part, lengths=[3, 0, 4]) for part in (values, targets))
    own = getattr(losses, name)(batch, target, reduction=reduction)
    expected = getattr(torch.nn.functional, name)(values, targets, reduction=reduction)
    torch.testing.assert_close(own.values if reduction == "none" else own, expected)


@EVERY_REDUCTION
@EVERY
def test_bfloat16(name: str, reduction: str) -> None:
    """The result keeps the dtype, but a long sequence is summed in float32."""
    counts, (values, target) = [900, 0, 3], CASES[name].draw(903)
    weights = rl.Ragged.from_flat(torch.rand(903), lengths=counts)
    narrow, wide = (
        call(name, values.bfloat16().to(dtype), target, counts, reduction, weights)
        for dtype in (torch.bfloat16, torch.float64)
    )
    assert narrow.dtype is torch.bfloat16
    torch.testing.assert_close(narrow.double(), wide, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("features", [(), (900,)])
@pytest.mark.parametrize("reduction", ["mean", "sequence_mean"])
def test_a_sum_may_exceed_float16(reduction: Any, features: tuple[int, ...]) -> None:
    half = rl.Ragged.from_flat(
        torch.full((900, *features), 10.0, dtype=torch.float16), lengths=[900]
    )
    assert losses.mse_loss(half, half * 0, reduction=reduction).item() == 100


@EVERY_REDUCTION
@EVERY
def test_nothing_is_padded(name: str, reduction: str) -> None:
    counts, (values, target) = [100, *[1] * 60], CASES[name].draw(160)
    values.requires_grad_()
    weights = rl.Ragged.from_flat(torch.rand(160), lengths=counts)
    largest = largest_tensor(
        lambda: call(name, values, target, counts, reduction, weights).sum().backward()
    )
    assert 0 < largest <= values.numel() < len(counts) * 100


@pytest.mark.parametrize(
    ("name", "reduction"), [("cross_entropy, everything", "sequence_mean"), ("mse_loss", "mean")]
)
def test_compiles_without_a_break(name: str, reduction: str) -> None:
    def step(batch: rl.Ragged, target: rl.Ragged, weights: rl.Ragged) -> Any:
        result = CASES[name].call(batch, target, sample_weight=weights, reduction=reduction)
        return result.values if isinstance(result, rl.Ragged) else result

    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=True)
    for counts in ([3, 0, 2], [1, 4, 2, 5]):
        parts = [*CASES[name].draw(sum(counts)), torch.rand(sum(counts))]
        arguments = [rl.Ragged.from_flat(part, lengths=counts) for part in parts]
        torch.testing.assert_close(compiled(*arguments), step(*arguments))


LOGITS = rl.Ragged.from_flat(torch.zeros(3, CLASSES, device="cpu"), lengths=[2, 1])
NUMBERS = rl.Ragged.from_flat(torch.zeros(3, device="cpu"), lengths=[2, 1])
TARGET = rl.Ragged.from_flat(torch.zeros(3, dtype=torch.int64, device="cpu"), lengths=[2, 1])
NESTED = torch.nested.nested_tensor(
    [torch.zeros(length, device="cpu") for length in (2, 1)], layout=torch.jagged
)
OTHERWISE = rl.Ragged.from_flat(torch.zeros(3, dtype=torch.int64, device="cpu"), lengths=[1, 2])
ENTROPY, SQUARED, BINARY = (
    losses.cross_entropy,
    losses.mse_loss,
    losses.binary_cross_entropy_with_logits,
)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ENTROPY(LOGITS, OTHERWISE), ShapeError, r"here 2.*length 1 for sequence 0"),
        (
            lambda: ENTROPY(LOGITS, TARGET[:1]),
            ShapeError,
            "a batch of 2 sequences.*got 1 sequences",
        ),
        (lambda: ENTROPY(LOGITS.values, TARGET), ArgumentTypeError, "torch.nn.functional"),  # type: ignore[arg-type]
        (lambda: ENTROPY(LOGITS.to(torch.int64), TARGET), ArgumentTypeError, "floating-point"),
        (
            lambda: ENTROPY(LOGITS, [0, 1, 2]),  # type: ignore[arg-type]
            ArgumentTypeError,
            "one target per element",
        ),
        (
            lambda: ENTROPY(LOGITS, TARGET.values),  # type: ignore[arg-type]
            ArgumentTypeError,
            r"one target per element.*got a Tensor of shape \(3,\)",
        ),
        (
            lambda: ENTROPY(LOGITS, TARGET.to("meta")),
            ShapeError,
            "on cpu, like the other tensors.*on meta",
        ),
        (lambda: ENTROPY(LOGITS, TARGET + 4), ArgumentError, r"from 0 to 3.*class 4"),
        (lambda: ENTROPY(LOGITS, NUMBERS), ShapeError, r"Call \.to\(torch\.int64\)"),
        (
            lambda: ENTROPY(LOGITS, TARGET.map(lambda v: v.unsqueeze(1))),
            ShapeError,
            "one class per element",
        ),
        (lambda: ENTROPY(NUMBERS, TARGET), ShapeError, "one number per class"),
        (lambda: ENTROPY(LOGITS, TARGET, torch.ones(3)), ShapeError, "are sample_weight"),
        (lambda: ENTROPY(LOGITS, TARGET, label_smoothing=2), ArgumentError, "from 0 to 1"),
        (
            lambda: ENTROPY(LOGITS, TARGET, reduction="sequence"),  # type: ignore[arg-type]
            ArgumentError,
            "sequence_mean",
        ),
        (
            lambda: ENTROPY(LOGITS, TARGET, sample_weight=torch.ones(3)),
            ShapeError,
            "one number for each of the 2 sequences",
        ),
        (
            lambda: ENTROPY(LOGITS, TARGET, sample_weight=LOGITS),
            ShapeError,
            "one number per element",
        ),
        (lambda: SQUARED(LOGITS, NUMBERS), ShapeError, "nothing is broadcast"),
        (lambda: losses.huber_loss(NUMBERS, NUMBERS, 0.0), ArgumentError, "above 0"),
        (
            lambda: ENTROPY(LOGITS, TARGET, ignore_index=1.0),  # type: ignore[arg-type]
            ArgumentTypeError,
            r"ignore_index must be .*got 1\.0",
        ),
        (
            lambda: ENTROPY(LOGITS, TARGET, [1.0] * 4),  # type: ignore[arg-type]
            ArgumentTypeError,
            "weight must be .*got a list",
        ),
        (
            lambda: ENTROPY(LOGITS, TARGET, torch.ones(4).to("meta")),
            ShapeError,
            "weight must be .*on meta",
        ),
        (
            lambda: ENTROPY(LOGITS, TARGET, torch.tensor([1, 1, 1, math.nan])),
            ArgumentError,
            "weight must be .*got nan",
        ),
        (
            lambda: ENTROPY(LOGITS, TARGET, sample_weight=torch.tensor([1, -1])),
            ArgumentError,
            "sample_weight must be .*got -1",
        ),
        (
            lambda: ENTROPY(LOGITS, TARGET, sample_weight=NUMBERS + math.inf),
            ArgumentError,
            "sample_weight must be .*got inf",
        ),
        (
            lambda: BINARY(NUMBERS, NUMBERS, 2.0),  # type: ignore[arg-type]
            ArgumentTypeError,
            "pos_weight must be .*got a float",
        ),
        (
            lambda: BINARY(NUMBERS, NUMBERS, NESTED),
            ArgumentTypeError,
            "pos_weight must be .*got a nested tensor",
        ),
        (
            lambda: BINARY(NUMBERS, NUMBERS, torch.tensor(-2.0)),
            ArgumentError,
            r"pos_weight must be .*got -2\.0",
        ),
        (
            lambda: BINARY(NUMBERS, NUMBERS + 1.5),
            ArgumentError,
            r"target must be from 0 to 1, got 1\.5",
        ),
        (lambda: BINARY(LOGITS, LOGITS, torch.ones(2)), ShapeError, "one weight per label"),
    ],
)
def test_refuses(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with torch.device("cpu"), pytest.raises(error, match=says):
        call()
