"""The interface of competitors: how a case is prepared, timed and checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.batch import Batch
from harness.cases import CELLS, DTYPES, MODES, Case

__all__ = ["Answer", "Competitor", "Forward", "Runner", "rows_of", "torch_runner"]

Forward = Callable[[], tuple[Tensor, tuple[Tensor, ...] | None]]
"""Runs a layer: its outputs, in the layout of its input, and the final states, ``(B, H)`` in the
caller's order."""


@dataclass(frozen=True, eq=False)
class Answer:
    """The results of a layer for the check, in the flat layout and the caller's order.

    Attributes:
        output: ``(N, H)``.
        state: the final states, ``(B, H)`` each; None if the competitor has no comparable states.
        gradients: of the weights by their names, and of the ``input`` ``(N, D)``; empty for
            inference.
    """

    output: Tensor
    state: tuple[Tensor, ...] | None
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Runner:
    """A case prepared by a competitor.

    Attributes:
        call: the timed function: forward, and in training backward, without the preparation of
            input.
        answer: runs the same once, and returns the results.
        inputs: arrays that an engine reads without owning them; they are kept alive with the
            runner.
    """

    call: Callable[[], object]
    answer: Callable[[], Answer]
    inputs: object = None


@dataclass(frozen=True)
class Competitor:
    """An implementation of layers that can run cases.

    Attributes:
        name: its key in ``COMPETITORS``, and its name in tables.
        description: one phrase.
        prepare: from a batch, the mode and the number of threads to a runner.
        family: ``ours``, ``torch`` or ``engine``.
        modules: the required modules.
        cells: the supported cells.
        modes: the supported modes.
        dtypes: the supported dtypes.
        view: from the batch of a case to the batch that it runs.
    """

    name: str
    description: str
    prepare: Callable[[Batch, str, int], Runner]
    family: str
    modules: tuple[str, ...] = ()
    cells: tuple[str, ...] = CELLS
    modes: tuple[str, ...] = MODES
    dtypes: tuple[str, ...] = DTYPES
    view: Callable[[Batch], Batch] = lambda batch: batch

    def runs(self, case: Case) -> bool:
        """Return True if the competitor supports a case."""
        return case.cell in self.cells and case.mode in self.modes and case.dtype in self.dtypes


def rows_of(padded: Tensor, lengths: Tensor) -> Tensor:
    """Return the real elements of a padded tensor ``(T, B, F)``, sequence after sequence: ``(N,
    F)``.

    Example:
        >>> rows_of(torch.arange(6).view(3, 2, 1), torch.tensor([1, 3])).flatten().tolist()
        [0, 1, 3, 5]
    """
    return torch.cat([padded[:length, row] for row, length in enumerate(lengths.tolist())])


def torch_runner(
    mode: str,
    layer: torch.nn.Module,
    bind: Callable[[Tensor], Forward],
    data: Tensor,
    gradient: Tensor,
    flatten: Callable[[Tensor], Tensor],
) -> Runner:
    """Return a runner on torch's autograd, for any layout of data."""
    parameters = dict(layer.named_parameters())

    if mode == "infer":
        forward = bind(data)

        def infer() -> tuple[Tensor, tuple[Tensor, ...] | None]:
            with torch.no_grad():
                return forward()

        def answer() -> Answer:
            output, state = infer()
            return Answer(flatten(output), state)

        return Runner(infer, answer)

    leaf = data.detach().clone().requires_grad_()
    step, wanted = bind(leaf), [leaf, *parameters.values()]

    def clear() -> None:
        for tensor in wanted:
            tensor.grad = None

    def train() -> None:
        output, _ = step()
        output.backward(gradient)
        clear()

    def train_answer() -> Answer:
        output, state = step()
        output.backward(gradient)
        gradients = {name: _gradient(parameter) for name, parameter in parameters.items()}
        gradients["input"] = flatten(_gradient(leaf))
        clear()
        return Answer(
            flatten(output.detach()), None if state is None else _detached(state), gradients
        )

    return Runner(train, train_answer)


def _gradient(tensor: Tensor) -> Tensor:
    """Return a gradient; a missing one is zero, which the check detects."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _detached(state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(part.detach() for part in state)
