"""Parameters of Flax cells, of ``flax.linen`` and ``flax.nnx``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import check_choice, read_values
from raglane._utils.messages import quote_all
from raglane.errors import ArgumentError, ShapeError
from raglane.nn.porting.arrays import KINDS, Arrays, layer_of, matrix_of
from raglane.nn.recurrent.layer import RecurrentLayer

_DIRECTIONS = ("forward_rnn", "backward_rnn")
# The letters of the gates, in our order, by kind of cell.
_GATES = {"lstm": "ifgo", "gru": "rzn"}
_FIX = "pass the part of the parameters that belongs to the cell"


def of_flax(params: Mapping[str, Any], kind: str | None) -> RecurrentLayer:
    """Return the layer of the parameters of a Flax cell, ``RNN`` or ``Bidirectional``."""
    params = _innermost(params)
    if not isinstance(params.get(_DIRECTIONS[0]), Mapping):
        cells = [_cell_of(params)]
    else:
        if params.keys() != {*_DIRECTIONS} or not isinstance(params[_DIRECTIONS[1]], Mapping):
            rule = f"parameters with {quote_all(_DIRECTIONS)} only"
            raise ArgumentError("source", f"a dict with {quote_all(params)}", rule, _FIX)
        cells = [_cell_of(_innermost(params[name])) for name in _DIRECTIONS]
    kinds = sorted({cell_kind for cell_kind, _ in cells})
    if len(kinds) > 1:
        rule = "cells of one kind in both directions"
        fix = "convert each by itself"
        raise ArgumentError("source", " and ".join(kinds), rule, fix)
    choices = ("rnn", "rnn_relu") if kinds[0] == "rnn" else (kinds[0],)
    chosen = kinds[0] if kind is None else check_choice("kind", kind, choices)
    return layer_of(KINDS[chosen], [arrays for _, arrays in cells])


def _innermost(params: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters within dicts of one entry, such as "params" and "cell"."""
    seen = set()
    while len(params) == 1 and isinstance(inner := next(iter(params.values())), Mapping):
        if id(params) in seen:
            raise ArgumentError("source", "a dict that contains itself", "parameters", _FIX)
        seen.add(id(params))
        params = inner
    return params


def _cell_of(params: Mapping[str, Any]) -> tuple[str, Arrays]:
    """Return the kind of a cell, and its arrays."""
    names = {_plain(key): key for key in params}
    kind = next((kind for kind in _GATES if f"i{_GATES[kind][1]}" in names), None)
    gates = [*_GATES[kind]] if kind else [""]  # one matrix per gate, or one for all
    expected = [f"{side}{gate}" for side in "ih" for gate in gates]
    if not (names.keys() == {*expected} and len(names) == len(params)):
        rule = "the parameters of an LSTM, GRU or SimpleCell of Flax, or of an RNN of it"
        raise ArgumentError("source", f"a dict with {quote_all(params)}", rule, _FIX)
    arrays = {}
    for side in "ih":
        products = [_product_of(params[names[f"{side}{gate}"]], f"{side}{gate}") for gate in gates]
        shapes = sorted({tuple(kernel.shape) for kernel, _ in products})
        if len(shapes) > 1:
            raise ShapeError("source", f"kernels {quote_all(shapes)}", "kernels of one shape", _FIX)
        arrays[f"weight_{side}h"] = torch.cat([kernel for kernel, _ in products], 1).t()
        arrays[f"bias_{side}h"] = torch.cat([bias for _, bias in products])
    rows, columns = arrays["weight_hh"].shape
    return kind or {4 * columns: "lstm", 3 * columns: "gru"}.get(rows, "rnn"), arrays


def _plain(key: str) -> str:
    """Return a name without what flax.nnx adds: ``if_`` is ``if``, ``dense_i`` is ``i``."""
    return str(key).removeprefix("dense_").removesuffix("_")


def _product_of(params: Any, name: str) -> tuple[Tensor, Tensor]:
    """Return the kernel of a product, and its bias or zeros."""
    if not isinstance(params, Mapping) or not {"kernel"} <= params.keys() <= {"kernel", "bias"}:
        got = (
            f"a dict with {quote_all(params)}"
            if isinstance(params, Mapping)
            else f"a {type(params).__name__}"
        )
        raise ArgumentError(f"source: {name}", got, "a kernel, and a bias or none", _FIX)
    kernel = matrix_of(params["kernel"], f"{name}.kernel")
    bias = params.get("bias")
    if bias is None:
        return kernel, kernel.new_zeros(kernel.shape[1])
    bias = read_values(bias, f"{name}.bias")
    if bias.shape != kernel.shape[1:] or bias.device != kernel.device:
        got = f"shape {tuple(bias.shape)} on {bias.device}"
        rule = f"of shape {tuple(kernel.shape[1:])} on {kernel.device}, as the kernel requires"
        raise ShapeError(f"source: {name}.bias", got, rule, _FIX)
    return kernel, bias
