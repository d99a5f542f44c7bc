"""The kernels in ``csrc``, for CPUs: the schedule ``lanes`` at the speed of the machine."""

from __future__ import annotations

from raglane.kernels.cpu.backend import BACKEND, CpuBackend

__all__ = ["BACKEND", "CpuBackend"]
