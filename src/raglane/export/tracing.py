"""A model as a graph of torch, whatever is made of it then; and where in it that failed."""

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

from raglane._utils.messages import message
from raglane.errors import ExportError, MissingExtraError, RaglaneError
from raglane.export.signature import Signature, Surface
from raglane.kernels.dispatch import use_backend
from raglane.kernels.graph import Loops, loops_by

_TALKATIVE = ("torch.onnx", "torch.export", "torch._export", "torch.fx.experimental", "onnxscript", "onnx_ir")
_DTYPES = (torch.float32, torch.float64)
# Lengths of the batch that is traced: none is special, and neither is their number.
_TRACED = [4, 2, 6, 3, 5]


def traced(model: nn.Module, signature: Signature, loops: Loops) -> Any:
    """The program of ``torch.export`` of a model with tensors at its surface; its sizes are those of the signature."""
    inputs = tuple(signature.inputs(signature.fresh(_TRACED, torch.Generator().manual_seed(0))))
    surface = Surface(model, signature).eval()
    with use_backend(backend="reference"), loops_by(loops):
        return torch.export.export(surface, inputs, dynamic_shapes=(signature.dims(),), strict=False)


def check_dtype(model: nn.Module) -> None:
    """Refuse parameters of a dtype that no file has."""
    for name, part in model.named_parameters():
        if part.is_floating_point() and part.dtype not in _DTYPES:
            fix = "export model.float(); an ONNX file can be made float16 afterwards, see docs/deploy.md"
            raise ExportError(message(name, str(part.dtype), "of float32 or float64", fix))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it no part of a model is in training."""
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
    """Without what torch and onnxscript say about their own code."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        # It prints the graph of a trace that failed.
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class Place:
    """Follows which module of a model is being traced; an error that leaves the block becomes an ExportError."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {id(part): name for name, part in model.named_modules()}
        self._parts = {name: type(part).__name__ for name, part in model.named_modules()}
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self.program: Any = None

    def __enter__(self) -> Self:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter),
            hooks.register_module_forward_hook(self._leave),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        if error is None or not isinstance(error, Exception) or isinstance(error, ExportError | MissingExtraError):
            return
        chain = list(_chain(error))
        name = self._of_operator(chain) if self.program is not None else self._stack[-1] if self._stack else ""
        where = f"model.{name}" if name else "model"
        known = next((link for link in chain if isinstance(link, RaglaneError)), None)
        if known is not None:
            raise ExportError(f"{where}: {known}") from error
        got = f"a {self._parts.get(name, 'module')} that cannot be exported"
        raise ExportError(message(where, got, *_reason(chain))) from error

    def _enter(self, module: nn.Module, inputs: Any) -> None:  # noqa: ARG002
        if id(module) in self._names:
            self._stack.append(self._names[id(module)])

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:  # noqa: ARG002
        if id(module) in self._names:
            self._stack.pop()

    def _of_operator(self, chain: list[BaseException]) -> str:
        """The module of the node that could not be translated, which the exporter's error names."""
        text = " ".join(str(error) for error in chain)
        # The node's own name, and the operator's, of which the traced one may be an earlier form.
        named = re.findall(r"translating node %(\w+) ", text) + [part.split("::")[-1] for part in _missing(text)]
        for node in self.program.graph.nodes:
            stack = node.meta.get("nn_module_stack")
            if stack and any(node.name.startswith(name) for name in named):
                inner = str(list(stack.values())[-1][0]).removeprefix("model").removeprefix(".")
                if inner in self._parts:
                    return inner
        return ""


def _missing(text: str) -> list[str]:
    """The operators for which the exporter says that it has no translation."""
    found = re.findall(r"No (?:ONNX function|decompositions?)[^<]*<OpOverload\(op='([\w.:]+)'", text)
    return [name.replace("aten.", "aten::") for name in found]


def _chain(error: BaseException | None) -> Any:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _reason(chain: list[BaseException]) -> tuple[str, str]:
    """The rule that was broken, and what to do, in words of ours where torch's error is one that we know."""
    text = " ".join(str(error) for error in chain)
    if "data-dependent" in text or "DataDependent" in text:
        rule = "a graph holds no Python code that looks at numbers of a batch (if, int, float, item, tolist)"
        return rule, "compute with tensors: torch.where in place of if"
    if "Constraints violated" in text or "specialized it to be a constant" in text:
        rule = "a graph is for batches of any size, and this code makes a constant of a size"
        return rule, "take sizes from shapes: batch.offsets.shape[0] - 1 in place of len(batch)"
    missing = _missing(text)
    if missing:
        return f"ONNX has an operator for all that it computes, and none for {missing[0]}", "compute it in another way"
    first = next((line for line in str(chain[-1]).splitlines() if line.strip()), type(chain[-1]).__name__)
    return f"what torch.export and torch.onnx can translate; they say: {first}", "compute it in another way"
