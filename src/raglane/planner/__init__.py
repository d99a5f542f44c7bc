"""The planner: which backend, schedule and batches suit some lengths, a layer and a machine, and what they cost.

``calibration.py`` measures the layer on a few batches (``probe.py``), fits a model of time to them (``model.py``) and
keeps it. ``rows.py`` cuts the lengths into batches and predicts what each way to run the layer takes on
them, ``advice.py`` chooses, and ``words.py`` shows the plan.
"""

from __future__ import annotations

from raglane.planner.advice import Plan, plan
from raglane.planner.rows import Row

__all__ = ["Plan", "Row", "plan"]
