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
from raglane.errors import DimensionError, ExportError
from raglane.export.signature import Signature
from raglane.nn.recurrent.packed_weights import packed_weights
from raglane.ragged import Ragged

# Relative to the largest number of an output.
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
# If a difference is larger, the model is compared this often with itself, with other rounding of
# its weights.
_NUDGES = 3
# The difference of a file may be larger than those by this factor.
_SAFE = 8
_REPORT = "report it, with the model, or pass verify=False"
# The batches of a comparison, their longest sequence, and the most sequences of one.
_BATCHES = 4
_LONGEST = 300
_MOST = 64
# The smallest lengths, for models that do not accept shorter sequences.
_LEAST = (0, 1, 2, 4, 8, 16, 32, 64)


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
    names = {value.name for value in session.get_inputs()}

    def run(inputs: dict[str, Tensor]) -> Sequence[Any]:
        return session.run(
            None, {name: _array(value) for name, value in inputs.items() if name in names}
        )

    return run


def check_agrees(run: Run, model: nn.Module, signature: Signature) -> Verified:
    """Compare a file with its model on random batches."""
    names = signature.output_names
    packed = map(packed_weights, model.modules())
    if any(weights is not None and weights.is_int8 for weights in packed):
        # Not packed, because the file has the weights in float32 and not in int8.
        model = copy.deepcopy(model)
    source = random.Random()
    generator = torch.Generator()
    generator.seed()
    worst = 0.0
    sequences = 0
    elements = 0
    for drawn in _batches(source):
        lengths, leaves, output = _accepted(run, model, signature, drawn, generator)
        inputs = _inputs(signature, leaves)
        try:
            outputs = [
                _array(output) if isinstance(output, Tensor) else output for output in run(inputs)
            ]
        except Exception as error:
            raise _refusal(error) from error
        expected = _expected(output, signature, leaves)
        shares = [
            _difference(*pair, lengths) for pair in zip(names, outputs, expected, strict=True)
        ]
        _check_small(names, shares, expected, model, signature, leaves)
        worst = max([worst, *shares])
        sequences += len(lengths)
        elements += sum(lengths)
    return Verified(_BATCHES, sequences, elements, worst)


def _accepted(
    run: Run,
    model: nn.Module,
    signature: Signature,
    drawn: list[int],
    generator: torch.Generator,
) -> tuple[list[int], list[Ragged | Tensor], Any]:
    """Return lengths that the model accepts, a batch of them, and its output.

    A model with e.g. a maximum over steps has none for an empty sequence, and raises an error, as
    its file must.
    """
    for least in _LEAST:
        lengths = [max(length, least) for length in drawn]
        leaves = signature.fresh(lengths, generator)
        try:
            return lengths, leaves, model(*signature.rebuilt(leaves))
        except DimensionError as error:
            if least == _LEAST[-1]:
                raise
            refused = error
        try:
            run(_inputs(signature, leaves))
        except Exception:  # of any runtime
            continue
        rule = f"an error, as the model raises: {refused}"
        raise ExportError("model", f"outputs for lengths {lengths[:9]}", rule, _REPORT)
    raise AssertionError  # the last number is followed by a return or an error


def _inputs(signature: Signature, leaves: list[Ragged | Tensor]) -> dict[str, Tensor]:
    return dict(zip(signature.inputs, signature.tensors(leaves), strict=True))


def _batches(source: random.Random) -> list[list[int]]:
    """Return lengths of batches: one sequence, several, many, and only empty ones."""
    counts = [1, source.randint(2, 9), source.randint(10, _MOST)]
    batches = [[_length(source) for _ in range(count)] for count in counts]
    batches[0] = [source.randint(1, _LONGEST)]
    return [*batches, [0, 0]]


def _length(source: random.Random) -> int:
    """Return a length that is mostly short."""
    return source.randint(0, _LONGEST) if source.random() < 0.2 else source.randint(0, 20)


def _array(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().numpy()


def _expected(output: Any, signature: Signature, leaves: list[Ragged | Tensor]) -> list[Tensor]:
    """Return the model's outputs in the form of the file's."""
    starts = [value for value in leaves if isinstance(value, Ragged)]
    tensors: list[Tensor] = []
    for value in pytree.tree_leaves(output, is_leaf=lambda value: isinstance(value, Ragged)):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, Ragged):
            is_input = any(start.offsets is value.offsets for start in starts)
            pair = (
                (value.values, value.offsets) if signature.layout == "flat" else value.to_padded()
            )
            tensors += pair[:1] if is_input else pair
    return tensors


def _difference(name: str, array: Any, expected: Tensor, lengths: list[int]) -> float:
    """Return the largest difference relative to the largest number; infinity if non-finite numbers
    differ.
    """
    target = _array(expected)
    if array.shape != target.shape:
        got = f"shape {array.shape} for lengths {lengths[:9]}"
        raise ExportError(name, got, f"of the model's shape {target.shape}", _REPORT)
    if not np.issubdtype(target.dtype, np.floating):
        return 0.0 if bool((array == target).all()) else float("inf")
    finite = np.isfinite(target)
    if not np.array_equal(array[~finite], target[~finite], equal_nan=True):
        return float("inf")
    largest = float(np.abs(target[finite]).max(initial=0.0))
    gap = float(np.abs(array[finite] - target[finite]).max(initial=0.0))
    return gap / largest if largest else gap


def _check_small(
    names: list[str],
    shares: list[float],
    expected: list[Tensor],
    model: nn.Module,
    signature: Signature,
    leaves: list[Ragged | Tensor],
) -> None:
    """Raise ExportError if rounding does not explain a difference.

    Some networks amplify differences from step to step. Then the model with slightly changed
    weights differs as much, and the file may, too.
    """
    limits = [_TOLERANCE.get(output.dtype, 1e-5) for output in expected]
    if all(share <= limit for share, limit in zip(shares, limits, strict=True)):
        return
    for seed in range(_NUDGES):
        others = _expected(_nudged(model, seed)(*signature.rebuilt(leaves)), signature, leaves)
        for index, (name, output, other) in enumerate(zip(names, expected, others, strict=True)):
            if output.is_floating_point():
                change = _difference(name, _array(other), output, [])
                limits[index] = max(limits[index], _SAFE * change)
    for name, share, limit in zip(names, shares, limits, strict=True):
        if not share <= limit:
            got = "other numbers"
            if share < torch.inf:
                got = f"a difference of {share:.1e} of its largest number"
            rule = f"the result of the model, to rounding, {limit:.0e}"
            raise ExportError(name, got, rule, _REPORT)


def _nudged(model: nn.Module, seed: int) -> nn.Module:
    """Return a copy of a model with each number moved by one rounding up, down or not."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(seed)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            change = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.device)
            tensor.mul_(1 + change.to(tensor.dtype) * torch.finfo(tensor.dtype).eps)
    return model


def _refusal(error: Exception) -> ExportError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(".")
    fix = "compute it in another way, or export with verify=False for another runtime"
    return ExportError(
        "model", f"an error of the runtime: {reason}", "a graph that the runtime accepts", fix
    )
