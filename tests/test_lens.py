"""Immutable updates of nested values: what a path reaches, what is shared, and what its mistakes
are called.
"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.lens import modify
from raglane.ragged import Ragged


@dataclass(frozen=True)
class Street:
    name: str
    number: int = 1


@dataclass(frozen=True)
class Address:
    street: Street | None
    city: str = "Ulm"


@dataclass
class Person:
    addresses: list[Address]
    age: int = 30


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(frozen=True)
class Holder:
    held: Any


@pytest.fixture
def person() -> Person:
    return Person(
        [Address(Street("Mill Lane")), Address(None), Address(Street("High Street"), "Bonn")]
    )


def add_one(value: Any) -> Any:
    return value + 1


@pytest.mark.parametrize(
    ("value", "path", "expected"),
    [
        (1, lambda p: p, 2),
        (None, lambda p: p.each, None),
        (None, lambda p: p.each.name.each[3], None),
        ([], lambda p: p.each.anything, []),
        ({}, lambda p: p.each.anything, {}),
        ([1, 2, 3], lambda p: p[0], [2, 2, 3]),
        ([1, 2, 3], lambda p: p[-1], [1, 2, 4]),
        (Pair(1, 2), lambda p: p.right, Pair(1, 3)),
        (Pair(1, 2), lambda p: p["right"], Pair(1, 3)),
        (Street("a"), lambda p: p["number"], Street("a", 2)),
        ({"a b": 1}, lambda p: p["a b"], {"a b": 2}),
        ({-1: 1}, lambda p: p[-1], {-1: 2}),
        ({None: 1}, lambda p: p[None], {None: 2}),
        ({(1, 2): 1}, lambda p: p[1, 2], {(1, 2): 2}),
        ({"each": 1, "apply": 1}, lambda p: p["each"], {"each": 2, "apply": 1}),
        ({"__a": 1}, lambda p: p["__a"], {"__a": 2}),
        (
            {"values": 1, "keys": 1, "_steps": 1},
            lambda p: p.keys,
            {"values": 1, "keys": 2, "_steps": 1},
        ),
        ({"a": [Pair({"b": 1}, None)]}, lambda p: p.a.each.left.b, {"a": [Pair({"b": 2}, None)]}),
        ([{"b": None}, {"b": [1]}], lambda p: p.each.b.each, [{"b": None}, {"b": [2]}]),
        (MappingProxyType({"a": 1, "b": 2}), lambda p: p.b, MappingProxyType({"a": 1, "b": 3})),
    ],
)
def test_where_a_path_leads(value: Any, path: Callable[[Any], Any], expected: Any) -> None:
    before = copy.deepcopy(value) if not isinstance(value, MappingProxyType) else value
    found = path(modify(value)).apply(add_one)
    assert found == expected
    assert type(found) is type(expected)
    assert value == before


def test_a_subclass_stays_what_it_is() -> None:
    class Listing(list[int]):
        name = ""

    listing = Listing([1, 2])
    listing.name = "mine"
    changed = modify(listing).each.apply(add_one)
    assert type(changed) is Listing
    assert (changed, changed.name) == ([2, 3], "mine")

    counts = defaultdict(list, {"a": [1]})
    grown = modify(counts).a.each.apply(add_one)
    assert type(grown) is defaultdict
    assert (grown, grown.default_factory) == ({"a": [2]}, list)
    with pytest.raises(ArgumentError):
        modify(counts).b.apply(add_one)
    assert counts == {"a": [1]}

    ordered = OrderedDict([("b", 1), ("a", 2)])
    ordered.move_to_end("b")
    assert list(modify(ordered).b.apply(add_one).items()) == [("a", 2), ("b", 2)]
    assert isinstance(modify(ordered).b.apply(add_one), OrderedDict)

    class Checked(Pair):
        def __new__(cls, both: int) -> Checked:
            return super().__new__(cls, both, both)

    class Batched(Ragged):
        pass

    same: list[Any] = [
        (UserDict({0: 4}), {0: 5}),
        (torch.Size([4, 3]), (5, 3)),
        (Checked(4), (5, 4)),
    ]
    for value, wanted in (*same, (Batched([[4], [2]]), None)):
        found = modify(value)[0].apply(add_one)
        assert type(found) is type(value)
        assert wanted is None or found == wanted


def test_a_part_that_stays_is_shared_and_so_is_all_around_it(person: Person) -> None:
    batch: dict[str, Any] = {
        "person": person,
        "inputs": Ragged([[1, 2], [3]]),
        "pair": Pair([1000], (None,)),
    }

    def same(value: Any) -> Any:
        return value

    paths: list[Callable[[Any], Any]] = [
        lambda p: p,
        lambda p: p.each,
        lambda p: p.person.addresses.each.street.each.name,
        lambda p: p.inputs.each,
        lambda p: p.inputs.values,
        lambda p: p.inputs[-1],
        lambda p: p.pair.each.each,
    ]
    for path in paths:
        assert path(modify(batch)).apply(same) is batch
    changed = modify(batch).person.addresses.each.apply(
        lambda address: Address(None) if address.street else address
    )
    assert changed["person"].addresses[1] is person.addresses[1]
    assert changed["inputs"] is batch["inputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    sides: tuple[int, int]
    area: int = field(init=False)

    def __post_init__(self) -> None:
        if min(self.sides) < 0:
            raise ValueError("a side below 0")
        object.__setattr__(self, "area", self.sides[0] * self.sides[1])


def test_a_dataclass_is_made_anew_with_what_follows_from_its_fields() -> None:
    box = modify(Box(sides=(2, 3))).sides[0].apply(add_one)
    assert (box.sides, box.area) == ((3, 3), 9)
    with pytest.raises(ValueError, match="a side below 0"):
        modify(Box(sides=(2, 3))).sides.each.apply(lambda side: -side)
    with pytest.raises(
        ArgumentError, match=r"one of the fields 'sides', not 'area' with init=False"
    ):
        modify(Box(sides=(2, 3))).area.apply(add_one)


@dataclass
class Batch:
    parts: dict[str, Any]


def test_the_sequences_of_a_ragged_batch_nested_deep() -> None:
    batch = Batch(
        {
            "inputs": [Ragged([torch.arange(4), torch.arange(0), torch.arange(2)])],
            "label": torch.tensor(1),
        }
    )
    changed = modify(batch).parts.inputs.each.each.apply(lambda sequence: sequence[1:] * 10)
    assert [sequence.tolist() for sequence in changed.parts["inputs"][0]] == [
        [10, 20, 30],
        [],
        [10],
    ]
    assert changed.parts["label"] is batch.parts["label"]
    assert [sequence.tolist() for sequence in batch.parts["inputs"][0]] == [
        [0, 1, 2, 3],
        [],
        [0, 1],
    ]


def test_one_sequence_and_the_values_of_a_ragged_batch() -> None:
    batch = Ragged([torch.arange(3), torch.arange(2)])
    assert modify(batch)[-1].apply(lambda sequence: sequence[:1]).lengths.tolist() == [3, 1]
    doubled = modify(batch).values.apply(lambda values: values * 2)
    assert doubled.values.tolist() == [0, 2, 4, 0, 2]
    assert doubled.offsets is batch.offsets
    assert modify(Ragged([])).each.apply(add_one).values.shape == (0,)
    values = torch.arange(5.0, requires_grad=True)
    batch = Ragged.from_flat(values, lengths=[2, 0, 3])
    changed = modify({"x": batch}).x.each.apply(lambda sequence: sequence.flip(0) * len(sequence))
    (grad,) = torch.autograd.grad((changed["x"].values * torch.arange(5.0)).sum(), values)
    assert grad.tolist() == [2.0, 0.0, 12.0, 9.0, 6.0]


@pytest.mark.parametrize(
    ("path", "function", "kind", "said"),
    [
        (lambda p: p.each, len, ArgumentTypeError, r"type int for \[0\]"),
        (lambda p: p.values, list, ArgumentTypeError, r"type list for \.values"),
        (lambda p: p.values, lambda values: values[1:], ShapeError, "one row for each"),
        (
            lambda p: p[1],
            lambda sequence: sequence.unsqueeze(1),
            ShapeError,
            "like the other sequences",
        ),
    ],
)
def test_values_that_cannot_be_ragged_batches(
    path: Callable[[Any], Any], function: Callable[[Any], Any], kind: type[RaglaneError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        path(modify(Ragged([[1, 2], [3]]))).apply(function)


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        (
            lambda p: p.person.addresses.each.stret,
            ArgumentError,
            "'city', got Address at ... addresses[0]. Write .str",
        ),
        (
            lambda p: p.person.addresses.each.street.name,
            ArgumentTypeError,
            "name must be a ... before it if it may be",
        ),
        (
            lambda p: p.kind.name,
            ArgumentTypeError,
            "kind.name must be a path ... got type at .kind. End the path",
        ),
        (
            lambda p: p["7"],
            ArgumentError,
            "['7'] must be one of the keys ... got dict at the start. Choose one",
        ),
        (
            lambda p: p.persn,
            ArgumentError,
            "keys 'person', 'rows', 'inputs', 'pair', 7, ... got dict at the start. W",
        ),
        (
            lambda p: p.person.addresses[3],
            ArgumentError,
            "an index of its 3 items, from -3 to 2, ... Choose one, or",
        ),
        (
            lambda p: p.none.a,
            ArgumentError,
            "none.a must be a path into a mapping with keys, got dict at .none.",
        ),
        (
            lambda p: p.person.addresses[0:2],
            ArgumentError,
            "[slice(0, 2, None)] must be an index of its 3 items, from",
        ),
        (
            lambda p: p.rows.each[0],
            ArgumentError,
            "must be a path into a sequence with items, got list at .rows[1]",
        ),
        (lambda p: p[7].name, ArgumentTypeError, "got str at [7]"),
        (lambda p: p[[7]], ArgumentError, "modify(<dict>)[[7]] must be one of the keys "),
        (
            lambda p: p.pair.lef,
            ArgumentError,
            "one of the names 'left', 'right', got Pair at .pair. Write .left.",
        ),
        (
            lambda p: p.inputs[2],
            ArgumentError,
            "of its 2 sequences, from -2 to 1, or one of the names 'values', got ",
        ),
        (lambda p: p.inputs.each.values, ArgumentTypeError, "got Tensor at .inputs[0]"),
        (
            lambda p: p.person["each"],
            ArgumentError,
            "be one of the fields 'addresses', 'age', got Person at .person",
        ),
        (
            lambda p: p.person[0],
            ArgumentError,
            "fields 'addresses', 'age', got Person at .person. Choose one of them.",
        ),
    ],
)
def test_a_wrong_path_says_which_part_does_not_exist(
    person: Person, path: Callable[[Any], Any], kind: type[RaglaneError], said: str
) -> None:
    value: Any = {
        "person": person,
        "rows": [[1], []],
        "inputs": Ragged([[1, 2], [3]]),
        "pair": Pair(1, 2),
    }
    value |= {7: "seven", "kind": Street, "none": {}}
    with pytest.raises(kind) as raised:
        path(modify(value)).apply(lambda part: part)
    assert all(piece in str(raised.value) for piece in said.split("... "))


def test_other_mistakes() -> None:
    for count, rest in ((100, " and 88 more"), (12, "")):
        with pytest.raises(
            ArgumentError, match=rf"'key11'{rest}, got dict at the start\. Write \.key5\."
        ):
            modify({f"key{number}": 0 for number in range(count)}).kay5.apply(add_one)
    with pytest.raises(ArgumentTypeError, match=r"function must be .*got int"):
        modify([1]).each.apply(3)  # type: ignore[arg-type]


def test_a_path_can_be_kept_and_goes_on_from_where_it_is(person: Person) -> None:
    addresses = modify(person).addresses
    names = addresses.each.street.each.name
    assert [address.city for address in addresses.each.city.apply(str.lower).addresses] == [
        "ulm",
        "ulm",
        "bonn",
    ]
    assert names.apply(str.upper) == names.apply(str.upper) != person
    assert repr(names) == "modify(<Person>).addresses.each.street.each.name"
    assert (
        repr(modify({})["a b"][-1]["each"]["class"].a_["__a"])
        == "modify(<dict>)['a b'][-1]['each']['class'].a_['__a']"
    )


def test_a_path_is_no_container_and_nothing_is_set_by_it(person: Person) -> None:
    path = modify(person)
    with pytest.raises(TypeError):
        iter(path)
    with pytest.raises(AttributeError):
        path.age = 3  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match=r"write \['__len__'\]"):
        _ = path.__len__
    assert not hasattr(path, "__array__")
    for again in (copy.copy(path.addresses.each), pickle.loads(pickle.dumps(path.addresses.each))):
        assert again.city.apply(str.upper) == path.addresses.each.city.apply(str.upper)


def structures() -> st.SearchStrategy[Any]:
    """Nested lists, tuples, named tuples, dicts and dataclasses, with numbers and None at their
    ends.
    """
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
    """Walk down to any part: there stands the new one, and beside the way everything is the same
    object.
    """
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
