"""Truncated backpropagation: sequences in chunks, and the state that goes from one to the next."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import raglane as rl
from looped import looped
from raglane.data.chunks import Chunk, Chunks
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.native import missing_kernels
from raglane.nn.recurrent.carry import carry
from strategies import lengths as any_lengths
from strategies import sequences_of

LENGTHS = [7, 0, 1, 12, 3, 0, 30, 1, 5, 2]


def numbered(lengths: list[int]) -> rl.Ragged:
    """Sequences whose elements are all different."""
    return rl.Ragged.from_flat(torch.arange(sum(lengths)), lengths=lengths)


def random_batch(lengths: list[int], size: int = 3, dtype: torch.dtype = torch.float64) -> rl.Ragged:
    return rl.Ragged(sequences_of(lengths, (size,), dtype))


def as_lists(chunk: Chunk) -> tuple[Any, ...]:
    """All of a chunk, to be compared."""
    targets = chunk.targets
    return (
        [piece.tolist() for piece in chunk.inputs],
        [piece.tolist() for piece in targets] if isinstance(targets, rl.Ragged) else targets,
        chunk.begins.tolist(),
        chunk.ends.tolist(),
        chunk.sequences.tolist(),
    )


# -- which elements come when -------------------------------------------------------------------------------------


@given(any_lengths(12), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_every_stream_reads_one_sequence_after_another(
    lengths: list[int], batch_size: int, steps: int, shuffle: bool, epoch: int
) -> None:
    data = numbered(lengths)
    chunks = Chunks(data, batch_size, steps, targets=data.map(lambda values: -values), shuffle=shuffle, seed=5)
    chunks.set_epoch(epoch)
    read: dict[int, list[int]] = {}
    current = [-1] * batch_size  # the sequence that each row is in the middle of
    everything = list(chunks)
    for chunk in everything:
        assert isinstance(chunk.targets, rl.Ragged)
        assert len(chunk.inputs) == len(chunk.sequences) == batch_size
        assert torch.equal(chunk.targets.values, -chunk.inputs.values)
        assert torch.equal(chunk.targets.offsets, chunk.inputs.offsets)
        for row, (piece, _, begins, ends, sequence) in enumerate(zip(*as_lists(chunk), strict=True)):
            if sequence == -1:
                assert (piece, begins, ends, current[row]) == ([], False, False, -1)
                continue
            assert begins == (sequence not in read)
            assert current[row] == (-1 if begins else sequence)
            read.setdefault(sequence, []).extend(piece)
            assert ends == (len(read[sequence]) == lengths[sequence])
            assert len(piece) == steps or (ends and len(piece) < steps)
            current[row] = -1 if ends else sequence
    assert len(everything) == len(chunks)
    assert current == [-1] * batch_size
    assert read == {number: sequence.tolist() for number, sequence in enumerate(data)}


@given(any_lengths(20), st.integers(1, 5), st.integers(1, 7), st.booleans())
def test_streams_end_together(lengths: list[int], batch_size: int, steps: int, shuffle: bool) -> None:
    pieces = [max(1, -(-length // steps)) for length in lengths]
    chunks = Chunks(numbered(lengths), batch_size, steps, shuffle=shuffle)
    # Graham 1966: what is given to whoever is free ends no later than the mean and most of the largest.
    most = sum(pieces) / batch_size + (1 - 1 / batch_size) * max(pieces, default=0)
    assert len(chunks) <= most + 1e-9
    last_busy = [0] * batch_size
    for number, chunk in enumerate(chunks):
        for row in (chunk.sequences >= 0).nonzero().flatten().tolist():
            assert last_busy[row] == number  # a stream rests only once it has no more
            last_busy[row] += 1
    if lengths:
        assert max(last_busy) - min(last_busy) <= max(pieces)


def test_targets_of_sequences_come_when_these_end(device: torch.device) -> None:
    targets = torch.randn(len(LENGTHS), 2)
    found: dict[int, Tensor] = {}
    for chunk in Chunks(random_batch(LENGTHS), 3, 4, targets=targets):
        assert isinstance(chunk.targets, Tensor)
        ending = chunk.sequences[chunk.ends].tolist()
        assert chunk.targets.shape == (len(ending), 2)
        assert chunk.targets.device.type == device.type
        assert not set(ending) & set(found)
        found |= dict(zip(ending, chunk.targets, strict=True))
    assert torch.equal(torch.stack([found[number] for number in range(len(LENGTHS))]), targets)


def test_without_shuffle_each_stream_begins_with_its_longest() -> None:
    chunks = Chunks(numbered([3, 9, 4, 9, 0]), 2, 4, shuffle=False)
    for _ in range(2):  # and every epoch is the same
        assert [chunk.sequences.tolist() for chunk in chunks] == [[1, 3]] * 3 + [[2, 0], [4, -1]]
    assert [chunk.ends.tolist() for chunk in chunks] == [
        [False] * 2,
        [False] * 2,
        [True] * 2,
        [True] * 2,
        [True, False],
    ]


@pytest.mark.parametrize(
    "lengths", [[10] * 40, [number % 5 for number in range(40)], [2 * number for number in range(20)]]
)
def test_epochs_and_seeds_have_orders_of_their_own(lengths: list[int]) -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        chunks = Chunks(numbered(lengths), 4, 3, seed=seed)
        chunks.set_epoch(epoch)
        return tuple(number for chunk in chunks for number in chunk.sequences[chunk.begins].tolist())

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1) for epoch in range(3)}
    assert len(set(orders.values())) == 6
    assert all(order(*key) == found for key, found in orders.items())
    assert all(sorted(found) == list(range(len(lengths))) for found in orders.values())


def test_any_sequence_may_be_the_first() -> None:
    chunks = Chunks(numbered([4, 8, 4, 12, 8, 4, 4, 8]), 2, 4)
    firsts: set[int] = set()
    for epoch in range(200):
        chunks.set_epoch(epoch)
        firsts.update(next(iter(chunks)).sequences.tolist())
    assert firsts == set(range(8))


def test_a_plain_loop_gets_another_order_in_every_epoch() -> None:
    plain, told = (Chunks(numbered(LENGTHS), 3, 2, seed=1) for _ in range(2))
    for epoch in range(3):
        told.set_epoch(epoch)
        assert list(map(as_lists, plain)) == list(map(as_lists, told))
    begun = list(map(as_lists, islice(plain, 3)))  # left in the middle: the same epoch begins anew
    told.set_epoch(3)
    assert begun == list(map(as_lists, plain))[:3] == list(map(as_lists, told))[:3]


@given(any_lengths(12), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.data())
def test_resuming_gives_exactly_the_chunks_that_remain(
    lengths: list[int], batch_size: int, steps: int, shuffle: bool, data: st.DataObject
) -> None:
    def make() -> Chunks:
        chunks = Chunks(numbered(lengths), batch_size, steps, shuffle=shuffle)
        chunks.set_epoch(3)
        return chunks

    whole = make()
    everything = list(map(as_lists, whole))
    done = data.draw(st.integers(0, len(everything)))
    stopped = make()
    iterator = iter(stopped)
    assert [as_lists(next(iterator)) for _ in range(done)] == everything[:done]
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = Chunks(numbered(lengths), batch_size, steps, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    assert list(map(as_lists, resumed)) == everything[done:]
    assert list(map(as_lists, resumed)) == list(map(as_lists, whole))  # the next epoch


# -- the kinds of data ------------------------------------------------------------------------------------------------


def kinds_of_data(per_element: bool) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The same sequences and targets, in every way in which they can be given."""
    inputs = random_batch(LENGTHS, dtype=torch.float32)
    marks = torch.arange(inputs.values.shape[0] if per_element else len(LENGTHS))
    targets = rl.Ragged.from_flat(marks, lengths=LENGTHS) if per_element else marks
    pairs = list(zip(inputs, targets, strict=True))
    yield inputs, {"targets": targets}
    yield list(inputs), {"targets": targets}
    yield [sequence.cpu().numpy() for sequence in inputs], {"targets": targets}
    yield pairs, {}
    yield [{"inputs": sequence, "target": target, "name": "x"} for sequence, target in pairs], {}
    dataset = rl.data.SequenceDataset(inputs.values, inputs.offsets, marks, per_element=per_element)
    yield dataset, {}
    yield [dataset[row] for row in range(len(dataset))], {}


@pytest.mark.parametrize("per_element", [False, True])
def test_all_kinds_of_data_are_the_same(per_element: bool) -> None:
    torch.manual_seed(0)
    found = []
    for data, arguments in kinds_of_data(per_element):
        torch.manual_seed(0)
        chunks = list(Chunks(data, 3, 4, **arguments))
        found.append([as_lists(chunk) for chunk in chunks])
        if not per_element:
            found[-1] = [(*lists[:1], lists[1].tolist(), *lists[2:]) for lists in found[-1]]
    assert all(lists == found[0] for lists in found)
    assert len(found) == 7


@pytest.mark.parametrize("data", [numbered([4]), [torch.ones(4)], [{"inputs": torch.ones(4)}]])
def test_data_without_targets(data: Any) -> None:
    assert [chunk.targets for chunk in Chunks(data, 1, 3)] == [None, None]


def test_no_sequences() -> None:
    chunks = Chunks(numbered([]), 2, 3)
    assert len(chunks) == 0
    assert list(chunks) == []


def test_inputs_that_want_gradients_get_them() -> None:
    values = torch.randn(sum(LENGTHS), 2, requires_grad=True)
    data = rl.Ragged.from_flat(values, lengths=LENGTHS)
    total = torch.stack([chunk.inputs.values.pow(2).sum() for chunk in Chunks(data, 3, 4)]).sum()
    (gradient,) = torch.autograd.grad(total, values)
    torch.testing.assert_close(gradient, 2 * values.detach())


@pytest.mark.parametrize(
    ("data", "arguments", "error", "words"),
    [
        (numbered([1]), {"steps": 0}, ArgumentError, "steps: got 0"),
        (numbered([1]), {"steps": 1.0}, ArgumentTypeError, "steps: got 1.0"),
        (numbered([1]), {"batch_size": 0}, ArgumentError, "batch_size: got 0"),
        (numbered([1]), {"shuffle": 1}, ArgumentTypeError, "shuffle: got 1"),
        (numbered([1]), {"seed": -1}, ArgumentError, "seed: got -1"),
        ([], {}, ArgumentError, "at least one sample"),
        (torch.ones(3, 2), {}, ArgumentTypeError, "a list of samples"),
        ([1.0, 2.0], {}, ArgumentTypeError, "data: got samples such as a float"),
        ([(torch.ones(2), 1, "name")], {}, ArgumentTypeError, "data: got samples such as a tuple"),
        ([{"x": torch.ones(2)}], {}, ArgumentTypeError, "data: got samples such as a dict"),
        ([(torch.ones(2), "label")], {}, ArgumentTypeError, "targets: got a list"),
        (numbered([1, 2]), {"targets": torch.ones(3)}, ShapeError, r"targets: got shape \(3,\).*\(2, \*features\)"),
        (numbered([1, 2]), {"targets": numbered([2, 1])}, ShapeError, "targets: got a Ragged of other lengths"),
        (numbered([1, 2]), {"targets": [0, 1]}, ArgumentTypeError, "targets: got a list"),
        ([(torch.ones(2), 1)], {"targets": torch.ones(1)}, ArgumentError, "targets: .*leave one of them out"),
    ],
)
def test_bad_arguments(data: Any, arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Chunks(data, **({"batch_size": 2, "steps": 3} | arguments))


def test_a_state_of_other_chunks() -> None:
    state = Chunks(numbered([1, 2, 3]), 2, 3).state_dict()
    for other, words in (
        (Chunks(numbered([1, 2, 4]), 2, 3), "elements = 6; .*Chunks has elements = 7"),
        (Chunks(numbered([1, 2, 3]), 2, 4), "steps"),
        (Chunks(numbered([1, 2, 3]), 3, 3), "batch_size"),
        (Chunks(numbered([1, 2, 3]), 2, 3, seed=1), "seed"),
    ):
        with pytest.raises(ArgumentError, match=words):
            other.load_state_dict(state)
    with pytest.raises(ArgumentError, match="done"):
        other.state_dict(9)


# -- the state from chunk to chunk ----------------------------------------------------------------------------------


def parts_of(state: Any) -> tuple[Tensor, ...]:
    return state if isinstance(state, tuple) else (state,)


def run_in_chunks(layer: Any, data: rl.Ragged, batch_size: int, steps: int) -> tuple[rl.Ragged, tuple[Tensor, ...]]:
    """Outputs and final states of all sequences, as if they had been run whole."""
    outputs: list[list[Tensor]] = [[] for _ in range(len(data))]
    finals: list[tuple[Tensor, ...]] = [()] * len(data)
    state = None
    for chunk in Chunks(data, batch_size, steps, seed=2):
        out, state = layer(chunk.inputs, carry(layer, chunk.inputs, state, chunk.begins))
        for row, (sequence, ends) in enumerate(zip(chunk.sequences.tolist(), chunk.ends.tolist(), strict=True)):
            if sequence >= 0:
                outputs[sequence].append(out[row])
            if ends:
                finals[sequence] = tuple(part[:, row] for part in parts_of(state))
    return (
        rl.Ragged([torch.cat(pieces) for pieces in outputs]),
        tuple(torch.stack(parts, 1) for parts in zip(*finals, strict=True)),
    )


@pytest.mark.skipif(bool(missing_kernels()), reason="the cpu kernels are not built")
@looped("steps", [1, 3, 8, 40])
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@looped("batch_size", [1, 4])
def test_in_chunks_the_cpu_kernels_give_the_bits_of_the_whole(
    kind: str, steps: int, batch_size: int, device: torch.device
) -> None:
    with torch.device("cpu"):
        layer = getattr(rl.nn, kind)(3, 17, num_layers=2, backend="cpu")
        lengths = [*LENGTHS, *torch.randint(0, 20, (5,)).tolist()]
        data = random_batch(lengths, dtype=torch.float32)
        out, final = layer(data)
        found, found_final = run_in_chunks(layer, data, batch_size, steps)
    assert torch.equal(found.values, out.values)
    assert all(torch.equal(*pair) for pair in zip(found_final, parts_of(final), strict=True))


class FirstElement(nn.Module):
    """An initial state of what a sequence begins with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, batch: rl.Ragged) -> Tensor:
        state: Tensor = self.linear(batch.first()).unsqueeze(0)
        return state


class Counting(nn.Module):
    """A user's cell, with states of its own making."""

    input_size, hidden_size = 3, 4

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 4, dtype=torch.float64)

    def initial_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        start = torch.full((batch_size, 4), 0.5, dtype=torch.float64)
        return start, torch.zeros(batch_size, 1, dtype=torch.float64)

    def step(self, x_t: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, count = state
        h = self.linear(torch.cat([x_t, h], 1)).tanh() + 0.01 * count
        return h, (h, count + 1)


def learned_lstm() -> rl.nn.LSTM:
    layer = rl.nn.LSTM(3, 4, num_layers=2, initial_state="learned", dtype=torch.float64)
    for part in "hc":
        nn.init.normal_(layer.get_parameter(f"initial_{part}"))
    return layer


MAKERS: dict[str, Callable[[], Any]] = {
    "LSTM with projections": lambda: rl.nn.LSTM(3, 6, num_layers=2, proj_size=4, dtype=torch.float64),
    "learned LSTM": learned_lstm,
    "GRU of the first element": lambda: rl.nn.GRU(3, 4, initial_state=FirstElement(), dtype=torch.float64),
    "MinGRU": lambda: rl.nn.MinGRU(3, 4, num_layers=2, dtype=torch.float64),
    "own cell": lambda: rl.nn.Recurrent(Counting()),
}


@looped("steps", [1, 4, 40])
@pytest.mark.parametrize("name", list(MAKERS))
def test_in_chunks_every_layer_gives_what_it_gives_whole(name: str, steps: int) -> None:
    layer = MAKERS[name]()
    layer.backend = "reference"
    data = random_batch(LENGTHS)
    out, final = layer(data)
    found, found_final = run_in_chunks(layer, data, 3, steps)
    torch.testing.assert_close(found.values, out.values, rtol=0, atol=1e-12)
    for part, expected in zip(found_final, parts_of(final), strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 4, 40])
def test_gradients_stop_at_the_border_of_chunks(steps: int) -> None:
    data, weights = random_batch(LENGTHS), random_batch(LENGTHS, 4)
    layer = learned_lstm()
    state = None
    for chunk in Chunks(data, 3, steps, targets=weights):
        assert isinstance(chunk.targets, rl.Ragged)
        out, state = layer(chunk.inputs, carry(layer, chunk.inputs, state, chunk.begins))
        (out * chunk.targets).values.sum().backward()

    # The same sequences one by one, through torch's layer.
    plain = nn.LSTM(3, 4, num_layers=2, batch_first=True, dtype=torch.float64)
    plain.load_state_dict({name: value for name, value in layer.state_dict().items() if "initial" not in name})
    learned = [layer.get_parameter(f"initial_{part}").detach().clone().requires_grad_() for part in "hc"]
    for sequence, weight in zip(data, weights, strict=True):
        hx = tuple(part.unsqueeze(1) for part in learned)
        for piece, part in zip(sequence.split(steps), weight.split(steps), strict=True):
            if len(piece) > 0:
                out, (h, c) = plain(piece.unsqueeze(0), hx)
                (out * part).sum().backward()
                hx = h.detach(), c.detach()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(layer.get_parameter(name).grad, parameter.grad)
    for part, name in zip(learned, "hc", strict=True):
        torch.testing.assert_close(layer.get_parameter(f"initial_{name}").grad, part.grad)


def test_training_in_chunks_learns_what_no_chunk_holds() -> None:
    """The first element decides what the last should be, several chunks later."""
    torch.manual_seed(0)
    marks = torch.randint(0, 2, (60,))
    sequences = [torch.zeros(int(length), 2) for length in torch.randint(1, 20, (60,))]
    for sequence, mark in zip(sequences, marks.tolist(), strict=True):
        sequence[0, mark] = 1
    layer, head = rl.nn.GRU(2, 16), nn.Linear(16, 2)
    optimizer = torch.optim.Adam([*layer.parameters(), *head.parameters()], lr=0.02)
    chunks = Chunks(list(zip(sequences, marks, strict=True)), 16, 5)
    for _ in range(8):
        state, right = None, 0
        for chunk in chunks:
            _, state = layer(chunk.inputs, carry(layer, chunk.inputs, state, chunk.begins), return_output=False)
            if chunk.ends.any():
                assert isinstance(chunk.targets, Tensor)
                logits = head(state[-1][chunk.ends])
                right += int((logits.argmax(1) == chunk.targets).sum())
                optimizer.zero_grad()
                nn.functional.cross_entropy(logits, chunk.targets).backward()
                optimizer.step()
    assert right >= 57


def test_what_stood_in_a_row_before_is_not_read() -> None:
    layer = rl.nn.GRU(3, 4)
    chunk = random_batch([2, 2, 0, 0], dtype=torch.float32)
    old = torch.full((1, 4, 4), torch.nan)
    old[0, 1] = 1
    hx = carry(layer, chunk, old, torch.tensor([True, False, True, False]))
    assert torch.equal(hx[0, :3], torch.tensor([0.0, 1.0, 0.0]).unsqueeze(1).expand(3, 4))
    out, _ = layer(chunk, hx)
    assert out.values.isfinite().all()


def test_carrying_detaches() -> None:
    layer = learned_lstm()
    chunk, begins = random_batch([2, 1]), torch.tensor([True, False])
    old = tuple(torch.randn(2, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    h, c = carry(layer, chunk, old, begins)
    gradients = torch.autograd.grad((h.sum(), c.sum()), (*old, layer.get_parameter("initial_h")), allow_unused=True)
    assert [gradient is None for gradient in gradients] == [True, True, False]
    torch.testing.assert_close(gradients[2], torch.ones(2, 4, dtype=torch.float64))


def test_the_first_chunk_needs_no_state_and_a_later_one_does() -> None:
    layer = rl.nn.LSTM(3, 4)
    chunk = random_batch([2, 0], dtype=torch.float32)
    h, c = carry(layer, chunk, None, torch.tensor([True, False]))
    assert torch.equal(h, torch.zeros(1, 2, 4))
    assert torch.equal(c, h)
    with pytest.raises(ArgumentError, match="hx: got None, and row 0 that does not begin"):
        carry(layer, chunk, None, torch.tensor([False, False]))


@torch.no_grad()
def test_a_compiled_model_carries_without_a_break() -> None:
    layer = rl.nn.GRU(3, 4)

    def model(chunk: rl.Ragged, state: Any, begins: Tensor) -> Any:
        return layer(chunk, carry(layer, chunk, state, begins))

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    states: list[Any] = [None, None]
    for chunk in Chunks(random_batch(LENGTHS, dtype=torch.float32), 3, 4):
        outputs = []
        for number, run in enumerate((model, compiled)):
            out, states[number] = run(chunk.inputs, states[number], chunk.begins)
            outputs.append(out.values)
        torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"layer": nn.GRU(3, 4)}, ArgumentTypeError, "layer: got a GRU"),
        ({"layer": rl.nn.GRU(3, 4, bidirectional=True)}, ArgumentTypeError, "layer: got a bidirectional"),
        ({"input": torch.ones(2, 5, 3)}, ArgumentTypeError, "input: got a Tensor"),
        ({"input": numbered([1, 2])}, ShapeError, "input: .*input_size = 3"),
        ({"hx": torch.zeros(1, 3, 4)}, ShapeError, r"hx \(h\): got shape \(1, 3, 4\)"),
        ({"hx": (torch.zeros(1, 2, 4),) * 2}, ArgumentTypeError, "hx: got a tuple"),
        ({"begins": [True, False]}, ArgumentTypeError, "begins: got a list"),
        ({"begins": torch.ones(2)}, ArgumentTypeError, "begins: got torch.float32"),
        ({"begins": torch.ones(3, dtype=torch.bool)}, ShapeError, r"begins: got shape \(3,\)"),
    ],
)
def test_what_cannot_be_carried(change: dict[str, Any], error: type[Exception], words: str) -> None:
    arguments: dict[str, Any] = {
        "layer": rl.nn.GRU(3, 4),
        "input": rl.Ragged([torch.ones(2, 3), torch.ones(1, 3)]),
        "hx": torch.zeros(1, 2, 4),
        "begins": torch.tensor([True, False]),
    }
    with pytest.raises(error, match=words):
        carry(**(arguments | change))
