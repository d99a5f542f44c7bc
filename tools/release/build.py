"""Builds a wheel for an older glibc than this machine's."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from release.files import DIST, GLIBC, ROOT, SHARED

# A user has torch, with its OpenMP runtime.
_EXCLUDED = "--exclude", SHARED, "--exclude", "libtorch_cpu.so"


def build() -> None:
    """Build this machine's wheel in dist, linked with stubs of the old glibc."""
    made = ROOT / "build/wheel"
    for old in made.glob("*.whl"):
        old.unlink()
    flag = f"cmake.define.CMAKE_MODULE_LINKER_FLAGS=-L{_stubs(ROOT / f'build/glibc-{GLIBC}')}"
    options = [
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
        f"--config-settings={flag}",
    ]
    _run("pip", "wheel", *options, "--wheel-dir", made, ROOT)
    (wheel,) = made.glob("*.whl")
    platform = f"manylinux_{GLIBC.replace('.', '_')}_{os.uname().machine}"
    # Raises if the library requires a newer glibc.
    _run(
        "auditwheel",
        "repair",
        *_EXCLUDED,
        "--only-plat",
        "--plat",
        platform,
        "--wheel-dir",
        DIST,
        wheel,
    )


def _stubs(folder: Path) -> Path:
    """Return a folder with libc.so, libm.so etc. of the old glibc; zig makes them when it links for
    that glibc.
    """
    if not folder.exists():
        with tempfile.TemporaryDirectory() as cache:
            source = Path(cache, "empty.c")
            source.touch()
            target = f"{os.uname().machine}-linux-gnu.{GLIBC}"
            where = {**os.environ, "ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache}
            output = Path(cache, "empty.so")
            _run(
                "ziglang",
                "cc",
                "-target",
                target,
                "-shared",
                "-o",
                output,
                source,
                "-lm",
                environment=where,
            )
            folder.mkdir(parents=True)
            for stub in Path(cache, "o").glob("*/lib*.so.*"):
                (folder / f"{stub.name.split('.so.')[0]}.so").write_bytes(stub.read_bytes())
    return folder


def _run(*command: str | Path, environment: dict[str, str] | None = None) -> None:
    subprocess.run([sys.executable, "-m", *command], check=True, env=environment)
