"""The stages of a prepared model: each reads rows of elements, and appends new rows, one for each
element.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raglane.cells.module import WholeCell
from raglane.cells.regularised import MarkedWeights
from raglane.cells.spec import CellSpec
from raglane.kernels.cpu.prepared import Kernel, PreparedLayer, PreparedProgram, Rows
from raglane.kernels.program.backend import ready, step_of
from raglane.native.library import cell_facts, has_cell
from raglane.nn.recurrent.packed_weights import pack_products
from raglane.nn.recurrent.stack import Stack
from raglane.programs.graph import Refused
from raglane.programs.lower import Lowered, Lowering
from raglane.programs.program import printed
from raglane.programs.step import replaced
from raglane.ragged import Ragged


class Stage:
    """One call of the kernels, or of torch for an embedding."""

    def __init__(
        self,
        kernel: Kernel,
        reads: Sequence[int],
        starts: Sequence[Tensor],
        *facts: str | Tensor | None,
    ):
        self.kernel = kernel
        self.reads = tuple(reads)  # indexes of the rows that it reads
        # The first state of a stream, ``(size,)`` each.
        self.starts = tuple(
            [start.to(pool.dtype) for start, pool in zip(starts, kernel.pools(0), strict=True)]
        )
        self._facts = facts

    def after_another(self) -> Stage:
        """Return the stage with another one before the first."""
        return Stage(self.kernel, [row + 1 for row in self.reads], self.starts, *self._facts)

    def with_starts(self, starts: Sequence[Tensor]) -> Stage:
        """Return the stage with other first states of a stream."""
        return Stage(self.kernel, self.reads, starts, *self._facts)

    def facts(self) -> Iterable[bytes]:
        """Yield everything that affects the results."""
        for fact in (*self._facts, *self.starts):
            yield from [fact.encode()] if isinstance(fact, str) else _contents(fact)


def program_stage(
    reads: Sequence[int],
    lowered: Lowered,
    vectors: Sequence[Tensor],
    weights: Sequence[Tensor],
    dtype: torch.dtype,
    starts: Sequence[Tensor] = (),
) -> Stage:
    """Return a stage of operations on single elements, or of a cell without a kernel, as a
    program.
    """
    wide = torch.float32 if dtype is torch.bfloat16 else dtype
    turned = [
        weights[index].transpose(1, 2) if turned else weights[index]
        for index, turned in lowered.weights
    ]
    kernel = PreparedProgram(
        lowered.program, vectors=vectors, weights=turned, dtype=wide, output_dtype=dtype
    )
    return Stage(kernel, reads, starts, printed(lowered.program), *vectors, *turned)


class Lookup(Kernel):
    """An embedding of tokens or categories, which torch looks up."""

    def __init__(self, module: nn.Module, width: int, dtype: torch.dtype) -> None:
        super().__init__(width, dtype)
        self._module = module

    def run(self, rows: Rows) -> None:
        """See :class:`raglane.kernels.cpu.prepared.Kernel`."""
        rows.output.copy_(self._module(rows.inputs[0]).reshape(rows.output.shape))


def lookup_stage(module: nn.Module, width: int, dtype: torch.dtype) -> Stage:
    """Return a stage of an embedding of the input."""
    state = module.state_dict()
    return Stage(Lookup(module, width, dtype), [0], (), " ".join(state), *state.values())


class WholeBlock(Kernel):
    """A block that runs whole sequences, such as Mamba; ``module`` does not change."""

    def __init__(self, module: Any, sizes: Sequence[int]) -> None:
        dtype = next(module.parameters()).dtype
        wide = torch.promote_types(dtype, torch.float32)
        super().__init__(module.hidden_size, dtype, sizes, wide)
        self._module = module

    def run(self, rows: Rows) -> None:
        """See :class:`raglane.kernels.cpu.prepared.Kernel`."""
        states = tuple([pool.index_select(0, rows.slots) for pool in rows.pools])
        with torch.no_grad():
            output, finals = self._module.run_whole(rows.inputs[0], rows.offsets, states)
        rows.output.copy_(output)
        for pool, final in zip(rows.pools, finals, strict=True):
            pool.index_copy_(0, rows.slots, final)


def _whole_stage(module: Any, starts: Sequence[Tensor], reads: Sequence[int]) -> Stage:
    """Return a stage of a block, of a copy that a training does not change."""
    frozen = replaced(module, lambda tensor: tensor.detach().clone())
    pack_products(frozen)
    tensors = dict(frozen.named_parameters())
    kernel = WholeBlock(frozen, [start.shape[0] for start in starts])
    return Stage(kernel, reads, starts, repr(frozen), " ".join(tensors), *tensors.values())


def _contents(tensor: Tensor | None) -> Iterable[bytes]:
    if tensor is None:
        yield b"none"
        return
    flat = tensor.detach().contiguous()
    yield f"{tuple(flat.shape)} {flat.dtype}".encode()
    yield flat.reshape(-1).view(torch.uint8).numpy().tobytes()


def digest_of(stages: Iterable[Stage], rest: str) -> bytes:
    """Return a hash of everything that affects the results of stages."""
    digest = hashlib.sha256(rest.encode())
    for stage in stages:
        digest.update(repr((type(stage.kernel).__name__, stage.reads)).encode())
        for content in stage.facts():
            digest.update(content)
    return digest.digest()


def layer_stages(
    layer: Stack, read: int, next_read: int, dtype: torch.dtype, int8: bool, refusals: list[str]
) -> list[Stage]:
    """Return the stages of a recurrent layer, one for each layer of the stack; raise Refused if it
    has none.

    The first stage reads the rows ``read``, the others those of the stage before, which begin at
    ``next_read``. Outputs have ``dtype``. The reasons why layers keep their dtype although ``int8``
    is requested are appended to ``refusals``.
    """
    initial = _initial(layer)
    weights = layer._weights()
    stages: list[Stage] = []
    width = layer.input_size
    for depth in range(layer.num_layers):
        plain = layer.cell if depth == 0 else layer.cell.above()
        cell = layer.regularisation.cell(plain, False)
        layer_weights = weights[depth] if cell is plain else MarkedWeights(weights[depth], None)
        reads = [read if depth == 0 else next_read + depth - 1]
        starts = [state[depth] for state in initial]
        if has_cell(cell.name):
            weights_dtype = layer_weights[0].dtype
            is_elementwise = cell_facts()[cell.name].is_elementwise
            is_narrow = int8 and not is_elementwise and weights_dtype is torch.float32
            if int8 and not is_narrow:
                refusals.append(f"a layer {type(layer).__name__} of {weights_dtype}")
            stages.append(_kernel_stage(cell.name, layer_weights, starts, reads, is_narrow))
        else:
            if int8:
                refusals.append(f"a layer {type(layer).__name__}, which has no int8 kernel")
            stages.append(
                _whole_stage(layer_weights, starts, reads)
                if isinstance(cell, WholeCell)
                else _cell_stage(cell, layer_weights, width, starts, reads, dtype)
            )
        width = layer.output_size
    return stages


def _kernel_stage(
    cell: str, weights: Any, starts: Sequence[Tensor], reads: Sequence[int], int8: bool
) -> Stage:
    """Return a stage that runs a cell by its kernel."""
    tensors = [None if weight is None else weight.detach() for weight in weights]
    sizes = tuple([start.shape[0] for start in starts])
    kernel = PreparedLayer(cell, tensors, sizes, torch.int8 if int8 else None)
    return Stage(kernel, reads, starts, f"{cell} {'int8' if int8 else ''}", *tensors)


def _initial(layer: Stack) -> list[Tensor]:
    """Return the first states of a stream, ``(layers, size)`` each."""
    if layer.initial_state not in ("zeros", "learned"):
        raise Refused(f"its initial_state is {layer.initial_state!r}, which reads whole sequences")
    like = layer._like(layer._weights())
    sizes = layer.state_sizes
    if not layer._has_own_initial():
        dtype = torch.float32 if like is None else like.dtype
        return [torch.zeros(layer.num_layers, size, dtype=dtype, device="cpu") for size in sizes]
    with torch.no_grad():
        empty = Ragged._make(
            torch.empty(0, layer.input_size), torch.zeros(2, dtype=torch.int64), None
        )
        initial = layer._own_initial(empty)
    states = (initial,) if isinstance(initial, Tensor) else initial
    return [state[:, 0].detach().clone() for state in states]


def _cell_stage(
    cell: CellSpec,
    weights: Any,
    width: int,
    starts: Sequence[Tensor],
    reads: Sequence[int],
    dtype: torch.dtype,
) -> Stage:
    """Return a stage that runs a cell as a program."""
    step = step_of(cell, weights, width, tuple([start.shape[0] for start in starts]), dtype)
    compiled = ready(step)
    if not compiled.trace.prepares:
        raise Refused("its prepare cannot become a program")
    result = compiled.trace.result
    kinds: dict[int, Any] = dict.fromkeys(result.elements, "element") | dict.fromkeys(
        result.states, "state"
    )
    kinds |= dict.fromkeys(result.vectors, "vector")
    lowered = Lowering(result.graph, kinds, result.states).run([result.output], result.new)
    with torch.no_grad():
        vectors, products = compiled.trace.parameters.of(
            [step.converted(leaf.detach()) for leaf in step.leaves]
        )
    by_node = dict(zip(result.vectors, vectors, strict=True))
    inputs = [by_node[node] for node in lowered.inputs.get("vector", ())]
    return program_stage(reads, lowered, inputs, products, dtype, starts)
