"""One look at many tensors: are they what some others were, but for sizes that may differ?

torch.compile asks this of its inputs before every call, by a class in C++ that nobody promises to keep. It takes a
fifth of the time of asking each tensor from Python, so it is used where it exists and, tried out once, answers
rightly; where it says no, or does not exist, Python asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any

import torch
from torch import Tensor

__all__ = ["Alike", "guard"]

Alike = Callable[..., bool]
"""Whether tensors have the type, dtype, device, sizes and strides that others had; raises TypeError for None."""


def guard(examples: Sequence[Tensor], shapes: Sequence[tuple[int | None, ...]]) -> Alike | None:
    """A look at as many tensors as there are examples.

    Example:
        >>> alike = guard([torch.zeros(4, 3)], [(None, 3)])
        >>> alike is None or (alike(torch.ones(5, 3)), alike(torch.ones(3, 5).t()), alike(torch.ones(5, 3).double()))
        (True, False, False)
    """
    is_for_all = all(map(_has_strides_for_all_sizes, examples, shapes))
    return _make(examples, shapes) if is_for_all and _is_right() else None


def _has_strides_for_all_sizes(example: Tensor, shape: tuple[int | None, ...]) -> bool:
    """Whether as many rows as there may be would lie side by side with an example's strides."""
    if None not in shape:
        return True
    return example.stride() == tuple([prod(shape[place + 1 :]) for place in range(len(shape))])  # type: ignore[arg-type]


def _make(examples: Sequence[Tensor], shapes: Sequence[tuple[int | None, ...]]) -> Alike | None:
    sizes: list[Any] = [list(shape) for shape in shapes]
    strides: list[Any] = [list(part.stride()) for part in examples]
    try:
        made = torch._C._dynamo.guards.TensorGuards(*examples, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Alike = made.check
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return None
    return check


@lru_cache(maxsize=1)
def _is_right() -> bool:
    """Whether the class exists and tells apart what must be told apart."""
    # Whatever torch's defaults are when somebody asks first.
    zeros = partial(torch.zeros, dtype=torch.float32, device="cpu")
    good, weight = zeros(4, 3), torch.nn.Parameter(zeros(2, 3))
    alike = _make([good, weight], [(None, 3), (2, 3)])
    others = [
        zeros(5, 2),
        zeros(3, 4).t(),
        zeros(4, 6)[:, ::2],
        zeros(4, 3, 1),
        zeros(4, 3).double(),
        torch.zeros(4, 3, device="meta", dtype=torch.float32),
        zeros(4, 3).to_sparse(),
        torch._neg_view(zeros(4, 3)),
    ]
    try:
        return (
            alike is not None
            and alike(zeros(7, 3), weight)
            and not any(alike(other, weight) for other in others)
            and not alike(good, torch.nn.Parameter(zeros(3, 3)))
        )
    except (TypeError, ValueError, RuntimeError):
        return False
