"""A run from Python: :func:`raglane.load` reads one, :func:`raglane.fit` makes one; the commands are callers of both.

Import from the modules: nothing is imported here, so that a help text need not wait for PyTorch.
"""
