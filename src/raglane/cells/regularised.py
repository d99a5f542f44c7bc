"""Any cell with dropout on its state, with zoneout or with resets, inside the recurrence.

All random numbers are drawn before the first step: the mask of a sequence is one more state, which
never changes, and marks of elements are more columns of the prepared rows. So all schedules and
backends compute the same result.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, States, Stepped


class MarkedWeights(NamedTuple):
    """The weights of a cell whose steps read marks of elements, 0 or 1."""

    inner: Any  # of the inner cell
    # (N, sum of the state sizes), 1 if zoneout holds a unit at an element; or (N, 1), 1 if states
    # are reset before it.
    marks: Tensor | None = None


class Marked(CellSpec):
    """A cell whose steps read marks of elements."""

    weights_type: ClassVar[Any] = MarkedWeights

    def __init__(self, inner: CellSpec, effect: str) -> None:
        self.name = f"{inner.name} with {effect}"
        self.gates = inner.gates  # type: ignore[misc]
        self.states = inner.states  # type: ignore[misc]
        self.follows_autocast = inner.follows_autocast  # type: ignore[misc]
        self.inner = inner

    def prepare(self, weights: MarkedWeights, values: Tensor, offsets: Tensor) -> Tensor:
        """Return the inner cell's prepared rows, followed by the marks."""
        prepared = self.inner.prepare(weights.inner, values, offsets)
        if weights.marks is None:
            return prepared
        # A schedule that computes padding adds a row to the values.
        return torch.cat(
            [prepared, F.pad(weights.marks, (0, 0, 0, values.shape[0] - weights.marks.shape[0]))], 1
        )


class Resetting(Marked):
    """A cell whose states become zeros before each marked element."""

    def __init__(self, inner: CellSpec) -> None:
        super().__init__(inner, "resets")

    def step(
        self, weights: MarkedWeights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        is_reset = prepared[:, -1:] > 0
        state = tuple(torch.where(is_reset, 0.0, tensor) for tensor in state)
        return self.inner.step(weights.inner, prepared[:, :-1], state, mask)


class Regularised(Marked):
    """A cell with dropout on the state that its weights read, or with states that are held at
    random.

    Dropout on the state uses one mask per sequence at all its steps: Gal and Ghahramani (2016,
    arXiv:1512.05287). With zoneout a unit keeps its previous value: Krueger et al. (2017,
    arXiv:1606.01305).
    """

    def __init__(
        self, inner: CellSpec, *, drops_state: bool, zoneout: tuple[float, ...] | None
    ) -> None:
        kinds = [
            kind
            for kind, acts in (("state dropout", drops_state), ("zoneout", zoneout is not None))
            if acts
        ]
        super().__init__(inner, " and ".join(kinds))
        self.states = (*inner.states, "mask") if drops_state else inner.states  # type: ignore[misc]
        self._drops_state = drops_state
        self._zoneout = zoneout

    def step(
        self, weights: MarkedWeights, prepared: Tensor, state: States, mask: Tensor | None = None
    ) -> Stepped:
        """See :meth:`CellSpec.step`."""
        before = state
        if self._drops_state:
            *inner_state, mask = state
            before = tuple(inner_state)
        width = prepared.shape[1]
        if weights.marks is not None:
            width -= weights.marks.shape[1]
        output, new = self.inner.step(weights.inner, prepared[:, :width], before, mask)
        if self._zoneout is not None:
            new = self._hold(prepared[:, width:], before, new)
            output = new[0]
        return output, (new if mask is None or not self._drops_state else (*new, mask))

    def _hold(
        self, marks: Tensor, before: tuple[Tensor, ...], new: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Return the new states with held units of the old ones, or, in evaluation, the mean of
        both.
        """
        if not marks.shape[1]:
            return tuple(
                torch.lerp(after, old, share)
                for old, after, share in zip(before, new, self._zoneout or (), strict=True)
            )
        masks = marks.split([tensor.shape[1] for tensor in before], 1)
        return tuple(
            torch.where(is_held > 0, old, after)
            for is_held, old, after in zip(masks, before, new, strict=True)
        )
