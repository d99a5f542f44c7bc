"""Export of models to ONNX and AOTInductor."""

from __future__ import annotations

from raglane.export.aot import Packaged as Packaged
from raglane.export.aot import build_operators, package
from raglane.export.to_onnx import Exported as Exported
from raglane.export.to_onnx import onnx
from raglane.export.verify import Verified as Verified

__all__ = ["build_operators", "onnx", "package"]
