"""Tracing of a model to a graph of torch, and the module in which it failed."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules import module as hooks

from raglane.errors import ExportError, MissingExtraError, RaglaneError
from raglane.export.signature import Signature, Surface
from raglane.kernels.dispatch import use_backend
from raglane.kernels.graph import Loops, loops_by

_TALKATIVE = (
    "torch.onnx",
    "torch.export",
    "torch._export",
    "torch.fx.experimental",
    "onnxscript",
    "onnx_ir",
)
_DTYPES = (torch.float32, torch.float64)
# Lengths of the traced batch; neither they nor their number is special, as 0 and 1 would be.
_TRACED = [4, 2, 6, 3, 5]


def traced(model: nn.Module, signature: Signature, loops: Loops) -> Any:
    """Return the program of ``torch.export`` of a model, with the dynamic sizes of the
    signature.
    """
    inputs = tuple(signature.tensors(signature.fresh(_TRACED, torch.Generator().manual_seed(0))))
    surface = Surface(model, signature).eval()
    model(*signature.example)  # whose errors name arguments: a graph has no lengths to check
    with use_backend(backend="reference"), loops_by(loops):
        return torch.export.export(
            surface, inputs, dynamic_shapes=(signature.dims(),), strict=False
        )


def check_dtype(model: nn.Module) -> None:
    """Raise ExportError for parameters that are neither float32 nor float64."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.dtype not in _DTYPES:
            fix = "export model.float(); an ONNX file can be made float16 afterwards, see docs/deploy.md"
            raise ExportError(name, str(parameter.dtype), "of float32 or float64", fix)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Run a block with a model in evaluation mode, without gradients."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def quiet() -> Iterator[None]:
    """Run a block without warnings and logs of torch and onnxscript."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        # torch.export prints the graph of a failed trace.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class ModuleTracker:
    """Tracks the module of a model that is being traced; errors in the block become ExportErrors
    with its name.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(module): name for name, module in model.named_modules()}
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        self._stack: list[str] = []
        self.program: Any = None

    def __enter__(self) -> Self:
        self._handles: list[Any] = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave),
        ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if not isinstance(error, Exception) or isinstance(error, ExportError | MissingExtraError):
            return
        chain = list(_chain(error))
        name = self._current(chain)
        where = f"model.{name}" if name else "model"
        ours = next((link for link in chain if isinstance(link, RaglaneError)), None)
        if ours is not None:
            raise ExportError(f"{where}: {ours}") from error
        got = f"a {self._kinds.get(name, 'module')} that cannot be exported"
        raise ExportError(where, got, *_reason(chain)) from error

    def _current(self, chain: list[BaseException]) -> str:
        """Return the name of the module in which the export failed, empty for the model."""
        if self.program is not None:
            return self._of_operator(chain)
        return self._stack[-1] if self._stack else ""

    def _enter(self, module: nn.Module, inputs: Any) -> None:  # noqa: ARG002
        if id(module) in self._names:
            self._stack.append(self._names[id(module)])

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG002
        if id(module) in self._names:
            self._stack.pop()

    def _of_operator(self, chain: list[BaseException]) -> str:
        """Return the module of the node that the exporter could not translate."""
        text = " ".join(str(error) for error in chain)
        # The name of the node, or of the operator, which may be a later form of the traced one.
        named = re.findall(r"translating node %(\w+) ", text) + [
            operator.split("::")[-1] for operator in _missing(text)
        ]
        for node in self.program.graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if stack and any(node.name.startswith(name) for name in named):
                inner = str(list(stack.values())[-1][0]).removeprefix("model").removeprefix(".")
                if inner in self._kinds:
                    return inner
        return ""


def _missing(text: str) -> list[str]:
    """Return the operators that the exporter cannot translate."""
    names = re.findall(
        r"No (?:ONNX function|decompositions?)[^<]*<OpOverload\(op='([\w.:]+)'", text
    )
    return [name.replace("aten.", "aten::") for name in names]


def _chain(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(chain: list[BaseException]) -> tuple[str, str]:
    """Return the rule and the fix for an error of torch."""
    text = " ".join(str(error) for error in chain)
    if "data-dependent" in text or "DataDependent" in text:
        rule = "code that does not depend on numbers of a batch (if, int, float, item, tolist)"
        fix = "compute with tensors, e.g. torch.where in place of if; layout='flat' supports e.g. BatchNorm1d"
        return rule, fix
    if "Constraints violated" in text or "specialized it to be a constant" in text:
        rule = "code for batches of any size, without constants made of sizes"
        fix = "take sizes from shapes, e.g. batch.offsets.shape[0] - 1 in place of len(batch)"
        return rule, fix
    missing = _missing(text)
    if missing:
        return f"made of operators that ONNX has, unlike {missing[0]}", "compute it in another way"
    lines = (line for line in str(chain[-1]).splitlines() if line.strip())
    first = next(lines, type(chain[-1]).__name__)
    rule = f"one that torch.export and torch.onnx can translate ({first})"
    return rule, "compute it in another way"
