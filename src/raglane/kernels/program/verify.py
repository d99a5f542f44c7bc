"""Each program is compared with one step of torch before its first use: values, and all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from raglane.kernels.program.loop import Loop, run_loop
from raglane.kernels.program.parameters import gradients
from raglane.programs.cache import Entry, Wish, plainly
from raglane.programs.step import Step
from raglane.programs.weights import Survey

__all__ = ["verify"]

_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-6}

# Where a program disagrees, torch's step is run as often on numbers that differ by a few roundings.
_NUDGES = 4


def verify(wish: Wish, entry: Entry, found: Survey) -> str:
    """Compare a program with one step of torch, on random numbers.

    Random numbers may be such that rounding alone changes a result: a quotient by a state that is nearly 0. A result
    may differ as far as torch's own does where the numbers are a few roundings apart.

    Args:
        wish: of what the program is.
        entry: the program.
        found: the survey of the weights.

    Returns:
        Why the program must not be used; nothing where all agrees.
    """
    generator = torch.Generator().manual_seed(0)
    # To leave the inference mode also makes autograd see what is computed within an operator of a compiled graph.
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False), plainly():
        step = Step(wish.cell, wish.weights, found, entry.prepares)
        is_telling = False
        for rows, noise in ((3, 0.1), (1, 0.0)):
            near: list[_Results] = []
            try:
                case = _drawn(wish, entry, step, found, rows, noise, generator)
                got, want = case.by_program(), case.by_torch(case.tensors)
                if not case.is_same_without_gradients(want[0]):
                    return "its step does something else where no gradients are recorded"
            except Exception as error:
                return f"its program could not be verified: {type(error).__name__}: {error}"
            for index, kind in enumerate(("values", "gradients")):
                for place, (one, other) in enumerate(zip(got[index], want[index], strict=True)):
                    if _agree(one, other, wish.dtype):
                        continue
                    near = near or [case.by_torch(case.nudged(generator)) for _ in range(_NUDGES)]
                    if not _agree(one, other, wish.dtype, [results[index][place] for results in near]):
                        return f"the {kind} of its program differ from those of torch"
            is_telling = is_telling or any(bool(part.isfinite().any()) for part in want[0] if part.numel())
    return "" if is_telling else "its program could not be verified: one step of torch gives no finite number"


_Results = tuple[list[Tensor], list[Tensor]]  # values and gradients


@dataclass(frozen=True)
class _Case:
    """What is run, on which numbers; the results' gradients are drawn from a seed."""

    loop: Loop
    tensors: tuple[Tensor, ...]
    seed: int

    def by_program(self) -> _Results:
        mine, finals, _ = run_loop(self.loop, self.tensors)
        return self._with_gradients([part for part in (mine, *finals) if part is not None], self.tensors)

    def by_torch(self, tensors: tuple[Tensor, ...]) -> _Results:
        elements, states, leaves = self.loop.parts(tensors)
        output, new, _ = self.loop.step.run(list(leaves), list(elements), list(states), self.loop.offsets)
        return self._with_gradients([output, *new], tensors)

    def is_same_without_gradients(self, results: list[Tensor]) -> bool:
        """Whether torch's step gives the same numbers where no gradients are recorded."""
        elements, states, leaves = self.loop.parts(tuple([part.detach() for part in self.tensors]))
        with torch.no_grad():
            output, new, _ = self.loop.step.run(list(leaves), list(elements), list(states), self.loop.offsets)
        return all(_agree(one, other, other.dtype) for one, other in zip([output, *new], results, strict=True))

    def nudged(self, generator: torch.Generator) -> tuple[Tensor, ...]:
        """The tensors, with what is read and the states a few roundings away; masks and weights stay."""
        elements, states, leaves = self.loop.parts(self.tensors)

        def near(part: Tensor) -> Tensor:
            noise = torch.randn(part.shape, generator=generator, dtype=part.dtype)
            return (part.detach() * (1 + 4 * torch.finfo(part.dtype).eps * noise)).requires_grad_()

        return near(elements[0]), *elements[1:], *map(near, states), *leaves

    def _with_gradients(self, results: list[Tensor], tensors: tuple[Tensor, ...]) -> _Results:
        generator = torch.Generator().manual_seed(self.seed)
        grads = [torch.randn(part.shape, generator=generator, dtype=part.dtype) for part in results]
        return results, _gradients(results, [part for part in tensors if part.requires_grad], grads)


def _drawn(
    wish: Wish, entry: Entry, step: Step, found: Survey, rows: int, noise: float, generator: torch.Generator
) -> _Case:
    """Random numbers to compare on."""
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
    loop = Loop(compiled, step, offsets, True, True, False, (len(elements), len(states), len(leaves)))
    return _Case(loop, (*elements, *states, *leaves), int(torch.randint(2**31, (), generator=generator)))


def _gradients(results: list[Tensor], wished: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
    pairs = [(part, grad) for part, grad in zip(results, grads, strict=True) if part.requires_grad]
    found = gradients(pairs, wished) if pairs else [None] * len(wished)
    return [torch.zeros_like(part) if grad is None else grad for part, grad in zip(wished, found, strict=True)]


def _agree(one: Tensor, other: Tensor, dtype: torch.dtype, near: Sequence[Tensor] = ()) -> bool:
    """Whether two results are alike, or no further apart than those of numbers a few roundings apart."""
    one, other = one.detach(), other.detach()
    finite = other[other.isfinite()]
    scale = 1 + float(finite.abs().max()) if finite.numel() else 1.0
    tolerance = _TOLERANCES[dtype]
    alike = torch.isclose(one, other, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if near:
        alike |= (one - other).abs() <= 4 * torch.stack([(part.detach() - other).abs() for part in near]).amax(0)
    return bool(alike.all())
