"""Processes forked from one that has imported all that the commands need, for which a new interpreter takes seconds."""

from __future__ import annotations

import multiprocessing

__all__ = ["CONTEXT"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["raglane.cli", "raglane.training.run", "raglane.training.trainer", "raglane.report.figures"]
)
