"""Truncated backpropagation: sequences in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import raglane as rl
from batches import numbered, random_batch
from made_datasets import of_tensors
from raglane.data.order.tbptt import Chunk, TBPTTSampler
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from strategies import lengths as any_lengths

LENGTHS = [7, 0, 1, 12, 3, 0, 30, 1, 5, 2]


def as_lists(chunk: Chunk) -> tuple[Any, ...]:
    """All of a chunk, to be compared."""
    targets = chunk.targets
    return (
        [piece.tolist() for piece in chunk.inputs],
        None if targets is None else [target.tolist() for target in targets],
        chunk.begins.tolist(),
        chunk.ends.tolist(),
        chunk.sequences.tolist(),
    )


@given(any_lengths(12), st.integers(1, 5), st.integers(1, 7), st.booleans(), st.integers(0, 3))
def test_every_stream_reads_one_sequence_after_another(
    lengths: list[int], batch_size: int, steps: int, shuffle: bool, epoch: int
) -> None:
    data = numbered(lengths)
    chunks = TBPTTSampler(
        data, batch_size, steps, targets=data.map(torch.neg), shuffle=shuffle, seed=5
    )
    chunks.set_epoch(epoch)
    read: dict[int, list[int]] = {}
    current = [-1] * batch_size  # the sequence that each row is in the middle of
    everything = list(chunks)
    for chunk in everything:
        assert isinstance(chunk.targets, rl.Ragged)
        assert len(chunk.inputs) == len(chunk.sequences) == batch_size
        assert torch.equal(chunk.targets.values, -chunk.inputs.values)
        assert torch.equal(chunk.targets.offsets, chunk.inputs.offsets)
        for row, (piece, _, begins, ends, sequence) in enumerate(
            zip(*as_lists(chunk), strict=True)
        ):
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
def test_streams_end_together(
    lengths: list[int], batch_size: int, steps: int, shuffle: bool
) -> None:
    pieces = [max(1, -(-length // steps)) for length in lengths]
    chunks = TBPTTSampler(numbered(lengths), batch_size, steps, shuffle=shuffle)
    # The bound of Graham (1966) for list scheduling.
    assert (
        len(chunks)
        <= sum(pieces) / batch_size + (1 - 1 / batch_size) * max(pieces, default=0) + 1e-9
    )
    last_busy = [0] * batch_size
    for number, chunk in enumerate(chunks):
        for row in (chunk.sequences >= 0).nonzero().flatten().tolist():
            assert last_busy[row] == number  # a stream rests only once it has no more
            last_busy[row] += 1
    if lengths:
        assert max(last_busy) - min(last_busy) <= max(pieces)


@given(any_lengths(12), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_ranks_share_the_streams(
    lengths: list[int], batch_size: int, steps: int, ranks: int
) -> None:
    whole = list(TBPTTSampler(numbered(lengths), batch_size, steps, seed=2))
    shares = [
        list(
            TBPTTSampler(
                numbered(lengths), batch_size, steps, seed=2, num_replicas=ranks, rank=rank
            )
        )
        for rank in range(ranks)
    ]
    assert {len(share) for share in shares} == {len(whole)}
    for place, chunk in enumerate(whole):
        for row in range(batch_size):
            mine, own = shares[row % ranks][place], row // ranks
            assert mine.inputs[own].tolist() == chunk.inputs[row].tolist()
            assert [int(part[own]) for part in (mine.sequences, mine.begins, mine.ends)] == [
                int(part[row]) for part in (chunk.sequences, chunk.begins, chunk.ends)
            ]


def test_targets_of_sequences_come_when_these_end(device: torch.device) -> None:
    targets = torch.randn(len(LENGTHS), 2)
    found: dict[int, Tensor] = {}
    for chunk in TBPTTSampler(random_batch(LENGTHS), 3, 4, targets=targets):
        assert isinstance(chunk.targets, Tensor)
        ending = chunk.sequences[chunk.ends].tolist()
        assert chunk.targets.shape == (len(ending), 2)
        assert chunk.targets.device.type == device.type
        assert not set(ending) & set(found)
        found |= dict(zip(ending, chunk.targets, strict=True))
    assert torch.equal(torch.stack([found[number] for number in range(len(LENGTHS))]), targets)


def test_without_shuffle_each_stream_begins_with_its_longest() -> None:
    chunks = TBPTTSampler(numbered([3, 9, 4, 9, 0]), 2, 4, shuffle=False)
    for _ in range(2):  # and every epoch is the same
        assert [chunk.sequences.tolist() for chunk in chunks] == [[1, 3]] * 3 + [[2, 0], [4, -1]]
    assert [chunk.ends.tolist() for chunk in chunks] == [[False] * 2] * 2 + [[True] * 2] * 2 + [
        [True, False]
    ]


@pytest.mark.parametrize(
    "lengths",
    [[10] * 40, [number % 5 for number in range(40)], [2 * number for number in range(20)]],
)
def test_epochs_and_seeds_have_orders_of_their_own(lengths: list[int]) -> None:
    def order(seed: int, epoch: int) -> tuple[int, ...]:
        chunks = TBPTTSampler(numbered(lengths), 4, 3, seed=seed)
        chunks.set_epoch(epoch)
        return tuple(
            number for chunk in chunks for number in chunk.sequences[chunk.begins].tolist()
        )

    orders = {(seed, epoch): order(seed, epoch) for seed in (0, 1) for epoch in range(3)}
    assert len(set(orders.values())) == 6
    assert all(order(*key) == found for key, found in orders.items())
    assert all(sorted(found) == list(range(len(lengths))) for found in orders.values())


@given(any_lengths(12), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.data())
def test_resuming_gives_exactly_the_chunks_that_remain(
    lengths: list[int], batch_size: int, steps: int, shuffle: bool, data: st.DataObject
) -> None:
    def make() -> TBPTTSampler:
        chunks = TBPTTSampler(numbered(lengths), batch_size, steps, shuffle=shuffle)
        chunks.set_epoch(3)
        return chunks

    whole = make()
    everything = list(map(as_lists, whole))
    done = data.draw(st.integers(0, len(everything)))
    stopped = make()
    iterator = iter(stopped)
    assert [as_lists(next(iterator)) for _ in range(done)] == everything[:done]
    state = json.loads(json.dumps(stopped.state_dict()))
    resumed = TBPTTSampler(numbered(lengths), batch_size, steps, shuffle=shuffle)
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    if done < len(everything):
        assert list(map(as_lists, resumed)) == everything[done:]
    assert list(map(as_lists, resumed)) == list(map(as_lists, whole))  # the next epoch


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
    dataset = of_tensors(inputs.values, inputs.offsets, marks, per_element=per_element)
    yield dataset, {}
    yield [dataset[row] for row in range(len(dataset))], {}


@pytest.mark.parametrize("per_element", [False, True])
def test_all_kinds_of_data_are_the_same(per_element: bool) -> None:
    torch.manual_seed(0)
    found = []
    for data, arguments in kinds_of_data(per_element):
        torch.manual_seed(0)
        found.append([as_lists(chunk) for chunk in list(TBPTTSampler(data, 3, 4, **arguments))])
    assert all(lists == found[0] for lists in found)
    assert len(found) == 7


@pytest.mark.parametrize("data", [numbered([4]), [torch.ones(4)], [{"inputs": torch.ones(4)}]])
def test_data_without_targets(data: Any) -> None:
    assert [chunk.targets for chunk in TBPTTSampler(data, 1, 3)] == [None, None]


def test_inputs_that_want_gradients_get_them() -> None:
    values = torch.randn(sum(LENGTHS), 2, requires_grad=True)
    data = rl.Ragged.from_flat(values, lengths=LENGTHS)
    total = torch.stack(
        [chunk.inputs.values.pow(2).sum() for chunk in TBPTTSampler(data, 3, 4)]
    ).sum()
    (gradient,) = torch.autograd.grad(total, values)
    torch.testing.assert_close(gradient, 2 * values.detach())


@pytest.mark.parametrize(
    ("data", "arguments", "error", "words"),
    [
        (numbered([1]), {"steps": 0}, ArgumentError, "steps must be .*got 0"),
        (numbered([1]), {"steps": 1.0}, ArgumentTypeError, "steps must be .*got 1.0"),
        (numbered([1]), {"batch_size": 0}, ArgumentError, "batch_size must be .*got 0"),
        (numbered([1]), {"num_replicas": 2, "rank": 2}, ArgumentError, "rank must be .*got 2"),
        (torch.ones(3, 2), {}, ArgumentTypeError, "a list of samples"),
        ([1.0, 2.0], {}, ArgumentTypeError, "data must be .*got samples of type float"),
        ([(torch.ones(2), "label")], {}, ArgumentTypeError, "targets must be .*got a list"),
        (
            numbered([1, 2]),
            {"targets": torch.ones(3)},
            ShapeError,
            r"\(2, \*features\).*, got shape \(3,\)",
        ),
        (
            numbered([1, 2]),
            {"targets": numbered([2, 1])},
            ShapeError,
            "got a Ragged of other lengths",
        ),
        (
            [(torch.ones(2), 1)],
            {"targets": torch.ones(1)},
            ArgumentError,
            "targets must be .*Leave one of them out",
        ),
    ],
)
def test_bad_arguments(
    data: Any, arguments: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        TBPTTSampler(data, **({"batch_size": 2, "steps": 3} | arguments))


@pytest.mark.parametrize(
    ("lengths", "arguments", "words"),
    [
        ([1, 2, 4], {}, "TBPTTSampler, which has elements = 7, got elements = 6"),
        ([1, 2, 3], {"batch_size": 3}, "batch_size"),
    ],
)
def test_a_state_of_another_sampler_is_refused(
    lengths: list[int], arguments: dict[str, int], words: str
) -> None:
    known: dict[str, Any] = {"batch_size": 2, "steps": 3}
    state = TBPTTSampler(numbered([1, 2, 3]), **known).state_dict()
    with pytest.raises(ArgumentError, match=words):
        TBPTTSampler(numbered(lengths), **(known | arguments)).load_state_dict(state)
