"""The backend ``cpu``: the compiled kernels of ``csrc``, which run the schedule ``lanes``.

``backend.py`` has the backend and its autograd function, ``layer_operator.py`` the same as
operators for compilers. ``layer.py`` calls the kernels for one layer; ``matrix.py`` and
``elementwise.py`` are the two kinds. ``programs.py`` runs steps of any cell, ``prepared.py`` layers
and programs of streams, ``transduction.py`` transducers, CTC, soft-DTW and edit distances,
``recurrences.py`` linear recurrences, ``steps.py`` steps of blocks around them, and
``gated_norm.py`` their norms.
"""

from __future__ import annotations

from raglane.kernels.cpu import elementwise, matrix  # noqa: F401 (each adds its class to KINDS)
