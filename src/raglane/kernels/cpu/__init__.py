"""The kernels in ``csrc``, for CPUs: the schedule ``lanes`` at the speed of the machine."""

from __future__ import annotations

from raglane.kernels.cpu import elementwise, matrix  # noqa: F401 (each adds its kind of layer)
