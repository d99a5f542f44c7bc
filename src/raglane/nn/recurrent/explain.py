"""Explains which backend and schedule run a layer on a batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, overload

import torch

from raglane.cells.module import ModuleCell
from raglane.errors import ArgumentTypeError
from raglane.kernels import program as programs
from raglane.kernels.contract import Traits
from raglane.kernels.dispatch import Choice, choose, use_backend
from raglane.native.library import build_note
from raglane.nn.porting.accelerate import Acceleration, acceleration_of
from raglane.nn.recurrent.inputs import read
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.packed_weights import has_packed_products, packed_weights
from raglane.programs.step import replaced
from raglane.programs.trace import draws_random_numbers
from raglane.ragged import Ragged


@overload
def explain(layer: torch.nn.Module) -> Acceleration: ...
@overload
def explain(
    layer: torch.nn.Module,
    batch: Any,
    *,
    lengths: Any = None,
    with_states: bool = False,
    program: bool = False,
) -> Choice: ...
def explain(
    layer: torch.nn.Module,
    batch: Any = None,
    *,
    lengths: Any = None,
    with_states: bool = False,
    program: bool = False,
) -> Acceleration | Choice:
    """Return which backend and schedule would run a layer on a batch, and why, without running it.

    Without a batch, return which layers of a model :func:`raglane.accelerate` converts, and why not
    the others. Both results are meant to be printed. On a GPU, this function or the first call
    compares a kernel of Triton with torch before its first use. Neither can do so while a CUDA
    graph is captured.

    Args:
        layer: a recurrent layer of ``rl.nn``; without a batch, any module.
        batch: a Ragged, a PackedSequence or a tensor, as the layer accepts it.
        lengths: as in the call of the layer.
        with_states: True for a call of ``layer.with_states``.
        program: True to also show the program of the layer's step, if a program runs it.

    Returns:
        With a batch, ``backend``, ``schedule`` and ``reason``. Without one, ``replaced``, the names
        of the converted layers (``""`` is the model itself), and ``left``, a dict from the names of
        the others to the reason.

    Raises:
        Exception: the error of a user's cell whose step raises one, or returns another shape.
        ArgumentTypeError: ``layer`` is not a recurrent layer, or ``batch`` or ``lengths`` is none
            of its inputs.
        ShapeError: ``batch`` or ``lengths`` has another shape.
        DispatchError: the backend or schedule that the layer or ``rl.use_backend`` chose cannot run
            it.

    Example:
        >>> print(explain(rl.nn.LSTM(3, 4, backend="torch"), rl.Ragged([torch.randn(2, 3)])))
        backend torch, schedule packed: backend torch chosen for this layer
        >>> print(explain(rl.accelerate(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LSTM(3, 4)))))
        1 layer replaced: 1
    """
    if batch is None:
        return acceleration_of(layer)
    if not isinstance(layer, RecurrentLayer):
        fix = "call rl.accelerate(model) first, and pass one of its layers"
        raise ArgumentTypeError("layer", type(layer).__name__, "a recurrent layer of rl.nn", fix)
    inputs = read(batch, lengths, layer.batch_first)
    cell = layer.regularisation.cell(layer.cell, layer.training)
    sizes = (layer.input_size, layer.hidden_size)
    weights = layer._weights()
    every = layer.checkpoint_every if torch.is_grad_enabled() else None
    like = inputs.data.dtype, inputs.data.device
    traits = Traits(cell, *sizes, *like, with_states, weights, every is not None)
    choice = choose(traits, layer.schedule, layer.backend, kind=inputs.kind)
    if choice.backend == "reference" and isinstance(layer.cell, ModuleCell):
        _run_one_step(layer, inputs.flattened()[0])
    reasons = [choice.reason]
    listing = ""
    if choice.backend in ("cpu", "program") and (note := build_note()):
        reasons.append(note)
    if every is not None:
        reasons.append(f"backward recomputes the gates, {every} steps at a time")
    if choice.backend in ("program", "triton"):
        backend = programs.BACKEND if choice.backend == "program" else programs.GPU
        origin, listing = backend.origin(traits, program)
        reasons.append(origin)
    elif choice.backend == "cpu":
        reasons += _packing(layer, weights)
    return replace(choice, reason="; ".join(reasons), program=listing)


def _packing(layer: RecurrentLayer, weights: tuple[Any, ...]) -> list[str]:
    """Return how the weights of a layer on the cpu kernels are packed, if they ever were."""
    if isinstance(layer.cell, ModuleCell):
        return ["its weights are packed"] if has_packed_products(layer) else []
    packed = packed_weights(layer)
    if packed is None:
        return []
    if not packed.packed_for(weights):
        return ["no longer packed: its weights have changed"]
    if not packed.is_int8:
        return ["its weights are packed"]
    if layer.training:
        return ["quantised, but in training mode, where its weights stay float32"]
    return ["quantised: its weights are int8 in calls that record no gradients"]


@torch.no_grad()
def _run_one_step(layer: RecurrentLayer, batch: Ragged) -> None:
    """Run a step of a user's cell on the first elements of a batch, to raise what a call raises.

    A copy of the layer runs, and no random numbers are used up.
    """
    copy = replaced(layer, lambda tensor: tensor.detach().clone())
    starts = batch.offsets[:-1][batch.lengths > 0]
    first = Ragged.from_flat(batch.values[starts], lengths=torch.ones_like(starts))
    with use_backend(backend="reference"):
        draws_random_numbers(lambda: copy.forward(first))
