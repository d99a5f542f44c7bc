"""The checks of a release's files, and the facts that files of the repository repeat."""

from __future__ import annotations

import io
import re
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from release import files

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = files.version()
PURE = f"raglane-{VERSION}-py3-none-any.whl"
LINUX = f"raglane-{VERSION}-py3-none-manylinux_2_28_x86_64.whl"
WINDOWS = f"raglane-{VERSION}-py3-none-win_amd64.whl"
PACKAGE = ["raglane/__init__.py", "raglane/py.typed"]


def wheel(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")


@pytest.fixture
def dist(tmp_path: Path) -> Path:
    """A complete release, except that the source distribution is almost empty."""
    wheel(tmp_path / PURE, *PACKAGE)
    wheel(tmp_path / LINUX, *PACKAGE, *files.KERNELS, files.OPERATORS)
    with tarfile.open(tmp_path / f"raglane-{VERSION}.tar.gz", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo(f"raglane-{VERSION}/pyproject.toml"), io.BytesIO())
    return tmp_path


def found(dist: Path, tag: str | None = None) -> list[str]:
    return [problem for problem in files.problems(tag, dist) if ".tar.gz: without" not in problem]


def test_a_complete_release_has_no_problem(dist: Path) -> None:
    assert found(dist) == []
    wheel(dist / WINDOWS, *PACKAGE, *(name.replace(".so", ".dll") for name in files.KERNELS))
    assert found(dist) == []
    assert f"dist/raglane-{VERSION}.tar.gz: without CMakeLists.txt" in files.problems(None, dist)


def test_wrong_files_and_contents_are_named(dist: Path) -> None:
    missing, *rest = sorted(files.KERNELS)
    wheel(dist / PURE, *PACKAGE, "raglane/native/lib/libraglane_cpu.so")
    wheel(dist / LINUX, *PACKAGE, *rest, files.OPERATORS, "raglane.libs/libgomp-1.so.1")
    assert found(dist) == [
        f"dist/{PURE}: contains raglane/native/lib/libraglane_cpu.so",
        f"dist/{LINUX}: without {missing}",
        f"dist/{LINUX}: contains raglane.libs/libgomp-1.so.1",
    ]
    wheel(dist / WINDOWS, *PACKAGE, *files.KERNELS)
    assert f"dist/{WINDOWS}: without raglane/native/lib/libraglane_cpu.dll" in found(dist)
    (dist / WINDOWS).unlink()
    (dist / PURE).unlink()
    (dist / LINUX).rename(dist / "other.whl")
    foreign = f"dist/other.whl: not a file of version {VERSION}"
    assert found(dist) == [foreign, f"dist/{PURE} is missing", "dist has no wheel with kernels"]


def test_a_tag_requires_its_version_and_all_platforms(dist: Path) -> None:
    assert f"the tag is v9, but the version is {VERSION}" in found(dist, "v9")
    for platform in ("manylinux_2_28_aarch64", "macosx_11_0_arm64", "win_amd64"):
        assert f"dist has no wheel for {platform}" in found(dist, f"v{VERSION}")
    assert not [
        problem
        for problem in found(dist, f"v{VERSION}")
        if "the tag" in problem or "x86_64" in problem
    ]


def test_all_installs_every_extra_for_users() -> None:
    extras = PROJECT["optional-dependencies"]
    listed = re.fullmatch(r"raglane\[(.+)\]", *extras["all"])
    assert listed is not None
    assert {*listed[1].split(",")} == extras.keys() - {"all", "ray", "bench", "dev", "docs"}


def test_workflows_call_targets_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    called = {
        word
        for path in [ROOT / ".ci/run", *(ROOT / ".github/workflows").glob("*.yml")]
        for line in re.findall(r"^(?:\s*- run: )?make (.+)$", path.read_text(), re.MULTILINE)
        for word in re.findall(r"(?<!\S)[a-z][a-z-]*(?!\S)", line.split('"')[0])
    }
    assert called >= {"test", "check", "docs", "wheels", "release-files"}
    assert called <= targets


def test_versions_in_other_files_agree() -> None:
    ruff = re.findall(r"^ruff==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert re.findall(r"rev: v(.+)", (ROOT / ".pre-commit-config.yaml").read_text()) == ruff
    recipe = (ROOT / "tools/release/recipe.yaml").read_text()
    assert f'version: "{VERSION}"' in recipe
    for requirement in PROJECT["dependencies"]:
        assert f"- {requirement.replace('torch', 'pytorch').replace('>=', ' >=')}\n" in recipe
    text = re.sub("#.*", "", (ROOT / "tools/release/oldest.txt").read_text())
    oldest = text.replace(".*", "").replace("==", ">=")
    extras = {
        each.split(";")[0] for extra in PROJECT["optional-dependencies"].values() for each in extra
    }
    assert (
        set(PROJECT["dependencies"]) <= set(oldest.split()) <= extras.union(PROJECT["dependencies"])
    )
