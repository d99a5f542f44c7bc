"""One step of a block as one call of the kernels: the block runs on columns of a table, each of its
operations is recorded, and the kernels run the list.

``csrc/abi/recurrences.h`` has the operations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from raglane.kernels.cpu.steps import BLOCK_WORDS, run_block
from raglane.nn.mixers.plain import are_products
from raglane.nn.mixers.row_functions import softplus
from raglane.nn.mixers.ways import AttentionArguments, Decay, Scan, Way, least_step

# In the order of raglane_row_kind and raglane_row_function.
_KINDS = ("product", "convolve", "function", "add", "multiply", "norm", "attend", "decay")
_FUNCTIONS = ("sigmoid", "silu", "gelu", "softplus", "log_sigmoid", "clamp", "cap")
_KIND = {name: number for number, name in enumerate(_KINDS)}
_FUNCTION = {name: number for number, name in enumerate(_FUNCTIONS)}


class NotRecordedError(Exception):
    """A block does more than the operations of the kernels."""


class TableColumns:
    """Adjacent columns of a table, in place of a tensor ``(B, *sizes)``."""

    __slots__ = ("dtype", "first", "sizes", "table")

    def __init__(self, table: StepTable, first: int, sizes: tuple[int, ...]) -> None:
        self.table = table
        self.first = first
        self.sizes = sizes
        self.dtype = table.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes after a number of rows."""
        return (0, *self.sizes)

    @property
    def count(self) -> int:
        """The number of columns."""
        return math.prod(self.sizes)

    def to(self, dtype: torch.dtype) -> TableColumns:
        """Return the columns, which have this dtype."""
        if dtype is not self.dtype:
            raise NotRecordedError
        return self

    def split(self, sizes: list[int], dim: int) -> list[TableColumns]:
        """See :meth:`torch.Tensor.split`."""
        parts = []
        first = self.first
        for size in sizes:
            parts.append(TableColumns(self.table, first, (size,)))
            first += size
        if dim != 1 or len(self.sizes) > 1:
            raise NotRecordedError
        return parts

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> TableColumns:
        """See :meth:`torch.Tensor.unflatten`."""
        if dim != 1 or len(self.sizes) > 1:
            raise NotRecordedError
        return TableColumns(self.table, self.first, (sizes[0], self.count // sizes[0]))

    def flatten(self, dim: int) -> TableColumns:
        """See :meth:`torch.Tensor.flatten`."""
        if dim != 1:
            raise NotRecordedError
        return TableColumns(self.table, self.first, (self.count,))

    def clamp(self, least: float, most: float) -> TableColumns:
        """See :meth:`torch.Tensor.clamp`."""
        return self.table.function("clamp", self, least, most)

    def __add__(self, other: TableColumns) -> TableColumns:
        return self.table.combined("add", self, other)

    def __mul__(self, other: TableColumns) -> TableColumns:
        return self.table.combined("multiply", self, other)


class StepTable(Way):
    """The table of a step, and the operations on it."""

    def __init__(self, x: Tensor, states: tuple[Tensor, ...]) -> None:
        self.dtype = x.dtype
        self._x = x.contiguous()
        self._states = states
        self._width = x.shape[1]
        self._code: list[int] = []
        self._limits: list[float] = []
        self._parts: list[Tensor] = []

    def input(self) -> Any:
        """Return the columns of the input."""
        return TableColumns(self, 0, (self._width,))

    def run(self, output: Any) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Run the operations; return the values of the columns and the states after the step, or None
        if the kernels cannot read a tensor.
        """
        sizes = [self._width, output.first, output.count]
        results = run_block(self._x, self._states, self._parts, self._code, self._limits, sizes)
        return (results[0], tuple(results[1:])) if results else None

    def _add(
        self,
        kind: str,
        inputs: tuple[Any, ...],
        sizes: tuple[int, ...],
        *,
        option: int = 0,
        heads: tuple[int, int, int] = (1, 1, 1),
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        state: Tensor | None = None,
        limits: tuple[float, float] = (0.0, 0.0),
    ) -> Any:
        """Add an operation, and return the columns that it writes.

        ``heads``: parts, size and extent of the operation.
        """
        written = TableColumns(self, self._width, sizes)
        self._width += written.count
        firsts = [columns.first for columns in inputs]
        indices = [-1 if parameter is None else len(self._parts) for parameter in (weight, bias)]
        if bias is not None and weight is not None:
            indices[1] += 1
        self._parts += [parameter for parameter in (weight, bias) if parameter is not None]
        index = -1
        if state is not None:
            index = next(i for i, each in enumerate(self._states) if each is state)
        self._code += [_KIND[kind], option, written.count, *heads, written.first, *firsts]
        self._code += [0] * (BLOCK_WORDS - 10 - len(firsts))
        self._code += [*indices, index]
        self._limits += limits
        return written

    def function(self, name: str, values: Any, low: float = 0.0, high: float = 0.0) -> Any:
        """Add a function of numbers."""
        limits = (low, high)
        return self._add("function", (values,), values.sizes, option=_FUNCTION[name], limits=limits)

    def combined(self, kind: str, left: Any, right: Any) -> Any:
        """Add the sum or product of columns."""
        return self._add(kind, (left, right), left.sizes)

    def _by_weight(self, kind: str, values: Any, weight: Tensor) -> Any:
        heads = (1, weight.numel(), 1)
        return self._add(kind, (values,), values.sizes, heads=heads, weight=weight)

    def linear(self, module: nn.Module, values: Any) -> Any:
        """See :class:`Way`."""
        if not are_products([module]):
            raise NotRecordedError
        layer: Any = module
        rows, depth = layer.weight.shape
        heads = (1, depth, 1)
        return self._add(
            "product", (values,), (rows,), heads=heads, weight=layer.weight, bias=layer.bias
        )

    def product(self, values: Any, weight: Tensor) -> Any:
        """See :class:`Way`."""
        weight = weight if weight.dim() == 3 else weight.unsqueeze(0)
        groups, rows, depth = weight.shape
        is_turned = not weight.is_contiguous()
        return self._add(
            "product",
            (values,),
            (groups * rows,),
            option=int(is_turned),
            heads=(groups, depth, 1),
            weight=weight.transpose(1, 2) if is_turned else weight,
        )

    def convolve(self, values: Any, convolution: nn.Conv1d, state: Tensor) -> tuple[Any, Tensor]:
        """See :class:`Way`."""
        output = self._add(
            "convolve",
            (values,),
            values.sizes,
            heads=(1, convolution.weight.shape[2], 1),
            weight=convolution.weight,
            bias=convolution.bias,
            state=state,
        )
        return output, state

    def scan(self, parts: Scan, state: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """See :class:`Way`; the kernels have a call of its own for a block of a scan."""
        raise NotRecordedError

    def attend(
        self, parts: AttentionArguments, states: tuple[Tensor, ...]
    ) -> tuple[Any, tuple[Tensor, ...]]:
        """See :class:`Way`."""
        *_, scale, delta, eps = parts
        gain: Any = parts.gain if parts.log_gain is None else parts.log_gain
        q: Any = parts.q
        v: Any = parts.v
        output = self._add(
            "attend",
            (q, parts.k, v, parts.log_decay, gain),
            v.sizes,
            option=2 if parts.log_gain is not None else int(delta),
            heads=(*q.sizes, v.sizes[0]),
            state=states[0],
            limits=(scale, eps),
        )
        return output, states

    def decay(self, parts: Decay, states: tuple[Tensor, Tensor]) -> tuple[Any, tuple[Tensor, ...]]:
        """See :class:`Way`."""
        inputs: Any = parts[:3]
        output = self._add(
            "decay",
            inputs,
            inputs[2].sizes,
            weight=parts.rates,
            state=states[0],
            limits=(least_step(self.dtype), 0.0),
        )
        return output, states

    def normed(self, values: Any, weight: Tensor | None, eps: float) -> Any:
        """See :class:`Way`."""
        normed = self._normed(values, 0, eps)
        return normed if weight is None else self._by_weight("multiply", normed, weight)

    def unit(self, values: Any, eps: float) -> Any:
        """See :class:`Way`."""
        return self._normed(values, 1, eps)

    def centred(self, values: Any) -> Any:
        """See :class:`Way`."""
        return self._normed(values, 2, 0.0)

    def _normed(self, values: Any, option: int, eps: float) -> Any:
        size = values.sizes[-1]
        heads = (values.count // size, size, 1)
        sizes = values.sizes
        return self._add("norm", (values,), sizes, option=option, heads=heads, limits=(eps, 0.0))

    def scaled(self, values: Any, factors: Tensor) -> Any:  # type: ignore[override]
        """See :class:`Way`."""
        return self._by_weight("multiply", values, factors)

    def shifted(self, values: Any, terms: Tensor) -> Any:  # type: ignore[override]
        """See :class:`Way`."""
        return self._by_weight("add", values, terms)

    def sigmoid(self, values: Any) -> Any:  # type: ignore[override]
        """See :class:`Way`."""
        return self.function("sigmoid", values)

    def silu(self, values: Any) -> Any:
        """See :class:`Way`."""
        return self.function("silu", values)

    def gelu(self, values: Any) -> Any:
        """See :class:`Way`."""
        return self.function("gelu", values)

    def softplus(self, values: Any) -> Any:
        """See :class:`Way`."""
        if isinstance(values, Tensor):
            return softplus(values)
        return self.function("softplus", values)

    def log_sigmoid(self, values: Any) -> Any:
        """See :class:`Way`."""
        return self.function("log_sigmoid", values)

    def capped(self, values: Any, cap: float) -> Any:
        """See :class:`Way`."""
        return self.function("cap", values, high=cap)
