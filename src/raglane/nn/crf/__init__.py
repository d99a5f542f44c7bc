"""Conditional random fields: labels that depend on their neighbours."""

from __future__ import annotations

from raglane.nn.crf.layer import CRF

__all__ = ["CRF"]
