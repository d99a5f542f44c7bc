"""Kernels of Triton without a GPU: under its interpreter, and compiled for GPUs.

Each in a process of its own: Triton reads ``TRITON_INTERPRET`` when it is imported, and a compiled
kernel runs nowhere.
"""

from __future__ import annotations

import copy
import json
import linecache
import random
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import LAYERS, D, a_state, build, gradients, parts, results_of
from own_cells import Halved, Moved
from raglane.export import aot
from raglane.export.signature import Signature
from raglane.export.tracing import traced
from raglane.kernels.program import backend
from raglane.kernels.program.verify import verify, verify_loop
from raglane.kernels.triton import launch
from raglane.kernels.triton.linear import TANGENTS
from raglane.kernels.triton.places import Places
from raglane.kernels.triton.printer import PrintedKernel, kernel_of
from raglane.nn.recurrent import call
from raglane.programs.graph import Refused
from raglane.programs.program import Block, Instruction, Operand, Program
from random_programs import Case, draw, draw_lengths, tensors_for

USERS: dict[str, type[nn.Module]] = {"a user's LSTM": Moved, "a user's GRU": Halved}
NAMES = [*LAYERS, *USERS]
_UNITS, _CHANNELS = 20, 40  # more than one product's depth, and than the channels of an instance
_ELEMENTWISE = ("indrnn_relu", "indrnn_tanh", "sru", "qrnn", "mingru", "minlstm")
_TRITON = backend.MACHINES["cuda"]._replace(places=lambda *given: replace(Places(*given), long=20))
# More sequences than a block has rows, in an order that is not that of their lengths.
_LENGTHS = [1, 0, 1, 3, 2, 1, 1, 0, 2]


def layer_of(name: str, units: int = 0, **options: Any) -> Any:
    """Return a layer in float64; by default with few units, more than an instance of its kernel
    reads at a time.
    """
    units = units or (_CHANNELS if name in _ELEMENTWISE else _UNITS)
    if name in USERS:
        return rl.nn.Recurrent(USERS[name], D, units, **options).double()
    return build(name, units=units, **options)


def differences(name: str, with_resets: bool, units: int = 0) -> list[float]:
    """Return the largest errors of a layer in float32, relative to the largest number of the
    float64 reference.

    With resets, the steps of the kernel read them.
    """
    torch.manual_seed(0)
    # More than a pass of an element-wise loop, which is cut into chunks only in the longest
    # sequence.
    lengths = [*_LENGTHS, 17, 16, 23] if name in _ELEMENTWISE else _LENGTHS
    whole = layer_of(name, units, bidirectional=True)
    narrow = layer_of(name, units, bidirectional=True).float()
    narrow.load_state_dict(whole.state_dict())
    values, hx = torch.randn(sum(lengths), D, dtype=torch.float64), a_state(whole, len(lengths))
    states = parts(hx)
    found = []
    resets = (
        rl.Ragged.from_flat(torch.arange(sum(lengths)) % 4 != 1, lengths=lengths)
        if with_resets
        else None
    )
    for layer, used in ((whole, "reference"), (narrow, "program")):
        call._resets_in_steps = lambda *_, used=used: used == "program"
        dtype = next(layer.parameters()).dtype
        own = [part.detach().to(dtype).requires_grad_() for part in (values, *states)]
        given = tuple(own[1:]) if len(states) > 1 else own[1]
        with rl.use_backend(backend=used):
            batch = rl.Ragged.from_flat(own[0], lengths=lengths)
            results = results_of(layer.with_states(batch, given, resets=resets))
        found.append([*results, *gradients(results, [*own, *layer.parameters()])])
    return [_error(mine, right) for right, mine in zip(*found, strict=True)]


def _error(mine: Tensor, right: Tensor) -> float:
    return float((mine - right).abs().max() / (1 + right.abs().max()))


def of_a_program(seed: int) -> list[float]:
    """Return the errors of a random program, empty if it has no kernel."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    program = draw(chance, tame=True)
    case = tensors_for(program, draw_lengths(chance), ascending=chance.random() < 0.5)
    try:
        return _errors(case, 4)
    except (Refused, IndexError):  # a program without elements
        return []


def chunked(name: str) -> list[int]:
    """Return how often a forward and a backward pass run chunks of a long sequence."""
    layer, counts, run = layer_of(name).float(), [], launch._launch_chunks
    with (
        rl.use_backend(backend="program"),
        mock.patch.object(launch, "_launch_chunks", side_effect=run) as chunks,
    ):
        values = layer(
            rl.Ragged([torch.randn(length, D, requires_grad=True) for length in (3, 20, 21)])
        )[0].values
        counts.append(chunks.call_count)
        values.sum().backward()
    return [*counts, chunks.call_count - counts[0]]


def of_a_linear_program(seed: int) -> list[float]:
    """Return the errors of a random program that is linear in its first state, in chunks of 2
    steps.

    Of the other states, one is a sum, one is not read, one becomes 0, and one is a sum that is also
    an output.
    """
    chance = random.Random(seed)
    torch.manual_seed(seed)
    width = chance.choice([1, 5, 40])
    blocks = [
        *(Block("state", width, index) for index in range(5)),
        *(Block("element", width, x) for x in range(3)),
    ]
    instructions: list[Instruction] = []

    def add(operation: str, *operands: Operand) -> Operand:
        blocks.append(Block("local", width))
        instructions.append(Instruction(operation, (Operand(len(blocks) - 1),), operands, width))
        return Operand(len(blocks) - 1)

    factors = [Operand(-1, number=0.5), *(add("sigmoid", Operand(5 + index)) for index in range(3))]
    factors.append(add("lt", Operand(5), Operand(6)))
    values = [add("add", Operand(0), Operand(3))]
    for _ in range(8):
        operation, formulas = chance.choice(list(TANGENTS.items()))
        place = chance.choice([place for place, formula in enumerate(formulas) if formula])
        operands = [chance.choice(factors[:-1]) for _ in formulas]
        operands[place] = values[-1]
        if operation in ("add", "sub", "where"):
            operands = [chance.choice(values) if formula else factors[-1] for formula in formulas]
        values.append(add(operation, *operands))
    following = add("mul", values[-1], factors[1]), add("fma", values[1], factors[2], Operand(1))
    places = (*following, Operand(5), Operand(-1), add("add", Operand(4), Operand(6)))
    outputs = tuple((value, width) for value in (Operand(0), add("tanh", values[-1]), Operand(4)))
    program = Program(tuple(blocks), (), tuple(instructions), outputs, places)
    assert kernel_of(program, True).roles == ("carried", "summed", "plain", "plain", "carried")
    case = tensors_for(program, [1, 0, 11, 9, 2], ascending=chance.random() < 0.5)
    assert launch.compiled(program, case.ascending).of_chunks is not None
    return _errors(case, 8)


def _errors(case: Case, long: int) -> list[float]:
    """Return the errors of a program's results, infinite ones and NaN left out."""
    given: dict[str, Any] = dict(case.to(torch.float32).given)
    given["weights"] = [part.mT.contiguous() for part in given["weights"]]
    places = Places(case.offsets, int(case.offsets[-1]), long=long)
    outputs, finals = launch.run(case.program, places=places, ascending=case.ascending, **given)
    pairs = zip([*outputs, *finals], map(torch.from_numpy, case.expected()), strict=True)
    return [_error(mine.nan_to_num(), right.nan_to_num()) for mine, right in pairs if mine.numel()]


def growing(factors: list[float], state: float, ascending: bool) -> list[float]:
    """Return the states ``s = factor * s`` before each step, by chunks of 5 steps."""
    blocks = Block("state", 1), Block("element", 1), Block("local", 1)
    step = Instruction("mul", (Operand(2),), (Operand(1), Operand(0)), 1)
    program = Program(blocks, (), (step,), ((Operand(0), 1),), (Operand(2),))
    assert launch.compiled(program, ascending).of_chunks is not None
    places = Places(torch.tensor([0, len(factors)]), len(factors), long=20)
    given: Any = {
        "elements": [torch.tensor(factors).unsqueeze(1)],
        "states": [torch.full((1, 1), state)],
    }
    (states,), _ = launch.run(program, places=places, ascending=ascending, **given)
    return [float(part) for part in states.flatten()]


def alone_and_together(name: str) -> list[float]:
    """Return 0 for each sequence whose bits are the same alone and in a batch; one of them is cut
    into chunks.
    """
    # The interpreter's products are NumPy's, in which the bits of a row depend on its place.
    np.matmul = lambda one, other, **_: np.stack([row @ other for row in one])  # type: ignore[assignment]
    torch.manual_seed(0)
    layer = layer_of(name).float()
    batch = rl.Ragged([torch.randn(length, D) for length in (*_LENGTHS, 23)])
    with rl.use_backend(backend="program"):
        return [
            float(not torch.equal(layer(rl.Ragged([part]))[0].values, whole))
            for part, whole in zip(batch.to_list(), layer(batch)[0].to_list(), strict=True)
        ]


def launches_and_waits(name: str, longest: int = 0) -> list[int]:
    """Return the launches of kernels in a forward and a backward pass, and the numbers that the
    host reads in them.
    """
    layer = layer_of(name).float()
    lengths = [*_LENGTHS, longest]
    batch = rl.Ragged([torch.randn(length, D, requires_grad=True) for length in lengths])
    counts, run = [0, 0, 0], launch.run
    which = 0

    def counted(*args: Any, **options: Any) -> Any:
        counts[which] += 1
        return run(*args, **options)

    def waiting(method: Any) -> Any:
        def read(*args: Any) -> Any:
            counts[2] += 1
            return method(*args)

        return read

    resets = batch._like(torch.arange(sum(lengths)) % 4 == 1)
    call._resets_in_steps = lambda *_: True
    with rl.use_backend(backend="program"):
        layer(batch, resets=resets)[0].values.sum().backward()  # which makes the programs
        with ExitStack() as stack:
            for name in (
                "item",
                "tolist",
                "nonzero",
                "cpu",
                "numpy",
                "__bool__",
                "__int__",
                "__float__",
                "__index__",
            ):
                stack.enter_context(mock.patch.object(Tensor, name, waiting(getattr(Tensor, name))))
            stack.enter_context(mock.patch.object(launch, "run", counted))
            # Whose reads wait for no device, and are not counted.
            of_host: Any = np.array(lengths).view(type("OnHost", (np.ndarray,), {"is_cpu": True}))
            for check in ("check_unchanged", "check_host_offsets"):  # of offsets on the host
                stack.enter_context(mock.patch(f"raglane.ragged.base.{check}"))
            known = _TRITON._replace(
                places=lambda *given: replace(Places(*given), lengths=of_host, long=20)
            )
            stack.enter_context(mock.patch.dict(backend.MACHINES, cpu=known))
            values = layer(batch, resets=resets)[0].values
            which = 1
            values.sum().backward()
    return counts


def launched(name: str) -> None:
    """Write, as JSON, the launches of two equal training steps on a driver without a GPU, by kernel
    and argument.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import JITFunction, driver

    launches: list[list[Any]] = []

    def run(kernel: Any) -> Any:
        def launch_it(*given: Any) -> None:
            kinds = [part if isinstance(part, int | str) else type(part).__name__ for part in given]
            launches[-1].append([kernel.name, kernel.hash, *kinds])

        return launch_it

    driver.set_active(
        mock.MagicMock(**{"get_current_target.return_value": GPUTarget("cuda", 90, 32)})
    )
    layer = layer_of(name, 16).float()
    batch = rl.Ragged([torch.randn(length, D, requires_grad=True) for length in (3, 1)])
    with ExitStack() as stack:
        of_kernel: Any = {
            "run": property(run),
            "_init_handles": mock.Mock(),
            "launch_metadata": mock.Mock(),
            "function": 0,
        }
        compared: Any = {
            name: mock.Mock(return_value="") for name in ("_difference", "verify_call")
        }
        stack.enter_context(mock.patch.multiple(CompiledKernel, create=True, **of_kernel))
        stack.enter_context(mock.patch.multiple(backend, **compared))
        stack.enter_context(mock.patch.object(torch.cuda, "device_of", mock.MagicMock()))
        stack.enter_context(mock.patch.dict(backend.MACHINES, cpu=_TRITON))
        stack.enter_context(rl.use_backend(backend="program"))
        for _ in range(2):
            launches.append([])
            layer(batch)[0].values.sum().backward()
            # From now on nothing calls Triton's lookup.
            stack.enter_context(
                mock.patch.object(JITFunction, "run", mock.Mock(side_effect=AssertionError))
            )
    sys.stdout.write(json.dumps(launches))


def verified(name: str) -> str:
    """Return how a kernel differs from torch and the reference, as the comparison before its first
    use does.
    """
    layer = layer_of(name).float()
    cell, sizes = layer.cell, layer.state_sizes
    weights = layer.cells[0] if name in USERS else layer._weights()[0]
    step = backend.step_of(cell, weights, D, tuple(sizes), torch.float32)
    given = step, backend.ready(step), backend.run_loop, _TRITON, 1.0
    return verify(*given) or verify_loop(*given)


def prepared(name: str) -> list[int]:
    """Return the comparisons and the kernels of ``prepare``, and those of calls after it."""
    layer, counts = layer_of(name).float(), [0, 0, 0, 0]
    batch = rl.Ragged([torch.randn(length, D) for length in _LENGTHS])
    resets, which = batch._like(torch.arange(sum(_LENGTHS)) % 4 == 1), 0
    call._resets_in_steps = lambda *_: True

    def counted(*_: Any) -> str:
        counts[which] += 1
        return ""

    with rl.use_backend(backend="program"), mock.patch.object(backend, "_difference", counted):
        for which in (0, 2):
            before = launch.compiled.cache_info().misses
            if which:
                layer(batch, resets=resets)[0].values.sum().backward()
                with torch.no_grad():
                    layer(batch)
            else:
                layer.warm_up()
                layer.warm_up(resets=True)
            counts[which + 1] = launch.compiled.cache_info().misses - before
    return counts


def in_a_graph(name: str) -> list[float]:
    """Return the largest errors of an exported layer whose graph launches kernels, for lengths that
    it has not seen.
    """
    functions: list[Any] = []

    def wrapped(function: Any) -> Any:
        functions.append(function)
        return mock.MagicMock(__getitem__=lambda _, grid: partial(add, len(functions) - 1, grid))

    def add(index: int, grid: Any, *arguments: Any, **_: Any) -> None:
        numbers = [part for part in arguments[:-1] if not isinstance(part, Tensor)]
        tensors = [part for part in arguments if isinstance(part, Tensor)]
        torch.ops.on_triton.launch(index, tensors, numbers, list(grid))

    def launch_now(index: int, tensors: list[Tensor], numbers: list[int], grid: list[int]) -> None:
        given, sizes = iter(tensors), iter(numbers)
        *names, _ = functions[index].arg_names
        arguments = [
            next(sizes if name in ("rows", "count") or name.endswith("_s") else given)
            for name in names
        ]
        if all(grid):
            functions[index][tuple(grid)](*arguments, launch.precision())

    schema = "(int index, Tensor(a!)[] tensors, SymInt[] numbers, SymInt[] grid) -> ()"
    torch.library.custom_op(
        "on_triton::launch", launch_now, mutates_args=("tensors",), schema=schema
    )
    torch.manual_seed(0)
    layer = layer_of(name, num_layers=2, bidirectional=True).float().eval()
    batch = rl.Ragged([torch.randn(length, D) for length in (2, 3)])
    signature, loops, found = (
        Signature.of(layer, batch, "flat"),
        aot._KernelLoops(has_kernels=False),
        [],
    )
    loops.run_layer = lambda layer, _: loops.launch(layer)  # type: ignore[method-assign, assignment]
    on_a_gpu = mock.patch.object(Places, "chunks", None)  # whose lengths the host does not have
    with torch.no_grad(), on_a_gpu, mock.patch.object(torch.library, "wrap_triton", wrapped):
        with rl.use_backend(backend="program"):
            layer(batch)
        before = len(backend._steps)
        graph = traced(layer, signature, loops).module(check_guards=False)
        assert (loops.layers, loops.loops, len(backend._steps)) == (2, 0, before)
        for lengths in ([0, 0], [1], [*_LENGTHS, 31]):
            batch = rl.Ragged([torch.randn(length, D) for length in lengths])
            with rl.use_backend(backend="reference"):
                output, state = copy.deepcopy(layer).double()(batch.to(torch.float64))
            pairs = zip(
                graph(batch.values, batch.offsets), [output.values, *parts(state)], strict=True
            )
            found += [_error(one, other) for one, other in pairs if one.numel()]
    return found


def _reduced(operation: Any, parts: Any) -> list[Any]:
    """Reduce tensors together, row by row; the interpreter would do so number by number."""
    found: Any = None
    for row in zip(
        *(np.moveaxis(part.handle.data, operation.axis, 0) for part in parts), strict=True
    ):
        own = [operation.to_tensor(data, part.dtype) for data, part in zip(row, parts, strict=True)]
        found = own if found is None else operation.combine_fn.fn(*found, *own)
    whole = [
        np.expand_dims(part.handle.data, operation.axis) for part in found
    ]  # keep_dims, as all kernels
    return [operation.to_tensor(data, part.dtype) for data, part in zip(whole, parts, strict=True)]


def interpret(cases: list[tuple[Any, ...]]) -> None:
    """Write what the functions above return, as JSON; CPU tensors run on Triton's interpreter."""
    from triton.runtime.interpreter import ReduceOps

    ReduceOps.generic_reduce = _reduced
    backend.MACHINES["cpu"] = _TRITON
    backend._difference = lambda *_: ""  # each function compares by itself
    warnings.filterwarnings("error", "The cell .* runs in plain torch")
    sys.stdout.write(json.dumps([globals()[function](*given) for function, *given in cases]))


def loads(name: str) -> None:
    """Write the steps of a pass of a layer's loop, its loads, and those after its first store, as
    JSON.
    """
    layer = layer_of(name).float()
    step = backend.step_of(
        layer.cell, layer._weights()[0], D, tuple(layer.state_sizes), torch.float32
    )
    kernel = kernel_of(backend.ready(step).forward(True, False, None).lowered.program, True)
    loop = kernel.text.partition("for t in")[2].partition("final0")[0]
    counts = [part.count("tl.load") for part in (loop, loop.partition("tl.store")[2])]
    sys.stdout.write(json.dumps([kernel.steps, *counts]))


def compiled(
    names: list[str], architectures: list[int], units: int, *, with_resets: bool = False
) -> None:
    """Write registers, spilled bytes and shared memory of each kernel of some layers, as JSON."""
    programs: list[tuple[Any, bool]] = []

    def keep(lowered: Any, offsets: Any, ascending: bool, *rest: Any) -> Any:
        programs.append((lowered.program, ascending))
        return cpu.run_lowered(lowered, offsets, ascending, *rest)

    cpu = backend.MACHINES["cpu"]
    call._resets_in_steps = lambda *_: True
    batch = rl.Ragged([torch.randn(4, D), torch.randn(2, D)])
    resets = batch._like(torch.ones(6, dtype=torch.bool)) if with_resets else None
    found: dict[str, Any] = {}
    for name in names:
        layer = layer_of(name, units).float()
        with rl.use_backend(backend="program"):
            layer(batch, resets=resets)
            backend.MACHINES["cpu"] = cpu._replace(run_lowered=keep)
            layer(batch, resets=resets)[0].values.sum().backward()
            backend.MACHINES["cpu"] = cpu
        for program, ascending in programs:
            kind = f"{name} {'forward' if ascending else 'backward'}"
            for architecture, of_chunks in product(architectures, (False, True)):
                with suppress(Refused):
                    own = kernel_of(program, ascending, of_chunks=of_chunks)
                    found[f"{kind} {own.roles if of_chunks else ''} sm_{architecture}"] = (
                        _assembled(own, architecture)
                    )
        programs.clear()
    sys.stdout.write(json.dumps(found))


def _copied(kernel: str) -> Any:
    """Return a kernel made of the source that torch copies to a package, where only Triton is
    imported; in seconds.
    """
    from torch._inductor.codegen.wrapper import (
        user_defined_triton_kernel_transitive_closure_source_code as source_of,
    )

    text = f"import triton\nimport triton.language as tl\n@triton.jit\n{source_of(launch.function_of(kernel))}"
    linecache.cache["<package>"] = (len(text), None, text.splitlines(keepends=True), "<package>")
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(text, "<package>", "exec"), names)
    return names["kernel"]


def _assembled(kernel: PrintedKernel, architecture: int) -> list[int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = _copied(kernel.text) if architecture == 100 else launch.function_of(kernel.text)
    kinds = {
        "rows": "i32",
        "count": "i32",
        "precision": "constexpr",
        "order": "*i64",
        "offsets": "*i64",
    }
    signature = {
        name: kinds.get(
            name, "i32" if name.endswith("_s") else "*i32" if name.startswith("table") else "*fp32"
        )
        for name in function.arg_names
    }
    last = len(signature) - 1
    aligned = {
        (place,): [["tt.divisibility", 16]]
        for place, kind in enumerate(signature.values())
        if "*" in kind
    }
    source = ASTSource(function, signature, {(last,): "ieee"}, aligned)
    options = {"num_warps": kernel.warps, "maxnreg": kernel.registers}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        ran = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, spilled = (re.findall(rf"{kind}:(\d+)", ran.stdout)[0] for kind in ("REG", "STACK"))
    return [int(registers), int(spilled), made.metadata.shared]
