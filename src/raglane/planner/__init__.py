"""The planner recommends a backend, a schedule and batches for a layer, a list of lengths and a
machine.

``calibration.py`` measures the layer on a few batches (``probe.py``), fits a model of time
(``model.py``) and caches it. ``predicted.py`` divides the lengths into batches and predicts their cost
for each way to run the layer, ``advice.py`` chooses, ``texts.py`` formats the plan, and
``bench.py`` compares layers with PyTorch's.
"""

from __future__ import annotations

from raglane.planner.advice import Plan, plan
from raglane.planner.predicted import Row

__all__ = ["Plan", "Row", "plan"]
