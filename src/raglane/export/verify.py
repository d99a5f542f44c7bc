"""Comparison of an exported model with the model, on random lengths."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from raglane._utils.messages import require
from raglane.errors import ExportError
from raglane.export.signature import Signature
from raglane.nn.recurrent.freeze import frozen_weights
from raglane.ragged import Ragged

_TOLERANCE = {
    torch.float32: 1e-5,
    torch.float64: 1e-9,
}  # relative to the largest number of an output
# If a difference is larger, the model is compared this often with itself, with other rounding of
# its weights; and the difference of a file may be larger than that by this factor.
_NUDGES = 3
_SAFE = 8
_REPORT = "report it, with the model, or pass verify=False"
_BATCHES = 4
_LONGEST = 300
_MOST = 64


@dataclass(frozen=True)
class Verified:
    """The comparison of an exported file with its model; :func:`raglane.export.onnx` describes the
    fields.
    """

    batches: int
    sequences: int
    elements: int
    largest_difference: float


Run = Callable[[dict[str, Tensor]], Sequence[Any]]
"""Runs a file: takes inputs by name, and returns outputs as tensors or arrays."""


def in_runtime(content: bytes) -> Run:
    """Return a function that runs a file in ONNX Runtime."""
    engine: Any = require("onnxruntime", "export")
    options = engine.SessionOptions()
    options.log_severity_level = 4  # its warnings concern the writer of the graph
    try:
        session = engine.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    except Exception as error:
        raise _refusal(error) from error
    known = {part.name for part in session.get_inputs()}

    def run(inputs: dict[str, Tensor]) -> Sequence[Any]:
        return session.run(
            None, {name: _array(part) for name, part in inputs.items() if name in known}
        )

    return run


def check_agrees(run: Run, model: nn.Module, signature: Signature) -> Verified:
    """Compare a file with its model on random batches."""
    names = signature.output_names
    if any(
        weights is not None and weights.is_int8 for weights in map(frozen_weights, model.modules())
    ):
        model = copy.deepcopy(
            model
        )  # not frozen, because the file has the weights in float32 and not in int8
    source = random.Random()
    generator = torch.Generator()
    generator.seed()
    worst = 0.0
    sequences = 0
    elements = 0
    for lengths in _batches(source):
        leaves = signature.fresh(lengths, generator)
        given = dict(zip(signature.inputs, signature.tensors(leaves), strict=True))
        try:
            found = [_array(part) if isinstance(part, Tensor) else part for part in run(given)]
        except Exception as error:
            raise _refusal(error) from error
        wanted = _expected(model(*signature.rebuilt(leaves)), signature, leaves)
        shares = [_difference(*pair, lengths) for pair in zip(names, found, wanted, strict=True)]
        _check_small(names, shares, wanted, model, signature, leaves)
        worst = max([worst, *shares])
        sequences = sequences + len(lengths)
        elements = elements + sum(lengths)
    return Verified(_BATCHES, sequences, elements, worst)


def _batches(source: random.Random) -> list[list[int]]:
    """Return lengths of batches: one sequence, several, many, and only empty ones."""
    counts = [1, source.randint(2, 9), source.randint(10, _MOST)]
    found = [
        [
            source.randint(0, _LONGEST) if source.random() < 0.2 else source.randint(0, 20)
            for _ in range(count)
        ]
        for count in counts
    ]
    found[0] = [source.randint(1, _LONGEST)]
    return [*found, [0, 0]]


def _array(part: Tensor) -> Any:
    return part.detach().cpu().contiguous().numpy()


def _expected(output: Any, signature: Signature, leaves: list[Ragged | Tensor]) -> list[Tensor]:
    """Return the model's outputs in the form of the file's."""
    starts = [part for part in leaves if isinstance(part, Ragged)]
    found: list[Tensor] = []
    for part in pytree.tree_leaves(output, is_leaf=lambda part: isinstance(part, Ragged)):
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, Ragged):
            given = any(start.offsets is part.offsets for start in starts)
            pair = (part.values, part.offsets) if signature.layout == "flat" else part.to_padded()
            found += pair[:1] if given else pair
    return found


def _difference(name: str, array: Any, expected: Tensor, lengths: list[int]) -> float:
    """Return the largest difference relative to the largest number; infinity if non-finite numbers
    differ.
    """
    wanted = _array(expected)
    if array.shape != wanted.shape:
        got = f"shape {array.shape} for lengths {lengths[:9]}"
        raise ExportError(name, got, f"of the model's shape {wanted.shape}", _REPORT)
    if not np.issubdtype(wanted.dtype, np.floating):
        return 0.0 if bool((array == wanted).all()) else float("inf")
    finite = np.isfinite(wanted)
    if not np.array_equal(array[~finite], wanted[~finite], equal_nan=True):
        return float("inf")
    largest = float(np.abs(wanted[finite]).max(initial=0.0))
    gap = float(np.abs(array[finite] - wanted[finite]).max(initial=0.0))
    return gap / largest if largest else gap


def _check_small(
    names: list[str],
    shares: list[float],
    wanted: list[Tensor],
    model: nn.Module,
    signature: Signature,
    leaves: list[Ragged | Tensor],
) -> None:
    """Raise ExportError if rounding does not explain a difference.

    Some networks amplify differences from step to step. Then the model with slightly changed
    weights differs as much, and the file may, too.
    """
    limits = [_TOLERANCE.get(part.dtype, 1e-5) for part in wanted]
    if all(share <= limit for share, limit in zip(shares, limits, strict=True)):
        return
    for seed in range(_NUDGES):
        others = _expected(_nudged(model, seed)(*signature.rebuilt(leaves)), signature, leaves)
        for place, (name, part, other) in enumerate(zip(names, wanted, others, strict=True)):
            if part.is_floating_point():
                limits[place] = max(
                    limits[place], _SAFE * _difference(name, _array(other), part, [])
                )
    for name, share, limit in zip(names, shares, limits, strict=True):
        if not share <= limit:
            got = (
                f"a difference of {share:.1e} of its largest number"
                if share < torch.inf
                else "other numbers"
            )
            raise ExportError(
                name, got, f"the result of the model, to rounding, {limit:.0e}", _REPORT
            )


def _nudged(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of a model with each number moved by one rounding up, down or not."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for part in (*model.parameters(), *model.buffers()):
        if part.is_floating_point():
            change = torch.randint(-1, 2, part.shape, generator=generator).to(part.device)
            part.mul_(1 + change.to(part.dtype) * torch.finfo(part.dtype).eps)
    return model


def _refusal(error: Exception) -> ExportError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(".")
    fix = "compute it in another way, or export with verify=False for another runtime"
    return ExportError(
        "model", f"an error of the runtime: {reason}", "a graph that the runtime accepts", fix
    )
