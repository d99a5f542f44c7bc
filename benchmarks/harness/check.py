"""Compare the answers of competitors with ``reference`` in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from harness.competitors.base import Answer

__all__ = ["TOLERANCES", "find_fault"]

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float64: 1e-9}
"""The largest difference that a dtype may make, as a share of the largest number of the tensor in
float64.

The tolerance of float32 allows any order of the sums over elements in gradients of weights.
bfloat16 has 8 bits, and the state is rounded to it at every step.
"""


def find_fault(answer: Answer, truth: Answer, dtype: torch.dtype) -> str | None:
    """Return the first error of an answer, in words, or None.

    Example:
        >>> truth = Answer(torch.tensor([[1.0], [2.0]]), None)
        >>> find_fault(truth, truth, torch.float32) is None
        True
        >>> find_fault(Answer(torch.tensor([[1.0], [2.1]]), None), truth, torch.float32)
        'wrong output: off by 5.0e-02 of its largest number, and 1e-04 is allowed'
    """
    tolerance = TOLERANCES[dtype]
    for name, wanted, found in _pairs(answer, truth):
        if found is None:
            return f"wrong: no {name}"
        if found.shape != wanted.shape:
            return f"wrong {name}: shape {tuple(found.shape)}, and {tuple(wanted.shape)} is right"
        error = _error(found, wanted)
        # Negated, so that NaN is an error too.
        if not error <= tolerance:
            return f"wrong {name}: off by {error:.1e} of its largest number, and {tolerance:.0e} is allowed"
    return None


def _pairs(answer: Answer, truth: Answer) -> list[tuple[str, Tensor, Tensor | None]]:
    """Yield the name, the reference value and the actual value of each part."""
    pairs: list[tuple[str, Tensor, Tensor | None]] = [("output", truth.output, answer.output)]
    if answer.state is not None and truth.state is not None:
        found = [*answer.state, *[None] * (len(truth.state) - len(answer.state))]
        pairs += [
            (f"final state {name}", wanted, part)
            for name, wanted, part in zip("hc", truth.state, found, strict=False)
        ]
    pairs += [
        (f"gradient of {name}", wanted, answer.gradients.get(name))
        for name, wanted in truth.gradients.items()
    ]
    return pairs


def _error(found: Tensor, wanted: Tensor) -> float:
    if wanted.numel() == 0:
        return 0.0
    largest = float(wanted.abs().max()) or 1.0
    return float((found.double() - wanted.double()).abs().max()) / largest
