"""What the calls of a layer have in common: its plan, made once and again when something that it rests on has changed.

A layer changes seldom, so it is checked and the backend chosen once. Tensors are another matter: each call takes them
from the layer anew, and the backend looks at them in every call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from raglane._utils.tracing import are_transforms_active
from raglane.cells.spec import CellSpec
from raglane.kernels import dispatch, program
from raglane.kernels.contract import Backend, Traits
from raglane.kernels.cpu.kind import find_layer
from raglane.kernels.cpu.layer import Layer, LayerSpec
from raglane.nn.recurrent.kept import Kept, kept_of

if TYPE_CHECKING:
    from raglane.nn.recurrent.layer import RecurrentLayer

__all__ = ["Plan", "forget_plan", "plan_of"]


@dataclass(slots=True, eq=False)
class Plan:
    """What the calls of a layer have in common.

    Attributes:
        facts: what it was made of, and holds for.
        cell: the layer's equations.
        run_cell: what regularisation makes of them.
        state_sizes: the size of each state of ``cell``.
        layers, directions: how many of each.
        dropout: between layers; 0 outside of training.
        regularises: whether anything differs from the plain cell.
        begins: whether a sequence for which no state is given begins with anything but zeros.
        backend, schedule: who runs it, and how.
        kept: the weights that ``rl.freeze`` has packed, where this plan can use them.
        known: the one layer of the cpu kernels that is all there is to run, so that its calls need no request.
    """

    facts: tuple[Any, ...]
    cell: CellSpec
    run_cell: CellSpec
    state_sizes: tuple[int, ...]
    layers: int
    directions: int
    dropout: float
    regularises: bool
    begins: bool
    backend: Backend
    schedule: str
    kept: Kept | None
    known: Layer | None


# Not on the layers themselves, so that no copy, no pickle and nobody who looks through their attributes finds it.
_plans: WeakKeyDictionary[torch.nn.Module, Plan] = WeakKeyDictionary()


def plan_of(
    layer: RecurrentLayer,
    weights: tuple[Any, ...],
    data: Tensor,
    need_states: bool = False,
    is_dense: bool = False,
) -> Plan:
    """The plan for the calls of a layer as it is now: the last one, where all that it rests on is as it was."""
    width, size, layers = layer.input_size, layer.hidden_size, layer.num_layers
    facts = (
        layer.cell,
        width,
        size,
        layers,
        len(weights),
        getattr(layer, "proj_size", 0),
        layer.bidirectional,
        layer.dropout,
        layer.training,
        layer.schedule,
        layer.backend,
        layer.regularisation,
        layer.checkpoint_every,
        layer._has_own_initial(),
        data.dtype,
        data.device,
        need_states,
        is_dense,
        dispatch.override(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        are_transforms_active(),
    )
    if torch.compiler.is_compiling():
        return _make_plan(layer, facts, weights, data, need_states, is_dense)
    plan = _plans.get(layer)
    # 7.0 is equal to 7, and no size.
    if plan is None or plan.facts != facts or not (type(width) is type(size) is type(layers) is int):
        plan = _plans[layer] = _make_plan(layer, facts, weights, data, need_states, is_dense)
    return plan


def _make_plan(
    layer: RecurrentLayer,
    facts: tuple[Any, ...],
    weights: tuple[Any, ...],
    data: Tensor,
    need_states: bool,
    is_dense: bool,
) -> Plan:
    layer._check_sizes(len(weights))
    cell, rule = layer.cell, layer.regularisation
    run_cell = rule.cell(cell, layer.training)
    sizes = layer.input_size, layer.hidden_size
    checkpoints = layer.checkpoint_every is not None
    traits = Traits(run_cell, *sizes, data.dtype, data.device, need_states, weights, checkpoints)
    backend, schedule = dispatch.pick(traits, layer.schedule, layer.backend, dense=is_dense)
    if backend == "reference":
        _warn(layer, traits)
    return Plan(
        facts,
        cell,
        run_cell,
        layer.state_sizes,
        layer.num_layers,
        2 if layer.bidirectional else 1,
        layer.dropout if layer.training else 0.0,
        rule.acts(layer.training),
        layer._has_own_initial(),
        dispatch.BACKENDS[backend],
        schedule,
        _kept(layer) if backend == "cpu" else None,
        _known(layer, traits) if backend == "cpu" else None,
    )


def _kept(layer: RecurrentLayer) -> Kept | None:
    """What was packed of the weights, where a plan can use it."""
    if torch.compiler.is_compiling():
        return None  # what is compiled is never looked at again
    kept = kept_of(layer)
    return None if kept is not None and kept.of_int8 and layer.training else kept


def _known(layer: RecurrentLayer, traits: Traits) -> Layer | None:
    """The layer of the cpu kernels that runs all of this one by itself; None where there is more to do."""
    if layer.num_layers > 1 or traits.checkpoints or layer.regularisation.acts(layer.training):
        return None
    if torch.compiler.is_compiling() or are_transforms_active() or torch.is_autocast_enabled("cpu"):
        return None
    directions = 2 if layer.bidirectional else 1
    return find_layer(LayerSpec(traits.cell.name, traits.input_size, layer.state_sizes, directions, traits.dtype))


def _warn(layer: RecurrentLayer, traits: Traits) -> None:
    """Say once of a cell that plain torch runs it, where nobody chose that and no kernel can do what is asked."""
    chosen = dispatch.override()
    if {layer.schedule, layer.backend, *chosen} != {dispatch.AUTO} or are_transforms_active():
        return
    if torch.compiler.is_compiling():
        return
    reason = program.BACKEND.why_not(traits)
    if traits.checkpoints:
        reason = "checkpoint_every has kernels for RNN, LSTM and GRU on a CPU, without state dropout, zoneout and clip"
    if reason:
        program.warn(traits.cell, reason)


def forget_plan(layer: RecurrentLayer) -> None:
    """Make the layer's plan anew at its next call."""
    _plans.pop(layer, None)
