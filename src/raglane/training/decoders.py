"""The decoders of the task transcribe: from the outputs of the encoder to sequences of labels.

Label 0 is the blank or the end; the labels of the data are 1 to K - 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import Tensor, nn

from raglane.nn.encoder import LAYERS
from raglane.nn.losses.ctc import ctc_loss
from raglane.nn.transduction.ctc import CTCBeamSearch, ctc_greedy_search
from raglane.nn.transduction.decoder import AttentionDecoder
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.nn.transduction.transducer import Transducer
from raglane.ragged import Ragged

# A target has at most this many labels per element of its input, and this many more.
_LABELS_PER_ELEMENT = 2
_MORE_LABELS = 10
# Cells that read more than the input of a step.
_ENCODERS = ("grud", "cfc")


_Module = TypeVar("_Module", bound=nn.Module)


class Decoder(nn.Module, ABC):
    """Losses and searches on the outputs of a model.

    Args:
        config: the :class:`~raglane.training.model.ModelConfig`.
        size: the size of the outputs of the encoder.
    """

    # True if the model has a head, whose outputs are logits ``(N, K)``; otherwise they are those of
    # the encoder.
    has_head = False
    # True if a label has times, the steps of the input that it was read from.
    has_times = True
    # In training, errors are measured on every n-th sequence, because a search takes longer than
    # the loss.
    measures_every = 8

    def __init__(self, config: Any, size: int) -> None:  # noqa: ARG002
        super().__init__()

    @abstractmethod
    def loss(self, outputs: Ragged, targets: Ragged) -> Tensor:
        """Return minus the log-probability of all targets, ``()``; a target without an alignment is
        left out.
        """

    @abstractmethod
    def answer(
        self, outputs: Ragged, beam_size: int = 1, n_best: int = 1, longest: Tensor | None = None
    ) -> Hypotheses:
        """Return the best sequences of labels; a beam of 1 is a greedy search.

        ``longest`` ``(B,)`` may be the most labels of each sequence.
        """


class CTC(Decoder):
    """One label or the blank per element, by connectionist temporal classification (Graves and
    others, 2006).
    """

    has_head = True
    measures_every = 1

    def loss(self, outputs: Ragged, targets: Ragged) -> Tensor:
        """See :meth:`Decoder.loss`."""
        return ctc_loss(
            outputs.map(_log_softmax), targets, zero_infinity=True, reduction="none"
        ).sum()

    def answer(
        self,
        outputs: Ragged,
        beam_size: int = 1,
        n_best: int = 1,
        longest: Tensor | None = None,  # noqa: ARG002
    ) -> Hypotheses:
        """See :meth:`Decoder.answer`."""
        log_probs = outputs.map(_log_softmax)
        if beam_size == 1:
            return ctc_greedy_search(log_probs)
        return CTCBeamSearch(beam_size, n_best=n_best)(log_probs)


class Transduction(Decoder):
    """A transducer: any number of labels per element, in the order of the input (Graves, 2012)."""

    def __init__(self, config: Any, size: int) -> None:
        super().__init__(config, size)
        self.decoder = Transducer(
            config.output_size, size, config.hidden_size, _cell(config), dropout=config.dropout
        )

    def loss(self, outputs: Ragged, targets: Ragged) -> Tensor:
        """See :meth:`Decoder.loss`."""
        losses = self.decoder.loss(outputs, targets, reduction="none")
        return losses.masked_fill(losses.isinf(), 0).sum()

    def answer(
        self, outputs: Ragged, beam_size: int = 1, n_best: int = 1, longest: Tensor | None = None
    ) -> Hypotheses:
        """See :meth:`Decoder.answer`."""
        with _evaluating(self.decoder) as decoder:
            if beam_size == 1:
                return decoder.decode(outputs)
            return decoder.decode(
                outputs, beam_size=beam_size, n_best=n_best, max_length=_most(outputs, longest)
            )


class AttendingDecoder(Decoder):
    """A recurrent decoder with additive attention to the outputs of the encoder."""

    has_times = False

    def __init__(self, config: Any, size: int) -> None:
        super().__init__(config, size)
        sizes = config.output_size, size, config.hidden_size
        self.decoder = AttentionDecoder(*sizes, _cell(config), dropout=config.dropout)

    def loss(self, outputs: Ragged, targets: Ragged) -> Tensor:
        """See :meth:`Decoder.loss`."""
        return self.decoder.loss(outputs, targets, reduction="none").values.sum()

    def answer(
        self, outputs: Ragged, beam_size: int = 1, n_best: int = 1, longest: Tensor | None = None
    ) -> Hypotheses:
        """See :meth:`Decoder.answer`."""
        with _evaluating(self.decoder) as decoder:
            return decoder.decode(
                outputs, beam_size=beam_size, n_best=n_best, max_length=_most(outputs, longest)
            )


def _cell(config: Any) -> Any:
    """Return the cell of a decoder: that of the encoder, unless it is a user's, or reads more than
    inputs.
    """
    return config.cell if config.cell in LAYERS and config.cell not in _ENCODERS else "gru"


def _most(outputs: Ragged, longest: Tensor | None) -> Tensor:
    """Return the most labels of each sequence."""
    return _LABELS_PER_ELEMENT * outputs.lengths + _MORE_LABELS if longest is None else longest


@contextmanager
def _evaluating(decoder: _Module) -> Iterator[_Module]:
    """Yield a module in evaluation mode, and restore its mode."""
    is_training = decoder.training
    try:
        yield decoder.eval()
    finally:
        decoder.train(is_training)


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.log_softmax(-1)


DECODERS: dict[str, type[Decoder]] = {
    "ctc": CTC,
    "transducer": Transduction,
    "attention": AttendingDecoder,
}
"""The decoders by name, as :data:`raglane.training.settings.DECODERS` lists them."""
