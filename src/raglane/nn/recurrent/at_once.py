"""Calls in inference that one operator of C++ runs, by the shortest way from a layer to C."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules import module as _module
from torch.nn.utils.rnn import PackedSequence

from raglane.errors import RaglaneError
from raglane.kernels import dispatch
from raglane.kernels.contract import InputKind
from raglane.kernels.cpu import backend
from raglane.native.library import leave_lost_threads
from raglane.nn.recurrent.call import CallPlan, plan_of
from raglane.nn.recurrent.inputs import even_lengths
from raglane.nn.recurrent.stack import Stack, State, plans
from raglane.packing.flat_values import RowTable, table_of_packed, table_of_padded
from raglane.ragged import Ragged

_PLAIN = (Tensor, torch.nn.Parameter)
_modes: Any = torch._C._len_torch_function_stack
_is_grad_enabled = torch.is_grad_enabled
# The numbers of layouts in ``csrc/torch/rows.h``.
_FLAT = 0
_TIME_FIRST = 2
_EVEN_BATCH_FIRST = 4
_EVEN_TIME_FIRST = 5
_STEP = 6
_ONE = 7


def step(layer: Stack, x_t: Any, state: Any) -> tuple[Tensor, State] | None:
    """Run one step of a layer; None if it needs a whole call."""
    if torch.compiler.is_compiling() or _is_grad_enabled() or type(x_t) not in _PLAIN:
        return None
    if _is_watched() or _has_hooks(layer):
        return None
    plan, weights, packed = _prepare(layer, x_t, "dense")
    if plan.directions != 1:
        return None
    result: Any = _run(plan, weights, packed, state, None, x_t, True, None, _STEP)
    return result


def _prepare(
    layer: Stack, values: Tensor, kind: InputKind
) -> tuple[CallPlan, Sequence[Any], tuple[Tensor, ...]]:
    """Return the plan of a call, and the weights of the layer or their packed form."""
    plan: CallPlan | None = plans.get(layer)
    settings = type(layer)._settings(layer)
    # That of an earlier call, if its kernels run the layer now. C checks the tensors. 7.0 equals 7
    # but is not a valid size.
    is_known = (
        plan is not None
        and plan.kernels
        and settings == plan.facts[0]
        and dispatch._override.get() == plan.override
        and type(settings[0]) is type(settings[1]) is type(settings[2]) is int
    )
    if plan is not None and is_known and plan.stored is not None and plan.reads_packed:
        packed = plan.stored.packed_of(layer._parameters)
        if packed:
            return plan, (), packed
    weights: Sequence[Any]
    if plan is not None and is_known:
        weights = layer._weights_in_order()
    else:
        groups = layer._weights()
        plan = plan_of(layer, groups, values, kind=kind)
        if not plan.kernels:
            return plan, (), ()
        weights = tuple(chain.from_iterable(groups))
    return plan, weights, () if plan.stored is None else plan.stored.packed_for((weights,))


def infer(
    layer: Stack, input: Any, hx: State | None, lengths: Any, need_output: bool
) -> tuple[Any, Any] | None:
    """Run a call without resets and histories, that records no gradients and is not compiled.

    None if it needs the whole way of :mod:`call`.
    """
    if _is_watched():
        return None
    kind = type(input)
    if lengths is not None or kind is PackedSequence:
        return _infer_table(layer, input, hx, lengths, need_output)
    if kind is Ragged:
        parts = _prepare(layer, input._values, "flat")
        result = _run(*parts, hx, input._offsets, input._values, need_output, None, _FLAT)
        if result is None or not need_output:
            return result
        return input._like(result[0]), result[1]
    if kind not in _PLAIN or input.dim() not in (2, 3):
        return None
    sizes = None
    layout = _EVEN_BATCH_FIRST if layer.batch_first else _EVEN_TIME_FIRST
    if input.dim() == 2:
        layout = _ONE
    elif not layer.batch_first:
        steps, count, _ = input.shape
        if steps != 1 and count != 1:
            layout = _TIME_FIRST
            sizes = even_lengths(steps, count)
    parts = _prepare(layer, input, "dense")
    return _run(*parts, hx, sizes, input, need_output, None, layout)


def _infer_table(
    layer: Stack, input: Any, hx: State | None, lengths: Any, need_output: bool
) -> tuple[Any, Any] | None:
    """Do what :func:`infer` does for a padded tensor or a pack."""
    is_pack = type(input) is PackedSequence
    if is_pack == (lengths is not None) or not (is_pack or type(input) in _PLAIN):
        return None
    values = input.data if is_pack else input
    if type(values) not in _PLAIN or values.dim() != (2 if is_pack else 3):
        return None
    parts = _prepare(layer, values, "packed" if is_pack else "flat")
    table = _table_of(input, lengths, layer.batch_first) if parts[0].kernels else None
    if table is None:
        return None
    result = _run(*parts, hx, table.sizes, values, need_output, table.order, table.number)
    if result is None or not is_pack or not need_output:
        return result
    return input._make((result[0], *input[1:])), result[1]


def _table_of(input: Any, lengths: Any, batch_first: bool) -> RowTable | None:
    """Return the rows of a padded tensor or a pack; None if C cannot read them."""
    try:
        if lengths is None:
            return table_of_packed(input)
        return table_of_padded(input, lengths, batch_first)
    except RaglaneError:
        return None  # the whole call names the argument


def _is_watched() -> bool:
    """Return True if a mode of torch sees functions, or forward-mode derivatives are computed.

    The operators refuse calls in all other modes.
    """
    return _modes() > 0 or forward_ad._current_level >= 0


def _has_hooks(layer: Stack) -> bool:
    """Return True if a call of a module runs more than the method of its class."""
    own = layer.__dict__
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or layer._compiled_call_impl
        or "forward" in own
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
    )


def _run(
    plan: CallPlan,
    weights: Sequence[Any],
    packed: tuple[Tensor, ...],
    hx: Any,
    sizes: Tensor | None,
    values: Tensor,
    need_output: bool,
    order: Tensor | None,
    layout: int,
) -> tuple[Any, Any] | None:
    """Run a call of the plan's kernels; see :func:`raglane.kernels.cpu.backend.infer`."""
    if not plan.kernels:
        return None
    h = hx
    c = None
    if len(plan.state_sizes) > 1 and hx is not None:
        if not isinstance(hx, tuple | list) or len(hx) != 2 or type(hx[1]) not in _PLAIN:
            return None
        h, c = hx
    if h is not None and type(h) not in _PLAIN:
        return None
    leave_lost_threads()
    results = backend.infer(
        plan.kernels, packed, sizes, values, h, c, weights, need_output, order, layout
    )
    if not results:
        return None
    output = results.pop(0) if need_output else None
    return output, tuple(results) if len(results) > 1 else results[0]
