"""States from chunk to chunk of truncated backpropagation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane._utils.messages import message
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.recurrent.call import check_arguments, plan_of, prepare
from raglane.nn.recurrent.inputs import read
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.stack import State, one_or_tuple
from raglane.ragged import Ragged


def carry(layer: RecurrentLayer, input: Ragged, hx: State | None, begins: Tensor) -> Any:
    """The state with which a layer goes on to the next chunk: the last one's, and its own where a sequence begins.

    The last chunk's state is detached, which is where backpropagation through time is truncated. Rows that begin get
    what the layer begins with, zeros or whatever its ``initial_state`` is, and learned states get their gradients.
    What was in such a row before, a NaN too, is not read. A module as ``initial_state`` sees the chunk, which of a
    sequence that begins holds the first piece only.

    Args:
        layer: a layer of :mod:`raglane.nn` that runs in one direction.
        input: what the layer will read next, ``B`` pieces ``(N, input_size)``; row ``b`` goes on from row ``b`` of the
            chunk before.
        hx: the state that the layer returned with the last chunk; None for the first.
        begins: ``(B,)`` bool: where a sequence begins.

    Returns:
        The layer's ``hx`` for ``input``: ``(layers, B, size)``, a tuple where the cell has several.

    Raises:
        ArgumentTypeError: a layer, input, state or ``begins`` of the wrong kind; a bidirectional layer.
        ShapeError: sizes, dtypes or devices that do not fit.
        ArgumentError: no state, and a sequence that does not begin.

    Example:
        >>> import raglane as rl
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
        return one_or_tuple(fresh)
    is_fresh = begins.to(input.device, non_blocking=True).unsqueeze(1)
    given = prepare(layer, plan, inputs, weights, hx).initial()
    kept = (torch.where(is_fresh, new, old.detach()) for new, old in zip(fresh, given, strict=True))
    return one_or_tuple(tuple(kept))


def _check(layer: Any, input: Any, begins: Any) -> None:
    if not isinstance(layer, RecurrentLayer):
        got, rule = f"a {type(layer).__name__}", "a recurrent layer of rl.nn"
        raise ArgumentTypeError(message("layer", got, rule, "pass the layer, or convert torch's with rl.accelerate"))
    if layer.bidirectional:
        rule = "unidirectional: the reverse direction would begin at an end that has not arrived"
        fix = "build the layer with bidirectional=False"
        raise ArgumentTypeError(message("layer", "a bidirectional layer", rule, fix))
    if not isinstance(input, Ragged):
        raise ArgumentTypeError(message("input", f"a {type(input).__name__}", "a Ragged", "pass chunk.inputs"))
    if not isinstance(begins, Tensor) or begins.dtype is not torch.bool:
        got = str(begins.dtype) if isinstance(begins, Tensor) else f"a {type(begins).__name__}"
        raise ArgumentTypeError(message("begins", got, "a bool tensor", "pass chunk.begins"))
    if begins.shape != (len(input),):
        rule = f"a tensor of one bool per sequence, ({len(input)},)"
        raise ShapeError(message("begins", f"shape {tuple(begins.shape)}", rule, "pass chunk.begins"))


def _check_all_begin(input: Ragged, begins: Tensor) -> None:
    """Raise where a sequence goes on and no state is known; only the first chunk pays for the look."""
    if torch.compiler.is_compiling():
        return  # a question about values would break the graph
    goes_on = ~begins.cpu() & (input.host_lengths > 0)
    if bool(goes_on.any()):
        got = f"None, and row {int(goes_on.nonzero()[0, 0])} that does not begin"
        rule = "the state after the previous chunk, from which sequences continue"
        fix = "pass the state that the layer returned; save it with every checkpoint within an epoch"
        raise ArgumentError(message("hx", got, rule, fix))
