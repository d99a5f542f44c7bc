"""A cell of one's own: a class in a file, whose code runs only where the user names the file in this process.

``--cell path/to/file.py:MyCell`` and ``rl.load(..., cell=MyCell)`` name one. A run keeps the path and the SHA-256 of
the file, as ``/path/to/file.py:MyCell@SHA256``, and never the code. That text is compared with the named file; nothing
is read or run because a run holds it.
"""

from __future__ import annotations

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

from raglane._utils.files import check_file
from raglane._utils.messages import argument, message, quote, shorten
from raglane.errors import ArgumentError, ArgumentTypeError, CheckpointError

if TYPE_CHECKING:
    from raglane.nn.recurrent.layer import RecurrentLayer


class NamedCode(NamedTuple):
    """The file of a cell that the user named, as it was read then."""

    path: str
    content: bytes
    cell: type | None = None


class _Choice(NamedTuple):
    """The parts of ``path/to/file.py:MyCell@SHA256``."""

    path: str
    name: str
    digest: str | None


# By SHA-256: the files that the user named in this process, and the modules made of them.
_NAMED: dict[str, NamedCode] = {}
_MODULES: dict[str, ModuleType] = {}

_FORM = re.compile(r"(?P<path>[^\0]+\.py):(?P<name>[^\W\d]\w*)(?:@(?P<digest>[0-9a-f]{64}))?")


def is_own(layer: str) -> bool:
    """True for a cell that is a class in a file."""
    return _FORM.fullmatch(layer) is not None


def label_of(layer: str) -> str:
    """The name of a cell in folders and tables: that of its class, or its own."""
    return _parts(layer).name if is_own(layer) else layer


def name_cell(cell: object) -> str:
    """Name the code of a cell, which :func:`load_cell` may run from now on, in this process."""
    if isinstance(cell, type):
        path, name, wanted = _source_of(cell), cell.__name__, None
    elif not isinstance(cell, str):
        fix = "pass 'path/to/file.py:MyCell'"
        raise ArgumentTypeError(message("cell", quote(cell), "a Python file and a class in it, or a class", fix))
    elif not is_own(cell):
        return cell
    else:
        path, name, wanted = _parts(cell)
    content = _read(path)
    digest = hashlib.sha256(content).hexdigest()
    if wanted not in (None, digest):
        raise ArgumentError(_changed(path, digest, str(wanted)))
    path = os.path.abspath(path)
    _NAMED[digest] = NamedCode(path, content, cell if isinstance(cell, type) else None)
    return f"{path}:{name}@{digest}"


def named_choice(layer: str) -> str:
    """Complete the choice of a cell that a file holds, if the user named the same file in this process."""
    if not is_own(layer):
        return layer
    path, name, wanted = _parts(layer)
    path = os.path.abspath(path)
    found = next((digest for digest, code in _NAMED.items() if code.path == path or digest == wanted), None)
    if found is None or wanted not in (None, found):
        fix = f"pass it with {argument('cell', f'{path}:{name}')}"
        raise ArgumentError(
            message(
                "cell", f"{quote(layer)} in a file", "given in the call, since code named by a file is not run", fix
            )
        )
    return f"{path}:{name}@{found}"


def named_code(layer: str) -> NamedCode | None:
    """The code of a cell that the user named, for the processes that train or predict with this one."""
    return _NAMED[check_named(layer)] if is_own(layer) else None


def take_code(code: NamedCode | None) -> None:
    """Take the code that the user named in the process that started this one."""
    if code is not None:
        _NAMED[hashlib.sha256(code.content).hexdigest()] = code


def check_named(layer: str, cell: str | None = None) -> str:
    """Refuse the cell of a run unless the user named the same code."""
    if not is_own(layer):
        if cell is not None:
            rule = f"the cell {layer} of the library, as in training"
            raise CheckpointError(message("cell", quote(_short(cell)), rule, f"leave {argument('cell')} out"))
        return ""
    path, name, digest = _parts(layer)
    if digest is None:
        rule = "stored with the SHA-256 of its file"
        raise CheckpointError(message(f"cell {name}", quote(layer), rule, "train again"))
    if cell is None:
        if digest not in _NAMED:
            got, rule = (
                f"the file {_shown(path)}, named by the run",
                "given in the call, since code named by a run is not run",
            )
            fix = f"pass it with {argument('cell', f'{path}:{name}')}"
            raise CheckpointError(message(f"cell {name}", got, rule, fix))
        return digest
    if not is_own(cell):
        rule = f"a Python file and its class {name}, as in training"
        raise CheckpointError(message("cell", quote(cell), rule, f"pass path/to/file.py:{name}"))
    given = _parts(cell)
    if given.digest != digest:
        raise CheckpointError(f"cell {name}: {_changed(given.path, str(given.digest), digest)}")
    if given.name != name:
        raise CheckpointError(
            message("cell", quote(given.name), f"the class {name}, as in training", "name this class")
        )
    return digest


def check_place(layer: str, folder: Path) -> None:
    """Refuse to train with a file that lies in the folder of the run, which may be replaced, moved or deleted."""
    if is_own(layer) and Path(_parts(layer).path).resolve().is_relative_to(folder.resolve()):
        path, name, _ = _parts(layer)
        rule = "in a file outside of the folder of the run"
        raise ArgumentError(message(f"cell {name}", _shown(path), rule, "keep the file elsewhere"))


def load_cell(layer: str) -> Callable[..., RecurrentLayer]:
    """A function that makes a layer of a user's class from ``(input_size, hidden_size, **options)``."""
    digest, (path, name, _) = check_named(layer), _parts(layer)
    code = _NAMED[digest]
    if code.cell is not None and code.cell.__name__ == name:
        return _maker(code.cell)
    module = _MODULES.get(digest) or _run(code, digest)
    make = getattr(module, name, None)
    if not callable(make):
        classes = [key for key, part in vars(module).items() if callable(getattr(part, "step", None))]
        rule = f"a class with step(x_t, state) in {_shown(path)}, which has {', '.join(classes) or 'none'}"
        raise ArgumentError(message("cell", quote(name), rule, "name one of these"))

    return _maker(make)


def _maker(make: Callable[..., Any]) -> Callable[..., RecurrentLayer]:
    def layer_of(input_size: int, hidden_size: int, **options: Any) -> RecurrentLayer:
        from raglane.nn import Recurrent

        return Recurrent(make, input_size, hidden_size, **options)

    return layer_of


def place_of_error(error: BaseException) -> str | None:
    """The line of a user's own cell in which an error came up, and the error; None where it came up elsewhere."""
    files = {_NAMED[digest].path for digest in _MODULES}
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{lines[-1].filename}, line {lines[-1].lineno}: {_words(error)}" if lines else None


def _parts(layer: str) -> _Choice:
    found = _FORM.fullmatch(layer)
    if found is None:
        rule = "a cell of the library, or a Python file and a class in it, path/to/file.py:MyCell"
        raise ArgumentError(message("cell", quote(layer), rule, "pass one of these"))
    return _Choice(*found.groups())


def _source_of(cell: type) -> str:
    """The file that a class was imported from."""
    try:
        return inspect.getfile(cell)
    except (TypeError, OSError) as error:
        fix = "define it in a file, and import it"
        raise ArgumentTypeError(message("cell", quote(cell), "a class defined in a Python file", fix)) from error


def _read(path: str) -> bytes:
    try:
        check_file(Path(path))
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        got = f"{_shown(path)}: {getattr(error, 'strerror', None) or error}"
        fix = "restore the file, or name another"
        raise ArgumentError(message("cell", got, "a readable file", fix)) from error


def _changed(path: str, found: str, trained: str) -> str:
    """The message for a file that is not the one of the training."""
    got = f"{_shown(path)} with the SHA-256 {found[:12]}..., in training it had {trained[:12]}..."
    return message("cell", got, "the unchanged file of the training", "restore the file, or train again")


def _run(code: NamedCode, digest: str) -> ModuleType:
    """The code as a module of its own, which pickling finds by its name."""
    path = code.path
    module = ModuleType(f"raglane_cell_{digest[:16]}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    try:
        exec(compile(code.content, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else own[-1].lineno if own else None
        got = f"{_shown(path)}{'' if line is None else f', line {line}'}: {_words(error)}"
        raise ArgumentError(message("cell", got, "a file that Python can import", "correct it")) from error
    _MODULES[digest] = module
    return module


def _short(layer: str) -> str:
    """A choice without its SHA-256."""
    return layer.partition("@")[0]


def _shown(path: str) -> str:
    """A path in a message, whole unless it is very long: where the file should be matters most."""
    return shorten(repr(path), 400)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
