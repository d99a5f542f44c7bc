"""What a step computes from its parameters alone, as a file may hold it: operations of torch, and their arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raglane.programs.graph import Unkept
from raglane.programs.parameters import Call, Known
from raglane.programs.rules import RULES

MOST_MADE = 1 << 28
"""Numbers of a tensor that is made of parameters."""

_MOST_NUMBERS = 1 << 22
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32)}
_DTYPES |= {str(torch.bool): torch.bool, str(torch.float16): torch.float16}
# What parameters may go through: operations that programs have too, which neither read files nor write to tensors.
_OPERATIONS = frozenset((*RULES, "_weight_norm_interface"))
_FORMATS = {str(kind): kind for kind in (torch.contiguous_format, torch.preserve_format)}


def check(holds: bool) -> None:
    """Refuse a text in which something does not hold."""
    if not holds:
        raise Unkept("what it says does not hold together")


def whole(number: Any, least: int, most: int) -> int:
    """A whole number within bounds; anything else is refused."""
    check(type(number) is int and least <= number <= most)
    return int(number)


def call_written(call: Call) -> list[Any]:
    """A call as JSON has it: the operation, its overload, arguments and results; of a constant its numbers."""
    if call.function is None:
        (value,) = call.args
        return ["", str(value.dtype), list(value.shape), value.reshape(-1).tolist()]
    name, _, overload = str(call.function).removeprefix("aten.").partition(".")
    _function(name, overload)
    return [name, overload, _argument_written(call.args), _argument_written(call.kwargs), call.count]


def _function(name: Any, overload: Any) -> Any:
    """An operation of torch by its name."""
    if type(name) is not str or type(overload) is not str or name not in _OPERATIONS:
        raise Unkept(f"it computes {name} from its parameters")
    packet = getattr(torch.ops.aten, name)
    if overload not in packet.overloads():
        raise Unkept(f"torch has no {name}.{overload}")
    function = getattr(packet, overload)
    if function._schema.is_mutable:
        raise Unkept(f"it changes what it computes, by {name}")
    return function


def _argument_written(part: Any) -> Any:
    if part is None or type(part) in (bool, int, float, str):
        return part
    if isinstance(part, list | tuple):
        return [_argument_written(item) for item in part]
    if type(part) is dict:
        return {"dict": {name: _argument_written(item) for name, item in part.items()}}
    if type(part) is Known:
        return {"known": part.index}
    for kind, known in (("dtype", _DTYPES), ("format", _FORMATS)):
        if str(part) in known:
            return {kind: str(part)}
    if part == torch.device("cpu"):
        return {"device": "cpu"}
    raise Unkept(f"it gives torch a {type(part).__name__}")


_TAGS: dict[str, Callable[[Any], Any]] = {
    "known": lambda given: Known(whole(given, 0, 1 << 20)),
    "dtype": _DTYPES.__getitem__,
    "format": _FORMATS.__getitem__,
    "device": {"cpu": torch.device("cpu")}.__getitem__,
    "dict": lambda given: {str(name): _argument_read(item) for name, item in given.items()},
}


def _argument_read(part: Any) -> Any:
    if type(part) is list:
        return [_argument_read(item) for item in part]
    if type(part) is dict:
        ((kind, given),) = part.items()
        return _TAGS[kind](given)
    return part


def call_read(given: Any) -> Call:
    """What :func:`call_written` gave, or an error of any kind."""
    if given[0] == "":
        _, dtype, shape, numbers = given
        sizes = [whole(size, 0, _MOST_NUMBERS) for size in shape]
        check(math.prod(sizes) == len(numbers))
        return Call(None, (torch.tensor(numbers, dtype=_DTYPES[dtype], device="cpu").reshape(sizes),), {})
    name, overload, args, kwargs, count = given
    return Call(
        _function(name, overload), tuple(_argument_read(args)), _argument_read(kwargs), whole(count, 1, _MOST_NUMBERS)
    )


def shapes_of(calls: Sequence[Call], leaves: Sequence[Tensor]) -> list[Tensor]:
    """All that calls compute, without a number: shapes alone, so that none can ask for all memory there is."""
    meta = torch.device("meta")
    known = [part.to(meta) for part in leaves]
    for call in calls:
        before = len(known)
        kwargs = {name: meta if isinstance(part, torch.device) else part for name, part in call.kwargs.items()}
        Call(call.function, call.args, kwargs, call.count).run(known)
        if call.function is None:
            known[-1] = known[-1].to(meta)
        check(len(known) - before == call.count and all(part.numel() <= MOST_MADE for part in known[before:]))
    return known
