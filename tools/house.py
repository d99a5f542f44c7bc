"""Compare figures of the source with the limits in house.toml: ``make house``."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType

import grimp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src/raglane"
_MODULES = sorted(PACKAGE.rglob("*.py"))
_TEMPLATES = [path for path in PACKAGE.rglob("*") if path.suffix in {".html", ".css", ".js", ".j2"}]
_KERNELS = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp"}]
# Words that the documents avoid; lines of src and csrc with one of them are counted.
_WORDS = {
    "persons": "nobody|somebody|whoever",
    "stands": "stands?|stood|lies?|lay",
    "besides": "besides?",
}
# Names of variables and arguments that do not say what they hold.
_VAGUE = frozenset("found own given made part one known kept wanted held place".split())
# docs/api/results.md has classes that functions return: no names to import.
_API_PAGES = [path for path in (ROOT / "docs/api").glob("*.md") if path.name != "results.md"]
_API = re.compile(r"^\.\. (?:autoclass|autoexception|autofunction|data)::", flags=re.MULTILINE)
_BRANCHES = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ExceptHandler,
    ast.match_case,
    ast.IfExp,
)
_MOST_BRANCHES = 15
_MOST_LINES = 500
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> int:
    """Print all figures, those with a limit beside it; return 1 if one is above its limit."""
    limits: dict[str, float] = tomllib.loads((ROOT / "house.toml").read_text())["limits"]
    figures: dict[str, float] = {
        **_sizes(),
        **_shape(),
        "call_functions": _functions_of_a_call(),
        **_code(),
        **_texts(),
    }
    if unknown := limits.keys() - figures.keys():
        sys.exit(f"house.toml has limits for {', '.join(sorted(unknown))}, which is no figure")
    print(f"{'figure':20}{'now':>9}{'limit':>9}")
    above = False
    for name, now in figures.items():
        limit = limits.get(name)
        remark = ""
        if limit is not None and now > limit:
            above = True
            remark = "  above its limit"
        print(f"{name:20}{now:9}{'' if limit is None else limit:>9}{remark}")
    return int(above)


def _wings() -> dict[str, set[str]]:
    """Return the rooms of both wings, which the import rule of pyproject.toml lists."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    rule = next(
        contract
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract["name"] == "The core never imports the lab"
    )
    return {
        "core": {_room(module) for module in rule["source_modules"]},
        "lab": {_room(module) for module in rule["forbidden_modules"]},
    }


def _files_of(rooms: set[str]) -> list[Path]:
    """Return the modules of rooms, which are folders and files of the package."""
    return [
        path for path in _MODULES if path.relative_to(PACKAGE).parts[0].removesuffix(".py") in rooms
    ]


def _lines(paths: Iterable[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def _sizes() -> dict[str, int]:
    """Count the lines and files of the package, its lines of code, and the lines of tests."""
    files = [*_MODULES, *_TEMPLATES]
    tests = [
        path
        for top in ("tests", "tools")
        for suffix in ("py", "toml")
        for path in (ROOT / top).rglob(f"*.{suffix}")
    ]
    return {
        "lines": _lines(files),
        "code": sum(_code_lines(path.read_text()) for path in _MODULES),
        "files": len(files),
        **{f"{wing}_files": len(_files_of(rooms)) for wing, rooms in _wings().items()},
        "test_lines": _lines(tests),
        "long_files": sum(_lines([path]) > _MOST_LINES for path in _MODULES),
    }


def _code_lines(text: str) -> int:
    """Count lines with a token of code: no blank lines, comments or docstrings."""
    blank = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in _docstrings(text):
        lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def _docstrings(text: str) -> list[ast.Constant]:
    """Return the strings that are statements: they document a module, class, function or name."""
    values = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    return [
        node for node in values if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


def _code() -> dict[str, float]:
    """Count tokens, and the marks of code that has been squeezed."""
    trees = {path: ast.parse(path.read_text()) for path in _MODULES}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    branchy = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, _Function) and _branches(node) > _MOST_BRANCHES
    ]
    if "--list" in sys.argv:
        print(*branchy, sep="\n")
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    vague = sum(name in _VAGUE for name in names)
    return {
        "tokens": sum(_tokens(path.read_text()) for path in _MODULES),
        **{
            f"{wing}_tokens": sum(_tokens(path.read_text()) for path in _files_of(rooms))
            for wing, rooms in _wings().items()
        },
        "branchy": len(branchy),
        "nested_conditionals": sum(_holds_conditional(node) for node in nodes),
        "tuple_assignments": sum(_assigns_several(node) for node in nodes),
        "constants_at_once": sum(
            isinstance(target, ast.Tuple)
            for tree in trees.values()
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
        ),
        "vague_per_1000": round(1000 * vague / len(names), 1),
        "class_names": _repeated_class_names(trees),
    }


def _repeated_class_names(trees: Mapping[Path, ast.Module]) -> int:
    """Count names of more than one class, except those of a cell and its layer."""
    rooms: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                rooms.setdefault(node.name, []).append(path.relative_to(PACKAGE).parts[0])
    return sum(len(places) > 1 and sorted(places) != ["cells", "nn"] for places in rooms.values())


def _tokens(text: str) -> int:
    """Count names, operators and numbers."""
    counted = {tokenize.NAME, tokenize.OP, tokenize.NUMBER}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(token.type in counted for token in tokens)


def _branches(function: _Function) -> int:
    """Count the branches of a function, without those of the functions and classes within it."""
    count = 0
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, _Function | ast.ClassDef):
            continue
        if isinstance(node, _BRANCHES):
            count += 1
        elif isinstance(node, ast.comprehension):
            count += 1 + len(node.ifs)
        elif isinstance(node, ast.BoolOp):
            count += len(node.values) - 1
        waiting.extend(ast.iter_child_nodes(node))
    return count


def _holds_conditional(node: ast.AST) -> bool:
    """Return True for a conditional expression with another one directly or deeper inside."""
    if not isinstance(node, ast.IfExp):
        return False
    return any(isinstance(inner, ast.IfExp) for inner in ast.walk(node) if inner is not node)


def _assigns_several(node: ast.AST) -> bool:
    """Return True for ``a, b = x, y``, except swaps such as ``a, b = b, a``."""
    if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)):
        return False
    targets = [target for target in node.targets if isinstance(target, ast.Tuple)]
    if not targets:
        return False
    names = {ast.unparse(element) for element in targets[0].elts}
    values = {ast.unparse(element) for element in node.value.elts}
    return names != values


def _texts() -> dict[str, int]:
    """Count docstrings that start with What, Whether or As, lines with the words of _WORDS, and
    documented names.
    """
    docstrings = [str(node.value) for path in _MODULES for node in _docstrings(path.read_text())]
    lines = [
        line
        for path in [*_MODULES, *_TEMPLATES, *_KERNELS]
        for line in path.read_text().splitlines()
    ]
    return {
        "what_docstrings": sum(
            re.match(r"\s*(What|Whether|As)\b", text) is not None for text in docstrings
        ),
        **{
            name: sum(
                re.search(rf"\b({words})\b", line, re.IGNORECASE) is not None for line in lines
            )
            for name, words in _WORDS.items()
        },
        "api_names": sum(len(_API.findall(page.read_text())) for page in _API_PAGES),
    }


def _shape() -> dict[str, int]:
    """Count rooms, floors (the longest path of imports between rooms), of both wings too, and
    circles of files.

    Imports inside functions and under TYPE_CHECKING count too.
    """
    graph = grimp.build_graph("raglane", cache_dir=None)
    imports = {
        module: {
            other
            for other in graph.find_modules_directly_imported_by(module)
            if other.startswith("raglane.")
        }
        for module in graph.modules
    }
    rooms: dict[str, set[str]] = {}
    for module, others in imports.items():
        if (room := _room(module)) not in ("raglane", "__main__"):
            rooms.setdefault(room, set()).update({_room(other) for other in others} - {room})
    wings = _wings()
    if unlisted := rooms.keys() - wings["core"] - wings["lab"]:
        sys.exit(f"{', '.join(sorted(unlisted))}: in no wing; pyproject.toml lists those of both")
    circles = [group for group in _components(imports) if len(group) > 1]
    for group in circles:
        print(f"a circle of imports: {', '.join(sorted(group))}")
    return {
        "rooms": len(rooms),
        **{f"{wing}_rooms": len(names) for wing, names in wings.items()},
        "floors": _floors(rooms),
        **{
            f"{wing}_floors": _floors({name: rooms[name] & names for name in names})
            for wing, names in wings.items()
        },
        "circles": len(circles),
    }


def _floors(rooms: dict[str, set[str]]) -> int:
    """Return the longest path of imports between rooms."""
    groups = list(_components(rooms))
    group_of = {room: number for number, group in enumerate(groups) for room in group}
    floors: list[int] = []
    for group in groups:  # each after those that it imports
        below = {group_of[other] for room in group for other in rooms[room]} - {group_of[group[0]]}
        floors.append(len(group) + max((floors[number] for number in below), default=0))
    return max(floors)


def _room(module: str) -> str:
    """Return the top folder or file of the package that contains a module."""
    return [*module.split("."), "raglane"][1]


def _components(edges: dict[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components, each after those that it leads to (Tarjan 1972)."""
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


def _functions_of_a_call() -> int:
    """Count the Python functions of the package in the second training call of LSTM(12, 64), up to
    C.
    """
    import torch

    import raglane as rl
    from raglane.kernels.cpu.layer import Layer
    from raglane.native.library import operators

    if operators() is None:
        sys.exit(
            "make house counts the functions of a call into the cpu kernels, whose operators are missing here"
        )
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
    entered = entered[: entered.index(Layer.forward.__qualname__) + 1]
    # Only in Python 3.11 a comprehension is a function.
    return len([name for name in entered if not name.endswith("comp>")])


if __name__ == "__main__":
    sys.exit(main())
