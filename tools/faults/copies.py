"""Copies of the repository in which pytest runs with a fault. The working tree is never changed."""

from __future__ import annotations

import gc
import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from faults.place import ROOT

# At the top of the repository: hidden folders and what was built.
_NO_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "runs")
# Seconds for the first test and for each further one: a fault may cause an endless loop.
_LONGEST, _LONGER = 600, 20
# Packages that tests import, loaded once for all runs. Not hypothesis: pytest warns if a package
# whose assertions it rewrites is already loaded.
_PRELOADED = (
    "pytest torch._dynamo torch._inductor pandas pyarrow sklearn matplotlib rich typer".split()
)


class Copy:
    """A copy of the repository in a new folder, or of another copy with hard links, in which then
    nothing may run.
    """

    def __init__(self, folder: Path, of: Copy | None = None) -> None:
        self.folder = folder
        if of is not None:
            shutil.copytree(of.folder, folder, copy_function=os.link)
            return
        shutil.copytree(
            ROOT,
            folder,
            ignore=lambda place, names: _NO_SOURCE(place, names) if place == str(ROOT) else (),
        )
        shutil.copy(folder / "tools/faults/redirect.py", folder / "tools/sitecustomize.py")
        # Imported here: the processes that run pytest import this file, and must import the package
        # of the copy.
        import raglane.native

        found = [
            path
            for path in (Path(place, "lib") for place in raglane.native.__path__)
            if path.is_dir()
        ]
        for place in found[:1]:
            self._put_kernels(place)

    def _put_kernels(self, build: Path) -> None:
        """Use only this build of the kernels, and of torch's operators."""
        place = self.folder / "src/raglane/native/lib"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for library in build.glob("libraglane_*.*"):
            shutil.copy(library, place)

    def _write(self, file: str, text: str) -> None:
        # A new file: the existing one may be a hard link.
        (self.folder / file).unlink()
        (self.folder / file).write_text(text)

    def run(self, tests: list[str]) -> tuple[int | None, str]:
        """Run tests until one fails; return pytest's exit code, or None if it did not end, and its
        output.
        """
        # Torch reads this when it is imported by the server.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(_PRELOADED)
        printed, seconds = self.folder / "printed", _LONGEST + _LONGER * len(tests)
        child = server.Process(target=_run_pytest, args=(self.folder, tests, printed))
        child.start()
        child.join(seconds)
        if child.is_alive():
            child.kill()
            child.join()
            return None, f"no end within {seconds} seconds"
        return child.exitcode, printed.read_text(errors="replace")[-4000:]

    @contextmanager
    def changed(self, name: str, file: str, text: str) -> Iterator[Copy]:
        """Yield a copy of this copy with another text in one file."""
        copy = Copy(self.folder.with_name(name), of=self)
        copy._write(file, text)
        try:
            yield copy
        finally:
            shutil.rmtree(copy.folder)

    @contextmanager
    def built(self, file: str, text: str) -> Iterator[Copy]:
        """Yield this copy with kernels that are built with another text in one file.

        Raises:
            RuntimeError: the build fails.
        """
        import torch

        from raglane.native.library import library

        right = (self.folder / file).read_text()
        self._write(file, text)
        programs = Path(sys.executable).parent
        options = (
            [f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"] if (programs / "ninja").exists() else []
        )
        # Tests cannot run instruction sets that the processor lacks, and most of the build is
        # theirs.
        options += [] if "avx512" in library().isas else ["-Dcompiles_avx512=OFF"]
        options.append(f"-DRAGLANE_TORCH={torch.__path__[0]}")
        try:
            for step in (
                ["-S", ".", "-B", "build", "-G", "Ninja", *options],
                ["--build", "build", "--target", "raglane", "raglane_torch"],
            ):
                command = [str(programs / "cmake"), *step]
                done = subprocess.run(
                    command, cwd=self.folder, capture_output=True, text=True, check=False
                )
                if done.returncode != 0:
                    raise RuntimeError(done.stdout[-4000:] + done.stderr[-2000:])
            self._put_kernels(self.folder / "build")
            yield self
        finally:
            self._write(file, right)


def _run_pytest(folder: Path, tests: list[str], printed: Path) -> None:
    """Run pytest in a copy, and write its output to a file."""
    gc.freeze()  # the garbage collector then skips what the server imported
    output = os.open(printed, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    # The processes that tests start read sitecustomize.py there; this process has already read
    # another.
    os.environ["PYTHONPATH"] = str(folder / "tools")
    sys.path[:] = [
        str(folder / "tools"),
        *(path for path in sys.path if Path(path).name != "tools"),
    ]
    spec = importlib.util.spec_from_file_location("redirect", folder / "tools/sitecustomize.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert "raglane" not in sys.modules
    import pytest

    sys.exit(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests]))
