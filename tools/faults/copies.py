"""Copies of the repository that faults are put into; the working tree is never touched."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import raglane.native
from faults import child
from faults.place import ROOT

# What is not source at the top of the repository: what was built, and what hides (.git, .venv).
_NO_SOURCE = shutil.ignore_patterns(".*", "build", "dist", "runs")
# Seconds for a test, and for each one more: a fault may keep one from ending.
_LONGEST = 600


class Copy:
    """A copy in a folder of its own, which need not be there.

    Args:
        folder: a new one.
        of: what is copied: the repository, or a copy, whose files are linked, so that nothing must run there.
    """

    def __init__(self, folder: Path, of: Copy | None = None) -> None:
        self.folder = folder
        if of is not None:
            shutil.copytree(of.folder, folder, copy_function=os.link)
            return
        shutil.copytree(
            ROOT, folder, ignore=lambda place, names: _NO_SOURCE(place, names) if place == str(ROOT) else ()
        )
        shutil.copy(folder / "tools/faults/redirect.py", folder / "tools/sitecustomize.py")
        places = [Path(place, "lib") for place in raglane.native.__path__]
        for library in [path for place in places for path in sorted(place.glob("libraglane_cpu.*"))][:1]:
            self._put_kernels(library)

    def _put_kernels(self, library: Path) -> None:
        """Use this build of the kernels, and no other."""
        place = self.folder / "src/raglane/native/lib"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        shutil.copy(library, place)

    def _write(self, file: str, text: str) -> None:
        # Another file in place of one that other copies have too.
        (self.folder / file).unlink()
        (self.folder / file).write_text(text)

    def run(self, tests: list[str]) -> tuple[int | None, str]:
        """Run some tests in the copy until one fails.

        Returns:
            Pytest's exit code, None where it did not end, and what it said.
        """
        code, said = child.run(self.folder, ["-x", "-q", "-p", "no:cacheprovider", *tests], _LONGEST + 20 * len(tests))
        return code, said[-4000:]

    @contextmanager
    def changed(self, name: str, file: str, text: str) -> Iterator[Copy]:
        """A copy of this copy beside it, with another text in one file."""
        copy = Copy(self.folder.with_name(name), of=self)
        copy._write(file, text)
        try:
            yield copy
        finally:
            shutil.rmtree(copy.folder)

    @contextmanager
    def built(self, file: str, text: str) -> Iterator[None]:
        """Kernels of another text of one file, of which only what changed since the last time is compiled.

        Raises:
            RuntimeError: the compiler refuses it.
        """
        right = (self.folder / file).read_text()
        self._write(file, text)
        programs = Path(sys.executable).parent
        ninja = [f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"] if (programs / "ninja").exists() else []
        try:
            for step in (
                ["-S", ".", "-B", "build", "-G", "Ninja", *ninja],
                ["--build", "build", "--target", "raglane"],
            ):
                command = [str(programs / "cmake"), *step]
                done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False)
                if done.returncode != 0:
                    raise RuntimeError(done.stdout[-4000:] + done.stderr[-2000:])
            self._put_kernels(self.folder / "build/libraglane_cpu.so")
            yield
        finally:
            self._write(file, right)
