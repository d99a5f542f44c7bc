"""The kernels' own pool of threads, which RAGLANE_THREADS=own chooses."""

from __future__ import annotations

import os
import sys

import pytest

from raglane.native import missing_kernels
from scripts import Script

pytestmark = [
    pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels())),
    pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc"),
]

SETUP = """
import os, signal, threading, torch, raglane as rl
from raglane.native.library import library

torch.manual_seed(0)
layer = rl.nn.LSTM(16, 64, bidirectional=True, backend="cpu")
batch = rl.Ragged.from_flat(torch.randn(1601, 16), lengths=[400, 0, 1, 400, 800])

def run(threads, given=batch):
    torch.set_num_threads(threads)
    with torch.no_grad():
        return layer(given)[0].values.numpy().tobytes()

def count():
    return len(os.listdir("/proc/self/task"))

wanted = run(1)
before = count()
"""


def play(script: Script, code: str, pool: str = "own") -> str:
    done = script(SETUP + code, RAGLANE_THREADS=pool)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def test_bits_are_those_of_openmp(script: Script) -> None:
    code = """
out, _ = layer(batch)
torch.set_num_threads(3)
gradients = torch.autograd.grad(out.values.square().sum(), list(layer.parameters()))
print(library().own_threads, run(3) == wanted, *(part.double().sum().item() for part in gradients))
"""
    own, theirs = play(script, code).split(), play(script, code, "").split()
    assert own.pop(0) == "True"
    assert theirs.pop(0) in ("False", "True")  # a build without OpenMP
    assert own == theirs
    assert own[0] == "True"


def test_threads_start_when_a_call_is_worth_it(script: Script) -> None:
    code = """
run(3, batch[:3][1:])
assert count() == before, "a small call started threads"
for threads in (3, 2, 3):
    assert run(threads) == wanted
    assert count() == before + 2, count()
"""
    play(script, code)


def test_calls_at_the_same_time_have_different_threads(script: Script) -> None:
    code = """
found = []
callers = [threading.Thread(target=lambda: found.extend(run(2) for _ in range(30))) for _ in range(4)]
for each in callers: each.start()
for each in callers: each.join()
assert len(found) == 120 and set(found) == {wanted}
assert before < count() <= before + 4, count()
"""
    play(script, code)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_makes_its_own(script: Script) -> None:
    """Even if the parent forks while its threads compute."""
    code = """
run(3)
done = threading.Event()
busy = threading.Thread(target=lambda: [run(2) for _ in iter(done.is_set, True)])
busy.start()
for _ in range(5):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        assert run(1) == wanted
        before = count()
        assert run(4) == wanted
        assert count() == before + 3, (before, count())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
done.set()
busy.join()
assert run(3) == wanted
"""
    play(script, code)
