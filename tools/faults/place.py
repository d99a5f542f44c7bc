"""The faults, and the place of each in the source; README.md describes them."""

from __future__ import annotations

import ast
import builtins
import functools
import re
import textwrap
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SOURCES = ["src/raglane/**/*.py", "benchmarks/**/*.py"]
_TEXTS = ["csrc/**/*.h", "csrc/**/*.cpp", "examples/c/*.[ch]", "src/raglane/**/*.cpp"]


class NoPlaceError(Exception):
    """A fault has no place in the source, or several."""


@dataclass(frozen=True)
class Fault:
    """A mistake and its tests, as in README.md; the room is the name of its file."""

    room: str
    where: str
    old: str
    new: str
    tests: str

    @property
    def needs_build(self) -> bool:
        """True if it is in the CPU kernels."""
        return self.room == "csrc"

    def changed(self) -> tuple[str, str]:
        """Return the file that it changes, and the text of that file with the fault.

        Raises:
            NoPlaceError: there is not exactly one place for it.
        """
        return (
            _changed_text(self)
            if Path(self.where).suffix in {".c", ".h", ".cpp"}
            else _changed_module(self)
        )

    def arguments(self) -> list[str]:
        """Return the tests as arguments of pytest.

        Raises:
            NoPlaceError: a name is that of no test, or of several.
        """
        return [_test(name) for name in self.tests.split()]


@functools.cache
def all_faults() -> dict[str, Fault]:
    """Return all faults by name."""
    found: dict[str, Fault] = {}
    for path in sorted(Path(__file__).parent.glob("*.toml")):
        rows = tomllib.loads(path.read_text())
        if twice := found.keys() & rows:
            raise ValueError(
                f"{path.name} repeats names of other files: {', '.join(sorted(twice))}"
            )
        found |= {name: Fault(path.stem, *row) for name, row in rows.items()}
    return found


@functools.cache
def _read(root: Path, *globs: str) -> dict[str, str]:
    paths = [path for glob in globs for path in sorted(root.glob(glob))]
    return {str(path.relative_to(root)): path.read_text() for path in paths}


def _listed(found: Iterable[object]) -> str:
    return ", ".join(map(str, found)) or "no place"


def _test(name: str) -> str:
    file, _, function = (name, "", "") if name.endswith(".py") else name.rpartition("::")
    start = f"def {function.partition('[')[0]}(" if function else ""
    tests = _read(ROOT, "tests/**/test_*.py")
    files = [path for path in tests if f"/{path}".endswith(f"/{file}")] if file else tests
    files = [f"tests/{file}"] if f"tests/{file}" in files else files
    found = [path for path in files if start in tests[path]]
    if len(found) != 1:
        raise NoPlaceError(
            f"the test {name} is in {_listed(found)}: name it as FILE.py::NAME, or another test"
        )
    return f"{found[0]}::{function}" if function else found[0]


# ---- C and C++ -----------------------------------------------------------------------------------
def _changed_text(fault: Fault) -> tuple[str, str]:
    """Find words and signs in this order, with any space between them, and replace them."""
    words = re.findall(r"\w+|\S", fault.old)
    pattern = re.compile(
        r"\s*".join(rf"\b{word}\b" if word[0].isalnum() else re.escape(word) for word in words)
    )
    texts = {path: text for path, text in _read(ROOT, *_TEXTS).items() if pattern.search(text)}
    found = [path for path in texts if Path(path).name == fault.where] or list(texts)
    if len(found) != 1 or len(pattern.findall(texts[found[0]])) != 1:
        raise NoPlaceError(
            f"the old text is in {_listed(texts)}, and must be there once: {fault.old!r}"
        )
    return found[0], pattern.sub(lambda _: fault.new, texts[found[0]])


# ---- Python --------------------------------------------------------------------------------------
class _Module:
    def __init__(self, path: str, text: str) -> None:
        self.path, self.text = path, text
        parts = Path(path).with_suffix("").parts
        self.room = parts[2] if parts[0] == "src" else parts[0]

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def scopes(self) -> list[tuple[str, ast.AST]]:
        """Functions, classes and constants; every qualified name starts with a dot."""
        return list(_scopes(self.tree, ""))


@functools.cache
def _modules() -> list[_Module]:
    return list(starmap(_Module, _read(ROOT, *_SOURCES).items()))


def _scopes(node: ast.AST, above: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield functions, classes and constants with their qualified names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield f"{above}.{child.name}", child
            yield from _scopes(child, f"{above}.{child.name}")
            continue
        if isinstance(child, ast.Assign | ast.AnnAssign) and isinstance(
            node, ast.Module | ast.ClassDef
        ):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from (
                (f"{above}.{target.id}", child)
                for target in targets
                if isinstance(target, ast.Name)
            )
        if not isinstance(child, ast.expr):  # which has no definitions
            yield from _scopes(child, above)


def _names(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the names in a node, each with True if it is assigned there."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id, isinstance(part.ctx, ast.Store)
        elif isinstance(part, ast.arg):
            yield part.arg, True
        elif isinstance(part, ast.alias):
            yield (part.asname or part.name).partition(".")[0], True
        elif isinstance(part, ast.FunctionDef | ast.ClassDef | ast.ExceptHandler) and part.name:
            yield part.name, True


class _Match:
    """A comparison of the old text of a fault with nodes; it records the nodes of each ``...`` and
    renamed variables.

    Args:
        names: those of the function, each with True if it is a variable, which may have another
            name in the fault.
    """

    def __init__(self, names: dict[str, bool]) -> None:
        self._known = names
        self._names: dict[str, str] = {}
        self._rests: list[list[ast.AST]] = []
        self._keywords: list[ast.keyword] = []

    def same(self, old: object, node: object) -> bool:
        if type(old) is not type(node):
            return False
        if isinstance(old, ast.Name) and isinstance(node, ast.Name):
            return self._same_name(old.id, node.id)
        if (
            isinstance(old, ast.Call)
            and isinstance(node, ast.Call)
            and any(map(_is_rest, old.args))
        ):
            named = {part.arg for part in old.keywords}
            self._keywords = [part for part in node.keywords if part.arg not in named]
            node = ast.Call(
                node.func, node.args, [part for part in node.keywords if part.arg in named]
            )
        if isinstance(old, ast.AST) and isinstance(node, ast.AST):
            return all(starmap(self.same, zip(_parts(old), _parts(node), strict=True)))
        return (
            self._same_list(old, node)
            if isinstance(old, list) and isinstance(node, list)
            else old == node
        )

    def _same_list(self, old: list[ast.AST], nodes: list[ast.AST]) -> bool:
        if not old or not _is_rest(old[0]):
            return old == nodes or (
                bool(old and nodes)
                and self.same(old[0], nodes[0])
                and self._same_list(old[1:], nodes[1:])
            )
        for count in range(len(nodes) + 1):
            before = dict(self._names), [*self._rests, nodes[:count]]
            self._rests.append(nodes[:count])
            if self._same_list(old[1:], nodes[count:]):
                return True
            self._names, self._rests = before[0], before[1][:-1]
        return False

    def _same_name(self, old: str, name: str) -> bool:
        may_be = old == name or (old not in self._known and self._known.get(name, False))
        if may_be and old not in self._names and name not in self._names.values():
            self._names[old] = name
        return self._names.get(old) == name

    def put_into(self, new: list[ast.AST]) -> list[ast.AST]:
        """Return the new text with the names and the nodes of each ``...`` that were recorded."""
        rests = iter(self._rests)

        def put(node: ast.AST) -> None:
            if isinstance(node, ast.Name):
                node.id = self._names.get(node.id, node.id)
            has_rest = isinstance(node, ast.Call) and any(map(_is_rest, node.args))
            # In the order of the comparison.
            for part in _parts(node):
                if isinstance(part, list):
                    part[:] = put_all(part)
                elif isinstance(part, ast.AST):
                    put(part)
            if isinstance(node, ast.Call) and has_rest:
                node.keywords[:0] = self._keywords

        def put_all(nodes: list[ast.AST]) -> list[ast.AST]:
            found = []
            for node in nodes:
                if _is_rest(node):
                    found += next(rests, [node])
                    continue
                if isinstance(node, ast.AST):
                    put(node)
                found.append(node)
            return found

        return put_all(new)


def _parts(node: ast.AST) -> list[object]:
    return [
        value
        for name, value in ast.iter_fields(node)
        if name not in {"ctx", "kind", "type_comment"}
    ]


def _is_rest(node: object) -> bool:
    node = node.value if isinstance(node, ast.Expr) else node
    return isinstance(node, ast.Constant) and node.value is ...


@dataclass(frozen=True)
class _Place:
    module: _Module
    where: str
    scope: Any  # the only part that is unparsed, because a module takes long
    parent: ast.AST
    field: str
    nodes: slice
    match: _Match

    def __str__(self) -> str:
        return f"{self.module.path}{self.where.replace('.', ' ', 1)} ({ast.unparse(self.parent)[:60]!r})"

    def changed(self, new: list[ast.AST]) -> str:
        """Return the text of the module with other nodes in this place."""
        new = self.match.put_into(new)
        own = dict(sorted(name for node in new for name in _names(node)))
        missing = {name for name, is_assigned in own.items() if not is_assigned} - vars(
            builtins
        ).keys()
        for node in (self.scope, self.module.tree):
            missing = missing and missing - {name for name, _ in _names(node)}
        if missing:
            raise NoPlaceError(
                f"{self} has no {', '.join(sorted(missing))}, which the new text names"
            )
        before = getattr(self.parent, self.field)
        is_list = isinstance(before, list)
        after = (
            [*before[: self.nodes.start], *new, *before[self.nodes.stop :]] if is_list else new[0]
        )
        setattr(self.parent, self.field, after)
        try:
            text = f"{ast.unparse(self.scope)}\n"
        finally:
            setattr(self.parent, self.field, before)
        if isinstance(self.scope, ast.Module):
            return text
        lines = self.module.text.splitlines(keepends=True)
        start = (
            min(node.lineno for node in (self.scope, *getattr(self.scope, "decorator_list", ())))
            - 1
        )
        lines[start : self.scope.end_lineno] = [textwrap.indent(text, " " * self.scope.col_offset)]
        return "".join(lines)


def _places(
    module: _Module, where: str, scope: ast.AST | None, old: list[ast.AST], renamed: bool
) -> Iterator[_Place]:
    scope = scope or module.tree
    names: dict[str, bool] = {}
    for name, is_assigned in _names(scope) if renamed else ():
        names[name] = names.get(name, False) or is_assigned
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            nodes = value if isinstance(value, list) else [value]
            for index in range(len(nodes) - len(old) + 1):
                if type(nodes[index]) is not type(old[0]):
                    continue
                match = _Match(names)
                part = slice(index, index + len(old))
                if match.same(old, nodes[part]):
                    yield _Place(module, where, scope, parent, field, part, match)


def _changed_module(fault: Fault) -> tuple[str, str]:
    """Find a fault by its function, in its room or anywhere, or else only by its old text, and
    replace that.
    """
    try:
        old, new = _parsed(fault.old, fault.new)
    except SyntaxError as error:
        raise NoPlaceError(f"no Python: {error}") from None
    last = fault.where.rpartition(".")[2]
    scopes = [(it, *scope) for it in _modules() if last in it.text for scope in it.scopes]
    named: list[tuple[_Module, str, ast.AST | None]] = [
        it for it in scopes if it[1].endswith(f".{fault.where}")
    ]
    whole = [(module, "", None) for module in _modules()]  # rarely needed, so parsed only then
    seen: list[_Place] = []
    for some, renamed in ((named, False), (named, True), (whole, False)):
        for room in ({fault.room}, {scope[0].room for scope in some}):
            found = [
                place
                for scope in some
                if scope[0].room in room
                for place in _places(*scope, old, renamed)
            ]
            if len({(id(place.parent), place.nodes.start) for place in found}) == 1:
                return found[0].module.path, found[0].changed(new)
            seen = seen or found
    told = f"in {_listed(seen)}, must be there once" if seen else "nowhere"
    functions = _listed(f"{module.path}{where.replace('.', ' ', 1)}" for module, where, _ in named)
    raise NoPlaceError(
        f"the function {fault.where} is {functions}; the old text is {told}: {fault.old!r}"
    )


def _parsed(*texts: str) -> list[list[ast.AST]]:
    """Return the nodes of each text: one expression if all texts are expressions, else
    statements.
    """
    trees = [ast.parse(text) for text in texts]
    if all(len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) for tree in trees):
        return [[tree.body[0].value] for tree in trees if isinstance(tree.body[0], ast.Expr)]
    return [list(tree.body) for tree in trees]
