"""Any cell on the cpu kernels, as a program made of its equations in plain torch."""

from raglane.kernels.program.backend import BACKEND
from raglane.kernels.program.steps import warn

__all__ = ["BACKEND", "warn"]
