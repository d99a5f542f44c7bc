"""What attacks on runs share: small data, what a run holds, and how two runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["contents", "has_begun", "same", "write_data"]

_TIMES = ("seconds", "elements_per_second")
# Pages that say how long something took.
_WITH_TIMES = ("card.md", "report.html")


def write_data(path: Path, count: int) -> None:
    """A CSV file of so many sequences of 1 to 4 steps, in two classes."""
    rows = [f"s{n},{step * (-1) ** n + n % 3},{'ab'[n % 2]}" for n in range(count) for step in range(n % 4 + 1)]
    path.write_text("\n".join(["id,x,kind", *rows, ""]))


def contents(run: Path) -> dict[str, Any]:
    """All that a run holds, without the seconds that things took."""
    found: dict[str, Any] = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        found[name] = "a folder" if path.is_dir() else path.read_bytes()
        if name == "curves.csv":
            rows = [line.split(",") for line in path.read_text().splitlines()]
            kept = [place for place, column in enumerate(rows[0]) if column not in _TIMES]
            found[name] = [[row[place] for place in kept] for row in rows]
        if name in _WITH_TIMES:
            found[name] = "a page"
        if name == "last/training.json":
            found[name] = _without_times(json.loads(path.read_bytes()))
    return found


def _without_times(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _without_times(value) for key, value in content.items() if key not in _TIMES}
    return [_without_times(value) for value in content] if isinstance(content, list) else content


def has_begun(run: Path) -> bool:
    """Whether a run has written what it is, so that it can go on."""
    return any(run.rglob("*.json"))


def same(found: Mapping[str, Any], wanted: Mapping[str, Any], what: str) -> None:
    """Raise an AssertionError that names the files which differ."""
    names = sorted(found.keys() | wanted.keys())
    others = [name for name in names if found.get(name) != wanted.get(name)]
    assert not others, f"{what}: {', '.join(others)}"
