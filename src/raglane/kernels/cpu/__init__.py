"""The backend ``cpu``: the compiled kernels of ``csrc``, which run the schedule ``lanes``."""

from __future__ import annotations

from raglane.kernels.cpu import elementwise, matrix  # noqa: F401 (each adds its class to KINDS)
