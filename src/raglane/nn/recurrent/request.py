"""From a layer's call to a kernel's request, and back.

The way of every call: :func:`prepare` checks the input and the initial state against the layer's sizes and builds
the request; the dispatcher picks who runs it; :func:`run` hands the result back in the caller's kind and shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane.cells.spec import CellSpec
from raglane.checks import check_fits, check_storage
from raglane.errors import ArgumentTypeError, ShapeError, message
from raglane.kernels import dispatch
from raglane.kernels import torch as torch_kernels
from raglane.kernels.checks import check_stack
from raglane.kernels.contract import Request, Result, Traits, zero_state
from raglane.nn.recurrent.inputs import FlatInput
from raglane.nn.recurrent.regularisation import Regularisation, run_regularised
from raglane.nn.recurrent.resets import Pieces
from raglane.ragged import Ragged

__all__ = [
    "Network",
    "check_state",
    "one_or_tuple",
    "own_state",
    "prepare",
    "run",
    "run_dense",
    "run_pack",
]

State = Tensor | tuple[Tensor, ...]


@dataclass(slots=True, eq=False)
class Network:
    """What a layer is made of, without the layer.

    Attributes:
        cell: the equations.
        weights: one of the cell's ``weights_type`` for each layer and direction, in torch's order.
        like: a weight, for the dtype and device of all; None where the layer has none.
        input_size: the features of an element.
        hidden_size: the units of a layer.
        state_sizes: the size of each state of the cell.
        layers, directions: how many of each.
        dropout: between layers.
        training: whether dropout acts.
        schedule, backend: what the user chose, or ``"auto"``.
        regularisation: what is dropped and held inside the recurrence.
        initial: the initial states of a batch for which none are given; None for zeros.
    """

    cell: CellSpec
    weights: tuple[Any, ...]
    like: Tensor | None
    input_size: int
    hidden_size: int
    state_sizes: tuple[int, ...]
    layers: int
    directions: int
    dropout: float
    training: bool
    schedule: str
    backend: str
    regularisation: Regularisation
    initial: Callable[[Ragged], Any] | None

    def traits(self, cell: CellSpec, dtype: torch.dtype, device: torch.device, need_states: bool) -> Traits:
        """All that the dispatcher may look at, for the network's cell or what regularisation makes of it."""
        return Traits(cell, self.input_size, self.hidden_size, dtype, device, need_states)


def prepare(
    network: Network,
    inputs: FlatInput,
    hx: Any,
    pieces: Pieces | None = None,
    need_output: bool = True,
    need_states: bool = False,
) -> Request:
    """Check an input and its initial state, and put the request together.

    Args:
        network: the layer.
        inputs: the input, flat.
        hx: the initial state, of torch's shapes, ``(L * K, B, size)``, or ``(L * K, size)`` where the input has no
            batch; a tuple where the cell has several; None for the network's own.
        pieces: the input cut at its resets, where there are any.
        need_output: False where only the state is read.
        need_states: whether the states of every step are wanted.

    Raises:
        ArgumentTypeError: a state of the wrong kind.
        ShapeError: sizes, dtypes or devices that do not fit.
    """
    _check_values(network, inputs.batch.values)
    batch = inputs.batch if pieces is None else pieces.batch
    state = () if hx is None else _given_state(network, inputs, hx)
    if hx is None and network.initial is not None:
        state = own_state(network, batch)
    elif hx is not None and pieces is not None:
        pairs = zip(state, own_state(network, batch), strict=True)
        state = tuple(pieces.enter(*pair, network.directions) for pair in pairs)
    return Request(
        cell=network.cell,
        values=batch.values,
        offsets=batch.offsets,
        lengths=None if batch.offsets.is_cpu else batch.host_lengths,
        state=state,
        weights=network.weights,
        layers=network.layers,
        directions=network.directions,
        dropout=network.dropout if network.training else 0.0,
        training=network.training,
        need_output=need_output,
        need_states=need_states,
        state_sizes=network.state_sizes,
    )


def run(network: Network, inputs: FlatInput, request: Request, pieces: Pieces | None = None) -> tuple[Any, ...]:
    """Let the dispatcher's choice run a request.

    Args:
        network: the layer.
        inputs: the input, flat.
        request: what :func:`prepare` made of them.
        pieces: as there.

    Returns:
        The output, of the input's kind, or None where it was not needed; the final state, a tuple where the cell
        has several; and with ``need_states`` a list with one Ragged ``(N, K * size)`` a layer, or a tuple of them.
    """

    def execute(request: Request) -> Result:
        traits = network.traits(request.cell, request.values.dtype, request.values.device, request.need_states)
        backend, schedule = dispatch.pick(traits, network.schedule, network.backend)
        return dispatch.BACKENDS[backend].run(request, schedule)

    rule = network.regularisation
    result = run_regularised(rule, request, execute) if rule.acts(network.training) else execute(request)
    output = None if result.output is None else inputs.restore(result.output)
    final = result.state
    if pieces is not None:
        final = tuple(pieces.leave(part, network.directions) for part in final)
    if not inputs.batched:
        final = tuple(part.squeeze(1) for part in final)
    answer = (output, one_or_tuple(final))
    if result.states is None:
        return answer
    states = [one_or_tuple(tuple(inputs.batch._like(part) for part in layer)) for layer in result.states]
    return (*answer, states)


def run_pack(network: Network, packed: PackedSequence, hx: Any) -> tuple[PackedSequence, Any]:
    """Hand a pack without empty sequences to torch's kernel as it is.

    Args:
        network: the layer.
        packed: the input.
        hx: the initial state, as for :func:`prepare`.

    Returns:
        The output and the final state.

    Raises:
        ArgumentTypeError: a state of the wrong kind.
        ShapeError: sizes, dtypes or devices that do not fit.
    """
    count, values = int(packed.batch_sizes[0]), packed.data
    _check_weights(network, values)
    state = _zeros(network, count, values) if hx is None else check_state(network, hx, count, values)
    if packed.sorted_indices is not None and hx is not None:
        state = tuple(part.index_select(1, packed.sorted_indices) for part in state)
    output, final = torch_kernels.call(network, (values, packed.batch_sizes), state)
    if packed.unsorted_indices is not None:
        final = tuple(part.index_select(1, packed.unsorted_indices) for part in final)
    return packed._replace(data=output), one_or_tuple(final)


def run_dense(network: Network, values: Tensor, hx: Any, batch_first: bool) -> tuple[Tensor, Any]:
    """Hand a tensor without padding to torch's kernel as it is.

    Args:
        network: the layer.
        values: the input, ``(T, B, D)``, with ``batch_first`` ``(B, T, D)``, or ``(T, D)``.
        hx: the initial state, as for :func:`prepare`.
        batch_first: whether the batch is the first of three dimensions.

    Returns:
        The output and the final state.

    Raises:
        ArgumentTypeError: a state of the wrong kind.
        ShapeError: sizes, dtypes or devices that do not fit.
    """
    batch_dim, batched = 0 if batch_first else 1, values.dim() == 3
    count = values.shape[batch_dim] if batched else None
    _check_weights(network, values)
    state = _zeros(network, count or 1, values) if hx is None else check_state(network, hx, count, values)
    if batched:
        output, final = torch_kernels.call(network, (values,), state, batch_first)
        return output, one_or_tuple(final)
    if hx is not None:
        state = tuple(part.unsqueeze(1) for part in state)
    output, final = torch_kernels.call(network, (values.unsqueeze(batch_dim),), state, batch_first)
    return output.squeeze(batch_dim), one_or_tuple(tuple(part.squeeze(1) for part in final))


def one_or_tuple(parts: tuple[Any, ...]) -> Any:
    """A cell with one state has it as it is, as torch's GRU and RNN do.

    Example:
        >>> one_or_tuple((1,)), one_or_tuple((1, 2))
        (1, (1, 2))
    """
    return parts if len(parts) > 1 else parts[0]


def _check_weights(network: Network, values: Tensor) -> None:
    """What a backend does by itself, for torch's kernels when they are called without one."""
    check_stack(network.cell, network.weights, network.input_size, network.state_sizes, network.directions, values)


def _check_values(network: Network, values: Tensor) -> None:
    if values.dim() != 2 or values.shape[1] != network.input_size:
        raise ShapeError(
            message(
                "input",
                f"elements of shape {tuple(values.shape[1:])}",
                f"each element has input_size = {network.input_size} features",
                "embed or reshape it, or build the layer with another input_size",
            )
        )
    # What is no tensor at all the backend will find, and name.
    if isinstance(network.like, Tensor):
        check_fits("input", values, network.like)


def _given_state(network: Network, inputs: FlatInput, hx: Any) -> tuple[Tensor, ...]:
    """The initial states that a caller gave, as kernels want them: one ``(L * K, B, size)`` each."""
    state = check_state(network, hx, len(inputs.batch) if inputs.batched else None, inputs.batch.values)
    return state if inputs.batched else tuple(part.unsqueeze(1) for part in state)


def own_state(network: Network, batch: Ragged) -> tuple[Tensor, ...]:
    """The initial states of a batch for which none are given: one ``(L * K, B, size)`` each.

    Args:
        network: the layer.
        batch: its input.

    Raises:
        ArgumentTypeError: what the network makes of the batch is no state.
        ShapeError: or none of its sizes.
    """
    if network.initial is None:
        return _zeros(network, len(batch), batch.values)
    return check_state(network, network.initial(batch), len(batch), batch.values, "initial_state")


def _zeros(network: Network, count: int, values: Tensor) -> tuple[Tensor, ...]:
    """The initial states where none were given, for ``count`` sequences like ``values``."""
    return zero_state(values, network.layers * network.directions, count, network.state_sizes)


def check_state(
    network: Network, hx: Any, count: int | None, values: Tensor, argument: str = "hx"
) -> tuple[Tensor, ...]:
    """Check an initial state.

    Args:
        network: the layer.
        hx: what the caller gave.
        count: the number of sequences, or None where there is no batch.
        values: what the layer reads, for its dtype and device.
        argument: what the message calls it.

    Returns:
        One tensor a state of the cell, as they were given.

    Raises:
        ArgumentTypeError: of the wrong kind.
        ShapeError: sizes, dtypes or devices that do not fit.
    """
    names = network.cell.states
    given = (hx,) if len(names) == 1 else hx
    if (
        not isinstance(given, tuple | list)
        or len(given) != len(names)
        or not all(isinstance(part, Tensor) for part in given)
    ):
        raise ArgumentTypeError(
            message(
                argument,
                f"a {type(hx).__name__}",
                "a tensor" if len(names) == 1 else f"a tuple ({', '.join(names)}) of tensors",
                "pass what the layer returned as its state, or None for zeros",
            )
        )
    rows = network.layers * network.directions
    for name, size, part in zip(names, network.state_sizes, given, strict=True):
        wanted = (rows, size) if count is None else (rows, count, size)
        if tuple(part.shape) != wanted:
            raise ShapeError(
                message(
                    f"{argument} ({name})",
                    f"shape {tuple(part.shape)}",
                    f"{wanted}: layers times directions, {'' if count is None else 'sequences, '}size",
                    "give each sequence its state, in the order of the batch",
                )
            )
        check_fits(f"{argument} ({name})", part, values)
        check_storage(f"{argument} ({name})", part)
    return tuple(given)
