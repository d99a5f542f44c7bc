"""The kernels' layers as an operator of torch without Python: operators.cpp, built where it is asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import raglane.native
from raglane._utils.files import write_file
from raglane.errors import ArgumentError, ExportError, MissingExtraError, message, quote
from raglane.native import missing_kernels
from raglane.native.library import location

__all__ = ["LIBRARY", "build_operators", "load_operators"]

LIBRARY = "libraglane_torch.so"

# Of torch's stable ABI what 2.11 has: the binary runs with that and every later one.
_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000ULL"


def build_operators(folder: str | Path) -> Path:
    """Build what runs the layers of a packaged model at the speed of the CPU kernels, without Python.

    Args:
        folder: where to; made where it is missing. Both libraries that stand there afterwards belong together:
            ``libraglane_torch.so``, which a program loads, and the kernels.

    Returns:
        The library to load, which is the argument ``operators`` of :func:`raglane.export.package`. It runs with torch
        2.11 and every later version.

    Raises:
        ExportError: there is no C++20 compiler, or it refuses.
        ArgumentError: a file is there in place of a folder.
        MissingExtraError: Raglane was installed without the kernels.
        OSError: the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     build_operators(folder).name
        'libraglane_torch.so'
    """
    kernels = location()
    if kernels is None:
        raise MissingExtraError(missing_kernels() or "")
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None or sys.platform != "linux":
        got = "no C++ compiler" if compiler is None else f"the system {sys.platform}"
        fix = "install g++, or set CXX; without operators, rl.export.package takes torch's own, which are slower"
        raise ExportError(message("operators", got, "a C++20 compiler on Linux", fix))
    target = Path(folder)
    if target.exists() and not target.is_dir():
        raise ArgumentError(
            message("folder", quote(str(folder)), "a folder, or the name of a new one", "name a folder")
        )
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        shutil.copy(kernels, place)
        built = Path(place, LIBRARY)
        done = subprocess.run(_command(compiler, kernels.name, built), capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"status {done.returncode}"]
            fix = "use g++ 11 or clang 14, or a later one"
            raise ExportError(message("operators", lines[0], "a compiler that builds them", fix))
        for file in (kernels, built):
            write_file(target / file.name, file.read_bytes())
    return target / LIBRARY


def _command(compiler: str, kernels: str, built: Path) -> list[str]:
    home = Path(torch.__file__).parent
    # An installation has the header beside the library, a working copy of the source has it in csrc/abi.
    folders = [Path(folder, "include") for folder in raglane.native.__path__]
    folders.append(Path(__file__).parents[3] / "csrc" / "abi")
    return [
        *(compiler, "-std=c++20", "-O2", "-shared", "-fPIC", _TARGET, str(Path(__file__).with_name("operators.cpp"))),
        *[f"-I{path}" for path in (home / "include", *folders)],
        *(f"-L{built.parent}", f"-l:{kernels}", f"-L{home / 'lib'}", "-ltorch_cpu", "-Wl,-rpath,$ORIGIN"),
        *("-o", str(built)),
    ]


def load_operators(path: Path) -> None:
    """Let torch know the operator ``raglane::layer``, and its shapes; nothing happens where it knows it."""
    rule, fix = f"the file {LIBRARY}, beside the kernels", "pass what rl.export.build_operators(folder) gives"
    if not path.is_file():
        raise ExportError(message("operators", quote(str(path)), rule, fix))
    if hasattr(torch.ops.raglane, "layer"):
        return
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        raise ExportError(message("operators", str(error).splitlines()[0], rule, fix)) from error
    torch.library.register_fake("raglane::layer")(_shapes)


def _shapes(
    cell: str,  # noqa: ARG001
    values: torch.Tensor,
    offsets: torch.Tensor,  # noqa: ARG001
    h: torch.Tensor,
    c: torch.Tensor | None,
    weights: list[torch.Tensor | None],  # noqa: ARG001
) -> tuple[torch.Tensor, ...]:
    output = values.new_empty(values.shape[0], h.shape[0] * h.shape[2])
    return output, torch.empty_like(h), values.new_empty(0) if c is None else torch.empty_like(c)
