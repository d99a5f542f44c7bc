"""Support of PyTorch's transformations: ``torch.compile``, :mod:`torch.func` and :mod:`torch.jit`.

NOTE (integers): lengths and offsets have no derivative and are equal for all samples of a ``vmap``.
But within :mod:`torch.func` all results are wrapped, and the host cannot read the numbers of a
wrapped tensor. So index arithmetic is done outside of the transformation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from raglane.errors import ArgumentError, DispatchError

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def constant_when_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``torch.compile`` treat the result of a function as a constant.

    ``torch.compiler.assume_constant_result`` does the same, but imports the compiler, which takes
    seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def never_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Make ``torch.compile`` break the graph at a function."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            # Called only here, because torch.compiler.disable imports the compiler.
            outside: Callable[P, R] = torch.compiler.disable(function)
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call


_OF_TENSORS = (
    "called with a function of tensors and their sizes: a trace repeats the numbers that Python or"
    " C reads, such as the lengths of this batch"
)
_OUTSIDE = "call it outside of the trace, or use torch.compile"


def refuse_jit_trace(got: str, rule: str = _OF_TENSORS, fix: str = _OUTSIDE) -> None:
    """Raise within :func:`torch.jit.trace`, which records only torch's operators."""
    if is_jit_traced():
        raise DispatchError("torch.jit.trace", got, rule, fix)


def never_recorded(function: Callable[P, R], fix: str = _OUTSIDE) -> Callable[P, R]:
    """Make ``torch.compile`` break the graph at a function, and ``torch.jit.trace`` refuse it."""
    outside = never_traced(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        refuse_jit_trace(f"a call of {function.__qualname__}", fix=fix)
        return outside(*args, **kwargs)

    return call


def records_operators() -> bool:
    """Return True if a compiler, an export or a dispatch mode records operators, so kernels must be
    operators.
    """
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def runs_at_once(*tensors: Tensor) -> bool:
    """Return True if torch runs the operators of tensors at once: no compiler, export, trace,
    dispatch mode or transformation is active. One test for short calls.
    """
    if torch.compiler.is_compiling():
        return False
    core: Any = torch._C
    if (
        core._len_torch_dispatch_stack()
        or core._get_tracing_state() is not None
        or core._are_functorch_transforms_active()
    ):
        return False
    functorch = core._functorch
    for tensor in tensors:  # of the vmap of torch.autograd, and those that outlive a transformation
        if functorch.is_legacy_batchedtensor(tensor) or functorch.is_dead_tensor_wrapper(tensor):
            return False
    return True


def is_jit_traced() -> bool:
    """Return True while :func:`torch.jit.trace` records."""
    return not torch.compiler.is_compiling() and torch._C._get_tracing_state() is not None


@constant_when_traced
def is_exporting() -> bool:
    """Return True within ``torch.export``.

    ``torch.compiler.is_exporting`` reads the same flag, but in torch 2.11 is also True within
    ``torch.compile``.
    """
    return bool(torch.compiler._is_exporting_flag)


_is_for_onnx: ContextVar[bool] = ContextVar("raglane_is_for_onnx", default=False)


@contextmanager
def for_onnx() -> Iterator[None]:
    """Trace graphs in a ``with`` block for a file of ONNX."""
    token = _is_for_onnx.set(True)
    try:
        yield
    finally:
        _is_for_onnx.reset(token)


@constant_when_traced
def is_for_onnx() -> bool:
    """Return True in a block of :func:`for_onnx`."""
    return _is_for_onnx.get()


@constant_when_traced
def has_autocast(kind: str) -> bool:
    """Return True if a kind of device has autocast."""
    return torch.amp.is_autocast_available(kind)


@constant_when_traced
def are_transforms_active() -> bool:
    """Return True within a transformation of :mod:`torch.func`."""
    return torch._C._are_functorch_transforms_active()


def is_transformed(tensor: Tensor) -> bool:
    """Return True if :mod:`torch.func` wraps a tensor, whose memory cannot be read."""
    if torch.compiler.is_dynamo_compiling():
        return are_transforms_active()
    functorch: Any = torch._C._functorch
    return bool(
        torch._C._are_functorch_transforms_active()
        or functorch.is_legacy_batchedtensor(tensor)
        or functorch.is_dead_tensor_wrapper(tensor)
    )


def is_differentiated(tensor: Tensor) -> bool:
    """Return True if :mod:`torch.func` computes the gradient of a tensor, at any level."""
    if torch.compiler.is_dynamo_compiling():
        return are_transforms_active()
    functorch: Any = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_gradtrackingtensor(tensor) and tensor.requires_grad:
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


def has_tangent(tensors: Iterable[Tensor | None]) -> bool:
    """Return True if a tensor has a tangent of :mod:`torch.autograd.forward_ad`."""
    if forward_ad._current_level < 0:
        return False
    return any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def are_transformed(tensors: Iterable[Tensor | None]) -> bool:
    """Return True if any of the tensors is transformed."""
    for tensor in tensors:  # noqa: SIM110 (faster than any())
        if tensor is not None and is_transformed(tensor):
            return True
    return False


def index_arithmetic(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function of integers outside of the transformations of :mod:`torch.func`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
            return function(*args, **kwargs)
        plain_args = [plain(arg) for arg in args]
        named = {name: plain(arg) for name, arg in kwargs.items()}
        functorch = torch._C._functorch
        levels = []
        try:
            while functorch.peek_interpreter_stack() is not None:
                levels.append(functorch.pop_dynamic_layer_stack())
            return function(*plain_args, **named)  # type: ignore[arg-type]
        finally:
            while levels:
                functorch.push_dynamic_layer_stack(levels.pop())

    return call


def plain(tensor: T) -> T:
    """Remove the wrappers of transformations from a tensor of integers; return anything else
    unchanged.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return tensor
    functorch = torch._C._functorch
    while isinstance(tensor, Tensor) and functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            got = "different numbers for each sample"
            rule = "the same for all samples of torch.vmap"
            fix = "map over values, states or weights, or make one Ragged batch of all samples"
            raise ArgumentError("lengths or offsets", got, rule, fix)
        tensor = functorch.get_unwrapped(tensor)  # type: ignore[assignment]
    return tensor
