"""What all recurrent layers have in common: how they are called, whatever their cell and wherever their weights are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_flag
from raglane._utils.messages import message
from raglane._utils.tracing import are_transforms_active, is_exporting, never_traced
from raglane.errors import ArgumentTypeError, DispatchError, ShapeError
from raglane.nn.recurrent.call import run
from raglane.nn.recurrent.stack import Stack, State
from raglane.ragged import Ragged

I = TypeVar("I", Ragged, PackedSequence, Tensor)  # noqa: E741 (the kind of an input)


class RecurrentLayer(Stack):
    """A recurrent layer on ragged batches; its ``cell`` says what it computes.

    Every layer takes these by name, besides torch's arguments:

    Args:
        schedule: a key of ``raglane.schedules.SCHEDULES``, or ``"auto"``.
        backend: a key of ``raglane.kernels.dispatch.BACKENDS``, or ``"auto"``.
        initial_state: what sequences begin with for which the call gives no state: ``"zeros"``; ``"learned"``, one
            parameter ``(layers * directions, size)`` per state, ``initial_h``; ``"lengths"``, a learned function of
            each sequence's length (:class:`~raglane.nn.recurrent.initial_state.LengthState`); or a module that is given
            the Ragged batch and returns what would be given as ``hx``, ``(layers * directions, B, size)``.
        input_dropout, state_dropout, weight_dropout, zoneout: regularisation in training; see
            :class:`~raglane.nn.recurrent.regularisation.Regularisation`. Where a call has resets, they act on
            episodes in place of sequences.
        checkpoint_every: a number of steps, for less memory in training: what backward needs of the steps is not kept,
            but computed again, for so many steps of each sequence at a time; docs/methods.md says what that spares and
            who can. None to keep it.
    """

    @overload
    def forward(
        self,
        input: I,
        hx: Any = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        return_output: Literal[True] = True,
        return_states: Literal[False] = False,
    ) -> tuple[I, Any]: ...
    @overload
    def forward(
        self,
        input: I,
        hx: Any = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        return_output: Literal[True] = True,
        return_states: Literal[True],
    ) -> tuple[I, Any, list[Any]]: ...
    @overload
    def forward(
        self,
        input: I,
        hx: Any = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        return_output: Literal[False],
        return_states: Literal[False] = False,
    ) -> tuple[None, Any]: ...
    @overload
    def forward(
        self,
        input: Any,
        hx: Any = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        return_output: bool = True,
        return_states: bool = False,
    ) -> Any: ...
    def forward(
        self,
        input: Any,
        hx: State | None = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        return_output: bool = True,
        return_states: bool = False,
    ) -> Any:
        """Run the layer on a batch of sequences. Like in, like out.

        Args:
            input: a Ragged with values ``(N, input_size)``; a PackedSequence; a padded tensor ``(T, B, input_size)``,
                or ``(B, T, input_size)`` with ``batch_first``; or one sequence ``(T, input_size)``.
            hx: the initial state of each sequence, in the order of the batch, of the shape of the state returned;
                by default what ``initial_state`` says.
            lengths: for a padded tensor, ``(B,)`` integers from 0 to T. Without them every element counts.
            resets: one bool per element, of the input's kind without features: True where a new episode starts, from
                the initial state of a sequence for which none is given.
            return_output: False to get None for the output, where only the state is read.
            return_states: also return every layer's states at every step.

        Returns:
            The output, of the kind of the input, with ``directions * size`` features, zeros past each length of a
            padded tensor; and the final state, ``(layers * directions, B, size)``, a pair ``(h, c)`` for an LSTM. A
            sequence of length 0 keeps its initial state. With ``return_states``, third, a list with the states of
            each layer, Ragged of ``(N, directions * size)``, a pair of them for an LSTM.

        Raises:
            ShapeError: sizes, lengths, dtypes or devices that do not fit together.
            ArgumentTypeError: an input, a state or resets of the wrong kind.
            ArgumentError: ``return_output`` or ``return_states`` is not a bool.
            DispatchError: the schedule and backend chosen cannot run this.
        """
        if return_output is not True:
            check_flag("return_output", return_output)
        if return_states is not False:
            check_flag("return_states", return_states)
        if torch.compiler.is_compiling() and (isinstance(input, PackedSequence) or are_transforms_active()):
            if is_exporting() and isinstance(input, PackedSequence):
                rule, fix = "a Ragged or a tensor under torch.export", "pass a Ragged, or a padded tensor with lengths"
                raise DispatchError(message("input", "a PackedSequence", rule, fix))
            # NOTE: a pack that is made within a graph of torch.compile comes out of it empty, and the compiler cannot
            # take up again within a transformation of torch.func what it leaves out.
            wishes = {"return_output": return_output, "return_states": return_states}
            return _outside_of_graphs(self, input, hx, lengths=lengths, resets=resets, **wishes)
        return run(self, input, hx, lengths, resets, return_output, return_states)

    if TYPE_CHECKING:
        __call__ = forward

    def __prepare_scriptable__(self) -> Any:
        rule, fix = "called with layers that TorchScript can compile", "use torch.compile or torch.export.export"
        raise ArgumentTypeError(message("torch.jit.script", f"a layer {type(self).__name__}", rule, fix))

    def step(self, x_t: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Run one step, for streams that arrive element by element.

        Args:
            x_t: one element per sequence, ``(B, input_size)``, or ``(input_size,)`` for a single stream.
            state: what the last call returned; None to begin.

        Returns:
            The output ``(B, size)``, or ``(size,)``, and the new state, ``(layers, B, size)``, or ``(layers, size)``.

        Raises:
            ArgumentTypeError: a bidirectional layer, whose second direction would need what has not arrived yet.

        Example:
            >>> import raglane as rl
            >>> layer, state = rl.nn.LSTM(3, 4), None
            >>> for x_t in torch.randn(5, 2, 3):
            ...     out, state = layer.step(x_t, state)
            >>> out.shape, state[0].shape
            (torch.Size([2, 4]), torch.Size([1, 2, 4]))
        """
        if self.bidirectional:
            rule = "called on a unidirectional layer: the reverse direction would begin at an end that has not arrived"
            fix = "build the layer with bidirectional=False"
            raise ArgumentTypeError(message("step", "a bidirectional layer", rule, fix))
        if not isinstance(x_t, Tensor) or x_t.dim() not in (1, 2):
            got = f"shape {tuple(x_t.shape)}" if isinstance(x_t, Tensor) else f"a {type(x_t).__name__}"
            rule = "a tensor (B, input_size) or (input_size,)"
            raise ShapeError(message("x_t", got, rule, "pass one element of each stream"))
        time = 1 if self.batch_first and x_t.dim() == 2 else 0
        output, state = self(x_t.unsqueeze(time), state)
        return output.squeeze(time), state

    def summary(self, out: Any, state: State) -> Tensor:  # noqa: ARG002
        """One vector per sequence: what the last layer knew after reading the whole of it, in each direction.

        For a bidirectional layer this is the forward direction's state at the last element beside the reverse
        direction's at the first. ``out.last()`` is not: its second half is the reverse direction's state at the
        last element, when it has seen that one alone.

        Args:
            out: the output; not read, so the None that ``return_output=False`` gives will do.
            state: the final state that came with it.

        Returns:
            ``(B, directions * size)``; ``(directions * size,)`` for a sequence without a batch.

        Raises:
            ArgumentTypeError: ``state`` is not a state.
            ShapeError: ``state`` is of another layer.

        Example:
            >>> import raglane as rl
            >>> layer = rl.nn.GRU(3, 4, bidirectional=True)
            >>> layer.summary(*layer(rl.Ragged([torch.randn(5, 3), torch.randn(2, 3)]))).shape
            torch.Size([2, 8])
        """
        h = state[0] if isinstance(state, tuple | list) and state else state
        if not isinstance(h, Tensor):
            got, fix = f"a {type(state).__name__}", "pass the second result of the layer"
            raise ArgumentTypeError(message("state", got, "the final state of this layer", fix))
        rows = self.num_layers * (2 if self.bidirectional else 1)
        size = self.state_sizes[0]
        if h.dim() not in (2, 3) or h.shape[0] != rows or h.shape[-1] != size:
            rule = f"of shape ({rows}, B, {size}), or ({rows}, {size}) without a batch"
            raise ShapeError(message("state", f"shape {tuple(h.shape)}", rule, "pass the second result of this layer"))
        return torch.cat((h[-2], h[-1]), -1) if self.bidirectional else h[-1]

    def extra_repr(self) -> str:
        """Torch's line, with the other options that were chosen."""
        names = ("schedule", "backend", "initial_state", "checkpoint_every")
        chosen = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(Stack, name)}
        chosen |= {name: value for name, value in vars(self.regularisation).items() if value}
        parts = [super().extra_repr(), *(f"{name}={value!r}" for name, value in chosen.items())]
        return ", ".join(part for part in parts if part)


@never_traced
def _outside_of_graphs(layer: RecurrentLayer, *args: Any, **options: Any) -> Any:
    """A layer's call as it is without ``torch.compile``; hooks are called around it already."""
    return layer.forward(*args, **options)
