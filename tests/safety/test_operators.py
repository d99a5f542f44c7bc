"""No call of an operator of torch reads or writes memory other than that of its tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuzz import operators
from raglane.native import missing_kernels
from scripts import Ended, Script

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))

# A process prints each call before it makes it, so that the last line names that of a signal.
_SINGLES = """
from collections import Counter

import torch
from fuzz import operators
from guarded import release

torch.set_num_threads(1)
before = Counter()
for call in operators.calls():
    before[call.name] += 1
    if before[call.name] > 2:
        continue
    for place, change in operators.singles(call):
        print(call.name, change, "of leaf", place, flush=True)
        operators.check(call, {place: change})
        release()
"""
_DRAWN = """
import torch
from fuzz import operators
from guarded import release

torch.set_num_threads(1)
for number in range(600):
    print("round", number, flush=True)
    operators.play(number)
    release()
"""


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    with Script("fuzz.operators") as run:
        yield run


def _last(ended: Ended) -> str:
    return f"exit code {ended.returncode} after {ended.stdout[-200:]!r}: {ended.stderr[-2000:]}"


def test_calls_of_all_operators_are_recorded() -> None:
    """A new operator must be called by an ordinary program of the fuzzer."""
    registered = operators.names()
    assert len(registered) > 10
    assert registered == {call.name for call in operators.calls()}


@pytest.mark.parametrize("code", [_SINGLES, _DRAWN], ids=["one tensor", "several tensors"])
def test_changed_tensors(code: str, script: Script) -> None:
    ended = script(code, 300)
    assert ended.returncode == 0, _last(ended)


def test_an_access_beyond_a_tensor_ends_the_process(script: Script) -> None:
    """The guard pages work for tensors that are shorter than their shape."""
    code = "import torch\nfrom fuzz.operators import CHANGES\n"
    ended = script(code + "CHANGES['cut'](torch.ones(3, 5)).sum()", 60)
    assert ended.returncode < 0, _last(ended)
