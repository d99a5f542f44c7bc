"""The shared library of the cpu kernels: where the system cannot map it, its structs, and its facts
about cells.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator

import pytest
import torch

from raglane.cells import CELLS
from raglane.cells.elementwise import ElementwiseWeights
from raglane.errors import MissingExtraError
from raglane.kernels.contract import Traits
from raglane.kernels.cpu.backend import BACKEND
from raglane.kernels.cpu.layer import kind_of
from raglane.native import library as native_library
from raglane.native import missing_kernels
from scripts import Script

needs_kernels = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))

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


@needs_kernels
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_a_library_that_cannot_be_mapped_is_one_warning_and_torch_runs_the_layers(
    script: Script,
) -> None:
    found = script(CODE)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("the cpu kernels cannot be loaded: ")
    assert not found.stdout.rstrip().endswith("cpu")
    assert found.stderr.count("RuntimeWarning") == 1, found.stderr
    assert "Layers run on PyTorch's kernels, slower" in found.stderr


@needs_kernels
def test_the_library_describes_the_structs_of_its_calls() -> None:
    """Fields have no gaps, and each field of nested weights has its own entry."""
    structs = native_library.library().structs
    for name, (size, formats) in structs.items():
        assert struct.calcsize("=" + "".join(formats.values())) == size, name
    layer = structs["raglane_layer"].formats
    assert list(layer)[:3] == ["abi", "isa", "cell"]
    assert list(layer)[-1] == "grad_weights[1].skip"
    assert layer["weights[1].hidden"] == "q"
    assert next(iter(structs["raglane_cell_facts"].formats.items())) == ("name", "24s")


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation without the kernels."""

    def fail() -> None:
        raise MissingExtraError("the cpu kernels are missing. Install them.")

    monkeypatch.setattr(native_library, "library", fail)
    native_library.cell_facts.cache_clear()
    yield
    native_library.cell_facts.cache_clear()


def traits(cell: str) -> Traits:
    return Traits(CELLS[cell], 5, 2, torch.float32, torch.device("cpu"))


@needs_kernels
def test_facts_match_the_cells() -> None:
    facts = native_library.cell_facts()
    assert [cell.number for cell in facts.values()] == list(range(len(facts)))
    assert facts
    for name, cell in facts.items():
        assert kind_of(name) is not None
        spec = CELLS[name]
        assert cell.is_elementwise == (spec.weights_type is ElementwiseWeights), name
        assert (cell.gates, 1 + cell.has_c) == (len(spec.gates), len(spec.states)), name
        gates, biases = (2 * cell.gates,), (2 * cell.biases,)
        recurrent, skip = (
            (2 * cell.factors,) if cell.factors else None,
            (2, 5) if cell.skips else None,
        )
        rest = [recurrent, biases, skip] if cell.is_elementwise else [(*gates, 2), biases, biases]
        assert list(spec.shapes(5, 2).values())[:4] == [(*gates, 5), *rest], name


@needs_kernels
def test_a_cell_that_the_kernels_do_not_have_is_refused_by_name() -> None:
    refusal = BACKEND.refuses(traits("peephole_lstm"), "lanes")
    assert refusal == "the cpu kernels do not support the cell 'peephole_lstm'"
    assert BACKEND.refuses(traits("gru"), "lanes") is None


@pytest.mark.usefixtures("no_kernels")
def test_without_kernels_every_cell_is_refused_for_that_reason() -> None:
    assert not native_library.has_cell("gru")
    for cell in CELLS:
        assert BACKEND.refuses(traits(cell), "lanes") == "the cpu kernels are missing. Install them"


@needs_kernels
def test_no_library_is_an_extension_module() -> None:
    """A free-threaded Python enables its lock when it imports an extension module that does not
    declare to run without; ctypes and torch load these libraries, which are no modules.
    """
    location = native_library.location()
    assert location is not None
    libraries = list(location.parent.glob("libraglane_*"))
    assert len(libraries) >= 1
    for library in libraries:
        assert b"PyInit_" not in library.read_bytes(), library.name
