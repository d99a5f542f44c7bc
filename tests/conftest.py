"""Fixtures and options of all tests: the device, poisoned memory, and passive waiting of
threads.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# Threads of OpenMP wait actively by default. If tests run in parallel, they take the processor from
# the threads that they wait for: the kernels' tests took 2.5 times as long. Must be set before
# torch loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import typer.main
from hypothesis import HealthCheck, settings

import raglane.native
from commands import undraw
from scripts import Script

settings.register_profile(
    "raglane",
    deadline=None,  # a shared machine may pause
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("raglane")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="where the tensors of the tests live: cpu, cuda, cuda:1"
    )
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption(
        "--pages", action="store_true", help="run the tests of pages in a browser as well"
    )
    parser.addoption(
        "--kernels",
        help="a folder whose lib/ holds another build of the cpu kernels: test that one",
    )


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all tests are collected: imports and cases make little garbage
    if (folder := config.getoption("--kernels")) is not None:
        assert any(Path(folder, "lib").glob("libraglane_cpu.*")), (
            f"--kernels: no build of the kernels in {folder}/lib"
        )
        raglane.native.__path__.insert(0, folder)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    skips = {
        "slow": "takes minutes or data from elsewhere; run with --slow",
        "pages": "needs a browser and the built site; run make pages",
    }
    for name, reason in skips.items():
        for item in items:
            if item.get_closest_marker(name) and not config.getoption(f"--{name}"):
                item.add_marker(pytest.mark.skip(reason=reason))
    if config.getoption("--device") == "cpu":
        return
    for item in items:
        chosen = item.callspec.params.get("backend") if hasattr(item, "callspec") else None
        if item.get_closest_marker("host") or chosen in ("cpu", "program"):
            item.add_marker(pytest.mark.skip(reason="of the CPU alone"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Skip work that takes time and tests nothing."""
    # The garbage collector skips imported and collected objects: they took a quarter of the time of
    # tests that make many small objects.
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)
    # For a line of its log, torch flushes the processor's caches after each compilation, which
    # takes 20 ms.
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0
    # torch.manual_seed stores a seed, with the text of the stack, for each kind of device that is
    # not yet in use.
    if session.config.getoption("--device") == "cpu":
        unused: Any
        for unused in (torch.cuda, torch.xpu, torch.mtia):
            unused.manual_seed_all = lambda _: None


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session", autouse=True)
def own_cache() -> Iterator[None]:
    """Keep caches out of the user's folder, also in programs that tests start.

    Not in a numbered folder of pytest, which another pytest may remove.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        patch.setenv("RAGLANE_CACHE", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill new memory with NaN, as PyTorch does under deterministic algorithms, so that reading it
    fails a test.

    With ``warn_only``, operations without a deterministic version on a GPU remain usable.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def unsynced_files() -> Iterator[None]:
    """Do not wait for the disk, except in processes that tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which also raises for a closed file
        yield


@pytest.fixture(scope="session", autouse=True)
def one_command_line() -> Iterator[None]:
    """Let Typer build the commands once, which takes longer than to refuse a mistake, and commands
    draw no pictures.
    """
    with pytest.MonkeyPatch.context() as patch:
        undraw(patch)
        patch.setattr("typer.main.get_command", functools.cache(typer.main.get_command))
        yield


@pytest.fixture(autouse=True)
def default_device(device: torch.device) -> Iterator[None]:
    """Create layers and tensors of tests on the device under test."""
    if device.type == "cpu":
        yield
        return
    # By default cuDNN rounds float32 products to 10 bits, more than the tolerances.
    torch.backends.cudnn.allow_tf32 = False
    with device:
        yield


@pytest.fixture(autouse=True)
def own_randomness(request: pytest.FixtureRequest) -> None:
    """Seed each test by its name, so that it draws the same numbers when it runs alone."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def script() -> Iterator[Script]:
    """Run code in a new process."""
    with Script() as script:
        yield script


@pytest.fixture
def two_threads(any_threads: Callable[[int], None]) -> None:
    """Use two threads in torch and in the cpu kernels."""
    any_threads(2)


@pytest.fixture
def any_threads() -> Iterator[Callable[[int], None]]:
    """Return a function that sets the number of threads for the rest of the test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the instruction set of the cpu kernels and the division of their work."""
    from cpu_networks import LIBRARY

    def choose(isa: str = LIBRARY.isa, flags: int = 0) -> None:
        chosen = replace(LIBRARY.with_isa(isa), flags=flags)
        monkeypatch.setattr("raglane.native.library.library", lambda: chosen)

    return choose
