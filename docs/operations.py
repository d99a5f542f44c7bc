"""Writes docs/operations.md: python docs/operations.py. A test compares the page with the table.

The page lists the table of ``raglane.ragged.face``, by kind, and the replacements of what a Ragged
does not accept.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raglane.ragged.face import table
from raglane.ragged.face.entry import FunctionRow
from raglane.ragged.face.refusals import REFUSALS

PAGE = Path(__file__).with_suffix(".md")

_KINDS = {
    "each element": (
        "Functions of each element",
        "They include the operators of Python, and return a Ragged of the same lengths. Further "
        "arguments are numbers, "
        "batches of the same lengths, tensors with at most the dimensions of an element, and tensors "
        "`(B, 1, *features)`, which are repeated over the steps: `r - r.mean(1, keepdim=True)`.",
    ),
    "reduction": (
        "Reductions",
        "`dim=1` reduces the steps of each sequence to a tensor `(B, *features)`, a dimension of the "
        "features returns a "
        "Ragged, `dim=(0, 1)` and no `dim` reduce all real elements. `keepdim`, result types, the "
        "gradients of ties and the "
        "results of empty sequences are torch's. The methods `mean`, `nanmean`, `amax`, `amin`, `std`, "
        "`var` and "
        "`logsumexp` take `empty=`, the result of empty sequences.",
    ),
    "along a dim": (
        "Functions along a dimension",
        "`dim=1` are the steps of each sequence, `dim=-1` is the last dimension of an element, or the "
        "steps if there is "
        "none.",
    ),
    "features": (
        "Functions of the features",
        "They read or change the dimensions of an element. Sequences and steps stay the first two "
        "dimensions.",
    ),
    "join": (
        "Joins",
        "`torch.cat([a, b])` has the sequences of both, `torch.cat([a, b], 1)` longer sequences, "
        "`torch.cat([a, b], -1)` more features. `torch.unbind(r)` returns the sequences.",
    ),
    "index": (
        "Indices",
        "`r[:, :5]`, `r[:, 1:]` and `r[:, ::2]` are batches of the steps that a sequence has. `r[:, -1]` and "
        "`r[torch.arange(B), r.lengths - 1]` are tensors, and raise if a sequence has no such step. "
        "`r[..., 0]` is a "
        "feature, `r[1:3]` some sequences, and `r[mask]` with a Ragged of bools the elements where it is "
        "True.",
    ),
    "property": ("Properties", "They describe the values of a batch."),
    "loss": (
        "Losses",
        "Functions and modules mean what they mean for the flat rows `(N, C, ...)`: each real element "
        "counts once. All "
        'batches must have the same lengths. `reduction="none"` returns a Ragged, and `"batchmean"` '
        "divides by the number "
        "of sequences.",
    ),
}


def _names(kind: str) -> dict[str, FunctionRow]:
    return {
        name: row
        for name, row in table.ROWS.items()
        if row.kind == kind and not name.startswith("__")
    }


def _section(kind: str) -> str:
    """Return the section of a kind of functions."""
    title, text = _KINDS[kind]
    rows = _names(kind)
    lists = [f"## {title}", text, ", ".join(f"`{name}`" for name in sorted(rows)) + "."]
    if kind == "along a dim":
        few = [name for name, row in rows.items() if row.steps is None and name not in _OWN_STEPS]
        lists.append(f"Only of features: {', '.join(f'`{name}`' for name in sorted(few))}.")
    for place, text in _REFUSED.items():
        refused = sorted(name for name, row in rows.items() if place in row.refused.split())
        if refused:
            listed = ", ".join(f"`{name}`" for name in refused)
            lists.append(f"{text}: {listed}.")
    return "\n\n".join(lists)


_REFUSED = {
    "compile": "Over steps, between two graphs of `torch.compile`, an error with `fullgraph=True`",
    "export": "Over steps, an error within `torch.export`",
    "vmap": "An error within `torch.vmap`",
    "grad": "An error within `torch.func.grad`",
    "jvp": "Over steps, an error within `torch.func.jvp`",
    "onnx": "An error within `rl.export.onnx`",
}
_OWN_STEPS = ("flip", "gather", "take_along_dim", "index_select")


def _refused(pattern: str) -> list[str]:
    """Return some functions of torch whose names match a pattern."""
    homes: tuple[Any, ...] = (torch.nn.functional, torch, Tensor)
    names = {name for home in homes for name in dir(home) if name[:1] != "_"}
    matching = [name for name in names - table.ROWS.keys() if re.fullmatch(pattern, name)]
    return sorted(matching, key=lambda name: (len(name), name))[:8]


def _table_of_refusals() -> str:
    rows = [
        f"| {', '.join(f'`{name}`' for name in sorted(_refused(pattern)))} | {reason} | {fix} |"
        for pattern, reason, fix in REFUSALS
    ]
    return "\n".join(["| functions such as | refused | instead |\n| --- | --- | --- |", *rows])


def page() -> str:
    """Return the text of the page."""
    sections = "\n\n".join(_section(kind) for kind in _KINDS)
    return f"""# Operations

A `rl.Ragged` means what a tensor `(B, *, *features)` would mean in which only real elements exist. Dimension 0 are the
sequences, dimension 1 the steps, the others the features; without `dim` a function reads all real values. Functions and
methods have the arguments, results and gradients of PyTorch's for each sequence. `r.shape` is `(B, None, *features)`.
Type checkers see a tensor with these methods, so that functions of torch accept it. All functions are right in
`torch.compile`, `torch.export`, `torch.func.grad`, `torch.func.jvp`, `torch.vmap` and `rl.export.onnx` except where it
is noted; what is an error within `torch.export` is one within `rl.export.onnx`. `torch.compile` does not trace the
operator `~r`: call `torch.logical_not(r)`.

A step that a sequence does not have, or the maximum of an empty sequence, is an error. In graphs it is an assertion. A
file of ONNX has no assertions: ONNX Runtime raises an error of an index out of bounds on a CPU.
`python docs/operations.py` writes this page.

{sections}

## Not accepted

Functions that would mix sequences, or have no meaning for different lengths, raise an error that names a replacement.

{_table_of_refusals()}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
