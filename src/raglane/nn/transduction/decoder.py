"""Attention decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from raglane import segments
from raglane._utils.checks import (
    check_choice,
    check_count,
    check_device,
    check_dropout,
    check_dtype,
    check_fits,
    check_flag,
    check_kind,
    check_number,
)
from raglane._utils.messages import message, quote
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.encoder import layer_class, made
from raglane.nn.losses.elements import cross_entropy
from raglane.nn.recurrent.call import check_arguments, plan_of, prepare
from raglane.nn.recurrent.inputs import read
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.stack import one_or_tuple
from raglane.nn.transduction.attention import KINDS, Attention, Block, blocks_of
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.nn.transduction.search import beam_search, layers_first, rows_first
from raglane.ragged import Ragged
from raglane.segments.indexing import place_rows


class AttentionDecoder(nn.Module):
    """A recurrent decoder with attention: from a memory per item, such as an encoder's output, to a sequence of tokens.

    With the embedding ``x`` of the previous token, the recurrent layer's output ``h`` and the elements ``m_t`` of the
    memory, a step computes (Luong et al. 2015, arXiv:1508.04025, equations 4 to 6)::

        h = layer(x)                     or, with input feeding, layer([x; a]) with the previous a
        w = softmax over t of score(h, m_t)
        a = tanh(W [sum_t w_t m_t; h]),  logits = V a

        "dot":       score = m_t @ (Q h)                              Luong et al., "general"
        "additive":  score = v @ tanh(Q h + K m_t + b)                Bahdanau et al. 2015, arXiv:1409.0473
        "location":  score = v @ tanh(Q h + K m_t + L_t + b)          Chorowski et al. 2015, arXiv:1506.07503

    ``L_t`` is a convolution over the weights of the previous step around t. A memory without elements has the weighted
    sum 0.

    In training, ``"dot"`` and ``"additive"`` without input feeding and scheduled sampling are one call of the recurrent
    layer, and one matrix of weights per item. The others are a loop over steps, with fewer rows as sequences end.
    Memory of the attention is one number per token and element.

    Args:
        num_tokens: V, the number of tokens, including ``end``.
        memory_size: the number of features of an element of the memory.
        hidden_size: units of the recurrent layer, and the size of ``a``.
        cell: a key of ``raglane.nn.encoder.LAYERS``; or a function ``(input_size, hidden_size, **options)`` that
            returns a recurrent layer, such as a class of ``rl.nn``.
        attention: ``"additive"``, ``"dot"`` or ``"location"``.
        embedding: the size of a token's embedding; None for ``hidden_size``.
        attention_size: the size of ``v``; None for ``hidden_size``.
        attention_width: the elements that the convolution of ``"location"`` reads.
        input_feeding: True to feed ``a`` to the next step.
        scheduled_sampling: in training, the probability that an input token is drawn from the distribution that the
            previous step predicted (Bengio et al. 2015, arXiv:1506.03099). An attribute, to be raised during training.
        end: the token that ends a sequence; it is also the input of the first step.
        dropout: the probability that an entry of an embedding or of ``a`` before the product with V is zeroed, and
            between layers.
        num_layers: the number of recurrent layers.
        device, dtype: of the parameters.
        **options: of the recurrent layer, such as ``initial_state``. In a loop over steps, options that draw a mask
            per sequence draw one per step.

    Raises:
        ArgumentError: an argument is out of its range.
        ArgumentTypeError: ``cell`` does not return a recurrent layer of Raglane, or an argument has the wrong type.

    Example:
        >>> decoder = AttentionDecoder(30, memory_size=16, hidden_size=32, cell="gru")
        >>> memory = Ragged([torch.randn(7, 16), torch.randn(4, 16)])
        >>> targets = Ragged([[4, 9, 2], [5]])
        >>> decoder(memory, targets).lengths.tolist()  # one step more than tokens, for the end
        [4, 2]
        >>> decoder.loss(memory, targets).backward()
        >>> found = decoder.eval().search(memory, beam=3, max_length=5)
        >>> len(found.best())
        2
    """

    def __init__(
        self,
        num_tokens: int,
        memory_size: int,
        hidden_size: int,
        cell: str | Callable[..., RecurrentLayer] = "lstm",
        *,
        attention: str = "additive",
        embedding: int | None = None,
        attention_size: int | None = None,
        attention_width: int = 15,
        input_feeding: bool = False,
        scheduled_sampling: float = 0.0,
        end: int = 0,
        dropout: float = 0.0,
        num_layers: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        placed: dict[str, Any] = {name: part for name, part in (("device", device), ("dtype", dtype)) if part}
        self.num_tokens, self.memory_size = (
            check_count("num_tokens", num_tokens),
            check_count("memory_size", memory_size),
        )
        self.hidden_size = check_count("hidden_size", hidden_size)
        self.input_feeding = check_flag("input_feeding", input_feeding)
        rule = "a probability from 0 to 1"
        self.scheduled_sampling = check_number("scheduled_sampling", scheduled_sampling, rule, lambda p: 0 <= p <= 1)
        if isinstance(end, bool) or not isinstance(end, int) or not 0 <= end < num_tokens:
            rule = f"a token from 0 to num_tokens - 1 = {num_tokens - 1}"
            raise ArgumentError(message("end", quote(end), rule, "count it in num_tokens"))
        self.end = end
        width = hidden_size if embedding is None else check_count("embedding", embedding)
        self.embedding = nn.Embedding(num_tokens, width, **placed)
        self.recurrent = made(
            layer_class(cell, layer_norm=False),
            width + (hidden_size if input_feeding else 0),
            hidden_size,
            num_layers=check_count("num_layers", num_layers),
            dropout=check_dropout(dropout) if num_layers != 1 else 0.0,
            **placed,
            **options,
        )
        if self.recurrent.bidirectional:
            rule, fix = "a layer of one direction, because later tokens are unknown", "leave bidirectional out"
            raise ArgumentTypeError(message("cell", "a bidirectional layer", rule, fix))
        size = hidden_size if attention_size is None else check_count("attention_size", attention_size)
        check_choice("attention", attention, KINDS)
        query_size = self.recurrent.output_size
        self.attention = Attention(
            attention, query_size, memory_size, size, check_count("attention_width", attention_width), placed
        )
        self.combine = nn.Linear(memory_size + query_size, hidden_size, **placed)
        self.dropout = nn.Dropout(check_dropout(dropout))
        self.head = nn.Linear(hidden_size, num_tokens, **placed)

    def forward(self, memory: Ragged, targets: Ragged, hx: Any = None) -> Ragged:
        """Return the logits of each token, given the tokens before it: teacher forcing.

        Args:
            memory: values ``(N, memory_size)``, one sequence per item; lengths may be 0.
            targets: one sequence of tokens per item, of an integer dtype, without ``end``; lengths may be 0.
            hx: the initial state of the recurrent layer, ``(num_layers, B, size)`` or a tuple of them, e.g. an
                encoder's final state. None for the layer's ``initial_state``.

        Returns:
            Logits ``(N, V)``, one more per sequence than tokens: the last is that of the end.

        Raises:
            ArgumentTypeError: ``memory`` or ``targets`` is not a Ragged, or has the wrong dtype.
            ShapeError: sizes, numbers of sequences or devices do not match.
            ArgumentError: on a CPU, a target is not a token or is ``end``.
        """
        return self._decoded(memory, targets, hx)[0].map(self._logits)

    def loss(self, memory: Ragged, targets: Ragged, hx: Any = None, **options: Any) -> Any:
        """Return the cross-entropy of the targets and their ends.

        Args:
            memory: as for the call.
            targets: as for the call.
            hx: as for the call.
            **options: of :func:`raglane.nn.losses.cross_entropy`, such as ``reduction`` and ``label_smoothing``.

        Returns:
            A scalar, the mean over all tokens and ends, or the result of another reduction.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as for the call.
        """
        logits = self(memory, targets, hx)
        ends = Ragged._build(targets.values.new_full((len(targets),), self.end), torch.ones_like(targets.host_lengths))
        return cross_entropy(logits, logits._like(targets.concat(ends).values), **options)

    def weights(self, memory: Ragged, targets: Ragged, hx: Any = None) -> list[Tensor]:
        """Return the attention weights of each item, ``(U + 1, T)`` for U targets and T elements.

        Args:
            memory: as for the call.
            targets: as for the call.
            hx: as for the call.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as for the call.
        """
        return self._decoded(memory, targets, hx)[1]()

    def search(
        self,
        memory: Ragged,
        *,
        beam: int = 4,
        max_length: int | Tensor,
        coverage: float = 0.0,
        hx: Any = None,
        **options: Any,
    ) -> Hypotheses:
        """Search the best token sequences of each item. Call ``eval()`` first.

        Args:
            memory: as for the call.
            beam: as for :func:`beam_search`; 1 is the greedy search.
            max_length: as for :func:`beam_search`.
            coverage: the factor of the coverage penalty of Wu et al. 2016 (arXiv:1609.08144, equation 14), the sum over
                the elements of ``log(min(their weights over all steps, 1))``.
            hx: as for the call.
            **options: further options of :func:`beam_search`, such as ``n_best``, ``length_penalty`` and ``rows``.

        Returns:
            The hypotheses, without ends.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as for the call and :func:`beam_search`.
        """
        self._check_memory(memory)
        check_number("coverage", coverage, "a finite number of at least 0", lambda factor: 0 <= factor < float("inf"))
        count, longest = len(memory), memory.max_length
        with torch.no_grad():
            stepping = _Stepping(self, memory, longest)
            state: dict[str, Any] = {
                "item": torch.arange(count, device=memory.device),
                "cell": rows_first(self._initial(memory, hx)),
            }
            if self.input_feeding:
                state["fed"] = memory.values.new_zeros(count, self.hidden_size)
            if self.attention.kernel is not None:
                state["weights"] = memory.values.new_zeros(count, longest)
            if coverage:
                state["covered"] = memory.values.new_zeros(count, longest)
                lengths = memory.lengths.unsqueeze(1)
                own = options.pop("penalty", None) or (lambda _: 0)
                options["penalty"] = lambda state: coverage * _covered(state, lengths) + own(state)
            starts = torch.full((count,), self.end, device=memory.device)
            return beam_search(stepping.step, starts, state, beam=beam, max_length=max_length, end=self.end, **options)

    # -- parts of a step ----------------------------------------------------------------------------------------------

    def _logits(self, attended: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(attended))
        return logits

    def _embedded(self, tokens: Tensor, fed: Tensor | None) -> Tensor:
        embedded: Tensor = self.dropout(self.embedding(tokens))
        return embedded if fed is None else torch.cat([embedded, fed], 1)

    def _attended(
        self, outputs: Tensor, keys: Tensor, memory: Tensor, blocks: list[Block], previous: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the vectors ``a`` of the outputs of the recurrent layer, and the attention weights, flat."""
        contexts, weights = self.attention(outputs, keys, memory, blocks, previous)
        return torch.tanh(self.combine(torch.cat([contexts, outputs], 1))), weights

    def _initial(self, memory: Ragged, hx: Any) -> Any:
        """Return the state before the first step."""
        layer, count = self.recurrent, len(memory)
        first = Ragged._build(memory.values.new_zeros(count, layer.input_size), torch.ones(count, dtype=torch.int64))
        inputs, weights = read(first, None, layer.batch_first), layer._weights()
        plan = plan_of(layer, weights, inputs.data)
        check_arguments(layer, plan, inputs, weights, hx)
        return one_or_tuple(prepare(layer, plan, inputs, weights, hx).initial())

    # -- teacher forcing ----------------------------------------------------------------------------------------------

    def _decoded(self, memory: Ragged, targets: Ragged, hx: Any) -> tuple[Ragged, Callable[[], list[Tensor]]]:
        """Return the vectors ``a`` of all steps, and a function that returns the matrices of attention weights."""
        self._check_memory(memory)
        self._check_targets(memory, targets)
        begins = Ragged._build(
            targets.values.new_full((len(targets),), self.end), torch.ones_like(targets.host_lengths)
        )
        inputs = begins.concat(targets)
        hx = self._initial(memory, hx)
        draws = self.training and self.scheduled_sampling > 0
        if self.input_feeding or draws or self.attention.kernel is not None:
            return self._stepped(memory, inputs, hx, self.scheduled_sampling if draws else 0.0)
        outputs, _ = self.recurrent(inputs.map(lambda tokens: self._embedded(tokens, None)), hx)
        counts, starts, lengths = inputs.host_lengths, memory._host_offsets(), memory.host_lengths
        blocks = blocks_of(counts.tolist(), starts[:-1].tolist(), lengths.tolist())
        attended, weights = self._attended(outputs.values, self.attention.keys(memory.values), memory.values, blocks)
        return outputs._like(attended), lambda: [weights[block.pairs].view(block.shape) for block in blocks]

    def _stepped(
        self, memory: Ragged, inputs: Ragged, hx: Any, draws: float
    ) -> tuple[Ragged, Callable[[], list[Tensor]]]:
        """See :meth:`_decoded`; a loop over steps, in which the items with the most tokens are the first rows."""
        order = inputs.order_by_length(descending=True)
        lengths, place = inputs.host_lengths[order], order.to(inputs.device)
        memory, tokens, begins = memory.select(order), inputs.values, inputs.offsets[:-1][place]
        keys, flat = self.attention.keys(memory.values), memory.values
        count = len(memory)
        blocks = blocks_of([1] * count, memory._host_offsets()[:-1].tolist(), memory.host_lengths.tolist())
        state: Any = tuple(part.index_select(1, place) for part in (hx if isinstance(hx, tuple) else (hx,)))
        fed = flat.new_zeros(count, self.hidden_size) if self.input_feeding else None
        previous = None if self.attention.kernel is None else torch.zeros_like(flat[:, 0])
        attended: list[Tensor] = []
        weights: list[Tensor] = []
        rows: list[Tensor] = []
        sizes = segments.conjugate(lengths.numpy(), int(lengths[0]) if count else 0).tolist()
        for step, size in enumerate(sizes):
            rows.append(begins[:size] + step)
            read = tokens[rows[-1]]
            if draws and step:
                chances = self._logits(attended[-1][:size]).detach().float().softmax(1)
                drawn = torch.multinomial(chances, 1).squeeze(1).to(read.dtype)
                read = torch.where(torch.rand(size, device=read.device) < draws, drawn, read)
            embedded = self._embedded(read, None if fed is None else fed[:size])
            outputs, state = self.recurrent.step(embedded, one_or_tuple(tuple(part[:, :size] for part in state)))
            state = state if isinstance(state, tuple) else (state,)
            pairs = blocks[size - 1].pairs.stop
            given = None if previous is None else previous[:pairs]
            vectors, shares = self._attended(outputs, keys, flat, blocks[:size], given)
            fed, previous = (vectors if self.input_feeding else None), (None if previous is None else shares)
            attended.append(vectors)
            weights.append(shares)
        vectors = torch.cat([flat.new_zeros(0, self.hidden_size), *attended])
        values = place_rows(vectors, torch.cat([begins[:0], *rows]), tokens.shape[0])

        def matrices() -> list[Tensor]:
            parts = [torch.stack([shares[block.pairs] for shares in weights[:length]]) for block, length in pairs_of]
            return [parts[row] for row in order.argsort().tolist()]

        pairs_of = list(zip(blocks, lengths.tolist(), strict=True))
        return inputs._like(values), matrices

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_memory(self, memory: Any) -> None:
        check_kind("memory", memory, Ragged, "a Ragged", "wrap a list of sequences with rl.Ragged")
        if memory.values.dim() != 2 or memory.values.shape[1] != self.memory_size:
            got, rule = f"elements of shape {tuple(memory.features)}", f"memory_size = {self.memory_size} features"
            raise ShapeError(message("memory", got, rule, "pass an encoder's output of this size"))
        check_fits("memory", memory.values, self.head.weight)

    def _check_targets(self, memory: Ragged, targets: Any) -> None:
        check_kind("targets", targets, Ragged, "a Ragged", "wrap a list of tokens with rl.Ragged")
        values = targets.values
        if targets.dtype not in (torch.int64, torch.int32) or values.dim() != 1:
            got = f"elements of {targets.dtype} of shape {tuple(targets.features)}"
            raise ArgumentTypeError(message("targets", got, "one token per element, int64 or int32", "call .long()"))
        check_device("targets", values, memory.device)
        if len(targets) != len(memory):
            rule = f"one sequence for each of the {len(memory)} of memory"
            raise ShapeError(message("targets", f"{len(targets)} sequences", rule, "pass a Ragged of the same items"))
        if values.is_cpu and not torch.compiler.is_compiling():
            wrong = (values < 0) | (values >= self.num_tokens) | (values == self.end)
            if bool(wrong.any()):
                rule = f"tokens from 0 to {self.num_tokens - 1}, except the end, {self.end}"
                raise ArgumentError(message("targets", f"token {int(values[wrong][0])}", rule, "check the vocabulary"))


class _Stepping:
    """The step of a search; rows of one item are adjacent."""

    def __init__(self, decoder: AttentionDecoder, memory: Ragged, longest: int) -> None:
        self.decoder, self.memory = decoder, memory
        self.keys = decoder.attention.keys(memory.values)
        self.starts, self.lengths = memory._host_offsets(), memory.host_lengths
        self.elements = torch.arange(longest, device=memory.device)

    def step(self, tokens: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        """Return log-probabilities ``(R, V)`` and the new state."""
        decoder, item = self.decoder, state["item"]
        embedded = decoder._embedded(tokens, state.get("fed"))
        outputs, new = decoder.recurrent.step(embedded, layers_first(state["cell"]))
        items, counts = (part.cpu() for part in item.unique_consecutive(return_counts=True))
        blocks = blocks_of(counts.tolist(), self.starts[items].tolist(), self.lengths[items].tolist())
        state = {**state, "cell": rows_first(new)}
        is_there, previous = None, None
        if "weights" in state or "covered" in state:
            is_there = self.elements < self.memory.lengths[item].unsqueeze(1)
        if "weights" in state and is_there is not None:
            previous = state["weights"][is_there]
        attended, shares = decoder._attended(outputs, self.keys, self.memory.values, blocks, previous)
        if decoder.input_feeding:
            state["fed"] = attended
        if is_there is not None:
            padded = shares.new_zeros(is_there.shape).masked_scatter(is_there, shares)
            if "weights" in state:
                state["weights"] = padded
            if "covered" in state:
                state["covered"] = state["covered"] + padded
        return F.log_softmax(decoder._logits(attended), 1), state


def _covered(state: dict[str, Any], lengths: Tensor) -> Tensor:
    """Return the coverage penalty of each row, at most 0."""
    covered: Tensor = state["covered"]
    is_there = torch.arange(covered.shape[1], device=covered.device) < lengths[state["item"]]
    # Weights may underflow to 0.
    return covered.clamp(1e-30, 1).log().masked_fill(~is_there, 0).sum(1)
