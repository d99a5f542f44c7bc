"""Facts of the machine that are stored with measured times."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from raglane.errors import MissingExtraError

_CPU = Path("/sys/devices/system/cpu")


def processors() -> int:
    """Return the number of processors that this process may use."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def load() -> float:
    """Return the load average of the last minute; NaN on systems without one."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return math.nan


def is_busy(average: float) -> bool:
    """Return True if the load average exceeds the number of processors."""
    return average > (os.cpu_count() or 1)


def facts(packages: Iterable[str] = ()) -> dict[str, str]:
    """Return the facts of the machine by name, with the versions of raglane, torch and
    ``packages``.
    """
    hardware = {
        "processor": cpu_name(),
        "processors": f"{processors()} for this process, {os.cpu_count()} in all",
        "caches": _caches() or "unknown",
        "instruction sets": f"raglane's kernels: {_isas()}; torch: {torch.backends.cpu.get_cpu_capability()}",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "Python": platform.python_version(),
    }
    return hardware | {name: _version(name) for name in ("raglane", "torch", *packages)}


def cpu_name() -> str:
    """Return the model of the processor, or at least its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    if platform.system() == "Darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        return answer.stdout.strip() or platform.machine()
    return platform.processor() or platform.machine()


def _caches() -> str:
    caches = []
    for folder in sorted(_CPU.glob("cpu0/cache/index*")):
        try:
            level, kind, size = (
                (folder / name).read_text().strip() for name in ("level", "type", "size")
            )
        except OSError:
            continue
        if kind != "Instruction":
            caches.append(f"L{level} {size}")
    return ", ".join(caches)


def _isas() -> str:
    from raglane.native.library import library

    try:
        kernels = library()
    except MissingExtraError:
        return "not built"
    return f"{kernels.isa} of {', '.join(kernels.isas)}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"
