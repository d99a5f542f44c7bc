"""Recurrent networks on batches of sequences of different lengths, without padding.

    >>> import torch
    >>> import raglane as rl
    >>> batch = rl.Ragged([torch.randn(4, 12), torch.randn(2, 12), torch.randn(8, 12)])
    >>> lstm = rl.nn.LSTM(12, 64)
    >>> out, (h, c) = lstm(batch)
    >>> out.last().shape
    torch.Size([3, 64])

Names are imported when they are first used, so ``raglane --help`` does not import PyTorch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import raglane._utils.forks  # watches for forks from here on
import raglane._utils.moved  # noqa: F401 (finds modules by the paths in stored files)
from raglane._utils.lazy import lazy_names

if TYPE_CHECKING:
    from raglane import (
        data,
        distributions,
        errors,
        export,
        lens,
        nn,
        packing,
        plot,
        serve,
        sklearn,
        testing,
        transduction,
    )
    from raglane.data.collation import collate
    from raglane.kernels.dispatch import use_backend
    from raglane.nn.porting.accelerate import accelerate, to_torch
    from raglane.nn.porting.convert import import_layer
    from raglane.nn.recurrent.explain import explain
    from raglane.nn.recurrent.packed_weights import pack_weights, quantize
    from raglane.planner import plan
    from raglane.ragged import Ragged
    from raglane.runs.fit import fit
    from raglane.runs.run import Run, load
    from raglane.schedules import cost

__version__ = "0.1.0"

__all__ = [
    "Ragged",
    "Run",
    "accelerate",
    "collate",
    "cost",
    "data",
    "distributions",
    "errors",
    "explain",
    "export",
    "fit",
    "import_layer",
    "lens",
    "load",
    "nn",
    "pack_weights",
    "packing",
    "plan",
    "plot",
    "quantize",
    "serve",
    "sklearn",
    "testing",
    "to_torch",
    "transduction",
    "use_backend",
]

_HOMES = {
    "Ragged": "ragged",
    "Run": "runs.run",
    "accelerate": "nn.porting.accelerate",
    "collate": "data.collation",
    "import_layer": "nn.porting.convert",
    "cost": "schedules",
    "explain": "nn.recurrent.explain",
    "fit": "runs.fit",
    "load": "runs.run",
    "pack_weights": "nn.recurrent.packed_weights",
    "plan": "planner",
    "quantize": "nn.recurrent.packed_weights",
    "to_torch": "nn.porting.accelerate",
    "use_backend": "kernels.dispatch",
}
_MODULES = (
    *("cells", "data", "distributions", "errors", "export", "lens", "nn", "packing", "plot"),
    *("schedules", "serve", "sklearn", "streams", "testing", "training", "transduction"),
)


__getattr__ = lazy_names(__name__, {**_HOMES, **dict.fromkeys(_MODULES, "")})


def __dir__() -> list[str]:
    return sorted(__all__)
