"""Prepares a model for streams: its forward is traced once and cut at its recurrent layers into
stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import _disable_current_modes

from raglane._utils.checks import check_count
from raglane._utils.messages import quote
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError, RaglaneError
from raglane.nn.embeddings import Mixed
from raglane.nn.pooling import AttentionPooling, Pooling
from raglane.nn.recurrent.packed_weights import packed_weights
from raglane.nn.recurrent.stack import Stack
from raglane.programs.graph import Columns, Refused, StepGraph
from raglane.programs.lower import Lowering
from raglane.programs.rules import RULES
from raglane.programs.step import default_modes, replaced
from raglane.programs.trace import Trace, Tracer, rows_for
from raglane.ragged import Ragged
from raglane.streams.cuts import ACTIVE, Cut, TracedBatch, cut_of
from raglane.streams.prepared import Prepared
from raglane.streams.stages import Stage, digest_of, layer_stages, lookup_stage, program_stage
from raglane.streams.stateful import CELLS, as_cell, states_of_forward

P = ParamSpec("P")
R = TypeVar("R")

_FIX = "change the model, or call it on whole sequences without an engine"
_GUESS = "pass feature_shape, the shape of an element, if it is another one; or change the model"


def prepare(
    model: Any, features: int | Sequence[int] | None = None, dtype: torch.dtype | None = None
) -> Prepared:
    """Return the stages of a model."""
    whole = _Chain(model) if isinstance(model, list | tuple | nn.Sequential) else model
    if not isinstance(whole, nn.Module):
        rule = "a module, or a list of modules that run one after the other"
        raise ArgumentTypeError("model", f"a {type(model).__name__}", rule, "pass a module")
    if dtype not in (None, torch.int8):
        rule = "torch.int8, or None for the dtype of the weights"
        raise ArgumentError("dtype", quote(dtype), rule, "pass torch.int8, or leave it out")
    sizes = features if isinstance(features, list | tuple) else [features]
    shape = (
        None if features is None else tuple([check_count("feature_shape", size) for size in sizes])
    )
    states = states_of_forward(whole)
    for name, module in whole.named_modules():
        reason, fix = _unsupported(module, in_step=bool(states))
        if reason:
            raise _refused(f"{name or 'the model'} ({type(module).__name__}), {reason}", fix)
    if states:
        shape = _guessed(whole) if shape is None else shape
        if shape is None:
            raise _refused("a model of tokens with the state as an argument", "pass numbers")
        whole = as_cell(whole, shape, states)
    is_int8 = dtype is torch.int8 or any(map(_answers_in_int8, whole.modules()))
    with default_modes(grad=False):
        return _Tracing(whole, shape, is_int8).prepared()


def _answers_in_int8(module: nn.Module) -> bool:
    """Return True for a layer with packed int8 weights, while they are valid."""
    if not isinstance(module, Stack):
        return False
    packed = packed_weights(module)
    return packed is not None and packed.is_int8 and bool(packed.packed_for(module._weights()))


def _unsupported(module: nn.Module, in_step: bool) -> tuple[str, str]:
    """Return why a module cannot run on streams, and the fix; ``in_step`` if the model runs one step
    at a time.
    """
    if isinstance(module, Stack | nn.RNNBase) and module.bidirectional:
        return "which reads sequences from the end", "build the layer with bidirectional=False"
    if isinstance(module, Stack):
        if not type(module).forward.__module__.startswith("raglane."):
            return "which has a forward of its own", "build the layer as one of rl.nn"
    elif isinstance(module, nn.RNNBase) and not (in_step and type(module) in CELLS):
        return "a layer of torch", "call rl.accelerate(model) first"
    elif isinstance(module, nn.MultiheadAttention):
        return "which reads whole sequences", "replace it by a recurrent layer or a pooling"
    elif isinstance(module, torch.jit.ScriptModule):
        return "which is compiled by torch.jit", "load its weights into the module of its source"
    elif any(not tensor.is_cpu for tensor in (*module.parameters(False), *module.buffers(False))):
        return "which is not on the CPU", "call model.cpu() first"
    return "", ""


def _refused(got: str, fix: str = _FIX) -> DispatchError:
    return DispatchError("model", got, "a model that runs element by element", fix)


class _Chain(nn.Module):
    """Modules one after the other; of the result of a recurrent layer only the output continues."""

    def __init__(self, parts: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, batch: Ragged) -> Any:
        for module in self.parts:
            reads_batch = any(
                isinstance(inner, Stack | Cut | Pooling | AttentionPooling)
                for inner in module.modules()
            )
            batch = (
                batch.map(module)
                if isinstance(batch, Ragged) and not reads_batch
                else module(batch)
            )
            batch = batch[0] if isinstance(batch, tuple) else batch
        return batch


def _guessed(model: nn.Module) -> tuple[int, ...] | None:
    """Return the shape of an element by the first module with an input size; None for tokens."""
    for module in model.modules():
        match module:
            case nn.Embedding():
                return None
            case _ConvNd():
                break  # it reads any number of samples
            case Mixed():
                return (module.numbers + len(module.tables),)
            case nn.Linear():
                return (module.in_features,)
            case Stack() | nn.RNNCellBase() | nn.RNNBase():
                return (module.input_size,)
            case nn.LayerNorm():
                return (module.normalized_shape[0],)
    raise ArgumentError(
        "feature_shape",
        "None",
        "given for this model: the shape of an element",
        "pass e.g. feature_shape=64",
    )


def _untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Call a function outside of the trace, whose modes of torch are active."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return function(*args, **kwargs)

    return call


def _evaluating(copy: Any) -> nn.Module:
    for module in copy.modules():
        module.training = False
    return cast(nn.Module, copy)


@dataclass(eq=False)
class _GraphPiece:
    """Stages that read columns, or read the input of the model, and the nodes of their outputs."""

    columns: Columns | None
    make: Callable[[int, int], list[Stage]]
    nodes: list[int] = field(default_factory=list)


class _Tracing:
    """Traces one model."""

    def __init__(self, model: nn.Module, features: tuple[int, ...] | None, int8: bool) -> None:
        self.model = model
        self.int8 = int8
        self.features = _guessed(model) if features is None else features
        self.is_guess = features is None
        floats = [
            tensor
            for tensor in (*model.parameters(), *model.buffers())
            if tensor.is_floating_point()
        ]
        self.narrow = floats[0].dtype if floats else torch.float32
        self.dtype = torch.float32 if self.narrow is torch.bfloat16 else self.narrow
        self.refusals: list[str] = []
        self.states: list[Any] = []
        self.tokens = 0
        self._pieces: list[_GraphPiece] = []
        self._leaves: list[Tensor] = []

    def prepared(self) -> Prepared:
        """Return the stages."""
        example, expected = self._expected()
        width = math.prod(self.features or ())
        sizes = [
            size
            for tensor in (*self.model.parameters(), *self.model.buffers())
            for size in tensor.shape
        ]
        self.tracer = Tracer(self.dtype, rows_for([*sizes, width, *(self.features or ())]), RULES)
        self.rows = self.tracer.rows
        self.graph = self.tracer.graph
        copy = self._copied()
        self._read_node = -1
        if self.features is None:
            self._input = self.tracer.nothing(self.rows, dtype=torch.int64)
        else:
            flat, self._read_node = self.tracer.source("element", width)
            self._input = self.tracer.wrap(
                self.tracer.marks(flat).reshape(self.rows, *self.features), self.dtype
            )
        batch = TracedBatch._make(
            self._input, self.tracer.nothing(self.rows + 1, dtype=torch.int64), None
        )
        token = ACTIVE.set(self)
        try:
            output = self.tracer.run(lambda: self._rows_of(copy(batch)))
            flat = self.tracer.wrap(self.tracer.marks(output).reshape(self.rows, -1), output.dtype)
            columns = self.tracer.columns(flat, flat.shape[1])
        except Exception as error:
            raise self._named(error, copy) from error
        finally:
            ACTIVE.reset(token)
        result = StepGraph(self.graph, [], [], [], columns, [])
        shape = tuple(int(size) for size in output.shape[1:])
        prepared = self._assembled(self.tracer.finish(result, True), columns, shape)
        self._verify(prepared, example, expected)
        return prepared

    def _copied(self) -> nn.Module:
        """Return the model with traced tensors, and with cuts in place of its recurrent layers."""
        copies: dict[int, Any] = {}
        for module in self.model.modules():
            kind = cut_of(module)
            if kind is not None and id(module) not in copies:
                copies[id(module)] = kind(module)
        leaves: dict[int, Tensor] = {}

        def swap(tensor: Tensor) -> Tensor:
            if id(tensor) not in leaves:
                value = tensor.detach()
                value = value.to(self.dtype) if value.dtype is torch.bfloat16 else value
                self._leaves.append(value)
                leaves[id(tensor)] = self.tracer.leaf(value, tensor)
            return leaves[id(tensor)]

        # Also those of cuts: a head may share the weight of an embedding.
        for parameter in self.model.parameters():
            swap(parameter)
        return _evaluating(replaced(self.model, swap, copies))

    def _expected(self) -> tuple[Ragged, Any]:
        """Return a small batch, and the result of the model in plain torch."""
        generator = torch.Generator().manual_seed(0)
        shape = (4, *(self.features or ()))
        if self.features is None:
            values = torch.randint(0, 2, shape, generator=generator)
        else:
            values = torch.randn(shape, generator=generator).to(self.narrow)
        batch = Ragged._make(values, torch.tensor([0, 3, 4], device="cpu"), None)
        copy = _evaluating(replaced(self.model, lambda tensor: tensor))
        try:
            with torch._C._EnableTorchFunction():
                return batch, copy(batch)
        except Exception as error:
            raise self._named(error, copy) from error

    def _verify(self, prepared: Prepared, batch: Ragged, expected: Any) -> None:
        """Raise unless the stages compute what the model computes in plain torch."""
        results = prepared.run_whole(batch._values.reshape(4, -1), batch._offsets).double()
        reference = expected[0] if isinstance(expected, tuple) else expected
        reference = reference._values if isinstance(reference, Ragged) else reference
        if reference.shape[:1] == (2,):  # of whole sequences
            results = results[[2, 3]]
        reference = (
            reference.double().reshape(results.shape)
            if reference.numel() == results.numel()
            else reference
        )
        off = 5e-2 if self.narrow is torch.bfloat16 else 1e-3
        is_close = reference.shape == results.shape and torch.allclose(
            results, reference, off, off, equal_nan=True
        )
        if not is_close and not self.int8:
            raise _refused("a model whose results differ from those of its traced operations")

    def _rows_of(self, result: Any) -> Tensor:
        """Return the result of the model as a tensor with a row per element."""
        is_pair = isinstance(result, tuple) and len(result) == 2
        if is_pair and any(result[1] is state for state in self.states):
            result = result[0]
        result = result._values if isinstance(result, Ragged) else result
        if not isinstance(result, Tensor) or result.dim() < 1 or result.shape[0] != self.rows:
            got = (
                f"{len(result)} results"
                if isinstance(result, tuple | list | dict)
                else f"a {type(result).__name__}"
            )
            raise Refused(f"it returns {got}, not one Ragged or tensor with a row for each element")
        return result.unsqueeze(1) if result.dim() == 1 else result

    def _named(self, error: Exception, copy: nn.Module) -> Exception:
        """Return the error of a refusal, with the innermost module of the model that was
        running.
        """
        if not isinstance(
            error, Refused | RaglaneError | RuntimeError | TypeError | ValueError | AttributeError
        ):
            return error
        names = {id(inner): name for name, inner in copy.named_modules()}
        name = ""
        where = ""
        trace = error.__traceback__
        kind = type(self.model).__name__
        while trace is not None:
            module = trace.tb_frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in names:
                name = names[id(module)]
                kind = type(module._whole[0] if isinstance(module, Cut) else module).__name__
            called = trace.tb_frame.f_code.co_name
            is_method = isinstance(module, TracedBatch) and hasattr(type(module), called)
            is_public = called != "map" and not called.startswith("_")
            if is_method and isinstance(error, Refused) and is_public:
                where = where or f"its call of Ragged.{called}: "
            trace = trace.tb_next
        raised = f"it raised {type(error).__name__}: {str(error).rstrip('.')}"
        reason = error.reason if isinstance(error, Refused) else raised
        return _refused(
            f"{name or 'the model'} ({kind}): {where}{reason}", _GUESS if self.is_guess else _FIX
        )

    # Cuts.

    def _columns(self, rows: Tensor) -> Columns:
        if self.tracer._is_nothing(rows):
            raise Refused("it reads tokens without an embedding")
        return self.tracer.columns(rows, rows.shape[1])

    @_untraced
    def layer(self, layer: Stack, rows: Tensor) -> list[Tensor]:
        """Cut at a recurrent layer; return the outputs of each layer of its stack."""
        if rows.dim() != 2 or rows.shape[1] != layer.input_size:
            raise Refused(
                f"its input has shape {tuple(rows.shape[1:])} for input_size = {layer.input_size}"
            )

        def make(read: int, end: int) -> list[Stage]:
            return layer_stages(layer, read, end, self.narrow, self.int8, self.refusals)

        piece = _GraphPiece(self._columns(rows), make)
        outputs = []
        for _ in range(layer.num_layers):
            output, node = self.tracer.source("element", layer.output_size)
            outputs.append(output)
            piece.nodes.append(node)
        self._pieces.append(piece)
        return outputs

    @_untraced
    def lookup(self, module: nn.Module, input: Tensor) -> Tensor:
        """Cut at an embedding of the input of the model."""
        if input is not self._input:
            raise Refused(
                "it looks up indexes that the model computes, not the elements themselves"
            )
        example = torch.zeros(
            1, *(self.features or ()), dtype=torch.int64 if self.features is None else self.narrow
        )
        # A copy, which a training of the model does not change.
        frozen = _evaluating(replaced(module, lambda tensor: tensor.detach().clone()))
        example_out = frozen(example)
        width = int(example_out.numel())
        if isinstance(module, nn.Embedding):
            self.tokens = min(self.tokens or module.num_embeddings, module.num_embeddings)
        output, node = self.tracer.source("element", width)
        self._pieces.append(
            _GraphPiece(
                None, lambda _, __: [lookup_stage(frozen, width, example_out.dtype)], [node]
            )
        )
        return output

    # Stages.

    def _assembled(self, trace: Trace, columns: Columns, shape: tuple[int, ...]) -> Prepared:
        vectors, weights = trace.parameters.of(self._leaves)
        values_of = dict(zip(trace.result.vectors, vectors, strict=True))
        available = {} if self._read_node < 0 else {self._read_node: 0}
        stages: list[Stage] = []

        def index_of(rows: Columns) -> int:
            """Return the index of rows with these columns, after a program that computes them if
            necessary.
            """
            for node, index in available.items():
                if np.array_equal(rows, self.graph.columns(node)):
                    return index
            kinds: dict[int, Any] = dict.fromkeys(available, "element") | dict.fromkeys(
                values_of, "vector"
            )
            lowered = Lowering(self.graph, kinds, []).run([rows], [])
            reads = [available[node] for node in lowered.inputs.get("element", ())]
            inputs = [values_of[node] for node in lowered.inputs.get("vector", ())]
            if not reads:
                raise _refused("a model whose result does not depend on its input")
            stages.append(program_stage(reads, lowered, inputs, weights, self.narrow))
            node = int(self.graph.nodes_of(rows[:1])[0])
            if np.array_equal(rows, self.graph.columns(node)):
                available[node] = len(stages)
            return len(stages)

        for piece in self._pieces:
            read = 0 if piece.columns is None else index_of(piece.columns)
            try:
                outputs = piece.make(read, len(stages) + 1)
            except Refused as refused:
                raise _refused(refused.reason) from None
            for node, stage in zip(piece.nodes, outputs, strict=True):
                stages.append(stage)
                available[node] = len(stages)
        output = index_of(columns)
        if self.int8 and not any(getattr(stage.kernel, "is_int8", False) for stage in stages):
            got = (
                f"torch.int8, for {'; '.join(self.refusals) or 'a model without a recurrent layer'}"
            )
            raise DispatchError(
                "dtype",
                got,
                "None for a model without an RNN, LSTM or GRU in float32",
                "leave it out",
            )
        facts = repr((self.features, self.narrow, output, shape))
        return Prepared(
            tuple(stages),
            self.features or (),
            torch.int64 if self.features is None else self.narrow,
            self.tokens,
            output,
            shape,
            self.narrow,
            digest_of(stages, facts),
        )
