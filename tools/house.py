"""The size and shape of the package against the limits in house.toml: ``make house``."""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/raglane"
# Pages are written in these; .py files are counted apart, since only they have code and docstrings.
_TEMPLATES = {".html", ".css", ".js", ".j2"}


def main() -> int:
    """Print each figure with its limit and its goal.

    Returns:
        1 if a figure is above its limit, else 0.
    """
    house = tomllib.loads((ROOT / "house.toml").read_text())
    figures = _sizes() | _shape() | {"check_lines": _check_lines(house["check_files"]), "call_functions": _call()}
    if figures.keys() != house["limits"].keys():
        sys.exit(f"house.toml must have limits for {', '.join(figures)}, and for nothing else")
    print(f"{'figure':16}{'now':>8}{'limit':>8}{'goal':>8}")
    above = []
    for name, now in figures.items():
        limit, goal = house["limits"][name], house["goals"][name]
        if now > limit:
            above.append(name)
        print(f"{name:16}{now:8}{limit:8}{goal:8}{'  above its limit' if now > limit else ''}")
    return int(bool(above))


def _sizes() -> dict[str, int]:
    """Lines of the package, lines of code among them, and files."""
    modules = sorted(PACKAGE.rglob("*.py"))
    templates = [path for path in PACKAGE.rglob("*") if path.suffix in _TEMPLATES]
    texts = [path.read_text() for path in [*modules, *templates]]
    return {
        "lines": sum(len(text.splitlines()) for text in texts),
        "code": sum(_code_lines(text) for text in texts[: len(modules)]),
        "files": len(texts),
    }


def _code_lines(text: str) -> int:
    """Lines that hold a token of code: no blank lines, comments or docstrings."""
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        # A string that is a statement documents what encloses it, or the name before it.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _shape() -> dict[str, int]:
    """Rooms, the longest path of imports between them, and circles of files within one.

    Imports inside functions and under TYPE_CHECKING count as any other.
    """
    graph = grimp.build_graph("raglane", cache_dir=None)
    imports = {
        module: {other for other in graph.find_modules_directly_imported_by(module) if other.startswith("raglane.")}
        for module in graph.modules
    }
    rooms: dict[str, set[str]] = {}
    for module, others in imports.items():
        if (room := _room(module)) not in ("raglane", "__main__"):
            rooms.setdefault(room, set()).update({_room(other) for other in others} - {room})
    groups = list(_components(rooms))
    group_of = {room: number for number, group in enumerate(groups) for room in group}
    floors: list[int] = []
    for group in groups:  # a group comes after all that it imports
        below = {group_of[other] for room in group for other in rooms[room]} - {group_of[group[0]]}
        floors.append(len(group) + max((floors[number] for number in below), default=0))
    circles = [group for group in _components(imports) if len(group) > 1]
    for group in circles:
        print(f"a circle of imports: {', '.join(sorted(group))}")
    return {"rooms": len(rooms), "floors": max(floors), "circles": len(circles)}


def _room(module: str) -> str:
    """The folder or module at the top of the package that holds a module."""
    return [*module.split("."), "raglane"][1]


def _components(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """Strongly connected components, each after those that it leads to (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> Iterator[list[str]]:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                yield from visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            yield group

    for node in sorted(edges):
        if node not in index:
            yield from visit(node)


def _check_lines(names: list[str]) -> int:
    """Lines of the files that check arguments."""
    return sum(len((PACKAGE / name).read_text().splitlines()) for name in names)


def _call() -> int:
    """Python functions of the package in the second training call of LSTM(12, 64), up to C."""
    import torch

    import raglane as rl
    from raglane.native import library

    if library.missing_kernels() is not None:
        sys.exit("make house counts the functions of a call into the cpu kernels, which are missing here")
    layer = rl.nn.LSTM(12, 64)
    batch = rl.Ragged([torch.randn(length, 12) for length in (4, 2, 8)])
    layer(batch)
    entered: list[str] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    try:
        layer(batch)
    finally:
        sys.setprofile(None)
    entered = entered[: entered.index(library.call.__qualname__) + 1]
    # A comprehension is a function of its own in Python 3.11, and none from 3.12 on.
    return len([name for name in entered if not name.endswith("comp>")])


if __name__ == "__main__":
    sys.exit(main())
