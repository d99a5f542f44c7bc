"""Turn a model's recurrent layers into Raglane's, in place."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from raglane.errors import ArgumentTypeError, explain
from raglane.nn.layer import RecurrentLayer
from raglane.nn.recurrent import GRU, LSTM, RNN

__all__ = ["Acceleration", "accelerate"]


class AcceleratedRNN(RNN, torch.nn.RNN):
    """What a ``torch.nn.RNN`` becomes: Raglane's layer, and still an instance of torch's for code that asks."""


class AcceleratedLSTM(LSTM, torch.nn.LSTM):
    """What a ``torch.nn.LSTM`` becomes: Raglane's layer, and still an instance of torch's for code that asks."""


class AcceleratedGRU(GRU, torch.nn.GRU):
    """What a ``torch.nn.GRU`` becomes: Raglane's layer, and still an instance of torch's for code that asks."""


_OURS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.RNN: AcceleratedRNN,
    torch.nn.LSTM: AcceleratedLSTM,
    torch.nn.GRU: AcceleratedGRU,
}


@dataclass(frozen=True)
class Acceleration:
    """What :func:`accelerate` did to a model.

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


def accelerate(model: torch.nn.Module) -> Acceleration:
    """Make every ``torch.nn.RNN``, ``LSTM`` and ``GRU`` of a model Raglane's, in place.

    The layers stay the same objects with the same parameters, buffers and hooks, and instances of the torch class that
    they were; they take Ragged batches and lengths besides what they took before. Only layers of exactly those types
    are turned: a subclass may rely on what it inherits. Because ``torch.compile`` breaks its graph at every instance of
    ``torch.nn.LSTM`` and its kin, it does so at these as it did before; a layer built as ``rl.nn.LSTM`` is compiled
    without a break.

    Args:
        model: any module; it may be such a layer itself.

    Returns:
        What was replaced, and what was left and why; print it.

    Raises:
        ArgumentTypeError: not a module.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LSTM(3, 4))
        >>> print(accelerate(model))
        1 layer replaced: 1
        >>> isinstance(model[1], LSTM)
        True
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentTypeError(
            explain("model", type(model).__name__, "a torch.nn.Module", "pass the model, before torch.compile")
        )
    report = Acceleration()
    for name, module in model.named_modules():
        reason = _reason_to_leave(module)
        if reason is None:
            module.__class__ = _OURS[type(module)]
            report.replaced.append(name)
        elif reason:
            report.left[name] = reason
    return report


def _reason_to_leave(module: torch.nn.Module) -> str | None:
    """None for a layer to turn, a reason for one that looks like it and is left, an empty one for anything else."""
    kind = type(module)
    if kind in _OURS:
        if "forward" in vars(module):
            return "its forward was replaced on the instance"
        return None
    if isinstance(module, RecurrentLayer):
        return "it is Raglane's already"
    if isinstance(module, torch.nn.RNNBase):
        base = next(ours for ours in (*_OURS, torch.nn.RNNBase) if isinstance(module, ours))
        return f"{kind.__name__}, a subclass of torch.nn.{base.__name__}, may rely on what it inherits"
    if isinstance(module, torch.nn.RNNCellBase):
        return f"{kind.__name__} is a cell, which runs one step; rl.nn has layers"
    if kind.__name__ in ("RecursiveScriptModule", "OptimizedModule"):
        return "" if kind.__name__ == "OptimizedModule" else "it is compiled by torch.jit"
    return ""
