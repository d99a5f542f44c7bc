"""Export to ONNX: a model is traced, translated, compared in ONNX Runtime, and only then
written.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from raglane._utils.checks import check_flag, check_kind
from raglane._utils.files import check_new_file, write_file
from raglane._utils.messages import require
from raglane._utils.tracing import for_onnx
from raglane.errors import ExportError
from raglane.export import onnx_loops
from raglane.export.onnx_loops import OPSET, OnnxLoops
from raglane.export.signature import Layout, Signature
from raglane.export.tracing import ModuleTracker, check_dtype, evaluating, quiet, traced
from raglane.export.verify import Verified, check_agrees, in_runtime


@dataclass(frozen=True)
class Exported:
    """An exported model; :func:`onnx` describes the fields."""

    path: Path
    inputs: dict[str, list[str | int]]
    outputs: list[str]
    operators: dict[str, int]
    verified: Verified | None


def onnx(
    model: nn.Module,
    path: str | Path,
    *,
    example: Any,
    layout: Layout = "padded",
    verify: bool = True,
    metadata: Mapping[str, str] | None = None,
) -> Exported:
    """Write a model as an ONNX file that takes batches of any number of sequences of any lengths.

    LSTM, GRU and RNN become ONNX's own operators with ``sequence_lens``; other cells, projections
    and float64 become a Scan over the cell's equations. The file contains only operators of ONNX.
    Sequences of length 0 and batches without sequences are supported.

    Args:
        model: a layer of ``rl.nn``, or a module made of them; it is exported in evaluation mode.
        path: the file; an existing file is replaced after the export has succeeded.
        example: the argument of a call of the model: a Ragged, or a tuple of arguments, each a
            Ragged, a tensor, a tuple of tensors or None. A dimension of a tensor that is as long as
            the batch is dynamic in the file. Batches with the same lengths share one input of
            lengths or offsets.
        layout: the inputs that replace a Ragged. ``"padded"``: ``values (B, T, *features)`` and
            ``lengths (B,)`` int64; outputs per element are padded with zeros to the same ``T``.
            ``"flat"``: ``values (N, *features)`` and ``offsets (B + 1,)`` int64; outputs per
            element have ``N`` rows. A graph cannot raise an error, so it clamps lengths to 0 and
            ``T``, and offsets to increasing numbers from 0 to ``N``.
        verify: run the file in ONNX Runtime on random lengths, and compare it with the model,
            before it is written.
        metadata: texts by name, for the file's ``metadata_props``.

    Returns:
        The exported model, with its ``path``; ``inputs``, a dict from the name of each input to its
        dimensions (a name if dynamic, else a number); ``outputs``, their names; ``operators``, the
        number of nodes per operator, including those in Scans; and ``verified``, None with
        ``verify=False``, else the number of ``batches``, ``sequences`` and ``elements`` that were
        compared, and the ``largest_difference``, as a share of the largest number of its output.

    Raises:
        ExportError: a part of the model cannot be exported (the message has its name and the
            reason), or the file does not agree with the model. Nothing is written.
        ArgumentError, ArgumentTypeError: an invalid example, layout or path.
        MissingExtraError: onnx, onnxscript or, to verify, onnxruntime is not installed.

    Example:
        >>> import tempfile, raglane as rl
        >>> batch = rl.Ragged([torch.randn(4, 3), torch.randn(2, 3)])
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     exported = onnx(rl.nn.GRU(3, 8), f"{folder}/model.onnx", example=batch)
        ...     exported.inputs, exported.outputs
        ({'values': ['sequences', 'steps', 3], 'lengths': ['sequences']}, ['output_0', 'output_1'])
    """
    content, exported = content_of(model, path, example, layout, verify, metadata)
    write_file(exported.path, content)
    return exported


def content_of(
    model: nn.Module,
    path: str | Path,
    example: Any,
    layout: str,
    verify: bool,
    metadata: Mapping[str, str] | None,
) -> tuple[bytes, Exported]:
    """Return the content of the file of :func:`onnx`, for callers that write several files."""
    check_kind("model", model, nn.Module, "a torch.nn.Module", "pass a layer or a model")
    check_flag("verify", verify)
    target = Path(path)
    check_new_file("path", target)
    for module in ("onnx", "onnxscript", *(["onnxruntime"] if verify else [])):
        require(module, "export")
    signature = Signature.of(model, example, layout)
    check_dtype(model)
    with evaluating(model), quiet():
        program = _converted(model, signature)
        program.model.metadata_props.update(metadata or {})
        content = _bytes_of(program)
        verified = check_agrees(in_runtime(content), model, signature) if verify else None
    graph = program.model.graph
    operator_counts = Counter(node.op_type for node in graph.all_nodes())
    exported = Exported(
        path=target,
        inputs={value.name: _sizes(value.shape) for value in graph.inputs},
        outputs=[value.name for value in graph.outputs],
        operators=dict(sorted(operator_counts.items())),
        verified=verified,
    )
    return content, exported


def _sizes(shape: Any) -> list[str | int]:
    """Return the sizes of a shape, with the names of dynamic ones."""
    return [size if isinstance(size, int) else str(size.value) for size in shape]


def _converted(model: nn.Module, signature: Signature) -> Any:
    """Return the model as an ``onnx`` program of torch with Scans."""
    loops = OnnxLoops()
    is_wide = any(parameter.dtype is torch.float64 for parameter in model.parameters())
    with ModuleTracker(model) as tracker:
        with for_onnx():
            tracker.program = program = traced(model, signature, loops)
        program = _decomposed(program, is_wide)
        exported: Any = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            verbose=False,
            input_names=list(signature.inputs),
            output_names=signature.output_names,
            custom_translation_table=onnx_loops.exact_translations() if is_wide else None,
        )
        onnx_loops.place_scans(exported.model, loops.steps)
    onnx_loops.simplify(exported.model)
    _name_sizes(exported.model.graph, signature)
    return exported


def _name_sizes(graph: Any, signature: Signature) -> None:
    """Name the dynamic sizes of inputs, and those of outputs after them, in place of torch's
    symbols.
    """
    names: dict[str, str] = {}
    for value, dimensions in zip(graph.inputs, signature.inputs.values(), strict=True):
        for axis, name in dimensions.items():
            names[_symbol(value.shape[axis])] = _symbol(name)
            value.shape[axis] = name
    steps = (1, "steps") if signature.layout == "padded" else (0, "elements")
    for value in graph.outputs:
        for axis, size in enumerate(value.shape or ()):  # None if it is not known
            if isinstance(size, int):
                continue
            kind = steps[1] if axis == steps[0] else f"size_{axis}"
            for symbol in re.findall(r"\b[su]\d+\b", str(size.value)):
                names.setdefault(symbol, f"{value.name}_{kind}")
            value.shape[axis] = re.sub(
                r"\b[su]\d+\b", lambda found: names[found[0]], str(size.value)
            )


def _symbol(size: Any) -> str:
    """Return the symbol of a size such as ``s92 + 1``, the number of offsets."""
    return str(getattr(size, "value", size)).removesuffix(" + 1")


def _decomposed(program: Any, is_wide: bool) -> Any:
    table = {
        **onnx_loops.decompositions(),
        **(onnx_loops.exact_decompositions() if is_wide else {}),
    }
    targets = {node.target for node in program.graph.nodes}
    return program.run_decompositions(table) if is_wide or targets & table.keys() else program


def _bytes_of(program: Any) -> bytes:
    ir: Any = require("onnx_ir", "export")
    try:
        proto = ir.to_proto(program.model)
        # Readers infer the shapes of intermediate values, and tools that rewrite a file may
        # invalidate them.
        del proto.graph.value_info[:]
        content: bytes = proto.SerializeToString()
    except ValueError as error:
        rule = "at most 2 GB, the limit of one file"
        fix = "export a smaller model"
        raise ExportError("model", str(error).splitlines()[0], rule, fix) from error
    return content
