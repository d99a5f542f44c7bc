"""Batches and modules in place of those of a model while it is traced for streams."""

# To type checkers a Ragged is a Tensor; TracedBatch has other results.
# mypy: disable-error-code="override"

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from raglane.nn.embeddings import Mixed
from raglane.nn.pooling import AttentionPooling, Pooling, running
from raglane.nn.recurrent.stack import Stack
from raglane.programs.graph import Refused
from raglane.ragged import Ragged

ACTIVE: ContextVar[Any] = ContextVar("ACTIVE")
"""The tracing that runs, see prepare.py."""


def _so_far(pooling: str | AttentionPooling, batch: TracedBatch) -> Tensor:
    """Return the pooling of the elements so far."""
    tracing = ACTIVE.get()
    values = batch._values
    rows = values.reshape(values.shape[0], -1)
    return tracing.layer(running(pooling, rows.shape[1], tracing.dtype), rows)[-1].reshape(
        values.shape
    )


class TracedBatch(Ragged):
    """A traced batch, in which each row is an element, and a value of a sequence is its value so
    far.
    """

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        is_last = isinstance(index, tuple) and index == (slice(None), -1)
        return self._values if is_last else super().__getitem__(index)

    def _needs_elements(self, name: str, least: int = 1) -> None:  # noqa: ARG002
        way = " (rl.nn.CausalConv1d reads earlier frames, without padding)" if name == "pad" else ""
        raise Refused(f"{name} of the steps, and a stream has one result per frame{way}")

    def last(self, *, empty: float = 0.0) -> Tensor:  # noqa: ARG002
        """See :meth:`raglane.Ragged.last`, of the elements so far."""
        return self._values

    def first(self, *, empty: float = 0.0) -> Tensor:  # noqa: ARG002
        """See :meth:`raglane.Ragged.first`, of the elements so far."""
        return _so_far("first", self)

    def mean(self, dim: Any = None, **options: Any) -> Any:
        """See :meth:`raglane.Ragged.mean`, of the elements so far."""
        return _so_far("mean", self) if dim == 1 else super().mean(dim, **options)

    def amax(self, dim: Any = None, **options: Any) -> Any:
        """See :meth:`raglane.Ragged.amax`, of the elements so far."""
        return _so_far("max", self) if dim == 1 else super().amax(dim, **options)

    def logsumexp(self, dim: Any, **options: Any) -> Any:
        """See :meth:`raglane.Ragged.logsumexp`, of the elements so far."""
        return _so_far("logsumexp", self) if dim == 1 else super().logsumexp(dim, **options)


class Cut(nn.Module):
    """Replaces a module whose call ends one piece of the graph and begins the next."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._whole = (module,)  # in a tuple, so that it is no submodule

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_whole"][0], name)


class _LayerCut(Cut):
    def forward(self, input: Any, hx: Any = None, **options: Any) -> Any:
        layer: Any = self._whole[0]
        if not isinstance(input, TracedBatch):
            raise Refused(
                "it is called with a tensor, which is one sequence: pass the Ragged batch"
            )
        if hx is not None or any(options.get(name) is not None for name in ("lengths", "resets")):
            raise Refused("it is called with an initial state, lengths or resets")
        outputs = ACTIVE.get().layer(layer, input._values)
        h = torch.stack(outputs) if layer.cell.output_is_state else _HiddenState()
        state = (
            h
            if len(layer.state_sizes) == 1
            else (h, *[_HiddenState()] * (len(layer.state_sizes) - 1))
        )
        output = None if options.get("return_output") is False else input._like(outputs[-1])
        ACTIVE.get().states.append(state)
        self.__dict__["_latest"] = outputs[-1]
        return output, state

    def final(self, out: Any, state: Any) -> Tensor:  # noqa: ARG002
        """Return the output so far."""
        return self.__dict__["_latest"]


class _HiddenState:
    """A state that the kernels keep to themselves."""

    def __getattr__(self, _: Any) -> Any:
        raise Refused("it reads a state other than the output")

    __getitem__ = __iter__ = __getattr__

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> Any:
        raise Refused("it computes with a state other than the output")


class _PoolingCut(Cut):
    def forward(self, batch: Any) -> Tensor:
        if not isinstance(batch, TracedBatch):
            raise Refused("it is called with a tensor, not with a Ragged")
        module: Any = self._whole[0]
        return module.pool(batch) if isinstance(module, Pooling) else _so_far(module, batch)


class _LookupCut(Cut):
    def forward(self, input: Any) -> Any:
        if isinstance(input, TracedBatch):
            return input._like(self.forward(input._values))
        return ACTIVE.get().lookup(self._whole[0], input)


def cut_of(module: nn.Module) -> type[Cut] | None:
    """Return the class that replaces a module in the trace; None if it is traced."""
    match module:
        case Stack():
            return _LayerCut
        case Pooling() | AttentionPooling():
            return _PoolingCut
        case nn.Embedding() | Mixed():
            return _LookupCut
    return None
