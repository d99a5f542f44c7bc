"""The shared library of the CPU kernels where the system cannot map it."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from raglane.native import missing_kernels
from raglane.native.library import library

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))

# The address space ends behind what torch has mapped, until the first layer was called.
CODE = """
import resource, torch, raglane as rl
batch = rl.Ragged([torch.randn(length, 3) for length in (4, 0, 2)])
theirs, ours = torch.nn.LSTM(3, 4), rl.nn.LSTM(3, 4)
ours.load_state_dict(theirs.state_dict())
theirs(torch.randn(5, 2, 3))
pages = int(open("/proc/self/statm").read().split()[0])
before = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 16), before[1]))
reason = rl.native.missing_kernels()
resource.setrlimit(resource.RLIMIT_AS, before)
for _ in range(2):
    out, _ = ours(batch)
for sequence, output in zip(batch, out):
    if len(sequence):
        torch.testing.assert_close(output, theirs(sequence)[0])
print(reason, rl.explain(ours, batch).backend)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_a_library_that_cannot_be_mapped_is_one_warning_and_torch_runs_the_layers() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("the cpu kernels cannot be loaded: ")
    assert not found.stdout.rstrip().endswith("cpu")
    assert found.stderr.count("RuntimeWarning") == 1, found.stderr
    assert "Layers run on PyTorch's kernels, slower" in found.stderr


def test_the_library_describes_the_structs_of_its_calls() -> None:
    """Fields have no gaps, and each field of nested weights has its own entry."""
    structs = library().structs
    for name, (size, formats) in structs.items():
        assert struct.calcsize("=" + "".join(formats.values())) == size, name
    layer = structs["raglane_layer"].formats
    assert list(layer)[:3] == ["abi", "isa", "cell"]
    assert list(layer)[-1] == "grad_weights[1].skip"
    assert layer["weights[1].hidden"] == "q"
    assert next(iter(structs["raglane_cell_facts"].formats.items())) == ("name", "24s")
