"""The choices of a training as TOML: what ``--config`` reads, ``--show-config`` prints, and each run keeps."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raglane._utils.messages import printable
from raglane.runs.sources import DEFAULT_DATA, ColumnNames, SavedSource
from raglane.training.options import DATA, MODEL, RUN, TRAINING, flag_of, options
from raglane.training.settings import Settings

_PANELS = (DATA, MODEL, TRAINING, RUN)
# Where data comes from, and what it means that nothing is said of it.
_UNSET = {
    "data": f"{DEFAULT_DATA}, the embedded default",
    "format": "by suffix",
    "validation": "held out",
    "test": "none",
}
_REPEATS = "# What this run was told: raglane train --config run.toml --out FOLDER repeats it."
# Where comments begin, if there is room.
_COMMENT = 34


@dataclass(frozen=True)
class Entry:
    """An option and its value."""

    key: str
    value: Any
    unset: str = ""
    comment: str = ""
    panel: str = DATA


def key_of(kind: Any, name: str) -> str:
    """What an option of a dataclass is called in a file."""
    return flag_of(kind, name).removeprefix("--")


def entries(chosen: Any, comments: Mapping[str, str] | None = None) -> list[Entry]:
    """The options of an object of a dataclass."""
    said = comments or {}
    return [
        Entry(key_of(chosen, name), getattr(chosen, name), option.unset or "", said.get(name, ""), option.panel)
        for name, option in options(chosen).items()
    ]


def other_entries(values: Mapping[str, Any], comments: Mapping[str, str], out: str) -> list[Entry]:
    """The options of a command that are in no dataclass."""
    unset = _UNSET | {"out": out, "minutes": "no end"}
    return [
        Entry(name, value, unset.get(name, ""), comments.get(name, ""), DATA if name in _UNSET else RUN)
        for name, value in values.items()
    ]


def as_toml(listed: Iterable[Entry], heading: str = "") -> str:
    r"""Options as TOML, part by part; what is not set is a comment."""
    everything = list(listed)
    parts = [heading] if heading else []
    for panel in _PANELS:
        lines = [entry_in_toml(entry) for entry in everything if entry.panel == panel]
        if lines:
            parts.append("\n".join([f"# {panel}", *lines]))
    return "\n\n".join(parts)


def run_config(settings: Settings, data: Mapping[str, Any]) -> bytes:
    """The file of a run that repeats it, ``run.toml``."""
    saved = dataclasses.asdict(SavedSource(None, None, ColumnNames(), None, None)) | dict(data)
    columns = saved["columns"]
    places = [
        _place("data", saved["path"] if data else ""),
        Entry("format", saved["format"], _UNSET["format"]),
        _place("validation", saved["validation"]),
        _place("test", saved["test"]),
    ]
    listed = [*places, *entries(ColumnNames(**columns)), *entries(settings)]
    return (as_toml(listed, _REPEATS) + "\n").encode()


def _place(key: str, path: str | None) -> Entry:
    """A file by its name; an empty one, which the commands refuse, where no name can stand in TOML."""
    if path == "":
        return Entry(key, "", comment="was in memory: name a file")
    if path is not None and any("\ud800" <= letter <= "\udfff" for letter in path):
        return Entry(key, "", comment=f"its name is not UTF-8: {printable(path)}")
    return Entry(key, path, _UNSET[key])


def entry_in_toml(entry: Entry) -> str:
    """An option as a line of TOML; one that is not set is a comment."""
    if entry.value is None:
        line = f"# {entry.key}: {entry.unset}" if entry.unset else f"# {entry.key}"
    else:
        line = f"{entry.key} = {_value(entry.value)}"
    return f"{line:<{_COMMENT}}  # {entry.comment}" if entry.comment else line


def _value(value: Any) -> str:
    """A value as TOML writes it: a text, a path, a number, a bool, a list of such, or a dict of such by plain names."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_value(one)}' for name, one in value.items())}}}"
    if isinstance(value, str | Path):
        # JSON's escapes are TOML's, but for one character that TOML wants to be escaped, too.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    # Python writes 1e-05 and 1e+20 as TOML does; true and false it does not.
    return str(value).lower() if isinstance(value, bool) else repr(value)
