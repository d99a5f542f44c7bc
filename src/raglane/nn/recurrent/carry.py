"""Carries states from chunk to chunk, for truncated backpropagation through time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.recurrent.call import check_arguments, plan_of, prepare
from raglane.nn.recurrent.inputs import read
from raglane.nn.recurrent.stack import Stack, State, one_or_tuple
from raglane.ragged import Ragged


def carried(layer: Stack, input: Any, hx: State | None, begins: Any) -> Any:
    """Return the initial state of a chunk: the detached state before it, or a new one where a
    sequence begins.

    A row that begins gets the layer's own initial state, and its previous values are not read.
    """
    _check(layer, input, begins)
    inputs = read(input, None, layer.batch_first)
    weights = layer._weights()
    plan = plan_of(layer, weights, inputs.data)
    check_arguments(layer, plan, inputs, weights, hx)
    fresh = prepare(layer, plan, inputs, weights, None).initial()
    if hx is None:
        _check_all_begin(input, begins)
        # A learned one is a view of its parameter.
        return one_or_tuple(tuple(map(torch.clone, fresh)))
    is_fresh = begins.to(input.device, non_blocking=True).unsqueeze(1)
    previous = prepare(layer, plan, inputs, weights, hx).initial()
    states = (
        torch.where(is_fresh, new, old.detach()) for new, old in zip(fresh, previous, strict=True)
    )
    return one_or_tuple(tuple(states))


def _check(layer: Stack, input: Any, begins: Any) -> None:
    if layer.bidirectional:
        got = "a tensor, for a bidirectional layer"
        rule = "None: the other direction would begin at the end of a sequence, in a later chunk"
        fix = "build the layer with bidirectional=False"
        raise ArgumentTypeError("begins", got, rule, fix)
    if not isinstance(input, Ragged):
        got = f"a {type(input).__name__}"
        raise ArgumentTypeError("input", got, "a Ragged in a call with begins", "pass chunk.inputs")
    if not isinstance(begins, Tensor) or begins.dtype is not torch.bool:
        got = str(begins.dtype) if isinstance(begins, Tensor) else f"a {type(begins).__name__}"
        raise ArgumentTypeError("begins", got, "a bool tensor", "pass chunk.begins")
    if begins.shape != (len(input),):
        rule = f"a tensor of one bool per sequence, ({len(input)},)"
        raise ShapeError("begins", f"shape {tuple(begins.shape)}", rule, "pass chunk.begins")


def _check_all_begin(input: Ragged, begins: Tensor) -> None:
    """Raise if a sequence continues without a state; only the first chunk waits for a device."""
    if torch.compiler.is_compiling():
        return  # reading values would break the graph
    continues = ~begins.cpu() & (input.lengths_cpu > 0)
    if bool(continues.any()):
        rule = "the final state of the previous chunk, because a sequence continues"
        fix = "pass the state that the layer returned; a checkpoint within an epoch must contain it too"
        raise ArgumentError(
            "hx", f"None, and row {int(continues.nonzero()[0, 0])} that does not begin", rule, fix
        )
