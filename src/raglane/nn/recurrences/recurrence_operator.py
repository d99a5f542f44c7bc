"""Linear recurrences as operators of torch, forward and backward, on the kernels for CPUs.

The kernels compute first derivatives. Higher ones, the transformations of :mod:`torch.func` and
other dtypes run the loops in plain torch, and other devices run chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from raglane._utils.derivatives import gradients_of, view_of
from raglane._utils.operators import operator
from raglane._utils.tracing import are_transformed, has_tangent, runs_at_once
from raglane.kernels.cpu.recurrences import (
    ATTENTION,
    SELECTIVE_SCAN,
    Recurrence,
    RecurrenceCall,
    Tensors,
)
from raglane.native.library import DTYPES, missing_kernels
from raglane.nn.recurrences.chunks import attention_effect, run_chunks, selective_effect
from raglane.nn.recurrences.loops import attention_steps, run_loop, selective_steps

Results = Callable[[RecurrenceCall], tuple[Tensor, ...]]


class Operator:
    """A recurrence as a pair of operators.

    Their arguments are the tensors that are differentiated, offsets, resets and options. In plain
    torch, ``by_steps`` returns the results for any tensors, and ``by_chunks`` for those on a device.
    """

    def __init__(
        self,
        name: str,
        kernel: Recurrence,
        by_steps: Results,
        by_chunks: Results,
        optional: str,
        options: tuple[str, ...] = (),
    ) -> None:
        self.by_steps = by_steps
        self.by_chunks = by_chunks
        self._kernel = kernel
        self._options = len(options)
        self._results = len(kernel.results)
        self._saved = len(kernel.reread + kernel.saved)
        tensors = ", ".join(
            f"Tensor{'?' if tensor in optional.split() else ''} {tensor}"
            for tensor in kernel.tensors
        )
        inputs = f"{tensors}, Tensor offsets, Tensor? resets"
        outputs = ", ".join(["Tensor"] * len(kernel.results + kernel.saved))
        self._forward = operator(
            f"raglane::{name}",
            self._shapes,
            f"({', '.join([inputs, *options, 'bool save'])}) -> ({outputs})",
        )(self._run)
        saved = [f"Tensor? saved_{name}" for name in kernel.reread + kernel.saved]
        grads = [f"Tensor? grad_{name}" for name in kernel.results]
        self._backward = operator(
            f"raglane::{name}_backward",
            self._shapes_of_gradients,
            f"({', '.join([inputs, *saved, *grads, *options, 'bool[] needed'])}) -> Tensor[]",
        )(self._run_backward)
        self._forward.register_autograd(self._gradient, setup_context=self._save)
        self._backward.register_autograd(self._second_gradient, setup_context=self._save_for_second)
        # The same without torch's dispatch of operators of Python, which takes 0.4 ms.
        rules: Any = {"forward": self._run, "setup_context": self._save, "backward": self._gradient}
        methods = {key: staticmethod(rules[key]) for key in rules}
        self._function: Any = type(name, (torch.autograd.Function,), methods)

    def __call__(
        self, tensors: Tensors, offsets: Tensor, resets: Tensor | None, *options: Any
    ) -> tuple[Tensor, ...]:
        """Return the results of the recurrence."""
        values = tensors[0]
        call = RecurrenceCall(tensors, offsets, resets, options)
        if not values.is_cpu:
            return self.by_chunks(call)
        is_supported = values.dtype in DTYPES and missing_kernels() is None
        if not is_supported or has_tangent(tensors) or are_transformed(tensors):
            return self.by_steps(call)
        save = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in tensors
        )
        args = *tensors, offsets, resets, *options, save
        compute = self._function.apply if save else self._run
        compute = compute if runs_at_once(values) else self._forward
        return tuple(compute(*args)[: self._results])

    def _parts(self, args: Sequence[Any], *counts: int) -> list[tuple[Any, ...]]:
        """Return the arguments as tensors, offsets and resets, and further groups of these sizes."""
        parts = []
        begin = 0
        for count in (len(self._kernel.tensors), 2, *counts):
            parts.append(tuple(args[begin : begin + count]))
            begin += count
        return parts

    def _arguments(self, args: Sequence[Any]) -> tuple[RecurrenceCall, bool]:
        """Return the arguments of the forward operator."""
        tensors, (offsets, resets), options, (save,) = self._parts(args, self._options, 1)
        return RecurrenceCall(tensors, offsets, resets, options), save

    def _run(self, *args: Any) -> tuple[Tensor, ...]:
        return tuple(self._kernel.forward(*self._arguments(args)))

    def _shapes(self, *args: Any) -> tuple[Tensor, ...]:
        return tuple(self._kernel.outputs(*self._arguments(args)).values())

    def _parts_of_backward(self, args: Sequence[Any]) -> list[tuple[Any, ...]]:
        return self._parts(args, self._saved, self._results, self._options, 1)

    def _run_backward(self, *args: Any) -> list[Tensor]:
        tensors, (offsets, resets), saved, grads, options, (needed,) = self._parts_of_backward(args)
        call = RecurrenceCall(tensors, offsets, resets, options)
        return self._kernel.backward(call, saved, grads, needed)

    def _shapes_of_gradients(self, *args: Any) -> list[Tensor]:
        tensors, *_, (needed,) = self._parts_of_backward(args)
        return self._kernel.gradients(tensors, needed)

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        tensors, places, ctx.options, _ = self._parts(inputs, self._options, 1)
        kernel = self._kernel
        results = dict(zip(kernel.results + kernel.saved, output, strict=True))
        saved = [results[name] for name in kernel.reread + kernel.saved]
        ctx.needed = [tensor is not None and tensor.requires_grad for tensor in tensors]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *places, *saved)

    def _gradient(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        upstream = [None if grad is None else grad.contiguous() for grad in grads[: self._results]]
        # Only the operator has second derivatives.
        is_last = runs_at_once() and not torch.is_grad_enabled()
        compute = self._run_backward if is_last else self._backward
        results = compute(*ctx.saved_tensors, *upstream, *ctx.options, ctx.needed)
        gradients = [
            grad if is_needed else None for grad, is_needed in zip(results, ctx.needed, strict=True)
        ]
        return *gradients, *[None] * (self._options + 3)

    def _save_for_second(self, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ARG002
        tensors, places, _, grads, ctx.options, (ctx.needed,) = self._parts_of_backward(inputs)
        ctx.save_for_backward(*tensors, *places, *grads)

    def _second_gradient(self, ctx: Any, *incoming: Any) -> tuple[Tensor | None, ...]:
        """Compute second derivatives by autograd through the loop."""
        (weights,) = incoming
        again = torch.is_grad_enabled()
        tensors, (offsets, resets), upstream = self._parts(ctx.saved_tensors, self._results)
        count = len(tensors)
        with torch.enable_grad():
            inputs = [view_of(tensor) for tensor in (*tensors, *upstream)]
            results = self.by_steps(
                RecurrenceCall(tuple(inputs[:count]), offsets, resets, ctx.options)
            )
            grads = inputs[count : count + len(results)]
            chosen = [index for index, is_needed in enumerate(ctx.needed) if is_needed]
            first = gradients_of(results, [inputs[index] for index in chosen], grads, True)
        second = gradients_of(first, inputs, [weights[index] for index in chosen], again)
        unsaved = [None] * (self._saved + 2)
        return *second[:count], *unsaved, *second[count:], *[None] * (self._options + 1)


scan_selectively = Operator(
    "selective_scan",
    SELECTIVE_SCAN,
    partial(run_loop, selective_steps),
    partial(run_chunks, selective_steps, selective_effect),
    "D dt_bias initial",
    ("bool softplus", "float least_dt", "float most_dt"),
)
attend = Operator(
    "linear_attention",
    ATTENTION,
    partial(run_loop, attention_steps),
    partial(run_chunks, attention_steps, attention_effect),
    "log_decay gain log_gain initial initial_normaliser initial_stabiliser",
    ("float scale", "bool delta", "float eps"),
)
