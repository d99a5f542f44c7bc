"""Many small cases within one test, each with its own seed; a failure names the case."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import pytest
import torch

Test = Callable[..., None]


def looped(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test for each case in a loop: ``pytest.mark.parametrize`` for many quick cases, as one item.

    ``names`` is one argument or a tuple of them, and ``cases`` their values. Fixtures are shared by all cases.

    Raises:
        ValueError: there are no cases, so that the test could not fail.
    """
    keys, found = ((names,) if isinstance(names, str) else names), list(cases)
    if not found:
        raise ValueError(f"cases of {names}: got none; a loop over them would test nothing")

    def decorate(test: Test) -> Test:
        @wraps(test)
        def run(**fixtures: Any) -> None:
            seed = torch.initial_seed()
            for index, case in enumerate(found):
                given = dict(zip(keys, (case,) if isinstance(names, str) else case, strict=True))
                torch.manual_seed(zlib.crc32(f"{seed} {index}".encode()))
                try:
                    test(**fixtures, **given)
                except pytest.skip.Exception as skipped:
                    raise RuntimeError(f"{given} would skip all cases after it: leave it out of the list") from skipped
                except BaseException as error:  # a failure of pytest is no Exception
                    error.add_note("case: " + ", ".join(f"{name} = {_told(value)}" for name, value in given.items()))
                    raise

        signature = inspect.signature(test)
        rest = [parameter for name, parameter in signature.parameters.items() if name not in keys]
        run.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return run

    return decorate


def _told(value: object) -> str:
    """Return the repr of a value, shortened; of a function, its name and line."""
    code = getattr(value, "__code__", None)
    text = repr(value) if code is None else f"{code.co_qualname} of line {code.co_firstlineno}"
    return text if len(text) <= 300 else f"{text[:300]}..."
