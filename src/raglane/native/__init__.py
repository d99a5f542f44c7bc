"""The library compiled from ``csrc``, and checks of the memory that it reads.

``library.py`` loads the library, describes its structs and calls its functions; ``memory.py``
returns the addresses of tensors that C can read, or copies the others. ``machine.py`` has the facts
of the machine, with the instruction sets of the kernels.
"""

from __future__ import annotations

from raglane.native.library import missing_kernels

__all__ = ["missing_kernels"]
