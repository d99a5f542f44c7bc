"""Layers whose weights meet the state as a matrix: RNN, LSTM and GRU.

The time loops are the kernels', and so are the products of the backward pass, which are not sequential. Only large
products of bfloat16 are torch's where an instruction multiplies it: there it has the better ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from raglane.cells.spec import Weights
from raglane.kernels.cpu.layer import KINDS, Grads, Layer, LayerSpec, Saved, Tensors, add_product, outer, spend
from raglane.native import library
from raglane.native.library import cell_facts


class MatrixLayer(Layer):
    """See :class:`~raglane.kernels.cpu.layer.Layer`."""

    weight_fields = "input", "hidden", "input_bias", "hidden_bias", "projection"
    written = (
        *("grad_gates", "previous_h", "grad_h", "unprojected"),
        *("grad_initial_h", "grad_initial_c", "grad_values"),
    )
    checkpoints = True

    def __init__(self, spec: LayerSpec) -> None:
        facts = cell_facts()[spec.cell]
        self.slots, self.hidden_size = facts.slots, spec.sizes[-1]
        self.stride = _gate_stride(facts.slots, self.hidden_size)
        projection = 0 if spec.sizes[0] == self.hidden_size else spec.sizes[0]
        super().__init__(
            spec,
            facts.number,
            input_size=spec.input_size,
            hidden_size=self.hidden_size,
            projection_size=projection,
            gate_stride=self.stride,
            checkpoint_every=spec.checkpoint_every,
        )
        self.saves = facts.saved > 0 and not self.checkpoint_every
        self.gates_width, self.c_rows = self.stride if self.saves else 0, (self.directions,)
        self.c_width = self.sizes[1] if len(self.sizes) > 1 else 0

    @staticmethod
    def states(output: Tensor, c_states: Tensor | None) -> tuple[Tensor, ...]:
        """See :class:`~raglane.kernels.cpu.layer.Layer`."""
        if c_states is None:
            return (output,)
        return output, c_states[0] if c_states.shape[0] == 1 else torch.cat(c_states.unbind(), 1)

    def _backward(
        self,
        offsets: Tensor,
        tensors: Tensors,
        saved: Saved,
        fields: list[int],
        wanted: tuple[bool, ...],
        *,
        overwrite: bool,
    ) -> Grads:
        within: list[Tensor | None] = []
        after = len(tensors) - self.weights
        if self._makes_all(tensors):
            parts, wants = (tensors[0], *tensors[after:]), (wanted[0], *wanted[after:])
            within = [torch.empty_like(part) if want else None for part, want in zip(parts, wants, strict=True)]
        walked = self._walk_back(offsets, tensors, saved, fields, within, wanted[1:after], overwrite=overwrite)
        if within:
            return within[0], *walked.initial, *within[1:]
        return self._by_products(tensors, walked, wanted)

    def _walk_back(
        self,
        offsets: Tensor,
        tensors: Tensors,
        saved: Saved,
        fields: list[int],
        within: list[Tensor | None],
        wanted: tuple[bool, ...],
        *,
        overwrite: bool,
    ) -> _Walked:
        """Walk back in time, and fill ``within``, the gradients of the values and all weights.

        ``wanted`` is of the initial states.
        """
        values, count, width = tensors[0], self.directions, self.sizes[0]
        # What is computed again has scratch of the kernels in place of these.
        total = 0 if self.checkpoint_every else values.shape[0]
        projects, is_lstm = self.weights_of(tensors, 0)[4] is not None, len(self.sizes) > 1
        reuse_gates = overwrite and self.saves
        reuse_c = overwrite and is_lstm and not projects and not saved.is_shared and not self.checkpoint_every
        gates = saved.gates if reuse_gates else library.empty(values, count, total, self.stride)
        previous = saved.c_states if reuse_c else library.empty(values, count, total, width)
        projected = library.empty(values, count, total, width) if projects else None
        unprojected = library.empty(values, count, total, self.hidden_size) if projects else None
        states = zip(self.initial(tensors), wanted, strict=True)
        initial = tuple([torch.empty_like(part) if want else None for part, want in states])
        made = within or [None] * (1 + self.weights)
        written = [gates, previous, projected, unprojected, *initial, *[None] * (2 - len(initial)), *made]
        self._walk(offsets, values, fields, written)
        if reuse_gates:
            spend(saved.gates)
        if reuse_c:
            spend(saved.c_states)
        return _Walked(gates, previous, projected, unprojected, initial)

    def _by_products(self, tensors: Tensors, walked: _Walked, wanted: tuple[bool, ...]) -> Grads:
        """The gradients of values and weights by torch's products, and those of the initial states."""
        begin = len(tensors) - self.weights
        grad_values: Tensor | None = None
        grad_weights: list[Tensor | None] = []
        for direction in range(self.directions):
            weights = Weights(*self.weights_of(tensors, direction))
            if wanted[0]:
                gates = walked.gates[direction, :, : weights.input.shape[0]]
                grad_values = add_product(grad_values, gates, weights.input)
            wants = wanted[begin + self.each * direction :][: self.each]
            grad_weights += self._weight_gradients(tensors[0], walked, direction, weights, wants)
        return grad_values, *walked.initial, *grad_weights

    def _weight_gradients(
        self, values: Tensor, walked: _Walked, direction: int, weights: Weights, wanted: tuple[bool, ...]
    ) -> list[Tensor | None]:
        """The gradients of one direction's five weights."""
        rows, hidden_size = weights.input.shape[0], self.hidden_size
        gates = walked.gates[direction, :, : self.slots * hidden_size]
        previous = walked.previous[direction]
        result: list[Tensor | None] = [None] * 5
        split = gates.shape[1] > rows  # the last gate's two products have gradients of their own: a GRU's candidate
        if wanted[0]:
            result[0] = outer(gates[:, :rows], values)
        if wanted[1]:
            result[1] = (
                torch.cat([outer(gates[:, : rows - hidden_size], previous), outer(gates[:, rows:], previous)])
                if split
                else outer(gates, previous)
            )
        if wanted[2] or wanted[3]:
            sums = gates.sum(0)
            result[2] = sums[:rows] if wanted[2] else None
            if wanted[3]:
                result[3] = torch.cat([sums[: rows - hidden_size], sums[rows:]]) if split else sums.clone()
        if wanted[4] and walked.projected is not None and walked.unprojected is not None:
            result[4] = torch.mm(walked.projected[direction].t(), walked.unprojected[direction])
        return result


KINDS[Weights] = MatrixLayer


def _gate_stride(slots: int, hidden_size: int) -> int:
    """The row length of saved gates and of their gradients, see ``raglane.h``."""
    stride = slots * (-(-hidden_size // 16) * 16)
    # Rows of whole pages would all meet in the same few sets of a cache.
    return stride + 16 if stride % 256 == 0 else stride


class _Walked(NamedTuple):
    """What the backward time loop gives.

    Gradients of the gates' arguments, ``(K, N, S * H)`` and columns without meaning; ``h`` before each element,
    ``(K, N, P)``; with a projection the gradient of ``h``, ``(K, N, P)``, and what it reads, ``(K, N, H)``, else None;
    and the gradients of the initial states, ``(K, B, size)`` each.
    """

    gates: Tensor
    previous: Tensor
    projected: Tensor | None
    unprojected: Tensor | None
    initial: Grads


# As ``lane_capacity`` in csrc/scan/lanes.h has it, with the constants of csrc/runtime/tuning.h, for caches that hold
# the most lanes.
_SURPLUS, _MOST, _EVEN = 1.15, 48, 6


def lanes_of(lengths: Tensor, threads: int) -> int:
    """The lanes of all threads together for lengths on the CPU, at least 1; an estimate for those who predict times."""
    count, total = int(lengths.count_nonzero()), int(lengths.sum())
    if count == 0:
        return 1
    needed = int(_SURPLUS * total / (threads * int(lengths.max()))) + 1
    share = -(-count // threads)
    return threads * min(share, _MOST, -(-needed // _EVEN) * _EVEN)
