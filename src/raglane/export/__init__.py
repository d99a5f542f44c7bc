"""Export of models to ONNX and AOTInductor.

- ``signature``: the inputs and outputs of an exported model, as tensors
- ``tracing``: a model as a graph of torch, and the module in which tracing failed
- ``to_onnx``, ``onnx_loops``: the graph as an ONNX file; layers as operators of ONNX
- ``aot``: the graph as a package of AOTInductor, with the kernels as an operator
- ``verify``: the comparison of an exported model with the model
"""

from __future__ import annotations

from raglane.export.aot import Packaged as Packaged
from raglane.export.aot import aot_inductor, copy_operators
from raglane.export.to_onnx import Exported as Exported
from raglane.export.to_onnx import onnx
from raglane.export.verify import Verified as Verified

__all__ = ["aot_inductor", "copy_operators", "onnx"]
