"""Connectionist temporal classification on ragged batches: forward and backward variables without
padding.

The equations are those of Graves et al. 2006, "Connectionist temporal classification: labelling
unsegmented sequence data with recurrent neural networks", section 4. A target of L labels has ``2 L
+ 1`` states: a blank, then each label followed by a blank. At each step a path stays in its state,
moves to the next, or skips a blank between two different labels, and emits the label of its state.

NOTE [lattice]: the states of all sequences are stored flat, those of the sequences with the most
steps first. So the states of the sequences with a step t are the first ``alive[t]``, and one step
of all sequences is a few operations on slices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import check_flag, check_whole
from raglane._utils.messages import quote
from raglane._utils.operators import operator
from raglane._utils.tracing import is_jit_traced, is_transformed, records_operators
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.losses.comparison import (
    LabelReduction,
    check_label_reduction,
    check_predictions,
    check_untransformed,
    once,
    reduce_per_label,
    sequence_weights,
    wide,
)
from raglane.ragged import Ragged
from raglane.segments import conjugate

_NEVER = float("-inf")  # the logarithm of probability 0
LARGEST_SUM = 1.05  # of the probabilities of an element: in bfloat16, rounding gives up to 1.03
_BLOCK = 2**18  # numbers whose exponentials are in memory at a time


def ctc_loss(
    log_probs: Ragged,
    targets: Ragged,
    blank: int = 0,
    *,
    zero_infinity: bool = False,
    sample_weight: Tensor | None = None,
    reduction: LabelReduction = "mean",
) -> Tensor:
    """Return minus the log-probability of each target, over all its alignments with its sequence.

    Time and memory are proportional to the sum over sequences of steps times ``2 L + 1``. The host
    needs the lengths, and waits for a GPU if only the GPU has them. The loss can be differentiated
    once.

    Args:
        log_probs: ``(N, C)``, floating-point: log-probabilities, e.g. ``torch.log_softmax(logits,
            dim=-1)``. The probabilities of an element may sum to less than 1. The gradient is the
            one with respect to these numbers, normalised or not.
        targets: one sequence of L labels per sequence, of an integer dtype, from 0 to C - 1 without
            the blank. Their lengths may be 0.
        blank: the label that means "no label".
        zero_infinity: True to make the loss of a sequence 0 instead of infinite if it has too few
            steps for its labels. Its gradient is 0 either way.
        sample_weight: ``(B,)``, one number of at least 0 per sequence. With 0, even a NaN in the sequence
            has no effect.
        reduction: as in torch. ``"mean"``: each loss is divided by the number of its labels, at
            least 1, and averaged over the sequences, by their weights. ``"sum"``: the sum.
            ``"none"``: the loss of each sequence, times its weight.

    Returns:
        A 0-d tensor of the dtype of ``log_probs``, or ``(B,)`` for the reduction ``"none"``.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind or dtype.
        ShapeError: shapes, numbers of sequences or devices do not match.
        ArgumentError: the blank does not exist, or the reduction is unknown; on a CPU, a label does
            not exist, a weight is negative or not finite, or, outside of graphs, the probabilities
            of an element sum to more than 1.05.

    Example:
        >>> even = Ragged([torch.full((2, 2), 0.5).log(), torch.full((1, 2), 0.5).log()])
        >>> ctc_loss(even, Ragged([[1], [1]]), reduction="none").exp().tolist()  # 3 of 4 paths; 1 of 2
        [1.333..., 2.0]
    """
    check_label_reduction(reduction)
    check_flag("zero_infinity", zero_infinity)
    check_predictions("log_probs", log_probs)
    blank = check_whole("blank", blank)
    check_blank(log_probs, blank)
    check_labels(targets, log_probs, "log_probs")
    check_classes(targets, log_probs.values.shape[1], blank)
    check_untransformed("ctc_loss", "log_probs", [log_probs.values])
    values = log_probs.values.to(wide(log_probs.dtype))
    if values.is_cpu and not (
        records_operators() or is_jit_traced() or is_transformed(log_probs.values)
    ):
        sums = sums_of(values)
        if sample_weight is not None:
            ignored = sequence_weights(sample_weight, log_probs) == 0
            sums = sums.masked_fill(segments.spread(ignored, log_probs.offsets, len(sums)), 0)
        check_sums(log_probs, sums)
    shares = values.new_ones(log_probs._count)
    if sample_weight is not None:
        shares = sequence_weights(sample_weight, log_probs)
        without = segments.spread(shares == 0, log_probs.offsets, values.shape[0])
        values = values.masked_fill(without.unsqueeze(1), 0)
    labelled = targets.values.long(), targets.offsets, targets.lengths_cpu
    # A trace may later run with gradients.
    need_shares = is_jit_traced() or (torch.is_grad_enabled() and values.requires_grad)
    losses: Tensor
    losses, _ = _align(
        values, log_probs.offsets, log_probs.lengths_cpu, *labelled, blank, need_shares
    )
    if zero_infinity:
        losses = losses.masked_fill(losses == -_NEVER, 0)
    return reduce_per_label(losses, shares, targets.lengths, reduction).to(log_probs.dtype)


def check_blank(log_probs: Ragged, blank: int) -> None:
    """Raise if the classes are not the only dimension of an element, or the blank is not a
    class.
    """
    if log_probs.values.dim() != 2 or not 0 <= blank < log_probs.values.shape[1]:
        got = f"elements of shape {tuple(log_probs.feature_shape)}, blank {quote(blank)}"
        rule = "one log-probability per label, (N, C), with a blank of the C labels"
        fix = "make the labels the only dimension of an element, and pass a blank from 0 to C - 1"
        raise ArgumentError("log_probs, blank", got, rule, fix)


def sums_of(log_probs: Tensor) -> Tensor:
    """Return the sum of the probabilities of each element, ``(N,)``, of ``(N, C)`` on the CPU."""
    rows, classes = log_probs.shape
    count = max(1, _BLOCK // classes)
    log_probs = log_probs.detach()
    if rows <= count:
        return log_probs.exp().sum(1)
    sums = log_probs.new_empty(rows)
    scratch = log_probs.new_empty(count, classes)
    for start in range(0, rows, count):
        block = log_probs[start : start + count]
        chances = torch.exp(block, out=scratch[: block.shape[0]])
        torch.sum(chances, 1, out=sums[start : start + count])
    return sums


def check_sums(log_probs: Ragged, sums: Tensor) -> None:
    """Raise if the probabilities of an element sum to more than 1; NaN is ignored."""
    is_wrong = sums > LARGEST_SUM
    if not bool(is_wrong.any()):
        return
    wrong = is_wrong.nonzero()[:, 0].tolist()
    offsets = log_probs._host_offsets()
    element = wrong[0]
    sequence = int(torch.searchsorted(offsets, element, right=True)) - 1
    step = element - int(offsets[sequence])
    got = f"a sum of {float(sums[element]):.4g} in step {step} of sequence {sequence}"
    more = f", and {len(wrong) - 1} more such" if len(wrong) > 1 else ""
    rule = "log-probabilities, whose exponentials sum to at most 1 in each step"
    fix = "pass logits through torch.log_softmax(logits, dim=-1)"
    raise ArgumentError("log_probs", got + more, rule, fix)


def check_labels(targets: Any, batch: Ragged, name: str) -> None:
    """Raise if targets are not one sequence of labels per sequence of a batch, the argument
    ``name``.
    """
    is_labels = isinstance(targets, Ragged) and not (
        targets.dtype.is_floating_point or targets.dtype.is_complex
    )
    if not is_labels or targets.dtype is torch.bool:
        got = str(targets.dtype) if isinstance(targets, Ragged) else type(targets).__name__
        fix = "wrap them with rl.Ragged(list_of_labels)"
        raise ArgumentTypeError("targets", got, "a Ragged of labels, of an integer dtype", fix)
    if targets.values.dim() != 1 or len(targets) != len(batch) or targets.device != batch.device:
        got = f"{len(targets)} sequences of elements of shape {tuple(targets.feature_shape)} on {targets.device}"
        rule = f"one sequence of labels for each of the {len(batch)} sequences of {name}, on {batch.device}"
        fix = f"pass a Ragged (N,) with one sequence, possibly empty, per sequence of {name}, moved with .to()"
        raise ShapeError("targets", got, rule, fix)


def check_classes(targets: Ragged, classes: int, blank: int, role: str = "blank") -> None:
    """Raise if a label on a CPU is not one of the classes, or is the blank, which may have another
    role.
    """
    if targets.values.is_cpu and not torch.compiler.is_compiling():
        wrong = (targets.values < 0) | (targets.values >= classes) | (targets.values == blank)
        if bool(wrong.any()):
            rule = f"from 0 to {classes - 1}, except the {role}, {blank}"
            fix = "check how the labels are numbered"
            raise ArgumentError("targets", f"label {int(targets.values[wrong][0])}", rule, fix)


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """The S states of the targets of B sequences; see NOTE [lattice]."""

    alive: list[int]  # for each step, the number of states of sequences with that step
    order: Tensor  # ``(B,)`` the sequences in the order of their states
    offsets: Tensor  # ``(B + 1,)`` the first state of each
    owner: Tensor  # ``(S,)`` the sequence of each state, in the caller's order
    emission: (
        Tensor  # ``(S,)`` the index of a state's label in the flat log-probabilities of step 0
    )
    final: Tensor  # ``(S,)`` True if a path may end in the state
    is_first: Tensor  # ``(S,)`` True for the first state of a sequence
    bars_skips: Tensor  # ``(S,)`` True if a path cannot come from the state two before


def lattice_of(
    classes: int,
    log_prob_offsets: Tensor,
    steps: Tensor,
    targets: Tensor,
    target_offsets: Tensor,
    labels: Tensor,
    blank: int,
) -> Lattice:
    """Return the states of targets ``(M,)``; ``steps`` and ``labels`` are the lengths of both
    batches on the host.
    """
    host_order = steps.argsort(descending=True, stable=True)
    host_offsets = segments.offsets_from_lengths(2 * labels[host_order] + 1)
    running = torch.from_numpy(conjugate(steps.numpy(), int(steps.max()) if steps.numel() else 0))
    total = int(host_offsets[-1])

    order = host_order.to(targets.device, non_blocking=True)
    offsets = host_offsets.to(targets.device, non_blocking=True)
    owner = segments.spread(order, offsets, total)
    position = segments.positions(offsets, total)
    is_label = position % 2 == 1
    # The blank is appended to the labels, for all states that are blanks.
    index = target_offsets.index_select(0, owner) + position // 2
    index = index.masked_fill(~is_label, targets.shape[0])
    label = torch.cat([targets, targets.new_full((1,), blank)]).index_select(0, index)
    # The condition on the position excludes labels that roll brings from another sequence.
    skips = is_label & (position > 2) & (label != label.roll(2))
    return Lattice(
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
    """Return the logarithm of a sum of three probabilities; masked ones are 0."""
    # Two of logaddexp take a third of the time of one logsumexp over three columns.
    return torch.logaddexp(
        torch.logaddexp(stay, step.masked_fill(no_step, _NEVER)), skip.masked_fill(no_skip, _NEVER)
    )


def _shapes(log_probs: Tensor, offsets: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    losses = log_probs.new_empty(offsets.shape[0] - 1)
    return losses, log_probs.new_empty(log_probs.shape if rest[-1] else 0)


# torch.compile does not look into an operator; it would unroll the loops. The gradient (the shares)
# is computed in the same call, while the forward variables exist; autograd through the loops would
# save several tensors per step.
@operator("raglane::ctc_align", _shapes)
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
    """Return minus the log-probability of each target, ``(B,)``, and the shares, ``(N, C)`` or
    empty if not needed.

    A share is the probability that a path of the target emits a label at a step: minus the
    derivative of the loss.
    """
    lattice = lattice_of(log_probs.shape[1], offsets, steps, targets, target_offsets, labels, blank)
    saved = log_probs.new_empty(sum(lattice.alive) if need_shares else 0)
    losses, emission = _forward(log_probs, lattice, saved)
    return losses, _backward(
        log_probs, lattice, saved, losses, emission
    ) if need_shares else log_probs.new_empty(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], output[1], inputs[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    log_probs, shares, offsets = ctx.saved_tensors
    gradient = shares * segments.spread(-grad, offsets, shares.shape[0]).unsqueeze(1)
    return *once([gradient], "ctc_loss", "log_probs", log_probs), *([None] * 7)


_align.register_autograd(_gradient, setup_context=_setup_context)


def _forward(log_probs: Tensor, lattice: Lattice, saved: Tensor) -> tuple[Tensor, Tensor]:
    """Run the forward pass and write the forward variables to ``saved``, unless it is empty.

    Return the losses, and each state's index into the log-probabilities after its last step, where
    backward begins.
    """
    classes = log_probs.shape[1]
    flat = log_probs.reshape(-1)
    # With two more numbers in front, for the predecessors of the first state.
    padded = flat.new_full((lattice.owner.shape[0] + 2,), _NEVER)
    two_before = padded[:-2]
    before = padded[1:-1]
    alpha = padded[2:]
    # All paths begin in the first state, so that the first step leads to both states in which a
    # path may start.
    alpha.index_fill_(0, lattice.offsets[:-1], 0)
    emission = lattice.emission.clone()
    end = 0
    for alive in lattice.alive:
        arriving = _joined(
            alpha[:alive],
            before[:alive],
            two_before[:alive],
            lattice.is_first[:alive],
            lattice.bars_skips[:alive],
        )
        alpha[:alive] = arriving.add_(flat.index_select(0, emission[:alive]))
        emission[:alive] += classes
        if saved.shape[0]:
            saved[end : end + alive] = alpha[:alive]
        end += alive
    at_end = segments.logsumexp(alpha.masked_fill(~lattice.final, _NEVER), lattice.offsets)
    return torch.empty_like(at_end).index_copy_(0, lattice.order, -at_end), emission


def _backward(
    log_probs: Tensor, lattice: Lattice, saved: Tensor, losses: Tensor, emission: Tensor
) -> Tensor:
    """Run the backward pass and return the shares, from the saved forward variables."""
    classes = log_probs.shape[1]
    flat = log_probs.reshape(-1)
    is_last = lattice.is_first.roll(-1)
    bars_skips = lattice.bars_skips.roll(-2)
    padded = flat.new_full((lattice.owner.shape[0] + 2,), _NEVER)
    onward = padded[:-2]
    after = padded[1:-1]
    two_after = padded[2:]
    beta = torch.zeros_like(onward).masked_fill_(~lattice.final, _NEVER)
    # Impossible targets have no shares: alpha + beta is -inf, and 0 instead of an infinite loss is
    # subtracted.
    whole = losses.masked_fill(losses == -_NEVER, 0).index_select(0, lattice.owner)
    shares = torch.zeros_like(flat)
    end = saved.shape[0]
    for alive in reversed(lattice.alive):
        emission[:alive] -= classes
        here = emission[:alive]
        share = (saved[end - alive : end] + beta[:alive]).add_(whole[:alive]).exp_()
        shares.index_add_(0, here, share)
        onward[:alive] = beta[:alive] + flat.index_select(0, here)
        beta[:alive] = _joined(
            onward[:alive], after[:alive], two_after[:alive], is_last[:alive], bars_skips[:alive]
        )
        end -= alive
    return shares.view_as(log_probs)
