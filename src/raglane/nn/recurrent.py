"""RNN, LSTM and GRU that take ragged batches: torch's layers, with one more way to call them.

They are built on ``torch.nn.RNNBase``, which brings the parameters, their initialisation and ``state_dict``, and not on
``torch.nn.LSTM`` and its kin, because ``torch.compile`` refuses every instance of those three.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane.cells import CELLS
from raglane.cells.spec import Weights
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError, explain
from raglane.kernels.dispatch import Choice, check_names, choose, pick
from raglane.nn import functional
from raglane.nn.functional import Network, State
from raglane.nn.inputs import flatten

__all__ = ["GRU", "LSTM", "RNN"]

_CELL_OF_MODE = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}


class _Recurrent(torch.nn.RNNBase):
    """What Raglane's layers have in common.

    Parameters, initialisation and ``state_dict`` are torch's own, so that weights go either way.
    """

    # On the class as well, because ``rl.accelerate`` turns layers that were built without them.
    schedule: str = "auto"
    backend: str = "auto"

    def __init__(self, mode: str, *args: Any, schedule: str = "auto", backend: str = "auto", **kwargs: Any) -> None:
        check_names(schedule, backend)
        if mode != "LSTM" and "proj_size" in kwargs:
            raise ArgumentError(
                explain("proj_size", str(kwargs["proj_size"]), "only an LSTM projects its state", "leave it out")
            )
        super().__init__(mode, *args, **kwargs)
        self.schedule = schedule
        self.backend = backend

    def forward(
        self,
        input: Any,
        hx: State | None = None,
        *,
        lengths: Any = None,
        last_only: bool = False,
        return_states: bool = False,
    ) -> Any:
        """Run the layer on a batch of sequences. Like in, like out.

        Args:
            input: a Ragged with values ``(N, input_size)``; a PackedSequence; a padded tensor ``(T, B, input_size)``,
                or ``(B, T, input_size)`` with ``batch_first``; or one sequence ``(T, input_size)``.
            hx: the initial state of each sequence, in the order of the batch, of the shape of the state returned;
                zeros by default.
            lengths: for a padded tensor, ``(B,)`` integers from 0 to T. Without them every element counts.
            last_only: return None for the output, where only the state is read.
            return_states: also return every layer's states at every step.

        Returns:
            The output, of the kind of the input, with ``directions * size`` features, zeros past each length of a
            padded tensor; and the final state, ``(layers * directions, B, size)``, a pair ``(h, c)`` for an LSTM. A
            sequence of length 0 keeps its initial state. With ``return_states``, third, a list with the states of
            each layer, Ragged of ``(N, directions * size)``, a pair of them for an LSTM.

        Raises:
            ShapeError: sizes, lengths, dtypes or devices that do not fit together.
            ArgumentTypeError: an input or a state of another kind.
            DispatchError: the schedule and backend chosen cannot run this.
        """
        network = self._network()
        if self._direct(network, input, lengths, return_states):
            output, state = (
                functional.run_pack(network, input, hx)
                if isinstance(input, PackedSequence)
                else functional.run_dense(network, input, hx, self.batch_first)
            )
            return (None if last_only else output), state
        inputs = flatten(input, lengths, self.batch_first)
        request = functional.prepare(network, inputs, hx, not last_only, return_states)
        return functional.run(network, inputs, request)

    def step(self, x_t: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run one step, for streams that arrive element by element.

        Args:
            x_t: one element a sequence, ``(B, input_size)``, or ``(input_size,)`` for a single stream.
            state: what the last call returned; None to begin.

        Returns:
            The output ``(B, size)``, or ``(size,)``, and the new state, ``(layers, B, size)``, or ``(layers, size)``.

        Raises:
            ArgumentTypeError: a bidirectional layer, whose second direction would need what has not arrived yet.

        Example:
            >>> layer, state = LSTM(3, 4), None
            >>> for x_t in torch.randn(5, 2, 3):
            ...     out, state = layer.step(x_t, state)
            >>> out.shape, state[0].shape
            (torch.Size([2, 4]), torch.Size([1, 2, 4]))
        """
        if self.bidirectional:
            raise ArgumentTypeError(
                explain(
                    "step",
                    "a bidirectional layer",
                    "a stream has one direction: the other would begin at an end that has not arrived",
                    "build the layer with bidirectional=False",
                )
            )
        if not isinstance(x_t, Tensor) or x_t.dim() not in (1, 2):
            got = f"shape {tuple(x_t.shape)}" if isinstance(x_t, Tensor) else f"a {type(x_t).__name__}"
            raise ShapeError(
                explain("x_t", got, "a tensor (B, input_size) or (input_size,)", "pass one element of each stream")
            )
        time = 1 if self.batch_first and x_t.dim() == 2 else 0
        output, state = self(x_t.unsqueeze(time), state)
        return output.squeeze(time), state

    def summary(self, out: Any, state: State) -> Tensor:  # noqa: ARG002
        """One vector a sequence: what the last layer knew after reading the whole of it, in each direction.

        For a bidirectional layer this is the forward direction's state at the last element beside the reverse
        direction's at the first. ``out.last()`` is not: its second half is the reverse direction's state at the
        last element, when it has seen that one alone.

        Args:
            out: the output; not read, so None of ``last_only=True`` will do.
            state: the final state that came with it.

        Returns:
            ``(B, directions * size)``; ``(directions * size,)`` for a sequence without a batch.

        Example:
            >>> from raglane import Ragged
            >>> layer = GRU(3, 4, bidirectional=True)
            >>> layer.summary(*layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))).shape
            torch.Size([2, 8])
        """
        h = state[0] if isinstance(state, tuple | list) and state else state
        if not isinstance(h, Tensor):
            raise ArgumentTypeError(
                explain("state", f"a {type(state).__name__}", "the final state", "pass what the layer returned second")
            )
        return torch.cat((h[-2], h[-1]), -1) if self.bidirectional else h[-1]

    def extra_repr(self) -> str:
        """The line of torch, with the schedule and backend where they were chosen."""
        chosen = [
            f"{name}={getattr(self, name)!r}" for name in ("schedule", "backend") if getattr(self, name) != "auto"
        ]
        return ", ".join([super().extra_repr(), *chosen])

    def _direct(self, network: Network, input: Any, lengths: Any, return_states: bool) -> bool:
        """Whether torch's own kernel is what the dispatcher chooses for this input as it came.

        A pack, or a tensor in which every element is real, needs no way through the flat layout then.
        """
        if lengths is not None or return_states or not isinstance(input, Tensor | PackedSequence):
            return False
        if isinstance(input, PackedSequence):
            values, schedule = input.data, "packed"
            count = input.sorted_indices.shape[0] if input.sorted_indices is not None else None
            if values.shape[0] == 0 or (count is not None and count != int(input.batch_sizes[0])):
                return False  # sequences of length 0, which torch's kernels do not know
        else:
            values, schedule = input, "padded"
            if values.is_nested or values.dim() not in (2, 3) or values.numel() == 0:
                return False
        if values.shape[-1] != self.input_size or values.dtype != self.weight_ih_l0.dtype:
            return False  # the way through the flat layout says what is wrong, or casts
        traits = network.traits(values.dtype, values.device, need_states=False)
        return pick(traits, network.schedule, network.backend, dense=isinstance(input, Tensor)) == ("torch", schedule)

    def _choice(self, values: Tensor, *, dense: bool, need_states: bool = False) -> Choice:
        """What the dispatcher takes for values of this dtype and device."""
        network = self._network()
        traits = network.traits(values.dtype, values.device, need_states)
        return choose(traits, network.schedule, network.backend, dense=dense)

    def _network(self) -> Network:
        """The layer's description for the kernels, with the weights as they are now."""
        cell = CELLS[_CELL_OF_MODE[self.mode]]
        return Network(
            cell,
            tuple(self._weights()),
            self.input_size,
            self.hidden_size,
            cell.state_sizes(self.hidden_size, self.proj_size),
            self.num_layers,
            2 if self.bidirectional else 1,
            self.dropout,
            self.training,
            self.schedule,
            self.backend,
        )

    def _weights(self) -> Iterator[Weights]:
        """One layer and direction after the other, read by name: parametrizations and functional_call replace them."""
        for names in self._all_weights:
            part: list[Tensor] = [getattr(self, name) for name in names]
            input_bias, hidden_bias = part[2:4] if self.bias else (None, None)
            yield Weights(part[0], part[1], input_bias, hidden_bias, part[-1] if self.proj_size > 0 else None)


class RNN(_Recurrent):
    """Elman's network on ragged batches: :class:`torch.nn.RNN` with every argument and parameter of it.

    ``h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)``, or relu in place of tanh.

    Args:
        *args: ``input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional``, as
            torch has them; the rest, and ``device`` and ``dtype``, by name.
        schedule: a key of ``raglane.schedules.SCHEDULES``, or ``"auto"``.
        backend: a key of ``raglane.kernels.dispatch.BACKENDS``, or ``"auto"``.

    Raises:
        DispatchError: no such schedule, backend or pair.

    Example:
        >>> from raglane import Ragged
        >>> layer = RNN(3, 4, nonlinearity="relu")
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 4]), torch.Size([1, 2, 4]))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ArgumentError(explain("nonlinearity", repr(nonlinearity), "'tanh' or 'relu'", "choose one of them"))
        super().__init__(f"RNN_{nonlinearity.upper()}", input_size, hidden_size, num_layers, *args, **kwargs)
        self.nonlinearity = nonlinearity


class LSTM(_Recurrent):
    """Long short-term memory on ragged batches: :class:`torch.nn.LSTM` with every argument and parameter of it.

    The equations, with torch's gate order, stand in :mod:`raglane.cells.lstm`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size``, as
            torch has them; the rest, and ``device`` and ``dtype``, by name.
        schedule: a key of ``raglane.schedules.SCHEDULES``, or ``"auto"``.
        backend: a key of ``raglane.kernels.dispatch.BACKENDS``, or ``"auto"``.

    Raises:
        DispatchError: no such schedule, backend or pair.

    Example:
        >>> from raglane import Ragged
        >>> layer = LSTM(3, 4, bidirectional=True)
        >>> out, (h, c) = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape, c.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]), torch.Size([2, 2, 4]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("LSTM", *args, **kwargs)


class GRU(_Recurrent):
    """Gated recurrent units on ragged batches: :class:`torch.nn.GRU` with every argument and parameter of it.

    The equations, with torch's gate order, stand in :mod:`raglane.cells.gru`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional``, as torch has
            them; the rest, and ``device`` and ``dtype``, by name.
        schedule: a key of ``raglane.schedules.SCHEDULES``, or ``"auto"``.
        backend: a key of ``raglane.kernels.dispatch.BACKENDS``, or ``"auto"``.

    Raises:
        DispatchError: no such schedule, backend or pair.

    Example:
        >>> from raglane import Ragged
        >>> layer = GRU(3, 4)
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> torch.equal(out.last(), h[-1])
        True
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__("GRU", *args, **kwargs)
