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
from raglane.kernels.contract import DirectionResult, Request
from raglane.kernels.program.backend import run_direction as run_step
from raglane.kernels.program.modules import Named, cell_of, weights_of
from raglane.kernels.tensor_checks import check
from raglane.programs.parameters import gradients

# The arguments of a layer in one direction: a cell by its name, and which of its weights exist.
_ARGUMENTS = (
    "str cell, bool[] present, Tensor values, Tensor offsets, Tensor[] states, Tensor[] weights, bool reverse,"
    " bool need_output, bool need_states"
)


def _shapes(*arguments: Any) -> list[Tensor]:
    cell, _, values, _, states, _, _, need_output, need_states = arguments
    count = values.shape[0]
    size = states[0].shape[1] if cell in CELLS else cell_of(cell).output_size
    results = [values.new_empty(count, size)] if need_output else []
    results += [state.new_empty(state.shape) for state in states]
    if need_states:
        results += [values.new_empty(count, state.shape[1]) for state in states]
    return results


@operator("raglane::program", _shapes, f"({_ARGUMENTS}) -> Tensor[]")
def program(*arguments: Any) -> list[Tensor]:
    """Return the output, if needed, the final states, and all states, if needed."""
    # Copied, because the results of an operator must not share memory with its arguments.
    return [
        tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in _run(*arguments)
    ]


def _run(*arguments: Any) -> list[Tensor]:
    cell, present, values, offsets, states, weights, reverse, need_output, need_states = arguments
    spec, cell_weights = _equations(cell, present, values, states, weights)
    initial = tuple([state.unsqueeze(0) for state in states])
    layer = Request(
        spec,
        values,
        offsets,
        None,
        initial,
        (cell_weights,),
        need_output=need_output,
        need_states=need_states,
    )
    result = run_step(check(layer), cell_weights, tuple(states), reverse)
    output = [] if result.output is None else [result.output]
    return [*output, *result.state, *(result.states or ())]


def _equations(
    cell: str, present: list[bool], values: Tensor, states: list[Tensor], weights: list[Tensor]
) -> tuple[CellSpec, Any]:
    """Return the cell of a name, and its weights."""
    if cell in CELLS:
        spec = CELLS[cell]
        following = iter(weights)
        return spec, spec.weights_type(
            *[next(following) if is_present else None for is_present in present]
        )
    sizes = tuple([state.shape[1] for state in states])
    with _recorded():  # a changed module is traced and verified again
        return cell_of(cell), weights_of(cell, weights, values.shape[1], sizes, values.dtype)


def _shapes_of_gradients(*arguments: Any) -> list[Tensor]:
    _, _, values, _, states, weights, *_, needed = arguments
    pairs = zip((values, *states, *weights), needed, strict=True)
    return [
        torch.empty_like(tensor) if is_needed else values.new_empty(0)
        for tensor, is_needed in pairs
    ]


@operator(
    "raglane::program_backward",
    _shapes_of_gradients,
    f"({_ARGUMENTS}, Tensor?[] grads, bool[] wanted) -> Tensor[]",
)
def _backward(*arguments: Any) -> list[Tensor]:
    """Run the loop again; return the gradients of (values, states, weights), empty if unneeded."""
    cell, present, values, offsets, states, weights, *settings, grads, needed = arguments
    leaves = [
        tensor.detach().requires_grad_(is_needed)
        for tensor, is_needed in zip((values, *states, *weights), needed, strict=True)
    ]
    end = 1 + len(states)
    with torch.enable_grad(), _recorded():
        results = _run(cell, present, leaves[0], offsets, leaves[1:end], leaves[end:], *settings)
        pairs = [
            (result, grad)
            for result, grad in zip(results, grads, strict=True)
            if grad is not None and result.requires_grad
        ]
        computed = iter(gradients(pairs, [leaf for leaf in leaves if leaf.requires_grad]))
    return [
        _copy(next(computed), leaf) if leaf.requires_grad else values.new_empty(0)
        for leaf in leaves
    ]


def _copy(grad: Tensor | None, leaf: Tensor) -> Tensor:
    """Return a copy, because two biases that are added have the same gradient; zeros for None.

    It has the strides that the graph expects.
    """
    return torch.zeros_like(leaf) if grad is None else torch.empty_like(leaf).copy_(grad)


def _recorded() -> Any:
    """Return a context in which autograd records, which torch disables inside operators."""
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
        excluded = excluded.remove(key)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:  # noqa: ARG001
    cell, present, values, offsets, states, weights, *settings = inputs
    ctx.cell = cell
    ctx.present = present
    ctx.settings = settings
    ctx.count = len(states)
    ctx.needed = [tensor.requires_grad for tensor in (values, *states, *weights)]
    ctx.save_for_backward(values, offsets, *states, *weights)


def _op_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    values, offsets, *rest = ctx.saved_tensors
    count = ctx.count
    computed = _backward(
        ctx.cell,
        ctx.present,
        values,
        offsets,
        rest[:count],
        rest[count:],
        *ctx.settings,
        list(grads),
        ctx.needed,
    )
    grad_values, *others = [
        grad if is_needed else None for grad, is_needed in zip(computed, ctx.needed, strict=True)
    ]
    return None, None, grad_values, None, others[:count], others[count:], None, None, None


program.register_autograd(_op_backward, setup_context=_setup_context)


def run_direction(
    layer: Request, weights: Any, state: tuple[Tensor, ...], reverse: bool
) -> DirectionResult:
    """See :class:`~raglane.kernels.contract.RunDirection`."""
    name, tensors = weights if isinstance(weights, Named) else (layer.cell.name, list(weights))
    results = program(
        name,
        [tensor is not None for tensor in tensors],
        layer.values,
        layer.offsets,
        list(state),
        [tensor for tensor in tensors if tensor is not None],
        reverse,
        layer.need_output,
        layer.need_states,
    )
    output = None
    if layer.need_output:
        output, *results = results
    count = len(state)
    states = tuple(results[count:]) if layer.need_states else None
    return DirectionResult(output, tuple(results[:count]), states)
