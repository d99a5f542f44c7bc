"""NumPy arrays as tensors, whatever their memory looks like."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor


def as_tensor(data: Any, device: str | None = None) -> Tensor:
    """A tensor that shares memory with a tensor or NumPy array where it can, and copies anything else.

    A read-only NumPy array is shared too: nothing in Raglane writes into what a caller gave.
    """
    if isinstance(data, Tensor):
        return data
    if isinstance(data, np.ndarray) and (not data.dtype.isnative or min(data.strides, default=0) < 0):
        # torch has neither the other byte order nor strides that run backwards.
        data = np.ascontiguousarray(data, dtype=data.dtype.newbyteorder("="))
    if isinstance(data, np.ndarray) and not data.flags.writeable:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*", category=UserWarning)
            return torch.as_tensor(data, device=device)
    return torch.as_tensor(data, device=device)
