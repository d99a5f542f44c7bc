"""A transducer's loss with a linear joint on a CPU, and its gradients, sequence by sequence.

The logits of a tile of frames are a product of ``tanh(frame + state)`` with the weights of the
joint. Sequences are processed in groups: their log-probabilities, then the recursions, then the
gradients. Log-probabilities of a group that fits in ``_STORED`` bytes are stored for the gradients, and
those of a longer sequence are computed twice.

NOTE [band]: a row, i.e. a frame and a state, contributes to gradients by its share, the probability
that a path visits it. The shares of a frame and of a state add up to at least 1. So gradients are
computed from the range of states whose shares in a tile exceed 2 ** -40 (2 ** -80 in float64), and
the other rows would only change their rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane._utils.tracing import are_transformed, has_tangent, records_operators
from raglane.native.library import missing_kernels
from raglane.nn.losses.comparison import once
from raglane.nn.transduction.lattice import Alignments, align_now

_STORED = 128 * 2**20
# The most rows of a tile, enough for products at full speed; at least those of one frame.
_ROWS = 2048
# The most numbers of a tile of more than 256 rows.
_NUMBERS = 2**22
_NEGLIGIBLE = {torch.float32: 2.0**-40, torch.float64: 2.0**-80}


def supports(values: list[Tensor], joint: torch.nn.Linear) -> bool:
    """Return True for a plain linear layer of the dtype of frames and states, on a CPU."""
    if type(joint) is not torch.nn.Linear or joint._forward_hooks or joint._forward_pre_hooks:
        return False
    tensors = [*values, *joint.parameters()]
    dtype = values[0].dtype
    return (
        all(tensor.is_cpu and tensor.dtype is dtype for tensor in tensors)
        and dtype in _NEGLIGIBLE
        and not records_operators()
        and not has_tangent(tensors)
        and not are_transformed(tensors)
        and missing_kernels() is None
    )


def losses(
    values: list[Tensor],
    joint: torch.nn.Linear,
    alignments: Alignments,
    scales: Tensor | None = None,
) -> Tensor:
    """Return the loss of each sequence, ``(B,)``.

    With ``scales`` ``(B,)`` the losses are multiplied by them, and gradients are computed with the
    losses. Only the sum of the result may then be differentiated.
    """
    bias = joint.weight.new_zeros(joint.out_features) if joint.bias is None else joint.bias
    inputs = *values, joint.weight, bias
    needed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    return _Losses.apply(*inputs, alignments, scales, needed)  # type: ignore[no-untyped-call]


class _Losses(torch.autograd.Function):
    """See :func:`losses`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *inputs, ctx.alignments, scales, needed = args
        ctx.is_scaled = scales is not None
        results, gradients = _compute(
            _Joint(*inputs), ctx.alignments, scales, needed and ctx.is_scaled
        )
        ctx.save_for_backward(*inputs, *gradients)
        # Infinity times 0 would be NaN.
        return results if scales is None else results.masked_fill(scales == 0, 0) * scales

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # Read once, as in kernels/program/backend.py.
        inputs = saved[:4]
        gradients = saved[4:]
        with torch.no_grad():
            if not ctx.is_scaled:
                _, gradients = _compute(_Joint(*inputs), ctx.alignments, upstream, True)
            elif upstream.shape[0]:  # all its numbers are equal
                gradients = [upstream.amax() * gradient for gradient in gradients]
        return *once(gradients, "rnnt_loss", "encoder", *inputs), None, None, None


class _Joint(NamedTuple):
    """The tensors from which logits are computed, or their gradients."""

    frames: Tensor  # ``(N, H)``, or ``(T, H)`` of a sequence
    states: Tensor  # ``(P, H)``, or ``(U + 1, H)`` of a sequence
    weight: Tensor  # ``(C, H)``
    bias: Tensor  # ``(C,)``

    def sequences(self, alignments: Alignments) -> list[_Joint]:
        """Return the parts of each sequence, as views."""
        frames = self.frames.split(alignments.frames.tolist())
        states = self.states.split((alignments.labels + 1).tolist())
        return [_Joint(*pair, self.weight, self.bias) for pair in zip(frames, states, strict=True)]

    def hidden(self, frames: slice, states: slice, out: Tensor) -> Tensor:
        """Return ``tanh(frame + state)`` of all pairs, ``(rows, H)``."""
        first = self.frames[frames].unsqueeze(1)
        second = self.states[states].unsqueeze(0)
        rows = out[: first.shape[0] * second.shape[1]]
        torch.add(first, second, out=rows.view(first.shape[0], *second.shape[1:])).tanh_()
        return rows

    def scores(self, hidden: Tensor, logits: Tensor, out: Tensor) -> Tensor:
        """Return the log-probabilities of rows, ``(rows, C)``; ``logits`` is scratch."""
        torch.addmm(self.bias, hidden, self.weight.t(), out=logits[: hidden.shape[0]])
        return torch.log_softmax(logits[: hidden.shape[0]], 1, out=out[: hidden.shape[0]])


def _compute(
    joint: _Joint, alignments: Alignments, scales: Tensor | None, need_gradients: bool
) -> tuple[Tensor, Sequence[Tensor]]:
    """Return the losses ``(B,)``, and the gradients of their sum times ``scales`` if needed.

    With ``scales``, sequences of scale 0 are omitted, and have the loss 0.
    """
    states = alignments.labels + 1
    rows = alignments.frames * states
    classes, size = joint.weight.shape
    gradients = _Joint(*map(torch.zeros_like, joint)) if need_gradients else None
    results = joint.weight.new_zeros(rows.shape[0])
    # The rows of a tile of each sequence.
    tiles = torch.minimum((_most_rows(classes) // states).clamp(min=1), alignments.frames) * states
    most = int(tiles.max()) if rows.shape[0] else 0
    scratch = _Scratch(
        joint.weight.new_empty(2, most, size), joint.weight.new_empty(2, most, classes)
    )
    room = _STORED // (classes * joint.weight.itemsize)
    used = torch.arange(rows.shape[0], device="cpu")
    if scales is not None:
        used = scales.nonzero().view(-1)
    groups = list(_groups(rows[used].tolist(), room))
    largest = max((total for *_, total in groups if total <= room), default=0)
    log_probs = joint.weight.new_empty(largest, classes)
    sequences = joint.sequences(alignments)
    gradients_of = gradients.sequences(alignments) if gradients is not None else []
    following = alignments.following.split(states.tolist())
    for begin, end, total in groups:
        group = used[begin:end]
        emissions = joint.weight.new_empty(total, 2)
        sizes = rows[group].tolist()
        stores: Sequence[Tensor | None] = [None] * len(sizes)
        if need_gradients and total <= room:
            stores = log_probs[:total].split(sizes)
        for index, store, pairs in zip(group.tolist(), stores, emissions.split(sizes), strict=True):
            _emit(sequences[index], following[index], alignments.blank, scratch, store, pairs)
        lengths = alignments.frames[group], alignments.labels[group]
        results[group], shares = align_now(
            emissions, *lengths, alignments.one_per_frame, alignments.fastemit, need_gradients
        )
        if scales is None or not need_gradients:
            continue
        for index, store, pairs in zip(group.tolist(), stores, shares.split(sizes), strict=True):
            _add_gradients(
                sequences[index],
                gradients_of[index],
                following[index],
                alignments.blank,
                scratch,
                store,
                pairs,
                scales[index],
            )
    return results, gradients or ()


class _Scratch(NamedTuple):
    """Memory of two tiles of hidden rows, and of two of logits."""

    hidden: Tensor  # ``(2, rows, H)``
    logits: Tensor  # ``(2, rows, C)``


def _groups(sizes: list[int], room: int) -> Iterator[tuple[int, int, int]]:
    """Yield begin, end and total of adjacent sizes of at most ``room``, or of a larger one."""
    begin = 0
    total = 0
    for index, size in enumerate(sizes):
        if total + size > room and index > begin:
            yield begin, index, total
            begin = index
            total = 0
        total += size
    if sizes:
        yield begin, len(sizes), total


def _most_rows(classes: int) -> int:
    """Return the most rows of a tile; nothing else counts, so that a loss has the same bits."""
    return min(_ROWS, max(_NUMBERS // classes, 256))


def _tiles(joint: _Joint) -> Iterator[slice]:
    """Yield the frames of each tile of a sequence."""
    count = joint.frames.shape[0]
    step = max(_most_rows(joint.bias.shape[0]) // joint.states.shape[0], 1)
    for begin in range(0, count, step):
        yield slice(begin, min(begin + step, count))


def _emit(
    joint: _Joint,
    following: Tensor,
    blank: int,
    scratch: _Scratch,
    store: Tensor | None,
    emissions: Tensor,
) -> None:
    """Write a sequence's emissions ``(T * (U + 1), 2)``, and log-probabilities to ``store``."""
    states = joint.states.shape[0]
    classes = joint.bias.shape[0]
    for frames in _tiles(joint):
        rows = slice(frames.start * states, frames.stop * states)
        hidden = joint.hidden(frames, slice(None), scratch.hidden[0])
        scores = joint.scores(
            hidden, scratch.logits[0], scratch.logits[1] if store is None else store[rows]
        )
        emissions[rows, 0] = scores[:, blank]
        index = following.view(1, states, 1).expand(frames.stop - frames.start, states, 1)
        emissions[rows, 1] = scores.view(-1, states, classes).gather(2, index).view(-1)


def _add_gradients(
    joint: _Joint,
    gradients: _Joint,
    following: Tensor,
    blank: int,
    scratch: _Scratch,
    store: Tensor | None,
    shares: Tensor,
    scale: Tensor,
) -> None:
    """Add a sequence's gradients from shares ``(T * (U + 1), 2)`` and scores; see NOTE [band]."""
    count = joint.states.shape[0]
    classes = joint.bias.shape[0]
    shares = shares.view(-1, count, 2)
    # A NaN counts as visited.
    visited = (shares.sum(2) <= _NEGLIGIBLE[shares.dtype]).logical_not_()
    for frames in _tiles(joint):
        columns = visited[frames].any(0).nonzero()
        if columns.shape[0] == 0:
            continue
        states = slice(int(columns[0]), int(columns[-1]) + 1)
        hidden = joint.hidden(frames, states, scratch.hidden[0])
        rows = hidden.shape[0]
        band = (frames.stop - frames.start, states.stop - states.start)
        grad = scratch.logits[0][:rows]
        if store is None:
            torch.exp(joint.scores(hidden, *scratch.logits), out=grad)
        else:
            torch.exp(store.view(-1, count, classes)[frames, states], out=grad.view(*band, classes))
        share = (shares[frames, states] * scale).view(rows, 2)
        grad.mul_(share.sum(1, keepdim=True))
        grad[:, blank].sub_(share[:, 0])
        grad.scatter_add_(1, following[states].repeat(band[0]).unsqueeze(1), -share[:, 1:])
        gradients.weight.addmm_(grad.t(), hidden)
        gradients.bias.add_(grad.sum(0))
        before = torch.mm(grad, joint.weight, out=scratch.hidden[1][:rows])
        before.addcmul_(before, hidden.square_(), value=-1)
        gradients.frames[frames].add_(before.view(*band, -1).sum(1))
        gradients.states[states].add_(before.view(*band, -1).sum(0))
