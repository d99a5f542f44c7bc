"""Layers of arrays, whose shapes and dtypes are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from raglane._utils.checks import read_values
from raglane._utils.messages import quote
from raglane.errors import ArgumentError, ShapeError
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.torch_layers import GRU, LSTM, RNN

Arrays = dict[str, Tensor]
"""The parameters of one direction, e.g. by ``"weight_ih"``."""

KINDS: dict[str, Callable[..., RecurrentLayer]] = {
    "lstm": LSTM,
    "gru": GRU,
    "gru_reset_before": partial(GRU, reset_after=False),
    "rnn": RNN,
    "rnn_relu": partial(RNN, nonlinearity="relu"),
}
Z_R_N = (1, 0, 2)
"""The indices of our gates r z n in the order of Keras and ONNX."""

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def layer_of(
    kind: Callable[..., RecurrentLayer],
    directions: Sequence[Arrays],
    states: Arrays | None = None,
    **options: Any,
) -> RecurrentLayer:
    """Return a layer with copies of arrays, also of learned ``states`` ``(directions, units)``."""
    hidden = directions[0]["weight_hh"]
    input_size = directions[0]["weight_ih"].shape[1]
    hidden_size = hidden.shape[1]
    states = states or {}
    layer = kind(
        input_size,
        hidden_size,
        bias="bias_ih" in directions[0],
        bidirectional=len(directions) == 2,
        initial_state="learned" if states else "zeros",
        device=hidden.device,
        dtype=dtype_of([*directions, states]),
        **({"batch_first": True} | options),
    )
    return filled(layer, directions, states)


def dtype_of(groups: Iterable[Arrays]) -> torch.dtype:
    """Return the dtype that represents the numbers of all arrays."""
    arrays = [(name, array) for group in groups for name, array in group.items()]
    for name, array in arrays:
        if array.is_meta:
            raise ArgumentError(
                f"source: {name}", "a tensor on meta", "an array of numbers", "load the weights"
            )
        if array.is_complex():
            rule = "real numbers"
            fix = "pass the weights of a recurrent layer"
            raise ArgumentError(f"source: {name}", str(array.dtype), rule, fix)
    dtype = reduce(torch.promote_types, [array.dtype for _, array in arrays])
    if dtype not in _DTYPES:
        rule = "of dtype float16, bfloat16, float32 or float64"
        raise ArgumentError("source", str(dtype), rule, "convert the arrays")
    return dtype


def filled(
    layer: RecurrentLayer, directions: Sequence[Arrays], states: Arrays | None = None
) -> RecurrentLayer:
    """Return the layer with copies of arrays, whose shapes are checked."""
    arrays = {
        f"{name}_l0{suffix}": array
        for suffix, direction in zip(("", "_reverse"), directions, strict=False)
        for name, array in direction.items()
    } | (states or {})
    parameters = dict(layer.named_parameters())
    for name in parameters.keys() | arrays.keys():
        if name not in parameters:
            rule = "arrays with the same names in both directions"
            raise ShapeError("source", f"{name} in one of them", rule, "convert each by itself")
    for name, parameter in parameters.items():
        array = arrays.get(name)
        if array is None or array.shape != parameter.shape:
            got = (
                f"arrays without {name}"
                if array is None
                else f"{name} of shape {tuple(array.shape)}"
            )
            rule = f"arrays with {name} of shape {tuple(parameter.shape)}"
            fix = "check that all arrays are of one layer, and of this kind"
            raise ShapeError("source", got, rule, fix)
        parameter.detach().copy_(array.detach())
    return layer


def ordered(array: Tensor, order: Sequence[int], gates: int = 3) -> Tensor:
    """Return blocks of rows in another order, of which ``array`` has one for each gate."""
    if array.shape[0] % gates:
        rule = f"arrays with a block for each of {gates} gates"
        raise ShapeError(
            "source", f"an array of {array.shape[0]} rows", rule, "check the kind of the cell"
        )
    return torch.cat([array.chunk(gates)[index] for index in order])


def matrix_of(array: Any, name: str) -> Tensor:
    """Return an array as a tensor with two dimensions."""
    tensor = read_values(array, name)
    if tensor.dim() != 2 or 0 in tensor.shape or not tensor.is_floating_point():
        rule = "a matrix of floating-point numbers that is not empty"
        got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
        raise ShapeError(name, got, rule, "pass the weights of a recurrent layer")
    return tensor


BACKWARDS = "convert a layer that reads forward, and call the result on batch.reverse()"


def check_option(
    name: str,
    value: Any,
    *valid: Any,
    fix: str = "use rl.nn.Recurrent with a cell that computes it",
) -> None:
    """Raise if an option of a foreign layer has a value that no layer of ours has."""
    if value not in valid:
        raise ArgumentError(f"source: {name}", quote(value), " or ".join(map(quote, valid)), fix)
