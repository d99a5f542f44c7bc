"""Checks of the arguments that linear recurrences share."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_device, check_tensor
from raglane._utils.tracing import are_transformed, records_operators, refuse_jit_trace
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.cpu.recurrences import sums_of
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged


def check_values(name: str, batch: Any, dimensions: tuple[str, ...]) -> Tensor:
    """Return the values of the first argument, floating-point and of these dimensions."""
    refuse_jit_trace("a call of a linear recurrence")
    check_ragged(name, batch)
    values: Tensor = batch.values
    if values.dim() != 1 + len(dimensions) or 0 in values.shape[1:]:
        rule = f"values (N, {', '.join(dimensions)}), none of 0 features"
        fix = "reshape them, e.g. with r.map(lambda values: values.unflatten(...))"
        raise ShapeError(name, f"values {tuple(values.shape)}", rule, fix)
    if not values.is_floating_point():
        rule = "a real floating-point dtype"
        raise ArgumentTypeError(name, f"{values.dtype}", rule, "convert it with .float()")
    return values


def check_elements(
    name: str, batch: Any, like: Ragged, whose: str, shape: tuple[int, ...]
) -> Tensor:
    """Return the values of a batch with the lengths and the device of another."""
    check_ragged(name, batch)
    batch._needs_lengths_of(name, like, whose)
    values: Tensor = batch.values
    if tuple(values.shape[1:]) != shape:
        got = f"elements of shape {tuple(values.shape[1:])}"
        rule = f"elements of shape {shape}, by the sizes of {whose}"
        raise ShapeError(name, got, rule, "pass tensors whose sizes belong together")
    check_device(name, values, like.device)
    return values


def check_groups(name: str, groups: int, whose: str, count: int) -> None:
    """Raise if groups do not divide a size."""
    if groups < 1 or count % groups:
        rule = f"a divisor of the {count} {whose}"
        raise ShapeError(name, f"{groups} groups", rule, "pass consecutive groups of one size")


def same_dtypes(parts: dict[str, Tensor]) -> list[Tensor]:
    """Return tensors of one dtype; under autocast, which mixes them, the widest."""
    values = list(parts.values())
    dtype = values[0].dtype
    if all(each.dtype is dtype for each in values):
        return values
    if torch.is_autocast_enabled(values[0].device.type):
        for each in values:
            dtype = torch.promote_types(dtype, each.dtype)
        return [each.to(dtype) for each in values]
    name, other = next(pair for pair in parts.items() if pair[1].dtype is not dtype)
    rule = f"of dtype {dtype}, like {next(iter(parts))}"
    raise ShapeError(name, f"{other.dtype}", rule, f"convert it with .to({dtype})")


def check_parameter(name: str, value: Any, shape: tuple[int, ...], values: Tensor) -> Tensor:
    """Return a parameter in the dtype of sums."""
    check_tensor(name, value)
    sums = sums_of(values.dtype)
    if tuple(value.shape) != shape:
        rule = f"a tensor of shape {shape}"
        raise ShapeError(name, f"shape {tuple(value.shape)}", rule, "pass one number for each")
    if value.dtype not in (values.dtype, sums, torch.float32):
        rule = f"of dtype {' or '.join(dict.fromkeys([str(sums), str(values.dtype)]))}"
        raise ShapeError(name, f"{value.dtype}", rule, f"convert it with .to({sums})")
    check_device(name, value, values.device)
    converted: Tensor = value.to(sums)
    return converted


def check_state(name: str, state: Any, shape: tuple[int, ...], values: Tensor) -> Tensor:
    """Return an initial state, which has the dtype of sums, so that pieces are not rounded."""
    check_tensor(name, state)
    sums = sums_of(values.dtype)
    if tuple(state.shape) != shape:
        rule = f"a tensor of shape {shape}"
        fix = "pass one state per sequence, e.g. the final one of the call before"
        raise ShapeError(name, f"shape {tuple(state.shape)}", rule, fix)
    if state.dtype is not sums:
        rule = f"of dtype {sums}, that of states for {values.dtype}"
        raise ShapeError(name, f"{state.dtype}", rule, f"convert it with .to({sums})")
    check_device(name, state, values.device)
    checked: Tensor = state
    return checked


def check_starts(resets: Any, like: Ragged, whose: str) -> Tensor | None:
    """Return resets, bools ``(N,)``, or None."""
    if resets is None:
        return None
    check_ragged("resets", resets)
    if resets.dtype is not torch.bool:
        rule = "bools, True where an episode starts"
        raise ArgumentTypeError(
            "resets", f"values of {resets.dtype}", rule, "pass e.g. resets != 0"
        )
    return check_elements("resets", resets, like, whose, ())


def check_decays(name: str, decays: Tensor) -> None:
    """Raise for a logarithm above 0, of decays on the CPU: a device would have to wait."""
    if not decays.is_cpu or records_operators() or are_transformed([decays]) or not decays.numel():
        return
    largest = decays.detach().max().item()
    if largest > 0:
        rule = "logarithms of decays, at most 0"
        fix = "pass e.g. torch.nn.functional.logsigmoid(gates), or -dt * rates"
        raise ArgumentError(name, f"a number of {largest:.6g}", rule, fix)


def check_limits(name: str, limits: Any) -> tuple[float, float]:
    """Return two bounds, or infinite ones for None."""
    if limits is None:
        return -math.inf, math.inf
    rule = "None, or a pair of numbers, the smaller first"
    fix = "pass e.g. (0.001, 0.1)"
    try:
        least, most = (float(limit) for limit in limits)
    except (TypeError, ValueError):
        raise ArgumentTypeError(name, repr(limits), rule, fix) from None
    if not least <= most:
        raise ArgumentError(name, repr(limits), rule, fix)
    return least, most
