"""What ``torch.compile`` cannot trace and need not: facts of the process, read once when a graph is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["constant_when_traced"]

P = ParamSpec("P")
R = TypeVar("R")


def constant_when_traced(function: Callable[P, R]) -> Callable[P, R]:
    """Have ``torch.compile`` call a function once while it traces, and keep the answer in the graph.

    NOTE: this is ``torch.compiler.assume_constant_result``, which imports the whole compiler (seconds) to set one mark.

    Args:
        function: takes and returns strings, numbers or None, and answers the same for as long as a graph may live.

    Example:
        >>> @constant_when_traced
        ... def answer() -> int:
        ...     return 42
        >>> answer()
        42
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
