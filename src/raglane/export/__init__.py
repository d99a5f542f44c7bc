"""Models as files that run elsewhere."""

from __future__ import annotations

from raglane.export.aot import Packaged, build_operators, package
from raglane.export.to_onnx import Exported, onnx
from raglane.export.verify import Verified

__all__ = ["Exported", "Packaged", "Verified", "build_operators", "onnx", "package"]
