"""One word per meaning: the arguments of all public functions, methods and settings are those of the
table on the style page.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import typing
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import raglane as rl
from raglane._utils.options import options
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.training.settings import Settings

DOCS = Path(__file__).parents[2] / "docs"
# They have the names of another library's functions, which they replace.
_FOREIGN = {"raglane.packing", "raglane.distributions"}
# scikit-learn's own words.
_SKLEARN = {"X", "y", "random_state"}
# The symbols of the equations of its source.
_SYMBOLS = {"raglane.nn.selective_scan": {"x"}}


def _table(title: str) -> list[list[str]]:
    """Return the rows of a table of the style page, the first below a heading."""
    _, _, part = (DOCS / "style.md").read_text().partition(f"\n{title}\n")
    lines = [line for line in part.partition("\n#")[0].splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _words(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


_ARGUMENTS = _table("## Arguments")
WORDS = {word for row in _ARGUMENTS for word in _words(row[0])}
REPLACED = {word: _words(row[0])[0] for row in _ARGUMENTS for word in _words(row[2])}
# The arguments of one function or class each, and the choices of arguments.
OWN = {_words(row[0])[0]: {*_words(row[1])} for row in _table("### Of one function")}
CHOICES = {_words(row[0])[0]: {*_words(row[1])} for row in _table("### Values")}


def _modules(module: ModuleType = rl) -> Iterator[ModuleType]:
    yield module
    for name in module.__all__:
        if isinstance(value := getattr(module, name), ModuleType):
            yield from _modules(value)


def _results() -> Iterator[tuple[str, Any]]:
    """Yield the classes that functions return."""
    text = (DOCS / "api" / "results.md").read_text()
    for name in re.findall(r"^\.\. autoclass:: ([\w.]+)$", text, flags=re.MULTILINE):
        module, _, last = name.rpartition(".")
        yield name, getattr(importlib.import_module(module), last)


def _callables() -> Iterator[tuple[str, str, Any]]:
    """Yield each function with its name and its owner: itself, its class, or all layers."""
    public = [
        (f"{module.__name__}.{name}", getattr(module, name))
        for module in _modules()
        for name in module.__all__
    ]
    public_names = dict(public)
    for name, value in [*public, *_results()]:
        if isinstance(value, ModuleType) or not callable(value):
            continue
        owner = name
        if inspect.isclass(value) and issubclass(value, RecurrentLayer):
            owner = "layers"
        elif name.startswith("raglane.errors."):
            owner = "errors"
        if name in public_names:  # results are not created by users
            yield name, owner, value
        if inspect.isclass(value):
            for method, function in inspect.getmembers(value, inspect.isroutine):
                is_own = (getattr(function, "__module__", "") or "").startswith("raglane")
                if is_own and not method.startswith("_"):
                    yield f"{name}.{method}", owner, function


CALLABLES = {name: (owner, function) for name, owner, function in _callables()}


def _parameters(name: str) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(CALLABLES[name][1]).parameters.values()
    except ValueError:  # a type of the standard library
        return []
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        parameter
        for parameter in parameters
        if parameter.kind in named and parameter.name != "self"
    ]


def _is_foreign(name: str, argument: str) -> bool:
    module = name.rpartition(".")[0]
    if argument in _SYMBOLS.get(name, ()):
        return True
    return module in _FOREIGN or (module.startswith("raglane.sklearn") and argument in _SKLEARN)


def test_the_table_has_rows() -> None:
    assert REPLACED["heads"] == "num_heads"
    assert len(WORDS) > 100
    assert not WORDS & REPLACED.keys()
    assert {
        "raglane.Ragged.from_padded",
        "raglane.nn.init.xavier_uniform_",
        "raglane.packing.pad_sequence",
    } <= set(CALLABLES)
    assert {"raglane.sklearn.RecurrentClassifier.fit", "raglane.streams.Stream.pull"} <= set(
        CALLABLES
    )


@pytest.mark.parametrize("name", list(CALLABLES))
def test_no_argument_has_a_replaced_word(name: str) -> None:
    for parameter in _parameters(name):
        if _is_foreign(name, parameter.name):
            continue
        replaced = REPLACED.get(parameter.name)
        assert replaced is None, f"{name}({parameter.name}): write {replaced}"
        default = parameter.default
        replaced = REPLACED.get(f'"{default}"') if isinstance(default, str) else None
        assert replaced is None, f"{name}({parameter.name}={default!r}): write {replaced}"


@pytest.mark.parametrize("name", list(CALLABLES))
def test_no_choice_is_a_replaced_word(name: str) -> None:
    for argument, choices in _choices_of(CALLABLES[name][1]).items():
        for choice in choices:
            assert f'"{choice}"' not in REPLACED, f"{name}({argument}={choice!r})"


def _choices_of(function: Any) -> dict[str, set[str]]:
    """Return the texts that each argument may be."""
    if inspect.isclass(function):
        function = function.__init__
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # imported for type checkers only
        return {}
    choices = {argument: {*_choices(hint)} for argument, hint in hints.items()}
    return {argument: values for argument, values in choices.items() if values}


def _choices(hint: Any) -> Iterator[str]:
    """Yield the texts of the Literals in a type."""
    if typing.get_origin(hint) is typing.Literal:
        yield from (choice for choice in typing.get_args(hint) if isinstance(choice, str))
        return
    for inner in typing.get_args(hint):
        yield from _choices(inner)


def _owners() -> dict[str, set[str]]:
    """Return the functions and classes that have each argument, by its name."""
    settings = {field.name for field in dataclasses.fields(Settings)}
    owners: dict[str, set[str]] = defaultdict(set)
    for name, (owner, _) in CALLABLES.items():
        for parameter in _parameters(name):
            if _is_foreign(name, parameter.name) or parameter.name.startswith("_"):
                continue
            of_settings = parameter.name in settings and (
                name.startswith("raglane.sklearn") or owner.endswith("Settings")
            )
            place = "settings" if of_settings else owner.rpartition(".")[2]
            owners[parameter.name].add(place)
    return owners


def test_every_argument_is_in_a_table() -> None:
    """A word that several functions have means the same in all of them, as the table says."""
    owners = _owners()
    shared = {word for word, places in owners.items() if len(places) > 1}
    assert len(shared) > 50
    assert shared - WORDS == set()
    own: dict[str, set[str]] = defaultdict(set)
    for word, places in owners.items():
        for place in places - {"settings"}:  # whose help says what they are
            if word not in WORDS:
                own[place].add(word)
    assert own == OWN
    unknown = {word for word in WORDS if not word.startswith('"')} - owners.keys()
    assert unknown == set(), "words of the table that no function has"


def test_every_choice_is_in_the_table() -> None:
    choices: dict[str, set[str]] = defaultdict(set)
    for _, function in CALLABLES.values():
        for argument, values in _choices_of(function).items():
            choices[argument] |= values
    assert choices == CHOICES


def test_no_setting_has_a_replaced_word() -> None:
    for name, option in options(Settings).items():
        assert name not in REPLACED
        assert [choice for choice in option.choices if f'"{choice}"' in REPLACED] == []
