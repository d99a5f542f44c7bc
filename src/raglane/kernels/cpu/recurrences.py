"""Calls of the kernels for linear recurrences: ``csrc/recurrence``.

Tensors are flat values, offsets and parameters on a CPU. Each function validates all tensors whose
addresses C gets. ``csrc/abi/recurrences.h`` has the equations, and the shape of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raglane.errors import ShapeError
from raglane.native import library
from raglane.native.memory import pointer, readable

POISON = 1  # ``RAGLANE_POISON``

Tensors = tuple[Any, ...]
"""Tensors, or None for those that do not exist."""

Options = tuple[Any, ...]


class RecurrenceCall(NamedTuple):
    """The arguments of a recurrence, of which ``tensors`` are differentiated."""

    tensors: Tensors
    offsets: Tensor
    resets: Tensor | None
    options: Options


def sums_of(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states and parameters."""
    return torch.promote_types(dtype, torch.float32)


def wide(values: Tensor) -> Tensor:
    """Return numbers in the dtype of sums and states."""
    return values.to(sums_of(values.dtype))


class Recurrence:
    """A kernel of ``csrc/recurrence``, forward and backward."""

    struct = ""
    function = ""
    # The tensors that are differentiated; the dtypes of those in ``elements`` are that of values.
    tensors: tuple[str, ...] = ()
    elements: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    saved: tuple[str, ...] = ()
    # Results that backward reads.
    reread: tuple[str, ...] = ()

    def sizes(self, tensors: Tensors) -> tuple[int, ...]:
        """Return the sizes of C's struct; raise IndexError for tensors of other dimensions."""
        raise NotImplementedError

    def shapes(self, tensors: Tensors, options: Options, count: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors of a batch of ``count`` sequences, 0 elements for those
        that do not exist.
        """
        raise NotImplementedError

    def flags(self, tensors: Tensors, options: Options) -> tuple[float, ...]:  # noqa: ARG002
        """Return the fields of C's struct between the sizes and the offsets."""
        return options

    def described(self, call: RecurrenceCall) -> dict[str, tuple[int, ...]]:
        """Return the shapes of all tensors, or raise for tensors of other dimensions."""
        try:
            return self.shapes(call.tensors, call.options, call.offsets.shape[0] - 1)
        except (IndexError, ValueError, ZeroDivisionError):
            got = ", ".join(
                f"{name} {tuple(tensor.shape)}"
                for name, tensor in zip(self.tensors, call.tensors, strict=True)
                if tensor is not None
            )
            rule = f"the dimensions of csrc/abi/recurrences.h for {self.struct}"
            raise ShapeError("tensors", got, rule, "pass tensors of these dimensions") from None

    def dtype_of(self, name: str, values: Tensor) -> torch.dtype:
        """Return the dtype of a tensor by its name."""
        is_element = name in self.elements or name == self.results[0]
        return values.dtype if is_element else sums_of(values.dtype)

    def _call(
        self,
        suffix: str,
        call: RecurrenceCall,
        others: dict[str, Tensor | None],
        written: dict[str, Tensor],
    ) -> None:
        """Validate all tensors that C reads, and call it."""
        tensors, offsets, resets, options = call
        values = tensors[0]
        if values.dtype not in library.DTYPES:
            rule = "float32, float64 or bfloat16"
            raise ShapeError(self.tensors[0], f"{values.dtype}", rule, "convert it with .to()")
        shapes = self.described(call)
        elements = values.shape[0]
        read = [("offsets", offsets, tuple(offsets.shape), torch.int64)]
        if resets is not None:
            read.append(("resets", resets, (elements,), torch.bool))
        for name, tensor in [*zip(self.tensors, tensors, strict=True), *others.items()]:
            if tensor is not None:
                whole = name.removeprefix("grad_")
                read.append((name, tensor, shapes[whole], self.dtype_of(whole, values)))
        addresses, _owners = readable(*read)
        # The address of no numbers is null, which in C means that there is no tensor.
        places = [address or addresses[0] for address in addresses]
        fields = dict(zip([name for name, *_ in read], places, strict=True))
        fields |= {name: pointer(tensor) for name, tensor in written.items()}
        abi, isa, dtype, flags, threads = library.program_preamble(values.dtype)
        head = (abi, isa, dtype, flags, threads, offsets.shape[0] - 1, elements)
        names = list(library.library().structs[self.struct].formats)
        pointers = [fields.get(name, 0) for name in names[names.index("offsets") :]]
        numbers = self.sizes(tensors), self.flags(tensors, options)
        library.call(
            f"raglane_{self.function}{suffix}",
            library.packer(self.struct)(*head, *numbers[0], *numbers[1], *pointers),
        )

    def outputs(
        self,
        call: RecurrenceCall,
        save: bool,
        empty: Callable[..., Tensor] = Tensor.new_empty,
    ) -> dict[str, Tensor]:
        """Return the results and what is saved for backward, without numbers: ``empty`` returns the
        memory of what is saved, which without ``save`` has none.
        """
        values = call.tensors[0]
        shapes = self.described(call)
        like = values.new_empty(0, dtype=sums_of(values.dtype))
        outputs = {
            name: (values if name == self.results[0] else like).new_empty(shapes[name])
            for name in self.results
        }
        return outputs | {
            # One tensor each, because results of operators must not be the same.
            name: empty(like, *shapes[name]) if save else like.new_empty(0)
            for name in self.saved
        }

    def gradients(self, tensors: Tensors, needed: list[bool]) -> list[Tensor]:
        """Return the gradients of tensors without numbers, empty ones where they are not needed."""
        values = tensors[0]
        return [
            values.new_empty(
                tensor.shape if is_needed and tensor is not None else 0,
                dtype=self.dtype_of(name, values),
            )
            for name, tensor, is_needed in zip(self.tensors, tensors, needed, strict=True)
        ]

    def forward(self, call: RecurrenceCall, save: bool) -> list[Tensor]:
        """Return the results, and what is saved for backward: empty tensors without ``save``."""
        written = self.outputs(call, save, library.empty)
        there = {name: tensor for name, tensor in written.items() if tensor.numel()}
        if library.library().flags & POISON:
            for tensor in there.values():
                tensor.fill_(math.nan)
        self._call("", call, {}, there)
        return list(written.values())

    def backward(
        self, call: RecurrenceCall, saved: Tensors, grads: Tensors, needed: list[bool]
    ) -> list[Tensor]:
        """Return the gradient of each tensor, an empty one if it is not needed.

        ``saved``: the tensors of ``reread`` and ``saved``; ``grads``: those of the results, or None
        for zeros.
        """
        shapes = self.described(call)
        names = [f"grad_{name}" for name in self.results]
        others = dict(zip([*self.reread, *self.saved, *names], [*saved, *grads], strict=True))
        others = {
            name: tensor
            for name, tensor in others.items()
            if tensor is not None and 0 not in shapes[name.removeprefix("grad_")]
        }
        results = self.gradients(call.tensors, needed)
        written = {
            f"grad_{name}": result
            for name, result in zip(self.tensors, results, strict=True)
            if result.numel()
        }
        self._call("_backward", call, others, written)
        return results


class _SelectiveScan(Recurrence):
    struct = "raglane_selective_scan"
    function = "scan_selectively"
    tensors = ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial")
    elements = ("x", "dt", "B", "C")
    results = ("output", "final")
    saved = ("borders",)

    def sizes(self, tensors: Tensors) -> tuple[int, ...]:
        channels, states = tensors[2].shape
        return channels, tensors[3].shape[1], states

    def shapes(
        self,
        tensors: Tensors,
        options: Options,  # noqa: ARG002
        count: int,
    ) -> dict[str, tuple[int, ...]]:
        channels, groups, states = self.sizes(tensors)
        elements = tensors[0].shape[0]
        of_group = (elements, groups, states)
        per_sequence = (count, channels, states)
        return {
            "x": (elements, channels),
            "dt": (elements, channels),
            "A": (channels, states),
            "B": of_group,
            "C": of_group,
            "D": (channels,),
            "dt_bias": (channels,),
            "initial": per_sequence,
            "output": (elements, channels),
            "final": per_sequence,
            "borders": (elements // library.library().border, channels * states),
        }


class _Attention(Recurrence):
    struct = "raglane_attention"
    function = "attend"
    tensors = (
        *("q", "k", "v", "log_decay", "gain", "log_gain"),
        *("initial", "initial_normaliser", "initial_stabiliser"),
    )
    elements = ("q", "k", "v")
    results = ("output", "final", "final_normaliser", "final_stabiliser")
    saved = ("borders", "errors", "reads", "levels")
    reread = ("output", "final", "final_normaliser")

    def sizes(self, tensors: Tensors) -> tuple[int, ...]:
        _, key_heads, key_size = tensors[0].shape
        _, heads, value_size = tensors[2].shape
        return key_heads, heads, key_size, value_size

    def shapes(self, tensors: Tensors, options: Options, count: int) -> dict[str, tuple[int, ...]]:
        key_heads, heads, key_size, value_size = self.sizes(tensors)
        elements = tensors[0].shape[0]
        decay, log_gain = tensors[3], tensors[5]
        keys = (elements, key_heads, key_size)
        values = (elements, heads, value_size)
        rows = (elements, heads)
        is_stabilised = log_gain is not None
        state = (count, heads, key_size, value_size)
        rest = ((count, heads, key_size), (count, heads)) if is_stabilised else ((0,), (0,))
        return {
            "q": keys,
            "k": keys,
            "v": values,
            "log_decay": (*rows, key_size) if decay is not None and decay.dim() == 3 else rows,
            "gain": rows,
            "log_gain": rows,
            "initial": state,
            "initial_normaliser": rest[0],
            "initial_stabiliser": rest[1],
            "output": values,
            "final": state,
            "final_normaliser": rest[0],
            "final_stabiliser": rest[1],
            "borders": (
                elements // library.library().border,
                heads * key_size * (value_size + is_stabilised),
            ),
            "errors": values if options[1] else (0,),
            "reads": rows if is_stabilised else (0,),
            "levels": rows if is_stabilised else (0,),
        }

    def flags(self, tensors: Tensors, options: Options) -> tuple[float, ...]:
        scale, delta, eps = options
        decay = tensors[3]
        return decay is not None and decay.dim() == 3, delta, scale, eps


class _ChannelConvolution(Recurrence):
    struct = "raglane_convolution"
    function = "convolve"
    tensors = ("x", "weight", "bias", "initial")
    elements = ("x",)
    results = ("output", "final")

    def sizes(self, tensors: Tensors) -> tuple[int, ...]:
        channels, taps = tensors[1].shape
        return channels, taps

    def shapes(self, tensors: Tensors, options: Options, count: int) -> dict[str, tuple[int, ...]]:
        channels, taps = self.sizes(tensors)
        rows = (tensors[0].shape[0], channels)
        state = (count, options[0], channels)
        weights = {"weight": (channels, taps), "bias": (channels,)}
        return {"x": rows, **weights, "initial": state, "output": rows, "final": state}


class _Rglru(Recurrence):
    struct = "raglane_rglru"
    function = "accumulate"
    tensors = (
        *("x", "entry", "recurrent", "entry_bias", "recurrent_bias", "rates"),
        *("fresh", "initial"),
    )
    elements = ("x", "entry", "recurrent")
    results = ("output", "final")
    saved = ("borders",)

    def sizes(self, tensors: Tensors) -> tuple[int, ...]:
        return (tensors[0].shape[1],)

    def shapes(self, tensors: Tensors, _: Options, count: int) -> dict[str, tuple[int, ...]]:
        elements, channels = tensors[0].shape
        rows: tuple[int, ...] = (elements, channels)
        shapes = dict.fromkeys((*self.elements, "output"), rows)
        shapes |= dict.fromkeys(("entry_bias", "recurrent_bias", "rates"), (channels,))
        shapes |= dict.fromkeys(("initial", "final"), (count, channels))
        borders = (elements // library.library().border, channels)
        return {**shapes, "fresh": (elements,), "borders": borders}


SELECTIVE_SCAN = _SelectiveScan()
ATTENTION = _Attention()
CONVOLUTION = _ChannelConvolution()
RGLRU = _Rglru()
