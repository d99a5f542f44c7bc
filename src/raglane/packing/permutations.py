"""Permutations as a caller gives them: each number from 0 to B - 1 once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from raglane._utils.tracing import index_arithmetic
from raglane.errors import DimensionError, KindError, ShapeError, message, quote
from raglane.packing.arguments import INTEGERS
from raglane.segments.layouts import IntArray

__all__ = ["check_permutation", "read_permutation"]


@index_arithmetic
def read_permutation(permutation: Any) -> Tensor:
    """Check a permutation; its values on a CPU only, since on a device that would wait."""
    name, fix = "permutation", "pass the indices that torch.argsort gives"
    if not isinstance(permutation, Tensor):
        raise KindError(message(name, f"type {type(permutation).__name__}", "a tensor or None", fix))
    if permutation.is_nested or permutation.layout is not torch.strided:
        raise KindError(message(name, f"a tensor of {permutation.layout}", "a dense tensor or None", fix))
    if permutation.dim() != 1:
        raise DimensionError(message(name, f"shape {tuple(permutation.shape)}", "one dimension, (B,)", fix))
    if permutation.dtype not in INTEGERS:
        raise ShapeError(message(name, f"dtype {permutation.dtype}", "integers", fix))
    plain: Tensor = permutation.resolve_neg()
    if plain.is_cpu:
        check_permutation(plain.numpy().astype(np.int64, copy=False), name, fix)
    return plain


def check_permutation(array: IntArray, argument: str, fix: str) -> None:
    """Check that each of ``0 ... B - 1`` is there once."""
    count = array.shape[0]
    if count == 0:
        return
    # As many numbers as there are, none below 0, the highest count - 1, none missing: each is there once.
    counts = np.bincount(array) if array.min() >= 0 and array.max() < count else array[:0]
    if counts.shape[0] != count or np.count_nonzero(counts) != count:
        raise ShapeError(message(argument, quote(array.tolist()), f"each of 0 to {count - 1} once", fix))
