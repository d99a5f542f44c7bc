"""Losses on ragged batches: predictions per element, with targets of the same lengths.

They have the names of :mod:`torch.nn.functional`, and the values and gradients of a padded loss
with masked padding. They share:

- **Targets** are a Ragged of the same lengths, or a tensor ``(B, ...)`` with one target per
  sequence, for all its elements.
- ``reduction="element"``, the default, is the weighted mean over all elements. ``"sequence"`` is
  the weighted mean over the elements of each sequence, then the mean over the sequences with an
  element that counts. ``"none"`` returns a Ragged with the loss of every element, times its weight.
- ``weights`` is a Ragged with one number of at least 0 per element, or a tensor ``(B,)`` with one
  per sequence. Elements of weight 0 do not count: even a NaN in them reaches neither the loss nor a
  gradient. Means are divided by the sum of the weights; with ``"sequence"``, weights of sequences
  weigh their means. Booleans are a mask.
- The loss of an element with features is the mean over the features.
- If nothing counts (only empty sequences, all targets ignored, all weights 0), the loss and its
  gradients are 0.
- Losses have the dtype of the predictions (under autocast, the dtype of torch's own loss) and are
  summed in at least float32. They do not wait for a device, except as documented: values of
  targets, and lengths that only a device has, are checked only on a CPU.
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
