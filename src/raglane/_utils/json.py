"""JSON that is validated on reading, because files may be damaged or edited by hand."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from raglane._utils.files import check_file
from raglane._utils.memory import available_memory
from raglane._utils.messages import flags, quote
from raglane.errors import ArgumentError, CheckpointError

# The largest number of bytes in memory per byte of JSON: an empty object has two or three
# characters.
_JSON_FACTOR = 32

_LARGEST = sys.float_info.max
_WORDS = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    type(None): "null",
}

Kind = TypeVar("Kind")


def build(kind: type[Kind], content: Any, name: str) -> Kind:
    """Return a dataclass built from a JSON object of its fields; raise a ValueError for invalid
    entries.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{name} = {quote(content)}, which is not an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    unknown = [key for key in content if key not in fields]
    if unknown:
        raise ValueError(f"{name} with the unknown entry {quote(unknown[0])}")
    hints = typing.get_type_hints(kind)
    values = {}
    for key, field in fields.items():
        if key in content:
            values[key] = checked(hints[key], content[key], f"{name}.{key}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ValueError(f"{name} without the entry {key!r}")
    return kind(**values)


def to_json(content: Any) -> bytes:
    """Return indented JSON as the bytes of a file."""
    # File names need not be UTF-8: invalid bytes are lone surrogates, which become JSON escapes.
    return (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode(
        errors="backslashreplace"
    )


def finite(content: Any) -> Any:
    """Return JSON values with None (null) in place of numbers that are not finite."""
    if isinstance(content, dict):
        return {key: finite(value) for key, value in content.items()}
    if isinstance(content, list):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def read_json(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; raise for numbers that are not finite."""
    return parse_json(read_bytes(path, _JSON_FACTOR), path)


def parse_json(content: bytes, path: Path) -> dict[str, Any]:
    """Return the object of the bytes of a JSON file; raise for numbers that are not finite."""
    try:
        values = json.loads(content, parse_constant=_number, parse_float=_number)
    except RecursionError as error:
        raise damaged(path, "brackets that are nested too deeply") from error
    except ValueError as error:
        raise damaged(path, f"{error}") from error
    if not isinstance(values, dict):
        raise damaged(path, "JSON that is not an object")
    return values


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:40]}, which is not finite")
    return value


def read_bytes(path: Path, factor: int) -> bytes:
    """Return the content of a file; raise if ``factor`` times its size exceeds the available
    memory.
    """
    try:
        check_file(path)
        needed = factor * path.stat().st_size
        most = available_memory()
        if needed > most:
            got = f"a file of {path.stat().st_size:,} bytes, which needs up to {needed:,} bytes of memory"
            raise damaged(path, f"{got} where {most:,.0f} are available")
        return path.read_bytes()
    except OSError as error:
        raise damaged(path, f"{error.strerror or error}") from error


def checked(hint: Any, value: Any, name: str) -> Any:
    """Return a JSON value; raise a ValueError unless it has the type of a field."""
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in arguments:
            return None
        # A union has one type that JSON can represent, in addition to None.
        return checked(next(argument for argument in arguments if _is_json(argument)), value, name)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type[Any], hint), value, name)
    if origin is list and isinstance(value, list):
        return [
            checked(arguments[0], entry, f"{name}[{index}]") for index, entry in enumerate(value)
        ]
    if origin is dict and isinstance(value, dict):
        return {key: checked(arguments[1], entry, f"{name}.{key}") for key, entry in value.items()}
    if not _is_of(hint, origin or hint, value):
        words = {list: "a list", dict: "an object"}.get(origin, "of the right type")
        raise ValueError(f"{name} = {quote(value)}, which is not {_WORDS.get(hint, words)}")
    if not _fits_64_bits(hint, value):
        raise ValueError(f"{name} = {quote(value)}, which is outside of the range of 64 bits")
    return value


def _is_of(hint: Any, kind: Any, value: Any) -> bool:
    """Return True if a JSON value has the type of a hint: whole numbers are floats, but no bools."""
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, (int, float) if hint is float else kind)


def _fits_64_bits(hint: Any, value: Any) -> bool:
    """Return True unless a number is beyond the range of float64 or int64."""
    if hint is float:
        return not abs(value) > _LARGEST  # NaN has rules of its own
    return hint is not int or -(2**63) <= value < 2**63


def rule_of(error: ValueError) -> str:
    """Return the rule in an error of :func:`checked`, for values that are not from a file of a
    run.
    """
    _, _, rule = str(error).rpartition(", which is not ")
    return rule if rule != str(error) else "a number that 64 bits can hold"


def _is_json(hint: Any) -> bool:
    return (
        typing.get_origin(hint) in (list, dict)
        or hint in (int, float, str, bool)
        or dataclasses.is_dataclass(hint)
    )


def damaged(path: Path, what: str) -> CheckpointError:
    """Return the error for a file that is not valid."""
    rule = "a file that Raglane wrote, whole and unchanged"
    return CheckpointError(str(path), what, rule, "copy it again or train again")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Convert errors in the use of a file's content to errors that name the file."""
    try:
        # Values in a file are not options of the command, so messages do not use its flags.
        with flags({}):
            yield
    except ArgumentError as error:
        raise CheckpointError(f"{path}: {error}") from error
    except KeyError as error:
        raise damaged(path, f"no entry {error}") from error
    except (
        TypeError,
        ValueError,
        RuntimeError,
        AttributeError,
        IndexError,
        OverflowError,
    ) as error:
        raise damaged(path, " ".join(str(error).split())) from error
