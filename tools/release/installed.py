"""Runs in an environment that has only the wheel: the kernels are loaded, and on Linux share
torch's threads.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

CALL = "rl.nn.LSTM(3, 4)(rl.Ragged([torch.ones(2, 3)]))"
PROGRAMS = {
    "raglane": "import raglane",
    "torch": "import torch",
    "torch, raglane, and a first call": f"import torch, raglane as rl; {CALL}",
}


def main() -> None:
    """Print the backend, the libraries of OpenMP and the times of imports; raise if the kernels are
    not used.
    """
    import torch

    import raglane as rl
    from raglane.native.library import operators

    batch = rl.Ragged([torch.randn(length, 3) for length in (4, 0, 2)])
    layer = rl.nn.LSTM(3, 4)
    print(rl.explain(layer, batch))
    if rl.explain(layer, batch).backend != "cpu":
        raise SystemExit("the kernels are not used")
    layer(batch)[0].values.sum().backward()
    if sys.platform == "linux" and operators() is None:
        raise SystemExit("torch refuses the operators")
    if sys.platform == "linux":
        runtimes = {
            line.split()[-1]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "gomp" in line
        }
        print(*runtimes)
        if len(runtimes) != 1:
            raise SystemExit("there must be one OpenMP runtime")
    for name, program in PROGRAMS.items():
        print(f"{name}: {statistics.median(_seconds(program) for _ in range(5)):.2f} s")


def _seconds(program: str) -> float:
    """Return the time of a program without that of starting Python."""
    times = []
    for code in ("pass", program):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - start)
    return times[1] - times[0]


if __name__ == "__main__":
    main()
