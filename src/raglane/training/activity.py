"""What large outputs of a recurrent layer, and large changes of them, cost in training."""

from __future__ import annotations

from torch import Tensor

from raglane.ragged import Ragged


def activity(outputs: Ragged, dropped: Ragged, large: float, changing: float) -> Tensor:
    """Activation regularisation, and the temporal one (Merity, McCann and Socher, 2017), summed over elements."""
    values, owners = outputs.values, outputs.segment_ids
    changes = values.diff(dim=0).square().mean(1) * (owners[1:] == owners[:-1])
    return large * dropped.values.square().mean(1).sum() + changing * changes.sum()
