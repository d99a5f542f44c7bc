"""PyTorch's own kernels: ATen and oneDNN on a CPU, cuDNN on a GPU.

``packed`` runs a PackedSequence. ``padded`` runs a padded tensor and drops the results of padding;
torch has no option for this, so the final state and the reverse direction are computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.tracing import has_tangent, is_exporting
from raglane.cells.spec import Weights
from raglane.kernels import reference
from raglane.kernels.contract import (
    Dense,
    DirectionResult,
    Packed,
    Request,
    Result,
    Traits,
    run_directions,
    run_layers,
)
from raglane.kernels.tensor_checks import check, check_stack
from raglane.packing.convert import flatten_padded
from raglane.packing.flat_values import flat_to_padded
from raglane.packing.layouts import packed_layout
from raglane.segments.indexing import place_rows, take_rows

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "lstm": torch.lstm,
    "gru": torch.gru,
    "rnn_tanh": torch.rnn_tanh,
    "rnn_relu": torch.rnn_relu,
}

# sigmoid(-_SHUT) is exactly 0 and sigmoid(_SHUT) exactly 1 in every dtype from float16, which can
# represent it, to float64.
_SHUT = 3.0e4


class TorchBackend:
    """Runs RNN, LSTM and GRU by :func:`torch.lstm` and the like."""

    schedules = ("packed", "padded")
    layouts: ClassVar[dict[str, type]] = {"packed": Packed, "padded": Dense}

    def refuses(self, traits: Traits, schedule: str) -> str | None:  # noqa: ARG002
        """See :class:`~raglane.kernels.contract.Backend`."""
        if traits.cell.name not in _FUNCTIONS:
            return f"torch has no kernel for the cell {traits.cell.name!r}"
        if traits.need_states:
            return "torch's kernels do not return the states of every step"
        if traits.checkpoints:
            return "torch's kernels do not recompute gates in the backward pass"
        return None

    def run(self, request: Request, schedule: str) -> Result:
        """See :class:`~raglane.kernels.contract.Backend`."""
        if request.layout is not None:
            return _run_in_layout(request, request.layout)
        if is_exporting():
            # The order of a pack depends on the lengths, which an exported graph does not contain.
            return reference.BACKEND.run(request, schedule)
        request = check(request)
        # Torch's kernels raise for a batch without elements, and do not support some forward-mode
        # derivatives.
        if request.values.shape[0] == 0 or has_tangent(request.tensors()):
            return reference.BACKEND.run(request, schedule)
        together = not request.layer_by_layer
        if schedule == "packed":
            return _run_packed(request) if together else run_layers(request, _run_packed)
        lengths = request.lengths_cpu
        if bool((lengths == lengths[0]).all()):
            return _run_equal(request) if together else run_layers(request, _run_equal)
        return run_layers(request, partial(run_directions, run=_run_padded_direction))


BACKEND = TorchBackend()


def _call(
    request: Request, data: tuple[Tensor, ...], state: tuple[Tensor, ...], *layout: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Call torch's function of the cell on all layers and directions."""
    weights = [tensor for layer in request.weights for tensor in layer if tensor is not None]
    has_bias = request.weights[0].input_bias is not None
    # cuDNN requires contiguous states, and saves what its backward pass needs only in training.
    state = tuple([initial.contiguous() for initial in state])
    is_recorded = data[0].is_cuda and torch.is_grad_enabled()
    output, *final = _FUNCTIONS[request.cell.name](
        *data,
        state if len(state) > 1 else state[0],
        weights,
        has_bias,
        request.layers,
        request.dropout if request.training else 0.0,
        request.training or is_recorded,
        request.directions == 2,
        *layout,
    )
    return output, tuple(final)


def _run_in_layout(request: Request, layout: Packed | Dense) -> Result:
    """Run a pack without empty sequences, or a tensor without padding, without converting it."""
    values = request.values
    cell = request.cell
    check_stack(
        cell, request.weights, values.shape[-1], request.state_sizes, request.directions, values
    )
    if isinstance(layout, Dense):
        count = values.shape[0 if layout.batch_first else 1]
        output, final = _call(request, (values,), request.initial(count), layout.batch_first)
        return Result(output, final)
    sizes, order, ranks = layout
    state = request.initial(int(sizes[0]))
    if order is not None and request.state:
        state = tuple(initial.index_select(1, order) for initial in state)
    output, final = _call(request, (values, sizes), state)
    if ranks is not None:
        final = tuple(state.index_select(1, ranks) for state in final)
    return Result(output, final)


def _run_packed(request: Request) -> Result:
    """Run the batch as a PackedSequence of its sequences with an element."""
    layout = packed_layout(request.lengths_cpu, request.offsets)
    data = take_rows(request.values, layout.index)
    # Empty sequences are the last in the order of length.
    running = layout.sorted_indices[: int(layout.batch_sizes[0])]
    initial = request.initial()
    packed, final = _call(
        request,
        (data, layout.batch_sizes),
        tuple(state.index_select(1, running) for state in initial),
    )
    output = place_rows(packed, layout.index, data.shape[0]) if request.need_output else None
    # The final state of an empty sequence is its initial one, which index_copy does not overwrite.
    pairs = zip(initial, final, strict=True)
    return Result(
        output,
        tuple(before.to(after.dtype).index_copy(1, running, after) for before, after in pairs),
    )


def _run_equal(request: Request) -> Result:
    """Run sequences of one length, as a view of three dimensions."""
    batch = request.values.reshape(request.count, -1, request.values.shape[1])
    output, final = _call(request, (batch,), request.initial(), True)
    return Result(output.flatten(0, 1) if request.need_output else None, final)


def _run_padded_direction(
    layer: Request, weights: Weights, state: tuple[Tensor, ...], reverse: bool
) -> DirectionResult:
    """Run one layer in one direction on a padded tensor; see
    :class:`~raglane.kernels.contract.RunDirection`.

    The reverse direction reverses every sequence first, so that it does not begin in the padding.
    The final h is the output at the last step. No output contains an LSTM's final c: one more
    feature, which is 1 in the padding, closes the input gate and opens the forget gate, so that c
    stays unchanged to the end of the row.
    """
    values = layer.values
    offsets = layer.offsets
    lengths = layer.lengths_cpu
    if reverse:
        values = segments.reverse(values, offsets)
    longest = int(lengths.max())
    padded = flat_to_padded(values, offsets, longest, batch_first=False)
    if len(state) > 1:
        is_padding = torch.arange(longest, device=values.device).unsqueeze(1) >= offsets.diff()
        padded = torch.cat([padded, is_padding.unsqueeze(2).to(padded.dtype)], 2)
        hidden = weights.input.shape[0] // 4
        # Rows of the gates in torch's order: input, forget, cell, output.
        hold = torch.cat(
            [weights.input.new_full((hidden, 1), gate) for gate in (-_SHUT, _SHUT, 0.0, 0.0)]
        )
        weights = weights._replace(input=torch.cat([weights.input, hold], 1))
    initial = tuple(rows.unsqueeze(0) for rows in state)
    direction = Request(layer.cell, values, offsets, lengths, initial, (weights,))
    output, final = _call(direction, (padded,), initial, False)
    flat = flatten_padded(output, lengths).values
    is_empty = (offsets.diff() == 0).unsqueeze(1)
    h = torch.where(is_empty, state[0].to(flat.dtype), segments.last(flat, offsets))
    return DirectionResult(
        segments.reverse(flat, offsets) if reverse else flat,
        (h, *(state.squeeze(0) for state in final[1:])),
    )
