"""Schedules: each table against one built with loops, and their counts."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from raglane.errors import ArgumentError, ArgumentTypeError
from raglane.schedules import DEFAULT_LANES, SCHEDULES, Schedule, Table

LENGTHS = st.one_of(
    st.lists(st.integers(0, 12), max_size=12),
    st.lists(st.integers(0, 2), max_size=40),
    st.integers(0, 9).map(lambda length: [length] * 5),
    st.lists(st.integers(1, 4), min_size=1, max_size=20).map(lambda short: [*short, 60]),
)
LANES = st.one_of(st.none(), st.integers(1, 7))

# One entry per step of a sequence: the time, the row, the sequence, the step.
Entry = tuple[int, int, int, int]


def _tensor(lengths: list[int]) -> Tensor:
    return torch.tensor(lengths, dtype=torch.int64)


def _entries(table: Table) -> list[Entry]:
    bounds = table.time_offsets.tolist()
    times = [time for time in range(table.steps) for _ in range(bounds[time], bounds[time + 1])]
    columns = (table.row.tolist(), table.sequence.tolist(), table.step.tolist())
    return list(zip(times, *columns, strict=True))


def _longest_first(lengths: list[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda sequence: -lengths[sequence])


def _each(lengths: list[int], lanes: int | None) -> list[Entry]:
    pairs = [(sequence, step) for sequence, length in enumerate(lengths) for step in range(length)]
    return [(time, 0, *pair) for time, pair in enumerate(pairs)]


def _padded(lengths: list[int], lanes: int | None) -> list[Entry]:
    return [
        (step, sequence, sequence, step)
        for step in range(max(lengths, default=0))
        for sequence in range(len(lengths))
    ]


def _packed(lengths: list[int], lanes: int | None) -> list[Entry]:
    entries: list[Entry] = []
    for step in range(max(lengths, default=0)):
        running = [sequence for sequence in _longest_first(lengths) if lengths[sequence] > step]
        entries.extend((step, row, sequence, step) for row, sequence in enumerate(running))
    return entries


def _lanes(lengths: list[int], lanes: int | None) -> list[Entry]:
    """Time by time, row by row, as someone would do it by hand."""
    waiting = [sequence for sequence in _longest_first(lengths) if lengths[sequence]]
    running: list[tuple[int, int] | None] = [None] * (DEFAULT_LANES if lanes is None else lanes)
    entries: list[Entry] = []
    now = 0
    while True:
        for row, current in enumerate(running):
            if current is None and waiting:
                running[row] = (waiting.pop(0), 0)
        if not any(running):
            return entries
        for row, current in enumerate(running):
            if current is not None:
                sequence, step = current
                entries.append((now, row, sequence, step))
                running[row] = None if step + 1 == lengths[sequence] else (sequence, step + 1)
        now += 1


SLOW: dict[str, Any] = {
    "each": _each,
    "padded": _padded,
    "masked": _padded,
    "packed": _packed,
    "lanes": _lanes,
}


def test_every_schedule_has_a_slow_construction() -> None:
    assert list(SLOW) == list(SCHEDULES) == ["each", "padded", "masked", "packed", "lanes"]
    assert all(schedule.name == name for name, schedule in SCHEDULES.items())


@pytest.mark.parametrize("name", SCHEDULES)
@given(lengths=LENGTHS, lanes=LANES)
@example(lengths=[2] * (DEFAULT_LANES + 1), lanes=None)
def test_table_is_the_obvious_one_and_has_the_counts(
    name: str, lengths: list[int], lanes: int | None
) -> None:
    table = SCHEDULES[name].table(_tensor(lengths), lanes)
    entries = _entries(table)
    assert entries == SLOW[name](lengths, lanes)
    assert all(
        x.dtype is torch.int64 for x in (table.time_offsets, table.sequence, table.step, table.row)
    )
    count = SCHEDULES[name].count(_tensor(lengths), lanes)
    waste = [entry for entry in entries if entry[3] >= lengths[entry[2]]]
    assert (count.steps, count.elements, count.waste) == (table.steps, len(entries), len(waste))
    assert (table.elements, table.waste(_tensor(lengths))) == (len(entries), len(waste))
    assert count.sequences == len({sequence for _, _, sequence, _ in entries})
    for phases in (SCHEDULES[name].phases, partial(Schedule.phases, SCHEDULES[name])):
        rows, steps = phases(_tensor(lengths), lanes)
        assert rows.repeat_interleave(steps).tolist() == table.rows_per_step.tolist()
    assert table.rows_per_step.tolist() == [
        sum(time == entry[0] for entry in entries) for time in range(table.steps)
    ]


@given(
    lengths=st.lists(st.integers(0, 6), min_size=300, max_size=900),
    long=st.lists(st.integers(50, 500), max_size=5),
    lanes=st.integers(1, 20),
)
@example(lengths=[2] * 210 + [3, 1], long=[300, 90], lanes=3)
def test_lanes_hands_out_many_of_one_length_as_it_does_one_by_one(
    lengths: list[int], long: list[int], lanes: int
) -> None:
    # Runs of one length take another way through the code than single ones; the longest ones make
    # the rows uneven.
    lengths = lengths + long
    free = [0] * lanes
    starts: dict[int, Entry] = {}
    for sequence in _longest_first(lengths):
        if lengths[sequence]:
            row = free.index(min(free))
            starts[sequence] = (free[row], row, sequence, 0)
            free[row] += lengths[sequence]
    table = SCHEDULES["lanes"].table(_tensor(lengths), lanes)
    assert [entry for entry in _entries(table) if entry[3] == 0] == sorted(starts.values())
    assert table.steps == SCHEDULES["lanes"].count(_tensor(lengths), lanes).steps == max(free)


@pytest.mark.parametrize("method", ["table", "count"])
@pytest.mark.parametrize(
    ("lanes", "kind", "words"),
    [
        (
            0,
            ArgumentError,
            "lanes must be at least 1, got 0. Pass an int of at least 1, or None for 16",
        ),
        (-3, ArgumentError, "lanes must be .*got -3"),
        (2.0, ArgumentTypeError, r"lanes must be a whole number.*, got 2\.0"),
        (True, ArgumentTypeError, "lanes must be a whole number.*, got True"),
    ],
)
def test_wrong_lanes(method: str, lanes: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        getattr(SCHEDULES["lanes"], method)(_tensor([2, 1]), lanes)


@pytest.mark.parametrize("name", SCHEDULES)
def test_counting_is_instant_where_a_table_would_be_huge(name: str) -> None:
    # Padded, this table has a billion elements; it must not be built to be counted.
    lengths = torch.full((100_001,), 5)
    lengths[70_000] = 10_000
    begin = time.perf_counter()
    count = SCHEDULES[name].count(lengths)
    assert time.perf_counter() - begin < 1.0
    if name in ("padded", "masked"):
        assert (count.elements, count.waste) == (1_000_010_000, 999_500_000)
    else:
        assert (count.elements, count.waste) == (510_000, 0)
