"""Kernels of Triton without a GPU: under its interpreter, and compiled for GPUs.

Each in a process of its own: Triton reads ``TRITON_INTERPRET`` when it is imported, and a compiled kernel runs nowhere.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import LAYERS, D, a_state, build, gradients, results_of
from own_cells import Halved, Moved
from raglane.kernels.program import backend
from raglane.kernels.program.verify import verify, verify_loop
from raglane.kernels.triton import launch
from raglane.kernels.triton.printer import kernel_of
from raglane.nn.recurrent import call
from raglane.programs.graph import Refused
from random_programs import draw, draw_lengths, tensors_for

USERS: dict[str, type[nn.Module]] = {"a user's LSTM": Moved, "a user's GRU": Halved}
NAMES = [*LAYERS, *USERS]
_UNITS, _CHANNELS = 20, 40  # more than one product's depth, and than the channels of an instance
_ELEMENTWISE = ("indrnn_relu", "indrnn_tanh", "sru", "qrnn", "mingru", "minlstm")
_TRITON = backend.MACHINES["cuda"]
# More sequences than a block has rows, in an order that is not that of their lengths.
_LENGTHS = [1, 0, 1, 3, 2, 1, 1, 0, 2]


def layer_of(name: str, units: int = 0, **options: Any) -> Any:
    """Return a layer in float64; by default with few units, more than an instance of its kernel reads at a time."""
    units = units or (_CHANNELS if name in _ELEMENTWISE else _UNITS)
    if name in USERS:
        return rl.nn.Recurrent(USERS[name], D, units, **options).double()
    return build(name, units=units, **options)


def differences(name: str, with_resets: bool, units: int = 0) -> list[float]:
    """Return the largest errors of a layer in float32, relative to the largest number of the float64 reference.

    With resets, the steps of the kernel read them.
    """
    torch.manual_seed(0)
    lengths = [*_LENGTHS, 17, 16] if name in _ELEMENTWISE else _LENGTHS  # more than a pass of their loop
    whole = layer_of(name, units, bidirectional=True)
    narrow = layer_of(name, units, bidirectional=True).float()
    narrow.load_state_dict(whole.state_dict())
    values, hx = torch.randn(sum(lengths), D, dtype=torch.float64), a_state(whole, len(lengths))
    states = hx if isinstance(hx, tuple) else (hx,)
    found = []
    resets = rl.Ragged.from_flat(torch.arange(sum(lengths)) % 4 != 1, lengths=lengths) if with_resets else None
    for layer, used in ((whole, "reference"), (narrow, "program")):
        call._resets_in_steps = lambda *_, used=used: used == "program"
        dtype = next(layer.parameters()).dtype
        own = [part.detach().to(dtype).requires_grad_() for part in (values, *states)]
        given = tuple(own[1:]) if len(states) > 1 else own[1]
        with rl.use_backend(backend=used):
            batch = rl.Ragged.from_flat(own[0], lengths=lengths)
            results = results_of(layer(batch, given, return_states=True, resets=resets))
        found.append([*results, *gradients(results, [*own, *layer.parameters()])])
    return [_error(mine, right) for right, mine in zip(*found, strict=True)]


def _error(mine: Tensor, right: Tensor) -> float:
    return float((mine - right).abs().max() / (1 + right.abs().max()))


def of_a_program(seed: int) -> list[float]:
    """Return the errors of a random program, empty if it has no kernel."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    program = draw(chance, tame=True)
    case = tensors_for(program, draw_lengths(chance), ascending=chance.random() < 0.5).to(torch.float32)
    given: dict[str, Any] = dict(case.given)
    given["weights"] = [part.mT.contiguous() for part in given["weights"]]
    try:
        outputs, finals = launch.run(
            program, places=launch.longest_first(case.offsets), ascending=case.ascending, **given
        )
    except (Refused, IndexError):  # a program without elements
        return []
    rights = [torch.from_numpy(right) for right in case.expected()]
    pairs = zip([*outputs, *finals], rights, strict=True)
    return [_error(mine.nan_to_num(), right.nan_to_num()) for mine, right in pairs if mine.numel()]


def alone_and_together(name: str) -> list[float]:
    """Return 0 for each sequence whose bits are the same alone and in a batch."""
    # The interpreter's products are NumPy's, in which the bits of a row depend on its place.
    np.matmul = lambda one, other, **_: np.stack([row @ other for row in one])  # type: ignore[assignment]
    torch.manual_seed(0)
    layer = layer_of(name).float()
    batch = rl.Ragged([torch.randn(length, D) for length in _LENGTHS])
    with rl.use_backend(backend="program"):
        together = layer(batch)[0]
        return [
            float(not torch.equal(layer(rl.Ragged([part]))[0].values, whole))
            for part, whole in zip(batch.to_list(), together.to_list(), strict=True)
        ]


def launches_and_waits(name: str) -> list[int]:
    """Return the launches of kernels in a forward and a backward pass, and the numbers that the host reads in them."""
    layer = layer_of(name).float()
    batch = rl.Ragged([torch.randn(length, D, requires_grad=True) for length in _LENGTHS])
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

    resets = batch._like(torch.arange(sum(_LENGTHS)) % 4 == 1)
    call._resets_in_steps = lambda *_: True
    with rl.use_backend(backend="program"):
        layer(batch, resets=resets)[0].values.sum().backward()  # which makes the programs
        with ExitStack() as stack:
            for name in ("item", "tolist", "nonzero", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__"):
                stack.enter_context(mock.patch.object(Tensor, name, waiting(getattr(Tensor, name))))
            stack.enter_context(mock.patch.object(launch, "run", counted))
            values = layer(batch, resets=resets)[0].values
            which = 1
            values.sum().backward()
    return counts


def verified(name: str) -> str:
    """Return how a kernel differs from torch and the reference, as the comparison before its first use does."""
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
                layer.prepare()
                layer.prepare(resets=True)
            counts[which + 1] = launch.compiled.cache_info().misses - before
    return counts


def interpret(cases: list[tuple[Any, ...]]) -> None:
    """Write what the functions above return, as JSON; CPU tensors run on Triton's interpreter."""
    backend.MACHINES["cpu"] = _TRITON
    backend._difference = lambda *_: ""  # each function compares by itself
    warnings.filterwarnings("error", "The cell .* runs in plain torch")
    sys.stdout.write(json.dumps([globals()[function](*given) for function, *given in cases]))


def loads(name: str) -> None:
    """Write the steps of a pass of a layer's loop, its loads, and those after its first store, as JSON."""
    layer = layer_of(name).float()
    step = backend.step_of(layer.cell, layer._weights()[0], D, tuple(layer.state_sizes), torch.float32)
    kernel = kernel_of(backend.ready(step).forward(True, False, None).lowered.program, True)
    loop = kernel.text.partition("for t in")[2].partition("final0")[0]
    counts = [part.count("tl.load") for part in (loop, loop.partition("tl.store")[2])]
    sys.stdout.write(json.dumps([kernel.steps, *counts]))


def compiled(names: list[str], architectures: list[int], units: int, *, with_resets: bool = False) -> None:
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
            for architecture in architectures:
                found[f"{kind} sm_{architecture}"] = _assembled(program, ascending, architecture)
        programs.clear()
    sys.stdout.write(json.dumps(found))


def _assembled(program: Any, ascending: bool, architecture: int) -> list[int]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = kernel_of(program, ascending)
    function = launch.function_of(kernel.text)
    kinds = {"rows": "i32", "count": "i32", "precision": "constexpr", "order": "*i64", "offsets": "*i64"}
    signature = {
        name: kinds.get(name, "i32" if name.endswith("_s") else "*i32" if name.startswith("table") else "*fp32")
        for name in function.arg_names
    }
    last = len(signature) - 1
    aligned = {(place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if "*" in kind}
    source = ASTSource(function, signature, {(last,): "ieee"}, aligned)
    options = {"num_warps": kernel.warps, "maxnreg": kernel.registers}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        ran = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    registers, spilled = (re.findall(rf"{kind}:(\d+)", ran.stdout)[0] for kind in ("REG", "STACK"))
    return [int(registers), int(spilled), made.metadata.shared]
