"""Runs programs on a GPU: makes the kernel of a program when it is first used, and launches it.

Nothing waits for the device. The kernel and its configuration depend on the program alone, and no
row reads another's numbers, so the results of a sequence have the same bits in any batch.
"""

from __future__ import annotations

import hashlib
import linecache
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from raglane._utils.tracing import constant_when_traced, is_exporting
from raglane.kernels.triton.places import Chunks, Places
from raglane.programs.graph import Refused
from raglane.programs.lower import Lowered
from raglane.programs.program import Block, Kind, Operand, Program, product_program

if TYPE_CHECKING:
    from raglane.kernels.triton.printer import PrintedKernel

# From here on an integer needs 64 bits.
_MOST_NARROW = 1 << 31
_KINDS: tuple[Kind, ...] = ("element", "sequence", "state", "vector")


def missing() -> str:
    """Return why no kernel runs here, empty if they do."""
    return "" if find_spec("triton") else "Triton is not installed"


@constant_when_traced
def precision() -> str:
    """Return the precision of products: as for torch's own, full or TF32."""
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def why_not_now() -> str:
    """Return why a kernel that must be compared with torch first cannot be compared now; empty if
    it can.
    """
    if is_exporting():
        return "its kernel has not been compared with torch, which cannot be done in a graph"
    if torch.cuda.is_current_stream_capturing():
        return "its kernel has not been compared with torch, which cannot wait while a graph is captured"
    if torch.cuda.get_sync_debug_mode():
        return "its kernel has not been compared with torch, which waits"
    return ""


class Compiled(NamedTuple):
    """A kernel and what belongs to it."""

    kernel: PrintedKernel
    function: Any
    ascending: bool
    tables: dict[torch.device, list[Tensor]]  # that it reads
    launchers: dict[tuple[torch.device, str], Any]  # Triton's kernel for a device and a precision
    before: Program | None = None  # the program of the products before it
    of_chunks: Compiled | None = None  # the kernel of what its chunks do to the states


class KernelInputs(NamedTuple):
    """The tensors that a kernel reads."""

    elements: Sequence[Tensor]  # and products
    sequences: Sequence[Tensor]
    states: Sequence[Tensor]
    shared: Sequence[Tensor]  # vectors and weights


@lru_cache(maxsize=256)
def compiled(program: Program, ascending: bool) -> Compiled:
    """Return the kernel of a program; raises Refused with the reason if there is none."""
    from raglane.kernels.triton.printer import kernel_of

    kernel = kernel_of(program, ascending)
    before = _products(program, kernel.before) if kernel.before else None
    of_chunks = None
    if "carried" in kernel.roles:
        with suppress(Refused):
            chunk_kernel = kernel_of(program, ascending, of_chunks=True)
            of_chunks = Compiled(chunk_kernel, function_of(chunk_kernel.text), ascending, {}, {})
    return Compiled(kernel, function_of(kernel.text), ascending, {}, {}, before, of_chunks)


def function_of(text: str) -> Any:
    """Return a kernel as a function of Triton, which reads its source by its name."""
    import triton

    from raglane.kernels.triton import functions

    name = f"<raglane kernel {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    names: dict[str, Any] = {**vars(functions), "__name__": __name__}
    exec(compile(text, name, "exec"), names)
    # One kernel for all sizes and strides: another would compile within a call, and might sum in
    # another order.
    code = names["kernel"].__code__
    sizes = [
        name
        for name in code.co_varnames[: code.co_argcount]
        if name in ("rows", "count") or name.endswith("_s")
    ]
    return triton.jit(names["kernel"], do_not_specialize=sizes)


def _products(program: Program, chosen: tuple[int, ...]) -> Program:
    """Return a program without states whose outputs are the results of some products."""
    blocks = list(program.blocks)
    instructions = []
    outputs = []
    for index in chosen:
        instruction = program.instructions[index]
        blocks.append(Block("local", instruction.width))
        result = Operand(len(blocks) - 1)
        instructions.append(replace(instruction, results=(result,)))
        outputs.append((result, instruction.width))
    blocks = [
        replace(block, kind="local", index=0) if block.kind in ("state", "sequence") else block
        for block in blocks
    ]
    return Program(tuple(blocks), program.weights, tuple(instructions), tuple(outputs), ())


def run(
    program: Program,
    *,
    places: Places | None = None,
    ascending: bool = True,
    elements: Sequence[Tensor] = (),
    sequences: Sequence[Tensor] = (),
    states: Sequence[Tensor] = (),
    vectors: Sequence[Tensor] = (),
    weights: Sequence[Tensor] = (),
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a program on a ragged batch; return its outputs ``(N, width)`` and the final states ``(B,
    width)``.

    All numbers are float32. ``weights`` are ``(groups, depth, rows)``, transposed in comparison
    with those of the cpu kernels, and contiguous. ``places`` are required if the program has
    states.
    """
    compiled_kernel = compiled(program, ascending)
    inputs = [_rows(tensor) for tensor in elements]
    if compiled_kernel.before is not None:
        products, _ = run(
            compiled_kernel.before, elements=elements, vectors=vectors, weights=weights
        )
        inputs += [_rows(tensor) for tensor in products]
    rows = [
        [_rows(tensor) for tensor in tensors]
        for tensors in (sequences, states, (*vectors, *weights))
    ]
    chunks = places.chunks if compiled_kernel.of_chunks and places is not None else None
    if chunks is None:
        return _launch(compiled_kernel, places, KernelInputs(inputs, *rows))
    return _launch_chunks(compiled_kernel, chunks, KernelInputs(inputs, *rows))


def _launch_chunks(
    compiled_kernel: Compiled, chunks: Chunks, inputs: KernelInputs
) -> tuple[list[Tensor], list[Tensor]]:
    """Run chunks as if they were sequences, after computing the states before them; see
    :func:`_launch`.
    """
    from raglane.kernels.triton.linear import carry

    ascending = compiled_kernel.ascending
    roles = compiled_kernel.kernel.roles

    def of_sequences(state: Tensor, *elements: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        program = carry(state.shape[1])
        return run(
            program, places=chunks.sequences, ascending=ascending, elements=elements, states=[state]
        )

    rows = [tensor.index_select(0, chunks.owner) for tensor in inputs.sequences]
    begin = [chunks.begin(tensor, ascending) for tensor in inputs.states]
    carried = [index for index, role in enumerate(roles) if role == "carried"]
    for index in carried:
        begin[index].zero_()
    _, changes = _launch(
        cast(Compiled, compiled_kernel.of_chunks),
        chunks.places,
        inputs._replace(sequences=rows, states=begin),
    )
    for index, b, a in zip(carried, changes[::2], changes[1::2], strict=True):
        (begin[index],), _ = of_sequences(inputs.states[index], b, a)
    outputs, finals = _launch(
        compiled_kernel, chunks.places, inputs._replace(sequences=rows, states=begin)
    )
    for index, (role, tensor) in enumerate(zip(roles, finals, strict=True)):
        if role == "summed":
            # The number that changes no other one.
            nothing = torch.full_like(inputs.states[index], -0.0)
            _, (finals[index],) = of_sequences(nothing, tensor, torch.ones_like(tensor))
        else:
            finals[index] = chunks.end(tensor, ascending)
    return outputs, finals


def _launch(
    compiled_kernel: Compiled, places: Places | None, inputs: KernelInputs
) -> tuple[list[Tensor], list[Tensor]]:
    """Launch a kernel; return its outputs and final states."""
    kernel = compiled_kernel.kernel
    like = inputs.elements[0]
    count = inputs.elements[0].shape[0]
    is_traced = is_exporting()  # the graph launches the kernel; sizes are symbols
    outputs = [like.new_empty(count, width) for width in kernel.outputs]
    rows = count
    order = list[Any]()
    if places is not None and kernel.has_steps:
        rows = places.order.shape[0]
        order = [count, places.order, _rows(places.offsets)]
    finals = [like.new_empty(rows, width) for width in kernel.finals]
    blocks = -(-rows // kernel.rows)
    if not is_traced and not blocks:
        return outputs, finals
    strided = [
        item
        for tensor in (*inputs.elements, *inputs.sequences, *inputs.states)
        for item in (tensor, tensor.stride(0))
    ]
    scratch = like.new_empty(blocks * kernel.scratch) if kernel.scratch else like
    arguments = [
        rows,
        *order,
        *strided,
        *inputs.shared,
        *_tables(compiled_kernel, like.device),
        *outputs,
        *finals,
        scratch,
    ]
    grid = blocks, kernel.blocks, 1
    arguments.append(used := precision())
    if is_traced:
        torch.library.wrap_triton(compiled_kernel.function)[grid](
            *arguments, num_warps=kernel.warps
        )
        return outputs, finals
    with torch.cuda.device_of(like):
        # Triton's own lookup takes longer than the launch. Its key has more than this one: dtypes,
        # which are always the same here, addresses that are multiples of 16, which all are, and
        # integers that need 64 bits.
        is_narrow = max(rows, count, *strided[1::2]) < _MOST_NARROW
        launcher = compiled_kernel.launchers.get((like.device, used)) if is_narrow else None
        if launcher is not None:
            launcher[grid](*arguments)
        else:
            launcher = compiled_kernel.function[grid](
                *arguments, num_warps=kernel.warps, maxnreg=kernel.registers
            )
            if is_narrow:
                compiled_kernel.launchers[like.device, used] = launcher
    return outputs, finals


def _rows(tensor: Tensor) -> Tensor:
    """Return a tensor whose rows are contiguous, at an address that is a multiple of 16, for which
    kernels compile.
    """
    is_whole = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    is_placed = tensor.storage_offset() == 0 if is_exporting() else tensor.data_ptr() % 16 == 0
    return tensor if is_whole and is_placed else tensor.clone(memory_format=torch.contiguous_format)


def _tables(compiled_kernel: Compiled, device: torch.device) -> list[Tensor]:
    if device not in compiled_kernel.tables:
        tables = [
            torch.tensor(table, dtype=torch.int32, device=device)
            for table in compiled_kernel.kernel.tables
        ]
        if is_exporting():
            return tables
        compiled_kernel.tables[device] = tables
    return compiled_kernel.tables[device]


# ---- the operations of the program backend -------------------------------------------------------


def run_lowered(
    lowered: Lowered,
    places: Places,
    ascending: bool,
    tensors: Mapping[int, Tensor],
    weights: Sequence[Tensor],
    over: Mapping[int, Tensor] = {},  # noqa: ARG001 (another thread may still read the row that an output overwrites)
) -> tuple[list[Tensor], list[Tensor]]:
    """Run the program of a lowered graph, whose inputs are ``given`` by node; see :func:`run`."""
    arguments: Any = {
        f"{kind}s": [tensors[node] for node in lowered.inputs.get(kind, ())] for kind in _KINDS
    }
    turned = [
        (weights[index] if turned else weights[index].mT).contiguous()
        for index, turned in lowered.weights
    ]
    return run(lowered.program, places=places, ascending=ascending, **arguments, weights=turned)


def times(rows: Tensor, weight: Tensor) -> Tensor:
    """Return ``rows @ weight.T``, group by group; the bits of a row do not depend on the other
    rows.
    """
    groups, width, depth = weight.shape
    outputs, _ = run(
        product_program(groups, width, depth), elements=[rows], weights=[weight.mT.contiguous()]
    )
    return outputs[0]


def outer_products(
    left: Tensor, right: Tensor | None, *, groups: int = 1, sums: bool = False
) -> tuple[Tensor | None, Tensor | None]:
    """Return the sums over the elements of the outer products of their rows, and of the rows of
    ``left``.
    """
    total = left.sum(0) if sums else None
    if right is None:
        return None, total
    if groups == 1:
        return (left.mT @ right).unsqueeze(0), total
    left_groups, right_groups = (
        tensor.unflatten(1, (groups, -1)).transpose(0, 1) for tensor in (left, right)
    )
    return left_groups.mT @ right_groups, total
