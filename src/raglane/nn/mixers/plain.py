"""Modules whose calls a kernel may replace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn.modules import module as _module


def has_hooks(module: nn.Module) -> bool:
    """Return True if a call of a module runs more than the forward of its class."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._compiled_call_impl
        or "forward" in vars(module)
        or _module._global_forward_hooks
        or _module._global_forward_pre_hooks
    )


def are_products(modules: Iterable[Any]) -> bool:
    """Return True if modules are linear layers that multiply by their weight and do nothing else."""
    return all(type(module) is nn.Linear and not has_hooks(module) for module in modules)
