"""What a cell is: the equations of one step, in plain torch, and the weights that they read.

A cell knows nothing of batches, schedules or devices. It says how many gates it has and in which order they
stand in the rows of its weights, which states it carries, what can be computed for all elements at once
(``prepare``) and what must wait for the state (``step``). A backend needs no more to run it on any schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

from torch import Tensor

__all__ = ["CellSpec", "Weights", "summed_bias"]


class Weights(NamedTuple):
    """The weights of one layer in one direction, with the shapes and the row order of ``torch.nn``'s.

    ``G`` is the number of gates, ``H`` the hidden size, ``D`` the size of the layer's input, ``P`` the size
    of the state ``h``: the projection's where there is one, else ``H``.

    Attributes:
        input: ``(G * H, D)``, ``weight_ih`` in torch.
        hidden: ``(G * H, P)``, ``weight_hh``.
        input_bias: ``(G * H,)`` or None, ``bias_ih``.
        hidden_bias: ``(G * H,)`` or None, ``bias_hh``.
        projection: ``(P, H)`` or None, ``weight_hr``.

    Example:
        >>> import torch
        >>> weights = Weights(torch.zeros(12, 5), torch.zeros(12, 3))
        >>> weights.input_bias is None
        True
    """

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


def summed_bias(weights: Weights) -> Tensor | None:
    """Both biases as one, for cells that only ever add them.

    Returns:
        ``(G * H,)``, or None where there is no bias.

    Example:
        >>> import torch
        >>> summed_bias(Weights(torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1))).tolist()
        [2.0]
    """
    if weights.input_bias is None or weights.hidden_bias is None:
        return weights.input_bias if weights.hidden_bias is None else weights.hidden_bias
    return weights.input_bias + weights.hidden_bias


class CellSpec(ABC):
    """The equations of a recurrent cell, and what a kernel must know about them.

    Attributes:
        name: the cell's key in :data:`raglane.cells.CELLS`.
        gates: the gates, in the order in which their blocks of ``H`` rows stand in the weights.
        states: the names of the states, ``h`` first; an initial state is given for each.

    Example:
        >>> from raglane.cells import CELLS
        >>> CELLS["lstm"].gates, CELLS["lstm"].states
        (('i', 'f', 'g', 'o'), ('h', 'c'))
    """

    name: str
    gates: ClassVar[tuple[str, ...]]
    states: ClassVar[tuple[str, ...]]

    def state_sizes(self, hidden_size: int, proj_size: int = 0) -> tuple[int, ...]:  # noqa: ARG002
        """The size of each state, in the order of ``states``; the first is also the size of the output.

        Args:
            hidden_size: ``H``.
            proj_size: ``P``, or 0 where there is no projection. Cells that have none ignore it.

        Example:
            >>> from raglane.cells import CELLS
            >>> CELLS["lstm"].state_sizes(64, 16)
            (16, 64)
        """
        return (hidden_size,) * len(self.states)

    @abstractmethod
    def prepare(self, weights: Weights, values: Tensor, offsets: Tensor) -> Tensor:
        """What needs no state, for all elements at once: the input products and the biases that go with them.

        Args:
            weights: of one layer in one direction.
            values: ``(N, D)``, the layer's input, in the caller's order of sequences.
            offsets: ``(B + 1,)`` int64 on the same device: for cells whose inputs look at neighbouring steps.

        Returns:
            ``(N, G * H)``: one row an element. Row ``i`` may depend on elements of the same sequence alone.
        """

    @abstractmethod
    def step(self, weights: Weights, prepared: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """One step of ``R`` rows, each a sequence of its own. Rows must not look at each other.

        Args:
            weights: of one layer in one direction.
            prepared: ``(R, G * H)``, rows of what :meth:`prepare` gave.
            state: one ``(R, size)`` a state, in the order of ``states``.

        Returns:
            The output ``(R, size of the first state)``, and the new state, shaped like ``state``. The tensors
            given are not changed in place.
        """
