"""Models as files that run elsewhere."""

from __future__ import annotations

from raglane.export.signature import Layout
from raglane.export.to_onnx import Exported, onnx
from raglane.export.verify import Verified

__all__ = ["Exported", "Layout", "Verified", "onnx"]
