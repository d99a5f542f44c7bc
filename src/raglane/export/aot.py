"""Packages of AOTInductor: machine code that torch runs without the Python code of the model.

Layers of the kernels are an operator of torch in C++, of ``csrc/torch``, which
:func:`copy_operators` copies; on a GPU the graph launches the kernels of Triton, which become part
of the package.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_flag, check_kind
from raglane._utils.files import check_new_file, write_file
from raglane._utils.messages import quote
from raglane.cells.module import ModuleCell
from raglane.cells.regularised import Marked
from raglane.errors import ArgumentError, DispatchError, ExportError, MissingExtraError
from raglane.export.signature import Layout, Signature
from raglane.export.tracing import ModuleTracker, check_dtype, evaluating, quiet, traced
from raglane.export.verify import Verified, check_agrees
from raglane.kernels.contract import Request, Result, run_directions
from raglane.kernels.dispatch import use_backend
from raglane.kernels.graph import Loops, StepLayout
from raglane.kernels.program.backend import run_in_graph
from raglane.native import missing_kernels
from raglane.native.library import has_cell, location
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.programs.graph import Refused

LIBRARY = "libraglane_torch.so"


@dataclass(frozen=True)
class Packaged:
    """A packaged model; :func:`package` describes the fields."""

    path: Path
    inputs: list[str]
    outputs: list[str]
    layers: int
    loops: int
    verified: Verified | None


def aot_inductor(
    model: nn.Module,
    path: str | Path,
    *,
    example: Any,
    layout: Layout = "padded",
    operators: str | Path | None = None,
    verify: bool = True,
) -> Packaged:
    """Compile a model for batches of any number of sequences of any lengths, for torch without the
    model's code.

    AOTInductor compiles it with the C++ compiler of this machine (a minute). A program loads the
    package in Python by ``torch._inductor.aoti_load_package``, or in C++, and needs no Raglane.

    Args:
        model: a layer of ``rl.nn``, or a module made of them; it is compiled in evaluation mode.
        path: the package, ``.pt2``; an existing file is replaced after the compilation has
            succeeded.
        example: see :func:`raglane.export.onnx`.
        layout: see :func:`raglane.export.onnx`.
        operators: the result of :func:`raglane.export.copy_operators`: LSTM, GRU, RNN and the
            element-wise cells run on the kernels, and a program must load that library before the
            package. None: torch's operators run them, which is slower. A package of a model on a
            GPU contains the kernels of Triton, without operators.
        verify: run the package on random lengths, and compare it with the model, before it is
            written.

    Returns:
        The packaged model, with its ``path``; the names of ``inputs`` and ``outputs``, in order;
        ``layers``, the number of layers that the kernels run; ``loops``, the number of layers that
        are loops of torch's operators; and ``verified``, as :func:`raglane.export.onnx` describes
        it.

    Raises:
        ExportError: a part of the model cannot be exported, operators cannot be loaded, a compiler
            is missing, or the package does not agree with the model. Nothing is written.
        ArgumentError, ArgumentTypeError: an invalid example, layout or path.

    Example:
        >>> import tempfile, raglane as rl
        >>> batch = rl.Ragged([torch.randn(4, 3), torch.randn(2, 3)])
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     packaged = aot_inductor(rl.nn.GRU(3, 8), f"{folder}/model.pt2", example=batch)
        ...     packaged.inputs, packaged.outputs
        (['values', 'lengths'], ['output_0', 'output_1'])
    """
    check_kind("model", model, nn.Module, "a torch.nn.Module", "pass a layer or a model")
    check_flag("verify", verify)
    target = Path(path)
    if target.suffix != ".pt2":
        raise ArgumentError(
            "path", repr(str(path)), "a name that ends in .pt2", "change the suffix"
        )
    check_new_file("path", target)
    if operators is not None:
        load_operators(Path(operators))
    signature = Signature.of(model, example, layout)
    check_dtype(model)
    loops = _KernelLoops(has_kernels=operators is not None)
    with evaluating(model), quiet(), tempfile.TemporaryDirectory() as folder:
        _prepare(model)
        with ModuleTracker(model):
            program = traced(model, signature, loops)
        compiled = Path(folder, "model.pt2")
        _compile(program, compiled)
        run: Any = torch._inductor.aoti_load_package(str(compiled))
        verified = None
        if verify:
            verified = check_agrees(lambda inputs: run(*inputs.values()), model, signature)
        content = compiled.read_bytes()
    write_file(target, content)
    return Packaged(
        target,
        list(signature.inputs),
        list(signature.output_names),
        loops.layers,
        loops.loops,
        verified,
    )


def _prepare(model: nn.Module) -> None:
    """Compare the Triton kernels of a model on a GPU with torch, which cannot be done while it is
    traced.
    """
    for layer in model.modules():
        if isinstance(layer, RecurrentLayer) and any(
            weight.is_cuda for weight in layer.parameters()
        ):
            with suppress(DispatchError), use_backend(backend="triton"):
                layer.warm_up()


def _compile(program: Any, target: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch._inductor.aoti_compile_and_package(program, package_path=str(target))
    except Exception as error:
        got = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        rule = "a graph that AOTInductor compiles"
        fix = "check that a C++ compiler is installed, or use rl.export.onnx"
        raise ExportError("model", got, rule, fix) from error


class _KernelLoops(Loops):
    """Runs layers with the kernels' operator, if it is loaded and has the cell, or Triton's; others
    with ``scan``.
    """

    def __init__(self, has_kernels: bool) -> None:
        self.layers = 0
        self.loops = 0
        self._has_kernels = has_kernels

    def run_layer(self, layer: Request, table: Callable[[], StepLayout]) -> Result | None:  # noqa: ARG002
        """See :class:`raglane.kernels.graph.Loops`."""
        if layer.values.is_cuda:
            return self.launch(layer)
        if not self._has_kernels or layer.need_states or not has_cell(layer.cell.name):
            return None
        self.layers += 1
        weights = [tensor for direction in layer.weights for tensor in direction]
        initial = [tensor.contiguous() for tensor in layer.initial()]
        c = initial[1] if len(initial) > 1 else None
        output, *final = torch.ops.raglane.layer(
            layer.cell.name, layer.values, layer.offsets, initial[0], c, weights
        )
        return Result(output if layer.need_output else None, tuple(final[: len(initial)]), None)

    def launch(self, layer: Request) -> Result | None:
        """Add launches of Triton's kernels to the graph; return None if they do not run this
        layer.
        """
        if isinstance(layer.cell, ModuleCell | Marked):
            return None
        with suppress(Refused):
            result = run_directions(layer, run_in_graph)
            self.layers += 1
            return result
        return None

    def scan(
        self, step: nn.Module, state: list[Tensor], read: list[Tensor], weights: tuple[Tensor, ...]
    ) -> list[Tensor]:
        """See :class:`raglane.kernels.graph.Loops`."""
        self.loops += 1
        # Inductor requires the number of rows, which is in the shapes of results, among the
        # arguments.
        rows: Any = read[0].shape[1]
        return super().scan(_Counted(step), state, read, (*weights, rows))


class _Counted(nn.Module):
    """A step with one more argument, which it ignores."""

    def __init__(self, step: nn.Module) -> None:
        super().__init__()
        self.step = step

    def forward(self, *args: Any) -> Any:
        return self.step(*args[:-1])


# -- the kernels as an operator
# ---------------------------------------------------------------------------------------


def copy_operators(folder: str | Path) -> Path:
    """Write the libraries that run the layers of packaged models on the CPU kernels, without
    Python.

    Args:
        folder: the folder for the two libraries, ``libraglane_torch.so``, which a program loads,
            and the kernels; it is created if it is missing. Keep the two together.

    Returns:
        The path of ``libraglane_torch.so``, which is the argument ``operators`` of
        :func:`raglane.export.aot_inductor`. It runs with torch 2.11 and every later version.

    Raises:
        ExportError: Raglane was installed without these operators.
        ArgumentError: ``folder`` is a file.
        MissingExtraError: Raglane was installed without the kernels.
        OSError: the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:  # doctest: +SKIP
        ...     copy_operators(folder).name
        'libraglane_torch.so'
    """
    kernels = location()
    if kernels is None:
        raise MissingExtraError(missing_kernels() or "")
    target = Path(folder)
    built = kernels.with_name(LIBRARY)
    if target.exists() and not target.is_dir():
        rule = "a folder, or the name of a new one"
        raise ArgumentError("folder", quote(str(folder)), rule, "pass the path of a folder")
    if not built.is_file():
        got = "an installation without them"
        rule = "those of a wheel for Linux, or of a build with RAGLANE_TORCH"
        fix = "install a wheel; without operators, rl.export.aot_inductor uses those of torch, which are slower"
        raise ExportError("operators", got, rule, fix)
    target.mkdir(parents=True, exist_ok=True)
    for file in (kernels, built):
        write_file(target / file.name, file.read_bytes())
    return target / LIBRARY


def load_operators(path: Path) -> None:
    """Register the operator ``raglane::layer`` and its shapes with torch, once."""
    rule = f"the file {LIBRARY}, next to the kernels"
    fix = "pass the result of rl.export.copy_operators(folder)"
    if not path.is_file():
        raise ExportError("operators", quote(str(path)), rule, fix)
    try:
        if not hasattr(torch.ops.raglane, "layer"):
            torch.ops.load_library(str(path))
    except OSError as error:
        raise ExportError("operators", str(error).splitlines()[0], rule, fix) from error
    _register_shapes()


@cache
def _register_shapes() -> None:
    # Imported here, because it is slow.
    from raglane._utils.operators import without_memory

    torch.library.register_fake("raglane::layer")(without_memory(_shapes))


def _shapes(
    cell: str,  # noqa: ARG001
    values: Tensor,
    offsets: Tensor,  # noqa: ARG001
    h: Tensor,
    c: Tensor | None,
    weights: list[Tensor | None],  # noqa: ARG001
) -> tuple[Tensor, ...]:
    output = values.new_empty(values.shape[0], h.shape[0] * h.shape[2])
    return output, torch.empty_like(h), values.new_empty(0) if c is None else torch.empty_like(c)
