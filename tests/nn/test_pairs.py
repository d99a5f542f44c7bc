"""Pairs, soft-DTW and edit distances, against loops over all pairs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.transduction import pairs as module
from raglane.transduction import edit_distance, soft_dtw

SIZES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=5)
SOME = [(3, 4), (0, 0), (1, 1), (5, 2), (1, 4)]


@pytest.fixture(params=["kernels", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the kernels, and without them."""
    if request.param == "torch":
        monkeypatch.setattr(module, "missing_kernels", lambda: "not built")


def draw(lengths: list[int], features: tuple[int, ...] = (3,)) -> rl.Ragged:
    return rl.Ragged.from_flat(
        torch.randn(sum(lengths), *features, dtype=torch.float64), lengths=lengths
    )


def both(
    sizes: list[tuple[int, int]], features: tuple[int, ...] = (3,)
) -> tuple[rl.Ragged, rl.Ragged]:
    return draw([rows for rows, _ in sizes], features), draw(
        [columns for _, columns in sizes], features
    )


def paths(rows: int, columns: int) -> Iterator[list[tuple[int, int]]]:
    """All monotonic paths from the first to the last pair."""
    if rows == columns == 1:
        yield [(0, 0)]
    for down, right in ((1, 0), (0, 1), (1, 1)):
        if rows > down and columns > right and (rows, columns) != (1, 1):
            for path in paths(rows - down, columns - right):
                yield [*path, (rows - 1, columns - 1)]


def by_all_paths(x: Tensor, y: Tensor, gamma: float) -> Tensor:
    costs = (x.unsqueeze(1) - y.unsqueeze(0)).square().sum(-1)
    totals = [torch.stack([costs[pair] for pair in path]).sum() for path in paths(*costs.shape)]
    return -gamma * torch.logsumexp(-torch.stack(totals) / gamma, 0)


@pytest.mark.parametrize("gamma", [0.1, 1.0, 7.0])
@pytest.mark.usefixtures("path")
def test_soft_dtw_is_the_soft_minimum_of_all_paths(gamma: float) -> None:
    a, b = both(SOME)
    a.values.requires_grad_()
    b.values.requires_grad_()
    expected = torch.stack(
        [
            by_all_paths(x, y, gamma) if len(x) else x.new_zeros(())
            for x, y in zip(a, b, strict=True)
        ]
    )
    own = soft_dtw(a, b, gamma)
    torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(own)
    wanted = torch.autograd.grad(expected, (a.values, b.values), upstream)
    torch.testing.assert_close(
        torch.autograd.grad(own, (a.values, b.values), upstream), wanted, rtol=1e-11, atol=1e-12
    )


def test_the_kernels_of_soft_dtw_refuse_transformations() -> None:
    a, b = both(SOME)
    with pytest.raises(ArgumentError, match="a must be a plain tensor"):
        torch.func.grad(lambda values: soft_dtw(a.with_values(values), b).sum())(a.values)


@given(sizes=SIZES)
def test_soft_dtw_of_the_kernels_equals_that_of_torch(sizes: list[tuple[int, int]]) -> None:
    """Values and gradients, also of equal elements and empty sequences."""
    a, b = both(sizes, ())
    a, b = a.with_values(a.values.round()), b.with_values(b.values.round())
    a.values.requires_grad_()

    results = []
    for reason in (None, "not built"):
        with mock.patch.object(module, "missing_kernels", return_value=reason):
            losses = soft_dtw(a, b, 0.5)
            finite = losses.isfinite()
            gradient = (
                torch.autograd.grad(losses.sum(), a.values, allow_unused=True)[0]
                if len(sizes)
                else None
            )
            results.append((losses.detach(), gradient))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
    assert finite.tolist() == [(rows > 0) == (columns > 0) for rows, columns in sizes]
    assert results[0][1] is None or bool(results[0][1].isfinite().all())


@pytest.mark.usefixtures("path")
def test_one_empty_sequence_has_an_infinite_loss_without_gradient() -> None:
    a, b = both([(0, 2), (2, 0), (0, 0), (2, 2)])
    a.values.requires_grad_()
    losses = soft_dtw(a, b)
    assert losses[:3].tolist() == [math.inf, math.inf, 0]
    losses.sum().backward()
    assert a.values.grad is not None
    assert a.values.grad[:2].count_nonzero() == 0
    assert bool(a.values.grad.isfinite().all())


@pytest.mark.usefixtures("path")
def test_a_nan_stays_in_its_item() -> None:
    a, b = both(SOME)
    clean = soft_dtw(a, b)
    values: Any = a.values.clone()
    values[0] = math.nan
    found = soft_dtw(a.with_values(values.requires_grad_()), b)
    assert found[1:].equal(clean[1:])
    assert found.isnan().tolist() == [True, False, False, False, False]
    found.sum().backward()
    assert bool(values.grad[3:].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_long_sequences_in_narrow_dtypes(dtype: torch.dtype) -> None:
    a, b = (part.to(dtype).to(torch.float64) for part in both([(300, 250), (20, 400)], (4,)))
    exact = a.values.clone().requires_grad_()
    narrow = a.values.to(dtype).requires_grad_()
    losses = soft_dtw(a.with_values(exact), b, 0.1)
    own = soft_dtw(a.with_values(narrow), b.to(dtype), 0.1)
    assert own.dtype is dtype
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(own.double(), losses, rtol=10 * step, atol=0)
    (expected,) = torch.autograd.grad(losses.sum(), exact)
    (gradient,) = torch.autograd.grad(own.double().sum(), narrow)
    torch.testing.assert_close(gradient.double(), expected, rtol=max(1e-3, step), atol=1e-3)


def test_soft_dtw_has_the_same_bits_on_any_threads(any_threads: Callable[[int], None]) -> None:
    a, b = both([(30, 40), (0, 0), (50, 20), (7, 7)])
    a.values.requires_grad_()
    results = []
    for threads in (1, 3):
        any_threads(threads)
        losses = soft_dtw(a, b)
        results.append((losses, torch.autograd.grad(losses.sum(), a.values)[0]))
    for own, other in zip(*results, strict=True):
        assert own.equal(other)


def fewest(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, int, int]:
    """Insertions, deletions, substitutions by recursion from the end, the stated preference
    first.
    """

    @cache
    def count(i: int, j: int) -> tuple[int, int, int]:
        if i == 0 or j == 0:
            return i, j, 0
        (a, b, c), (d, e, f), (g, h, k) = count(i - 1, j - 1), count(i, j - 1), count(i - 1, j)
        return min(
            [(a, b, c + (left[i - 1] != right[j - 1])), (d, e + 1, f), (g + 1, h, k)], key=sum
        )

    return count(len(left), len(right))


TOKENS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), max_size=7), st.lists(st.integers(0, 3), max_size=7)),
    max_size=5,
)


@pytest.mark.parametrize("reason", [None, "not built"])
@example(
    items=[([3, 1, 2, 2, 3], [2, 0, 3, 2])]
)  # of equally many edits, not those with the fewest insertions
@given(items=TOKENS)
def test_edits_are_the_fewest(reason: str | None, items: list[tuple[list[int], list[int]]]) -> None:
    left, right = (
        rl.Ragged.from_flat(
            torch.tensor([*itertools.chain(*part)], dtype=torch.int32),
            lengths=[len(one) for one in part],
        )
        for part in [[one[side] for one in items] for side in (0, 1)]
    )
    with mock.patch.object(module, "missing_kernels", return_value=reason):
        found = edit_distance(left, right)
    expected = [fewest(tuple(one), tuple(other)) for one, other in items]
    assert torch.stack(found[:3], 1).tolist() == [list(one) for one in expected]
    assert found.total.tolist() == [sum(one) for one in expected]
    assert found.lengths.tolist() == [len(other) for _, other in items]


def test_rates() -> None:
    assert edit_distance(rl.Ragged([[1, 2, 3], [7]]), rl.Ragged([[1, 3], [8]])).rate == 2 / 3
    empty = rl.Ragged.from_flat(torch.zeros(0, dtype=torch.int64), lengths=[0])
    assert edit_distance(empty, empty).rate == 0
    assert edit_distance(rl.Ragged([[1]]), empty).rate == math.inf


A = rl.Ragged.from_flat(torch.zeros(5, 2, device="cpu"), lengths=[3, 2])
TOKEN = rl.Ragged.from_flat(torch.zeros(5, dtype=torch.int64, device="cpu"), lengths=[3, 2])


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: soft_dtw(A, A.values), ArgumentTypeError, "b must be a Ragged"),  # type: ignore[arg-type]
        (lambda: soft_dtw(A, A[:1]), ShapeError, "b must be a batch of 2 sequences, like a, got 1"),
        (lambda: soft_dtw(A, TOKEN), ArgumentTypeError, "b must be .*floating-point"),
        (
            lambda: soft_dtw(A, A.to(torch.float64)),
            ArgumentTypeError,
            "b must be .*the same for both",
        ),
        (
            lambda: soft_dtw(A, A.map(lambda values: values[:, :1])),
            ShapeError,
            r"b must be of shape \(2,\)",
        ),
        (lambda: soft_dtw(A, A, gamma=0), ArgumentError, "gamma must be finite and above 0, got 0"),
        (
            lambda: edit_distance(A, TOKEN),
            ArgumentTypeError,
            "hypotheses must be a Ragged of tokens",
        ),
        (
            lambda: edit_distance(TOKEN, A),
            ArgumentTypeError,
            "references must be a Ragged of tokens",
        ),
        (
            lambda: edit_distance(TOKEN, TOKEN[:1]),
            ShapeError,
            "references must be a batch of 2 sequences",
        ),
    ],
)
def test_refuses(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with torch.device("cpu"), pytest.raises(error, match=says):
        call()


# For a GPU torch raises OutOfMemoryError.
@pytest.mark.host
def test_pairs_that_do_not_fit_into_memory() -> None:
    long = rl.Ragged([torch.empty(10**7)])
    with pytest.raises(
        rl.errors.ArgumentError, match="100,000,000,000,000 pairs of elements, which needs"
    ):
        soft_dtw(long, long)


@pytest.mark.host
def test_alignments_and_attention_that_do_not_fit_into_memory() -> None:
    frames, labels = (
        rl.Ragged([torch.empty(10**7, 1)]),
        rl.Ragged([torch.ones(10**7, dtype=torch.int64)]),
    )
    states = rl.Ragged([torch.empty(10**7 + 1, 1)])
    with pytest.raises(rl.errors.ArgumentError, match="memory must be at most"):
        rl.transduction.rnnt_loss(frames, states, labels, torch.nn.Linear(1, 2))
    with pytest.raises(rl.errors.ArgumentError, match="memory must be at most"):
        rl.transduction.AttentionDecoder(2, 1, 4)(frames, labels)
