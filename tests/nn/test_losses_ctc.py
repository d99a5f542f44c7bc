"""CTC compared with torch's on a padded batch, and with the sum over all paths."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import forward_ad

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.transduction import ctc_loss
from tensor_sizes import largest_tensor

CLASSES = 4
INFINITE = float("inf")

# Steps and labels of a sequence: none of either, labels that do not fit, and long ones among short
# ones.
PAIRS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=0, max_size=6)


def draw(
    pairs: list[tuple[int, int]], blank: int = 0, kinds: int = CLASSES - 1
) -> tuple[Tensor, rl.Ragged]:
    """Logits ``(N, C)``, and labels of few kinds, so that many repeat."""
    steps, labels = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    logits = torch.randn(sum(steps), CLASSES, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, kinds, (sum(labels),))
    target = target + (target >= blank)
    return logits, rl.Ragged.from_flat(target, lengths=labels)


def batch_of(logits: Tensor, pairs: list[tuple[int, int]]) -> rl.Ragged:
    return rl.Ragged.from_flat(logits.log_softmax(-1), lengths=[pair[0] for pair in pairs])


def torch_loss(log_probs: rl.Ragged, targets: rl.Ragged, **options: Any) -> Tensor:
    padded, steps = log_probs.to_padded(batch_first=False)
    labels, counts = targets.to_padded()
    return torch.nn.functional.ctc_loss(padded, labels, steps, counts, **options)


@pytest.mark.parametrize("blank", [0, 2])
@given(pairs=PAIRS, kinds=st.integers(1, CLASSES - 1))
def test_against_torch(pairs: list[tuple[int, int]], kinds: int, blank: int) -> None:
    """Values and gradients; torch's gradients of infinite losses are those with
    zero_infinity=True.
    """
    if not any(steps for steps, _ in pairs):
        return  # torch needs a step
    logits, targets = draw(pairs, blank, kinds)
    log_probs = batch_of(logits, pairs)
    own = ctc_loss(log_probs, targets, blank, reduction="none")
    expected = torch_loss(log_probs, targets, blank=blank, reduction="none")
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    finite = torch_loss(log_probs, targets, blank=blank, reduction="none", zero_infinity=True)
    zeroed = ctc_loss(log_probs, targets, blank, reduction="none", zero_infinity=True)
    torch.testing.assert_close(zeroed, finite, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(own)
    (theirs,) = torch.autograd.grad(finite, logits, upstream, retain_graph=True)
    for losses in (own, zeroed):
        (ours,) = torch.autograd.grad(losses, logits, upstream, retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_long_sequences_in_float32() -> None:
    pairs = [(300, 40), (5, 2), (120, 60), (299, 0)]
    logits, targets = draw(pairs)
    exact = batch_of(logits, pairs)
    narrow = logits.detach().float().requires_grad_()
    own = ctc_loss(batch_of(narrow, pairs), targets, reduction="none")
    assert own.dtype is torch.float32
    expected = ctc_loss(exact, targets, reduction="none")
    torch.testing.assert_close(own.double(), expected, rtol=1e-5, atol=1e-4)
    (ours,) = torch.autograd.grad(own.sum(), narrow)
    (theirs,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("labels", [[], [1], [1, 1], [1, 2], [2, 1, 2], [1, 1, 1]])
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 5])
def test_against_every_path(steps: int, labels: list[int]) -> None:
    """The definition: the sum over all paths that read as the labels once repeats and blanks are
    dropped.
    """
    probabilities = torch.rand(steps, 3, dtype=torch.float64) / 3
    total = 0.0
    for path in itertools.product(range(3), repeat=steps):
        if [label for label, _ in itertools.groupby(path) if label != 0] == labels:
            total += math.prod(float(probabilities[t, label]) for t, label in enumerate(path))
    targets = rl.Ragged.from_flat(torch.tensor(labels, dtype=torch.int64), lengths=[len(labels)])
    own = ctc_loss(rl.Ragged([probabilities.log()]), targets, reduction="none")
    assert own.item() == pytest.approx(-math.log(total) if total else INFINITE, rel=1e-12)


def test_log_probabilities_may_be_minus_infinity() -> None:
    """Impossible labels have no gradient."""
    values = torch.tensor([[0.5, 0.5], [0.0, 1.0]], dtype=torch.float64).log().requires_grad_()
    loss = ctc_loss(rl.Ragged.from_flat(values, lengths=[2]), rl.Ragged([[1]]), reduction="none")
    assert loss.item() == pytest.approx(0)
    loss.sum().backward()
    assert values.grad is not None
    torch.testing.assert_close(
        values.grad, torch.tensor([[-0.5, -0.5], [0, -1.0]], dtype=torch.float64)
    )


def test_a_nan_stays_in_its_sequence() -> None:
    pairs = [(4, 1), (5, 2), (4, 2)]
    clean, targets = draw(pairs)
    poisoned = clean.detach().clone()
    poisoned[:4] = poisoned[9:] = float("nan")
    results = []
    for values in (clean, poisoned.requires_grad_()):
        losses = ctc_loss(batch_of(values, pairs), targets, reduction="none")
        results.append((losses[1], torch.autograd.grad(losses.sum(), values)[0][4:9]))
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_sequences_of_weight_zero_may_be_nan_or_infinite(reduction: Any) -> None:
    pairs = [(4, 1), (5, 2), (1, 3)]
    values, targets = draw(pairs)
    with torch.no_grad():
        values[:4] = float("nan")
    log_probs = batch_of(values, pairs)
    own = ctc_loss(log_probs, targets, sample_weight=torch.tensor([0, 2, 0]), reduction=reduction)
    alone = ctc_loss(log_probs[1:2], targets[1:2], reduction=reduction)
    torch.testing.assert_close(own.sum(), alone.sum() * (1 if reduction == "mean" else 2))
    # Not of values: the softmax of this test makes NaN of the gradient 0 of rows of NaN.
    (gradient,) = torch.autograd.grad(own.sum(), log_probs.values)
    outside = torch.ones(10, dtype=torch.bool)
    outside[4:9] = False
    assert bool(gradient[4:9].isfinite().all())
    assert bool((gradient[outside] == 0).all())


def test_reductions_by_hand() -> None:
    pairs = [(4, 1), (5, 3), (2, 0), (0, 0)]
    values, targets = draw(pairs, kinds=3)
    with torch.no_grad():
        values[4:9] += 1
    log_probs = batch_of(values, pairs)
    a, b, c, d = ctc_loss(log_probs, targets, reduction="none", zero_infinity=True).tolist()
    assert d == 0
    weights = torch.tensor([1.0, 2.0, 3.0, 9.0])

    def loss(reduction: Any, weights: Tensor | None = None) -> float:
        return ctc_loss(
            log_probs, targets, reduction=reduction, sample_weight=weights, zero_infinity=True
        ).item()

    assert loss("mean") == pytest.approx((a + b / 3 + c) / 4)
    assert loss("sum") == pytest.approx(a + b + c)
    assert loss("mean", weights) == pytest.approx((a + 2 * b / 3 + 3 * c) / 15)
    assert loss("sum", weights) == pytest.approx(a + 2 * b + 3 * c)
    for reduction in ("mean", "sum"):
        expected = torch_loss(log_probs, targets, reduction=reduction, zero_infinity=True)
        assert loss(reduction) == pytest.approx(expected.item())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("pairs", [[], [(0, 0)], [(0, 0), (0, 0)]])
def test_where_nothing_counts_the_loss_is_zero(
    pairs: list[tuple[int, int]], reduction: Any
) -> None:
    values, targets = draw(pairs)
    result = ctc_loss(batch_of(values, pairs), targets, reduction=reduction)
    assert (result.shape, result.item()) == ((), 0)
    assert torch.autograd.grad(result, values)[0].shape == (0, CLASSES)


def test_bfloat16_is_computed_in_float32() -> None:
    pairs = [(60, 12), (5, 2)]
    values, targets = draw(pairs)
    log_probs = batch_of(values.detach(), pairs).to(torch.bfloat16)
    own = ctc_loss(log_probs, targets, reduction="none")
    assert own.dtype is torch.bfloat16
    expected = ctc_loss(log_probs.to(torch.float64), targets, reduction="none")
    torch.testing.assert_close(own.double(), expected, rtol=4e-3, atol=0)


def test_nothing_is_padded() -> None:
    """The largest tensor grows with steps times states of each sequence, not with the longest of
    each.
    """
    pairs = [(200, 1), *[(2, 1)] * 50, (2, 50)]
    values, targets = draw(pairs)
    largest = largest_tensor(
        lambda: ctc_loss(batch_of(values, pairs), targets, zero_infinity=True).backward()
    )
    # Steps times states, or steps times classes.
    assert largest == max(200 * 3 + 50 * 2 * 3 + 2 * 101, values.numel())
    assert largest < len(pairs) * 200


CTC: dict[str, Callable[[rl.Ragged, rl.Ragged], object]] = {
    "loss": ctc_loss,
    "search": lambda log_probs, _: rl.transduction.CTCBeamSearch(beam_size=2)(log_probs),
    "alignment": rl.transduction.ctc_align,
}


def _even(rows: int, classes: int, sums: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full((rows, classes), sums / classes, dtype=torch.float64).log().to(dtype)


@pytest.mark.parametrize("use", CTC)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("classes", [2, 100, 3000])  # 3,000: some blocks of rows
def test_elements_whose_probabilities_sum_to_more_than_one(
    use: str, dtype: torch.dtype, classes: int
) -> None:
    """In any element, and in any dtype; rounded log-probabilities and sums below 1 are valid."""
    call, targets = CTC[use], rl.Ragged([[1], [1]])
    for sums in (1.0, 1.01, 0.7, 1e-3):
        valid = _even(200, classes, sums, dtype)
        call(rl.Ragged.from_flat(valid, lengths=[90, 110]), targets)
    valid[7] = -INFINITE
    call(rl.Ragged.from_flat(valid, lengths=[90, 110]), targets)
    for element in (0, 89, 90, 199):
        values = _even(200, classes, dtype=dtype)
        values[element] += 0.25  # a sum of 1.28
        sequence, step = (0, element) if element < 90 else (1, element - 90)
        words = rf"got a sum of 1\.[23]\d* in step {step} of sequence {sequence}\. Pass logits"
        with pytest.raises(ArgumentError, match=words):
            call(rl.Ragged.from_flat(values, lengths=[90, 110]), targets)


@pytest.mark.parametrize("use", CTC)
@pytest.mark.parametrize(
    "values",
    [
        torch.tensor([[0.3, -2.0, 5.0], [100.0, 0.0, -1.0]]),
        torch.tensor([[0.1, 0.2, 0.7], [0.0, 0.0, 1.0]]),
        torch.tensor([[-0.5, -0.5, -0.5], [-1.0, -2.0, -3.0]]),
        torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
    ],
    ids=["logits", "probabilities", "negative logits", "zeros"],
)
def test_logits_are_refused(use: str, values: Tensor) -> None:
    values.requires_grad_()
    with pytest.raises(ArgumentError, match=r"log_probs must be log-probabilities.*log_softmax"):
        CTC[use](rl.Ragged.from_flat(values, lengths=[2]), rl.Ragged([[1]]))
    with torch.inference_mode(), pytest.raises(ArgumentError, match="log-probabilities"):
        CTC[use](rl.Ragged.from_flat(values.detach(), lengths=[2]), rl.Ragged([[1]]))


def test_logits_of_weight_zero_have_no_effect() -> None:
    values = torch.cat([torch.randn(4, 3) + 9, _even(5, 3)])
    batch, targets = rl.Ragged.from_flat(values, lengths=[4, 5]), rl.Ragged([[1], [2]])
    own = ctc_loss(batch, targets, sample_weight=torch.tensor([0.0, 1.0]), reduction="none")
    torch.testing.assert_close(own[1:], ctc_loss(batch[1:], targets[1:], reduction="none"))
    with pytest.raises(ArgumentError, match="in step 0 of sequence 0, and 3 more such"):
        ctc_loss(batch, targets, sample_weight=torch.tensor([1.0, 1.0]))


def test_sums_are_not_read_in_graphs() -> None:
    logits, targets = rl.Ragged.from_flat(torch.ones(4, 3), lengths=[4]), rl.Ragged([[1]])
    compiled = torch.compile(ctc_loss, backend="eager", fullgraph=True)
    assert compiled(logits, targets).item() < 0


def test_cannot_be_differentiated_twice() -> None:
    pairs = [(4, 1)]
    values, targets = draw(pairs)
    (gradient,) = torch.autograd.grad(
        ctc_loss(batch_of(values, pairs), targets), values, create_graph=True
    )
    with pytest.raises(ArgumentError, match=r"the first derivative.*, got a second derivative"):
        gradient.square().sum().backward()
    with pytest.raises(ArgumentError, match="log_probs must be a plain tensor"):
        torch.func.grad(lambda given: ctc_loss(batch_of(given, pairs), targets))(values.detach())
    with (
        forward_ad.dual_level(),
        pytest.raises(ArgumentError, match="log_probs must be a plain tensor"),
    ):
        ctc_loss(batch_of(forward_ad.make_dual(values.detach(), values.detach()), pairs), targets)


def test_compiles_without_a_break() -> None:
    def step(logits: rl.Ragged, targets: rl.Ragged) -> Tensor:
        return (
            ctc_loss(logits.map(lambda values: values.log_softmax(-1)), targets, zero_infinity=True)
            * 2
        )

    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    graphs = 0
    # No two sizes of the first batch are equal by chance, which the compiler would take for a rule.
    for pairs in ([(4, 1), (3, 2), (5, 3)] * 2, [(4, 1), (0, 0), (5, 2), (7, 3)], [(2, 1), (9, 4)]):
        values, targets = draw(pairs)
        results = []
        for function in (step, compiled):
            loss = function(
                rl.Ragged.from_flat(values, lengths=[pair[0] for pair in pairs]), targets
            )
            results.append([loss.detach(), torch.autograd.grad(loss, values)[0]])
        torch.testing.assert_close(*results)
        graphs = graphs or counter.frame_count
        assert counter.frame_count == graphs


LOG_PROBS = rl.Ragged.from_flat(torch.full((5, CLASSES), 0.25, device="cpu").log(), lengths=[3, 2])
EMPTY = rl.Ragged.from_flat(torch.zeros(0, CLASSES, device="cpu"), lengths=[0])
TARGETS = rl.Ragged.from_flat(torch.ones(3, dtype=torch.int64, device="cpu"), lengths=[1, 2])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: ctc_loss(LOG_PROBS.values, TARGETS), ArgumentTypeError, "log_probs"),  # type: ignore[arg-type]
        (lambda: ctc_loss(LOG_PROBS, TARGETS.values), ArgumentTypeError, "labels"),  # type: ignore[arg-type]
        (lambda: ctc_loss(LOG_PROBS, TARGETS * 1.0), ArgumentTypeError, "integer"),
        (lambda: ctc_loss(LOG_PROBS, TARGETS[:1]), ShapeError, "each of the 2"),
        (lambda: ctc_loss(LOG_PROBS, TARGETS + 3), ArgumentError, r"from 0 to 3.*label 4"),
        (
            lambda: ctc_loss(LOG_PROBS, TARGETS, blank=0.0),  # type: ignore[arg-type]
            ArgumentTypeError,
            r"blank must be .*got 0\.0",
        ),
        (
            lambda: ctc_loss(EMPTY, TARGETS[:1], sample_weight=torch.tensor([math.nan])),
            ArgumentError,
            "sample_weight .*got nan",
        ),
        (lambda: ctc_loss(LOG_PROBS, TARGETS, blank=4), ArgumentError, "a blank of the C labels"),
        (lambda: ctc_loss(TARGETS * 1.0, TARGETS), ArgumentError, r"\(N, C\)"),
        (
            lambda: ctc_loss(LOG_PROBS, TARGETS, reduction="sequence_mean"),  # type: ignore[arg-type]
            ArgumentError,
            "'mean' for the mean over sequences",
        ),
        (
            lambda: ctc_loss(LOG_PROBS, TARGETS, sample_weight=torch.ones(3)),
            ShapeError,
            "each of the 2 sequences",
        ),
        (
            lambda: ctc_loss(LOG_PROBS, TARGETS, sample_weight=LOG_PROBS),
            ArgumentTypeError,
            "sequence",
        ),
    ],
)
def test_refuses(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with torch.device("cpu"), pytest.raises(error, match=says):
        call()
