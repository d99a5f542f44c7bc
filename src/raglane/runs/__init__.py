"""Runs: :func:`raglane.fit` trains one, :func:`raglane.load` reads one, and the commands call both.

Nothing is imported here, so that help texts do not import torch.
"""
