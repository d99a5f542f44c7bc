"""Paths through structures of any depth against the obvious rewriting."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raglane.lens import modify


class Pair(NamedTuple):
    left: Any
    right: Any


def structures() -> st.SearchStrategy[Any]:
    """Nested lists, tuples, named tuples, dicts and dataclasses, with numbers and None at their ends."""
    return st.recursive(
        st.one_of(st.none(), st.integers(-5, 5)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.builds(Holder, inner),
        ),
        max_leaves=12,
    )


@dataclass(frozen=True)
class Holder:
    held: Any


def every(value: Any, depth: int) -> Any:
    """The obvious rewriting that ``depth`` times ``each`` stands for, of a deep copy."""
    if depth == 0:
        return rewritten(value)
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: every(part, depth - 1) for key, part in value.items()}
    if isinstance(value, Pair):
        return Pair(every(value.left, depth - 1), every(value.right, depth - 1))
    if isinstance(value, list | tuple):
        return type(value)(every(part, depth - 1) for part in value)
    return every(value, depth - 1)


def rewritten(value: Any) -> Any:
    return value + 100 if isinstance(value, int) else [value]


@given(value=structures(), depth=st.integers(0, 4))
def test_each_equals_the_obvious_rewriting(value: Any, depth: int) -> None:
    before = copy.deepcopy(value)
    path = modify(value)
    for _ in range(depth):
        path = path.each
    assert path.apply(rewritten) == every(copy.deepcopy(value), depth)
    assert value == before
    assert path.apply(lambda part: part) is value


@given(value=structures(), data=st.data())
def test_one_part_changes_and_nothing_else(value: Any, data: st.DataObject) -> None:
    """Walk down to any part: there stands the new one, and beside the way everything is the same object."""
    path, here, way = modify(value), value, []
    while parts := steps_of(here):
        step = data.draw(st.sampled_from([None, *parts]))
        if step is None:
            break
        way.append(step)
        path, here = path[step], part_of(here, step)
    new = object()
    changed = path.apply(lambda part: new if part is here else pytest.fail("another part"))
    for step in way:
        assert type(changed) is type(value)
        assert steps_of(changed) == steps_of(value)
        for other in steps_of(value):
            if other != step:
                assert part_of(changed, other) is part_of(value, other)
        changed, value = part_of(changed, step), part_of(value, step)
    assert changed is new


def steps_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value)
    if dataclasses.is_dataclass(value):
        return ["held"]
    return list(range(len(value))) if isinstance(value, list | tuple) else []


def part_of(value: Any, step: Any) -> Any:
    return getattr(value, step) if isinstance(value, Holder) else value[step]
