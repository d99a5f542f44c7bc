"""Options of a training as TOML, which ``--config`` reads, ``--show-config`` prints and each run
saves.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from raglane._utils.messages import printable
from raglane._utils.options import DATA, MODEL, RUN, TRAINING, flag_of, in_words, options
from raglane.runs.sources import DEFAULT_DATA, SavedSource, SequenceSource
from raglane.training.settings import Settings

_PANELS = (DATA, MODEL, TRAINING, RUN)
# The sources of data, with the meaning of an omitted one.
_UNSET = {
    "data": f"a file or a folder; {DEFAULT_DATA} of raglane demo",
    "format": "by suffix",
    "validation": "held out",
    "test": "none",
}
_REPEATS = (
    "# The options of this run; to repeat it: raglane train --config run.toml --output FOLDER"
)
_OF_DEMO = "# The options of this run of raglane demo; for other data: raglane train DATA --config run.toml"
# The column of comments after short lines.
_COMMENT = 34


class OptionValue(NamedTuple):
    """An option and its value."""

    key: str
    value: Any
    unset: str = ""
    comment: str = ""
    panel: str = DATA


def key_of(kind: Any, name: str) -> str:
    """Return the name in TOML of an option of a dataclass."""
    return flag_of(kind, name).removeprefix("--")


def entries(chosen: Any, comments: Mapping[str, str] | None = None) -> list[OptionValue]:
    """Return the options of a dataclass instance."""
    comments = comments or {}
    return [
        OptionValue(
            key_of(chosen, name),
            in_words(getattr(chosen, name), option),
            option.unset or "",
            comments.get(name, ""),
            option.panel,
        )
        for name, option in options(chosen).items()
    ]


def words_of(chosen: Any, always: str = "") -> list[str]:
    """Return the flags and values of the options that differ from their defaults."""
    words: list[str] = []
    option_of = options(chosen)
    for field in dataclasses.fields(chosen):
        value = getattr(chosen, field.name)
        is_default = value == field.default and field.name != always
        if field.name not in option_of or value is None or is_default:
            continue
        flag = flag_of(type(chosen), field.name)
        value = in_words(value, option_of[field.name])
        if value is True:
            words.append(flag)
        else:
            for entry in value if isinstance(value, list | tuple) else [value]:
                words += [flag, str(entry)]
    return words


def other_entries(
    values: Mapping[str, Any], comments: Mapping[str, str], out: str
) -> list[OptionValue]:
    """Return the options of a command that are in no dataclass."""
    unset = _UNSET | {"output": out, "minutes": "no end"}
    return [
        OptionValue(
            name,
            value,
            unset.get(name, ""),
            comments.get(name, ""),
            DATA if name in _UNSET else RUN,
        )
        for name, value in values.items()
    ]


def as_toml(listed: Iterable[OptionValue], heading: str = "") -> str:
    """Return options as TOML, grouped by panel; unset ones are comments."""
    lines: dict[str, list[str]] = {panel: [f"# {panel}"] for panel in _PANELS}
    for entry in listed:
        lines[entry.panel].append(entry_in_toml(entry))
    parts = ["\n".join(panel) for panel in lines.values() if len(panel) > 1]
    return "\n\n".join([heading, *parts] if heading else parts)


def run_config(settings: Settings, data: Mapping[str, Any]) -> bytes:
    """Return the content of ``run.toml``, which repeats a run."""
    saved = dataclasses.asdict(SavedSource(None, None, {}, None, None)) | dict(data)
    source = SequenceSource(None, None).chosen(saved["columns"])
    paths = [
        _path_entry("data", saved["path"] if data else ""),
        OptionValue("format", saved["format"], _UNSET["format"]),
        _path_entry("validation", saved["validation"]),
        _path_entry("test", saved["test"]),
    ]
    listed = [*paths, *entries(source.columns), *entries(source), *entries(settings)]
    is_demo = bool(data) and saved["path"] is None
    return (as_toml(listed, _OF_DEMO if is_demo else _REPEATS) + "\n").encode()


def _path_entry(key: str, path: str | None) -> OptionValue:
    """Return the entry of a path; an empty one, which commands refuse, if TOML cannot express
    it.
    """
    if path == "":
        return OptionValue(key, "", comment="was in memory: name a file")
    if path is not None and any("\ud800" <= letter <= "\udfff" for letter in path):
        return OptionValue(key, "", comment=f"its name is not UTF-8: {printable(path)}")
    return OptionValue(key, path, _UNSET[key])


def entry_in_toml(entry: OptionValue) -> str:
    """Return an option as a line of TOML, a comment if it is unset."""
    if entry.value is None:
        line = f"# {entry.key}: {entry.unset}" if entry.unset else f"# {entry.key}"
    else:
        line = f"{entry.key} = {_value(entry.value)}"
    return f"{line:<{_COMMENT}}  # {entry.comment}" if entry.comment else line


def _value(value: Any) -> str:
    """Return a value in TOML: text, path, number, bool, or a list or dict of them."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name} = {_value(entry)}' for name, entry in value.items())}}}"
    if isinstance(value, str | Path):
        # The escapes of JSON are valid in TOML, which also requires one for DEL.
        return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
