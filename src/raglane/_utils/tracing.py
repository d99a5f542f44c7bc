"""Where Raglane's code meets PyTorch's transformations: ``torch.compile``, :mod:`torch.func` and :mod:`torch.jit`.

NOTE (integers): lengths, offsets and what is computed from them say where sequences are. They have no derivative and
are the same for every sample of a ``vmap``, but within :mod:`torch.func` the result of every operation is wrapped, and
the host can read the numbers of a wrapped tensor no more. So index arithmetic is done outside of the transformation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raglane._utils.messages import message
from raglane.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def constant_when_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``torch.compile`` call a function once while it traces, and keep the answer in the graph.

    NOTE: this is ``torch.compiler.assume_constant_result``, which imports the whole compiler (seconds) to set one mark.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``torch.compile`` leave a function out of its graphs: one ends before it, another begins after it."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            # Not before: torch.compiler.disable imports the whole compiler.
            outside: Callable[P, R] = torch.compiler.disable(function)
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def records_operators() -> bool:
    """True if a compiler, an export or a mode follows the calls of operators, so that a kernel must be one."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def is_jit_traced() -> bool:
    """True while :func:`torch.jit.trace` records, which sees only torch's operations and keeps one batch's sizes."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


@constant_when_traced
def is_exporting() -> bool:
    """True within ``torch.export``.

    NOTE: this is what ``torch.compiler.is_exporting`` reads; that function itself says yes within ``torch.compile`` of
    torch 2.11 as well.
    """
    return bool(torch.compiler._is_exporting_flag)


@constant_when_traced
def _traced_transforms_active() -> bool:
    active: bool = torch._C._are_functorch_transforms_active()
    return active


def are_transforms_active() -> bool:
    """True within a transformation of :mod:`torch.func`."""
    if torch.compiler.is_dynamo_compiling():
        return _traced_transforms_active()
    return bool(torch._C._are_functorch_transforms_active())


def is_transformed(tensor: Tensor) -> bool:
    """True for a tensor that :mod:`torch.func` wraps, which has no memory of its own to read."""
    if torch.compiler.is_dynamo_compiling():
        return _traced_transforms_active()
    functorch: Any = torch._C._functorch
    return bool(
        torch._C._are_functorch_transforms_active()
        or functorch.is_legacy_batchedtensor(tensor)
        or functorch.is_dead_tensor_wrapper(tensor)
    )


def has_tangent(tensors: Iterable[Tensor | None]) -> bool:
    """True if a tensor has a tangent of :mod:`torch.autograd.forward_ad`."""
    if forward_ad._current_level < 0:
        return False
    return any(part is not None and forward_ad.unpack_dual(part).tangent is not None for part in tensors)


def are_transformed(tensors: Iterable[Tensor | None]) -> bool:
    """True if :func:`is_transformed` holds for any of them."""
    for part in tensors:  # noqa: SIM110 (quicker than any of a generator)
        if part is not None and is_transformed(part):
            return True
    return False


def index_arithmetic(function: Callable[P, R]) -> Callable[P, R]:
    """Do what a function computes from integers outside of the transformations of :mod:`torch.func`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        found = [plain(part) for part in args]
        named = {name: plain(part) for name, part in kwargs.items()}
        functorch = torch._C._functorch
        levels = []
        try:
            while functorch.peek_interpreter_stack() is not None:
                levels.append(functorch.pop_dynamic_layer_stack())
            return function(*found, **named)  # type: ignore[arg-type]
        finally:
            while levels:
                functorch.push_dynamic_layer_stack(levels.pop())

    return call


def plain(part: T) -> T:
    """A tensor of integers without the wrappers of transformations; anything else as it is."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return part
    functorch = torch._C._functorch
    while isinstance(part, Tensor) and functorch.is_functorch_wrapped_tensor(part):
        if functorch.is_batchedtensor(part):
            got, rule = "different numbers for each sample", "the same for all samples of torch.vmap"
            fix = "map over values, states or weights, or make one Ragged batch of all samples"
            raise ArgumentError(message("lengths or offsets", got, rule, fix))
        part = functorch.get_unwrapped(part)  # type: ignore[assignment]
    return part
