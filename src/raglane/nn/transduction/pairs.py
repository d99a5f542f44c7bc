"""Distances of two sequences over all pairs of their elements: soft dynamic time warping and edits."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_device, check_kind, check_number
from raglane._utils.memory import check_pairs
from raglane._utils.messages import count_of
from raglane._utils.tracing import never_recorded, refuse_jit_trace
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.kernels.cpu import transduction as kernels
from raglane.native import missing_kernels
from raglane.nn.losses.comparison import check_untransformed, once, wide
from raglane.nn.transduction.tokens import as_tokens
from raglane.ragged import Ragged


def _check_both(a: Any, b: Any, names: tuple[str, str] = ("a", "b")) -> None:
    for name, batch in zip(names, (a, b), strict=True):
        check_kind(name, batch, Ragged, "a Ragged", "wrap a list of sequences with rl.Ragged")
    if len(a) != len(b):
        rule = f"a batch of {len(a)} sequences, like {names[0]}"
        raise ShapeError(
            names[1], f"{len(b)} sequences", rule, "pass one sequence per item in both"
        )
    check_device(names[1], b.values, a.device)


# -- soft dynamic time warping
# -----------------------------------------------------------------------------------------


@never_recorded
def soft_dtw(a: Ragged, b: Ragged, gamma: float = 1.0) -> Tensor:
    """Return the soft dynamic time warping discrepancy of each item, a differentiable loss.

    It is the soft minimum ``-gamma log sum exp(-c / gamma)`` over all monotonic paths of pairs from
    both first to both last elements, where ``c`` is the sum of a path's squared distances (Cuturi
    and Blondel, "Soft-DTW: a differentiable loss function for time-series", ICML 2017). As
    ``gamma`` approaches 0, it becomes the cost of the best path. Time and memory are proportional
    to the sum of T U over the items. The loss can be differentiated once, and :func:`torch.compile`
    breaks the graph here. Sums are computed in float64.

    Args:
        a: B sequences of T elements, values ``(N, D)`` or ``(N,)``, floating-point.
        b: B sequences of U elements, of the same dtype and size.
        gamma: the smoothing, above 0, in units of the squared Euclidean distance.

    Returns:
        ``(B,)``: 0 for two empty sequences, and ``inf`` without a gradient if only one is empty:
        there is no path.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind or dtype.
        ShapeError: numbers of sequences, features or devices differ.
        ArgumentError: ``gamma`` is not above 0.

    Example:
        >>> a, b = Ragged([[0.0, 1.0, 2.0]]), Ragged([[0.0, 0.0, 1.0, 2.0]])
        >>> soft_dtw(a, b, gamma=0.001).item()  # the best path has no cost
        0.0
    """
    _check_both(a, b)
    for name, batch in (("a", a), ("b", b)):
        is_real = batch.values.is_floating_point()
        if not is_real or batch.dtype is not a.dtype or batch.values.dim() > 2:
            got = f"{batch.dtype}, elements of shape {tuple(batch.feature_shape)}"
            rule = "(N, D) or (N,) of a floating-point dtype, the same for both"
            raise ArgumentTypeError(name, got, rule, "convert it with .to()")
    if a.feature_shape != b.feature_shape:
        got = f"elements of shape {tuple(b.feature_shape)}"
        raise ShapeError(
            "b", got, f"of shape {tuple(a.feature_shape)}, like a", "pass elements of one size"
        )
    gamma = check_number("gamma", gamma, "finite and above 0", lambda number: 0 < number < math.inf)
    if a.values.is_cpu:
        check_untransformed("soft_dtw", "a", [a.values, b.values])
        check_pairs(a.lengths_cpu, b.lengths_cpu, 16)
    size = math.prod(a.feature_shape)
    # torch has no cdist of half precision.
    rows = [
        batch.map(lambda values: values.reshape(len(values), size).to(wide(a.dtype))).to_list()
        for batch in (a, b)
    ]
    # Through products the difference of close elements would be lost.
    each = [
        torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square().reshape(-1)
        for x, y in zip(*rows, strict=True)
    ]
    costs = torch.cat([*each, a.values[:0].reshape(-1)]).double()
    if costs.is_cpu and missing_kernels() is None:
        minima: Tensor = _SoftMinimum.apply(costs, a.offsets, b.offsets, gamma)  # type: ignore[no-untyped-call]
    else:
        minima = _by_diagonals(costs, a.lengths_cpu, b.lengths_cpu, gamma)
    a_empty = a.lengths == 0
    b_empty = b.lengths == 0
    minima = minima.masked_fill(a_empty | b_empty, math.inf).masked_fill(a_empty & b_empty, 0)
    return minima.to(a.dtype)


class _SoftMinimum(torch.autograd.Function):
    """The soft minimum of each item from the costs ``(P,)``, by the kernels; any without pairs."""

    @staticmethod
    def forward(ctx: Any, costs: Tensor, left: Tensor, right: Tensor, gamma: float) -> Tensor:
        """Return the soft minima."""
        reach = kernels.soft_dtw(costs, left, right, gamma)
        ctx.save_for_backward(costs, left, right, reach)
        ctx.gamma = gamma
        return torch.cat([reach, reach.new_zeros(1)])[(left.diff() * right.diff()).cumsum(0) - 1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the costs."""
        costs, left, right, reach = ctx.saved_tensors
        shares = kernels.soft_dtw(costs, left, right, ctx.gamma, reach)
        gradient = shares * grad.repeat_interleave(left.diff() * right.diff())
        return *once([gradient], "soft_dtw", "a", costs), None, None, None


def _by_diagonals(costs: Tensor, left: Tensor, right: Tensor, gamma: float) -> Tensor:
    """Compute :class:`_SoftMinimum` in torch, a diagonal of the tables of all items at a time."""
    sizes = left * right
    total = costs.shape[0]
    offsets = segments.offsets_from_lengths(sizes)
    columns = segments.spread(right, offsets, total)
    position = segments.positions(offsets, total)
    row = position // columns
    column = position % columns
    diagonal = row + column
    at = torch.arange(total, device="cpu")
    order = diagonal.argsort(stable=True)
    rank = order.argsort()
    ordered = costs[order.to(costs.device, non_blocking=True)]
    # The ranks of the three neighbours; -1 for one that does not exist, and -2 for the start of a
    # path.
    exists = torch.stack([row > 0, column > 0, (row > 0) & (column > 0)])
    neighbours = at - torch.stack([columns, torch.ones_like(at), columns + 1])
    near = rank[neighbours.clamp(min=0)].masked_fill(~exists, -1)
    near[2, position == 0] = -2
    edge = torch.cat([costs.new_full((1,), number) for number in (0.0, math.inf)])
    end = 0
    reach = [costs[:0], costs[:0]]
    for count in diagonal.bincount().tolist():
        previous = torch.cat([edge, *reach[-2:]])
        here = near[:, order[end : end + count]]
        index = torch.where(here < 0, here + 2, here - end + len(previous)).to(
            costs.device, non_blocking=True
        )
        exponents = -previous[index] / gamma
        reach.append(ordered[end : end + count] - gamma * torch.logsumexp(exponents, 0))
        end += count
    ends = torch.cat([rank, torch.tensor([total], device="cpu")])[sizes.cumsum(0) - 1]
    return torch.cat([*reach, edge[:1]])[ends.to(costs.device, non_blocking=True)]


# -- edit distance
# --------------------------------------------------------------------------------------------------


class Edits(NamedTuple):
    """Counts ``(B,)`` int64 of the edits that turn each reference into its hypothesis, and the
    references' lengths.
    """

    insertions: Tensor
    deletions: Tensor
    substitutions: Tensor
    lengths: Tensor

    def __repr__(self) -> str:
        counts = {name: int(getattr(self, name).sum()) for name in self._fields[:3]}
        words = ", ".join(f"{count:,} {name}" for name, count in counts.items())
        return f"Edits({count_of(len(self.lengths), 'item')}: {words}; rate {self.rate:.4g})"

    @property
    def total(self) -> Tensor:
        """The edit distance of each item, ``(B,)``."""
        return self.insertions + self.deletions + self.substitutions

    @property
    def rate(self) -> float:
        """All edits divided by all lengths: the error rate, e.g. of words or characters.

        Without tokens in the references it is 0 for no edits, and else ``inf``.
        """
        edits = int(self.total.sum())
        length = int(self.lengths.sum())
        if length:
            return edits / length
        return math.inf if edits else 0.0


def edit_distance(hypotheses: Ragged, references: Ragged) -> Edits:
    """Return the edit distance of sequences of tokens: insertions, deletions, substitutions.

    The distance is that of Levenshtein, "Binary codes capable of correcting deletions, insertions
    and reversals", 1966. If several sets of edits have this size, the last edit is a substitution
    or none if possible, otherwise a deletion, otherwise an insertion, and likewise for the edits
    before it. The counts are computed on the CPU.

    Args:
        hypotheses: B sequences of tokens, ``(N,)`` of an integer dtype, e.g. ``Hypotheses.best()``.
        references: B sequences of the true tokens. Lengths of 0 are legal.

    Returns:
        A named tuple of ``insertions`` (tokens that only the hypothesis has), ``deletions``,
        ``substitutions`` and ``lengths``, ``(B,)`` int64 on the CPU, with the properties ``total``,
        the distances, and ``rate``, the word or character error rate: the sum of all edits divided
        by the sum of the lengths of the references.

    Raises:
        ArgumentTypeError: an argument is not a Ragged of integers.
        ShapeError: numbers of sequences differ.

    Example:
        >>> edits = edit_distance(Ragged([[1, 2, 4], [5]]), Ragged([[1, 2, 3, 4], [6]]))
        >>> edits.deletions.tolist(), edits.substitutions.tolist(), edits.rate
        ([1, 0], [0, 1], 0.4)
    """
    refuse_jit_trace("a call of edit_distance")
    left = as_tokens("hypotheses", hypotheses)
    right = as_tokens("references", references)
    _check_both(left, right, ("hypotheses", "references"))
    if missing_kernels() is None:
        counts = kernels.edits(left.values, left.offsets, right.values, right.offsets)
    else:
        items = zip(left.to_list(), right.to_list(), strict=True)
        each = [_count(x.tolist(), y.tolist()) for x, y in items]
        counts = torch.tensor(each, dtype=torch.int64).view(-1, 3)
    insertions, deletions, substitutions = counts.unbind(1)
    return Edits(insertions, deletions, substitutions, right.lengths)


def _count(left: list[int], right: list[int]) -> tuple[int, int, int]:
    """Return the insertions, deletions and substitutions of one item."""
    line = [(0, column, 0) for column in range(len(right) + 1)]
    for row, token in enumerate(left):
        before = line
        line = [(row + 1, 0, 0)]
        for column, reference in enumerate(right):
            i, d, s = before[column]
            substituted = (i, d, s + (token != reference))
            i, d, s = line[-1]
            deleted = (i, d + 1, s)
            i, d, s = before[column + 1]
            inserted = (i + 1, d, s)
            line.append(min(substituted, deleted, inserted, key=sum))
    return line[-1]
