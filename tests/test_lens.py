"""Immutable updates of nested values: what a path reaches, what is shared, and what its mistakes are called."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

from looped import looped
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


@pytest.fixture
def person() -> Person:
    return Person([Address(Street("Mill Lane")), Address(None), Address(Street("High Street"), "Bonn")])


def test_the_example_of_every_name_under_every_address(person: Person) -> None:
    before = copy.deepcopy(person)
    changed = modify(person).addresses.each.street.each.name.apply(str.upper)
    assert changed == Person(
        [Address(Street("MILL LANE")), Address(None), Address(Street("HIGH STREET"), "Bonn")],
    )
    assert person == before
    assert changed.addresses[1] is person.addresses[1]
    assert changed.addresses[0].city is person.addresses[0].city


def add_one(value: Any) -> Any:
    return value + 1


@looped(
    ("value", "path", "expected"),
    [
        (1, lambda p: p, 2),
        ([1, 2], lambda p: p.each, [2, 3]),
        ((1, 2), lambda p: p.each, (2, 3)),
        (Pair(1, 2), lambda p: p.each, Pair(2, 3)),
        ({"a": 1, "b": 2}, lambda p: p.each, {"a": 2, "b": 3}),
        (None, lambda p: p.each, None),
        (None, lambda p: p.each.name.each[3], None),
        (1, lambda p: p.each, 2),
        (1, lambda p: p.each.each, 2),
        (Street("a"), lambda p: p.each.number, Street("a", 2)),
        ([], lambda p: p.each.anything, []),
        ((), lambda p: p.each, ()),
        ({}, lambda p: p.each.anything, {}),
        ([[1], [], [2, 3]], lambda p: p.each.each, [[2], [], [3, 4]]),
        ([1, 2, 3], lambda p: p[0], [2, 2, 3]),
        ([1, 2, 3], lambda p: p[-1], [1, 2, 4]),
        ((1, 2, 3), lambda p: p[-3], (2, 2, 3)),
        (Pair(1, 2), lambda p: p.right, Pair(1, 3)),
        (Pair(1, 2), lambda p: p["right"], Pair(1, 3)),
        (Pair(1, 2), lambda p: p[-1], Pair(1, 3)),
        (Street("a"), lambda p: p["number"], Street("a", 2)),
        ({"a": 1}, lambda p: p.a, {"a": 2}),
        ({"a b": 1}, lambda p: p["a b"], {"a b": 2}),
        ({0: 1, 1: 1}, lambda p: p[1], {0: 1, 1: 2}),
        ({-1: 1}, lambda p: p[-1], {-1: 2}),
        ({None: 1}, lambda p: p[None], {None: 2}),
        ({(1, 2): 1}, lambda p: p[1, 2], {(1, 2): 2}),
        ({"each": 1, "apply": 1}, lambda p: p["each"], {"each": 2, "apply": 1}),
        ({"each": 1, "apply": 1}, lambda p: p["apply"], {"each": 1, "apply": 2}),
        ({"__a": 1}, lambda p: p["__a"], {"__a": 2}),
        ({"values": 1, "keys": 1, "_steps": 1}, lambda p: p.keys, {"values": 1, "keys": 2, "_steps": 1}),
        ({"values": 1, "keys": 1, "_steps": 1}, lambda p: p._steps, {"values": 1, "keys": 1, "_steps": 2}),
        ({"a": [Pair({"b": 1}, None)]}, lambda p: p.a.each.left.b, {"a": [Pair({"b": 2}, None)]}),
        ({"a": [Pair({"b": 1}, None)]}, lambda p: p.a.each.right.each.b, {"a": [Pair({"b": 1}, None)]}),
        ([{"b": None}, {"b": [1]}], lambda p: p.each.b.each, [{"b": None}, {"b": [2]}]),
        (Pair([1], (2,)), lambda p: p.each.each, Pair([2], (3,))),
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
    assert grown.default_factory is list
    assert grown == {"a": [2]}

    ordered = OrderedDict([("b", 1), ("a", 2)])
    ordered.move_to_end("b")
    assert list(modify(ordered).b.apply(add_one).items()) == [("a", 2), ("b", 2)]
    assert isinstance(modify(ordered).b.apply(add_one), OrderedDict)

    user = modify(UserDict({"a": 1})).a.apply(add_one)
    assert type(user) is UserDict
    assert user == {"a": 2}

    size = modify(torch.Size([2, 3]))[0].apply(add_one)
    assert type(size) is torch.Size
    assert size == (3, 3)

    class Checked(Pair):
        def __new__(cls, both: int) -> Checked:
            return super().__new__(cls, both, both)

    checked = modify(Checked(4)).left.apply(add_one)
    assert type(checked) is Checked
    assert checked == (5, 4)


def test_a_missing_key_is_not_put_into_a_defaultdict() -> None:
    counts: defaultdict[str, int] = defaultdict(int)
    with pytest.raises(ArgumentError):
        modify(counts).a.apply(add_one)
    assert not counts


def test_what_is_not_touched_is_shared() -> None:
    first, second, third = {"x": 1}, {"x": 2}, {"x": 3}
    value: dict[str, Any] = {"rows": [first, second, third], "other": [object()]}
    changed = modify(value)["rows"][1].x.apply(add_one)
    assert changed == {"rows": [{"x": 1}, {"x": 3}, {"x": 3}], "other": value["other"]}
    assert changed["rows"][0] is first
    assert changed["rows"][2] is third
    assert changed["other"] is value["other"]
    assert second == {"x": 2}


def test_a_part_that_stays_is_shared_and_so_is_all_around_it(person: Person) -> None:
    batch: dict[str, Any] = {"person": person, "inputs": Ragged([[1, 2], [3]]), "pair": Pair([1000], (None,))}

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
    changed = modify(batch).person.addresses.each.apply(lambda address: Address(None) if address.street else address)
    assert changed["person"].addresses[1] is person.addresses[1]
    assert changed["inputs"] is batch["inputs"]


def test_the_function_sees_the_parts_in_order_and_each_once() -> None:
    seen: list[Any] = []
    modify({"b": [1, 2], "a": (3,)}).each.each.apply(seen.append)
    assert seen == [1, 2, 3]


# -- dataclasses ----------------------------------------------------------------------------------------------------


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


def test_a_field_that_follows_from_others_is_no_step() -> None:
    with pytest.raises(ArgumentError, match=r"one of the fields 'sides', not 'area' with init=False"):
        modify(Box(sides=(2, 3))).area.apply(add_one)


# -- Ragged ---------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    parts: dict[str, Any]


def test_the_sequences_of_a_ragged_batch_nested_deep() -> None:
    batch = Batch({"inputs": [Ragged([torch.arange(4), torch.arange(0), torch.arange(2)])], "label": torch.tensor(1)})
    changed = modify(batch).parts.inputs.each.each.apply(lambda sequence: sequence[1:] * 10)
    assert [sequence.tolist() for sequence in changed.parts["inputs"][0]] == [[10, 20, 30], [], [10]]
    assert changed.parts["label"] is batch.parts["label"]
    assert [sequence.tolist() for sequence in batch.parts["inputs"][0]] == [[0, 1, 2, 3], [], [0, 1]]


def test_one_sequence_and_the_values_of_a_ragged_batch() -> None:
    batch = Ragged([torch.arange(3), torch.arange(2)])
    assert modify(batch)[-1].apply(lambda sequence: sequence[:1]).lengths.tolist() == [3, 1]
    doubled = modify(batch).values.apply(lambda values: values * 2)
    assert doubled.values.tolist() == [0, 2, 4, 0, 2]
    assert doubled.offsets is batch.offsets
    assert modify(Ragged([])).each.apply(add_one).values.shape == (0,)


def test_gradients_flow_through_a_ragged_batch() -> None:
    values = torch.arange(5.0, requires_grad=True)
    batch = Ragged.from_flat(values, lengths=[2, 0, 3])
    changed = modify({"x": batch}).x.each.apply(lambda sequence: sequence.flip(0) * len(sequence))
    (grad,) = torch.autograd.grad((changed["x"].values * torch.arange(5.0)).sum(), values)
    assert grad.tolist() == [2.0, 0.0, 12.0, 9.0, 6.0]


@looped(
    ("path", "function", "kind", "said"),
    [
        (lambda p: p.each, len, ArgumentTypeError, r"type int for \[0\]"),
        (lambda p: p.values, list, ArgumentTypeError, r"type list for \.values"),
        (lambda p: p.values, lambda values: values[1:], ShapeError, "one row for each"),
        (lambda p: p[1], lambda sequence: sequence.unsqueeze(1), ShapeError, "like the other sequences"),
    ],
)
def test_what_cannot_be_a_ragged_batch(
    path: Callable[[Any], Any], function: Callable[[Any], Any], kind: type[RaglaneError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        path(modify(Ragged([[1, 2], [3]]))).apply(function)


# -- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        (
            lambda p: p.person.addresses.each.stret.each.name,
            ArgumentError,
            "modify(<dict>).person.addresses.each.stret must be one of the fields 'street', 'city'"
            ", got Address at .person.addresses[0]. Write .street.",
        ),
        (
            lambda p: p.person.addresses.each.street.name,
            ArgumentTypeError,
            "modify(<dict>).person.addresses.each.street.name must be "
            "a path through dataclasses, named tuples, dicts, lists, tuples and Ragged batches, "
            "got NoneType at .person.addresses[1].street. Write .each before it if it may be None.",
        ),
        (
            lambda p: p.persn,
            ArgumentError,
            "modify(<dict>).persn must be one of the keys 'person', 'rows', 'inputs', 'pair', 7"
            ", got dict at the start. Write .person.",
        ),
        (
            lambda p: p.person.addresses[3],
            ArgumentError,
            "modify(<dict>).person.addresses[3] must be an index of its 3 items, from -3 to 2"
            ", got list at .person.addresses. Choose one, or write .each for all of them.",
        ),
        (lambda p: p.person.addresses.street, ArgumentError, "an index of its 3 items, from -3 to 2"),
        (
            lambda p: p.person.addresses[0:2],
            ArgumentError,
            "addresses[slice(0, 2, None)] must be an index of its 3 items, from -3 to 2, got list",
        ),
        (
            lambda p: p.rows.each[0],
            ArgumentError,
            "modify(<dict>).rows.each[0] must be a path into a sequence with items, got list at .rows[1]",
        ),
        (lambda p: p[7].name, ArgumentTypeError, "got str at [7]"),
        (lambda p: p[[7]], ArgumentError, "modify(<dict>)[[7]] must be one of the keys "),
        (
            lambda p: p.pair.lef,
            ArgumentError,
            "from -2 to 1, or one of the names 'left', 'right', got Pair at .pair. Write .left.",
        ),
        (
            lambda p: p.inputs[2],
            ArgumentError,
            "an index of its 2 sequences, from -2 to 1, or one of the names 'values', got ",
        ),
        (lambda p: p.inputs.value, ArgumentError, "Write .values."),
        (lambda p: p.inputs.each.values, ArgumentTypeError, "got Tensor at .inputs[0]"),
        (
            lambda p: p.person["each"],
            ArgumentError,
            "must be one of the fields 'addresses', 'age', got Person at .person",
        ),
        (
            lambda p: p.person[0],
            ArgumentError,
            "one of the fields 'addresses', 'age', got Person at .person. Choose one of them.",
        ),
    ],
)
def test_a_wrong_path_says_which_part_does_not_exist(
    person: Person, path: Callable[[Any], Any], kind: type[RaglaneError], said: str
) -> None:
    value = {"person": person, "rows": [[1], []], "inputs": Ragged([[1, 2], [3]]), "pair": Pair(1, 2), 7: "seven"}
    with pytest.raises(kind) as raised:
        path(modify(value)).apply(lambda part: part)
    assert said in str(raised.value)


def test_many_names_are_not_all_told() -> None:
    with pytest.raises(ArgumentError, match=r"'key11' and 88 more\. Write \.key55\."):
        modify({f"key{number}": 0 for number in range(100)}).kay55.apply(add_one)


def test_apply_needs_a_function() -> None:
    with pytest.raises(ArgumentTypeError, match=r"function must be .*got int"):
        modify([1]).each.apply(3)  # type: ignore[arg-type]


def test_an_error_of_the_function_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        modify([1, 0]).each.apply(lambda number: 1 / number)


# -- paths ----------------------------------------------------------------------------------------------------------


def test_a_path_can_be_kept_and_goes_on_from_where_it_is(person: Person) -> None:
    addresses = modify(person).addresses
    names = addresses.each.street.each.name
    assert [address.city for address in addresses.each.city.apply(str.lower).addresses] == ["ulm", "ulm", "bonn"]
    assert names.apply(str.upper) == names.apply(str.upper) != person
    assert repr(names) == "modify(<Person>).addresses.each.street.each.name"
    assert repr(modify({})["a b"][-1]["each"]["class"].class_) == "modify(<dict>)['a b'][-1]['each']['class'].class_"


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
