"""Former paths of modules that files of ``torch.save`` and pickles name, and how they are loaded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "raglane.nn.recurrent.accelerate": "raglane.nn.porting.accelerate",
    "raglane.training.embeddings": "raglane.nn.embeddings",
}
"""The modules of today, by the paths in stored files."""


class _Finder(Loader):
    """Finds a module by its former path: an empty one, which looks names up in today's."""

    @staticmethod
    def find_spec(
        name: str,
        path: Sequence[str] | None = None,  # noqa: ARG004
        target: ModuleType | None = None,  # noqa: ARG004
    ) -> ModuleSpec | None:
        return ModuleSpec(name, _Finder()) if name in MOVED else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python create the module."""

    def exec_module(self, module: ModuleType) -> None:
        today = import_module(MOVED[module.__name__])
        vars(module)["__getattr__"] = lambda name: getattr(today, name)


# After the finders of Python, which find all modules of today.
sys.meta_path.append(_Finder)
