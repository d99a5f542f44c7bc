"""From sequence to sequence without padding: losses over alignments, decoders and searches.

    >>> import torch
    >>> import raglane as rl
    >>> log_probs = rl.Ragged([torch.randn(9, 4), torch.randn(5, 4)]).log_softmax(-1)
    >>> rl.transduction.ctc_loss(log_probs, rl.Ragged([[1, 2], [3]])).shape
    torch.Size([])

Their files are in :mod:`raglane.nn`.
"""

from __future__ import annotations

from raglane.nn.losses.ctc import ctc_loss
from raglane.nn.transduction.ctc import CTCBeamSearch, ctc_align, ctc_greedy_search
from raglane.nn.transduction.decoder import AttentionDecoder
from raglane.nn.transduction.ngram import NGram
from raglane.nn.transduction.pairs import edit_distance, soft_dtw
from raglane.nn.transduction.rnnt import rnnt_loss
from raglane.nn.transduction.search import beam_search
from raglane.nn.transduction.transducer import Transducer

__all__ = [
    "AttentionDecoder",
    "CTCBeamSearch",
    "NGram",
    "Transducer",
    "beam_search",
    "ctc_align",
    "ctc_greedy_search",
    "ctc_loss",
    "edit_distance",
    "rnnt_loss",
    "soft_dtw",
]
