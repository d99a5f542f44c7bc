"""The recursions of a transducer over its alignments, by kernels on a CPU or in plain torch.

The nodes of a sequence with T frames and U labels are (t, u): before frame t and after u labels. A
path leads from (0, 0) to (T, U). From (t, u) a blank leads to (t + 1, u), and label u to (t, u +
1), or to (t + 1, u + 1) if a frame emits one symbol (Graves 2012, "Sequence transduction with
recurrent neural networks", section 2; Tripathi et al. 2019, "Monotonic recurrent neural network
transducer and decoding strategies").

``emissions`` are the log-probabilities of both, values ``(M, 2)``: row ``t * (U + 1) + u`` of its
sequence. A sequence without frames has the empty path if it has no labels, and no path otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.operators import operator
from raglane.kernels.cpu import transduction as kernels
from raglane.native.library import missing_kernels
from raglane.nn.losses.comparison import once

_NEVER = float("-inf")  # the logarithm of probability 0


@dataclass(frozen=True, slots=True, eq=False)
class Alignments:
    """The alignments of the frames and labels of a batch."""

    frames: Tensor  # ``(B,)`` int64 on the CPU: the lengths T
    labels: Tensor  # ``(B,)`` int64 on the CPU: the lengths U
    following: Tensor  # ``(P,)`` int64: the label after each of the U + 1 states of all sequences, then a blank
    blank: int
    one_per_frame: bool
    fastemit: float

    def arguments(self) -> tuple[Tensor, Tensor, bool, float]:
        """Return the arguments of :func:`align` between the first and the last."""
        return self.frames, self.labels, self.one_per_frame, self.fastemit


def _shapes(emissions: Tensor, frames: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return emissions.new_empty(frames.shape[0]), emissions.new_empty(
        emissions.shape if rest[-1] else 0
    )


# torch.compile does not look into an operator; it would unroll the loops.
@operator("raglane::transducer_align", _shapes)
def align(
    emissions: Tensor,
    frames: Tensor,
    labels: Tensor,
    one_per_frame: bool,
    fastemit: float,
    need_shares: bool,
) -> tuple[Tensor, Tensor]:
    """Return minus the log-probability of all paths, ``(B,)``, and shares ``(M, 2)`` if needed.

    ``frames`` and ``labels`` are the lengths T and U on the CPU. A share is minus the derivative of
    the loss, the probability that a path has the emission; those of labels are multiplied by 1 +
    ``fastemit``.
    """
    return align_now(emissions, frames, labels, one_per_frame, fastemit, need_shares)


def align_now(
    emissions: Tensor,
    frames: Tensor,
    labels: Tensor,
    one_per_frame: bool,
    fastemit: float,
    need_shares: bool,
) -> tuple[Tensor, Tensor]:
    """Compute :func:`align` without an operator."""
    run = kernels.align if emissions.is_cpu and missing_kernels() is None else align_in_torch
    losses, shares = run(emissions, frames, labels, one_per_frame, need_shares)
    if need_shares and fastemit:
        shares[:, 1] *= 1 + fastemit
    return losses, shares


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    emissions, ctx.frames, ctx.labels, *_ = inputs
    ctx.save_for_backward(emissions, output[1])


def _gradient(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    emissions, shares = ctx.saved_tensors
    rows = (ctx.frames * (ctx.labels + 1)).to(grad.device, non_blocking=True)
    gradient = shares * segments.repeated(-grad, rows, shares.shape[0]).unsqueeze(1)
    return *once([gradient], "rnnt_loss", "encoder", emissions), *([None] * 5)


align.register_autograd(_gradient, setup_context=_setup_context)


def align_in_torch(
    emissions: Tensor, frames: Tensor, labels: Tensor, one_per_frame: bool, need_shares: bool
) -> tuple[Tensor, Tensor]:
    """Compute :func:`align` in plain torch, stage after stage.

    A stage has the nodes of all sequences with the same t, or t + u if a frame emits several
    symbols, so that all predecessors of a node are in the stage before. Stages have one column per
    u, up to the largest U.
    """
    device = emissions.device
    count = frames.shape[0]
    stages = frames if one_per_frame else frames + labels
    steps = int(stages.max()) if count else 0
    columns = int(labels.max()) if count else 0
    starts = segments.offsets_from_lengths(frames * (labels + 1))[:-1]
    end, frames, labels, starts = (
        numbers.to(device, non_blocking=True)[:, None]
        for numbers in (stages, frames, labels, starts)
    )
    column = torch.arange(columns + 1, device=device)
    frame = torch.arange(steps, device=device)[:, None, None] - (0 if one_per_frame else column)
    exists = (frame >= 0) & (frame < frames) & (column <= labels)
    # A row of -inf follows the emissions, for nodes that do not exist; the last label of a row
    # leads nowhere.
    row = torch.where(exists, starts + frame * (labels + 1) + column, emissions.shape[0])
    padded = torch.cat(
        [emissions.double(), emissions.new_full((1, 2), _NEVER, dtype=torch.float64)]
    )
    blank, label = padded[row].unbind(-1)
    label = label.masked_fill(column == labels, _NEVER)

    at_end = column == labels
    alpha = padded.new_full((count, columns + 1), _NEVER)
    alpha[:, 0] = 0
    alphas = [alpha]
    for stage in range(steps):
        alpha = torch.logaddexp(alpha + blank[stage], _shifted(alpha + label[stage], 1))
        alphas.append(alpha)
    reached = torch.stack(alphas)
    whole = reached[end[:, 0], torch.arange(count, device=device), labels[:, 0]]
    losses = (0 - whole).to(emissions.dtype)
    if not need_shares:
        return losses, emissions.new_empty(0)

    beta = torch.full_like(alpha, _NEVER)
    betas = []
    for stage in reversed(range(steps)):
        beta = beta.masked_fill(at_end & (end == stage + 1), 0)
        ways = torch.stack([beta + blank[stage], _shifted(beta, -1) + label[stage]])
        betas.append(ways)
        beta = torch.logaddexp(*ways)
    # Without a path alpha + beta is -inf, and 0 is subtracted instead of -inf.
    total = whole.masked_fill(whole == _NEVER, 0)[:, None]
    shares = emissions.new_zeros(emissions.shape[0] + 1, 2)
    if steps:
        visits = (reached[:-1, None] + torch.stack(betas[::-1]) - total).exp()
        shares[row] = visits.to(emissions.dtype).movedim(1, -1)
    return losses, shares[:-1]


def _shifted(rows: Tensor, columns: int) -> Tensor:
    """Shift rows ``(B, C)`` to the right, or to the left if negative, and fill with -inf."""
    if columns > 0:
        return torch.nn.functional.pad(rows[:, :-columns], (columns, 0), value=_NEVER)
    return torch.nn.functional.pad(rows[:, -columns:], (0, -columns), value=_NEVER)
