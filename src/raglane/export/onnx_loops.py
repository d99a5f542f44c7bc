"""Layers as operators of ONNX: LSTM, GRU and RNN for cells with their equations, Scan for others.

NOTE (empty sequences): ONNX does not define a ``sequence_lens`` of 0, and ONNX Runtime's result
differs by version and direction. So the operators get a length of at least 1, and the final state
of an empty sequence is replaced by its initial one; its outputs are not used.

NOTE (no sequences): ONNX Runtime's LSTM reads invalid memory if a batch has no rows. So an operator
or a Scan gets at least one row, an empty sequence, whose final state is removed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from raglane._utils.messages import require
from raglane.cells import GRU, LSTM, CoupledLSTM, Elman, PeepholeLSTM
from raglane.export.signature import elements_of_padded, padded_of_elements
from raglane.kernels import graph
from raglane.kernels.contract import Request, Result
from raglane.kernels.graph import MaskedStep, StepLayout
from raglane.segments import owners

OPSET = 20
SCAN = "raglane::MaskedStep"
"""A placeholder that :func:`place_scans` replaces by a Scan."""

# Dtypes of which ONNX Runtime has no TopK.
_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16)
# The largest constant in bytes, the limit of protocol buffers.
_MOST = 2**31 - 1


@dataclass
class OnnxLoops(graph.Loops):
    """Runs the layers of a model while it is traced, and keeps the steps of its Scans."""

    steps: list[MaskedStep] = field(default_factory=list)

    def run_layer(self, layer: Request, table: Callable[[], StepLayout]) -> Result | None:
        """See :class:`raglane.kernels.graph.Loops`."""
        operator = None if layer.need_states else _operator_of(layer)
        return None if operator is None else _run_operator(operator, layer, table())

    def run_loop(
        self,
        step: MaskedStep,
        table: StepLayout,
        prepared: Tensor,
        state: tuple[Tensor, ...],
        sizes: list[int],
        reverse: bool,
    ) -> list[Tensor]:
        """See :class:`raglane.kernels.graph.Loops`."""
        self.steps.append(step)
        whole, padded = _with_a_row(table, state)
        results = torch.onnx.ops.symbolic_multi_out(
            SCAN,
            [*padded, whole.padded(prepared), whole.is_real, *step.weights],
            {"step": len(self.steps) - 1, "reverse": reverse},
            dtypes=[prepared.dtype] * (step.states + len(sizes)),
            shapes=[
                *[value.shape for value in padded],
                *[(*whole.element.shape, size) for size in sizes],
            ],
            version=1,
        )
        final = [_of_sequences(*pair) for pair in zip(results[: step.states], state, strict=True)]
        return [*final, *results[step.states :]]


def _with_a_row(
    table: StepLayout, state: tuple[Tensor, ...]
) -> tuple[StepLayout, tuple[Tensor, ...]]:
    """Return a batch and its states, ``(..., B, size)``, with an empty sequence if there are
    none.
    """
    count: Any = torch.ones_like(table.lengths).sum().clamp(min=1).item()
    torch._check(count >= 1)
    row = torch.arange(count, device=table.lengths.device)
    total = table.row.shape[0]
    element = F.pad(table.element - total, (0, 1)).index_select(1, row) + total
    lengths = F.pad(table.lengths, (0, 1)).index_select(0, row)
    states = [F.pad(value, (0, 0, 0, 1)).index_select(-2, row) for value in state]
    return StepLayout(element, element < total, table.row, lengths), tuple(states)


def _of_sequences(state: Tensor, before: Tensor) -> Tensor:
    """Return the rows of a state without the added sequence."""
    return state.index_select(-2, torch.arange(before.shape[-2], device=state.device))


class _OnnxOperator(NamedTuple):
    """A recurrent operator of ONNX with the equations of a cell."""

    name: str
    gates: tuple[int, ...]  # the index of each of ONNX's gates among the cell's
    signs: tuple[int, ...]  # the factor of each; 0 for a gate that is not used
    attributes: dict[str, Any]


def _operator_of(layer: Request) -> _OnnxOperator | None:
    """Return the operator with a layer's equations, or None."""
    cell = layer.cell
    make = _OPERATORS.get(type(cell))
    # No operator has a projection, and ONNX Runtime has the operators only for float32.
    if make is None or layer.sizes[0] != layer.sizes[-1] or layer.values.dtype is not torch.float32:
        return None
    operator = make(cell)
    if operator is not None and cell._clip is not None:  # type: ignore[attr-defined]
        operator.attributes["clip"] = float(cell._clip)  # type: ignore[attr-defined]
    return operator


# ONNX's LSTM has the gates i, o, f, c; ours i, f, g, o, or with coupled gates f, g, o. With
# input_forget, ONNX's forget gate is 1 - i, which is f if i has the negated arguments of f.
_OPERATORS: dict[type, Callable[[Any], _OnnxOperator | None]] = {
    LSTM: lambda _: _OnnxOperator("LSTM", (0, 3, 1, 2), (1, 1, 1, 1), {}),
    PeepholeLSTM: lambda _: _OnnxOperator("LSTM", (0, 3, 1, 2), (1, 1, 1, 1), {}),
    CoupledLSTM: lambda _: _OnnxOperator("LSTM", (0, 2, 0, 1), (-1, 1, 1, 1), {"input_forget": 1}),
    GRU: lambda cell: _OnnxOperator(
        "GRU", (1, 0, 2), (1, 1, 1), {"linear_before_reset": int(cell._reset_after)}
    ),
    Elman: lambda cell: _OnnxOperator(
        "RNN", (0,), (1,), {"activations": ["Tanh" if cell._activation is torch.tanh else "Relu"]}
    ),
}


def _run_operator(operator: _OnnxOperator, layer: Request, table: StepLayout) -> Result:
    """Run a layer, in all its directions, as one node."""
    directions = layer.directions
    size = layer.sizes[0]
    table, initial = _with_a_row(table, layer.initial())
    attributes: dict[str, Any] = {
        "hidden_size": size,
        "direction": "bidirectional" if directions == 2 else "forward",
    }
    for name, value in operator.attributes.items():
        attributes[name] = value * directions if isinstance(value, list) else value
    weights = layer.weights
    inputs: list[Tensor | None] = [
        table.padded(layer.values),
        torch.stack([_reorder(operator, value.input) for value in weights]),
        torch.stack([_reorder(operator, value.hidden) for value in weights]),
        torch.stack([_biases(operator, value) for value in weights]),
        table.lengths.clamp(min=1).to(torch.int32),
        *[value.contiguous() for value in initial],
    ]
    if hasattr(weights[0], "peephole"):
        # ONNX's order of peepholes is i, o, f.
        inputs.append(
            torch.stack([_in_order(value.peephole, 3, (0, 2, 1), (1, 1, 1)) for value in weights])
        )
    steps, count = table.element.shape
    results = torch.onnx.ops.symbolic_multi_out(
        operator.name,
        inputs,
        attributes,
        dtypes=[layer.values.dtype] * (1 + len(initial)),
        shapes=[(steps, directions, count, size), *[value.shape for value in initial]],
        version=OPSET,
    )
    # (T, K, B, H) to (T, B, K * H).
    outputs = results[0].transpose(1, 2).flatten(2)
    is_empty = (table.lengths == 0).view(1, -1, 1)
    final = tuple(
        [
            _of_sequences(torch.where(is_empty, before, after), state)
            for state, before, after in zip(layer.initial(), initial, results[1:], strict=True)
        ]
    )
    return Result(table.flat(outputs) if layer.need_output else None, final, None)


def _reorder(operator: _OnnxOperator, weight: Tensor) -> Tensor:
    """Return the rows of the cell's gates in the operator's order."""
    return _in_order(weight, max(operator.gates) + 1, operator.gates, operator.signs)


def _in_order(weight: Tensor, count: int, gates: tuple[int, ...], signs: tuple[int, ...]) -> Tensor:
    rows = weight.shape[0] // count
    # Not chunk, because constants are not folded through operators with several outputs.
    blocks = [weight[gate * rows : (gate + 1) * rows] for gate in range(count)]
    return torch.cat(
        [
            blocks[gate] if sign > 0 else -blocks[gate]
            for gate, sign in zip(gates, signs, strict=True)
        ]
    )


def _biases(operator: _OnnxOperator, weights: Any) -> Tensor:
    """Return both biases, concatenated; zeros without biases."""
    nothing = weights.input.new_zeros(weights.input.shape[0])
    both = [nothing if bias is None else bias for bias in (weights.input_bias, weights.hidden_bias)]
    return torch.cat([_reorder(operator, bias) for bias in both])


# -- passes over a graph that torch has translated
# ---------------------------------------------------------------------


def place_scans(model: Any, steps: list[MaskedStep]) -> None:
    """Replace each placeholder by a Scan."""
    ir: Any = require("onnx_ir", "export")
    domain, _, kind = SCAN.partition("::")
    placeholders = [node for node in model.graph if node.domain == domain and node.op_type == kind]
    traced: dict[Any, Any] = {}
    for number, node in enumerate(placeholders):
        step = steps[node.attributes["step"].as_int()]
        loop = step.states + 2
        collected = len(node.outputs) - step.states
        direction = int(bool(node.attributes["reverse"].as_int()))
        key = _key(step, node)
        if key not in traced:
            traced[key] = _traced(step, node)
        scan = ir.node(
            "Scan",
            list(node.inputs[:loop]),
            attributes={
                "body": _body(traced[key].clone(), node.inputs[loop:], loop, f"scan_{number}"),
                "num_scan_inputs": 2,
                "scan_input_directions": [direction] * 2,
                "scan_output_directions": [direction] * collected,
            },
            num_outputs=len(node.outputs),
        )
        for old, new in zip(node.outputs, scan.outputs, strict=True):
            new.name = old.name
            new.shape = old.shape
            new.type = old.type
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], [scan], node.outputs, scan.outputs
        )
    model.graph.opset_imports.pop(domain, None)


def _key(step: MaskedStep, node: Any) -> Any:
    """Return a key that is equal for steps with equal graphs; modules may differ in more than their
    tensors.
    """
    if step.module is not None:
        return id(step)
    shapes = tuple(str(value.shape[-1]) for value in node.inputs[: step.states + 1])
    return (
        step.cell,
        step.need_states,
        shapes,
        tuple(weight.shape for weight in step.weights),
        step.present,
    )


def _body(graph: Any, weights: Any, loop: int, prefix: str) -> Any:
    """Return the graph of one step, which reads the weights of the outer graph."""
    ir: Any = require("onnx_ir", "export")
    for inner, outer in zip(list(graph.inputs[loop:]), weights, strict=True):
        ir.convenience.replace_all_uses_with(inner, outer)
    del graph.inputs[loop:]
    # Names must be unique in a model.
    for value in [
        *graph.inputs,
        *graph.initializers.values(),
        *[out for inner_node in graph for out in inner_node.outputs],
    ]:
        value.name = f"{prefix}_{value.name}"
    graph.name = prefix
    graph.opset_imports.clear()
    return graph


def _traced(step: MaskedStep, node: Any) -> Any:
    """Return the graph of one step for any number of rows."""
    ir: Any = require("onnx_ir", "export")
    kinds = {ir.DataType.FLOAT: torch.float32, ir.DataType.DOUBLE: torch.float64}
    kind = kinds[node.inputs[0].dtype]
    rows = 3  # not 1, which a trace would treat as a constant
    *states, row = [
        torch.zeros(rows, int(value.shape[-1]), dtype=kind)
        for value in node.inputs[: step.states + 1]
    ]
    is_real = torch.ones(rows, dtype=torch.bool)
    arguments = (*states, row, is_real, *[weight.detach() for weight in step.weights])
    dynamic = {0: torch.export.Dim.DYNAMIC}
    dims = tuple([dynamic] * (step.states + 2) + [None] * len(step.weights))
    program = torch.export.export(step, arguments, dynamic_shapes=(dims,), strict=False)
    translations = None
    if kind is torch.float64:
        program = program.run_decompositions(exact_decompositions())
        translations = exact_translations()
    exported: Any = torch.onnx.export(
        program,
        opset_version=OPSET,
        dynamo=True,
        verbose=False,
        optimize=False,
        custom_translation_table=translations,
    )
    simplify(exported.model)
    return exported.model.graph


def simplify(model: Any) -> None:
    """Fold constants, merge common subexpressions, and remove metadata of torch."""
    passes: Any = require("onnx_ir", "export").passes.common
    optimizer: Any = require("onnxscript.optimizer", "export")
    passes.InlinePass()(model)
    # Twice, because folding creates new constants.
    for _ in range(2):
        optimizer.fold_constants(model, input_size_limit=_MOST, output_size_limit=_MOST)
        passes.RemoveUnusedNodesPass()(model)
    for graph_pass in (
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        passes.DeduplicateInitializersPass(),
        passes.CommonSubexpressionEliminationPass(),
        passes.RemoveUnusedNodesPass(),
        passes.RemoveUnusedFunctionsPass(),
        passes.RemoveUnusedOpsetsPass(),
        passes.ClearMetadataAndDocStringPass(),
        passes.NameFixPass(),
    ):
        graph_pass(model)


# -- replacements of operators that torch's exporter does not translate
# ------------------------------------------------


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return replacements of operators for ``ExportedProgram.run_decompositions``."""
    import raglane.packing.conversion_operators  # noqa: F401 (registers ours)

    composed = torch.export.default_decompositions()
    return {
        torch.ops.aten.repeat_interleave.Tensor: _repeat_interleave,
        torch.ops.aten.repeat_interleave.self_Tensor: _repeat_rows,
        torch.ops.raglane.padded_to_flat.default: _padded_to_flat,
        torch.ops.raglane.padded_from_flat.default: _padded_from_flat,
        torch.ops.aten.sort.default: _sort,
        torch.ops.aten.sort.stable: _sort_stable,
        torch.ops.aten.argsort.default: lambda self, *rest, **named: _sort(self, *rest, **named)[1],
        torch.ops.aten.argsort.stable: lambda self, **named: _sort_stable(self, **named)[1],
        torch.ops.aten.mean.default: _mean,
        **_spreads(),
        torch.ops.aten.floor_divide.default: _floor_divide,
        **torch._decomp.get_decompositions(_LOSSES),
        **{operator.default: composed[operator.default] for operator in _COMPOSED},
    }


# Written as their means, of which ONNX's is 0 for no element.
_LOSSES = [
    torch.ops.aten.mse_loss,
    torch.ops.aten.smooth_l1_loss,
    torch.ops.aten.huber_loss,
    torch.ops.aten.multi_margin_loss,
    torch.ops.aten.multilabel_margin_loss_forward,
    torch.ops.aten.soft_margin_loss,
    torch.ops.aten.binary_cross_entropy,
    torch.ops.aten.binary_cross_entropy_with_logits,
]
_COMPOSED = [
    torch.ops.aten.cosine_embedding_loss,
    torch.ops.aten.cross_entropy_loss,
    torch.ops.aten.hinge_embedding_loss,
    torch.ops.aten.kl_div,
    torch.ops.aten.l1_loss,
    torch.ops.aten.margin_ranking_loss,
    torch.ops.aten.multilabel_margin_loss,
    torch.ops.aten.poisson_nll_loss,
    torch.ops.aten.triplet_margin_loss,
]


def exact_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return replacements of operators that ONNX computes partly in float32 for any dtype."""
    aten = torch.ops.aten
    others = (aten.celu, aten.elu, aten.hardsigmoid, aten.leaky_relu)
    return {**torch._decomp.get_decompositions(others), aten.layer_norm.default: _layer_norm}


def exact_translations() -> dict[Any, Callable[..., Any]]:
    """Return translations for graphs of float64, which do not round Python numbers to float32."""
    ir: Any = require("onnx_ir", "export")
    op: Any = require("onnxscript", "export").opset20

    # Without annotations by name, which the exporter evaluates in another namespace.
    def scalar_tensor(s, dtype=-1, layout="", device="", pin_memory=False):  # type: ignore[no-untyped-def]  # noqa: ARG001
        kind = ir.DataType(dtype if dtype > 0 else ir.DataType.FLOAT)
        if isinstance(s, int | float):
            return op.Constant(value=ir.tensor(s, dtype=kind))
        return op.Cast(s, to=kind)

    scalar_tensor.__annotations__ = {
        "s": float,
        "dtype": int,
        "layout": str,
        "device": str,
        "pin_memory": bool,
    }
    return {torch.ops.aten.scalar_tensor.default: scalar_tensor}


def _layer_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,  # noqa: ARG001
) -> Tensor:
    axes = list(range(-len(normalized_shape), 0))
    centred = input - input.mean(axes, keepdim=True)
    # Not a quotient by a root, which ONNX Runtime fuses to a LayerNormalization with a float32 eps.
    scaled = centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()
    scaled = scaled if weight is None else scaled * weight
    return scaled if bias is None else scaled + bias


def _repeat_interleave(repeats: Tensor, *, output_size: Any = None) -> Tensor:
    """Repeat each index ``repeats`` times."""
    ends = repeats.cumsum(0)
    total: Any = F.pad(ends, (1, 0))[-1].item() if output_size is None else output_size
    return owners(ends, total)


def _repeat_rows(
    self: Tensor, repeats: Tensor, dim: int | None = None, *, output_size: Any = None
) -> Tensor:
    if dim is None:
        return _repeat_rows(self.flatten(), repeats, 0, output_size=output_size)
    if repeats.dim() == 0 or repeats.shape[0] == 1:
        repeats = repeats.expand(self.shape[dim])
    return self.index_select(dim, _repeat_interleave(repeats, output_size=output_size))


def _mean(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return self.sum(dtype=dtype) / self.numel()


def _spreads() -> dict[Any, Callable[..., Any]]:
    """Return variances and standard deviations, of which ONNX's divide by a negative number for no
    element.
    """
    aten = torch.ops.aten

    def overloads(find: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        def by_flag(
            self: Tensor, dim: Sequence[int] | None, unbiased: bool = True, keepdim: bool = False
        ) -> Any:
            return find(self, dim, correction=int(unbiased), keepdim=keepdim)

        def of_all(self: Tensor, unbiased: bool = True) -> Any:
            return find(self, None, correction=int(unbiased))

        return {"correction": find, "dim": by_flag, "default": of_all}

    def std(self: Tensor, dim: Sequence[int] | None = None, **options: Any) -> Tensor:
        return _var(self, dim, **options).sqrt()

    def with_mean(find: Callable[..., Tensor]) -> Callable[..., Any]:
        def both(
            self: Tensor,
            dim: Sequence[int] | None = None,
            *,
            correction: float | None = None,
            keepdim: bool = False,
        ) -> tuple[Tensor, Tensor]:
            spread = find(self, dim, correction=correction, keepdim=keepdim)
            return spread, _mean_over(self, dim, keepdim)

        return both

    spreads = {
        aten.var: _var,
        aten.std: std,
        aten.var_mean: with_mean(_var),
        aten.std_mean: with_mean(std),
    }
    return {
        getattr(operator, overload): function
        for operator, find in spreads.items()
        for overload, function in overloads(find).items()
    }


def _mean_over(self: Tensor, dim: Sequence[int] | None, keepdim: bool) -> Tensor:
    dims = [*(dim or range(self.dim()))]
    return self.sum(dims, keepdim=keepdim) / math.prod(self.shape[each] for each in dims)


def _var(
    self: Tensor,
    dim: Sequence[int] | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Tensor:
    dims = [*(dim or range(self.dim()))]
    count = torch.scalar_tensor(math.prod(self.shape[each] for each in dims), dtype=self.dtype)
    apart = self - _mean_over(self, dims, keepdim=True)
    degrees = (count - (1 if correction is None else correction)).clamp(min=0)
    return apart.square().sum(dims, keepdim=keepdim) / degrees


def _floor_divide(self: Any, other: Any) -> Tensor:
    # torch's translation fails for a number that is divided by a tensor.
    dividend = self if isinstance(self, Tensor) else torch.full_like(other, self)
    return torch.div(dividend, other, rounding_mode="floor")


def _sort(self: Tensor, dim: int = -1, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Return sorted values and their index; equal values keep their order in ONNX's TopK."""
    count: Any = self.shape[dim]
    values = self.to(torch.int32) if self.dtype in _SMALL else self
    order = torch.topk(values, count, dim, largest=descending).indices
    if values.is_floating_point():  # NaN is the largest, and TopK has no place for it
        is_nan = values.isnan().to(torch.int32).gather(dim, order)
        order = order.gather(dim, torch.topk(is_nan, count, dim, largest=descending).indices)
    return self.gather(dim, order), order


def _sort_stable(
    self: Tensor,
    *,
    stable: bool | None = None,  # noqa: ARG001
    dim: int = -1,
    descending: bool = False,
) -> tuple[Tensor, Tensor]:
    return _sort(self, dim, descending)


def _padded_to_flat(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    return elements_of_padded(padded if batch_first else padded.transpose(0, 1), lengths)


def _padded_from_flat(flat: Tensor, offsets: Tensor, batch_first: bool, steps: Any) -> Tensor:
    padded = padded_of_elements(flat, offsets, steps)
    return padded if batch_first else padded.transpose(0, 1)
