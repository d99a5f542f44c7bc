"""What every test shares: the device, memory that is never zero by luck, and threads that wait asleep."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

# A thread that waits for another asks again and again, unless OpenMP is told otherwise before torch loads it. Where
# tests run side by side, it then takes the processor from the one that it waits for: the kernels' tests took 2.5 times
# as long. Who sets it chooses.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

import raglane.native
from scripts import Script

settings.register_profile(
    "raglane",
    deadline=None,  # a shared machine pauses when it likes
    max_examples=25,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("raglane")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the tensors of the tests live: cpu, cuda, cuda:1")
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")
    parser.addoption("--pages", action="store_true", help="run the tests of pages in a browser as well")
    parser.addoption("--kernels", help="a folder whose lib/ holds another build of the cpu kernels: test that one")


def pytest_configure(config: pytest.Config) -> None:
    if (folder := config.getoption("--kernels")) is not None:
        assert any(Path(folder, "lib").glob("libraglane_cpu.*")), f"--kernels: no build of the kernels in {folder}/lib"
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


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave out what takes time and shows nothing."""
    # What was imported and collected stays: to look through it for garbage, again and again, took a quarter of the time
    # of tests that make many small objects.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    # For a line of a log, torch flushes the processor's caches after each compilation: 20 ms.
    guards: Any = sys.modules.get("torch._dynamo.guards")
    if hasattr(guards, "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session", autouse=True)
def own_cache() -> Iterator[None]:
    """Keep what is measured of this machine out of the user's folder; programs that tests start do the same.

    A folder that pytest numbers would not do: of many pytests at once, one clears away what another still uses.
    """
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        patch.setenv("RAGLANE_CACHE", folder)
        yield


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill what ``torch.empty`` gives with NaN, so that reading memory nobody wrote fails a test.

    PyTorch does so under deterministic algorithms; ``warn_only`` keeps operations that have no deterministic
    version on a GPU usable.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session", autouse=True)
def unsynced_files() -> Iterator[None]:
    """Do not wait for the disk: no test pulls the plug. Processes that tests start do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses what is no open file, as fsync does
        yield


@pytest.fixture(autouse=True)
def default_device(device: torch.device) -> Iterator[None]:
    """Make what the tests create, layers and tensors alike, live on the device under test."""
    if device.type == "cpu":
        yield
        return
    # cuDNN rounds float32 products to 10 bits unless told not to, which no comparison here allows for.
    torch.backends.cudnn.allow_tf32 = False
    with device:
        yield


@pytest.fixture(autouse=True)
def own_randomness(request: pytest.FixtureRequest) -> None:
    """Seed each test by its name: numbers of its own, and the same ones when it runs again alone."""
    torch.manual_seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def script() -> Iterator[Script]:
    """Run code in a process of its own."""
    with Script() as script:
        yield script


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Let torch, and with it the cpu kernels, use two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the cpu kernels' instruction set and how they divide the work, for one test."""
    from cpu_networks import LIBRARY

    def choose(isa: str = LIBRARY.isa, flags: int = 0) -> None:
        chosen = replace(LIBRARY.with_isa(isa), flags=flags)
        monkeypatch.setattr("raglane.native.library.library", lambda: chosen)

    return choose
