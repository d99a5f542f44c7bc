"""Writes docs/operations.md: python docs/operations.py. A test compares its tables with the page.

Every function of the tables of ``raglane.ragged.functions`` is called with a Ragged and with a
nested tensor, forward and backward, and must give what it gives for the flat values.
"""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import raglane as rl
from raglane.errors import RaglaneError
from raglane.ragged import functions
from raglane.ragged.operations import SequenceOperations

PAGE = Path(__file__).with_suffix(".md")
_BOTH, _FORWARD, _NOT = "forward and backward", "only forward", "raises"
_OTHER, _WRONG = "another result", "a wrong gradient"
_HOMES = (torch.nn.functional, torch, torch.special)
_VERSION = torch.__version__.partition("+")[0]
_RANDOM = re.compile(r"dropout|rand|empty|bernoulli|rrelu|gumbel")
_LENGTHS, _SIZE = (3, 1, 2), 4

# Arguments after the input, of functions for which the general ones are no valid call.
_ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "addcdiv": (..., ...),
    "addcmul": (..., ...),
    "celu": (),
    "chunk": (2, -1),
    "cosine_similarity": (..., -1),
    "diff": (1, -1),
    "embedding": (torch.ones(9, 3),),
    "flip": ((-1,),),
    "full_like": (1.5,),
    "group_norm": (2,),
    "gumbel_softmax": (1.0, False, 1e-10, -1),
    "heaviside": (...,),
    "hardtanh": (),
    "index_select": (-1, torch.tensor([0, 2])),
    "layer_norm": ((_SIZE,),),
    "lerp": (..., 0.3),
    "linear": (torch.ones(3, _SIZE),),
    "masked_fill": (torch.arange(_SIZE) > 1, 0.0),
    "matmul": (torch.ones(_SIZE, 3),),
    "narrow": (-1, 0, 2),
    "norm": (2, -1),
    "normalize": (2.0, -1),
    "polygamma": (),
    "prelu": (torch.ones(1),),
    "rms_norm": ((_SIZE,),),
    "roll": (1, -1),
    "select": (-1, 0),
    "split": (2, -1),
    "tensor_split": (2, -1),
    "threshold": (0.5, 0.1),
    "topk": (2, -1),
    "unflatten": (-1, (2, 2)),
    "where": (),
}
_GENERAL: tuple[tuple[Any, ...], ...] = ((), (...,), (1,), (-1,), (0.1, 0.9))

# A method of Ragged, and the call of a nested tensor for the same numbers, if there is one.
_PER_SEQUENCE = {
    "r.first()": "",
    "r.last()": "",
    "r.sum()": "n.sum(dim=1)",
    "r.mean()": "n.mean(dim=1)",
    "r.max()": "n.amax(dim=1)",
    "r.min()": "n.amin(dim=1)",
    "r.logsumexp()": "torch.logsumexp(n, dim=1)",
    "r.softmax()": "torch.softmax(n, dim=1)",
    "r.cumsum()": "torch.cumsum(n, dim=1)",
    "r.reverse()": "torch.flip(n, (1,))",
    "r.shift(1)": "torch.roll(n, 1, 1)",
    "r.spread(r.sum())": "n.sum(dim=1, keepdim=True).expand_as(n)",
    "r.truncate(2)": "n[:, :2]",
    "r.windows(2)": "n.unfold(1, 2, 2)",
    "r.concat(r)": "torch.cat([n, n], dim=1)",
    "r.select([2, 0])": "n[[2, 0]]",
    "r.order_by_length()": "",
    "r[1:]": "n[1:]",
    "r[0]": "n[0]",
    "list(r)": "n.unbind()",
    "r.to_padded()[0]": "n.to_padded_tensor(0.0)",
    "r.to(torch.float64)": "n.to(torch.float64)",
    "rl.nn.LSTM(4, 3)(r)": "torch.nn.LSTM(4, 3, batch_first=True)(n)",
    "rl.nn.GRU(4, 3)(r)": "torch.nn.GRU(4, 3, batch_first=True)(n)",
}

# Frequent calls that a Ragged does not take.
_OTHERS = """
torch.transpose(x, -1, -2)|torch.permute(x, (0, 2, 1))|torch.reshape(x, (3, -1, 2, 2))|torch.flatten(x, -2)
torch.sort(x, dim=1)|torch.topk(x, 1, dim=1)|torch.median(x, dim=1)|torch.argmax(x, dim=1)|torch.std(x, dim=1)
torch.cummax(x, dim=1)|torch.diff(x, dim=1)|torch.cat([x, x])|torch.stack([x, x])|torch.unbind(x)
torch.chunk(x, 3)|torch.sum(x)|torch.mean(x)|torch.bmm(x, torch.ones(3, 4, 5))|torch.matmul(x, torch.ones(3, 4, 5))
torch.einsum('bti,ij->btj', x, torch.ones(4, 5))|torch.masked_select(x, x > 0)
torch.nn.functional.scaled_dot_product_attention(*3 * [heads(x)])|torch.nn.functional.pad(x, (1, 1))
torch.nn.functional.conv1d(x, torch.ones(1, 2, 1))|torch.nn.functional.batch_norm(x, None, None, training=True)
torch.nn.functional.instance_norm(x)|torch.nn.functional.max_pool1d(x, 2)|torch.nn.functional.interpolate(x, 2)
torch.nn.functional.mse_loss(x, x)|torch.nn.functional.l1_loss(x, x)|torch.nn.functional.huber_loss(x, x)
torch.nn.functional.kl_div(x, x)|torch.nn.functional.cross_entropy(x, x)|torch.cdist(x, x)|torch.allclose(x, x)
torch.repeat_interleave(x, 2, 1)|torch.tril(x)|torch.unique(x)|torch.quantile(x, 0.5)
"""


def _inputs() -> Iterator[tuple[Tensor, rl.Ragged, Tensor]]:
    """Yield flat values of each kind of numbers, and both batches of them."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(sum(_LENGTHS), _SIZE, generator=generator) * 0.8 + 0.1
    for values in (numbers, (numbers * 9).long(), numbers > 0.5, torch.complex(numbers, numbers)):
        if values.is_floating_point():
            values.requires_grad_()
        parts = values.split(_LENGTHS)
        yield (
            values,
            rl.Ragged.from_flat(values, lengths=_LENGTHS),
            torch.nested.as_nested_tensor([*parts], layout=torch.jagged),
        )


def _try(call: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a call returns, or its exception."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(*arguments)
        except Exception as error:  # any kind shows that the call is not supported
            return error


def _parts(result: Any) -> list[Tensor] | None:
    """Return the tensors of a result, flat; None if it is an exception or of another kind."""
    if isinstance(result, list | tuple):
        parts = [_parts(part) for part in result]
        return (
            None
            if None in parts
            else [*itertools.chain.from_iterable(part for part in parts if part is not None)]
        )
    if isinstance(result, rl.Ragged):
        return [result.values]
    if isinstance(result, Tensor):
        return [result.values() if result.is_nested else result]
    return None


def _gradient(result: list[Tensor], values: Tensor) -> Tensor | None:
    """Return the gradient of the sum of the squares of the results by the flat values."""
    parts = [part.square().sum() for part in result if part.requires_grad]
    if not parts:
        return None
    return torch.autograd.grad(
        torch.stack(parts).sum(), values, retain_graph=True, allow_unused=True
    )[0]


def outcome(found: Any, expected: Any, values: Tensor, exact: bool = True) -> str:
    """Return how far a result, or its exception, is that of the flat values, with its gradient."""
    parts, expected = _parts(found), _parts(expected)
    if parts is None:
        return _NOT
    is_same = len(parts) == len(expected) and all(
        a.shape == b.shape and (not exact or torch.allclose(a, b, equal_nan=True))
        for a, b in zip(parts, expected, strict=True)
    )
    if not is_same:
        return _OTHER
    wanted, got = (_try(_gradient, result, values) for result in (expected, parts))
    if wanted is None or isinstance(wanted, Exception):  # torch has no gradient of it
        return _BOTH
    if not isinstance(got, Tensor):
        return _FORWARD
    return _BOTH if not exact or torch.allclose(got, wanted, equal_nan=True) else _WRONG


def _call(name: str, batch: Any, rest: tuple[Any, ...]) -> Any:
    # Those of torch.nn.functional call methods of a tensor.
    homes = _HOMES[1:] if name in ("sigmoid", "tanh") else _HOMES
    function = next(getattr(home, name) for home in homes if hasattr(home, name))
    rest = tuple(batch if part is ... else part for part in rest)
    if name == "polygamma":
        return function(1, batch)
    if name == "where":
        return function(batch > 0.5, batch, 0.0)
    if name in ("cat", "concat", "concatenate", "stack"):
        return function([batch, batch], dim=-1)
    return function(batch, *rest)


def outcomes(name: str) -> tuple[str, str]:
    """Return the outcomes of a Ragged and of a nested tensor for the first valid call of a torch
    function.
    """
    for values, ragged, nested in _inputs():
        for rest in [_ARGUMENTS[name]] if name in _ARGUMENTS else _GENERAL:
            if name in functions._DIMENSION and name not in _ARGUMENTS and rest != (-1,):
                continue
            expected = _try(_call, name, values, rest)
            if _parts(expected) is not None:
                exact = _RANDOM.search(name) is None
                results = (_try(_call, name, batch, rest) for batch in (ragged, nested))
                return tuple(outcome(result, expected, values, exact) for result in results)
    raise ValueError(name)


def _require(holds: bool, text: str) -> None:
    if not holds:
        raise ValueError(text)


def _table_of_functions(names: list[str]) -> str:
    """Return a table of functions by the outcome of torch.nested."""
    groups: dict[str, list[str]] = {_BOTH: [], _FORWARD: [], _WRONG: [], _OTHER: [], _NOT: []}
    for name in sorted(names):
        ragged, nested = outcomes(name)
        _require(ragged == _BOTH, f"{name} of a Ragged: {ragged}")
        groups[nested].append(f"`{name}`")
    rows = [
        f"| {nested} | {len(found)} | {', '.join(found)} |"
        for nested, found in groups.items()
        if found
    ]
    return "\n".join(["| torch.nested | number | functions |\n| --- | --- | --- |", *rows])


def _eval(call: str, **names: Any) -> Any:
    torch.manual_seed(0)
    return _try(lambda: eval(call, {"torch": torch, "rl": rl, "heads": _heads}, names))


def _heads(x: Any) -> Any:
    """Return queries of two heads in the layout that attention requires; a Ragged unchanged."""
    return x if isinstance(x, rl.Ragged) else x.unflatten(-1, (2, _SIZE // 2)).transpose(1, 2)


def _table_of_sequences() -> str:
    """Return a table of the operations per sequence."""
    listed = {re.split(r"\W", call)[1] for call in _PER_SEQUENCE}
    missing = {name for name in vars(SequenceOperations) if not name.startswith("_")} - listed
    _require(not missing, f"methods without a row: {missing}")
    rows = []
    for mine, theirs in _PER_SEQUENCE.items():
        values, r, n = next(_inputs())
        expected = _eval(mine, r=r)
        _require(_parts(expected) is not None, f"{mine}: {expected}")
        answer = outcome(_eval(theirs, n=n), expected, values) if theirs else "has none"
        rows.append(f"| `{mine}` | {f'`{theirs}`' if theirs else ''} | {answer} |")
    return "\n".join(
        ["| Ragged | the same of a nested tensor `n` | torch.nested |\n| --- | --- | --- |", *rows]
    )


def _table_of_others() -> str:
    """Return a table of the calls that a Ragged does not take, with the replacement that its error
    names.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for call in re.split(r"[|\n]", _OTHERS.strip()):
        _, r, n = next(_inputs())
        error, found = _eval(call, x=r), _eval(call, x=n)
        _require(isinstance(error, RaglaneError), f"{call} of a Ragged: {error}")
        _require(
            not isinstance(_eval(call, x=torch.rand(3, 2, _SIZE)), Exception),
            f"{call} is no valid call",
        )
        answer, fix = (
            "raises" if isinstance(found, Exception) else "accepts it",
            str(error).partition(". ")[2],
        )
        groups.setdefault((answer, fix), []).append(f"`{call.replace('torch.nn.functional', 'F')}`")
    rows = [
        f"| {', '.join(calls)} | {answer} | {fix} |"
        for (answer, fix), calls in sorted(groups.items())
    ]
    return "\n".join(
        ["| call | torch.nested | instead, with a Ragged |\n| --- | --- | --- |", *rows]
    )


def page() -> str:
    """Return the text of the page."""
    dims, element = (
        [*functions._DIMENSION],
        [name for name in functions._ELEMENT if not name.startswith("__")],
    )
    return f"""# Operations

The functions of PyTorch that accept a `rl.Ragged`, the operations per sequence, and frequent calls that a Ragged does
not accept. `python docs/operations.py` writes this page: it makes each call with a Ragged and with a nested tensor of
the layout `torch.jagged`, in PyTorch {_VERSION}, and compares results and gradients with those of flat values. A
Ragged passes all of them; the columns "torch.nested" are for nested tensors. "Only forward" means that backward raises.

## Functions of each element

They include the operators of Python, and return a Ragged of the same lengths. Further arguments are numbers, tensors
with at most the dimensions of an element, and batches of the same lengths.

{_table_of_functions(element)}

## Functions of the features

{_table_of_functions([*functions._FEATURE])}

## Functions along a dimension of the features

They take `dim` counted from the end, e.g. `dim=-1`.

{_table_of_functions(dims)}

## Operations per sequence

They are methods, indexing and layers.

{_table_of_sequences()}

## Not accepted

A Ragged raises an error that names the replacement in the last column.

{_table_of_others()}
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
