"""A model as a graph of torch, whatever is made of it then."""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn

from raglane.errors import ExportError, message
from raglane.export.signature import Signature, Surface
from raglane.kernels.dispatch import using
from raglane.kernels.graph import Loops, loops_by

_TALKATIVE = ("torch.onnx", "torch.export", "torch._export", "torch.fx.experimental", "onnxscript", "onnx_ir")
_DTYPES = (torch.float32, torch.float64)
# Lengths of the batch that is traced: none is special, and neither is their number.
_TRACED = [4, 2, 6, 3, 5]


def traced(model: nn.Module, signature: Signature, loops: Loops) -> Any:
    """The program of ``torch.export`` of a model with tensors at its surface; its sizes are those of the signature."""
    inputs = tuple(signature.inputs(signature.fresh(_TRACED, torch.Generator().manual_seed(0))))
    surface = Surface(model, signature).eval()
    with using(backend="reference"), loops_by(loops):
        return torch.export.export(surface, inputs, dynamic_shapes=(signature.dims(),), strict=False)


def check_dtype(model: nn.Module) -> None:
    """Refuse parameters of a dtype that no file has."""
    for name, part in model.named_parameters():
        if part.is_floating_point() and part.dtype not in _DTYPES:
            fix = "export model.float(); an ONNX file can be made float16 afterwards, see docs/deploy.md"
            raise ExportError(message(name, str(part.dtype), "parameters of float32 or float64", fix))


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
