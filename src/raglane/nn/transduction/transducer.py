"""Transducers: a network that predicts labels, joined with the frames of an encoder."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from raglane import segments
from raglane._utils.checks import check_count, check_kind, check_whole
from raglane._utils.messages import quote
from raglane.errors import ArgumentError, ShapeError
from raglane.nn.encoder import CellName
from raglane.nn.losses.ctc import check_classes, check_labels
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.nn.transduction.rnnt import rnnt_loss
from raglane.nn.transduction.search import beam_search, layers_first, rows_first
from raglane.nn.transduction.tokens import TokenReader
from raglane.ragged import Ragged

# Of the prediction network, for R rows: its part of the joint's sum, (R, joint_size), and the
# states of the recurrent layer, (R, num_layers, size).
Predicted = tuple[Tensor, ...]


class Transducer(TokenReader):
    """A transducer: from the frames of an encoder, one after another, to a sequence of tokens.

    After u tokens the prediction network, an embedding and a recurrent layer, has the output
    ``h_u``. At frame ``f_t`` the next token, or the blank that leads to the next frame, has the
    distribution (Graves 2012, "Sequence transduction with recurrent neural networks", with the
    joint of Graves et al. 2013, arXiv:1303.5778) ::

        softmax(joint(tanh(frame(f_t) + state(h_u))))

    Training is one call of the recurrent layer for all targets, and one of :func:`rnnt_loss`.

    Args:
        num_tokens: V, the number of tokens, including the blank.
        encoder_size: the number of features of a frame.
        hidden_size: units of the recurrent layer.
        cell: the name of a layer, e.g. ``"lstm"`` or ``"PeepholeLSTM"``; or a function ``(input_size,
            hidden_size, **options)`` that returns a recurrent layer, such as a class of ``rl.nn``.
        joint_size: the size of the sum; None for ``hidden_size``.
        embedding: the size of a token's embedding; None for ``hidden_size``.
        blank: the token that leads to the next frame; it is also the first input of the prediction
            network.
        dropout: the probability that an entry of an embedding is zeroed, and between layers.
        num_layers: the number of recurrent layers.
        device, dtype: of the parameters.
        **options: of the recurrent layer, such as ``state_dropout``.

    Raises:
        ArgumentError: an argument is out of its range.
        ArgumentTypeError: ``cell`` does not return a recurrent layer of Raglane of one direction,
            or an argument has the wrong type.

    Example:
        >>> model = Transducer(30, encoder_size=16, hidden_size=32, cell="gru")
        >>> frames, targets = Ragged([torch.randn(7, 16), torch.randn(4, 16)]), Ragged([[4, 9, 2], [5]])
        >>> model.loss(frames, targets).backward()
        >>> best = model.eval().decode(frames, beam_size=3)
        >>> first = model.decode(frames[:, :3])  # a stream
        >>> rest = model.decode(frames[:, 3:], first.state)  # the next frames continue the outputs
        >>> len(best), len(first), len(rest)
        (2, 2, 2)
    """

    def __init__(
        self,
        num_tokens: int,
        encoder_size: int,
        hidden_size: int,
        cell: CellName | Callable[..., RecurrentLayer] = "lstm",
        *,
        joint_size: int | None = None,
        embedding: int | None = None,
        blank: int = 0,
        dropout: float = 0.0,
        num_layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            num_tokens, hidden_size, cell, embedding, dropout, num_layers, device, dtype, options
        )
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.encoder_size = check_count("encoder_size", encoder_size)
        self.blank = check_whole("blank", blank, 0, "count it in num_tokens", most=num_tokens - 1)
        size = hidden_size if joint_size is None else check_count("joint_size", joint_size)
        self.frame = nn.Linear(encoder_size, size, **placed)
        self.state = nn.Linear(self.recurrent.output_size, size, bias=False, **placed)
        self.joint = nn.Linear(size, num_tokens, **placed)

    def forward(self, frames: Ragged, targets: Ragged) -> Tensor:
        """Return the log-likelihood of the targets of each item, over all alignments.

        Args:
            frames: as for :meth:`loss`.
            targets: as for :meth:`loss`.

        Returns:
            ``(B,)``, each at most 0.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as for :meth:`loss`.
        """
        return -self.loss(frames, targets, reduction="none")

    def loss(self, frames: Ragged, targets: Ragged, **options: Any) -> Tensor:
        """Return the loss of the targets.

        Args:
            frames: values ``(N, encoder_size)``, one sequence per item; lengths may be 0.
            targets: one sequence of tokens per item, of an integer dtype, without blanks; lengths
                may be 0.
            **options: of :func:`rnnt_loss`: ``reduction``, ``fastemit``, ``one_symbol_per_frame``,
                ``sample_weight``.

        Returns:
            A scalar, the mean over the items of their losses per token, or the result of another
            reduction.

        Raises:
            ArgumentTypeError: ``frames`` or ``targets`` is not a Ragged, or has the wrong dtype.
            ShapeError: sizes, numbers of sequences or devices do not match.
            ArgumentError: on a CPU, a target is not a token or is the blank; or an option is out of
                its range.
        """
        self._check_elements("frames", frames, "encoder_size")
        check_labels(targets, frames, "frames")
        check_classes(targets, self.num_tokens, self.blank)
        ones = torch.ones_like(targets.lengths_cpu)
        begins = Ragged._build(targets.values.new_full((len(targets),), self.blank), ones)
        states = self.recurrent(begins.concat(targets).map(self._embedded))[0].map(self.state)
        return rnnt_loss(
            frames.map(self.frame), states, targets, self.joint, blank=self.blank, **options
        )

    if TYPE_CHECKING:

        def __call__(self, frames: Ragged, targets: Ragged, **options: Any) -> Tensor: ...  # noqa: D102

    def decode(
        self,
        frames: Ragged,
        state: tuple[Tensor, ...] | None = None,
        *,
        beam_size: int = 1,
        max_symbols: int = 10,
        max_length: int | Tensor | None = None,
        **options: Any,
    ) -> Hypotheses:
        """Search the best token sequences of each item. Call ``eval()`` first.

        With ``beam_size=1`` each emission is the likeliest one: the greedy search, for whole
        sequences or streams. A stream in pieces has the tokens of the whole sequence. A larger
        ``beam_size`` searches over alignments, in whole sequences.

        Args:
            frames: as for the call: whole sequences, or the next frames of B streams.
            state: of the greedy search: ``found.state`` of the frames before; None for the
                beginning.
            beam_size: as for :func:`beam_search`.
            max_symbols: of the greedy search: the most tokens of a frame; 1 for a model that was
                trained with ``one_symbol_per_frame``.
            max_length: of a larger beam: as for :func:`beam_search`; None for as many tokens as
                frames.
            **options: of a larger beam: further options of :func:`beam_search`, such as ``n_best``,
                ``constraint`` and ``max_rows``.

        Returns:
            The hypotheses, with ``times``. Of the greedy search one per item, with its new tokens,
            ``times`` since the beginning of the stream, ``confidences``, as score the
            log-probability of the emissions, and ``state``, tensors of B rows.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as for the call and :func:`beam_search`;
                or the state is of another batch, or an option of the other search is given.

        Example:
            >>> model = Transducer(30, encoder_size=16, hidden_size=32).eval()
            >>> state = None
            >>> for _ in range(3):
            ...     state = model.decode(Ragged([torch.randn(4, 16)]), state).state
        """
        is_greedy = check_count("beam_size", beam_size) == 1
        if max_length is not None:
            options["max_length"] = max_length
        if is_greedy and options:
            got = f"{', '.join(options)} with beam_size=1"
            fix = "pass a larger beam_size, or leave it out"
            raise ArgumentError("options", got, "those of the greedy search", fix)
        if is_greedy:
            return self._greedy(frames, state, max_symbols)
        if state is not None:
            fix = "pass beam_size=1, or whole sequences"
            raise ArgumentError("state", "one with a larger beam", "None for whole sequences", fix)
        return self._search(frames, beam_size, options)

    def _search(self, frames: Ragged, beam_size: int, options: dict[str, Any]) -> Hypotheses:
        """Search over alignments."""
        self._check_elements("frames", frames, "encoder_size")
        with torch.no_grad():
            rows = self.frame(frames.values)
            offsets = frames.offsets
            count = len(frames)

            def step(tokens: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
                is_label = tokens != self.blank
                predicted = self._advanced(state["predicted"], tokens, is_label)
                frame = state["frame"] + ~is_label
                logits = self._logits(rows[offsets[state["item"]] + frame], predicted[0])
                return logits.log_softmax(1), {**state, "predicted": predicted, "frame": frame}

            starts = torch.full((count,), self.blank, device=frames.device)
            # The blank that the first step reads leads to frame 0.
            items = torch.arange(count, device=frames.device)
            state = {"item": items, "frame": starts * 0 - 1, "predicted": self._predicted(starts)}
            silent = {"silent": self.blank, "frames": frames.lengths, "beam_size": beam_size}
            return beam_search(
                step, starts, state, **{"max_length": frames.lengths, **silent, **options}
            )

    def _greedy(
        self, frames: Ragged, state: tuple[Tensor, ...] | None, max_symbols: int
    ) -> Hypotheses:
        """Return the tokens of the likeliest emissions."""
        self._check_elements("frames", frames, "encoder_size")
        check_count("max_symbols", max_symbols)
        count = len(frames)
        device = frames.device
        with torch.no_grad():
            if state is None:
                starts = torch.full((count,), self.blank, device=device)
                done = starts * 0
                predicted = self._predicted(starts)
            else:
                done, *rest = self._checked_state(state, count)
                predicted = tuple(rest)
            rows = self.frame(frames.values)
            offsets = frames.offsets[:-1]
            lengths = frames.lengths
            frame = torch.zeros_like(lengths)
            symbols = torch.zeros_like(lengths)
            scores = rows.new_zeros(count)
            emitted: list[tuple[Tensor, ...]] = []
            running = (lengths > 0).nonzero().squeeze(1)
            while running.shape[0]:
                chances = self._logits(
                    rows[offsets[running] + frame[running]], predicted[0][running]
                ).log_softmax(1)
                chance, token = chances.max(1)
                scores[running] += chance
                is_label = token != self.blank
                labelled = running[is_label]
                emitted.append(
                    (labelled, token[is_label], (done + frame)[labelled], chance[is_label].exp())
                )
                tokens = done.new_full((count,), self.blank).index_copy(0, running, token)
                predicted = self._advanced(predicted, tokens, tokens != self.blank)
                symbols[labelled] += 1
                moves = ~is_label | (symbols[running] == max_symbols)
                frame[running[moves]] += 1
                symbols[running[moves]] = 0
                running = running[frame[running] < lengths[running]]
            return _hypotheses(emitted, scores, rows, (done + lengths, *predicted))

    # -- the prediction network
    # ---------------------------------------------------------------------------------------

    def _predicted(self, tokens: Tensor, before: Any = None) -> Predicted:
        """Return the state of the prediction network after the next tokens ``(R,)``."""
        outputs, after = self.recurrent.step(self._embedded(tokens), before)
        return self.state(outputs), *rows_first(after)

    def _advanced(self, predicted: Predicted, tokens: Tensor, is_label: Tensor) -> Predicted:
        """Return the state after the tokens that are labels."""
        rows = is_label.nonzero().squeeze(1)
        if not rows.shape[0]:
            return predicted
        before = layers_first(tuple(state[rows] for state in predicted[1:]))
        after = self._predicted(tokens[rows], before)
        return tuple(
            old.index_copy(0, rows, new) for old, new in zip(predicted, after, strict=True)
        )

    def _logits(self, frames: Tensor, states: Tensor) -> Tensor:
        return self.joint((frames + states).tanh())

    # -- checks
    # ----------------------------------------------------------------------------------------------

    def _checked_state(self, state: Any, count: int) -> Predicted:
        fix = "pass found.state of the frames before, or None at the beginning"
        check_kind("state", state, tuple, "the state of a greedy search", fix)
        has_rows = all(
            isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.shape[0] == count
            for tensor in state
        )
        if not has_rows or len(state) != 2 + len(self.recurrent.state_sizes):
            shapes = [
                tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
                for tensor in state
            ]
            rule = f"tensors with one row for each of the {count} items"
            raise ShapeError("state", quote(shapes), rule, fix)
        return state


def _hypotheses(
    emitted: list[tuple[Tensor, ...]], scores: Tensor, rows: Tensor, state: Predicted
) -> Hypotheses:
    """Return hypotheses from items, tokens, frames and probabilities, as they were emitted."""
    count = scores.shape[0]
    none = torch.empty(0, dtype=torch.int64, device=scores.device)
    empty = none, none, none, rows.new_empty(0)
    items, tokens, times, chances = map(torch.cat, zip(empty, *emitted, strict=True))
    order = items.argsort(stable=True)
    lengths = torch.bincount(items, minlength=count)
    outputs = Ragged.from_flat(tokens[order], offsets=segments.offsets_from_lengths(lengths))
    spans = outputs.with_values(torch.stack([times, times + 1], 1)[order])
    offsets = torch.arange(count + 1, device=scores.device)
    chances = chances[order]
    return Hypotheses(outputs, scores, offsets, spans, outputs.with_values(chances), state)
