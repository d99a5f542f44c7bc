"""Carries states from chunk to chunk, for truncated backpropagation through time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.recurrent.call import check_arguments, plan_of, prepare
from raglane.nn.recurrent.inputs import read
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.stack import State, one_or_tuple
from raglane.ragged import Ragged


def carry(layer: RecurrentLayer, input: Ragged, hx: State | None, begins: Tensor) -> Any:
    """Return the initial state for the next chunk: the previous final state, or a new one where a
    sequence begins.

    The previous state is detached, so gradients end there: truncated backpropagation through time.
    Rows where a sequence begins get the layer's own initial state, zeros or its ``initial_state``;
    learned ones receive gradients. The previous values of such rows are ignored, even NaN. A module
    as ``initial_state`` is called with the chunk, which contains only the first piece of a sequence
    that begins.

    Args:
        layer: a layer of :mod:`raglane.nn` with one direction.
        input: the next chunk, ``B`` pieces ``(N, input_size)``; row ``b`` continues row ``b`` of
            the previous chunk.
        hx: the layer's final state of the previous chunk; None for the first chunk.
        begins: ``(B,)`` bool, True where a sequence begins.

    Returns:
        The ``hx`` for ``input``: ``(layers, B, size)``, or a tuple of them for a cell with several
        states.

    Raises:
        ArgumentTypeError: an argument is of the wrong kind, or the layer is bidirectional.
        ShapeError: sizes, dtypes or devices do not match.
        ArgumentError: ``hx`` is None, but a sequence does not begin.

    Example:
        >>> layer = rl.nn.GRU(3, 4)
        >>> _, state = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> chunk = Ragged([torch.randn(5, 3), torch.randn(4, 3)])
        >>> hx = carry(layer, chunk, state, torch.tensor([False, True]))
        >>> torch.equal(hx[:, 0], state[:, 0]), hx[:, 1].tolist(), hx.requires_grad
        (True, [[0.0, 0.0, 0.0, 0.0]], False)
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


def _check(layer: Any, input: Any, begins: Any) -> None:
    if not isinstance(layer, RecurrentLayer):
        got = f"a {type(layer).__name__}"
        rule = "a recurrent layer of rl.nn"
        raise ArgumentTypeError(
            "layer", got, rule, "pass the layer, or convert torch's with rl.accelerate"
        )
    if layer.bidirectional:
        rule = "a layer of one direction: the other would begin at the end of a sequence, in a later chunk"
        raise ArgumentTypeError(
            "layer", "a bidirectional layer", rule, "build the layer with bidirectional=False"
        )
    if not isinstance(input, Ragged):
        raise ArgumentTypeError(
            "input", f"a {type(input).__name__}", "a Ragged", "pass chunk.inputs"
        )
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
