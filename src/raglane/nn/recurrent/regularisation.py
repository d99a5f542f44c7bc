"""Regularisation inside the recurrence: its masks are drawn before the first step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells import CellSpec
from raglane.cells.regularised import MarkedWeights, Regularised
from raglane.errors import ArgumentError
from raglane.kernels.contract import Request


@dataclass(frozen=True)
class Regularisation:
    """The probabilities of a layer's regularisation; :class:`RecurrentLayer` describes them."""

    input_dropout: float = 0.0
    state_dropout: float = 0.0
    weight_dropout: float = 0.0
    zoneout: float | tuple[float, ...] = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for share in value if name == "zoneout" and isinstance(value, tuple) else (value,):
                if not (isinstance(share, float | int) and 0 <= share < 1):
                    raise ArgumentError(
                        name, repr(value), "a probability, at least 0 and below 1", "pass e.g. 0.2"
                    )

    def check_fits(self, states: tuple[str, ...], reads_state: bool) -> None:
        """Raise an ArgumentError for a probability without effect on a cell with these states."""
        if isinstance(self.zoneout, tuple) and len(self.zoneout) != len(states):
            rule = f"one number, or one for each state of the cell, {', '.join(states)}"
            raise ArgumentError("zoneout", repr(self.zoneout), rule, f"pass {len(states)} numbers")
        for name in ("state_dropout", "weight_dropout"):
            if getattr(self, name) and not reads_state:
                got = repr(getattr(self, name))
                rule = "0 for this cell, whose weights do not read the state"
                raise ArgumentError(name, got, rule, "use input_dropout or zoneout")

    def shares(self, states: int) -> tuple[float, ...] | None:
        """Return the probability of zoneout of each state, or None if all are 0."""
        shares = self.zoneout if isinstance(self.zoneout, tuple) else (self.zoneout,) * states
        return shares if any(shares) else None

    def acts(self, training: bool) -> bool:
        """Return True if a layer differs from its plain cell; in evaluation only zoneout does."""
        drops = training and (self.input_dropout or self.state_dropout or self.weight_dropout)
        return bool(drops) or (bool(self.zoneout) and self.shares(1) is not None)

    def cell(self, inner: CellSpec, training: bool) -> CellSpec:
        """Return a cell with state dropout and zoneout, or the cell itself without either."""
        drops_state = training and self.state_dropout > 0
        zoneout = self.shares(len(inner.states))
        if not drops_state and zoneout is None:
            return inner
        return Regularised(inner, drops_state=drops_state, zoneout=zoneout)


def regularised(rule: Regularisation, cell: CellSpec, request: Request) -> Request:
    """Return a request with the masks of a layer's regularisation drawn."""
    states = len(request.cell.states)
    initial = request.initial()
    zoneout = rule.shares(states)
    drops = request.training and (rule.input_dropout > 0 or request.dropout > 0)
    request = replace(
        request, state=initial, input_dropout=rule.input_dropout, layer_by_layer=drops
    )
    if request.training and rule.weight_dropout:
        share = rule.weight_dropout
        dropped = tuple(_drop_weights(weights, share) for weights in request.weights)
        request = replace(request, weights=dropped)
    if cell is request.cell:
        return request
    drops_state = len(cell.states) > states
    weights = tuple(
        MarkedWeights(
            weights, _zoneout_masks(request, zoneout) if zoneout and request.training else None
        )
        for weights in request.weights
    )
    return replace(
        request,
        cell=cell,
        weights=weights,
        state=(*initial, _mask(initial[0], rule.state_dropout)) if drops_state else initial,
    )


def _mask(like: Tensor, share: float) -> Tensor:
    """Draw a dropout mask of the shape of ``like``, scaled to a mean of 1."""
    # Not ones_like: the draws must not depend on the strides of ``like``.
    return F.dropout(like.new_ones(like.shape), share)


def _drop_weights(weights: object, share: float) -> object:
    """Return a layer's weights with dropout on those between states."""
    name = "recurrent" if hasattr(weights, "recurrent") else "hidden"
    return weights._replace(**{name: F.dropout(getattr(weights, name), share)})  # type: ignore[attr-defined]


def _zoneout_masks(request: Request, shares: tuple[float, ...]) -> Tensor:
    """Draw the zoneout masks of one layer and direction, ``(N, sum of the state sizes)``."""
    values = request.values
    masks = [
        torch.bernoulli(values.new_full((values.shape[0], state.shape[2]), share))
        for state, share in zip(request.initial(), shares, strict=True)
    ]
    return torch.cat(masks, 1)
