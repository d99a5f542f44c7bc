"""Losses on ragged batches: predictions per element, with targets of the same lengths.

They have the names of :mod:`torch.nn.functional`, and the values and gradients of a padded loss
with masked padding. They share:

- **Targets** are a Ragged of the same lengths, with one target per element. For one per sequence
  pass ``out.last()`` or a pooling to the loss of torch, or repeat the targets with ``out.broadcast``.
- ``reduction="mean"``, the default, and ``"sum"`` are those of torch: the mean, or the sum, over all
  elements and features. ``"sequence_mean"`` is the mean over the elements of each sequence, then
  over the sequences with an element that counts. ``"none"`` returns a Ragged of all losses.
- ``sample_weight`` is a Ragged with one number of at least 0 per element, or a tensor ``(B,)`` with
  one per sequence, by which losses are multiplied; means are divided by the sum of the weights.
  Elements of weight 0 do not count: even a NaN in them reaches neither the loss nor a gradient.
  With ``"sequence_mean"``, weights of sequences weigh their means. Booleans are a mask.
- If nothing counts (only empty sequences, all targets ignored, all weights 0), the loss and its
  gradients are 0.
- Losses have the dtype of the predictions (under autocast, the dtype of torch's own loss) and are
  summed in at least float32. They do not wait for a device, except as documented: values of
  targets, and lengths that only a device has, are checked only on a CPU.
"""

from __future__ import annotations

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
    "huber_loss",
    "l1_loss",
    "mse_loss",
    "nll_loss",
]
