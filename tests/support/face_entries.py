"""An expression of ``face_cases`` for each entry of the table, and batches for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import face_cases as cases
import raglane as rl
from raglane.ragged.face import table

KIND = "features"
LENGTHS, _ = cases.BATCHES[KIND]
FLAT = cases.numbers_of(KIND)
OTHERS = cases.others_of(KIND)
BATCH = rl.Ragged.from_flat(FLAT["x"], lengths=LENGTHS)
REST = {
    name: rl.Ragged.from_flat(values, lengths=LENGTHS)
    for name, values in FLAT.items()
    if name != "x"
}
# Expressions of the steps, in place of those that read features, and of one call.
STEPS = {
    "binary_cross_entropy": "F.binary_cross_entropy(x.sigmoid(), m.double())",
    "bmm": "torch.bmm(x, g)",
    "bilinear": "F.bilinear(x, y, w.T[:, :, None] * v)",
    "cosine_similarity": "F.cosine_similarity(x, y)",
    "dropout2d": "F.dropout2d(x[..., None], 0.5, False)",
    "dropout3d": "F.dropout3d(x[..., None, None], 0.5, False)",
    "gather": "torch.gather(x, 1, k)",
    "glu": "F.glu(torch.cat([x, x], 1), 1)",
    "kthvalue": "x.kthvalue(1, 1)",
    "matmul": "torch.matmul(x, w)",
    "mm": "torch.mm(x, w)",
    "mode": "x.mode(1)",
    "mv": "torch.mv(x, v)",
    "normalize": "F.normalize(x)",
    "pad": "F.pad(x, (0, 0, 1, 1))",
    "permute": "x.unsqueeze(-1).permute(0, 1, 3, 2)",
    "prod": "x.prod(1)",
    "quantile": "x.quantile(0.3, 1)",
    "scaled_dot_product_attention": "F.scaled_dot_product_attention(x, y, x)",
    "split": "torch.split(x, 2, dim=-1)",
    "swapaxes": "x.unsqueeze(-1).swapaxes(-1, -2)",
    "swapdims": "torch.swapdims(x.unsqueeze(-1), 2, 3)",
    "take_along_dim": "torch.take_along_dim(x, k, 1)",
    "transpose": "x.unsqueeze(-1).transpose(-1, -2)",
    "var": "x.var(1)",
}
# Those of functions of each element that the candidates below do not call as torch does.
SPECIAL = {
    "addcdiv": "torch.addcdiv(x, y, p)",
    "addcmul": "torch.addcmul(x, y, p)",
    "alpha_dropout": "F.alpha_dropout(x, 0.5, False)",
    "bernoulli": "torch.bernoulli(q)",
    "bucketize": "torch.bucketize(x, v)",
    "clamp": "torch.clamp(x, 0.1, 0.9)",
    "clip": "torch.clip(x, 0.1, 0.9)",
    "dropout": "F.dropout(x, 0.5, False)",
    "expand_as": "x.mean(1)[:, None].expand_as(x)",
    "frexp": "torch.frexp(x)",
    "full_like": "torch.full_like(x, 1.5)",
    "imag": "torch.imag(torch.complex(x, y))",
    "isin": "torch.isin(i, lens)",
    "lerp": "torch.lerp(x, y, 0.3)",
    "masked_fill": "torch.masked_fill(x, m, 0.5)",
    "multigammaln": "torch.special.multigammaln(p + 1, 2)",
    "mvlgamma": "torch.mvlgamma(p + 1, 2)",
    "polygamma": "torch.polygamma(1, p)",
    "prelu": "F.prelu(x, v[:1])",
    "searchsorted": "torch.searchsorted(v.sort()[0], x)",
    "threshold": "F.threshold(x, 0.5, 0.1)",
    "where": "torch.where(m, x, y)",
}
CANDIDATES = "p; q, p; x, 2; i; i, i; m; m, m; x, y"
OPERATORS = {
    "__add__": "x + y",
    "__radd__": "2 + x",
    "__sub__": "x - y",
    "__rsub__": "2 - x",
    "__mul__": "x * y",
    "__rmul__": "2 * x",
    "__truediv__": "x / p",
    "__rtruediv__": "2 / p",
    "__div__": "x / 2",
    "__rdiv__": "3 / p",
    "__floordiv__": "i // 2",
    "__rfloordiv__": "20 // i",
    "__mod__": "i % 2",
    "__rmod__": "20 % i",
    "__pow__": "x ** 2",
    "__rpow__": "2 ** x",
    "__eq__": "x == y",
    "__ne__": "x != y",
    "__lt__": "x < y",
    "__le__": "x <= y",
    "__gt__": "x > y",
    "__ge__": "x >= y",
    "__and__": "m & m",
    "__rand__": "True & m",
    "__or__": "m | m",
    "__ror__": "True | m",
    "__xor__": "m ^ m",
    "__rxor__": "True ^ m",
}


@functools.cache
def of_others() -> dict[str, str]:
    """Return an expression for each entry that is no function of each element, or a property."""
    texts = (cases.REDUCTIONS, cases.WHOLE, cases.ALONG, cases.JOINS, cases.INDEX, cases.LOSSES)
    listed = [each for text in texts for each in cases.expressions(text)]
    chosen = dict(STEPS)
    for name, row in table.ROWS.items():
        word = name.rpartition(".")[2]
        found = [each for each in listed if f".{word}(" in each and each.count("(") < 3]
        over_steps = [each for each in found if ", 1)" in each or "dim=1" in each]
        if row.kind not in ("each element", "property"):
            chosen.setdefault(name, next(iter(over_steps or found), ""))
    return chosen


@functools.cache
def of_each() -> dict[str, str]:
    """Return an expression for each function of each element, one that torch accepts."""
    names = [name for name, row in table.ROWS.items() if row.kind == "each element"]
    return {name: OPERATORS.get(name) or SPECIAL.get(name) or _accepted(name) for name in names}


def _accepted(name: str) -> str:
    homes = {"torch": torch, "F": F, "torch.special": torch.special}
    home = next(each for each, module in homes.items() if hasattr(module, name))
    for arguments in CANDIDATES.split("; "):
        text = f"{home}.{name}({arguments})"
        try:
            result = eval(text, {"torch": torch, "F": F, **FLAT})
        except (RuntimeError, TypeError):
            continue
        if isinstance(result, Tensor):
            return text
    return ""


def function_of(expression: str) -> Callable[..., Any]:
    """Return a function of the batches whose body is the expression."""
    scope: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, **OTHERS}
    exec(f"def function(x, {', '.join(REST)}):\n    return {expression}\n", scope)
    return scope["function"]


def leaves(result: Any) -> list[Tensor]:
    """Return the tensors of a result, and the values of its batches."""
    parts = pytree.tree_leaves(result, is_leaf=lambda part: isinstance(part, rl.Ragged))
    flat = [part.values if isinstance(part, rl.Ragged) else part for part in parts]
    return [part for part in flat if isinstance(part, Tensor)]
