"""When the cpu kernels pack weights: the same bits for every way, and memory only where weights are
used again.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import raglane as rl
from cpu_networks import (
    DIVISIONS,
    LIBRARY,
    MATRIX_CELLS,
    POISON,
    Network,
    Use,
    assert_close,
    assert_same_bits,
    make,
)
from raglane.kernels import reference
from raglane.kernels.cpu.backend import BACKEND

TYPES = (torch.float32, torch.bfloat16)
# The largest difference from float64, see assert_close.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


def one_step(network: Network, sequences: int) -> Network:
    """Return the network on the first elements of sequences of three steps."""
    lengths = torch.ones(sequences, dtype=torch.int64)
    state = tuple(part[:, :sequences] for part in network.state)
    return replace(network, values=network.values[::3][:sequences], lengths=lengths, state=state)


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cell", MATRIX_CELLS)
def test_one_step_has_the_bits_of_the_first_of_several(
    cell: str,
    dtype: torch.dtype,
    isa: str,
    division: str,
    use: Use,
    any_threads: Callable[[int], None],
) -> None:
    """The panels of a single step are packed in turn, those of several steps before or in the
    first one, and stay for the others.
    """
    use(isa, POISON | DIVISIONS[division])
    with torch.no_grad():
        # Of 300 sequences some wait for a lane, so that each of two panels is used several times.
        for hidden, most in ((3, 5), (70, 300), (160, 5)):
            network = make(cell, [3] * most, (33, hidden, 0)).map(lambda t: t.to(dtype))
            any_threads(1)
            together = network.run(BACKEND)[0]
            exact = network.map(Tensor.double).run(reference.BACKEND)[0]
            assert_close([together], [exact], TOLERANCES[dtype])
            for threads in (1, 2):
                any_threads(threads)
                for sequences in (1, most):
                    output = one_step(network, sequences).run(BACKEND)[0]
                    assert_same_bits([output], [together[::3][:sequences]])


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("cell", MATRIX_CELLS)
def test_one_row_has_the_bits_of_several(
    cell: str,
    dtype: torch.dtype,
    isa: str,
    division: str,
    use: Use,
    any_threads: Callable[[int], None],
) -> None:
    """A single row takes two panels side by side; the last panels may be smaller or fewer."""
    any_threads(1)
    use(isa, POISON | DIVISIONS[division])
    with torch.no_grad():
        for hidden in (8, 33, 64, 100, 144):
            network = make(cell, [4] * 3, (7, hidden, 0)).map(lambda t: t.to(dtype))
            together = network.run(BACKEND)
            for sequence in range(3):
                rows = slice(4 * sequence, 4 * sequence + 4)
                wanted = [together[0][rows], *(s[:, sequence : sequence + 1] for s in together[1:])]
                assert_same_bits(network.only(sequence).run(BACKEND), wanted)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc is Linux's")
def test_weights_that_are_used_once_are_not_copied_whole(
    any_threads: Callable[[int], None],
) -> None:
    """The input weights of one sequence, and all weights of a step, need memory for a panel."""
    any_threads(1)
    wide, square = rl.nn.LSTM(16_384, 256), rl.nn.LSTM(1, 2048)
    steps, x_t = torch.randn(4, 1, 16_384), torch.randn(1, 1)
    state = (torch.zeros(1, 1, 2048), torch.zeros(1, 1, 2048))

    def growth(run: Callable[[], object]) -> float:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        before = _megabytes("VmRSS")
        run()
        return _megabytes("VmHWM") - before

    def megabytes(weight: Tensor) -> float:
        return weight.numel() * weight.element_size() / 2**20

    with torch.inference_mode():
        assert growth(lambda: wide(steps)) < 0.4 * megabytes(wide.get_parameter("weight_ih_l0"))
        assert growth(lambda: square.step(x_t, state)) < 0.4 * megabytes(
            square.get_parameter("weight_hh_l0")
        )


def _megabytes(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) / 1024
