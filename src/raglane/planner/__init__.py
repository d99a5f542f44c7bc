"""The planner: which backend, schedule and batches suit some lengths, a layer and a machine, and what they cost.

``calibration.py`` measures the layer on a few batches (``probe.py``) and fits a model of time to them (``model.py``);
``store.py`` keeps it. ``batches.py`` cuts the lengths into batches, ``rows.py`` predicts what each way to run the layer
(``ways.py``) takes on them, and ``advice.py`` chooses.
"""

from __future__ import annotations

from raglane.planner.advice import Plan, plan
from raglane.planner.rows import Row

__all__ = ["Plan", "Row", "plan"]
