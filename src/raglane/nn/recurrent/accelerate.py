"""Converts torch's recurrent layers in a model to Raglane's, in place, and back."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
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
    """The base of the converted layers, with what torch's transformations require of torch's own layers."""

    def forward(self, input: Any, hx: Any = None, **options: Any) -> Any:
        """See :meth:`~raglane.nn.recurrent.layer.RecurrentLayer.forward`."""
        if is_jit_traced() and not options:
            return next(theirs for ours, theirs in _THEIRS.items() if isinstance(self, ours)).forward(self, input, hx)
        if "torch._dynamo" not in sys.modules:
            return super().forward(input, hx, **options)
        # torch.compile skips forward of torch's layers, but would compile each function that it calls.
        if not _outside_of_graphs:
            _outside_of_graphs.append(torch.compiler.disable(RecurrentLayer.forward))
        return _outside_of_graphs[0](self, input, hx, **options)

    def __prepare_scriptable__(self) -> Any:
        rule, fix = (
            "called with a model of torch's own layers",
            "call rl.unaccelerate(model) before torch.jit.script(model)",
        )
        raise ArgumentTypeError(message("torch.jit.script", f"a layer {type(self).__name__}", rule, fix))

    @property
    def qconfig(self) -> Any:
        """The attribute that :mod:`torch.ao.quantization` sets on every module of a model."""
        return vars(self).get("_qconfig")

    @qconfig.setter
    def qconfig(self, value: Any) -> None:
        vars(self)["_qconfig"] = value
        warnings.warn(
            "torch.ao.quantization does not quantise layers that rl.accelerate has converted. For int8 weights call"
            " rl.freeze(model, dtype=torch.int8), or call rl.unaccelerate(model) first for PyTorch's own.",
            stacklevel=2,
        )

    @qconfig.deleter
    def qconfig(self) -> None:
        vars(self).pop("_qconfig", None)


# RecurrentLayer.forward with torch.compile disabled; made at the first use, because it imports torch._dynamo.
_outside_of_graphs: list[Any] = []


class AcceleratedRNN(_Accelerated, RNN, torch.nn.RNN):
    """A converted ``torch.nn.RNN``: an instance of both that class and Raglane's."""


class AcceleratedLSTM(_Accelerated, LSTM, torch.nn.LSTM):
    """A converted ``torch.nn.LSTM``: an instance of both that class and Raglane's."""


class AcceleratedGRU(_Accelerated, GRU, torch.nn.GRU):
    """A converted ``torch.nn.GRU``: an instance of both that class and Raglane's."""


_OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.RNN: AcceleratedRNN,
    torch.nn.LSTM: AcceleratedLSTM,
    torch.nn.GRU: AcceleratedGRU,
}
_OF_CELLS = "is a cell, which runs one step; rl.nn has layers"
_THEIRS: dict[type[torch.nn.Module], Any] = {ours: theirs for theirs, ours in _OURS.items()}


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
        names = ", ".join(name or "the model itself" for name in self.replaced)
        count = len(self.replaced)
        lines = [f"{count} layer{'' if count == 1 else 's'} replaced{': ' if names else ''}{names}"]
        lines += [f"not converted: {name or 'the model itself'} ({reason})" for name, reason in self.left.items()]
        return "\n".join(lines)


def accelerate(model: M, *, checkpoint_every: int | None = None) -> M:
    """Convert every ``torch.nn.RNN``, ``LSTM`` and ``GRU`` of a model to Raglane's layer, in place.

    The layers stay the same objects, with the same parameters, buffers and hooks, and stay instances of their torch
    class. They also accept Ragged batches and lengths. Subclasses are not converted, because they may rely on methods
    that they inherit; a warning names them. ``rl.explain(model)`` lists both kinds, and :func:`unaccelerate` reverts
    the conversion. ``torch.compile`` breaks its graph at a converted layer, as at torch's own; a layer built as
    ``rl.nn.LSTM`` compiles without a break.

    Args:
        model: any module, or one such layer.
        checkpoint_every: the number of steps between the states that are kept for backward, see
            :class:`~raglane.nn.recurrent.layer.RecurrentLayer`. None leaves the layers' own setting unchanged.

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
    left = {name: reason for name, reason in acceleration_of(model).left.items() if not reason.endswith(_OF_CELLS)}
    for module in model.modules():
        if _can_convert(module):
            # torch.fx treats a module as a leaf if its __module__ is torch.nn's.
            vars(module)["__module__"] = type(module).__module__
            module.__class__ = _OURS[type(module)]
        if checkpoint_every is not None and isinstance(module, RecurrentLayer):
            module.checkpoint_every = checkpoint_every
    if left:
        names = "; ".join(f"{name or 'the model itself'}: {reason}" for name, reason in left.items())
        warnings.warn(f"rl.accelerate did not convert a layer. {names}.", stacklevel=2)
    return model


def acceleration_of(model: torch.nn.Module) -> Acceleration:
    """Return the converted layers of a model, and the recurrent layers that :func:`accelerate` does not convert."""
    check_model(model)
    modules = list(model.named_modules())
    reasons = {name: _reason_to_leave(module) for name, module in modules}
    return Acceleration(
        [name for name, module in modules if isinstance(module, _Accelerated)],
        {name: reason for name, reason in reasons.items() if reason},
    )


def unaccelerate(model: M) -> M:
    """Revert :func:`accelerate`: convert its layers back to torch's own, in place, with their current weights.

    Args:
        model: any module, or one converted layer.

    Returns:
        ``model``.

    Raises:
        ArgumentTypeError: ``model`` is not a module, or a converted layer of it has a parametrization.

    Example:
        >>> model = unaccelerate(accelerate(torch.nn.LSTM(3, 4)))
        >>> type(model) is torch.nn.LSTM
        True
    """
    check_model(model)
    for place, module in model.named_modules():
        if isinstance(module, _Accelerated):
            if type(module) not in _THEIRS:
                rule, fix = (
                    "a layer without parametrizations",
                    "call torch.nn.utils.parametrize.remove_parametrizations first",
                )
                raise ArgumentTypeError(message(place or "model", "a layer with a parametrization", rule, fix))
            for name in ("__module__", "_qconfig", *OPTIONS):
                vars(module).pop(name, None)
            module.__class__ = _THEIRS[type(module)]
    return model


def _can_convert(module: torch.nn.Module) -> bool:
    """Return True if a module is exactly one of torch's three layers, with its ``forward`` unchanged."""
    return type(module) in _OURS and "forward" not in vars(module)


def _reason_to_leave(module: torch.nn.Module) -> str:
    """Return why a recurrent module cannot be converted, or "" for all other modules."""
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
