"""User-defined cells: a class in a Python file, whose code runs only if the user names the file in
this process.

``--cell path/to/file.py:MyCell`` and ``rl.load(..., cell=MyCell)`` name a cell. A run stores the
path and the SHA-256 of the file, as ``/path/to/file.py:MyCell@SHA256``, not the code. A stored name
is only compared with the file that the user named; it never causes a file to be read or run.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from raglane._utils.files import read_file
from raglane._utils.messages import argument, message, quote, shorten
from raglane.errors import ArgumentError, ArgumentTypeError, CheckpointError

if TYPE_CHECKING:
    from raglane.nn.recurrent.layer import RecurrentLayer


class NamedCode(NamedTuple):
    """The file of a cell that the user named, with its content at that time."""

    path: str
    content: bytes
    cell: type | None = None


class _CellSource(NamedTuple):
    """The parts of ``path/to/file.py:MyCell@SHA256``."""

    path: str
    name: str
    digest: str | None


# By SHA-256: the files that the user named in this process, and the modules that were run from
# them.
_NAMED: dict[str, NamedCode] = {}
_MODULES: dict[str, ModuleType] = {}

_FORM = re.compile(r"(?P<path>[^\0]+\.py):(?P<name>[^\W\d]\w*)(?:@(?P<digest>[0-9a-f]{64}))?")


def is_own(cell: str) -> bool:
    """Return True if a cell is a class in a file."""
    return _FORM.fullmatch(cell) is not None


def label_of(cell: str) -> str:
    """Return the name of a cell for folders and tables; for a user-defined cell that of its
    class.
    """
    return _parts(cell).name if is_own(cell) else cell


def name_cell(cell: object) -> str:
    """Register the file of a user-defined cell, so that :func:`load_cell` may run it, and return
    its full name.
    """
    if isinstance(cell, type):
        path = _source_of(cell)
        name = cell.__name__
        expected_digest = None
    elif not isinstance(cell, str):
        fix = "pass 'path/to/file.py:MyCell'"
        raise ArgumentTypeError(
            "cell", quote(cell), "a class, or a Python file and a class in it", fix
        )
    elif not is_own(cell):
        return cell
    else:
        path, name, expected_digest = _parts(cell)
    content = _read(path)
    digest = hashlib.sha256(content).hexdigest()
    if expected_digest not in (None, digest):
        raise ArgumentError(_changed(path, digest, str(expected_digest)))
    path = os.path.abspath(path)
    _NAMED[digest] = NamedCode(path, content, cell if isinstance(cell, type) else None)
    return f"{path}:{name}@{digest}"


def named_choice(cell: str) -> str:
    """Return the full name of a cell from a config file, if the user named the same file in this
    process.
    """
    if not is_own(cell):
        return cell
    path, name, expected_digest = _parts(cell)
    path = os.path.abspath(path)
    digest = next(
        (
            digest
            for digest, code in _NAMED.items()
            if code.path == path or digest == expected_digest
        ),
        None,
    )
    if digest is None or expected_digest not in (None, digest):
        fix = f"name it yourself, with {argument('cell', f'{path}:{name}')}"
        rule = "a cell of the library, or one that you named in this process, so that no code is run unasked"
        raise ArgumentError("cell", f"{quote(cell)} in a file", rule, fix)
    return f"{path}:{name}@{digest}"


def named_code(cell: str) -> NamedCode | None:
    """Return the code of a registered cell, for other processes; None for cells of the library."""
    return _NAMED[check_named(cell)] if is_own(cell) else None


def take_code(code: NamedCode | None) -> None:
    """Register the code that the user named in the parent process."""
    if code is not None:
        _NAMED[hashlib.sha256(code.content).hexdigest()] = code


def check_named(layer: str, cell: str | None = None) -> str:
    """Raise unless the user named the code of a run's cell; return its SHA-256, or "" for a cell of
    the library.
    """
    if not is_own(layer):
        if cell is not None:
            rule = f"the cell {layer} of the library, with which the model was trained"
            raise CheckpointError(
                "cell", quote(cell.partition("@")[0]), rule, f"leave {argument('cell')} out"
            )
        return ""
    path, name, digest = _parts(layer)
    if digest is None:
        rule = "a name with the SHA-256 of its file"
        raise CheckpointError(f"cell {name}", quote(layer), rule, "train again")
    if cell is None:
        if digest not in _NAMED:
            got = f"the file {_shown(path)}, named by the run"
            rule = "a file that you named in this process, so that no code is run unasked"
            fix = f"name it yourself, with {argument('cell', f'{path}:{name}')}"
            raise CheckpointError(f"cell {name}", got, rule, fix)
        return digest
    if not is_own(cell):
        rule = f"a Python file and its class {name}, with which the model was trained"
        raise CheckpointError("cell", quote(cell), rule, f"pass path/to/file.py:{name}")
    reference = _parts(cell)
    if reference.digest != digest:
        raise CheckpointError(
            f"cell {name}: {_changed(reference.path, str(reference.digest), digest)}"
        )
    if reference.name != name:
        rule = f"the class {name}, with which the model was trained"
        raise CheckpointError("cell", quote(reference.name), rule, "name this class")
    return digest


def check_outside(cell: str, folder: Path) -> None:
    """Raise if the file of a cell is in the folder of the run, which may be replaced or deleted."""
    if is_own(cell) and Path(_parts(cell).path).resolve().is_relative_to(folder.resolve()):
        path, name, _ = _parts(cell)
        rule = "a file outside of the folder of the run"
        raise ArgumentError(f"cell {name}", _shown(path), rule, "move the file elsewhere")


def load_cell(cell: str) -> Callable[..., RecurrentLayer]:
    """Return a function of ``(input_size, hidden_size, **options)`` that makes a layer of a
    user-defined cell.
    """
    digest = check_named(cell)
    path, name, _ = _parts(cell)
    code = _NAMED[digest]
    if code.cell is not None and code.cell.__name__ == name:
        return _maker(code.cell)
    module = _MODULES.get(digest) or _run(code, digest)
    make = getattr(module, name, None)
    if not callable(make):
        classes = [
            key for key, value in vars(module).items() if callable(getattr(value, "step", None))
        ]
        rule = (
            f"a class with step(x_t, state), and {_shown(path)} has {', '.join(classes) or 'none'}"
        )
        raise ArgumentError("cell", quote(name), rule, "name one of the classes")
    return _maker(make)


def _maker(make: Callable[..., Any]) -> Callable[..., RecurrentLayer]:
    from raglane.nn import Recurrent

    return functools.partial(Recurrent, make)


def place_of_error(error: BaseException) -> str | None:
    """Return the line of a user-defined cell that raised an error, and the error; None if it was
    raised elsewhere.
    """
    files = {_NAMED[digest].path for digest in _MODULES}
    lines = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files
    ]
    return f"{lines[-1].filename}, line {lines[-1].lineno}: {_words(error)}" if lines else None


def _parts(cell: str) -> _CellSource:
    match = _FORM.fullmatch(cell)
    if match is None:
        rule = "a cell of the library, or a Python file and a class in it, path/to/file.py:MyCell"
        raise ArgumentError("cell", quote(cell), rule, "pass one of them")
    return _CellSource(*match.groups())


def _source_of(cell: type) -> str:
    """Return the file that a class was imported from."""
    try:
        return inspect.getfile(cell)
    except (TypeError, OSError) as error:
        fix = "move it to a file, and import it"
        raise ArgumentTypeError("cell", quote(cell), "a class of a Python file", fix) from error


def _read(path: str) -> bytes:
    try:
        return read_file(Path(path))
    except (OSError, ValueError) as error:
        got = f"{_shown(path)}: {getattr(error, 'strerror', None) or error}"
        raise ArgumentError(
            "cell", got, "a readable file", "pass the path of a readable file"
        ) from error


def _changed(path: str, digest: str, trained: str) -> str:
    """Return the message for a file that has changed since the training."""
    got = f"{_shown(path)} with the SHA-256 {digest[:12]}..., in training it had {trained[:12]}..."
    return message(
        "cell", got, "the unchanged file of the training", "restore the file, or train again"
    )


def _run(code: NamedCode, digest: str) -> ModuleType:
    """Run code as a new module in ``sys.modules``, where pickle finds it."""
    path = code.path
    module = ModuleType(f"raglane_cell_{digest[:16]}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    try:
        exec(compile(code.content, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        line = _line_of(error, path)
        got = f"{_shown(path)}{'' if line is None else f', line {line}'}: {_words(error)}"
        raise ArgumentError("cell", got, "a file that Python can run", "correct it") from error
    _MODULES[digest] = module
    return module


def _line_of(error: BaseException, path: str) -> int | None:
    """Return the last line of a file that an error has come from, if any."""
    if isinstance(error, SyntaxError):
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == path]
    return lines[-1] if lines else None


def _shown(path: str) -> str:
    """Return a path for a message; only very long ones are shortened."""
    return shorten(repr(path), 400)


def _words(error: BaseException) -> str:
    return ". ".join(
        [
            f"{type(error).__name__}: {getattr(error, 'msg', error)}",
            *getattr(error, "__notes__", ()),
        ]
    )
