"""Passes over a graph of ONNX that torch has translated: Scans for the loops, and nothing computed twice."""

from __future__ import annotations

from typing import Any

import torch

from raglane.errors import require
from raglane.export.decompositions import exact_decompositions, exact_translations
from raglane.export.operators import OPSET, SCAN
from raglane.kernels.graph import Step

# Bytes of a constant: a protocol buffer holds no more.
_MOST = 2**31 - 1


def place_scans(model: Any, steps: list[Step]) -> None:
    """Put a Scan in the place of each node that stands for one."""
    ir: Any = require("onnx_ir", "export")
    domain, _, kind = SCAN.partition("::")
    placeholders = [node for node in model.graph if node.domain == domain and node.op_type == kind]
    traced: dict[Any, Any] = {}
    for number, node in enumerate(placeholders):
        step = steps[node.attributes["step"].as_int()]
        loop, collected = step.states + 2, len(node.outputs) - step.states
        direction = int(bool(node.attributes["reverse"].as_int()))
        key = _key(step, node)
        if key not in traced:
            traced[key] = _traced(step, node)
        scan = ir.node(
            "Scan",
            list(node.inputs[:loop]),
            attributes={
                "body": _body(traced[key].clone(), node.inputs[loop:], loop, f"scan_{number}"),
                "num_scan_inputs": 2,
                "scan_input_directions": [direction] * 2,
                "scan_output_directions": [direction] * collected,
            },
            num_outputs=len(node.outputs),
        )
        for old, new in zip(node.outputs, scan.outputs, strict=True):
            new.name, new.shape, new.type = old.name, old.shape, old.type
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [scan], node.outputs, scan.outputs)
    model.graph.opset_imports.pop(domain, None)


def _key(step: Step, node: Any) -> Any:
    """The key that steps with equal graphs share; a user's module may differ in more than its tensors."""
    if step.is_module:
        return id(step)
    shapes = tuple(str(value.shape[-1]) for value in node.inputs[: step.states + 1])
    return step.cell, step.need_states, shapes, tuple(weight.shape for weight in step.weights), step.present


def _body(graph: Any, weights: Any, loop: int, prefix: str) -> Any:
    """The graph of one step; it reads the weights where they lie, in the graph around it."""
    ir: Any = require("onnx_ir", "export")
    for inner, outer in zip(list(graph.inputs[loop:]), weights, strict=True):
        ir.convenience.replace_all_uses_with(inner, outer)
    del graph.inputs[loop:]
    # A name means one thing in a model, wherever it stands.
    for value in [*graph.inputs, *graph.initializers.values(), *[out for part in graph for out in part.outputs]]:
        value.name = f"{prefix}_{value.name}"
    graph.name = prefix
    graph.opset_imports.clear()
    return graph


def _traced(step: Step, node: Any) -> Any:
    """The graph of one step for any number of rows."""
    ir: Any = require("onnx_ir", "export")
    kind = {ir.DataType.FLOAT: torch.float32, ir.DataType.DOUBLE: torch.float64}[node.inputs[0].dtype]
    rows = 3  # any number but 1, which a trace takes for a constant
    *states, row = [torch.zeros(rows, int(value.shape[-1]), dtype=kind) for value in node.inputs[: step.states + 1]]
    is_real = torch.ones(rows, dtype=torch.bool)
    arguments = (*states, row, is_real, *[weight.detach() for weight in step.weights])
    dynamic = {0: torch.export.Dim.DYNAMIC}
    dims = tuple([dynamic] * (step.states + 2) + [None] * len(step.weights))
    program = torch.export.export(step, arguments, dynamic_shapes=(dims,), strict=False)
    translations = None
    if kind is torch.float64:
        program, translations = program.run_decompositions(exact_decompositions()), exact_translations()
    found: Any = torch.onnx.export(
        program,
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
        optimize=False,
        custom_translation_table=translations,
    )
    simplify(found.model)
    return found.model.graph


def simplify(model: Any) -> None:
    """Fold what depends on weights alone, compute once what is computed twice, and drop what only torch reads."""
    passes: Any = require("onnx_ir", "export").passes.common
    optimizer: Any = require("onnxscript.optimizer", "export")
    passes.InlinePass()(model)
    # What a fold makes constant may let another fold.
    for _ in range(2):
        optimizer.fold_constants(model, input_size_limit=_MOST, output_size_limit=_MOST)
        passes.RemoveUnusedNodesPass()(model)
    for one in (
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.ClearMetadataAndDocStringPass(),
        passes.NameFixPass(),
    ):
        one(model)
