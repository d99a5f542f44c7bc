"""Linear recurrences as operators of torch, forward and backward, on the kernels for CPUs.

The kernels compute first derivatives. Higher ones, the transformations of :mod:`torch.func` and
other dtypes run the loops in plain torch, and other devices run chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raglane._utils.operators import operator
from raglane._utils.tracing import are_transformed, has_tangent, records_operators
from raglane.kernels.cpu.recurrences import ATTENTION, SELECTIVE_SCAN, Recurrence, Tensors, sums_of
from raglane.native.library import DTYPES, missing_kernels
from raglane.nn.recurrences.chunks import attention_chunks, selective_chunks
from raglane.nn.recurrences.loops import attention_loop, selective_loop

Loop = Callable[..., tuple[Tensor, ...]]


class Operator:
    """A recurrence as a pair of operators.

    Their arguments are the tensors that are differentiated, offsets, resets and options.
    """

    def __init__(
        self, name: str, kernel: Recurrence, loop: Loop, chunks: Loop, optional: str, options: str
    ) -> None:
        self._kernel = kernel
        self._loop = loop
        self._chunks = chunks
        self._options = len(options.split(","))
        tensors = ", ".join(
            f"Tensor{'?' if tensor in optional.split() else ''} {tensor}"
            for tensor in kernel.tensors
        )
        inputs = f"{tensors}, Tensor offsets, Tensor? resets"
        outputs = ", ".join(["Tensor"] * len(kernel.results + kernel.saved))
        self._forward = operator(
            "raglane::" + name, self._shapes, f"({inputs}, {options}, bool save) -> ({outputs})"
        )(self._run)
        saved = ", ".join(f"Tensor? saved_{name}" for name in kernel.reread + kernel.saved)
        grads = ", ".join(f"Tensor? grad_{name}" for name in kernel.results)
        self._backward = operator(
            f"raglane::{name}_backward",
            self._shapes_of_gradients,
            f"({inputs}, {saved}, {grads}, {options}, bool[] needed) -> Tensor[]",
        )(self._run_backward)
        self._forward.register_autograd(self._gradient, setup_context=self._save)
        self._backward.register_autograd(self._second_gradient, setup_context=self._save_for_second)

    def __call__(
        self, tensors: Tensors, offsets: Tensor, resets: Tensor | None, *options: Any
    ) -> tuple[Tensor, ...]:
        """Return the results of the recurrence."""
        kernel = self._kernel
        values = tensors[0]
        if not values.is_cpu:
            return self._chunks(tensors, offsets, resets, *options)
        is_supported = values.dtype in DTYPES and missing_kernels() is None
        if not is_supported or has_tangent(tensors) or are_transformed(tensors):
            return self._loop(tensors, offsets, resets, *options)
        count = len(kernel.results)
        save = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in tensors
        )
        if not save and not records_operators():
            return tuple(kernel.forward(tensors, offsets, resets, options, save)[:count])
        return self._forward(*tensors, offsets, resets, *options, save)[:count]

    def _parts(self, args: Sequence[Any], *counts: int) -> list[tuple[Any, ...]]:
        """Return the arguments as tensors, offsets and resets, and further groups of these sizes."""
        parts = []
        begin = 0
        for count in (len(self._kernel.tensors), 2, *counts):
            parts.append(tuple(args[begin : begin + count]))
            begin += count
        return parts

    def _run(self, *args: Any) -> tuple[Tensor, ...]:
        tensors, (offsets, resets), options, (save,) = self._parts(args, self._options, 1)
        return tuple(self._kernel.forward(tensors, offsets, resets, options, save))

    def _shapes(self, *args: Any) -> tuple[Tensor, ...]:
        tensors, (offsets, _), options, (save,) = self._parts(args, self._options, 1)
        kernel = self._kernel
        values = tensors[0]
        shapes = kernel.described(tensors, options, offsets)
        results = [
            values.new_empty(shapes[name], dtype=kernel.dtype_of(name, values))
            for name in kernel.results
        ]
        sums = sums_of(values.dtype)
        return (
            *results,
            *(values.new_empty(shapes[name] if save else 0, dtype=sums) for name in kernel.saved),
        )

    def _parts_of_backward(self, args: Sequence[Any]) -> list[tuple[Any, ...]]:
        kernel = self._kernel
        saved = len(kernel.reread + kernel.saved)
        return self._parts(args, saved, len(kernel.results), self._options, 1)

    def _run_backward(self, *args: Any) -> list[Tensor]:
        tensors, (offsets, resets), saved, grads, options, (needed,) = self._parts_of_backward(args)
        return self._kernel.backward(tensors, offsets, resets, options, saved, grads, needed)

    def _shapes_of_gradients(self, *args: Any) -> list[Tensor]:
        tensors, *_, (needed,) = self._parts_of_backward(args)
        values = tensors[0]
        return [
            values.new_empty(
                tensor.shape if is_needed and tensor is not None else 0,
                dtype=self._kernel.dtype_of(name, values),
            )
            for name, tensor, is_needed in zip(self._kernel.tensors, tensors, needed, strict=True)
        ]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, places, ctx.options, _ = self._parts(inputs, self._options, 1)
        kernel = self._kernel
        results = dict(zip(kernel.results + kernel.saved, output, strict=True))
        saved = [results[name] for name in kernel.reread + kernel.saved]
        ctx.needed = [tensor is not None and tensor.requires_grad for tensor in tensors]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *places, *saved)

    def _gradient(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        kernel = self._kernel
        upstream = [
            None if grad is None else grad.contiguous() for grad in grads[: len(kernel.results)]
        ]
        results = self._backward(*ctx.saved_tensors, *upstream, *ctx.options, ctx.needed)
        gradients = [
            grad if is_needed else None for grad, is_needed in zip(results, ctx.needed, strict=True)
        ]
        return *gradients, None, None, *[None] * (self._options + 1)

    def _save_for_second(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ARG002
        tensors, places, _, grads, ctx.options, (ctx.needed,) = self._parts_of_backward(inputs)
        ctx.save_for_backward(*tensors, *places, *grads)

    def _second_gradient(self, ctx: Any, *incoming: Any) -> tuple[Tensor | None, ...]:
        """Compute second derivatives by autograd through the loop."""
        (weights,) = incoming
        again = torch.is_grad_enabled()
        tensors, (offsets, resets), upstream = self._parts(
            ctx.saved_tensors, len(self._kernel.results)
        )
        count = len(tensors)
        with torch.enable_grad():
            # Views, so that a gradient ends here even if one input was computed from another.
            inputs = [_view(tensor) for tensor in (*tensors, *upstream)]
            results = self._loop(tuple(inputs[:count]), offsets, resets, *ctx.options)
            chosen = [index for index, is_needed in enumerate(ctx.needed) if is_needed]
            first = _gradients(results, [inputs[index] for index in chosen], inputs[count:], True)
        second = _gradients(first, inputs, [weights[index] for index in chosen], again)
        unsaved = [None] * len(self._kernel.reread + self._kernel.saved)
        rest = [None] * (self._options + 1)
        return *second[:count], None, None, *unsaved, *second[count:], *rest


def _gradients(
    results: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
    create_graph: bool,
) -> list[Tensor | None]:
    """Return the gradients of weighted results, None for inputs on which none depends."""
    pairs = [
        (result, weight)
        for result, weight in zip(results, weights, strict=True)
        if weight is not None and result is not None and result.requires_grad
    ]
    leaves = [
        (index, tensor)
        for index, tensor in enumerate(inputs)
        if tensor is not None and tensor.requires_grad and pairs
    ]
    gradients: list[Tensor | None] = [None] * len(inputs)
    if leaves:
        computed = torch.autograd.grad(
            [result for result, _ in pairs],
            [tensor for _, tensor in leaves],
            [weight for _, weight in pairs],
            create_graph=create_graph,
            allow_unused=True,
        )
        for (index, _), gradient in zip(leaves, computed, strict=True):
            gradients[index] = gradient
    return gradients


def _view(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.view_as(tensor)


scan_selectively = Operator(
    "selective_scan",
    SELECTIVE_SCAN,
    selective_loop,
    selective_chunks,
    "D dt_bias initial",
    "bool softplus, float least_dt, float most_dt",
)
attend = Operator(
    "linear_attention",
    ATTENTION,
    attention_loop,
    attention_chunks,
    "log_decay gain log_gain initial initial_normaliser initial_stabiliser",
    "float scale, bool delta, float eps",
)
