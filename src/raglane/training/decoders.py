"""The decoders of the task transcribe: from an output per element to a sequence of labels.

Label 0 is the blank; the labels of the data are 1 to K - 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from raglane import segments
from raglane.nn import Hypotheses
from raglane.nn.losses import ctc_loss
from raglane.ragged import Ragged


class Decoder(nn.Module, ABC):
    """Losses and searches on the outputs of the head, ``(N, K)``."""

    # True if a token has times, the steps of the input that it was read from.
    has_times = True

    @abstractmethod
    def loss(self, outputs: Ragged, targets: Ragged) -> Tensor:
        """Return minus the log-probability of each target, ``(B,)``; 0 for a target without an alignment."""

    @abstractmethod
    def answer(self, outputs: Ragged, beam: int, n_best: int = 1) -> Hypotheses:
        """Return the best sequences of labels; a beam of 1 is a greedy search."""


class CTC(Decoder):
    """One label or the blank per element, by connectionist temporal classification (Graves and others, 2006)."""

    def loss(self, outputs: Ragged, targets: Ragged) -> Tensor:
        """See :meth:`Decoder.loss`."""
        return ctc_loss(outputs.map(_log_softmax), targets, zero_infinity=True, reduction="none")

    def answer(self, outputs: Ragged, beam: int, n_best: int = 1) -> Hypotheses:  # noqa: ARG002
        """See :meth:`Decoder.answer`."""
        return best_path(outputs.map(_log_softmax))


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


def best_path(log_probs: Ragged) -> Hypotheses:
    """Return the labels of the likeliest path, without repetitions and blanks, and the log-probability of the path."""
    best, labels = log_probs.values.max(-1)
    starts = torch.ones_like(labels, dtype=torch.bool)
    starts[1:] = labels[1:] != labels[:-1]
    # The first element of a sequence begins a run; an empty last sequence has no element.
    firsts = log_probs.offsets[:-1]
    starts[firsts[firsts < len(labels)]] = True
    begins = starts.nonzero().squeeze(1)
    ends = torch.cat([begins[1:], begins.new_full((min(len(begins), 1),), len(labels))])
    kept = labels[begins] != 0
    begins, ends = begins[kept], ends[kept]
    owners = log_probs.segment_ids[begins]
    lengths = torch.bincount(owners, minlength=len(log_probs))
    times = torch.stack([begins, ends], 1) - firsts[owners].unsqueeze(1)
    tokens = Ragged.from_flat(labels[begins], lengths=lengths)
    scores = segments.sum(best, log_probs.offsets)
    return Hypotheses(tokens, scores, torch.arange(len(log_probs) + 1), tokens.with_values(times))


DECODERS: dict[str, type[Decoder]] = {"ctc": CTC}
"""The decoders by name, as :data:`raglane.training.settings.DECODERS` lists them."""
