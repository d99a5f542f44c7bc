"""The largest batch that a limit of memory allows: found by the model, confirmed by one run."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from raglane._utils.memory import available_memory
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner.batches import thin_out
from raglane.planner.calibration import Calibration
from raglane.planner.peak import peak_bytes
from raglane.planner.probe import device_of, make_batch, step_of
from raglane.planner.rows import Row
from raglane.planner.ways import at, cast

__all__ = ["largest_batch"]

# A run that would take longer, in seconds, or more of the free memory, is left out.
_LONGEST, _SHARE = 30.0, 0.5


def largest_batch(
    layer: RecurrentLayer,
    lengths: Tensor,
    best: Row,
    calibration: Calibration,
    memory: float,
    weights: int,
    *,
    runs: bool,
) -> tuple[int, int | None]:
    """How many elements a training step may have."""
    part, _ = thin_out(lengths)
    order = np.random.default_rng(0).permutation(len(part))
    drawn = part[torch.from_numpy(order)]
    elements = _most(drawn, best, calibration, memory - weights)
    seconds = best.train_seconds / (best.elements - best.waste) * elements
    if not runs or elements == 0 or seconds > _LONGEST or memory > _SHARE * available_memory():
        return elements, None
    twin = cast(layer, best.dtype)
    call = step_of(twin, make_batch(twin, _batch(drawn, elements)), "train")
    with at(best.way):
        return elements, weights + peak_bytes(call, device_of(layer))


def _most(lengths: Tensor, best: Row, calibration: Calibration, memory: float) -> int:
    """The elements of the largest batch that is predicted to fit: memory follows a straight line."""
    call, computed, sequence = calibration.memory[best.way]
    mean = float(lengths.double().mean())
    # With padding, as much of it as the recommended batches have.
    element = computed * best.elements / (best.elements - best.waste) + sequence / mean
    return max(0, int(min((memory - call) / max(element, 1e-9), 2**62)))


def _batch(drawn: Tensor, elements: int) -> Tensor:
    """Lengths of a batch of so many elements: those drawn, again and again, and a part of one at the end."""
    total = int(drawn.sum())
    whole = drawn.repeat(elements // total + 1)
    ends = whole.cumsum(0)
    kept = int((ends <= elements).sum())
    rest = elements - (int(ends[kept - 1]) if kept else 0)
    return torch.cat((whole[:kept], torch.tensor([rest]))) if rest else whole[:kept]
