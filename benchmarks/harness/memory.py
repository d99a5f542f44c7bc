"""Peak memory of a training step, measured in a new process for each competitor.

That process is ``python -m harness.memory`` with the parameters of a case. It creates input and
parameters, runs everything once on a tiny batch, and resets the peak, which Linux counts in pages.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.cases import Case, Size
from raglane.errors import RaglaneError

__all__ = ["is_measurable", "peak_floats", "peak_of", "status"]

_STATUS, _PEAK_RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def is_measurable() -> bool:
    """Return True if the system counts the peak memory of a process and can reset it."""
    return os.access(_STATUS, os.R_OK) and os.access(_PEAK_RESET, os.W_OK)


def peak_floats(case: Case, competitor: str) -> float:
    """Return the peak memory of a training step without inputs and parameters, in floats of ``N *
    H``.
    """
    numbers = {
        "cell": case.cell,
        "size": [case.size.batch, case.size.hidden, case.size.input],
        "lengths": case.lengths.name,
        "threads": case.threads,
        "competitor": competitor,
    }
    command = [sys.executable, "-m", __name__, json.dumps(numbers)]
    # Python finds modules that are run with -m in the current folder.
    home = Path(__file__).parents[1]
    process = subprocess.run(command, cwd=home, capture_output=True, text=True, check=False)
    if process.returncode != 0:
        last = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        got = f"exit code {process.returncode}: {last}"
        raise RaglaneError(
            "memory", got, "measured by a process that ends with code 0", "use a smaller size"
        )
    return float(process.stdout.split()[-1])


def _measure(arguments: str) -> float:
    """Return the peak of a case, in floats of ``N * H``; called in the new process."""
    import torch

    from harness.batch import Batch
    from harness.competitors import COMPETITORS
    from harness.lengths import LENGTHS

    numbers = json.loads(arguments)
    torch.set_num_threads(numbers["threads"])
    size, lengths = Size(*numbers["size"]), LENGTHS[numbers["lengths"]]
    case = Case("memory", numbers["cell"], size, lengths, "train", "float32", numbers["threads"])
    competitor = COMPETITORS[numbers["competitor"]]
    batch = Batch.of(case)
    competitor.prepare(batch.with_lengths([3, 2]), "train", case.threads).call()
    return peak_of(competitor.prepare(batch, "train", case.threads).call) / (
        4 * batch.elements * batch.hidden
    )


def peak_of(call: Callable[[], object]) -> int:
    """Return the peak memory of this process in a call, in bytes beyond that before it."""
    gc.collect()
    before = status("VmRSS")
    _PEAK_RESET.write_text("5")
    call()
    return status("VmHWM") - before


def status(name: str) -> int:
    """Return bytes of the system's statistics of this process."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.stdout.write(f"{_measure(sys.argv[1])}\n")
