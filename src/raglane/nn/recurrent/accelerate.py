"""Convert a model's recurrent layers to Raglane's, in place, and back."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from raglane._utils.checks import check_every, check_model
from raglane._utils.messages import message
from raglane._utils.tracing import is_jit_traced
from raglane.errors import ArgumentTypeError
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.stack import OPTIONS
from raglane.nn.recurrent.torch_layers import GRU, LSTM, RNN

M = TypeVar("M", bound=torch.nn.Module)


class _Accelerated(RecurrentLayer):
    """What the three have in common: the ways in which PyTorch asks for its own layers find them."""

    def forward(self, input: Any, hx: Any = None, **options: Any) -> Any:
        """See :meth:`~raglane.nn.recurrent.layer.RecurrentLayer.forward`."""
        if is_jit_traced() and not options:
            return next(theirs for ours, theirs in _THEIRS.items() if isinstance(self, ours)).forward(self, input, hx)
        if "torch._dynamo" not in sys.modules:
            return super().forward(input, hx, **options)
        # torch.compile refuses instances of torch's layers, and would compile the functions that they call one by one.
        if not _outside_of_graphs:
            _outside_of_graphs.append(torch.compiler.disable(RecurrentLayer.forward))
        return _outside_of_graphs[0](self, input, hx, **options)

    def __prepare_scriptable__(self) -> Any:
        rule, fix = "TorchScript compiles torch's layers alone", "call rl.restore(model) before torch.jit.script(model)"
        raise ArgumentTypeError(message("torch.jit.script", f"a layer that is {type(self).__name__}", rule, fix))

    @property
    def qconfig(self) -> Any:
        """What :mod:`torch.ao.quantization` leaves at every module of a model that it is given."""
        return vars(self).get("_qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        vars(self)["_qconfig"] = value
        warnings.warn(
            "torch.ao.quantization does not quantise layers that rl.accelerate has converted. For int8 weights call"
            " rl.freeze(model, dtype=torch.int8), or call rl.restore(model) first for PyTorch's own.",
            stacklevel=2,
        )

    @qconfig.deleter
    def qconfig(self) -> None:
        vars(self).pop("_qconfig", None)


# The layers' forward, once there is a compiler to be kept away from it.
_outside_of_graphs: list[Any] = []


class AcceleratedRNN(_Accelerated, RNN, torch.nn.RNN):
    """What a ``torch.nn.RNN`` becomes: Raglane's layer, and still an instance of torch's for code that asks."""


class AcceleratedLSTM(_Accelerated, LSTM, torch.nn.LSTM):
    """What a ``torch.nn.LSTM`` becomes: Raglane's layer, and still an instance of torch's for code that asks."""


class AcceleratedGRU(_Accelerated, GRU, torch.nn.GRU):
    """What a ``torch.nn.GRU`` becomes: Raglane's layer, and still an instance of torch's for code that asks."""


_OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.RNN: AcceleratedRNN,
    torch.nn.LSTM: AcceleratedLSTM,
    torch.nn.GRU: AcceleratedGRU,
}
_OF_CELLS = "is a cell, which runs one step; rl.nn has layers"
_THEIRS: dict[type[torch.nn.Module], Any] = {ours: theirs for theirs, ours in _OURS.items()}


@dataclass(frozen=True)
class Acceleration:
    """What :func:`accelerate` has done to a model.

    Attributes:
        replaced: the names of the layers that are Raglane's now; ``""`` is the model itself.
        left: the names of the recurrent layers that were left, each with the reason.

    Example:
        >>> print(Acceleration(replaced=["encoder"], left={"decoder": "a subclass of torch.nn.LSTM"}))
        1 layer replaced: encoder
        left as it is: decoder (a subclass of torch.nn.LSTM)
    """

    replaced: list[str] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        names = ", ".join(name or "the model itself" for name in self.replaced)
        count = len(self.replaced)
        lines = [f"{count} layer{'' if count == 1 else 's'} replaced{': ' if names else ''}{names}"]
        lines += [f"left as it is: {name or 'the model itself'} ({reason})" for name, reason in self.left.items()]
        return "\n".join(lines)


def accelerate(model: M, *, checkpoint_every: int | None = None) -> M:
    """Make every ``torch.nn.RNN``, ``LSTM`` and ``GRU`` of a model Raglane's, in place.

    The layers stay the same objects with the same parameters, buffers and hooks, and instances of the torch class that
    they were; they take Ragged batches and lengths besides what they took before. Only layers of exactly those types
    are converted: a subclass may rely on what it inherits. A warning names the layers that were left;
    :func:`acceleration` says what was done and why, and :func:`restore` undoes it. Because ``torch.compile`` breaks its
    graph at every instance of ``torch.nn.LSTM`` and its kin, it does so at these as it did before; a layer built as
    ``rl.nn.LSTM`` is compiled without a break.

    Args:
        model: any module; it may be such a layer itself.
        checkpoint_every: a number of steps, for less memory in training; see
            :class:`~raglane.nn.recurrent.layer.RecurrentLayer`. None to leave that of layers as it is.

    Returns:
        The model that was given.

    Raises:
        ArgumentTypeError: not a module.
        ArgumentError: ``checkpoint_every`` is neither a whole number of at least 1 nor None.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LSTM(3, 4))
        >>> model = accelerate(model)
        >>> isinstance(model[1], LSTM), isinstance(model[1], torch.nn.LSTM)
        (True, True)
    """
    check_every(checkpoint_every)
    report = acceleration(model)
    left = {name: reason for name, reason in report.left.items() if not reason.endswith(_OF_CELLS)}
    for module in model.modules():
        if _can_convert(module):
            # torch.fx knows the layers that it must not look into by the module that they come from.
            vars(module)["__module__"] = type(module).__module__
            module.__class__ = _OURS[type(module)]
        if checkpoint_every is not None and isinstance(module, RecurrentLayer):
            module.checkpoint_every = checkpoint_every
    if left:
        names = "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in left.items())
        warnings.warn(f"rl.accelerate has left a layer as it is. {names}.", stacklevel=2)
    return model


def acceleration(model: torch.nn.Module) -> Acceleration:
    """Which layers of a model :func:`accelerate` has converted, and which it leaves and why.

    Args:
        model: any module, before :func:`accelerate` or after it.

    Raises:
        ArgumentTypeError: not a module.

    Example:
        >>> print(acceleration(accelerate(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LSTM(3, 4)))))
        1 layer replaced: 1
    """
    check_model(model)
    modules = list(model.named_modules())
    reasons = {name: _reason_to_leave(module) for name, module in modules}
    return Acceleration(
        [name for name, module in modules if isinstance(module, _Accelerated)],
        {name: reason for name, reason in reasons.items() if reason},
    )


def restore(model: M) -> M:
    """Make the layers that :func:`accelerate` has converted torch's own again, in place; weights stay what they are.

    Args:
        model: any module; it may be such a layer itself.

    Returns:
        The model that was given.

    Raises:
        ArgumentTypeError: not a module, or one with a parametrization on a converted layer.

    Example:
        >>> model = restore(accelerate(torch.nn.LSTM(3, 4)))
        >>> type(model) is torch.nn.LSTM
        True
    """
    check_model(model)
    for place, module in model.named_modules():
        if isinstance(module, _Accelerated):
            if type(module) not in _THEIRS:
                rule, fix = "its class is its own", "call torch.nn.utils.parametrize.remove_parametrizations first"
                raise ArgumentTypeError(message(place or "model", "a layer with a parametrization", rule, fix))
            for name in ("__module__", "_qconfig", *OPTIONS):
                vars(module).pop(name, None)
            module.__class__ = _THEIRS[type(module)]
    return model


def _can_convert(module: torch.nn.Module) -> bool:
    """Whether a module is one of torch's three layers, and does what these do."""
    return type(module) in _OURS and "forward" not in vars(module)


def _reason_to_leave(module: torch.nn.Module) -> str:
    """Why a module that looks like a recurrent layer is left as it is; empty for all others."""
    kind = type(module)
    if kind in _OURS:
        return "" if _can_convert(module) else "its forward was replaced on the instance"
    if isinstance(module, RecurrentLayer):
        return ""
    if isinstance(module, torch.nn.RNNBase):
        base = next(ours for ours in (*_OURS, torch.nn.RNNBase) if isinstance(module, ours))
        return f"{kind.__name__}, a subclass of torch.nn.{base.__name__}, may rely on what it inherits"
    if isinstance(module, torch.nn.RNNCellBase):
        return f"{kind.__name__} {_OF_CELLS}"
    return "it is compiled by torch.jit" if kind.__name__ == "RecursiveScriptModule" else ""
