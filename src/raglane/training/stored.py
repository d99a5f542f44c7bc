"""The words of earlier formats of the files of a run."""

from __future__ import annotations

from typing import Any

# The parts of a file whose entries earlier formats named otherwise, and these entries.
_PARTS = ("settings", "model", "preprocessor", "columns")
_KEYS = {"ranks": "processes"}
_VALUES = {
    ("missing", "error"): "raise",
    ("on_bad_row", "fail"): "raise",
    ("pooling", "summary"): "final",
    ("too_long", "refuse"): "raise",
    ("too_long", "split"): "chunk",
}


def with_new_words(content: dict[str, Any]) -> dict[str, Any]:
    """Return the content of a file of format 2 or less with the words of format 3."""
    parts = {name: _new_words(content[name]) for name in _PARTS if name in content}
    if isinstance(content.get("data"), dict) and "columns" in content["data"]:
        parts["data"] = content["data"] | {"columns": _new_words(content["data"]["columns"])}
    return content | parts


def _new_words(entries: Any) -> Any:
    if not isinstance(entries, dict):
        return entries  # rejected where it is read
    return dict(new_word(key, value) for key, value in entries.items())


def new_word(key: str, value: Any) -> tuple[str, Any]:
    """Return an entry of a file of format 2 or less with the words of format 3."""
    if isinstance(value, str):
        value = _VALUES.get((key, value), value)
    return _KEYS.get(key, key), value
