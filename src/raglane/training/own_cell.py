"""A cell of one's own for ``raglane train``: a class in a file, which is run only while it is the file that was named.

``--cell path/to/file.py:MyCell`` names one. A run keeps the path and the SHA-256 of the file, as
``/path/to/file.py:MyCell@SHA256``, and never the code: what a run's folder holds is data, and no code that lies there
is ever run.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from raglane.errors import ArgumentError, CheckpointError, message, quote, shorten
from raglane.reading import check_file

if TYPE_CHECKING:
    from raglane.nn.recurrent.layer import RecurrentLayer

__all__ = ["check_place", "check_stored", "is_own", "label_of", "load_cell", "pinned", "place_of_error"]

# The modules that were made of files, by path and digest: a cell is one class in a process.
_LOADED: dict[tuple[str, str], ModuleType] = {}

_FORM = re.compile(r"(?P<path>[^\0]+\.py):(?P<name>[^\W\d]\w*)(?:@(?P<digest>[0-9a-f]{64}))?")


class _Named(NamedTuple):
    """What a choice of a cell says."""

    path: str
    name: str
    digest: str | None


def is_own(layer: str) -> bool:
    """Whether a choice of a cell names a class in a file.

    Example:
        >>> is_own("cells/leaky.py:Leaky"), is_own("gru"), is_own("leaky.py")
        (True, False, False)
    """
    return _FORM.fullmatch(layer) is not None


def label_of(layer: str) -> str:
    """What a cell is called in names of folders and in tables: its class, or its name.

    Example:
        >>> label_of("cells/leaky.py:Leaky"), label_of("gru")
        ('Leaky', 'gru')
    """
    return _parts(layer).name if is_own(layer) else layer


def pinned(layer: str) -> str:
    """A choice of a cell as a run keeps it: with the absolute path, and the SHA-256 of the file as it is now.

    Args:
        layer: the choice; that of a named cell stays.

    Raises:
        ArgumentError: the file cannot be read, or is not the one that the choice says.
    """
    if not is_own(layer):
        return layer
    path, name, _ = _parts(layer)
    return f"{os.path.abspath(path)}:{name}@{_read(layer)[1]}"


def check_stored(layer: str, folder: Path) -> None:
    """Refuse what a stored model says of its cell, unless it is a file elsewhere that is as it was in training.

    Args:
        layer: the choice of the cell.
        folder: of the model, or of the run.

    Raises:
        CheckpointError: the file is missing, was changed, lies within the folder, or nothing says what it was.
    """
    if not is_own(layer):
        return
    path, name, digest = _parts(layer)
    where = f"cell {name}"
    if not os.path.isabs(path) or digest is None:
        rule, fix = "an absolute path, and the SHA-256 of the file", "train anew"
        raise CheckpointError(message(where, quote(layer), rule, fix))
    check_place(layer, folder)
    try:
        _read(layer)
    except ArgumentError as error:
        raise CheckpointError(f"{where}: {error}") from error


def check_place(layer: str, folder: Path) -> None:
    """Refuse a file that lies where runs and models are kept.

    Args:
        layer: the choice of the cell.
        folder: of the run, or of a model.

    Raises:
        CheckpointError: the file lies within it.
    """
    if not is_own(layer):
        return
    path, name, _ = _parts(layer)
    # A run has its models in folders of its own.
    homes = (folder, *([folder.parent] if folder.name in ("best", "last") else []))
    if any(Path(path).resolve().is_relative_to(home.resolve()) for home in homes):
        rule = "no code is run that lies in the folder of a run or of a model"
        raise CheckpointError(message(f"cell {name}", _shown(path), rule, "keep the file elsewhere"))


def load_cell(layer: str) -> Callable[..., RecurrentLayer]:
    """What makes a layer of the class that is named, from ``(input_size, hidden_size, **options)``.

    Args:
        layer: the choice of the cell.

    Raises:
        ArgumentError: the file cannot be read or run, is another one than the choice says, or has no such class.
    """
    path, name, _ = _parts(layer)
    content, digest = _read(layer)
    module = _LOADED.get((path, digest)) or _run(path, content, digest)
    make = getattr(module, name, None)
    if not callable(make):
        classes = [key for key, part in vars(module).items() if callable(getattr(part, "step", None))]
        rule = f"a class with step(x_t, state), and {_shown(path)} has {', '.join(classes) or 'none'}"
        raise ArgumentError(message("layer", quote(name), rule, "name one that is there"))

    def layer_of(input_size: int, hidden_size: int, **options: Any) -> RecurrentLayer:
        from raglane.nn import Recurrent

        return Recurrent(make, input_size, hidden_size, **options)

    return layer_of


def place_of_error(error: BaseException) -> str | None:
    """The line of a user's own cell in which an error came up, and the error; None where it came up elsewhere.

    Args:
        error: any.
    """
    files = {path for path, _ in _LOADED}
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    return f"{lines[-1].filename}, line {lines[-1].lineno}: {_words(error)}" if lines else None


def _parts(layer: str) -> _Named:
    found = _FORM.fullmatch(layer)
    if found is None:
        rule = "a cell of the library, or a file of Python and a class in it, path/to/file.py:MyCell"
        raise ArgumentError(message("layer", quote(layer), rule, "name one of them"))
    return _Named(*found.groups())


def _read(layer: str) -> tuple[bytes, str]:
    """The file and its SHA-256, which is what the choice says, if it says one."""
    path, _, wanted = _parts(layer)
    try:
        check_file(Path(path))
        content = Path(path).read_bytes()
    except (OSError, ValueError) as error:
        got = f"{_shown(path)}: {getattr(error, 'strerror', None) or error}"
        raise ArgumentError(
            message("layer", got, "a file that can be read", "put it there, or name another")
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if wanted not in (None, digest):
        got = f"{_shown(path)} with the SHA-256 {digest[:12]}..., in training it had {str(wanted)[:12]}..."
        fix = "put the file back as it was, or train anew"
        raise ArgumentError(message("layer", got, "the file of the training, unchanged", fix))
    return content, digest


def _run(path: str, content: bytes, digest: str) -> ModuleType:
    """The file as a module of its own, which pickling finds by its name."""
    module = ModuleType(f"raglane_cell_{digest[:16]}")
    module.__file__ = path
    sys.modules[module.__name__] = module
    try:
        exec(compile(content, path, "exec"), vars(module))
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = error.lineno if isinstance(error, SyntaxError) else own[-1].lineno if own else None
        got = f"{_shown(path)}{'' if line is None else f', line {line}'}: {_words(error)}"
        raise ArgumentError(message("layer", got, "a file that Python can run", "correct it")) from error
    _LOADED[path, digest] = module
    return module


def _shown(path: str) -> str:
    """A path in a message, whole unless it is very long: where the file should be matters most."""
    return shorten(repr(path), 400)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error.msg if isinstance(error, SyntaxError) else error}"
