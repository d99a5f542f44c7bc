"""Regularisation inside the recurrence: what is dropped or held by chance, drawn once before the first step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.messages import message
from raglane.cells import CellSpec
from raglane.cells.regularised import Regularised, RegularisedWeights
from raglane.errors import ArgumentError
from raglane.kernels.contract import Request


@dataclass(frozen=True)
class Regularisation:
    """The probabilities of a layer, each at least 0 and below 1.

    Attributes:
        input_dropout: that a feature of every layer's input is zeroed, for a whole sequence.
        state_dropout: that a unit of the state is zeroed where weights read it, for a whole sequence.
        weight_dropout: that a weight between states is zeroed, for a whole batch: DropConnect, as Merity et al.
            (2017, arXiv:1708.02182) use it.
        zoneout: that a unit keeps its value for a step; one number for all states, or one for each.

    Raises:
        ArgumentError: a probability out of range.

    Example:
        >>> Regularisation(zoneout=(0.1, 0.5))
        Regularisation(input_dropout=0.0, state_dropout=0.0, weight_dropout=0.0, zoneout=(0.1, 0.5))
    """

    input_dropout: float = 0.0
    state_dropout: float = 0.0
    weight_dropout: float = 0.0
    zoneout: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        for name, given in vars(self).items():
            for share in given if name == "zoneout" and isinstance(given, tuple) else (given,):
                if not (isinstance(share, float | int) and 0 <= share < 1):
                    rule = "a probability, at least 0 and below 1"
                    raise ArgumentError(message(name, repr(given), rule, "pass e.g. 0.2"))

    def check_fits(self, states: tuple[str, ...], reads_state: bool) -> None:
        """Refuse a probability that acts on nothing in a cell.

        Args:
            states: the cell's.
            reads_state: whether weights meet the cell's state.

        Raises:
            ArgumentError: the cell has nothing for one of them to act on.
        """
        if isinstance(self.zoneout, tuple) and len(self.zoneout) != len(states):
            rule = f"one number, or one for each state of the cell, {', '.join(states)}"
            raise ArgumentError(message("zoneout", repr(self.zoneout), rule, f"pass {len(states)} numbers"))
        for name in ("state_dropout", "weight_dropout"):
            if getattr(self, name) and not reads_state:
                got, rule = repr(getattr(self, name)), "0 for a cell without recurrent weights"
                raise ArgumentError(message(name, got, rule, "use input_dropout or zoneout"))

    def held(self, states: int) -> tuple[float, ...] | None:
        """The probability of zoneout for each state, or None where no state has one."""
        shares = self.zoneout if isinstance(self.zoneout, tuple) else (self.zoneout,) * states
        return shares if any(shares) else None

    def acts(self, training: bool) -> bool:
        """Whether anything differs from the plain cell: in evaluation, zoneout's mean alone does."""
        drops = training and (self.input_dropout or self.state_dropout or self.weight_dropout)
        return bool(drops) or (bool(self.zoneout) and self.held(1) is not None)

    def cell(self, inner: CellSpec, training: bool) -> CellSpec:
        """What a cell becomes: itself, where nothing is dropped or held inside of it."""
        drops_state, zoneout = training and self.state_dropout > 0, self.held(len(inner.states))
        if not drops_state and zoneout is None:
            return inner
        return Regularised(inner, drops_state=drops_state, zoneout=zoneout)


def regularised(rule: Regularisation, cell: CellSpec, request: Request) -> Request:
    """A request with all that a layer drops and holds, drawn before the first step."""
    states, initial = len(request.cell.states), request.initial()
    zoneout = rule.held(states)
    drops = request.training and (rule.input_dropout > 0 or request.dropout > 0)
    request = replace(request, state=initial, input_dropout=rule.input_dropout, layer_by_layer=drops)
    if request.training and rule.weight_dropout:
        request = replace(request, weights=tuple(_drop_weights(part, rule.weight_dropout) for part in request.weights))
    if cell is request.cell:
        return request
    drops_state = len(cell.states) > states
    held = [_held(request, zoneout) if zoneout and request.training else None for _ in request.weights]
    return replace(
        request,
        cell=cell,
        weights=tuple(RegularisedWeights(*pair) for pair in zip(request.weights, held, strict=True)),
        state=(*initial, _mask(initial[0], rule.state_dropout)) if drops_state else initial,
    )


def _mask(like: Tensor, share: float) -> Tensor:
    """Zeros with this probability, and elsewhere what keeps the mean; one for each number of ``like``."""
    # Not ones_like: which number goes where must not hang on how the strides of ``like`` are ordered.
    return F.dropout(like.new_ones(like.shape), share)


def _drop_weights(weights: object, share: float) -> object:
    """A layer's weights with some of those between states zeroed."""
    name = "recurrent" if hasattr(weights, "recurrent") else "hidden"
    return weights._replace(**{name: F.dropout(getattr(weights, name), share)})  # type: ignore[attr-defined]


def _held(request: Request, shares: tuple[float, ...]) -> Tensor:
    """One layer and direction's masks of zoneout, ``(N, sum of the state sizes)``."""
    return torch.cat(
        [
            torch.bernoulli(request.values.new_full((request.values.shape[0], part.shape[2]), share))
            for part, share in zip(request.initial(), shares, strict=True)
        ],
        1,
    )
