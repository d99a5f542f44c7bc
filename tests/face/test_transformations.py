"""Each function of the table is right in each transformation of torch, or refused by its name.

An expression of ``face_cases`` stands for each entry, other than those of each element, which share
one call.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import face_cases as cases
from face_entries import BATCH, FLAT, REST, function_of, leaves, of_each, of_others
from raglane.errors import RaglaneError
from raglane.ragged.face import table

# Functions of torch itself that have no rule in a transformation; its error names them.
OF_TORCH = {
    "grad": {"equal", "allclose"},
    "jvp": {"equal", "allclose", "multi_margin_loss", "multilabel_margin_loss"},
    "vmap": {
        "equal",
        "allclose",
        "gumbel_softmax",
        "masked_select",
        "multi_margin_loss",
        "multilabel_margin_loss",
    },
}


def compare(results: Any, expected: Any) -> None:
    for one, other in zip(leaves(results), leaves(expected), strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, check_stride=False)


def in_grad(function: Callable[..., Any]) -> None:
    def total(values: Tensor) -> Tensor:
        parts = leaves(function(BATCH.with_values(values), **REST))
        return sum((part.sum() for part in parts if part.is_floating_point()), values.sum() * 0)

    values = FLAT["x"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(total(values), values)
    compare(torch.func.grad(total)(FLAT["x"]), expected)


def in_jvp(function: Callable[..., Any]) -> None:
    """Compare with the difference of two values."""

    def outputs(values: Tensor) -> list[Tensor]:
        parts = leaves(function(BATCH.with_values(values), **REST))
        return [values.sum(), *(part for part in parts if part.dtype is torch.float64)]

    tangent, step = torch.linspace(-1, 1, FLAT["x"].numel()).view_as(FLAT["x"]).double(), 1e-6
    tangents = torch.func.jvp(outputs, (FLAT["x"],), (tangent,))[1]
    highs, lows = (outputs(FLAT["x"] + sign * step * tangent) for sign in (1, -1))
    for found, above, below in zip(tangents, highs, lows, strict=True):
        expected = (above - below) / (2 * step)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


def in_vmap(function: Callable[..., Any]) -> None:
    samples = torch.stack([FLAT["x"], FLAT["x"] + 0.01 * FLAT["x"].sign()])

    def call(values: Tensor) -> list[Tensor]:
        return leaves(function(BATCH.with_values(values), **REST))

    alone = [call(values) for values in samples]
    compare(torch.vmap(call)(samples), [torch.stack(pair) for pair in zip(*alone, strict=True)])


WAYS = {"grad": in_grad, "jvp": in_jvp, "vmap": in_vmap}


@pytest.mark.parametrize("way", WAYS)
def test_functions_of_torch_func(way: str) -> None:
    wrong = {}
    for name, expression in of_others().items():
        if name in OF_TORCH[way]:
            continue
        outcome = "right"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                WAYS[way](function_of(expression))
        except RaglaneError as error:
            outcome = "refused" if name.rpartition(".")[2] in str(error) else f"{error}"
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        if outcome != ("refused" if way in table.ROWS[name].refused.split() else "right"):
            wrong[expression] = outcome
    assert not wrong


def allowed(way: str) -> list[str]:
    """Return the expressions that a graph can contain, and some of each element."""
    listed = [
        text for name, text in of_others().items() if way not in table.ROWS[name].refused.split()
    ]
    # torch.compile does not trace ~r. The tensors h and g have a fixed number of sequences.
    without = re.compile(r"detach|~" if way == "compile" else r"detach|~|\bh\b|\bg\b")
    return [
        text for text in [*cases.expressions(cases.EACH)[::6], *listed] if not without.search(text)
    ]


@pytest.mark.parametrize("part", range(4))
def test_compile(part: int) -> None:
    """In one graph for many functions: a graph takes seconds."""
    function = function_of(f"({', '.join(allowed('compile')[part::4])},)")
    compiled: Any = torch.compile(function, fullgraph=True, backend="eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch, for the cumulative sum
        compare(compiled(BATCH, **REST), function(BATCH, **REST))


@pytest.mark.parametrize("part", range(4))
def test_export(part: int) -> None:
    function = function_of(f"({', '.join(allowed('export')[part::4])},)")

    class Model(nn.Module):
        def forward(self, x: Any, rest: Any) -> Any:
            return leaves(function(x, **rest))

    size = {0: torch.export.Dim.DYNAMIC}
    sizes = ([size, size], {name: [size, size] for name in REST})
    program = torch.export.export(Model(), (BATCH, REST), dynamic_shapes=sizes, strict=False)
    compare(program.module()(BATCH, REST), leaves(function(BATCH, **REST)))


@pytest.mark.parametrize("way", ["compile", "export"])
def test_what_graphs_do_not_contain_is_named(way: str) -> None:
    refused = {
        name: text for name, text in of_others().items() if way in table.ROWS[name].refused.split()
    }
    assert len(refused) > 10
    for name, text in refused.items():
        function = function_of(text)
        with pytest.raises(Exception, match=name):
            (graph if way == "compile" else export)(function)


def graph(function: Callable[..., Any]) -> None:
    torch.compile(function, fullgraph=True, backend="eager")(BATCH, **REST)


def export(function: Callable[..., Any]) -> None:
    class Model(nn.Module):
        def forward(self, x: Any) -> Any:
            return leaves(function(x, **REST))

    torch.export.export(Model(), (BATCH,), strict=False)


def test_each_entry_has_an_expression() -> None:
    """Properties are among the cases of all real elements."""
    without = [name for name, text in (of_others() | of_each()).items() if not text]
    properties = [name for name, row in table.ROWS.items() if row.kind == "property"]
    without += [name for name in properties if f".{name}(" not in cases.WHOLE]
    assert not without
    assert of_others().keys() | of_each().keys() | set(properties) == table.ROWS.keys()
