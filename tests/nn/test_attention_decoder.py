"""Attention decoders against a padded twin with masks, and their searches against enumerations of
all outputs.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.nn.transduction.attention import blocks_of
from raglane.ragged import Ragged
from raglane.transduction import AttentionDecoder

TOKENS, FEATURES, HIDDEN = 5, 3, 4
KINDS = ["additive", "dot", "location"]
ORDERS = ["luong", "bahdanau"]


def _decoder(
    kind: str, feeding: bool = False, cell: Any = "gru", **options: Any
) -> AttentionDecoder:
    sizes: dict[str, Any] = {
        "attention_size": 6,
        "attention_width": 4,
        "embedding": 7,
        "dtype": torch.float64,
    }
    settings = {"attention": kind, "input_feeding": feeding, **sizes, **options}
    return AttentionDecoder(TOKENS, FEATURES, HIDDEN, cell, **settings)


def _batch(steps: list[int], labels: list[int]) -> tuple[Ragged, Ragged]:
    memory = Ragged.from_flat(torch.randn(sum(steps), FEATURES, dtype=torch.float64), lengths=steps)
    return memory, Ragged.from_flat(torch.randint(1, TOKENS, (sum(labels),)), lengths=labels)


def _weights(
    attention: Any, query: Tensor, memory: Tensor, mask: Tensor, weights: Tensor
) -> Tensor:
    """Weights ``(B, T)`` of one step, after those of the previous step."""
    if attention.key is None or attention.vector is None:
        scores = (memory @ query.unsqueeze(2)).squeeze(2)
    else:
        hidden = query.unsqueeze(1) + attention.key(memory)
        if attention.kernel is not None:
            width = len(attention.kernel)
            taps = attention.kernel.t().unsqueeze(1)
            around = nn.functional.pad(weights.unsqueeze(1), (width // 2, (width - 1) // 2))
            hidden = hidden + nn.functional.conv1d(around, taps).transpose(1, 2)
        scores = hidden.tanh() @ attention.vector
    raised = scores.masked_fill(~mask, -1e9).softmax(1) * mask
    return raised / raised.sum(1, keepdim=True).clamp(min=1e-30)


def _padded(
    decoder: AttentionDecoder, memory: Tensor, mask: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """Logits ``(B, U, V)`` and weights ``(B, U, T)`` of a padded batch, one step after the
    other.
    """
    attention, layer = decoder.attention, decoder.recurrent
    state: Any = None
    fed = memory.new_zeros(len(memory), HIDDEN)
    weights = memory.new_zeros(mask.shape)
    logits, every = [], []
    for token in tokens.unbind(1):
        inputs = [decoder.embedding(token)]
        if decoder.attention_order == "bahdanau":
            start = memory.new_zeros(len(memory), layer.state_sizes[0])
            first = state[0] if isinstance(state, tuple) else state
            query = attention.query(start if first is None else first[-1])
            weights = _weights(attention, query, memory, mask, weights)
            inputs.append((weights.unsqueeze(1) @ memory).squeeze(1))
        if decoder.input_feeding:
            inputs.append(fed)
        out, state = layer.step(torch.cat(inputs, 1), state)
        if decoder.attention_order == "luong":
            weights = _weights(attention, attention.query(out), memory, mask, weights)
        fed = decoder.combine(
            torch.cat([(weights.unsqueeze(1) @ memory).squeeze(1), out], 1)
        ).tanh()
        logits.append(decoder.head(fed))
        every.append(weights)
    return torch.stack(logits, 1), torch.stack(every, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feeding", [False, True])
@pytest.mark.parametrize("cell", ["lstm", "gru", "mingru", rl.nn.PeepholeLSTM])
@pytest.mark.parametrize("order", ORDERS)
def test_logits_and_gradients_equal_a_padded_twin(
    kind: str, feeding: bool, cell: Any, order: str
) -> None:
    decoder = _decoder(kind, feeding, cell, attention_order=order)
    memory, targets = _batch([5, 0, 1, 7, 2], [3, 2, 0, 1, 6])
    leaf = memory.values.clone().requires_grad_()
    inputs = [leaf, *decoder.parameters()]
    given = memory.with_values(leaf), targets
    logits = (
        torch.utils.checkpoint.checkpoint(decoder, *given, use_reentrant=False)
        if feeding
        else decoder(*given)
    )
    padded, _ = memory.with_values(leaf).to_padded(batch_first=True)
    tokens = torch.zeros(5, 7, dtype=torch.int64)
    for item, target in enumerate(targets):
        tokens[item, 1 : 1 + len(target)] = target
    theirs, _ = _padded(decoder, padded, memory.mask(), tokens)
    is_there = torch.arange(7) < (targets.lengths + 1).unsqueeze(1)
    torch.testing.assert_close(logits.values, theirs[is_there], rtol=0, atol=1e-12)
    factors = torch.randn_like(logits.values)
    ours = torch.autograd.grad((logits.values * factors).sum(), inputs)
    others = torch.autograd.grad((theirs[is_there] * factors).sum(), inputs)
    torch.testing.assert_close(ours, others, rtol=0, atol=1e-11)


class _Translator(nn.Module):
    """A decoder in Bahdanau's order in plain torch, which decodes one item."""

    def __init__(self, decoder: AttentionDecoder, cell: nn.GRUCell) -> None:
        super().__init__()
        self.decoder = decoder
        self.cell = cell

    def forward(self, memory: Tensor, tokens: list[int], start: Tensor) -> Tensor:
        """Return the logits ``(steps, V)`` of tokens after the tokens before them."""
        attention: Any = self.decoder.attention
        state, logits = start, []
        for token in tokens:
            hidden = torch.tanh(attention.query(state) + attention.key(memory))
            weights = (hidden @ attention.vector).softmax(0)
            context = weights @ memory
            read = self.decoder.embedding.weight[token]
            state = self.cell(torch.cat([read, context]), state)
            vector = torch.tanh(self.decoder.combine(torch.cat([context, state])))
            logits.append(self.decoder.head(vector))
        return torch.stack(logits)


def test_bahdanaus_order_is_a_loop_of_plain_torch() -> None:
    decoder = _decoder("additive", cell="gru", attention_order="bahdanau")
    cell = nn.GRUCell(7 + FEATURES, HIDDEN, dtype=torch.float64)
    layer = decoder.recurrent
    pairs = [(name, getattr(layer, f"{name}_l0")) for name, _ in cell.named_parameters()]
    for name, weight in pairs:
        setattr(cell, name, weight)
    memory, targets = _batch([5, 1, 3], [3, 0, 4])
    leaf = memory.values.clone().requires_grad_()
    hx = torch.randn(1, 3, HIDDEN, dtype=torch.float64, requires_grad=True)
    batch = memory.with_values(leaf)
    twin = _Translator(decoder, cell)
    expected = [
        twin(batch[item], [0, *target.tolist()], hx[0, item]) for item, target in enumerate(targets)
    ]
    logits = decoder(batch, targets, hx)
    torch.testing.assert_close(logits.values, torch.cat(expected), rtol=0, atol=1e-12)
    inputs = [leaf, hx, *decoder.parameters()]
    factors = torch.randn_like(logits.values)
    ours = torch.autograd.grad((logits.values * factors).sum(), inputs)
    theirs = torch.autograd.grad((torch.cat(expected) * factors).sum(), inputs)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-11)
    greedy = decoder.eval().decode(batch, max_length=6, hx=hx).best()
    for item, found in enumerate(greedy):
        tokens = [0]
        while len(tokens) < 7:
            token = int(twin(batch[item], tokens, hx[0, item])[-1].argmax())
            if token == 0:
                break
            tokens.append(token)
        assert found.tolist() == tokens[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_one_derivative(kind: str) -> None:
    decoder, (memory, targets) = _decoder(kind), _batch([3, 0, 2], [2, 1, 1])

    def loss(values: Tensor) -> Tensor:
        return decoder(memory.with_values(values), targets).values.sum() + values.pow(3).sum()

    values = memory.values.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(values), values, create_graph=True)
    with pytest.raises(ArgumentError, match="memory must be the first derivative"):
        gradient.sum().backward()
    with pytest.raises(ArgumentError, match="memory must be a plain tensor"):
        torch.func.grad(loss)(memory.values)


def test_compiled() -> None:
    """torch.compile breaks the graph at the decoder and the search."""
    decoder, (memory, targets) = _decoder("location"), _batch([3, 0, 2], [2, 1, 1])
    compiled = torch.compile(decoder.loss, backend="eager")
    torch.testing.assert_close(compiled(memory, targets), decoder.loss(memory, targets))
    search = torch.compile(decoder.decode, backend="eager")
    assert (
        search(memory, max_length=3).scores.tolist()
        == decoder.decode(memory, max_length=3).scores.tolist()
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_contexts_and_weights(kind: str) -> None:
    attention = _decoder(kind).attention
    memory, _ = _batch([3, 0, 1], [0, 0, 0])
    blocks = blocks_of(memory, range(3), [2, 1, 2])
    previous = (
        torch.rand(8, dtype=torch.float64, requires_grad=True) if kind == "location" else None
    )
    outputs = torch.randn(5, HIDDEN, dtype=torch.float64, requires_grad=True)
    leaf = memory.values.clone().requires_grad_()
    names = [name for name, _ in attention.named_parameters()]

    def run(outputs: Tensor, leaf: Tensor, *others: Tensor) -> Any:
        given = dict(zip(names, others, strict=False))
        calls = (
            outputs,
            nn.functional.linear(leaf, given["key.weight"]) if "key.weight" in given else leaf,
            leaf,
        )
        return torch.func.functional_call(
            attention, given, (*calls, blocks, others[-1] if previous is not None else None)
        )

    inputs = (outputs, leaf, *attention.parameters(), *([] if previous is None else [previous]))
    assert torch.autograd.gradcheck(run, inputs)


def test_large_tiles_of_additive_attention() -> None:
    # More than one tile per item.
    decoder = AttentionDecoder(
        9, memory_size=8, hidden_size=64, attention="additive", dtype=torch.float64
    )
    memory = Ragged.from_flat(torch.randn(150 + 90, 8, dtype=torch.float64), lengths=[150, 90])
    targets = Ragged([torch.randint(1, 9, (40,)), torch.randint(1, 9, (61,))])
    both = decoder.loss(memory, targets, reduction="none")
    one = decoder.loss(memory[1:], targets[1:], reduction="none")
    torch.testing.assert_close(both[1], one[0], rtol=0, atol=1e-12)
    decoder.loss(memory, targets).backward()
    grads = [parameter.grad for parameter in decoder.parameters()]
    decoder.zero_grad()
    decoder.input_feeding = False
    decoder.scheduled_sampling = 1e-300  # the loop over steps, without draws
    decoder.loss(memory, targets).backward()
    for grad, parameter in zip(grads, decoder.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("feeding", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_an_initial_state(feeding: bool, order: str) -> None:
    decoder = _decoder("dot", feeding, "lstm", num_layers=2, attention_order=order)
    memory, targets = _batch([4, 2, 3], [2, 5, 0])
    hx = tuple(torch.randn(2, 3, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2))
    logits = decoder(memory, targets, hx)
    assert all(
        bool((grad[:, item] != 0).any())
        for grad in torch.autograd.grad(logits.values.sum(), hx)
        for item in range(3)
    )
    single = decoder(memory[1:2], targets[1:2], tuple(part[:, 1:2] for part in hx))
    torch.testing.assert_close(logits[1], single[0], rtol=0, atol=1e-12)
    found = decoder.eval().decode(memory, beam_size=2, max_length=3, hx=hx)
    alone = decoder.decode(
        memory[1:2], beam_size=2, max_length=3, hx=tuple(part[:, 1:2] for part in hx)
    )
    assert found.best()[1].tolist() == alone.best()[0].tolist()
    with pytest.raises(ShapeError, match="hx"):
        decoder(memory, targets, tuple(part[:, :2] for part in hx))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feeding", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_nan_stays_in_its_item(kind: str, feeding: bool, order: str) -> None:
    decoder = _decoder(kind, feeding, attention_order=order)
    memory, targets = _batch([3, 2, 4], [2, 4, 1])
    leaf = memory.values.clone()
    leaf[3] = math.nan
    leaf.requires_grad_()
    logits = decoder(memory.with_values(leaf), targets)
    clean = decoder(memory, targets)
    assert bool(logits[1].isnan().any())
    torch.testing.assert_close([logits[0], logits[2]], [clean[0], clean[2]], rtol=0, atol=1e-12)
    (grad,) = torch.autograd.grad(logits[0].sum() + logits[2].sum(), leaf)
    assert not grad[:3].isnan().any()
    assert not grad[5:].isnan().any()


def _scores(
    decoder: AttentionDecoder, memory: Ragged, item: int, most: int
) -> list[tuple[float, tuple[int, ...]]]:
    """The log-probabilities of all outputs of one item, the best first."""
    outputs = [
        output
        for count in range(most + 1)
        for output in itertools.product(range(1, TOKENS), repeat=count)
    ]
    targets = Ragged([torch.tensor(output, dtype=torch.int64) for output in outputs])
    with torch.no_grad():
        logits = decoder(memory.select([item] * len(outputs)), targets)
    found = []
    for output, rows in zip(outputs, logits, strict=True):
        chosen = rows.log_softmax(1)[torch.arange(len(output) + 1), [*output, 0]]
        found.append((float(chosen[: most if len(output) == most else None].sum()), output))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("feeding", [False, True])
@pytest.mark.parametrize("rows", [None, 100])
@pytest.mark.parametrize("order", ORDERS)
def test_a_search_finds_the_best_of_all_outputs(
    kind: str, feeding: bool, rows: int | None, order: str
) -> None:
    decoder = _decoder(kind, feeding, "lstm", attention_order=order).eval()
    memory, _ = _batch([3, 0, 4, 1], [0] * 4)
    found = decoder.decode(memory, beam_size=100, max_length=3, n_best=3, max_rows=rows)
    for item in range(4):
        expected = _scores(decoder, memory, item, 3)[:3]
        places = range(int(found.offsets[item]), int(found.offsets[item + 1]))
        assert [tuple(found.tokens[place].tolist()) for place in places] == [
            output for _, output in expected
        ]
        torch.testing.assert_close(
            found.scores[list(places)].tolist(), [s for s, _ in expected], rtol=1e-10, atol=0
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_coverage_is_that_of_the_weights(kind: str, order: str) -> None:
    decoder = _decoder(kind, True, attention_order=order).eval()
    memory, _ = _batch([3, 0, 4, 1], [0] * 4)
    options: dict[str, Any] = {"beam_size": 100, "max_length": 2, "coverage": 0.7, "n_best": 30}
    found = decoder.decode(memory, **options)
    lower = decoder.decode(memory, penalty=lambda state: -torch.ones(len(state["item"])), **options)
    torch.testing.assert_close(lower.scores, found.scores - 1, rtol=0, atol=1e-12)
    padded, _ = memory.to_padded(batch_first=True)
    for item in range(4):
        plain = {output: score for score, output in _scores(decoder, memory, item, 2)}
        for place in range(int(found.offsets[item]), int(found.offsets[item + 1])):
            output = found.tokens[place]
            read, mask = torch.cat([torch.tensor([0]), output]), memory.mask()[item]
            _, weights = _padded(
                decoder, padded[item].unsqueeze(0), mask.unsqueeze(0), read.unsqueeze(0)
            )
            covered = weights.detach()[0, :2, mask].sum(0).clamp(max=1).log().sum()
            expected = plain[tuple(output.tolist())] + 0.7 * float(covered)
            assert float(found.scores[place]) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_scores_are_those_of_teacher_forcing(
    kind: Any, dtype: torch.dtype, tolerance: float
) -> None:
    decoder = AttentionDecoder(
        40, memory_size=8, hidden_size=32, attention=kind, dtype=dtype
    ).eval()
    lengths = torch.randint(20, (16,))
    memory = Ragged.from_flat(torch.randn(int(lengths.sum()), 8, dtype=dtype), lengths=lengths)
    found = decoder.decode(memory, beam_size=16, n_best=16, max_length=12, max_rows=64)
    items = torch.arange(16).repeat_interleave(found.offsets.diff())
    losses = decoder.loss(memory.select(items), found.tokens, reduction="none")
    # A hypothesis of the maximal length is finished without its end.
    expected = (found.tokens.lengths == 12).to(dtype) * losses.last() - losses.sum(1)
    torch.testing.assert_close(found.scores, expected.detach(), rtol=0, atol=tolerance)


def test_scheduled_sampling_reads_predictions_in_training_only() -> None:
    decoder = _decoder("additive")
    with torch.no_grad():
        decoder.head.weight.zero_()
        decoder.head.bias.copy_(
            torch.tensor([-1e3, -1e3, -1e3, 0.0, -1e3])
        )  # only token 3 can be drawn
    memory, targets = _batch([4, 2], [5, 3])
    always = Ragged.from_flat(torch.full((8,), 3), lengths=[5, 3])
    plain, drawn = (decoder._decoded(memory, tokens, None).values for tokens in (targets, always))
    decoder.scheduled_sampling = 1.0
    torch.testing.assert_close(decoder._decoded(memory, targets, None).values, drawn)
    torch.testing.assert_close(decoder.eval()._decoded(memory, targets, None).values, plain)
    with torch.no_grad():
        decoder.head.bias[4] = 0.0
    read = (
        decoder.train()
        ._decoded(memory.select([0] * 30), targets.select([0] * 30), None)
        .values.view(30, 6, -1)
    )
    assert (
        0 < int(((read - read[0])[:, 1].abs().amax(1) > 1e-6).sum()) < 30
    )  # some read 3, and some 4


def test_the_loss_counts_the_ends() -> None:
    decoder = _decoder("dot", end=2)
    memory, targets = _batch([4, 2], [0, 2])
    targets = targets.with_values(torch.tensor([0, 4]))
    expected = nn.functional.cross_entropy(
        decoder(memory, targets).values, torch.tensor([2, 0, 4, 2])
    )
    torch.testing.assert_close(decoder.loss(memory, targets), expected)
    assert decoder.loss(memory, targets, reduction="none").lengths.tolist() == [1, 3]


def test_a_decoder_learns_to_reverse() -> None:
    torch.manual_seed(0)
    encoder = nn.Embedding(8, 16)
    layer = rl.nn.GRU(16, 16, bidirectional=True)
    decoder = AttentionDecoder(8, memory_size=32, hidden_size=32, cell="gru")
    optimizer = torch.optim.Adam(
        [*encoder.parameters(), *layer.parameters(), *decoder.parameters()], lr=0.01
    )
    for _ in range(150):
        texts = Ragged.from_flat(torch.randint(1, 8, (96,)), lengths=[5, 6, 1, 4] * 6)
        memory, _ = layer(texts.map(encoder))
        optimizer.zero_grad()
        decoder.loss(memory, texts.reverse()).backward()
        optimizer.step()
    texts = Ragged([torch.tensor([3, 1, 7, 7, 2]), torch.tensor([5]), torch.tensor([6, 2, 4])])
    found = decoder.eval().decode(layer(texts.map(encoder))[0], beam_size=3, max_length=9)
    assert [tokens.tolist() for tokens in found.best()] == [[2, 7, 7, 1, 3], [5], [4, 2, 6]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ORDERS)
def test_no_items(kind: str, order: str) -> None:
    decoder = _decoder(kind, feeding=True, attention_order=order)
    memory, targets = _batch([], [])
    assert decoder(memory, targets).values.shape == (0, TOKENS)
    assert len(decoder.decode(memory, max_length=3)) == 0


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"attention": "bilinear"}, ArgumentError, "attention must be one of"),
        (
            {"attention_order": "chorowski"},
            ArgumentError,
            "attention_order must be one of luong, bahdanau",
        ),
        ({"memory_size": 0, "order": "bahdanau"}, ArgumentError, "memory_size must be"),
        ({"end": 5}, ArgumentError, "end must be at most 4"),
        ({"scheduled_sampling": 2.0}, ArgumentError, "scheduled_sampling must be a probability"),
        ({"cell": "transformer"}, ArgumentError, "cell must be one of"),
        ({"bidirectional": True}, ArgumentTypeError, "one direction"),
        ({"num_tokens": 0}, ArgumentError, "num_tokens must be"),
        ({"attention_width": 0}, ArgumentError, "attention_width must be"),
    ],
)
def test_wrong_settings(wrong: dict[str, Any], error: type[RaglaneError], text: str) -> None:
    with pytest.raises(error, match=text):
        AttentionDecoder(**{"num_tokens": TOKENS, "memory_size": 3, "hidden_size": 4} | wrong)


@pytest.mark.parametrize(
    ("memory", "targets", "error", "text"),
    [
        (torch.zeros(2, 3), Ragged([[1]]), ArgumentTypeError, "memory must be a Ragged"),
        (Ragged([torch.zeros(2, 4)]), Ragged([[1]]), ShapeError, "memory must be memory_size = 3"),
        (
            Ragged([torch.zeros(2, 3).double()]),
            Ragged([[1]]),
            ShapeError,
            "memory must be of dtype",
        ),
        (Ragged([torch.zeros(2, 3)]), [[1]], ArgumentTypeError, "targets must be a Ragged"),
        (
            Ragged([torch.zeros(2, 3)]),
            Ragged([[1.0]]),
            ArgumentTypeError,
            "targets must be a Ragged of labels",
        ),
        (
            Ragged([torch.zeros(2, 3)]),
            Ragged([[1], [2]]),
            ShapeError,
            "targets must be one sequence of labels for each",
        ),
        (
            Ragged([torch.zeros(2, 3)]),
            Ragged([[0]]),
            ArgumentError,
            "except the end, 0, got label 0",
        ),
        (Ragged([torch.zeros(2, 3)]), Ragged([[5]]), ArgumentError, "got label 5"),
        (Ragged([torch.zeros(2, 3)]), Ragged([[-1]]), ArgumentError, "got label -1"),
    ],
)
def test_wrong_batches(memory: Any, targets: Any, error: type[RaglaneError], text: str) -> None:
    with torch.device("cpu"), pytest.raises(error, match=text):
        AttentionDecoder(TOKENS, memory_size=3, hidden_size=4)(memory, targets)
