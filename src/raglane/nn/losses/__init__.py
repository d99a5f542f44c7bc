"""Losses on ragged batches: predictions of every element, against targets of the same lengths.

They have the names of :mod:`torch.nn.functional`, and the values and gradients of a padded loss with its padding masked
away, without the padding. What they share is said here once.

- **Targets** are a Ragged of the same lengths, or a tensor ``(B, ...)``: one target per sequence, for all its elements.
- ``reduction="element"``, the default: the weighted mean over the elements, so that each counts once, whichever
  sequence it is in. ``"sequence"``: the weighted mean over the elements of each sequence, then the mean over the
  sequences that have an element that counts, so that each of them counts once, however long it is. ``"none"``: a
  Ragged with the loss of every element, times its weight.
- ``weights``: a Ragged, one number of at least 0 per element, or a tensor ``(B,)``, one per sequence. What has weight 0
  does not count: not even a NaN in it reaches the loss or a gradient. A mean divides by the sum of the weights; under
  ``"sequence"`` those of sequences weigh their means. Booleans are a mask.
- Losses of elements that have features are means over the features first.
- Where nothing counts (empty sequences alone, every target ignored, all weights 0) the loss is 0, and so are its
  gradients.
- Losses have the dtype of the predictions (under autocast, that which torch's own loss has) and are added up in float32
  at least. Nothing waits for a device, unless the documentation of a function says so; therefore values of targets, and
  lengths that the host never knew, are checked on a CPU alone.
"""

from __future__ import annotations

from raglane.nn.losses.ctc import ctc_loss
from raglane.nn.losses.elements import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    l1_loss,
    mse_loss,
    nll_loss,
)

__all__ = [
    "binary_cross_entropy_with_logits",
    "cross_entropy",
    "ctc_loss",
    "huber_loss",
    "l1_loss",
    "mse_loss",
    "nll_loss",
]
