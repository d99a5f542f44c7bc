"""Any cell with dropout on its state, or with zoneout, inside the recurrence.

All random numbers are drawn before the first step: the mask of a sequence is one more state, which never changes, and
masks of elements are more columns of the prepared rows. So all schedules and backends compute the same result.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane.cells.spec import CellSpec, States, Stepped


class RegularisedWeights(NamedTuple):
    """The weights of a regularised cell."""

    inner: Any  # of the inner cell
    held: Tensor | None = None  # (N, sum of the state sizes): 1 if zoneout holds a unit at an element, else 0


class Regularised(CellSpec):
    """A cell with dropout on the state that its weights read, or with states that are held at random.

    Dropout on the state uses one mask per sequence at all its steps: Gal and Ghahramani (2016, arXiv:1512.05287).
    With zoneout a unit keeps its previous value: Krueger et al. (2017, arXiv:1606.01305).
    """

    weights_type: ClassVar[Any] = RegularisedWeights

    def __init__(self, inner: CellSpec, *, drops_state: bool, zoneout: tuple[float, ...] | None) -> None:
        kinds = [kind for kind, acts in (("state dropout", drops_state), ("zoneout", zoneout is not None)) if acts]
        self.name = f"{inner.name} with {' and '.join(kinds)}"
        self.gates = inner.gates  # type: ignore[misc]
        self.states = (*inner.states, "mask") if drops_state else inner.states  # type: ignore[misc]
        self.inner = inner
        self._drops_state = drops_state
        self._zoneout = zoneout

    def prepare(self, weights: RegularisedWeights, values: Tensor, offsets: Tensor) -> Tensor:
        """Return the inner cell's prepared rows, followed by the marks of held units."""
        prepared = self.inner.prepare(weights.inner, values, offsets)
        if weights.held is None:
            return prepared
        # A schedule that computes padding adds a row to the values.
        held = F.pad(weights.held, (0, 0, 0, values.shape[0] - weights.held.shape[0]))
        return torch.cat([prepared, held], 1)

    def step(self, weights: RegularisedWeights, prepared: Tensor, state: States, mask: Tensor | None = None) -> Stepped:
        """See :meth:`CellSpec.step`."""
        before = state
        if self._drops_state:
            *kept, mask = state
            before = tuple(kept)
        width = prepared.shape[1] if weights.held is None else prepared.shape[1] - weights.held.shape[1]
        output, new = self.inner.step(weights.inner, prepared[:, :width], before, mask)
        if self._zoneout is not None:
            new = self._hold(prepared[:, width:], before, new)
            output = new[0]
        return output, (new if mask is None or not self._drops_state else (*new, mask))

    def _hold(self, held: Tensor, before: tuple[Tensor, ...], new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the new states with held units of the old ones, or, in evaluation, the mean of both."""
        if not held.shape[1]:
            return tuple(
                torch.lerp(after, old, share)
                for old, after, share in zip(before, new, self._zoneout or (), strict=True)
            )
        masks = held.split([part.shape[1] for part in before], 1)
        return tuple(
            torch.where(is_held > 0, old, after) for is_held, old, after in zip(masks, before, new, strict=True)
        )
