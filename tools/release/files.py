"""Checks the files in dist before they are published."""

from __future__ import annotations

import io
import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
GLIBC = "2.28"
# Torch's OpenMP runtime. A copy in the wheel would be a second pool of threads in the process.
SHARED = "libgomp.so.1"
# The system's libraries that the kernels may need; libstdc++ is linked statically.
_SYSTEM = {
    "libc.so.6",
    "libm.so.6",
    "libpthread.so.0",
    "libgcc_s.so.1",
    "ld-linux-x86-64.so.2",
    "ld-linux-aarch64.so.1",
}
_LIBRARY = "raglane/native/lib/libraglane_cpu.so"
# Files of a wheel with kernels; that of Windows has the library as .dll.
KERNELS = {
    _LIBRARY,
    "raglane/native/include/raglane.h",
    "raglane/native/include/recurrences.h",
    "raglane/native/include/channels.h",
    "raglane/native/lib/cmake/raglane/raglaneConfig.cmake",
}
# The layers as operators of torch, only for Linux.
OPERATORS = "raglane/native/lib/libraglane_torch.so"
# The platforms whose wheels a release must have.
_PLATFORMS = [f"manylinux_{GLIBC.replace('.', '_')}_{machine}" for machine in ("x86_64", "aarch64")]
_PLATFORMS += ["macosx_11_0_arm64", "win_amd64"]


def version() -> str:
    """Return ``__version__``."""
    return str(
        re.findall(
            r'^__version__ = "(.+)"$', (ROOT / "src/raglane/__init__.py").read_text(), re.MULTILINE
        )[0]
    )


def problems(tag: str | None, dist: Path = DIST) -> list[str]:
    """Return the reasons why the files cannot be published, with more rules if they are published
    under a tag.
    """
    start = f"raglane-{version()}"
    present = {path.name for path in dist.glob("*")}
    sources, pure = f"{start}.tar.gz", f"{start}-py3-none-any.whl"
    platforms = r"(manylinux|macosx)_[\w.]+|win_amd64"
    wheels = {
        name
        for name in present
        if re.fullmatch(rf"{re.escape(start)}-py3-none-({platforms})\.whl", name)
    }
    found = [
        f"dist/{name}: not a file of version {version()}"
        for name in sorted(present - {sources, pure} - wheels)
    ]
    found += [f"dist/{name} is missing" for name in (sources, pure) if name not in present]
    if not wheels:
        found.append("dist has no wheel with kernels")
    if sources in present:
        found += [
            f"dist/{sources}: {problem}" for problem in _source_problems(dist / sources, start)
        ]
    for name in sorted(wheels | {pure} & present):
        found += [
            f"dist/{name}: {problem}" for problem in _wheel_problems(dist / name, name in wheels)
        ]
    return found + (_tag_problems(tag, wheels) if tag else [])


def _tag_problems(tag: str, wheels: set[str]) -> list[str]:
    found = [] if tag == f"v{version()}" else [f"the tag is {tag}, but the version is {version()}"]
    if f"\n## {version()}" not in (ROOT / "CHANGELOG.md").read_text():
        found.append(f"CHANGELOG.md has no section {version()}")
    if "Repository" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get(
        "urls", {}
    ):
        found.append(
            "pyproject.toml has no address of the repository: set Repository in [project.urls]"
        )
    found += [
        f"dist has no wheel for {each}"
        for each in _PLATFORMS
        if not any(each in name for name in wheels)
    ]
    return found


def _source_problems(path: Path, start: str) -> list[str]:
    with tarfile.open(path) as archive:
        names = {name.removeprefix(f"{start}/") for name in archive.getnames()}
    tracked = subprocess.run(
        ["git", "ls-files", "src", "csrc", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    needed = {
        "CMakeLists.txt",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        *tracked.stdout.splitlines(),
    }
    return [f"without {name}" for name in sorted(needed - names)]


def _wheel_problems(path: Path, has_kernels: bool) -> list[str]:
    with zipfile.ZipFile(path) as archive:
        names = set(archive.namelist())
        content = archive.read(_LIBRARY) if _LIBRARY in names else b""
    suffix = ".dll" if path.stem.endswith("win_amd64") else ".so"
    kernels = {name.replace(".so", suffix) for name in KERNELS} if has_kernels else set()
    kernels |= {OPERATORS} if "manylinux" in path.name else set()
    needed = {"raglane/py.typed", "raglane/__init__.py", *kernels}
    found = [f"without {name}" for name in sorted(needed - names)]
    found += [
        f"contains {name}"
        for name in sorted(names - kernels)
        if re.search(r"\.(so|dll|dylib)\b", name)
    ]
    return found + (_library_problems(content) if content and "manylinux" in path.name else [])


def _library_problems(content: bytes) -> list[str]:
    """Return what the library needs and older systems lack, and what it exports."""
    from elftools.elf.elffile import ELFFile

    file = ELFFile(io.BytesIO(content))
    needed = {tag.needed for tag in file.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
    found = [f"needs {name}" for name in sorted(needed - _SYSTEM - {SHARED})]
    if SHARED not in needed:
        found.append(f"does not use {SHARED}")
    versions = {
        each.name
        for _, of_library in file.get_section_by_name(".gnu.version_r").iter_versions()
        for each in of_library
        if each.name.startswith("GLIBC_")
    }
    newest = tuple(map(int, GLIBC.split(".")))
    found += [
        f"needs {name}"
        for name in sorted(versions)
        if tuple(map(int, name[6:].split("."))) > newest
    ]
    symbols = file.get_section_by_name(".dynsym").iter_symbols()
    exported = {
        each.name
        for each in symbols
        if each["st_shndx"] != "SHN_UNDEF" and each["st_info"]["type"] == "STT_FUNC"
    }
    return found + [
        f"exports {name}" for name in sorted(exported) if not name.startswith("raglane_")
    ]
