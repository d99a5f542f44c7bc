"""One layer in one direction as an operator, for ``torch.compile`` and ``torch.export``.

A separate file, because registering operators with torch takes longer than importing the rest of
Raglane. A graph contains a cell of the library by its name, and a user's module by its name in
:mod:`raglane.kernels.program.modules`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from raglane._utils.operators import operator
from raglane.cells import CELLS, CellSpec
from raglane.kernels.checks import check
from raglane.kernels.contract import DirectionResult, Request
from raglane.kernels.program.backend import run_direction as run_step
from raglane.kernels.program.modules import Named, cell_of, weights_of
from raglane.programs.parameters import gradients

# The arguments of a layer in one direction: a cell by its name, and which of its weights exist.
_ARGUMENTS = (
    "str cell, bool[] present, Tensor values, Tensor offsets, Tensor[] states, Tensor[] weights, bool reverse,"
    " bool need_output, bool need_states"
)


def _shapes(*given: Any) -> list[Tensor]:
    cell, _, values, _, states, _, _, need_output, need_states = given
    count = values.shape[0]
    size = states[0].shape[1] if cell in CELLS else cell_of(cell).output_size
    found = [values.new_empty(count, size)] if need_output else []
    found += [part.new_empty(part.shape) for part in states]
    return found + [values.new_empty(count, part.shape[1]) for part in states if need_states]


@operator("raglane::program", _shapes, f"({_ARGUMENTS}) -> Tensor[]")
def program(*given: Any) -> list[Tensor]:
    """Return the output if needed, the final states, and the states after each element if
    needed.
    """
    # Copied, because the results of an operator must not share memory with its arguments.
    return [part.detach().clone(memory_format=torch.contiguous_format) for part in _run(*given)]


def _run(*given: Any) -> list[Tensor]:
    cell, present, values, offsets, states, weights, reverse, need_output, need_states = given
    spec, own = _equations(cell, present, values, states, weights)
    initial = tuple([part.unsqueeze(0) for part in states])
    layer = Request(
        spec,
        values,
        offsets,
        None,
        initial,
        (own,),
        need_output=need_output,
        need_states=need_states,
    )
    ran = run_step(check(layer), own, tuple(states), reverse)
    return [*([] if ran.output is None else [ran.output]), *ran.state, *(ran.states or ())]


def _equations(
    cell: str, present: list[bool], values: Tensor, states: list[Tensor], weights: list[Tensor]
) -> tuple[CellSpec, Any]:
    if cell in CELLS:
        rest = iter(weights)
        return CELLS[cell], CELLS[cell].weights_type(
            *[next(rest) if is_there else None for is_there in present]
        )
    own = cell_of(cell)
    sizes = tuple([part.shape[1] for part in states])
    with _recorded():  # a changed module is traced and verified again
        return own, weights_of(cell, weights, values.shape[1], sizes, values.dtype)


def _shapes_of_gradients(*given: Any) -> list[Tensor]:
    values, _, states, weights = given[2:6]
    pairs = zip((values, *states, *weights), given[-1], strict=True)
    return [torch.empty_like(part) if wish else values.new_empty(0) for part, wish in pairs]


@operator(
    "raglane::program_backward",
    _shapes_of_gradients,
    f"({_ARGUMENTS}, Tensor?[] grads, bool[] wanted) -> Tensor[]",
)
def _backward(*inputs: Any) -> list[Tensor]:
    """Run the loop again; return the gradients of (values, states, weights), empty if not
    wanted.
    """
    cell, present, values, offsets, states, weights, *wishes, grads, wanted = inputs
    given = [
        part.detach().requires_grad_(wish)
        for part, wish in zip((values, *states, *weights), wanted, strict=True)
    ]
    own = given[1 : 1 + len(states)], given[1 + len(states) :]
    with torch.enable_grad(), _recorded():
        found = _run(cell, present, given[0], offsets, *own, *wishes)
        pairs = [
            pair
            for pair in zip(found, grads, strict=True)
            if pair[1] is not None and pair[0].requires_grad
        ]
        parts = iter(gradients(pairs, [part for part in given if part.requires_grad]))
    answers = [
        (part, next(parts)) if part.requires_grad else (values.new_empty(0), None) for part in given
    ]
    # Copied, because two biases that are added have the same gradient; with the strides that the
    # graph expects.
    return [
        torch.zeros_like(part) if grad is None else torch.empty_like(part).copy_(grad)
        for part, grad in answers
    ]


def _recorded() -> Any:
    """Return a context in which autograd records, which torch disables inside operators."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ARG001
    cell, present, values, offsets, states, weights, *wishes = inputs
    ctx.cell = cell
    ctx.present = present
    ctx.wishes = wishes
    ctx.counts = (len(states), len(weights))
    ctx.wanted = [part.requires_grad for part in (values, *states, *weights)]
    ctx.save_for_backward(values, offsets, *states, *weights)


def _op_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    values, offsets, *rest = ctx.saved_tensors
    count = ctx.counts[0]
    found = _backward(
        ctx.cell,
        ctx.present,
        values,
        offsets,
        rest[:count],
        rest[count:],
        *ctx.wishes,
        list(grads),
        ctx.wanted,
    )
    given = [part if wish else None for part, wish in zip(found, ctx.wanted, strict=True)]
    return None, None, given[0], None, given[1 : 1 + count], given[1 + count :], None, None, None


program.register_autograd(_op_backward, setup_context=_setup_context)


def run_direction(
    layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool
) -> DirectionResult:
    """See :class:`~raglane.kernels.contract.RunDirection`."""
    name, given = weights if isinstance(weights, Named) else (layer.cell.name, list(weights))
    present = [part is not None for part in given]
    there = [part for part in given if part is not None]
    wishes = reverse, layer.need_output, layer.need_states
    found = list(program(name, present, layer.values, layer.offsets, list(state), there, *wishes))
    output = found.pop(0) if layer.need_output else None
    count = len(state)
    return DirectionResult(
        output, tuple(found[:count]), tuple(found[count:]) if layer.need_states else None
    )
