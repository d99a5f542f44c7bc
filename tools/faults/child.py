"""One run of pytest in a copy of the repository, in a process that has torch already: importing it takes longer than
most tests. This file is imported in that process, so it must not import the package, whose source is the copy's.
"""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import sys
from pathlib import Path

__all__ = ["run"]

# What tests import most, where it is installed. Nothing whose assertions pytest rewrites (hypothesis): it warns of what
# is there before it.
_PRELOADED = [
    "pytest",
    "torch._dynamo",
    "torch._inductor",
    "pandas",
    "pyarrow",
    "sklearn",
    "matplotlib",
    "rich",
    "typer",
]


def run(folder: Path, arguments: list[str], seconds: float) -> tuple[int | None, str]:
    """Run pytest in a copy.

    Args:
        folder: of the copy.
        arguments: of pytest.
        seconds: after which it is ended.

    Returns:
        Pytest's exit code, None where it was ended, and what it printed.
    """
    # Torch reads it when it is imported, which is before the copy's process begins.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(_PRELOADED)
    printed = folder / "printed"
    child = server.Process(target=_run, args=(folder, arguments, printed))
    child.start()
    child.join(seconds)
    if child.is_alive():
        child.kill()
        child.join()
        return None, f"no end within {seconds:g} seconds"
    return child.exitcode, printed.read_text(errors="replace")


def _run(folder: Path, arguments: list[str], printed: Path) -> None:
    # What was imported stays: nobody looks through it for garbage.
    gc.freeze()
    output = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    # For the processes that tests start; in this one Python has looked for the file already.
    os.environ["PYTHONPATH"] = str(folder / "tools")
    sys.path[:] = [str(folder / "tools"), *(path for path in sys.path if Path(path).name != "tools")]
    spec = importlib.util.spec_from_file_location("redirect", folder / "tools/sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "raglane" not in sys.modules
    import pytest

    sys.exit(pytest.main(arguments))
