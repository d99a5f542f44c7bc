"""The backends, which execute a cell on a schedule.

``contract.py`` has the request and the result of a backend, ``tensor_checks.py`` the checks of
tensors, and ``dispatch.py`` the choice of a backend. ``reference.py`` runs every cell in plain
torch, by the indexes of ``walk.py``, or by the loops of ``graph.py`` in an export; ``torch.py`` runs PyTorch's own
kernels, ``cpu/`` those of ``csrc``, ``program/`` traced steps, and ``triton/`` prints and launches
kernels for GPUs.
"""
