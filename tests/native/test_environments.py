"""Installations and systems on which the kernels cannot run, or run with the threads of other
libraries.
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import raglane as rl
from raglane.native import library as native
from raglane.native import missing_kernels
from scripts import Script

OF_TORCH = Path(torch.__file__).parent / "lib"
needs_kernels = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))
NUMBERS = {} if missing_kernels() else native.library().numbers


@pytest.fixture(autouse=True)
def reloaded() -> Iterator[None]:
    """The library is loaded again in each test, and after it."""
    cached = (native._mapped, native.library, native.cell_facts)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def check_answers() -> str:
    """Compare a new layer with torch's, and return the backend with its reason."""
    theirs, ours = torch.nn.LSTM(3, 4), rl.nn.LSTM(3, 4)
    ours.load_state_dict(theirs.state_dict())
    sequences = [torch.randn(length, 3) for length in (4, 0, 2)]
    batch = rl.Ragged(sequences)
    explained = str(rl.explain(ours, batch))
    for sequence, output in zip(sequences, ours(batch)[0], strict=True):
        if len(sequence):
            torch.testing.assert_close(output, theirs(sequence)[0])
    return explained


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (
            "libgomp.so.1: cannot open shared object file: No such file or directory",
            "Install the OpenMP runtime",
        ),
        (
            "Error loading shared library ld-linux-x86-64.so.2: No such file or directory",
            "Reinstall raglane",
        ),  # musl's
    ],
)
def test_explain_states_why_the_library_cannot_be_loaded(
    error: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ctypes.CDLL", Mock(side_effect=OSError(error)))
    monkeypatch.setattr(native, "location", lambda: Path("libraglane_cpu.so"))
    with pytest.warns(RuntimeWarning, match="Layers run on PyTorch's kernels, slower"):
        explained = check_answers()
    assert explained.startswith(
        "backend torch, schedule packed: auto takes the fastest backend that runs this; "
    )
    assert explained.count(f"the cpu kernels cannot be loaded: {error}. {fix}") == 1
    assert "\n" not in explained


def test_a_damaged_library_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / "libraglane_cpu.so"
    damaged.write_text("no library")
    monkeypatch.setattr(native, "location", lambda: damaged)
    with pytest.warns(RuntimeWarning, match="cannot be loaded"):
        assert "Reinstall raglane on this system" in check_answers()


@needs_kernels
@pytest.mark.parametrize(
    "changed", [{"ABI": -1}, {"location": lambda: OF_TORCH / "libc10.so"}], ids=["old", "other"]
)
def test_another_library_of_that_name_is_not_used(
    changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changed.items():
        monkeypatch.setattr(native, name, value)
    explained = check_answers()
    assert explained.startswith("backend torch")
    assert "are of another version of raglane. Reinstall raglane" in explained


@needs_kernels
@pytest.mark.skipif(
    platform.machine() != "x86_64", reason="on ARM the portable code has vector instructions"
)
def test_an_unknown_processor_runs_portable_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_numbers", lambda _: {"portable": 0})
    explained = check_answers()
    assert explained.startswith("backend cpu")
    assert "portable code, slower, because this processor has no AVX2" in explained


@needs_kernels
@pytest.mark.skipif("avx2" not in NUMBERS, reason="this processor has no set but the portable one")
def test_a_build_for_this_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_numbers", lambda _: {"avx2": NUMBERS["avx2"]})
    explained = check_answers()
    assert explained.startswith("backend cpu")
    assert "the kernels were built for this machine's processor alone: avx2" in explained


@needs_kernels
def test_a_build_for_another_machine_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_numbers", lambda _: {})
    explained = check_answers()
    assert explained.startswith("backend torch")
    assert "were built for another processor alone. Reinstall raglane on this machine" in explained


CALL = "rl.nn.GRU(3, 64)(rl.Ragged([torch.ones(n, 3) for n in range(40)]))[0].values.sum(dim=1)"


@needs_kernels
def test_a_wrong_number_of_threads_in_the_environment_is_ignored(script: Script) -> None:
    code = f"import torch, raglane as rl; torch.manual_seed(0); print({CALL}.tolist(), rl.native.missing_kernels())"
    printed = {_printed(code, OMP_NUM_THREADS=number) for number in ("0", "many")}
    printed.add(script(code).stdout)  # with two threads
    assert len(printed) == 1, printed
    assert next(iter(printed)).endswith("] None\n")


# Uses of other libraries with OpenMP that start its threads.
OTHERS = {
    "sklearn": "from sklearn.ensemble import HistGradientBoostingClassifier as C; C(max_iter=2).fit(x, y)",
    "lightgbm": "import lightgbm; lightgbm.LGBMClassifier(n_estimators=2, verbose=-1).fit(x, y)",
    "xgboost": "import xgboost; xgboost.XGBClassifier(n_estimators=2).fit(x, y)",
}
USES = {name: use for name, use in OTHERS.items() if find_spec(name)} | {
    "torch": "import torch; torch.randn(300, 300) @ torch.randn(300, 300)"
}
RUNTIMES = """
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if "libgomp" in line or "libomp" in line}
print(*sorted(runtimes))
"""
SAME_RUNTIME = """
import ctypes
both = rl.native.library.library().handle, ctypes.CDLL(torch._C.__file__)
assert len({ctypes.cast(each.omp_get_max_threads, ctypes.c_void_p).value for each in both}) == 1
"""


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
@pytest.mark.parametrize("order", [*permutations(USES)], ids="-".join)
def test_the_kernels_use_the_threads_of_torch(order: tuple[str, ...]) -> None:
    """The kernels load no second runtime, and call torch's, in every order of imports."""
    data = "x, y = [[0.0], [1.0]] * 50, [0, 1] * 50\n"
    without = "\n".join(USES[name] for name in order)
    with_kernels = without.replace(USES["torch"], f"import torch, raglane as rl; {CALL}")
    printed = _printed(data + with_kernels + SAME_RUNTIME + RUNTIMES)
    assert printed == _runtimes_without_kernels(data + "\n".join(USES.values()))
    assert "libgomp" in printed


@functools.cache
def _runtimes_without_kernels(code: str) -> str:
    """Return the runtimes that the other libraries load, whatever their order."""
    return _printed(code + RUNTIMES)


def _printed(code: str, **environment: str) -> str:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert found.returncode == 0, found.stderr
    return found.stdout
