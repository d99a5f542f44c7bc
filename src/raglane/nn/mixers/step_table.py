"""One step of a block as one call of the kernels: the block runs on columns of a table, each of its
operations is recorded, and the kernels run the list.

``csrc/abi/recurrences.h`` has the operations. A list has places of parameters in the block and no
parameter, so that it is right for any numbers in them; what else it depends on is a
:class:`_Survey`, which each step compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partialmethod
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from raglane.kernels.cpu.steps import BLOCK_WORDS, run_block
from raglane.nn.mixers.plain import are_products, has_hooks
from raglane.nn.mixers.ways import AttentionArguments, Decay, Scan, Way

# In the order of raglane_row_kind and raglane_row_function.
_KINDS = ("product", "convolve", "function", "add", "multiply", "norm", "attend", "decay")
_FUNCTIONS = ("sigmoid", "silu", "gelu", "softplus", "log_sigmoid", "clamp", "cap")


class NotRecordedError(Exception):
    """A block does more than the operations of the kernels."""


class _Derived(NamedTuple):
    """A function of parameters, which are places in a survey, and of constants."""

    function: Callable[..., Tensor]
    places: tuple[int, ...]
    constants: tuple[Any, ...]

    def of(self, tensors: list[Any]) -> Tensor:
        """Return the numbers for the parameters of today."""
        return self.function(*[tensors[place] for place in self.places], *self.constants)


class _Survey:
    """The parameters of a block, and all that its list of operations depends on."""

    __slots__ = ("facts", "linears", "tensors")

    def __init__(self, block: Any, x: Tensor) -> None:
        self.tensors: list[Any] = []
        self.linears: list[nn.Module] = []
        norm = block.residual_norm
        self.facts: list[Any] = [x.shape[1], x.dtype, norm and norm.eps, type(block).mix]
        for module in (block, *block._modules.values()):
            kind = type(module)
            self.facts.append(kind)
            if kind is nn.Linear:
                self.linears.append(module)
            for name, parameter in module._parameters.items() if module is not None else ():
                self.tensors.append(parameter)
                self.facts += (name, None if parameter is None else parameter.shape)


class Recording(NamedTuple):
    """The operations of a step, without tensors."""

    code: list[int]
    limits: list[float]
    sizes: list[int]
    # The place of a parameter in a survey, or a function.
    parts: list[int | _Derived]
    facts: list[Any]

    def run(
        self, x: Tensor, states: tuple[Tensor, ...], tensors: list[Any]
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Run the operations; return the output and the states after the step, or None if the
        kernels cannot read a tensor.
        """
        parts = [
            tensors[part] if isinstance(part, int) else part.of(tensors) for part in self.parts
        ]
        results = run_block(x.contiguous(), states, parts, self.code, self.limits, self.sizes)
        return (results[0], tuple(results[1:])) if results else None


_RECORDINGS: WeakKeyDictionary[nn.Module, Recording] = WeakKeyDictionary()


def forget(block: nn.Module) -> None:
    """Forget the operations of a block, of which an attribute changes."""
    _RECORDINGS.pop(block, None)


def step_block(
    block: Any, x: Tensor, states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]] | None:
    """Run one step of a block by one call of the kernels; None if that is not possible.

    The operations are recorded in the first step, and again after a change of the block. Numbers of
    parameters are read in every step.
    """
    survey = _Survey(block, x)
    recording = _RECORDINGS.get(block)
    if recording is None or recording.facts != survey.facts:
        table = StepTable(x.dtype, x.shape[1], states, survey)
        try:
            output, _ = block._added(table.input(), states, table)
        except NotRecordedError:
            return None
        recording = table.recording(output)
        _RECORDINGS[block] = recording
    elif any(map(has_hooks, survey.linears)):
        return None
    return recording.run(x, states, survey.tensors)


@dataclass(frozen=True, eq=False)
class TableColumns:
    """Adjacent columns of a table, in place of a tensor ``(B, *sizes)``."""

    table: StepTable
    first: int
    sizes: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the table."""
        return self.table.dtype

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
        self._check_flat(dim)
        firsts = accumulate(sizes[:-1], initial=self.first)
        return [
            TableColumns(self.table, first, (size,))
            for first, size in zip(firsts, sizes, strict=True)
        ]

    def unflatten(self, dim: int, sizes: tuple[int, int]) -> TableColumns:
        """See :meth:`torch.Tensor.unflatten`."""
        self._check_flat(dim)
        return TableColumns(self.table, self.first, (sizes[0], self.count // sizes[0]))

    def _check_flat(self, dim: int) -> None:
        if dim != 1 or len(self.sizes) > 1:
            raise NotRecordedError

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

    def __init__(
        self, dtype: torch.dtype, width: int, states: tuple[Tensor, ...], survey: _Survey
    ) -> None:
        self.dtype = dtype
        self._states = states
        self._width = width
        self._survey = survey
        self._code: list[int] = []
        self._limits: list[float] = []
        self._parts: list[Any] = []
        self._derived: list[tuple[Tensor, _Derived]] = []

    def input(self) -> Any:
        """Return the columns of the input."""
        return TableColumns(self, 0, (self._width,))

    def recording(self, output: Any) -> Recording:
        """Return the operations until the columns of the output."""
        sizes = [self._width, output.first, output.count]
        return Recording(self._code, self._limits, sizes, self._parts, self._survey.facts)

    def derived(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        """See :class:`Way`."""
        result = function(*arguments)
        parameters = [each for each in arguments if isinstance(each, Tensor)]
        places = tuple([self._place(parameter) for parameter in parameters])
        self._derived.append((result, _Derived(function, places, arguments[len(places) :])))
        return result

    def _place(self, parameter: Tensor) -> int:
        """Return the place of a parameter, which has only one."""
        places = [i for i, each in enumerate(self._survey.tensors) if each is parameter]
        if len(places) != 1:
            raise NotRecordedError
        return places[0]

    def _add_part(self, tensor: Tensor | None) -> int:
        """Add where later steps find a weight, and return its number, -1 for None."""
        if tensor is None:
            return -1
        derived = [part for result, part in self._derived if result is tensor]
        self._parts.append(derived[0] if derived else self._place(tensor))
        return len(self._parts) - 1

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
        words = [_KINDS.index(kind), option, written.count, *heads, written.first]
        words += [columns.first for columns in inputs]
        words += [0] * (BLOCK_WORDS - 3 - len(words))
        of_state = [i for i, each in enumerate(self._states) if each is state]
        self._code += [*words, self._add_part(weight), self._add_part(bias), (of_state or [-1])[0]]
        self._limits += limits
        return written

    def function(self, name: str, values: Any, low: float = 0.0, high: float = 0.0) -> Any:
        """Add a function of numbers."""
        limits = (low, high)
        return self._add(
            "function", (values,), values.sizes, option=_FUNCTIONS.index(name), limits=limits
        )

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
        return self.product(values, layer.weight, bias=layer.bias)

    def product(
        self, values: Any, weight: Tensor, *, is_turned: bool = False, bias: Tensor | None = None
    ) -> Any:
        """See :class:`Way`."""
        groups = weight.shape[0] if weight.dim() == 3 else 1
        rows, depth = reversed(weight.shape[-2:]) if is_turned else weight.shape[-2:]
        return self._add(
            "product",
            (values,),
            (groups * rows,),
            option=int(is_turned),
            heads=(groups, depth, 1),
            weight=weight,
            bias=bias,
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
        x: Any = parts.x
        recurrent = self.sigmoid(self.shifted(parts.recurrent, parts.recurrent_bias))
        entry = self.sigmoid(self.shifted(parts.entry, parts.entry_bias))
        output = self._add(
            "decay", (recurrent, entry, x), x.sizes, weight=parts.rates, state=states[0]
        )
        return output, states

    def normed(self, values: Any, weight: Tensor | None, eps: float) -> Any:
        """See :class:`Way`."""
        normed = self._normed(0, values, eps)
        return normed if weight is None else self._by_weight("multiply", normed, weight)

    def _normed(self, option: int, values: Any, eps: float) -> Any:
        size = values.sizes[-1]
        heads = (values.count // size, size, 1)
        sizes = values.sizes
        return self._add("norm", (values,), sizes, option=option, heads=heads, limits=(eps, 0.0))

    unit: Any = partialmethod(_normed, 1)
    centred: Any = partialmethod(_normed, 2, eps=0.0)
    scaled: Any = partialmethod(_by_weight, "multiply")
    shifted: Any = partialmethod(_by_weight, "add")
    sigmoid: Any = partialmethod(function, "sigmoid")
    silu: Any = partialmethod(function, "silu")
    gelu: Any = partialmethod(function, "gelu")
    softplus: Any = partialmethod(function, "softplus")
    log_sigmoid: Any = partialmethod(function, "log_sigmoid")

    def capped(self, values: Any, cap: float) -> Any:
        """See :class:`Way`."""
        return self.function("cap", values, high=cap)
