"""Each program is compared with one step of torch before its first use: values, and all gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane.kernels.program.loop import Loop, gradients, run_loop
from raglane.programs.cache import Entry, Wish, plainly
from raglane.programs.step import Step
from raglane.programs.weights import Survey

__all__ = ["verify"]

_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}


def verify(wish: Wish, entry: Entry, found: Survey) -> str:
    """Compare a program with one step of torch, on random numbers.

    Args:
        wish: of what the program is.
        entry: the program.
        found: the survey of the weights.

    Returns:
        Why the program must not be used; nothing where all agrees.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), plainly():
        step = Step(wish.cell, wish.weights, found, entry.prepares)
        is_telling = False
        for rows, noise in ((3, 0.1), (1, 0.0)):
            try:
                got, want = _both(wish, entry, step, found, rows, noise, generator)
            except Exception as error:
                return f"its program could not be verified: {type(error).__name__}: {error}"
            for kind, (mine, theirs) in zip(("values", "gradients"), zip(got, want, strict=True), strict=True):
                for one, other in zip(mine, theirs, strict=True):
                    if not _agree(one, other, wish.dtype):
                        return f"the {kind} of its program differ from those of torch"
            is_telling = is_telling or any(bool(part.isfinite().any()) for part in want[0] if part.numel())
    return "" if is_telling else "its program could not be verified: one step of torch gives no finite number"


def _both(
    wish: Wish, entry: Entry, step: Step, found: Survey, rows: int, noise: float, generator: torch.Generator
) -> tuple[tuple[list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]:
    """Values and gradients by the program, and by torch."""
    compiled: Any = entry.compiled

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=wish.dtype).requires_grad_()

    graph = compiled.trace.result.graph
    elements = [drawn(rows, graph.nodes[node].width) for node in compiled.elements]
    # Rows of the weights are masks of zeros and ones.
    elements[1:] = [(part > 0).to(wish.dtype).requires_grad_() for part in elements[1:]]
    states = [drawn(rows, size) for size in wish.sizes]
    leaves = []
    for part in found.leaves:
        if compiled.trace.reads_itself:
            leaves.append(wish.given(part))
            continue
        given = wish.given(part.detach())
        if given.dtype.is_floating_point:
            given = (given + noise * torch.randn(given.shape, generator=generator, dtype=given.dtype)).requires_grad_()
        leaves.append(given)
    offsets = torch.arange(rows + 1, device="cpu")
    output, new, _ = step.run(leaves, elements, states, offsets)
    loop = Loop(compiled, step, offsets, True, True, False, (len(elements), len(states), len(leaves)))
    tensors = (*elements, *states, *leaves)
    mine, finals, _ = run_loop(loop, tensors)
    wished = [part for part in tensors if part.requires_grad]
    want, got = [output, *new], [part for part in (mine, *finals) if part is not None]
    grads = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in want]
    return (got, _gradients(got, wished, grads)), (want, _gradients(want, wished, grads))


def _gradients(results: list[Tensor], wished: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    pairs = [(part, grad) for part, grad in zip(results, grads, strict=True) if part.requires_grad]
    if not pairs:
        return []
    found = gradients(pairs, wished)
    return [torch.zeros_like(part) if grad is None else grad for part, grad in zip(wished, found, strict=True)]


def _agree(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    one, other = one.detach(), other.detach()
    finite = other[other.isfinite()]
    scale = 1 + float(finite.abs().max()) if finite.numel() else 1.0
    tolerance = _TOLERANCES[dtype]
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
