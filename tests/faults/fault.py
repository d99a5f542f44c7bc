"""What a fault is, and what a copy of the repository is that one is put into."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import raglane.native
from faults import child

__all__ = ["ROOT", "Copy", "Fault", "NoPlaceError"]

ROOT = Path(__file__).parents[2]
# What is not source: what was built, and what hides (.git, .venv).
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "runs")
_LONGEST = 600


class NoPlaceError(Exception):
    """The text that a fault replaces is not there once: the source has changed, and the fault must change with it."""


@dataclass(frozen=True)
class Fault:
    """One text of one file, in place of another.

    Attributes:
        file: below the repository, such as ``src/raglane/errors.py``; one of ``csrc/`` means a build of the kernels.
        old: what stands there, exactly once. Short and distinctive, so that it lives through other changes.
        new: what somebody could write by mistake.
        tests: what must notice it: files, or tests as pytest names them, below ``tests/``, with blanks between.
    """

    file: str
    old: str
    new: str
    tests: str

    @property
    def needs_build(self) -> bool:
        """Whether it is one of the kernels in C++."""
        return self.file.startswith("csrc/")

    def changed(self, root: Path = ROOT) -> str:
        """The text of the file with the fault in it.

        Raises:
            NoPlaceError: the old text is not there, or there more than once.
        """
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        if (times := text.count(self.old)) != 1:
            raise NoPlaceError(
                f"{self.file} has the old text {times} times, not once; write the fault anew: {self.old!r}"
            )
        return text.replace(self.old, self.new)


class Copy:
    """A copy of the repository in a folder of its own; the working tree is never touched.

    Args:
        folder: a new one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(ROOT, folder, ignore=_LEFT_OUT)
        shutil.copy(folder / "tests/faults/redirect.py", folder / "tests/sitecustomize.py")
        built = [
            path for place in raglane.native.__path__ for path in sorted(Path(place, "lib").glob("libraglane_cpu.*"))
        ]
        if built:
            self.put_kernels(built[0])

    def put_kernels(self, library: Path) -> None:
        """Have the copy use this build of the kernels, and no other."""
        place = self.folder / "src/raglane/native/lib"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        shutil.copy(library, place)

    def run(self, tests: str) -> tuple[int | None, str]:
        """Run some tests in the copy until one fails.

        Returns:
            Pytest's exit code, None where it did not end, and what it said.
        """
        arguments = ["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in tests.split())]
        code, said = child.run(self.folder, arguments, _LONGEST)
        return code, said[-4000:]

    def build(self) -> None:
        """Build the kernels from the copy's own source, what has changed since the last time.

        Raises:
            RuntimeError: the compiler refuses it.
        """
        programs = Path(sys.executable).parent
        build = self.folder / "build"
        ninja = [f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}"] if (programs / "ninja").exists() else []
        steps = ["-S", ".", "-B", "build", "-G", "Ninja", *ninja], ["--build", "build", "--target", "raglane"]
        for step in steps:
            done = subprocess.run(
                [str(programs / "cmake"), *step], cwd=self.folder, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                raise RuntimeError(done.stdout[-4000:] + done.stderr[-2000:])
        self.put_kernels(build / "libraglane_cpu.so")
