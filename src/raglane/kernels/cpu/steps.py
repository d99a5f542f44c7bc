"""One step of a block of layers, from its input to its output, as one call of the kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from raglane._utils.tracing import runs_at_once
from raglane.native import library
from raglane.native.library import missing_kernels


def can_step(x: Tensor) -> bool:
    """Return True if there are operators for a step of rows ``x``: on a CPU, without gradients."""
    if torch.is_grad_enabled() or not x.is_cpu or x.dtype not in (torch.float32, torch.float64):
        return False
    if torch.is_autocast_enabled("cpu") or forward_ad._current_level >= 0:
        return False
    return runs_at_once(x) and missing_kernels() is None and _operator("step_mamba") is not None


@cache
def _operator(name: str) -> Any:
    """Return an operator of ``csrc/torch/steps.cpp``, or None; a program may have loaded an older
    copy.
    """
    if library.operators() is None:
        return None
    packet = getattr(torch.ops.raglane, name, None)
    return None if packet is None else packet.default._op


def _run(name: str, *arguments: Any) -> list[Tensor]:
    """Return the results of an operator; none if it does not exist, or cannot read a tensor."""
    run = _operator(name)
    if run is None:
        return []
    kernels = library.library()
    results: list[Tensor] = run(*arguments, kernels.numbers[kernels.isa], kernels.flags)
    return results


class MambaStep(NamedTuple):
    """Mamba's block without its states: ``csrc/abi/recurrences.h`` has its equations."""

    # The weights and biases of the input, the convolution, and that of the step sizes, B and C; those
    # of the step sizes; A and D; those of the output; the norms of the step sizes, B and C, and of
    # the input.
    parts: Sequence[Tensor | None]
    # A is the logarithm of -A.
    logarithms: bool
    # Of the norms; below 0 for none of the step sizes, B and C.
    eps: float = -1.0
    norm_eps: float = 0.0
    residual: bool = False
    # The sums of products are those of whole sequences, bit for bit.
    ordered: bool = False

    def run(self, x: Tensor, earlier: Tensor, state: Tensor) -> Tensor | None:
        """Run one step, and replace the states.

        Args:
            x: ``(B, D)`` or ``(B, 1, D)``.
            earlier: the last inputs of the convolution, ``(B, E, K)`` or one less, oldest first.
            state: of the scan, ``(B, E, S)``.

        Returns:
            The output, of the dimensions of ``x``; None if there is no operator, or it cannot read a
            tensor: then nothing has changed.
        """
        options = (self.norm_eps, self.eps, self.logarithms, self.residual, self.ordered)
        results = _run("step_mamba", x, earlier, state, self.parts, *options)
        return results[0] if results else None


def parts_of_mamba(
    linears: Sequence[Any], convolution: nn.Conv1d, rates: Tensor, skip: Tensor
) -> list[Tensor | None]:
    """Return the parts of a step without norms.

    ``linears``: those of the input; of the step sizes, B and C; of the step sizes; and of the output.
    """
    into, of_inner, of_steps, out = linears
    return [
        *(into.weight, into.bias, convolution.weight, convolution.bias),
        *(of_inner.weight, of_steps.weight, of_steps.bias),
        *(rates, skip, out.weight, out.bias),
    ]


class AttentionStep(NamedTuple):
    """A block of linear attention between its projections, without its states:
    ``csrc/abi/recurrences.h`` has its equations.
    """

    # The weight and bias of the convolution, the bias of the step sizes, the logarithm of -A, D, and
    # the weight of the norm.
    parts: Sequence[Tensor | None]
    # Of keys and values: how many heads, and numbers of a head.
    key_heads: int
    heads: int
    key_size: int
    value_size: int
    # The columns where queries, keys and values begin.
    firsts: tuple[int, int, int]
    norm_groups: int
    norm_eps: float
    # Queries and keys have length 1.
    unit: bool = False
    delta: bool = False
    gates_first: bool = False
    # States are (V, K).
    transposed: bool = False
    scale: float = 1.0
    beta_scale: float = 1.0
    limits: tuple[float, float] = (-math.inf, math.inf)

    def run(
        self,
        mixed: Tensor,
        gate: Tensor,
        dt: Tensor,
        beta: Tensor | None,
        earlier: Tensor,
        state: Tensor,
    ) -> Tensor | None:
        """Run one step, and replace the states.

        Args:
            mixed: the input of the convolution, ``(B, 1, C)``.
            gate: ``(B, 1, H V)``.
            dt: ``(B, 1, H)``.
            beta: the logits of gains, ``(B, 1, H)``; None for the step sizes as gains.
            earlier: the last inputs of the convolution, ``(B, C, K)`` or one less, oldest first.
            state: ``(B, H, K, V)``, or with ``transposed`` ``(B, H, V, K)``.

        Returns:
            ``(B, 1, H V)``; None as :meth:`MambaStep.run`.
        """
        sizes = [self.key_heads, self.heads, self.key_size, self.value_size, *self.firsts]
        flags = (self.unit, self.delta, self.gates_first, self.transposed)
        sizes += [*map(int, flags), self.norm_groups]
        numbers = [self.scale, self.beta_scale, *self.limits, self.norm_eps]
        rows = (mixed, gate, dt, beta)
        results = _run("step_attention", *rows, earlier, state, self.parts, sizes, numbers)
        return results[0] if results else None


# The numbers of an operation of a step: those of ``OfBlock`` in csrc/torch/steps.cpp.
BLOCK_WORDS = 15


def run_block(
    x: Tensor,
    states: Sequence[Tensor],
    parts: Sequence[Tensor],
    code: list[int],
    limits: list[float],
    sizes: list[int],
) -> list[Tensor]:
    """Run the operations of a step of a block: ``csrc/abi/recurrences.h`` has them.

    Args:
        x: ``(B, D)``.
        states: ``(B, size)`` each.
        parts: the weights.
        code: ``BLOCK_WORDS`` numbers of each operation.
        limits: its two numbers of floating point.
        sizes: columns of the table, and of the output the first one and how many.

    Returns:
        The output and the states after the step; nothing if there is no operator, or it cannot read
        a tensor.
    """
    return _run("step_block", x, states, parts, code, limits, sizes)
