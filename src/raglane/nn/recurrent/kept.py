"""Weights that ``rl.freeze`` has packed, and how a call knows whether they still stand for the layer's."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["Kept", "keep", "kept_of"]


class Kept:
    """A layer's weights as they were, and what was packed of them.

    Args:
        weights: all that there are of all layers and directions.
        packed: of each layer, see :meth:`raglane.kernels.cpu.layer.Layer.packed`.

    Attributes:
        of_int8: whether they were rounded to int8.
        ended: whether a change of the weights was seen.
    """

    __slots__ = ("_known", "_packed", "ended", "of_int8")

    def __init__(self, weights: Sequence[Tensor], packed: Sequence[Tensor]) -> None:
        self.of_int8 = packed[0].dtype is torch.int8
        # An alias of each holds its memory: no other numbers come to lie at the same address. The same memory may be
        # read in another order, or with the other sign.
        self._known = [
            (part, part._version, part.data_ptr(), part.stride(), part.is_neg(), part.detach()) for part in weights
        ]
        self._packed = tuple(packed)
        self.ended = False

    def packed_for(self, weights: Sequence[Any]) -> tuple[Tensor, ...]:
        """What was packed, if these are the weights that it was packed of; else nothing.

        Numbers that changed in a tensor that is still the same one end it for good: what was packed is let go.
        """
        # Another thread may end it meanwhile.
        place, all_known, packed = 0, self._known, self._packed
        for own in weights:
            for part in own:
                if part is None:
                    continue
                if place == len(all_known):
                    return ()
                known, version, address, strides, is_neg, _ = all_known[place]
                if part is not known:
                    return ()  # for this call alone, as torch.func.functional_call does it
                if (
                    part._version != version
                    or part.data_ptr() != address
                    or part.stride() != strides
                    or part.is_neg() is not is_neg
                ):
                    self._end()
                    return ()
                place += 1
        return packed if place == len(all_known) else ()

    def changed(self, weights: AbstractSet[int]) -> None:
        """End it, if it was packed of any of these weights."""
        if any(id(known) in weights for known, *_ in self._known):
            self._end()

    def _end(self) -> None:
        self.ended, self._packed, self._known = True, (), []


# Not on the layers themselves: a copy of a layer has weights of its own, and a pickle none of this.
_kept: WeakKeyDictionary[torch.nn.Module, Kept] = WeakKeyDictionary()


def keep(layer: torch.nn.Module, kept: Kept) -> None:
    """Have the calls of a layer find what was packed of its weights."""
    _hear_of_steps()
    _kept[layer] = kept


def kept_of(layer: torch.nn.Module) -> Kept | None:
    """What was packed of a layer's weights, where something was."""
    return _kept.get(layer)


@cache
def _hear_of_steps() -> None:
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """PyTorch keeps no record of what a fused optimizer writes."""
    if any(group.get("fused") for group in optimizer.param_groups):
        weights = {id(part) for group in optimizer.param_groups for part in group["params"]}
        for kept in list(_kept.values()):
            kept.changed(weights)
