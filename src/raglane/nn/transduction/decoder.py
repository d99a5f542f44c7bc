"""Attention decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from raglane._utils import checks
from raglane._utils.memory import check_pairs
from raglane._utils.tracing import never_recorded
from raglane.nn.encoder import CellName
from raglane.nn.losses.ctc import check_classes, check_labels
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.transduction.attention import KINDS, DecoderAttention, ItemRows, blocks_of
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.nn.transduction.search import beam_search, layers_first, rows_first
from raglane.nn.transduction.tokens import TokenReader
from raglane.ragged import Ragged


class AttentionDecoder(TokenReader):
    """A recurrent decoder with attention: from a memory per item, such as an encoder's output, to a
    sequence of tokens.

    With the embedding ``x`` of the previous token, the recurrent layer's output ``h`` and the
    elements ``m_t`` of the memory, a step computes (Luong et al. 2015, arXiv:1508.04025, equations
    4 to 6)::

        h = layer(x)                     or, with input feeding, layer([x; a]) with the previous a
        w = softmax over t of score(h, m_t)
        c = sum_t w_t m_t,  a = tanh(W [c; h]),  logits = V a

        "dot":       score = m_t @ (Q h)                              Luong et al., "general"
        "additive":  score = v @ tanh(Q h + K m_t + b)                Bahdanau et al. 2015, arXiv:1409.0473
        "location":  score = v @ tanh(Q h + K m_t + L_t + b)          Chorowski et al. 2015, arXiv:1506.07503

    ``L_t`` is a convolution over the weights of the previous step around t. A memory without
    elements has the weighted sum 0.

    With ``attention_order="bahdanau"`` the attention is queried with the previous state, and its context is
    an input of the layer in the same step (Bahdanau et al. 2015, section 3.1)::

        w = softmax over t of score(s, m_t),  c = sum_t w_t m_t
        h = layer([x; c])                or, with input feeding, layer([x; c; a])

    with ``a`` and the logits as above. ``s`` is the last layer's state after the previous step; of
    several states its first, the ``h`` of an LSTM. Before the first step it is the initial state.

    In training, ``"dot"`` and ``"additive"`` in Luong's order without input feeding and scheduled
    sampling are one call of the recurrent layer, and one matrix of weights per item. The others are
    a loop over steps, with fewer rows as sequences end. Memory of the attention is one number per
    token and element.

    Args:
        num_tokens: V, the number of tokens, including ``end``.
        memory_size: the number of features of an element of the memory.
        hidden_size: units of the recurrent layer, and the size of ``a``.
        cell: the name of a layer, e.g. ``"lstm"`` or ``"PeepholeLSTM"``; or a function ``(input_size,
            hidden_size, **options)`` that returns a recurrent layer, such as a class of ``rl.nn``.
        attention: ``"additive"``, ``"dot"`` or ``"location"``.
        attention_order: ``"luong"``, the recurrent layer and then the attention; or ``"bahdanau"``, the
            attention and then the recurrent layer.
        embedding: the size of a token's embedding; None for ``hidden_size``.
        attention_size: the size of ``v``; None for ``hidden_size``.
        attention_width: the elements that the convolution of ``"location"`` reads.
        input_feeding: True to feed ``a`` to the next step.
        scheduled_sampling: in training, the probability that an input token is drawn from the
            distribution that the previous step predicted (Bengio et al. 2015, arXiv:1506.03099). An
            attribute, to be raised during training.
        end: the token that ends a sequence; it is also the input of the first step.
        dropout: the probability that an entry of an embedding or of ``a`` before the product with V
            is zeroed, and between layers.
        num_layers: the number of recurrent layers.
        device, dtype: of the parameters.
        **options: of the recurrent layer, such as ``initial_state``. In a loop over steps, options
            that draw a mask per sequence draw one per step.

    Raises:
        ArgumentError: an argument is out of its range.
        ArgumentTypeError: ``cell`` does not return a recurrent layer of Raglane, or an argument has
            the wrong type.

    Example:
        >>> decoder = AttentionDecoder(30, memory_size=16, hidden_size=32, cell="gru")
        >>> memory = Ragged([torch.randn(7, 16), torch.randn(4, 16)])
        >>> targets = Ragged([[4, 9, 2], [5]])
        >>> decoder(memory, targets).lengths.tolist()  # one step more than tokens, for the end
        [4, 2]
        >>> decoder.loss(memory, targets).backward()
        >>> found = decoder.eval().decode(memory, beam_size=3, max_length=5)
        >>> len(found.best())
        2
    """

    def __init__(
        self,
        num_tokens: int,
        memory_size: int,
        hidden_size: int,
        cell: CellName | Callable[..., RecurrentLayer] = "lstm",
        *,
        attention: Literal["additive", "dot", "location"] = "additive",
        attention_order: Literal["luong", "bahdanau"] = "luong",
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
        checks.check_flag("input_feeding", input_feeding)
        checks.check_count("hidden_size", hidden_size)
        checks.check_count("memory_size", memory_size)
        checks.check_choice("attention_order", attention_order, ("luong", "bahdanau"))
        more = hidden_size if input_feeding else 0
        if attention_order == "bahdanau":
            more += memory_size
        super().__init__(
            num_tokens,
            hidden_size,
            cell,
            embedding,
            dropout,
            num_layers,
            device,
            dtype,
            options,
            more=more,
        )
        self.memory_size = memory_size
        self.attention_order = attention_order
        self.input_feeding = input_feeding
        rule = "a probability from 0 to 1"
        sampled = checks.check_number(
            "scheduled_sampling", scheduled_sampling, rule, lambda share: 0 <= share <= 1
        )
        self.scheduled_sampling = sampled
        self.end = checks.check_whole(
            "end", end, 0, "pass one of the num_tokens tokens", most=num_tokens - 1
        )
        size = (
            hidden_size
            if attention_size is None
            else checks.check_count("attention_size", attention_size)
        )
        taps = checks.check_count("attention_width", attention_width)
        output_size = self.recurrent.output_size
        query_size = output_size if attention_order == "luong" else self.recurrent.state_sizes[0]
        checks.check_choice("attention", attention, KINDS)
        placed: dict[str, Any] = {"device": device, "dtype": dtype}
        self.attention = DecoderAttention(attention, query_size, memory_size, size, taps, placed)
        self.combine = nn.Linear(memory_size + output_size, hidden_size, **placed)
        self.head = nn.Linear(hidden_size, num_tokens, **placed)

    # Traced, the loops over items and steps would be unrolled and compiled again for every batch.
    @never_recorded
    def forward(self, memory: Ragged, targets: Ragged, hx: Any = None) -> Ragged:
        """Return the logits of each token, given the tokens before it: teacher forcing.

        Args:
            memory: values ``(N, memory_size)``, one sequence per item; lengths may be 0.
            targets: one sequence of tokens per item, of an integer dtype, without ``end``; lengths
                may be 0.
            hx: the initial state of the recurrent layer, ``(num_layers, B, size)`` or a tuple of
                them, e.g. an encoder's final state. None for the layer's ``initial_state``.

        Returns:
            Logits ``(N, V)``, one more per sequence than tokens: the last is that of the end.

        Raises:
            ArgumentTypeError: ``memory`` or ``targets`` is not a Ragged, or has the wrong dtype.
            ShapeError: sizes, numbers of sequences or devices do not match.
            ArgumentError: on a CPU, a target is not a token or is ``end``.
        """
        return self._decoded(memory, targets, hx).map(self._logits)

    if TYPE_CHECKING:

        def __call__(self, memory: Ragged, targets: Ragged, hx: Any = None) -> Ragged: ...  # noqa: D102

    @never_recorded
    def loss(self, memory: Ragged, targets: Ragged, hx: Any = None, **options: Any) -> Any:
        """Return the cross-entropy of the targets and their ends.

        Args:
            memory: as for the call.
            targets: as for the call.
            hx: as for the call.
            **options: of :func:`torch.nn.functional.cross_entropy`, such as ``reduction`` and
                ``label_smoothing``.

        Returns:
            A scalar, the mean over all tokens and ends, or the result of another reduction.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as for the call.
        """
        logits = self(memory, targets, hx)
        tokens: Any = logits._like(targets.concat(self._ends(targets)).values)
        return F.cross_entropy(logits, tokens, **options)

    def decode(
        self,
        memory: Ragged,
        *,
        beam_size: int = 1,
        max_length: int | Tensor,
        coverage: float = 0.0,
        hx: Any = None,
        **options: Any,
    ) -> Hypotheses:
        """Search the best token sequences of each item. Call ``eval()`` first.

        Args:
            memory: as for the call.
            beam_size: as for :func:`beam_search`; 1 is the greedy search.
            max_length: as for :func:`beam_search`.
            coverage: the factor of the coverage penalty of Wu et al. 2016 (arXiv:1609.08144,
                equation 14), the sum over the elements of ``log(min(their weights over all steps,
                1))``.
            hx: as for the call.
            **options: further options of :func:`beam_search`, such as ``n_best``,
                ``length_penalty`` and ``max_rows``.

        Returns:
            The hypotheses, without ends.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as for the call and :func:`beam_search`.
        """
        self._check_elements("memory", memory, "memory_size")
        rule = "a finite number of at least 0"
        checks.check_number("coverage", coverage, rule, lambda factor: 0 <= factor < float("inf"))
        if coverage:
            further = options.pop("penalty", None)

            def penalty(state: dict[str, Any]) -> Tensor:
                # Weights may underflow to 0.
                logs = state["covered"].clamp(1e-30, 1).log().masked_fill(~state["mask"], 0)
                return coverage * logs.sum(1) + (further(state) if further else 0)

            options["penalty"] = penalty
        with torch.no_grad():
            starts = torch.full((len(memory),), self.end, device=memory.device)
            step = self._search_step(memory)
            state = self._start(memory, hx, coverage > 0)
            return beam_search(
                step,
                starts,
                state,
                beam_size=beam_size,
                max_length=max_length,
                end=self.end,
                **options,
            )

    # -- a step
    # ----------------------------------------------------------------------------------------------

    def _combined(self, contexts: Tensor, outputs: Tensor) -> Tensor:
        """Return the vectors ``a``."""
        return torch.tanh(self.combine(torch.cat([contexts, outputs], 1)))

    def _logits(self, attended: Tensor) -> Tensor:
        return self.head(self.dropout(attended))

    def _start(self, memory: Ragged, hx: Any, is_covered: bool = False) -> dict[str, Any]:
        """Return the state before the first step, tensors with one row per item."""
        count = len(memory)
        values = memory.values
        # A layer checks the state and returns it for sequences without elements.
        none = Ragged._build(
            values.new_zeros(0, self.recurrent.input_size), torch.zeros(count, dtype=torch.int64)
        )
        state: dict[str, Any] = {
            "item": torch.arange(count, device=memory.device),
            "cell": rows_first(self.recurrent(none, hx)[1]),
            "attended": values.new_zeros(count, self.hidden_size),
        }
        if is_covered or self.attention.kernel is not None:
            mask = memory.mask()
            zeros = torch.zeros_like(mask, dtype=values.dtype)
            state |= {"mask": mask, "weights": zeros, "covered": zeros}
        return state

    def _step(
        self,
        tokens: Tensor,
        state: dict[str, Any],
        keys: Tensor,
        memory: Ragged,
        blocks: list[ItemRows],
    ) -> dict[str, Any]:
        """Return the state after one more token per row; rows of one item are adjacent."""
        inputs = [self._embedded(tokens)]
        mask = state.get("mask")
        previous = None
        if mask is not None:
            # A mask as an index would wait for a device, which counts its elements.
            pairs = blocks[-1].pairs.stop if blocks else 0
            index = torch.nonzero_static(mask.flatten(), size=pairs).view(-1)
            previous = state["weights"].flatten().index_select(0, index)

        def attend(queries: Tensor) -> tuple[Tensor, Tensor]:
            contexts, weights = self.attention(queries, keys, memory.values, blocks, previous)
            return contexts, weights

        if self.attention_order == "bahdanau":
            contexts, flat = attend(state["cell"][0][:, -1])
            inputs.append(contexts)
        if self.input_feeding:
            inputs.append(state["attended"])
        outputs, cell = self.recurrent.step(torch.cat(inputs, 1), layers_first(state["cell"]))
        if self.attention_order == "luong":
            contexts, flat = attend(outputs)
        attended = self._combined(contexts, outputs)
        state = {**state, "cell": rows_first(cell), "attended": attended}
        if mask is not None:
            weights = flat.new_zeros(mask.numel()).index_copy(0, index, flat).view_as(mask)
            state |= {"weights": weights, "covered": state["covered"] + weights}
        return state

    def _search_step(self, memory: Ragged) -> Callable[[Tensor, Any], tuple[Tensor, Any]]:
        """Return the step of a beam search."""
        keys = self.attention.keys(memory.values)

        def step(tokens: Tensor, state: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
            items, counts = state["item"].unique_consecutive(return_counts=True)
            state = self._step(
                tokens, state, keys, memory, blocks_of(memory, items.tolist(), counts.tolist())
            )
            return self._logits(state["attended"]).log_softmax(1), state

        return step

    # -- teacher forcing
    # ----------------------------------------------------------------------------------------------

    def _decoded(self, memory: Ragged, targets: Ragged, hx: Any) -> Ragged:
        """Return the vectors ``a`` of all steps."""
        self._check_elements("memory", memory, "memory_size")
        check_labels(targets, memory, "memory")
        check_classes(targets, self.num_tokens, self.end, "end")
        if memory.values.is_cpu and not torch.compiler.is_compiling():
            check_pairs(memory.lengths_cpu, targets.lengths_cpu + 1, memory.values.itemsize)
        inputs = self._ends(targets).concat(targets).map(Tensor.long)
        draws = self.scheduled_sampling if self.training else 0.0
        is_one_call = self.attention_order == "luong" and not self.input_feeding and not draws
        if not is_one_call or self.attention.kernel is not None:
            return inputs._like(self._stepped(memory, inputs, self._start(memory, hx), draws))
        outputs, _ = self.recurrent(inputs.map(self._embedded), hx)
        blocks = blocks_of(memory, range(len(memory)), inputs.lengths_cpu.tolist())
        keys = self.attention.keys(memory.values)
        contexts, _ = self.attention(outputs.values, keys, memory.values, blocks, None)
        return outputs._like(self._combined(contexts, outputs.values))

    def _stepped(
        self, memory: Ragged, inputs: Ragged, state: dict[str, Any], draws: float
    ) -> Tensor:
        """Return the vectors ``a`` of all steps in a loop; items with the most tokens are first."""
        indices = torch.arange(inputs.values.shape[0], device=memory.device)
        packed = inputs._like(indices).to_packed()
        keys = self.attention.keys(memory.values)
        order: Any = packed.sorted_indices
        state = pytree.tree_map(lambda leaf: leaf[order], state)
        # The order again, because the host would wait for the one on a device.
        items = inputs.lengths_cpu.argsort(descending=True, stable=True).tolist()
        attended = [memory.values.new_zeros(0, self.hidden_size)]
        for now in packed.data.split(packed.batch_sizes.tolist()):
            tokens = inputs.values[now]
            size = now.shape[0]
            state = pytree.tree_map(lambda leaf: leaf[:size], state)  # noqa: B023
            if draws and len(attended) > 1:
                chances = self._logits(state["attended"]).detach().float().softmax(1)
                is_drawn = torch.rand(size, device=tokens.device) < draws
                # The draws of torch.multinomial, which waits for a device to check the chances.
                drawn = (chances / torch.empty_like(chances).exponential_()).argmax(1)
                tokens = torch.where(is_drawn, drawn, tokens)
            state = self._step(
                tokens, state, keys, memory, blocks_of(memory, items[:size], [1] * size)
            )
            attended.append(state["attended"])
        vectors = torch.cat(attended)
        # Not from_packed, which reads the order on the host.
        return torch.empty_like(vectors).index_copy(0, packed.data, vectors)

    def _ends(self, targets: Ragged) -> Ragged:
        """Return one sequence per item, which consists of the end."""
        return Ragged._build(
            targets.values.new_full((len(targets),), self.end),
            torch.ones_like(targets.lengths_cpu),
        )
