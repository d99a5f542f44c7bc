"""Names of packages that load their module when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package.

    ``homes``: the module of each name within the package; "" for a name that is a module itself.
    """

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not homes[name]:
            return import_module(f"{package}.{name}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        # The next use finds it without a call.
        setattr(sys.modules[package], name, value)
        return value

    return load
