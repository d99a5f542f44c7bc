"""The interface of a cell: the equations of one step, in plain torch, and the weights that they read.

A cell knows nothing of batches, schedules or devices. It says how many gates it has and in which order they
stand in the rows of its weights, which states it carries, what can be computed for all elements at once
(``prepare``) and what must wait for the state (``step``). A backend needs no more to run it on any schedule.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

Shapes = dict[str, tuple[int, ...] | None]
"""Parameters by name, with their shapes; None for one that a layer of these sizes does not have."""

States = tuple[Tensor, ...]
"""One ``(R, size)`` for each state of a cell."""

Stepped = tuple[Tensor, States]
"""The result of a step: the output ``(R, size of the first state)`` and the new states."""


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


def summed_bias(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Both biases ``(G * H,)`` as one, for cells that only ever add them; None where there is no bias."""
    if one is None or other is None:
        return other if one is None else one
    return one + other


def masked(h: Tensor, mask: Tensor | None) -> Tensor:
    """The state as a cell's weights read it: times its dropout mask, where there is one."""
    return h if mask is None else h * mask


def bounded(arguments: Tensor, clip: float | None) -> Tensor:
    """The arguments of an activation, held between ``-clip`` and ``clip`` where a cell clips them."""
    return arguments if clip is None else arguments.clamp(-clip, clip)


def clipped(name: str, clip: float | None) -> str:
    """A cell's name, which says so where its gates are clipped: no faster kernel may take it for the plain one."""
    return name if clip is None else f"{name} clipped at {clip}"


class CellSpec(ABC):
    """The equations of a recurrent cell, and what a kernel must know about them.

    Attributes:
        name: the cell's key in :data:`raglane.cells.CELLS`.
        gates: the gates, in the order in which their blocks of ``H`` rows stand in the weights.
        states: the names of the states, ``h`` alone where a cell does not say; an initial state is given for each.
        output_is_state: whether the output is the first state, ``h``, as it is for every named cell.
        weights_type: a NamedTuple of what the equations read, in the order of :meth:`shapes`.
        reads_state: whether weights meet the state, so that there is something for dropout on states to act on.
        follows_autocast: whether ``step`` is to run under autocast as it stands. For other cells all is cast before the
            first step.

    Example:
        >>> from raglane.cells import CELLS
        >>> CELLS["lstm"].gates, CELLS["lstm"].states
        (('i', 'f', 'g', 'o'), ('h', 'c'))
    """

    name: str
    gates: ClassVar[tuple[str, ...]]
    states: ClassVar[tuple[str, ...]] = ("h",)
    weights_type: ClassVar[Any] = Weights
    output_is_state: ClassVar[bool] = True
    reads_state: ClassVar[bool] = True
    follows_autocast: ClassVar[bool] = False

    def shapes(self, input_size: int, hidden_size: int, bias: bool = True, proj_size: int = 0) -> Shapes:  # noqa: ARG002
        """The parameters of one layer in one direction, in the order in which ``weights_type`` takes them.

        Args:
            input_size: ``D``.
            hidden_size: ``H``.
            bias: whether there are biases.
            proj_size: ``P``, or 0 where there is no projection. Cells that have none ignore it.

        Example:
            >>> from raglane.cells import CELLS
            >>> CELLS["gru"].shapes(5, 2, bias=False)
            {'weight_ih': (6, 5), 'weight_hh': (6, 2), 'bias_ih': None, 'bias_hh': None}
        """
        rows = len(self.gates) * hidden_size
        biases = (rows,) if bias else None
        return {
            "weight_ih": (rows, input_size),
            "weight_hh": (rows, hidden_size),
            "bias_ih": biases,
            "bias_hh": biases,
        }

    def above(self) -> CellSpec:
        """The cell of the layers above the first, for their :meth:`shapes`: the same, unless the first reads columns
        that only data have, such as times. Its names of parameters are the same.

        Example:
            >>> from raglane.cells import CELLS
            >>> CELLS["gru"].above() is CELLS["gru"]
            True
        """
        return self

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

    def block(self, parameter: str, gate: str, hidden_size: int) -> slice:  # noqa: ARG002
        """The rows of a parameter that belong to a gate.

        Args:
            parameter: a name among :meth:`shapes`, of a parameter that has a block for each gate.
            gate: a name among ``gates``.
            hidden_size: ``H``.

        Example:
            >>> from raglane.cells import CELLS
            >>> CELLS["lstm"].block("bias_ih", "f", 64)
            slice(64, 128, None)
        """
        start = self.gates.index(gate) * hidden_size
        return slice(start, start + hidden_size)

    def initialise(self, parameter: str, tensor: Tensor, hidden_size: int) -> None:  # noqa: ARG002
        """Fill a new parameter in place: uniformly from ``-1 / sqrt(H)`` to ``1 / sqrt(H)``, as torch does.

        Args:
            parameter: a name among :meth:`shapes`.
            tensor: of the shape there.
            hidden_size: ``H``.
        """
        bound = hidden_size**-0.5
        nn.init.uniform_(tensor, -bound, bound)

    def prepare(self, weights: Any, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """The part that needs no state, for all elements at once: the input products and the biases that go with them.

        Of :class:`Weights` it is the product and both biases. A cell whose biases do not simply add, or with weights of
        its own, says what else.

        Args:
            weights: of one layer in one direction, a ``weights_type``.
            values: ``(N, D)``, the layer's input, in the caller's order of sequences.
            offsets: ``(B + 1,)`` int64 on the same device: for cells whose inputs look at neighbouring steps.

        Returns:
            ``(N, G * H)``: one row per element. Row ``i`` may depend on elements of the same sequence alone.
        """
        return F.linear(values, weights.input, summed_bias(weights.input_bias, weights.hidden_bias))

    @abstractmethod
    def step(self, weights: Any, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:
        """One step of ``R`` rows, each a sequence of its own. Rows must not look at each other.

        Args:
            weights: of one layer in one direction, a ``weights_type``.
            prepared: ``(R, G * H)``, rows of what :meth:`prepare` gave.
            state: one ``(R, size)`` per state, in the order of ``states``.
            mask: ``(R, size)`` or None: what the state is multiplied by where weights read it, and nowhere else
                (:func:`masked`). Cells without ``reads_state`` are given none.

        Returns:
            The output ``(R, size of the first state)``, and the new state, shaped like ``state``. The tensors
            given are not changed in place.
        """
