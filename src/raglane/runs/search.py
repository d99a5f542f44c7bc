"""What a search for good settings may choose from: a default for each task, and what a table of TOML says instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from raglane.errors import ArgumentError, message, nearest, quote
from raglane.runs.configuration import Entry, entry_in_toml, key_of
from raglane.training.settings import FORWARDS
from raglane.training.options import check, options
from raglane.training.settings import Settings
from raglane.training.stored import checked, rule_of


SEARCHED = (
    "layer hidden layers bidirectional layer_norm initial_state pooling dropout input_dropout state_dropout "
    "weight_dropout zoneout embedding_dropout embedding batch_size batch_elements lr optimizer weight_decay clip "
    "schedule warmup class_weights label_smoothing unknown_rate bucket"
).split()
"""The settings that a search may choose: those that change neither the data nor what is measured."""


@dataclass(frozen=True)
class Range:
    """Numbers between two, both included."""

    low: float
    high: float
    log: bool = False
    whole: bool = False


Space = dict[str, tuple[Any, ...] | Range]
"""What to choose from, by the names of settings: some values, or a range."""


def default_space(settings: Settings, fixed: Collection[str]) -> Space:
    """What is searched where nobody says otherwise."""
    space: Space = {
        "layer": ("gru", "lstm"),
        "hidden": (32, 64, 128, 256),
        "layers": (1, 2),
        "bidirectional": (False, True),
        "pooling": ("summary", "mean", "max", "attention"),
        "dropout": Range(0.0, 0.5),
        "batch_size": (16, 32, 64, 128),
        "lr": Range(3e-4, 3e-2, log=True),
    }
    reads_forwards = settings.task in FORWARDS or settings.steps is not None or settings.layer_norm
    unfit = {"bidirectional"} if reads_forwards else set()
    if settings.task != "classify":
        unfit.add("pooling")
    if settings.batch_elements is not None:
        unfit.add("batch_size")
    return {name: values for name, values in space.items() if name not in unfit and name not in fixed}


def read_space(table: Any, where: str) -> Space:
    """What a table of TOML says."""
    if not isinstance(table, dict):
        rule = "a table of options, each with a list or a range"
        raise ArgumentError(message(where, quote(table), rule, "write [search], and lr = {low = 1e-4, high = 1e-2}"))
    known, hints = {key_of(Settings, name): name for name in SEARCHED}, get_type_hints(Settings)
    space: Space = {}
    for key, said in table.items():
        name = known.get(str(key).replace("_", "-"))
        if name is None:
            near = nearest(str(key), known)
            fix = f"write {near}, perhaps" if near else f"choose among {', '.join(known)}"
            raise ArgumentError(message(where, f"the option {quote(key)}", "one that a search may choose", fix))
        space[name] = _values(said, hints[name], name, f"{key} in {where}")
    return space


def _values(said: Any, hint: Any, name: str, where: str) -> tuple[Any, ...] | Range:
    """The values of an option, each of which it can have."""
    rule, fix = "a list of values, or {low, high}", "write [1, 2], or {low = 1, high = 2}"
    if isinstance(said, list) and said:
        values = tuple(_value(one, hint, name, where) for one in said)
        if len(set(values)) < len(values):
            raise ArgumentError(message(where, quote(said), "values that differ", "leave the second of two out"))
        return values
    if not isinstance(said, dict) or not {"low", "high"} <= set(said) <= {"low", "high", "log"}:
        raise ArgumentError(message(where, quote(said), rule, fix))
    low, high = (_value(said[end], hint, name, where) for end in ("low", "high"))
    log = said.get("log", False)
    is_number = all(isinstance(end, int | float) and not isinstance(end, bool) for end in (low, high))
    if not is_number or not isinstance(log, bool) or low >= high or (log and low <= 0):
        rule = "two numbers, the lower first, and above 0 where log is true"
        raise ArgumentError(message(where, quote(said), rule, fix))
    return Range(low, high, log, whole=isinstance(low, int) and isinstance(high, int) and "float" not in str(hint))


def _value(value: Any, hint: Any, name: str, where: str) -> Any:
    """A value that the option can have."""
    try:
        found = checked(hint, value, name)
    except ValueError as error:
        raise ArgumentError(message(where, quote(value), rule_of(error), "correct it")) from error
    described = options(Settings)[name]
    try:
        check(_Alone(found, described))
    except ArgumentError as error:
        raise ArgumentError(f"{where}: {error}") from error
    return found


def _Alone(value: Any, described: Any) -> Any:  # noqa: N802
    """An object of a dataclass with this one option."""
    field = dataclasses.field(metadata={"option": described})
    return dataclasses.make_dataclass("_Alone", [("value", Any, field)])(value)


def as_table(space: Space, comments: Mapping[str, str]) -> str:
    r"""A space as the table that :func:`read_space` reads."""
    lines = ["[search]"]
    for name, values in space.items():
        said: Any = values
        if isinstance(values, Range):
            said = {"low": values.low, "high": values.high} | ({"log": True} if values.log else {})
        lines.append(entry_in_toml(Entry(key_of(Settings, name), said, comment=comments.get(name, ""))))
    return "\n".join(lines)


def as_config(space: Mapping[str, tuple[Any, ...] | Range]) -> dict[str, Any]:
    """A space as JSON holds it."""
    return {
        name: dataclasses.asdict(values) if isinstance(values, Range) else list(values)
        for name, values in sorted(space.items())
    }
