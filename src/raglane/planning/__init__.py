"""Planning: what a batch costs, before anything runs."""

from __future__ import annotations

from raglane.planning.cost import Cost, cost

__all__ = ["Cost", "cost"]
