"""The interface of a cell: the equations of one step in plain torch, and the weights that they
read.

A cell is independent of batches, schedules and devices. It defines its gates, in the order of the
rows of its weights, its states, the part that is computed for all elements at once (``prepare``)
and one step (``step``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

Shapes = dict[str, tuple[int, ...] | None]
"""The shapes of parameters by name; None for a parameter that a layer of these sizes does not
have."""

States = tuple[Tensor, ...]
"""The states of a cell, ``(R, size)`` each."""

Stepped = tuple[Tensor, States]
"""The result of a step: the output ``(R, size of the first state)`` and the new states."""


class Weights(NamedTuple):
    """The weights of one layer in one direction, with the shapes and the order of rows of
    ``torch.nn``.

    ``G`` is the number of gates, ``H`` the hidden size, ``D`` the size of the layer's input, and
    ``P`` the size of the state ``h``: that of the projection, or ``H`` without one.

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


def summed_bias(input_bias: Tensor | None, hidden_bias: Tensor | None) -> Tensor | None:
    """Return the sum of both biases, ``(G * H,)``; None without biases."""
    if input_bias is None or hidden_bias is None:
        return hidden_bias if input_bias is None else input_bias
    return input_bias + hidden_bias


def masked(h: Tensor, mask: Tensor | None) -> Tensor:
    """Return the state times its dropout mask, if any."""
    return h if mask is None else h * mask


def bounded(arguments: Tensor, clip: float | None) -> Tensor:
    """Return the arguments of an activation, clamped to ``-clip`` and ``clip`` if a cell clips
    them.
    """
    return arguments if clip is None else arguments.clamp(-clip, clip)


def clipped(name: str, clip: float | None) -> str:
    """Return a cell's name, which differs with clipped gates, because kernels do not clip."""
    return name if clip is None else f"{name} clipped at {clip}"


class CellSpec(ABC):
    """The equations of a recurrent cell, with the facts that kernels need.

    Attributes:
        name: the cell's key in :data:`raglane.cells.CELLS`.
        gates: the gates, in the order of their blocks of ``H`` rows in the weights.
        states: the names of the states, by default only ``h``.
        output_is_state: True if the output is the first state, as in every cell of the library.
        weights_type: a NamedTuple of the weights, in the order of :meth:`shapes`.
        reads_state: True if weights multiply the state, so that dropout on states has an effect.
        follows_autocast: True if ``step`` runs under autocast. Other cells compute in the dtype to
            which everything is cast before the first step.

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

    def shapes(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        proj_size: int = 0,  # noqa: ARG002
    ) -> Shapes:
        """Return the shapes of the parameters of one layer in one direction, in the order of
        ``weights_type``.

        Args:
            input_size: ``D``.
            hidden_size: ``H``.
            bias: True if the layer has biases.
            proj_size: ``P``, or 0 without a projection. Cells without projections ignore it.

        Returns:
            A dict from the name of each parameter to its shape, or None if the layer does not have
            it.

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
        """Return the cell of the layers above the first, with the same names of parameters.

        It is the same cell, unless the first layer reads columns that only data have, such as
        times.

        Example:
            >>> from raglane.cells import CELLS
            >>> CELLS["gru"].above() is CELLS["gru"]
            True
        """
        return self

    def state_sizes(self, hidden_size: int, proj_size: int = 0) -> tuple[int, ...]:  # noqa: ARG002
        """Return the size of each state, in the order of ``states``; the first is also that of the
        output.

        Args:
            hidden_size: ``H``.
            proj_size: ``P``, or 0 without a projection. Cells without projections ignore it.

        Example:
            >>> from raglane.cells import CELLS
            >>> CELLS["lstm"].state_sizes(64, 16)
            (16, 64)
        """
        return (hidden_size,) * len(self.states)

    def block(self, parameter: str, gate: str, hidden_size: int) -> slice:  # noqa: ARG002
        """Return the rows of a parameter that belong to a gate.

        Args:
            parameter: the name of a parameter in :meth:`shapes` that has a block for each gate.
            gate: the name of a gate in ``gates``.
            hidden_size: ``H``.

        Example:
            >>> from raglane.cells import CELLS
            >>> CELLS["lstm"].block("bias_ih", "f", 64)
            slice(64, 128, None)
        """
        start = self.gates.index(gate) * hidden_size
        return slice(start, start + hidden_size)

    def initialise(self, parameter: str, tensor: Tensor, hidden_size: int) -> None:  # noqa: ARG002
        """Fill a new parameter in place, uniformly from ``-1 / sqrt(H)`` to ``1 / sqrt(H)``, as
        torch does.

        Args:
            parameter: the name of a parameter in :meth:`shapes`.
            tensor: the parameter.
            hidden_size: ``H``.
        """
        bound = hidden_size**-0.5
        nn.init.uniform_(tensor, -bound, bound)

    def prepare(self, weights: Any, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """Compute the part of a step that needs no state, for all elements at once.

        By default it is the input product with both biases of :class:`Weights`.

        Args:
            weights: the weights of one layer in one direction, a ``weights_type``.
            values: ``(N, D)``, the layer's input, in the caller's order of sequences.
            offsets: ``(B + 1,)`` int64 on the same device, for cells that read neighbouring steps.

        Returns:
            ``(N, G * H)``, one row per element. A row may depend only on elements of its sequence.
        """
        return F.linear(values, weights.input, summed_bias(weights.input_bias, weights.hidden_bias))

    @abstractmethod
    def step(
        self, weights: Any, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """Compute one step of ``R`` rows, each of another sequence. Rows must not depend on each
        other.

        Args:
            weights: the weights of one layer in one direction, a ``weights_type``.
            prepared: ``(R, G * H)``, rows of the result of :meth:`prepare`.
            state: one ``(R, size)`` per state, in the order of ``states``.
            mask: ``(R, size)`` or None: a factor of the state where weights read it, and only there
                (:func:`masked`). None for cells without ``reads_state``.

        Returns:
            The output ``(R, size of the first state)``, and the new state, shaped like ``state``.
            The arguments are not changed in place.
        """
