"""Converts recurrent layers in a model to Raglane's, in place, and back."""

from __future__ import annotations

import inspect
import types
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeVar

import torch

from raglane._utils.checks import check_every, check_model
from raglane._utils.messages import count_of, first_of
from raglane._utils.tracing import is_jit_traced, never_traced
from raglane.cells import SLSTM, CellSpec
from raglane.cells.slstm import SLSTMWeights
from raglane.errors import ArgumentTypeError
from raglane.native import missing_kernels
from raglane.nn.porting.episodes import base_of_model
from raglane.nn.porting.transformers.base import Mixer
from raglane.nn.porting.transformers.entry import enter, leave
from raglane.nn.porting.transformers.families import is_mixer, mixer_of, reason_to_leave_mixer
from raglane.nn.porting.xlstm import slstm_weights
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.stack import OPTIONS
from raglane.nn.recurrent.torch_layers import GRU, LSTM, RNN

M = TypeVar("M", bound=torch.nn.Module)
# The most layers that a line names.
_LISTED = 20


class _Converted:
    """The base of the classes of converted modules."""

    _theirs: ClassVar[Any]  # the class before the conversion

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)
        # A class that is made at run time cannot be imported, so a pickle contains the name of the
        # class before.
        return reduced if self._theirs in _OURS else (_new, (self._theirs,), *reduced[2:])


class _Accelerated(_Converted, RecurrentLayer):
    """The base of the converted layers, with what torch's transformations require of torch's own
    layers.
    """

    # Plain attributes, because a subclass of torch's layers may have its own.
    input_dropout: float = 0.0
    state_dropout: float = 0.0
    weight_dropout: float = 0.0
    zoneout: float = 0.0
    _for_torchs = ", or call rl.to_torch(model) first for PyTorch's own"

    def forward(self, input: Any, hx: Any = None, **options: Any) -> Any:
        """See :meth:`~raglane.nn.recurrent.layer.RecurrentLayer.forward`."""
        layer: Any = self
        if not isinstance(layer, _Accelerated):
            # A closure that replaces forward still calls this method after rl.to_torch.
            return type(layer).forward(layer, input, hx, **options)
        if is_jit_traced() and not options:
            return _base_of(type(self)).forward(self, input, hx)
        # torch.compile skips forward of torch's layers, but would compile each function that it
        # calls.
        return _forward(self, input, hx, **options)

    def __prepare_scriptable__(self) -> Any:
        rule = "called with a model of torch's own layers"
        fix = "call rl.to_torch(model) before torch.jit.script(model)"
        raise ArgumentTypeError("torch.jit.script", f"a layer {type(self).__name__}", rule, fix)


_forward: Any = never_traced(RecurrentLayer.forward)


class _AcceleratedRNNBase(_Accelerated):
    """The base of the converted layers of torch."""

    _update_flat_weights: Any
    _flat_weights: Any
    _flat_weights_names: Any
    _flat_weight_refs: Any

    def _replaced_weights(self) -> dict[str, Any]:
        """Return the weights by name, read as often as torch's forward reads them: each reading is
        a power iteration of spectral_norm.
        """
        before = self._flat_weights
        self._update_flat_weights()
        weights = [ref and ref() for ref in self._flat_weight_refs]
        self._flat_weights = before  # a layer that keeps tensors of a graph cannot be copied
        return dict(zip(self._flat_weights_names, weights, strict=True))

    def reset_parameters(self) -> None:
        """Initialise all parameters as torch does, with those of modules of a subclass."""
        torch.nn.RNNBase.reset_parameters(self)  # type: ignore[arg-type]


class AcceleratedRNN(_AcceleratedRNNBase, RNN, torch.nn.RNN):
    """A converted ``torch.nn.RNN``: an instance of both that class and Raglane's."""


class AcceleratedLSTM(_AcceleratedRNNBase, LSTM, torch.nn.LSTM):
    """A converted ``torch.nn.LSTM``: an instance of both that class and Raglane's."""


class AcceleratedGRU(_AcceleratedRNNBase, GRU, torch.nn.GRU):
    """A converted ``torch.nn.GRU``: an instance of both that class and Raglane's."""


@cache
def _slstm(heads: int) -> CellSpec:
    """Return the cell of an sLSTM whose input is that of the gates; a plan compares cells by
    identity.
    """
    return SLSTM(heads, input_weights=False)


class AcceleratedSLSTM(_Accelerated):
    """A converted sLSTM cell of xlstm or TiRex, with its parameters, input of four gates, output
    and state.
    """

    _recurrent_kernel_: torch.Tensor
    _bias_: torch.Tensor
    config: Any
    _permute_output: Any
    num_layers = 1
    bidirectional = False
    dropout = 0.0
    backend = property(lambda _: "auto")  # TiRex has an attribute of this name

    @property
    def cell(self) -> CellSpec:
        """The cell that the layer runs."""
        return _slstm(len(self._recurrent_kernel_))

    @property
    def hidden_size(self) -> int:  # type: ignore[override]
        """The number of units."""
        return self._recurrent_kernel_.shape[0] * min(self._recurrent_kernel_.shape[1:])

    @property
    def input_size(self) -> int:  # type: ignore[override]
        """The number of features of the input."""
        return 4 * self.hidden_size

    @property
    def batch_first(self) -> bool:  # type: ignore[override]
        """True if padded tensors are ``(B, T, 4 * H)``."""
        return bool(getattr(self.config, "input_shape", "BSGNH") == "BSGNH")

    def _weights(self) -> tuple[Any, ...]:
        return (SLSTMWeights(None, *slstm_weights(self._recurrent_kernel_, self._bias_)),)

    def _like(self, weights: tuple[Any, ...]) -> torch.Tensor | None:
        hidden: torch.Tensor = weights[0].hidden
        return hidden

    def forward(self, input: Any, state: Any = None, lengths: Any = None, **options: Any) -> Any:  # type: ignore[override]
        """Run the cell with its own arguments, or as a layer on another batch or with a layer's
        options.
        """
        cell: Any = self
        if not isinstance(cell, AcceleratedSLSTM):  # as in _Accelerated.forward
            options |= {} if lengths is None else {"lengths": lengths}
            return type(cell).forward(cell, input, state, **options)
        if not isinstance(input, torch.Tensor) or input.dim() != 3 or options:
            return RecurrentLayer.forward(self, input, state, lengths=lengths, **options)
        hx = state.unsqueeze(1).unbind() if isinstance(state, torch.Tensor) else state
        output, final = RecurrentLayer.forward(self, input, hx, lengths=lengths)
        return self._permute_output(
            output.transpose(0, 1) if self.batch_first else output
        ), torch.cat(final)


_OURS: dict[type[torch.nn.Module], Any] = {
    torch.nn.RNN: AcceleratedRNN,
    torch.nn.LSTM: AcceleratedLSTM,
    torch.nn.GRU: AcceleratedGRU,
}
for _kind, _ours in _OURS.items():
    _ours._theirs = _kind
# Reasons of which rl.accelerate does not warn.
_OF_CELLS = "is a cell, which runs one step; rl.nn has layers"
_OF_OURS = "it is a layer of rl.nn; rl.explain(layer, batch) returns its backend"
# The methods that torch's forward calls, and Raglane's does not.
_CALLED = (
    *(
        "_init_flat_weights",
        "_update_flat_weights",
        "_weights_have_changed",
        "check_forward_args",
        "check_hidden_size",
    ),
    *("check_input", "get_expected_cell_size", "get_expected_hidden_size", "permute_hidden"),
    *("__getattr__", "__getattribute__"),
)
# The attributes that Raglane's layers add to torch's.
_ADDED = {
    name
    for name in {*dir(AcceleratedLSTM)} - {*dir(torch.nn.LSTM), "qconfig"}
    if not name.startswith("__")
}
# Those that an attribute of a subclass may replace, as plain attributes of the class.
_REPLACEABLE = {"input_dropout", "state_dropout", "weight_dropout", "zoneout"}


@dataclass(frozen=True)
class Acceleration:
    """The layers of a model that :func:`accelerate` converted or left; ``print`` shows them.

    Attributes:
        replaced: the names of the converted layers; ``""`` is the model itself.
        left: the names of the recurrent layers that were not converted, each with the reason.
    """

    replaced: list[str]
    left: dict[str, str]

    def __str__(self) -> str:
        names = f": {_listed(self.replaced)}" if self.replaced else ""
        lines = [f"{count_of(len(self.replaced), 'layer')} replaced{names}"]
        lines += [
            f"not converted: {_listed(left)} ({reason})"
            for reason, left in _by_reason(self.left).items()
        ]
        return "\n".join(lines)


def _by_reason(left: dict[str, str]) -> dict[str, list[str]]:
    """Return the names of layers by the reason why they are not converted."""
    return {reason: [name for name in left if left[name] == reason] for reason in left.values()}


def _listed(names: Iterable[str]) -> str:
    """Return the first names, and the number of the others."""
    return first_of([name or "the model itself" for name in names], _LISTED)


def accelerate(model: M, *, checkpoint_every: int | None = None) -> M:
    """Convert every ``torch.nn.RNN``, ``LSTM`` and ``GRU`` of a model to Raglane's layer, in place.

    The sLSTM cells of the packages xlstm (``backend="vanilla"``) and TiRex (``backend="torch"``)
    are converted too, and keep their input, output and state. TiRex's compute in the dtype of their
    input then, instead of in bfloat16.

    The layers stay the same objects, with the same parameters, buffers and hooks, and stay
    instances of their torch class. They also accept Ragged batches and lengths.
    ``rl.explain(model)`` lists converted and other layers, and :func:`to_torch` reverts the
    conversion. ``torch.compile`` breaks its graph at a converted layer, as at torch's own; a layer
    built as ``rl.nn.LSTM`` compiles without a break.

    A subclass is converted too, and keeps its methods: only the ``forward`` of torch that it
    inherits is replaced, or that it calls as ``super().forward(...)``. A warning names the
    subclasses that are not converted: those whose ``forward`` does not call ``super().forward``,
    and those that override a method which torch's ``forward`` calls, e.g. ``permute_hidden``, or
    that have an attribute of the name of one of Raglane's, e.g. ``step``.

    In models of transformers the mixers of Mamba and its kin are converted, and padding and several
    sequences in a row mean what they say; see :doc:`/from-torch/accelerate`.

    Recurrent policies of sb3-contrib, and LSTMModule and GRUModule of torchrl with their default
    backend, also run their layers in one call if episodes start within the sequences.

    Args:
        model: any module, or one such layer.
        checkpoint_every: the number of steps between the states that are kept for backward, see
            :class:`~raglane.nn.recurrent.layer.RecurrentLayer`. None leaves the layers' own setting
            unchanged.

    Returns:
        ``model``.

    Raises:
        ArgumentTypeError: ``model`` is not a module.
        ArgumentError: ``checkpoint_every`` is neither a whole number of at least 1 nor None.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LSTM(3, 4))
        >>> model = accelerate(model)
        >>> isinstance(model[1], LSTM), isinstance(model[1], torch.nn.LSTM)
        (True, True)
    """
    check_every(checkpoint_every)
    reasons = acceleration_of(model).left
    left = {
        name: reason
        for name, reason in reasons.items()
        if not reason.endswith((_OF_CELLS, _OF_OURS))
    }
    for name, module in model.named_modules():
        if (_is_torchs(module) or _is_slstm(module)) and not _reason_to_leave(module):
            # torch.fx treats a module as a leaf if its __module__ is torch.nn's.
            vars(module)["__module__"] = type(module).__module__
            module.__class__ = _converted(type(module))
        if checkpoint_every is not None and isinstance(module, RecurrentLayer):
            module.checkpoint_every = checkpoint_every
        if is_mixer(module) and not _reason_to_leave(module):
            module.__class__ = _converted(type(module))
            if isinstance(module, Mixer):
                module.adopt(name)
    for module in model.modules():
        if _resets_states(module):
            module.__class__ = _converted(type(module))
    enter(model)
    for problem in _problems(model, left, reasons):
        warnings.warn(f"rl.accelerate {problem}.", stacklevel=2)
    return model


def _problems(
    model: torch.nn.Module, left: dict[str, str], reasons: dict[str, str]
) -> Iterator[str]:
    """Yield why a model, or a layer of it, runs as before its conversion."""
    layers = [module for module in model.modules() if isinstance(module, RecurrentLayer | Mixer)]
    if left:
        yield f"did not convert a layer. {_reasons(left)}"
    elif not layers:
        more = f". {_reasons(reasons)}" if reasons else ""
        yield f"replaced no layer: the model has no torch.nn.RNN, LSTM or GRU to convert{more}"
    weights = [weight for layer in layers for weight in layer.parameters()]
    missing = missing_kernels() if any(weight.is_cpu for weight in weights) else None
    if missing is not None:
        yield f"converted layers that run on PyTorch's kernels on this CPU as before: {missing}"


def _reasons(left: dict[str, str]) -> str:
    """Return the names of layers that are not converted, with the reasons."""
    return "; ".join(f"{_listed(names)}: {reason}" for reason, names in _by_reason(left).items())


def acceleration_of(model: torch.nn.Module) -> Acceleration:
    """Return the converted layers of a model, and the recurrent layers that :func:`accelerate` does
    not convert.
    """
    check_model(model)
    modules = list(model.named_modules())
    reasons = {name: _reason_to_leave(module) for name, module in modules}
    return Acceleration(
        [name for name, module in modules if isinstance(module, _Accelerated | Mixer)],
        {name: reason for name, reason in reasons.items() if reason},
    )


def to_torch(model: M) -> M:
    """Revert :func:`accelerate`: convert its layers back to torch's own, in place, with their
    current weights.

    Args:
        model: any module, or one converted layer.

    Returns:
        ``model``.

    Raises:
        ArgumentTypeError: ``model`` is not a module, or a converted layer of it has a
            parametrization.

    Example:
        >>> model = to_torch(accelerate(torch.nn.LSTM(3, 4)))
        >>> type(model) is torch.nn.LSTM
        True
    """
    check_model(model)
    for name, module in model.named_modules():
        leave(module)
        if isinstance(module, _Converted):
            if "_theirs" not in vars(type(module)):
                rule = "a layer without parametrizations"
                fix = "call torch.nn.utils.parametrize.remove_parametrizations first"
                got = "a layer with a parametrization"
                raise ArgumentTypeError(name or "model", got, rule, fix)
            added = (
                {"__module__", "_qconfig", *OPTIONS} - _REPLACEABLE
                if isinstance(module, _Accelerated)
                else set()
            )
            if isinstance(module, AcceleratedSLSTM):
                added.discard("backend")
            for attribute in added:
                vars(module).pop(attribute, None)
            module.__class__ = module._theirs
    return model


def _is_torchs(module: torch.nn.Module) -> bool:
    """Return True for a layer of torch that is not converted."""
    return isinstance(module, torch.nn.RNNBase) and not isinstance(module, RecurrentLayer)


def _resets_states(module: torch.nn.Module) -> bool:
    """Return True for a model with a converted layer that the fast path of episodes supports."""
    if isinstance(module, _Converted) or getattr(module, "recurrent_backend", "pad") != "pad":
        return False
    return base_of_model(type(module)) is not None and any(
        isinstance(child, _Accelerated) for child in module.children()
    )


def _is_slstm(module: torch.nn.Module) -> bool:
    """Return True for an sLSTM cell of xlstm or TiRex that is not converted."""
    package = type(module).__module__.partition(".")[0]
    name = type(module).__name__
    is_cell = (
        package in ("xlstm", "tirex")
        and name.startswith("sLSTMCell")
        and hasattr(module, "_recurrent_kernel_")
    )
    return is_cell and not isinstance(module, RecurrentLayer)


def _base_of(kind: type[torch.nn.Module]) -> Any:
    """Return the class of torch's three layers that a class is or inherits from, or None."""
    return next((base for base in _OURS if issubclass(kind, base)), None)


def _converted(kind: type[torch.nn.Module]) -> Any:
    """Return the class of a converted layer; a subclass is its first base, for its methods."""
    if kind in _OURS:
        return _OURS[kind]
    for subclass in kind.__subclasses__():
        if vars(subclass).get("_theirs") is kind:
            return subclass
    body = {"_theirs": kind, "__module__": kind.__module__, "__doc__": kind.__doc__}
    base = _base_of(kind)
    model = base_of_model(kind) or mixer_of(kind)
    bases: tuple[Any, ...] = (kind, _OURS[base]) if base is not None else (AcceleratedSLSTM, kind)
    if model is not None:
        bases = (_Converted, model, kind)
    return types.new_class(
        f"Accelerated{kind.__name__}", bases, exec_body=lambda names: names.update(body)
    )


def _new(kind: type[torch.nn.Module]) -> Any:
    """Return an empty converted layer, for unpickling."""
    converted = _converted(kind)
    return converted.__new__(converted)


def _reason_to_leave(module: torch.nn.Module) -> str:
    """Return why a recurrent module cannot be converted, or "" for all other modules."""
    name = type(module).__name__
    if _is_torchs(module):
        return _reason_of_layer(module)
    if _is_slstm(module):
        return _reason_of_slstm(module)
    if is_mixer(module):
        return reason_to_leave_mixer(module)
    if isinstance(module, torch.nn.RNNCellBase):
        return f"{name} {_OF_CELLS}"
    if isinstance(module, RecurrentLayer) and not isinstance(module, _Accelerated):
        return _OF_OURS
    is_layer = name == "RecursiveScriptModule" and hasattr(module, "weight_ih_l0")
    return "it is compiled by torch.jit" if is_layer else ""


def _reason_of_layer(module: torch.nn.Module) -> str:
    """Return why a layer of torch, or of a subclass, cannot be converted, or "" if it can."""
    kind = type(module)
    base = _base_of(type(module))
    if base is None:
        return f"{kind.__name__}, a subclass of torch.nn.RNNBase, has a computation of its own"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    overrides = [vars(parent) for parent in kind.__mro__ if parent not in base.__mro__]
    registered = {**module._parameters, **module._buffers, **module._modules}
    for names in (*overrides, vars(module), registered):
        changed = next((name for name in _CALLED if name in names), None)
        if changed is not None:
            return f"{kind.__name__} overrides {changed}"
        added = _ADDED if names is registered else _ADDED - _REPLACEABLE
        taken = next((name for name in names if name in added), None)
        if taken is not None:
            return f"{kind.__name__} has an attribute {taken}, as Raglane's layers do"
    if not all(_calls_inherited(names["forward"]) for names in overrides if "forward" in names):
        return f"the forward of {kind.__name__} does not call super().forward"
    return ""


def _reason_of_slstm(cell: Any) -> str:
    """Return why an sLSTM cell cannot be converted, or "" if it can."""
    if getattr(cell.config, "function", "slstm") != "slstm":
        return f"its function is {cell.config.function}"
    backend = getattr(cell, "backend", None) or cell.config.backend
    if backend == "cuda":
        return "it has CUDA kernels; backend='vanilla', or 'torch' in TiRex, has none"
    return ""


def _calls_inherited(forward: Any) -> bool:
    """Return True if a method's code contains ``super().forward``."""
    code = getattr(inspect.unwrap(forward), "__code__", None)
    return code is not None and {"super", "forward"} <= set(code.co_names)
