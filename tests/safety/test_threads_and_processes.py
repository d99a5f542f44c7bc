"""Threads that write during a call, forked processes, and tensors next to guard pages."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import raglane as rl
from raglane.errors import RaglaneError
from raglane.native import missing_kernels
from scripts import Script

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))


@pytest.mark.parametrize(
    ("rounds", "operators"),
    [("'memory', 80, 1", True), ("'programs', 200, 1", True), ("'memory', 30, 300", False)],
)
def test_attacks_beside_guard_pages(script: Script, rounds: str, operators: bool) -> None:
    """Also without the operators in C++, which are optional."""
    without = (
        "" if operators else "from raglane.native import library; library.operators = lambda: None;"
    )
    done = script(f"import sys; {without} from fuzz.__main__ import play; sys.exit(play({rounds}))")
    assert done.returncode == 0, (done.stdout, done.stderr[-300:])


def test_guard_pages_end_a_process_that_passes_them(script: Script) -> None:
    for shift in (1, -1):
        done = script(
            "import ctypes, torch; from guarded import guarded;"
            f"x = guarded(torch.zeros(3), before={shift < 0});"
            f"ctypes.memmove(ctypes.create_string_buffer(12), x.data_ptr() + {shift}, 12)"
        )
        assert done.returncode < 0


@pytest.mark.usefixtures("two_threads")
def test_offsets_that_another_thread_writes_during_the_call() -> None:
    """The kernels read a copy: a call gives the results for that copy, or an error."""
    layer = rl.nn.LSTM(5, 16, backend="cpu")
    for layout in ("ragged", "packed"):
        given = rl.Ragged.from_flat(torch.randn(400, 5), lengths=[100] * 4)
        packed = given.to_packed()
        target = given.offsets if layout == "ragged" else packed.batch_sizes
        good, done = target.clone(), threading.Event()

        def write(
            target: Tensor = target, good: Tensor = good, done: threading.Event = done
        ) -> None:
            while not done.is_set():
                for number in (1 << 50, -(1 << 50), 7):
                    target.fill_(number)
                    target.copy_(good)

        writer = threading.Thread(target=write)
        writer.start()
        results = []
        try:
            for _ in range(300):
                try:
                    with torch.no_grad():
                        out: Any = layer(given if layout == "ragged" else packed)[0]
                    results.append(out.values if layout == "ragged" else out.data)
                except RaglaneError:
                    results.append(None)
        finally:
            done.set()
            writer.join()
        target.copy_(good)
        wanted: Any = layer(given if layout == "ragged" else packed)[0]
        right = wanted.values if layout == "ragged" else wanted.data
        assert any(result is not None and result.equal(right) for result in results)


AFTER_FORK = """
import os, signal, sys, raglane as rl
assert "raglane.kernels" not in sys.modules
import torch
torch.set_num_threads(2)
make = lambda: (rl.nn.{layer}, rl.Ragged.from_flat(torch.randn(1600, 64), lengths=[400] * 4))
if {used}:
    layer, batch = make()

def step():
    layer.zero_grad()
    out, _ = layer(batch)
    out.last().sum().backward()
    return [out.values.detach(), *(part.grad for part in layer.parameters())]

wanted = step() if {used} else None
torch.randn(600, 600) @ torch.randn(600, 600)  # so that OpenMP has threads to lose
child = os.fork()
if child == 0:
    signal.alarm(40)
    if wanted is None:
        layer, batch = make()
    found = step()
    assert torch.get_num_threads() == 1
    if wanted is not None:
        assert found[0].numpy().tobytes() == wanted[0].numpy().tobytes()
        for mine, theirs in zip(found, wanted):
            error = max(map(abs, (mine - theirs).flatten()[::97].tolist()))
            assert error < 1e-3, error
    if not layer.dropout:  # for which torch itself waits
        # The kernels have one thread whatever torch may use: they would wait for the parent's threads until the alarm.
        torch.set_num_threads(3)
        from raglane.native.library import library
        assert library().threads() == 1, library().threads()
        padded, lengths = batch.to_padded()
        with torch.no_grad():
            assert layer(batch)[0].values.numpy().tobytes() == found[0].numpy().tobytes()
            assert layer(padded.transpose(0, 1), lengths=lengths)[0].shape[:2] == (400, 4)
    os._exit(0)
os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_forward_and_backward_after_a_fork(script: Script) -> None:
    """OpenMP's threads do not survive a fork, whether the kernels were used before or not."""
    for layer in (
        "LSTM(64, 64, 2, dropout=0.5)",
        "GRU(64, 64, backend='cpu')",
        "SRU(64, 48, bidirectional=True)",
    ):
        for used in ("dropout" not in layer, False):
            done = script(AFTER_FORK.format(layer=layer, used=used))
            assert done.returncode == 0, (layer, used, done.stderr)


@pytest.mark.usefixtures("two_threads")
def test_denormal_numbers_on_every_thread() -> None:
    """The caller's setting applies to all threads of a call, so bits do not depend on the
    thread.
    """
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot take denormal numbers for 0")
    torch.set_flush_denormal(False)
    layer = rl.nn.RNN(64, 64, nonlinearity="relu", bias=False)
    with torch.no_grad():
        layer.get_parameter("weight_ih_l0").copy_(torch.eye(64) * 2.0**-130)
        layer.get_parameter("weight_hh_l0").zero_()
    given = rl.Ragged.from_flat(torch.rand(6400, 64) + 0.5, lengths=[100] * 64)
    found = []
    try:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            for threads in (1, 2):
                torch.set_num_threads(threads)
                with torch.no_grad():
                    found.append(layer(given)[0].values)
    finally:
        torch.set_flush_denormal(False)
    kept, kept_by_two, flushed, flushed_by_two = found
    assert kept.equal(kept_by_two)
    assert flushed.view(torch.int32).equal(flushed_by_two.view(torch.int32))
    assert int((kept == 0).sum()) == 0
    assert int(flushed.view(torch.int32).count_nonzero()) == 0


GRADIENTS_BESIDE_GUARD_PAGES = """
import torch
from fuzz.networks import KERNEL_LAYERS
from guarded import chosen_library, guarded
from raglane import Ragged
from raglane.native.library import library

for isa in library().isas:
    with chosen_library(library().with_isa(isa)):
        for make in KERNEL_LAYERS.values():
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                layer = make(3, 17, backend="cpu", dtype=dtype, bidirectional=True)
                for before in (False, True):
                    out, final = layer(Ragged.from_flat(torch.randn(6, 3).to(dtype), lengths=[1, 0, 5]))
                    results = [out.values, *(final if isinstance(final, tuple) else (final,))]
                    given = [guarded(torch.randn(part.shape).to(dtype), before=before) for part in results]
                    torch.autograd.grad(results, list(layer.parameters()), given, allow_unused=True)
"""


def test_gradients_that_come_in_beside_guard_pages(script: Script) -> None:
    """Of outputs and of final states."""
    done = script(GRADIENTS_BESIDE_GUARD_PAGES)
    assert done.returncode == 0, (done.returncode, done.stderr[-300:])
