"""One word per meaning: no public argument or default has a word that the style page replaces."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import raglane as rl
from raglane.training.options import options
from raglane.training.settings import Settings

STYLE = Path(__file__).parents[2] / "docs" / "style.md"
_MODULES = (rl, rl.nn, rl.transduction, rl.data, rl.export, rl.plot, rl.serve)


def _table() -> dict[str, str]:
    """Return the word for each replaced one, from the table of arguments on the style page."""
    _, _, part = STYLE.read_text().partition("\n## Arguments\n")
    rows = [line.split("|") for line in part.partition("\n## ")[0].splitlines() if "|" in line]
    return {
        word.strip(" `"): row[1].strip(" `")
        for row in rows[2:]
        for word in row[3].split(",")
        if word.strip()
    }


WORDS = _table()


def _callables() -> Iterator[tuple[str, Any]]:
    for module in _MODULES:
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.ismodule(value) or not callable(value):
                continue
            yield f"{module.__name__}.{name}", value
            if inspect.isclass(value):
                for method, function in inspect.getmembers(value, inspect.isfunction):
                    is_own = function.__module__.startswith("raglane")
                    if is_own and not method.startswith("_"):
                        yield f"{module.__name__}.{name}.{method}", function


CALLABLES = dict(_callables())


def test_the_table_has_rows() -> None:
    assert WORDS["heads"] == "num_heads"
    assert len(WORDS) > 20


@pytest.mark.parametrize("name", list(CALLABLES))
def test_no_argument_has_a_replaced_word(name: str) -> None:
    try:
        parameters = inspect.signature(CALLABLES[name]).parameters.values()
    except ValueError:  # a type of the standard library
        return
    for parameter in parameters:
        replaced = WORDS.get(parameter.name)
        assert replaced is None, f"{name}({parameter.name}): write {replaced}"
        default = parameter.default
        replaced = WORDS.get(f'"{default}"') if isinstance(default, str) else None
        assert replaced is None, f"{name}({parameter.name}={default!r}): write {replaced}"


def test_no_setting_has_a_replaced_word() -> None:
    for name, option in options(Settings).items():
        assert name not in WORDS
        assert [choice for choice in option.choices if f'"{choice}"' in WORDS] == []
