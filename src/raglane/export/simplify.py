"""A translated graph with what need not be computed in every call computed once."""

from __future__ import annotations

from typing import Any

from raglane.errors import require

# Bytes of a constant: a protocol buffer holds no more.
_MOST = 2**31 - 1


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
