"""All pairs of elements of two sequences per item: indices, soft dynamic time warping, edit distances."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_device, check_kind, check_number
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.cpu import prefixes as kernels
from raglane.native import missing_kernels
from raglane.nn.transduction.tokens import as_tokens
from raglane.ragged import Ragged

Cost = Callable[[Tensor, Tensor], Tensor]


def pairs(a: Ragged, b: Ragged) -> Ragged:
    """Return the indices of all pairs of an element of ``a`` and an element of ``b`` of the same item.

    An item with T and U elements has T U pairs in lexicographic order, of which one of the lengths may be 0: then it
    has none. Nothing is padded. Nothing waits for a device if the lengths are on the host.

    Args:
        a: B sequences.
        b: B sequences, on the same device.

    Returns:
        A Ragged of int64, values ``(P, 2)``: the index into ``a.values`` and the index into ``b.values``.

    Raises:
        ArgumentTypeError: an argument is not a Ragged.
        ShapeError: numbers of sequences or devices differ.

    Example:
        >>> a, b = Ragged([[1.0, 2.0], [3.0]]), Ragged([[10.0, 20.0], [30.0]])
        >>> first, second = pairs(a, b).values.unbind(1)
        >>> (a.values[first] + b.values[second]).tolist()
        [11.0, 21.0, 12.0, 22.0, 33.0]
    """
    _check_both(a, b)
    lengths = a.host_lengths * b.host_lengths
    total = int(lengths.sum())
    offsets = segments.offsets_from_lengths(lengths).to(a.device, non_blocking=True)
    place = segments.positions(offsets, total)
    columns = segments.spread(b.lengths, offsets, total)
    first = segments.spread(a.offsets[:-1], offsets, total) + place // columns
    second = segments.spread(b.offsets[:-1], offsets, total) + place % columns
    return Ragged._make(torch.stack([first, second], 1), offsets, lengths)


def _check_both(a: Any, b: Any, names: tuple[str, str] = ("a", "b")) -> None:
    for name, part in zip(names, (a, b), strict=True):
        check_kind(name, part, Ragged, "a Ragged", "wrap a list of sequences with rl.Ragged")
    if len(a) != len(b):
        rule = f"a batch of {len(a)} sequences, like {names[0]}"
        raise ShapeError(message(names[1], f"{len(b)} sequences", rule, "pass one sequence per item in both"))
    check_device(names[1], b.values, a.device)


# -- soft dynamic time warping -----------------------------------------------------------------------------------------


def soft_dtw(a: Ragged, b: Ragged, gamma: float = 1.0, cost: Literal["squared"] | Cost = "squared") -> Tensor:
    """Return the soft dynamic time warping discrepancy of two sequences per item, a differentiable loss.

    It is the soft minimum ``-gamma log sum exp(-c / gamma)`` over all monotonic paths of pairs from both first to both
    last elements, where ``c`` is the sum of a path's costs (Cuturi and Blondel, "Soft-DTW: a differentiable loss
    function for time-series", ICML 2017). For ``gamma`` to 0 it becomes the cost of the best path. Time and memory are
    proportional to the sum of T U over the items. The loss can be differentiated once; sums are computed in float64.

    Args:
        a: B sequences of T elements, values ``(N, D)`` or ``(N,)``, floating-point.
        b: B sequences of U elements, of the same dtype and size.
        gamma: the smoothing, above 0, in units of the cost.
        cost: ``"squared"``, the squared Euclidean distance, or a differentiable function of the elements of one item,
            ``(T, D)`` and ``(U, D)``, which returns the costs ``(T, U)``.

    Returns:
        ``(B,)``. Of two empty sequences it is 0; of one, ``inf`` without gradient, because there is no path.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind or dtype.
        ShapeError: numbers of sequences, features or devices differ, or ``cost`` returns another shape.
        ArgumentError: ``gamma`` is not above 0, or ``cost`` is unknown.

    Example:
        >>> a, b = Ragged([[0.0, 1.0, 2.0]]), Ragged([[0.0, 0.0, 1.0, 2.0]])
        >>> soft_dtw(a, b, gamma=0.001).item()  # the best path has no cost
        0.0
    """
    _check_both(a, b)
    for name, part in (("a", a), ("b", b)):
        if not part.values.is_floating_point() or part.dtype is not a.dtype or part.values.dim() > 2:
            got = f"{part.dtype}, elements of shape {tuple(part.features)}"
            rule = "(N, D) or (N,) of a floating-point dtype, the same for both"
            raise ArgumentTypeError(message(name, got, rule, "convert it with .to()"))
    if a.features != b.features:
        got = f"elements of shape {tuple(b.features)}"
        raise ShapeError(message("b", got, f"of shape {tuple(a.features)}, like a", "pass elements of one size"))
    gamma = check_number("gamma", gamma, "finite and above 0", lambda given: 0 < given < math.inf)
    if not callable(cost) and not (isinstance(cost, str) and cost == "squared"):
        raise ArgumentError(message("cost", quote(cost), "'squared' or a function", "pass one of these"))
    function: Cost = cost if callable(cost) else _squared
    sizes = torch.stack([a.host_lengths, b.host_lengths], 1)
    each = [
        _checked_costs(function(x.unsqueeze(1) if x.dim() == 1 else x, y.unsqueeze(1) if y.dim() == 1 else y), x, y)
        for x, y in zip(a.to_list(), b.to_list(), strict=True)
        if x.shape[0] and y.shape[0]
    ]
    costs = torch.cat([*each, a.values[:0].reshape(-1)]).double()
    found: Tensor = _soft_minimum(costs, a.offsets, b.offsets, sizes, gamma)[0]
    return found.to(a.dtype)


def _squared(x: Tensor, y: Tensor) -> Tensor:
    # Through products the difference of close elements would be lost.
    return torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()


def _checked_costs(costs: Any, x: Tensor, y: Tensor) -> Tensor:
    if not isinstance(costs, Tensor) or costs.shape != (x.shape[0], y.shape[0]):
        got = f"a result of shape {tuple(costs.shape)}" if isinstance(costs, Tensor) else type(costs).__name__
        rule = f"a function that returns the costs ({x.shape[0]}, {y.shape[0]}) of these lengths"
        raise ShapeError(message("cost", got, rule, "return one cost per pair"))
    return costs.reshape(-1)


@torch.library.custom_op("raglane::soft_dtw", mutates_args=())
def _soft_minimum(costs: Tensor, left: Tensor, right: Tensor, sizes: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return the soft minimum of each item ``(B,)``, and that over the paths to each pair ``(P,)``."""
    if costs.is_cpu and missing_kernels() is None:
        totals = (int(left[-1]), int(right[-1]))
        reach = kernels.soft_dtw(costs, left, right, totals, gamma)
    else:
        reach = _by_diagonals(costs, sizes, gamma)
    counts = sizes.prod(1)
    ends = (segments.offsets_from_lengths(counts)[1:] - 1).clamp(min=0).to(costs.device)
    empty = torch.where((sizes == 0).all(1), 0.0, math.inf).to(costs)
    found = reach[ends] if reach.shape[0] else empty
    return torch.where((counts > 0).to(costs.device), found, empty), reach


@_soft_minimum.register_fake
def _(costs: Tensor, left: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:  # noqa: ARG001
    return costs.new_empty(left.shape[0] - 1), torch.empty_like(costs)


@torch.library.custom_op("raglane::soft_dtw_shares", mutates_args=())
def _shares(costs: Tensor, left: Tensor, right: Tensor, sizes: Tensor, gamma: float, reach: Tensor) -> Tensor:
    """Return the derivative of the soft minimum of its item with respect to each cost ``(P,)``."""
    if costs.is_cpu and missing_kernels() is None:
        return kernels.soft_dtw(costs, left, right, (int(left[-1]), int(right[-1])), gamma, reach)
    return _by_diagonals(costs, sizes, gamma, reach)


@_shares.register_fake
def _(costs: Tensor, *rest: Any) -> Tensor:  # noqa: ARG001
    return torch.empty_like(costs)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.gamma = inputs
    ctx.save_for_backward(*tensors, output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    costs, left, right, sizes, reach = ctx.saved_tensors
    shares = _shares(costs, left, right, sizes, ctx.gamma, reach)
    offsets = segments.offsets_from_lengths(sizes.prod(1)).to(costs.device)
    return shares * segments.spread(grad, offsets, costs.shape[0]), None, None, None, None


_soft_minimum.register_autograd(_gradient, setup_context=_save)


def _by_diagonals(costs: Tensor, sizes: Tensor, gamma: float, reach: Tensor | None = None) -> Tensor:
    """Compute the operators in torch, a diagonal of the tables of all items at a time; with ``reach`` the shares."""
    total = costs.shape[0]
    offsets = segments.offsets_from_lengths(sizes.prod(1))
    place = segments.positions(offsets, total)
    rows, columns = (segments.spread(part, offsets, total) for part in sizes.unbind(1))
    row, column = place // columns, place % columns
    at, diagonal = torch.arange(total), row + column
    steps = torch.stack([columns, torch.ones_like(at), columns + 1])
    if reach is None:
        exists = torch.stack([row > 0, column > 0, (row > 0) & (column > 0)])
        near = torch.where(exists, at - steps, total)
        near[2, place == 0] = total + 1
    else:
        exists = torch.stack([row + 1 < rows, column + 1 < columns, (row + 1 < rows) & (column + 1 < columns)])
        near = torch.where(exists, at + steps, total)
    groups = diagonal.argsort(stable=True).split(torch.bincount(diagonal).tolist())
    near = near.to(costs.device)
    # Two more numbers, for a neighbour that does not exist, and for the begin of a path.
    if reach is None:
        result = torch.cat([costs, costs.new_tensor([math.inf, 0.0])])
        for group in groups:
            here = group.to(costs.device)
            before = torch.logsumexp(-result[near[:, here]] / gamma, 0) * -gamma
            result[here] = costs[here] + before
        return result[:total]
    is_last = (place == rows * columns - 1).to(costs.device) & (reach != math.inf)
    result, extended = torch.cat([is_last.to(costs), costs.new_zeros(1)]), torch.cat([reach, reach.new_zeros(1)])
    arriving = torch.cat([costs, costs.new_zeros(1)])
    for group in reversed(groups):
        here = group.to(costs.device)
        then = near[:, here]
        chance = ((extended[then] - arriving[then] - reach[here]) / gamma).exp()
        result[here] += torch.where(result[then] == 0, 0.0, result[then] * chance).sum(0)
    return result[:total]


# -- edit distance -----------------------------------------------------------------------------------------------------


class Edits(NamedTuple):
    """Counts ``(B,)`` int64 of the edits that make each reference its hypothesis, and the lengths of the references."""

    insertions: Tensor
    deletions: Tensor
    substitutions: Tensor
    lengths: Tensor

    @property
    def total(self) -> Tensor:
        """The edit distance of each item, ``(B,)``."""
        return self.insertions + self.deletions + self.substitutions

    @property
    def rate(self) -> float:
        """The sum of all edits divided by the sum of the lengths: the error rate, e.g. of words or characters.

        Without tokens in the references it is 0 for no edits, and else ``inf``.
        """
        edits, length = int(self.total.sum()), int(self.lengths.sum())
        return edits / length if length else math.inf if edits else 0.0


def edit_distance(hypotheses: Ragged, references: Ragged) -> Edits:
    """Return the edit distance of sequences of tokens, as counts of insertions, deletions and substitutions.

    The distance is that of Levenshtein, "Binary codes capable of correcting deletions, insertions and reversals", 1966.
    Several sets of edits may have its number; of these, the last edit is a substitution or none if possible, otherwise
    a deletion, otherwise an insertion, and so on for the edits before. The counts are computed on the CPU.

    Args:
        hypotheses: B sequences of tokens, ``(N,)`` of an integer dtype, e.g. ``Hypotheses.best()``.
        references: B sequences of the true tokens. Lengths of 0 are legal.

    Returns:
        A named tuple of ``insertions`` (tokens that only the hypothesis has), ``deletions``, ``substitutions`` and
        ``lengths``, ``(B,)`` int64 on the CPU, with the properties ``total``, the distances, and ``rate``, the word or
        character error rate: the sum of all edits divided by the sum of the lengths of the references.

    Raises:
        ArgumentTypeError: an argument is not a Ragged of integers.
        ShapeError: numbers of sequences differ.

    Example:
        >>> edits = edit_distance(Ragged([[1, 2, 4], [5]]), Ragged([[1, 2, 3, 4], [6]]))
        >>> edits.deletions.tolist(), edits.substitutions.tolist(), edits.rate
        ([1, 0], [0, 1], 0.4)
    """
    left, right = as_tokens("hypotheses", hypotheses), as_tokens("references", references)
    _check_both(left, right, ("hypotheses", "references"))
    if missing_kernels() is None:
        counts = kernels.edits(left.values, left.offsets, right.values, right.offsets)
    else:
        pairs = zip(left.to_list(), right.to_list(), strict=True)
        counts = torch.tensor([_count(x.tolist(), y.tolist()) for x, y in pairs], dtype=torch.int64).view(-1, 3)
    insertions, deletions, substitutions = counts.unbind(1)
    return Edits(insertions, deletions, substitutions, right.lengths)


def _count(left: list[int], right: list[int]) -> tuple[int, int, int]:
    """Return the insertions, deletions and substitutions of one item."""
    line = [(0, column, 0) for column in range(len(right) + 1)]
    for token in left:
        before, line = line, [(line[0][0] + 1, 0, 0)]
        for column, wanted in enumerate(right):
            (i, d, s), (i2, d2, s2), (i3, d3, s3) = before[column], line[-1], before[column + 1]
            ways = ((i, d, s + (token != wanted)), (i2, d2 + 1, s2), (i3 + 1, d3, s3))
            line.append(min(ways, key=sum))
    return line[-1]
