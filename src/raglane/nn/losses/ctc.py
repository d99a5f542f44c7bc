"""Connectionist temporal classification on ragged batches: forward and backward variables, nothing padded.

The equations are those of Graves et al. 2006, "Connectionist temporal classification: labelling unsegmented sequence
data with recurrent neural networks", section 4. A target of L labels has ``2 L + 1`` states: a blank, then each label
followed by a blank. A path goes through them in order, stays in a state or goes on by one, and by two from a label to
the next where the labels differ; in each step it emits the label of its state.

NOTE [lattice]: the states of all sequences lie flat, those of the sequences with the most steps first. So the states
of the sequences that have a step t are the first ``alive[t]``, and one step of all sequences is a few operations on
slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_flag, check_whole
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.losses.comparison import Reduction, check_predictions, check_reduction, ratio, sequence_weights, wide
from raglane.ragged import Ragged
from raglane.segments import conjugate

_NEVER = float("-inf")
"""The logarithm of the probability of what cannot happen."""


def ctc_loss(
    log_probs: Ragged,
    targets: Ragged,
    blank: int = 0,
    *,
    zero_infinity: bool = False,
    weights: Tensor | None = None,
    reduction: Reduction = "element",
) -> Tensor:
    """Minus the log-probability of each target, over all its alignments with its sequence.

    Time and memory grow with the sum over sequences of steps times ``2 L + 1``. The lengths are read on the host, which
    waits for a GPU if it never knew them. It can be differentiated once.

    Args:
        log_probs: ``(N, C)``, floating-point: log-probabilities, for instance ``torch.log_softmax(logits, dim=-1)``.
            The gradient is that with respect to them, for any numbers.
        targets: as many sequences of labels, of an integer dtype, from 0 to C - 1 and none the blank; of their own
            lengths L, 0 included.
        blank: the label that stands for no label.
        zero_infinity: make the loss of a sequence 0 where it has too few steps for its labels; it is infinite
            otherwise. Its gradient is 0 either way.
        weights: ``(B,)``, one number of at least 0 per sequence; where it is 0, not even a NaN reaches the loss.
        reduction: ``"element"``: each label counts once, the sum of the losses divided by the number of labels.
            ``"sequence"``: each sequence counts once, the mean over sequences of their losses by label, which is
            torch's ``"mean"``. In both, a sequence without labels counts as one label, and one without steps and
            labels not at all. ``"none"``: the loss of each sequence, times its weight.

    Returns:
        A 0-d tensor of the dtype of ``log_probs``, or ``(B,)`` where the reduction is ``"none"``.

    Raises:
        ArgumentTypeError: an argument of the wrong kind or dtype.
        ShapeError: shapes, numbers of sequences or devices that do not fit.
        ArgumentError: a blank that does not exist, an unknown reduction; or, looked for on a CPU, a label that does not
            exist or a weight that is not finite or below 0.

    Example:
        >>> even = Ragged([torch.full((2, 2), 0.5).log(), torch.full((1, 2), 0.5).log()])
        >>> ctc_loss(even, Ragged([[1], [1]]), reduction="none").exp().tolist()  # 3 of 4 paths; 1 of 2
        [1.333..., 2.0]
    """
    check_reduction(reduction)
    check_flag("zero_infinity", zero_infinity)
    check_predictions("log_probs", log_probs)
    blank = check_whole("blank", blank)
    _check_targets(log_probs, targets, blank)
    dtype = wide(log_probs.dtype)
    values = log_probs.values.to(dtype)
    shares = values.new_ones(len(log_probs))
    if weights is not None:
        shares = sequence_weights(weights, log_probs)
        without = segments.spread(shares == 0, log_probs.offsets, values.shape[0])
        values = values.masked_fill(without.unsqueeze(1), 0)
    labelled = targets.values.long(), targets.offsets, targets.host_lengths
    need_shares = torch.is_grad_enabled() and values.requires_grad
    losses: Tensor
    losses, _ = _align(values, log_probs.offsets, log_probs.host_lengths, *labelled, blank, need_shares)
    if zero_infinity:
        losses = losses.masked_fill(losses == -_NEVER, 0)
    # A weight of 0 times an infinite loss would be NaN.
    weighted = losses.masked_fill(shares == 0, 0) * shares
    if reduction == "none":
        return weighted.to(log_probs.dtype)
    labels = torch.maximum(targets.lengths, log_probs.lengths.clamp(max=1))
    if reduction == "element":
        return ratio(weighted.sum(), (labels * shares).sum()).to(log_probs.dtype)
    means = ratio(weighted, labels.to(dtype))
    return ratio(means.sum(), (labels.clamp(max=1) * shares).sum()).to(log_probs.dtype)


def _check_targets(log_probs: Ragged, targets: Any, blank: int) -> None:
    if log_probs.values.dim() != 2 or not 0 <= blank < log_probs.values.shape[1]:
        got = f"elements of shape {tuple(log_probs.features)}, blank {quote(blank)}"
        rule = "one log-probability per label, (N, C), with a blank of the C labels"
        fix = "put the labels in the only feature dimension, and pass a blank from 0 to C - 1"
        raise ArgumentError(message("log_probs, blank", got, rule, fix))
    is_labels = isinstance(targets, Ragged) and not (targets.dtype.is_floating_point or targets.dtype.is_complex)
    if not is_labels or targets.dtype is torch.bool:
        got = str(targets.dtype) if isinstance(targets, Ragged) else type(targets).__name__
        fix = "wrap them with rl.Ragged(list_of_labels)"
        raise ArgumentTypeError(message("targets", got, "a Ragged of labels, of an integer dtype", fix))
    if targets.values.dim() != 1 or len(targets) != len(log_probs) or targets.device != log_probs.device:
        got = f"{len(targets)} sequences of elements of shape {tuple(targets.features)} on {targets.device}"
        rule = f"one sequence of labels for each of the {len(log_probs)} sequences of log_probs, on {log_probs.device}"
        fix = "pass a Ragged (N,) of that many sequences, on that device; sequences may be empty"
        raise ShapeError(message("targets", got, rule, fix))
    if targets.values.is_cpu and not torch.compiler.is_compiling():
        wrong = (targets.values < 0) | (targets.values >= log_probs.values.shape[1]) | (targets.values == blank)
        if bool(wrong.any()):
            rule = f"from 0 to {log_probs.values.shape[1] - 1}, except the blank, {blank}"
            fix = "check how the labels are numbered"
            raise ArgumentError(message("targets", f"label {int(targets.values[wrong][0])}", rule, fix))


@dataclass(frozen=True, slots=True, eq=False)
class _Lattice:
    """The states of all targets; see NOTE [lattice]. S of them, of B sequences."""

    alive: list[int]  # for each step, how many states belong to sequences that have it
    order: Tensor  # ``(B,)`` the sequences in the order of their states
    offsets: Tensor  # ``(B + 1,)`` where the states of each start
    owner: Tensor  # ``(S,)`` the sequence of each state, in the caller's numbers
    emission: Tensor  # ``(S,)`` where in the flat log-probabilities a state finds its label at step 0
    final: Tensor  # ``(S,)`` whether a path may end here
    is_first: Tensor  # ``(S,)`` whether it is the first state of its sequence, which no other leads to
    bars_skips: Tensor  # ``(S,)`` whether no path comes from the state two before


def _lattice(
    classes: int,
    log_prob_offsets: Tensor,
    steps: Tensor,
    targets: Tensor,
    target_offsets: Tensor,
    labels: Tensor,
    blank: int,
) -> _Lattice:
    """The states of targets ``(M,)``, from the offsets of both batches and, on the host, their lengths."""
    host_order = steps.argsort(descending=True, stable=True)
    host_offsets = segments.offsets_from_lengths(2 * labels[host_order] + 1)
    running = torch.from_numpy(conjugate(steps.numpy(), int(steps.max()) if steps.numel() else 0))
    total = int(host_offsets[-1])

    order = host_order.to(targets.device, non_blocking=True)
    offsets = host_offsets.to(targets.device, non_blocking=True)
    owner = segments.spread(order, offsets, total)
    position = segments.positions(offsets, total)
    is_label = position % 2 == 1
    # One more label, the blank, for every state that is a blank.
    place = target_offsets.index_select(0, owner) + position // 2
    place = place.masked_fill(~is_label, targets.shape[0])
    label = torch.cat([targets, targets.new_full((1,), blank)]).index_select(0, place)
    # What roll brings from beyond the start of a sequence is ruled out by the position.
    skips = is_label & (position > 2) & (label != label.roll(2))
    return _Lattice(
        alive=host_offsets[running].tolist(),
        order=order,
        offsets=offsets,
        owner=owner,
        emission=log_prob_offsets.index_select(0, owner) * classes + label,
        final=position >= segments.spread(offsets.diff() - 2, offsets, total),
        is_first=position == 0,
        bars_skips=~skips,
    )


def _joined(stay: Tensor, step: Tensor, skip: Tensor, no_step: Tensor, no_skip: Tensor) -> Tensor:
    """The logarithm of the sum of three probabilities, of which some cannot be, whatever the tensors hold there."""
    # Two of logaddexp take a third of the time of one logsumexp over three columns.
    return torch.logaddexp(torch.logaddexp(stay, step.masked_fill(no_step, _NEVER)), skip.masked_fill(no_skip, _NEVER))


# NOTE [operator]: torch.compile puts an operator into its graph as it is; the loops it would unroll. To differentiate
# them step by step would keep several tensors per step. The shares come at once, while the forward variables are
# there, and are all that is kept.
@torch.library.custom_op("raglane::ctc_align", mutates_args=())
def _align(
    log_probs: Tensor,
    offsets: Tensor,
    steps: Tensor,
    targets: Tensor,
    target_offsets: Tensor,
    labels: Tensor,
    blank: int,
    need_shares: bool,
) -> tuple[Tensor, Tensor]:
    """Sum over all paths: minus the logarithm of the probability of each target, ``(B,)``, and the shares, ``(N, C)``.

    A share is the probability that a path of the target emits a label at a step, which is minus the derivative; without
    rows where it is not needed.
    """
    lattice = _lattice(log_probs.shape[1], offsets, steps, targets, target_offsets, labels, blank)
    kept = log_probs.new_empty(sum(lattice.alive) if need_shares else 0)
    losses, emission = _forward(log_probs, lattice, kept)
    shares = _backward(log_probs, lattice, kept, losses, emission) if need_shares else log_probs.new_empty(0)
    return losses, shares


@_align.register_fake
def _(log_probs: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    losses = log_probs.new_empty(offsets.shape[0] - 1)
    return losses, log_probs.new_empty(log_probs.shape if rest[-1] else 0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    log_probs, shares, offsets = ctx.saved_tensors
    gradient: Tensor = shares * segments.spread(-grad, offsets, shares.shape[0]).unsqueeze(1)
    if torch.is_grad_enabled():  # create_graph: the gradient may be differentiated again
        gradient = _Once.apply(gradient, log_probs)  # type: ignore[no-untyped-call]
    return gradient, *([None] * 7)


_align.register_autograd(_gradient, setup_context=_setup_context)


def _forward(log_probs: Tensor, lattice: _Lattice, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The forward variables, step after step, written to ``kept`` if it has room; the losses.

    Besides, where each state would find its label one step after its last, which is where the backward pass starts.
    """
    classes, flat = log_probs.shape[1], log_probs.reshape(-1)
    # Two numbers in front, for what would come before the first state.
    padded = flat.new_full((lattice.owner.shape[0] + 2,), _NEVER)
    two_before, before, alpha = padded[:-2], padded[1:-1], padded[2:]
    # Before the first step a path stands in the first state, from where the rule of every step leads into the two
    # states that paths start in.
    alpha.index_fill_(0, lattice.offsets[:-1], 0)
    emission, end = lattice.emission.clone(), 0
    for alive in lattice.alive:
        arriving = _joined(
            alpha[:alive], before[:alive], two_before[:alive], lattice.is_first[:alive], lattice.bars_skips[:alive]
        )
        alpha[:alive] = arriving.add_(flat.index_select(0, emission[:alive]))
        emission[:alive] += classes
        if kept.shape[0]:
            kept[end : end + alive] = alpha[:alive]
        end += alive
    at_end = segments.logsumexp(alpha.masked_fill(~lattice.final, _NEVER), lattice.offsets)
    return torch.empty_like(at_end).index_copy_(0, lattice.order, -at_end), emission


def _backward(log_probs: Tensor, lattice: _Lattice, kept: Tensor, losses: Tensor, emission: Tensor) -> Tensor:
    """The backward variables, from the last step to the first, and with the forward ones the shares of the paths."""
    classes, flat = log_probs.shape[1], log_probs.reshape(-1)
    is_last, bars_skips = lattice.is_first.roll(-1), lattice.bars_skips.roll(-2)
    padded = flat.new_full((lattice.owner.shape[0] + 2,), _NEVER)
    onward, after, two_after = padded[:-2], padded[1:-1], padded[2:]
    beta = torch.zeros_like(onward).masked_fill_(~lattice.final, _NEVER)
    # No path has a share in a target that cannot be: its alpha plus beta is -inf, less anything finite.
    whole = losses.masked_fill(losses == -_NEVER, 0).index_select(0, lattice.owner)
    shares, end = torch.zeros_like(flat), kept.shape[0]
    for alive in reversed(lattice.alive):
        emission[:alive] -= classes
        here = emission[:alive]
        share = (kept[end - alive : end] + beta[:alive]).add_(whole[:alive]).exp_()
        shares.index_add_(0, here, share)
        onward[:alive] = beta[:alive] + flat.index_select(0, here)
        beta[:alive] = _joined(onward[:alive], after[:alive], two_after[:alive], is_last[:alive], bars_skips[:alive])
        end -= alive
    return shares.view_as(log_probs)


class _Once(torch.autograd.Function):
    """A gradient, tied to what it was computed from, so that to differentiate it again is an error.

    ``once_differentiable`` would not do: where the loss alone is differentiated it lets a second derivative pass, in
    which the terms from here are missing.
    """

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, log_probs: Tensor) -> Tensor:  # noqa: ARG004
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        rule = "differentiated only once, as in torch"
        fix = "leave out create_graph=True, or penalise another loss"
        raise ArgumentError(message("log_probs", "a second derivative", rule, fix))
