"""The base class of all recurrent layers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane._utils.checks import check_flag
from raglane._utils.tracing import are_transforms_active, is_exporting, never_traced
from raglane.errors import ArgumentTypeError, DispatchError, ShapeError
from raglane.kernels.triton.places import LONG
from raglane.nn.recurrent.at_once import infer, step
from raglane.nn.recurrent.call import run
from raglane.nn.recurrent.carry import carried
from raglane.nn.recurrent.stack import Stack, State, one_or_tuple
from raglane.ragged import Ragged

I = TypeVar("I", Ragged, PackedSequence, Tensor)  # noqa: E741 (the kind of an input)


S = TypeVar("S")  # the state: a Tensor, or a tuple of them


class Call(Protocol[S]):
    """The type of a call, by the kind of its input."""

    @overload
    def __call__(
        self,
        input: I,
        hx: S | None = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        begins: Any = None,
    ) -> tuple[I, S]: ...
    @overload
    def __call__(
        self,
        input: I,
        hx: S | None = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        begins: Any = None,
        return_output: Literal[False],
    ) -> tuple[None, S]: ...
    @overload
    def __call__(
        self,
        input: Any,
        hx: S | None = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        begins: Any = None,
        return_output: bool = True,
        _with_states: bool = False,
    ) -> Any: ...


class StepFunction(Protocol[S]):
    """The type of ``step``."""

    def __call__(  # noqa: D102
        self, x_t: Tensor, state: S | None = None, *, resets: Tensor | None = None
    ) -> tuple[Tensor, S]: ...


class RecurrentLayer(Stack):
    """The base class of all recurrent layers: their options and their call.

    All layers accept torch's arguments: ``input_size`` (features of an element), ``hidden_size``
    (units per layer and direction), ``num_layers``, ``bias``, ``batch_first`` (padded tensors are
    ``(B, T, D)``), ``dropout`` (the probability that an element of a layer's output is zeroed
    before the next layer), ``bidirectional``, and ``device`` and ``dtype`` of the parameters. All
    but :class:`~raglane.nn.Recurrent` name their parameters as torch does: ``weight_ih_l0``,
    ``weight_hh_l0_reverse`` and so on. Further options, by keyword only:

    Args:
        schedule: the order of computation: ``"each"`` (one sequence after the other), ``"padded"``,
            ``"masked"``, ``"packed"``, ``"lanes"``, or ``"auto"``.
        backend: the implementation: ``"cpu"``, ``"program"``, ``"torch"``, ``"triton"``,
            ``"reference"``, or ``"auto"``.
        initial_state: the initial state of sequences if a call passes no ``hx``. ``"zeros"``;
            ``"learned"``: one parameter ``(layers * directions, size)`` per state, ``initial_h``
            and so on; ``"lengths"``: for each state, a learned affine function of ``log(1 +
            length)``, zeros at first; or a module that maps the Ragged batch to an initial state of
            the shape of ``hx``, ``(layers * directions, B, size)``.
        input_dropout: the probability that a feature of a layer's input is zeroed, for a whole
            sequence (in training, as the next two).
        state_dropout: the probability that a unit of the state is zeroed where weights read it, for
            a whole sequence.
        weight_dropout: the probability that a weight between states is zeroed, for a whole batch:
            DropConnect as in Merity et al. (2017, arXiv:1708.02182).
        zoneout: the probability that a unit of the state keeps its value for a step: one number for
            all states, or a tuple with one for each (Krueger et al. 2017, arXiv:1606.01305). In
            evaluation, the states are the mean.
        checkpoint_every: the number of steps between the states that are kept for backward, which
            recomputes the gates in between: less memory in training for more time, see "Less memory
            in training" in docs/methods.md. None keeps all gates.

    With resets, ``input_dropout`` and ``state_dropout`` draw a mask per episode instead of per
    sequence.

    Raises:
        ArgumentError: an argument is out of its range.
        ArgumentTypeError: the layer does not have an argument.
        DispatchError: the schedule, the backend or their combination does not exist.
    """

    if TYPE_CHECKING:
        __call__: Call[Any]

    def forward(
        self,
        input: Any,
        hx: State | None = None,
        *,
        lengths: Any = None,
        resets: Any = None,
        begins: Any = None,
        return_output: bool = True,
        _with_states: bool = False,
    ) -> Any:
        """Run the layer on a batch of sequences. The output has the kind of the input.

        Args:
            input: a Ragged with values ``(N, input_size)``; a PackedSequence; a padded tensor ``(T,
                B, input_size)``, or ``(B, T, input_size)`` with ``batch_first``; or one sequence
                ``(T, input_size)``.
            hx: the initial state of each sequence, in the order of the batch and the shape of the
                final state. None for the layer's ``initial_state``.
            lengths: for a padded tensor, ``(B,)`` integers from 0 to T. None if no sequence is
                padded.
            resets: one bool per element, of the input's kind without features. True starts a new
                episode there, from the layer's ``initial_state``.
            begins: for chunks of sequences, :class:`rl.data.TBPTTSampler
                <raglane.data.TBPTTSampler>`: ``(B,)`` bool, True where a sequence begins. There a
                row starts from the layer's ``initial_state``, and its row of ``hx`` is not read;
                the others continue from ``hx``, which is detached, so that gradients end there. A
                module as ``initial_state`` reads only the chunk.
            return_output: False to return None as the output, if only the state is needed.

        Returns:
            The output, of the kind of the input, with ``directions * size`` features, and zeros in
            the padding of a padded tensor; and the final state, ``(layers * directions, B, size)``,
            or a tuple of them, ``(h, c)`` for an LSTM. The final state of a sequence of length 0 is
            its initial state.

        Raises:
            ShapeError: sizes, lengths, dtypes or devices do not match.
            ArgumentTypeError: the input, a state, resets or begins are of the wrong kind, or there
                are begins for a bidirectional layer.
            ArgumentError: ``return_output`` is not a bool; or ``hx`` is None,
                and a sequence does not begin.
            DispatchError: the layer's schedule and backend do not support this call.
        """
        if begins is not None:
            hx = carried(self, input, hx, begins)
        if return_output is not True:
            check_flag("return_output", return_output)
        if not torch.compiler.is_compiling():
            if resets is None and not _with_states and not torch.is_grad_enabled():
                result = infer(self, input, hx, lengths, return_output)
                if result is not None:
                    return result
        elif isinstance(input, PackedSequence) or are_transforms_active():
            if is_exporting() and isinstance(input, PackedSequence):
                rule = "a kind that a graph can contain"
                fix = "pass a Ragged, or a padded tensor with lengths"
                raise DispatchError("input", "a PackedSequence", rule, fix)
            # torch.compile returns an empty PackedSequence if it was created within a graph, and
            # cannot resume a graph within a transformation of torch.func.
            options = {"return_output": return_output, "_with_states": _with_states}
            return _outside_of_graphs(self, input, hx, lengths=lengths, resets=resets, **options)
        return run(self, input, hx, lengths, resets, return_output, _with_states)

    def with_states(
        self, input: I, hx: State | None = None, *, lengths: Any = None, resets: Any = None
    ) -> tuple[I, Any, list[Any]]:
        """Run the layer, and also return the states of every layer at every step.

        Args:
            input: as in a call.
            hx: as in a call.
            lengths: as in a call.
            resets: as in a call.

        Returns:
            ``(output, final, states)``. The first two are those of a call. ``states`` has for each
            layer a Ragged ``(N, directions * size)``, or a tuple of them, ``(h, c)`` for an LSTM.

        Raises:
            RaglaneError: as in a call.

        Example:
            >>> layer = rl.nn.LSTM(3, 4, num_layers=2)
            >>> out, final, states = layer.with_states(rl.Ragged([torch.randn(5, 3)]))
            >>> h, c = states[1]
            >>> torch.equal(h.values, out.values), c.values.shape
            (True, torch.Size([5, 4]))
        """
        result: Any = self(input, hx, lengths=lengths, resets=resets, _with_states=True)
        return result

    def __prepare_scriptable__(self) -> Any:
        rule = "a module that TorchScript can compile"
        fix = "use torch.compile or torch.export.export, or rl.export for a file"
        raise ArgumentTypeError("torch.jit.script", f"a layer {type(self).__name__}", rule, fix)

    _for_torchs = ""  # how to quantise the layer with PyTorch

    @property
    def qconfig(self) -> Any:
        """The attribute that :mod:`torch.ao.quantization` sets on every module of a model."""
        return vars(self).get("_qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        vars(self)["_qconfig"] = value
        warnings.warn(
            f"torch.ao.quantization does not quantise {type(self).__name__}, a layer of Raglane. For int8 weights"
            f" of RNN, LSTM and GRU call rl.quantize(model){self._for_torchs}.",
            stacklevel=2,
        )

    @qconfig.deleter
    def qconfig(self) -> None:
        vars(self).pop("_qconfig", None)

    def step(
        self, x_t: Tensor, state: Any = None, *, resets: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Run one step, for streams that arrive element by element.

        Args:
            x_t: one element per sequence, ``(B, input_size)``, or ``(input_size,)`` for a single
                stream.
            state: the state that the previous step returned; None for the first step.
            resets: ``(B,)`` bools, or ``()`` for a single stream. True starts a new episode with
                ``x_t``, from the layer's ``initial_state``; the numbers of its old state are
                ignored, even NaN.

        Returns:
            The output ``(B, size)`` or ``(size,)``, and the new state, ``(layers, B, size)`` or
            ``(layers, size)``.

        Raises:
            ArgumentTypeError: the layer is bidirectional, and would have to begin at the end of the
                stream; or without ``state`` or with ``resets``, its ``initial_state`` is
                ``"lengths"`` or a module, which reads whole sequences; or ``resets`` are not bools.
            ShapeError: ``x_t`` has another number of dimensions, or ``resets`` another shape.

        Example:
            >>> layer, state = rl.nn.LSTM(3, 4), None
            >>> for x_t in torch.randn(5, 2, 3):
            ...     out, state = layer.step(x_t, state)
            >>> out.shape, state[0].shape
            (torch.Size([2, 4]), torch.Size([1, 2, 4]))
            >>> done = torch.tensor([False, True])
            >>> out, state = layer.step(x_t, state, resets=done)  # the second stream begins anew
        """
        is_plain = type(self).forward is RecurrentLayer.forward
        if resets is None and state is not None and is_plain:
            result = step(self, x_t, state)
            if result is not None:
                return result
        _check_step(self, x_t, state is None or resets is not None)
        if resets is not None:
            _check_step_resets(x_t, resets)
            restarted = self._restarted(state, resets)
            if restarted is not None:
                state = restarted
                resets = None
            if resets is None and state is not None and is_plain:
                result = step(self, x_t, state)
                if result is not None:
                    return result
        time = 1 if self.batch_first and x_t.dim() == 2 else 0
        marks = None if resets is None else resets.unsqueeze(time)
        output, state = self(x_t.unsqueeze(time), state, resets=marks)
        return output.squeeze(time), state

    def _restarted(self, state: Any, resets: Tensor) -> State | None:
        """Return a state with new rows where an episode starts; None if it needs a whole call."""
        states = state if isinstance(state, tuple | list) else (state,)
        is_learned = self.initial_state == "learned"
        rows = (self.num_layers, *resets.shape)
        is_state = [isinstance(each, Tensor) and each.shape[:-1] == rows for each in states]
        if not all(is_state) or (self._has_own_initial() and not is_learned):
            return None
        marks = resets.unsqueeze(-1)
        if not is_learned:
            return one_or_tuple(tuple([each.masked_fill(marks, 0) for each in states]))
        initial = [getattr(self, f"initial_{name}") for name in self.cell.states]
        fresh = [each.unsqueeze(1) if resets.dim() else each for each in initial]
        if len(fresh) != len(states):
            return None
        pairs = zip(fresh, states, strict=True)
        return one_or_tuple(tuple([torch.where(marks, new, old) for new, old in pairs]))

    def warm_up(self, *, resets: bool = False, with_states: bool = False) -> None:
        """Compile the kernels of this layer, and compare them with torch, ahead of its first call.

        On a GPU a comparison waits for the device, and cannot be made while a CUDA graph is
        captured. Runs the layer on two sequences of ones, without gradients and with those of its
        parameters, whose ``grad`` does not change.

        Args:
            resets: True for calls with ``resets`` on the device of the layer.
            with_states: True for calls of :meth:`with_states`.

        Raises:
            RaglaneError: the layer's schedule, backend or weights are invalid, as in a call.

        Example:
            >>> layer = rl.nn.SRU(3, 4)
            >>> layer.warm_up()
            >>> layer.weight_ih_l0.grad is None
            True
        """
        weight = self._like(self._weights())
        like = torch.empty(0) if weight is None else weight
        count = LONG + 1 if like.is_cuda else 2  # kernels of long sequences differ
        with (
            torch.inference_mode(False),
            torch.random.fork_rng([like.device] if like.is_cuda else []),
        ):
            batch = Ragged.from_flat(like.new_ones(count + 1, self.input_size), lengths=[count, 1])
            starts = (
                batch._like(torch.ones(count + 1, dtype=torch.bool, device=like.device))
                if resets
                else None
            )
            for records in (False, True):
                with torch.set_grad_enabled(records):
                    output, *_ = self.forward(batch, resets=starts, _with_states=with_states)
                    if output.values.requires_grad:
                        parameters = [
                            parameter for parameter in self.parameters() if parameter.requires_grad
                        ]
                        torch.autograd.grad(output.values.sum(), parameters, allow_unused=True)

    def final(self, out: Any, state: State) -> Tensor:  # noqa: ARG002
        """Return one vector per sequence: the last layer's final state, of both directions.

        For a bidirectional layer this differs from ``out.last()``, whose second half is the reverse
        direction's state at the last element, after reading only that one.

        Args:
            out: the layer's output; ignored, so it may be None.
            state: the layer's final state.

        Returns:
            ``(B, directions * size)``; ``(directions * size,)`` for a sequence without a batch.

        Raises:
            ArgumentTypeError: ``state`` is not a state.
            ShapeError: ``state`` has the shape of another layer's.

        Example:
            >>> layer = rl.nn.GRU(3, 4, bidirectional=True)
            >>> layer.final(*layer(rl.Ragged([torch.randn(5, 3), torch.randn(2, 3)]))).shape
            torch.Size([2, 8])
        """
        h = state[0] if isinstance(state, tuple | list) and state else state
        if not isinstance(h, Tensor):
            got = f"a {type(state).__name__}"
            fix = "pass the second result of the layer's call"
            raise ArgumentTypeError("state", got, "the final state of this layer", fix)
        rows = self.num_layers * (2 if self.bidirectional else 1)
        size = self.state_sizes[0]
        if h.dim() not in (2, 3) or h.shape[0] != rows or h.shape[-1] != size:
            rule = f"of shape ({rows}, B, {size}), or ({rows}, {size}) without a batch"
            raise ShapeError(
                "state", f"shape {tuple(h.shape)}", rule, "pass the second result of its call"
            )
        return torch.cat((h[-2], h[-1]), -1) if self.bidirectional else h[-1]

    def extra_repr(self) -> str:
        """Return the arguments that differ from their defaults."""
        names = ("schedule", "backend", "initial_state", "checkpoint_every")
        chosen = {
            name: getattr(self, name)
            for name in names
            if getattr(self, name) != getattr(Stack, name)
        }
        chosen |= {name: value for name, value in vars(self.regularisation).items() if value}
        if isinstance(self.initial_state, torch.nn.Module):
            chosen["initial_state"] = type(self.initial_state).__name__
        shown = (f"{name}={value!r}" for name, value in chosen.items())
        return ", ".join(filter(None, (super().extra_repr(), *shown)))


def _check_step(layer: RecurrentLayer, x_t: Any, begins: bool) -> None:
    """Raise if a layer cannot run step by step, or a step is not one of elements."""
    if layer.bidirectional:
        rule = "a layer of one direction: the other would begin at the end of the stream"
        raise ArgumentTypeError(
            "step", "a bidirectional layer", rule, "build the layer with bidirectional=False"
        )
    if begins and layer.initial_state not in ("zeros", "learned"):
        rule = "'zeros' or 'learned' for a first step: it cannot read the whole sequence"
        fix = "pass a state, and no resets"
        raise ArgumentTypeError("initial_state", repr(layer.initial_state), rule, fix)
    if not isinstance(x_t, Tensor) or x_t.dim() not in (1, 2):
        got = f"shape {tuple(x_t.shape)}" if isinstance(x_t, Tensor) else f"a {type(x_t).__name__}"
        raise ShapeError(
            "x_t",
            got,
            "a tensor (B, input_size) or (input_size,)",
            "pass one element of each stream",
        )


def _check_step_resets(x_t: Tensor, resets: Any) -> None:
    """Raise if resets are not one bool per stream."""
    if not isinstance(resets, Tensor) or resets.dtype is not torch.bool:
        got = str(resets.dtype) if isinstance(resets, Tensor) else f"a {type(resets).__name__}"
        rule = "bools, True where an episode starts"
        raise ArgumentTypeError("resets", got, rule, "pass a tensor such as done")
    if resets.shape != x_t.shape[:-1]:
        rule = f"one bool per stream, of shape {tuple(x_t.shape[:-1])}"
        got = f"shape {tuple(resets.shape)}"
        raise ShapeError("resets", got, rule, "pass one bool per row of x_t")


@never_traced
def _outside_of_graphs(layer: RecurrentLayer, *args: Any, **options: Any) -> Any:
    """Call a layer without compiling it; not ``layer(...)``, which would call its hooks twice."""
    return layer.forward(*args, **options)
