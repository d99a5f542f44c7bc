"""The largest tensor of a computation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class _Sizes(TorchDispatchMode):
    largest = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for part in pytree.tree_leaves(result):
            if isinstance(part, Tensor):
                self.largest = max(self.largest, part.numel())
        return result


def largest_tensor(function: Callable[[], Any]) -> int:
    """Return the number of elements of the largest result of an operation in ``function``."""
    sizes = _Sizes()  # type: ignore[no-untyped-call]
    with sizes:
        function()
    return sizes.largest
