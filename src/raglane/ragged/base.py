"""The fields of a ragged batch, and the properties that follow from them."""

# To type checkers a Ragged is a Tensor; its own attributes are declared here.
# mypy: disable-error-code="override"

from __future__ import annotations

import sys
from typing import Any, Self

import torch
from torch import Tensor

from raglane import segments
from raglane._utils.checks import (
    check_device,
    check_host_offsets,
    check_tensor,
    check_unchanged,
    check_value,
)
from raglane._utils.messages import quote
from raglane._utils.tracing import (
    is_jit_traced,
    plain,
    records_operators,
    refuse_jit_trace,
    runs_at_once,
)
from raglane.errors import ArgumentTypeError, DimensionError, ShapeError
from raglane.ragged.face.refusals import refuse_lazy
from raglane.ragged.typed import Face


class FlatBatch(Face):
    """The base of ``Ragged``: flat values, offsets and a copy of the lengths on the host.

    NOTE (host lengths): on a CPU the offsets are the only record of the sequences, and
    ``_host_lengths`` is None. For offsets on a device it is a CPU tensor, or None if the lengths
    have only been on the device; the first property that needs them then waits for the device,
    once.
    """

    __slots__ = ("_host_lengths", "_offsets", "_values")
    _values: Tensor  # type: ignore[assignment]
    _offsets: Tensor
    _host_lengths: Tensor | None

    @classmethod
    def _make(cls, values: Tensor, offsets: Tensor, lengths_cpu: Tensor | None) -> Self:
        """Create a batch without checks."""
        batch = cls.__new__(cls)
        batch._values = values
        batch._offsets = offsets
        # In torch's pytrees, placeholders may replace tensors.
        batch._host_lengths = None if getattr(offsets, "is_cpu", False) else lengths_cpu
        return batch

    @classmethod
    def _build(cls, values: Tensor, lengths_cpu: Tensor) -> Self:
        offsets = segments.offsets_from_lengths(lengths_cpu).to(values.device, non_blocking=True)
        return cls._make(values, offsets, lengths_cpu)

    def _like(self, values: Tensor) -> Self:
        """:meth:`with_values` without its checks."""
        offsets = self._offsets
        if (
            not torch.compiler.is_compiling()
            and offsets.is_inference()
            and not values.is_inference()
        ):
            offsets = offsets.clone()  # a backward pass cannot save those of torch.inference_mode
        return self._make(values, offsets, self._host_lengths)

    def with_values(self, values: Tensor) -> Self:
        """Return the same sequences with other values.

        Args:
            values: ``(N, *features)``, one row per element, on the device of the batch; any dtype.

        Raises:
            ArgumentTypeError: not a dense tensor.
            ShapeError: not one row per element, or on another device.

        Example:
            >>> batch = Ragged([[1.0, 2.0], [3.0]])
            >>> batch.with_values(batch.values * 2).values.tolist()
            [2.0, 4.0, 6.0]
        """
        check_tensor("values", values, least=1)
        if values.shape[0] != self._values.shape[0]:
            rule = f"a tensor with one row for each of the {self._values.shape[0]} elements"
            raise ShapeError(
                "values", f"shape {tuple(values.shape)}", rule, "compute them from .values"
            )
        check_device("values", values, self._offsets.device)
        return self._like(values)

    def __len__(self) -> int:
        """The number of sequences, B."""
        return self._count

    @property
    def _count(self) -> int:
        """B, symbolic in a graph, where ``len`` would make it a constant."""
        return self._offsets.shape[0] - 1

    # -- what it holds
    # ----------------------------------------------------------------------------------------------

    @property
    def values(self) -> Tensor:
        """The elements, ``(N, *features)``, sequence after sequence."""
        return self._values

    @property
    def offsets(self) -> Tensor:
        """The starts of the sequences and the end of the last, ``(B + 1,)`` int64 on the device of
        the values.
        """
        # The caller can change them in place, and torch and C would read and write out of bounds.
        offsets = self._offsets
        if type(offsets) is Tensor and offsets.is_cpu and runs_at_once(offsets):
            check_host_offsets(offsets, self._values.shape[0])
        elif self._is_on_host():
            check_unchanged(offsets, self._values.shape[0], offsets.device)
        return offsets

    @property
    def lengths_cpu(self) -> Tensor:
        """The lengths, ``(B,)`` int64, on the CPU. Waits for a GPU if they are only there."""
        if self._offsets.is_cpu:
            return self.lengths
        if self._host_lengths is None or not self._host_lengths.is_cpu:
            self._host_lengths = segments.lengths_from_offsets(self._offsets).cpu()
        return self._host_lengths

    def _is_on_host(self) -> bool:
        """Return True if NumPy can read the offsets."""
        return (
            type(self._offsets) is Tensor
            and self._offsets.is_cpu
            and not (records_operators() or is_jit_traced())
        )

    def _known_lengths(self) -> Tensor | None:
        """Return the lengths on the host, or None if that would wait for a device."""
        return (
            segments.lengths_from_offsets(self._offsets)
            if self._offsets.is_cpu
            else self._host_lengths
        )

    @property
    def lengths(self) -> Tensor:
        """The lengths, ``(B,)`` int64, on the device of the values; ``lengths_cpu`` is the copy on
        the host.
        """
        return segments.lengths_from_offsets(self.offsets)

    @property
    def cu_seqlens(self) -> Tensor:
        """The offsets as int32, for attention kernels with variable lengths; at most 2**31 - 1
        elements.
        """
        if not records_operators() and self._values.shape[0] >= 2**31:
            rule = "at most 2**31 - 1 elements, the range of int32"
            raise ShapeError(
                "values", f"{self._values.shape[0]}", rule, "split the batch, or use offsets"
            )
        return self.offsets.to(torch.int32)

    @property
    def segment_ids(self) -> Tensor:
        """The index of the sequence of each element, ``(N,)`` int64."""
        return segments.segment_ids(self.offsets, self._values.shape[0])

    @property
    def positions(self) -> Tensor:
        """The step of each element in its sequence, ``(N,)`` int64, from 0."""
        return segments.positions(self.offsets, self._values.shape[0])

    @property
    def max_length(self) -> int:
        """The longest length; 0 for an empty batch. Waits for a GPU if the lengths are only
        there.
        """
        refuse_jit_trace("the longest length of a Ragged")
        lengths = self.lengths_cpu
        return int(lengths.max()) if lengths.numel() else 0

    @property
    def density(self) -> float:
        """N / (B x longest), the share of real elements in the padded batch; 1 if that is empty.

        Waits for a GPU if the lengths are only there.
        """
        room = len(self) * self.max_length
        return self._values.shape[0] / room if room else 1.0

    @property
    def feature_shape(self) -> torch.Size:
        """The shape of one element."""
        return self._values.shape[1:]

    @property
    def shape(self) -> tuple[Any, ...]:
        """``(B, None, *features)``: None for the steps, whose number differs."""
        if not torch.compiler.is_compiling():
            refuse_lazy(sys._getframe(1))
        return (self._count, None, *self._values.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of dimensions, of which sequences and steps are two."""
        return self._values.dim() + 1

    def dim(self) -> int:
        """Return :attr:`ndim`."""
        return self._values.dim() + 1

    def size(self, dim: int | None = None) -> Any:
        """Return :attr:`shape`, or one size of it; the number of steps has none."""
        if dim is None:
            return self.shape
        if not isinstance(dim, int) or not -self.ndim <= dim < self.ndim:
            rule = f"from {-self.ndim} to {self.ndim - 1}, for {self._shape_text()}"
            raise DimensionError("dim of size", quote(dim), rule, "pass a dimension of it")
        if dim % self.ndim == 1:
            rule = "a dimension with one size, and sequences have different numbers of steps"
            fix = "use r.lengths; in place of torch's recurrent layers call those of rl.nn"
            raise ArgumentTypeError("dim of size", f"{dim}, the steps", rule, fix)
        return self.shape[dim]

    def _shape_text(self) -> str:
        return f"({', '.join(map(str, (self._count, '*', *self._values.shape[1:])))})"

    layout = torch.strided
    is_nested = is_sparse = is_quantized = False

    @property
    def real(self) -> Self:
        """The real parts of the values."""
        return self._like(self._values.real)

    @property
    def imag(self) -> Self:
        """The imaginary parts of the values."""
        return self._like(self._values.imag)

    @property
    def is_cuda(self) -> bool:
        """True if the values are on a GPU."""
        return self._values.is_cuda

    @property
    def is_cpu(self) -> bool:
        """True if the values are on the CPU."""
        return self._values.is_cpu

    def tolist(self) -> list[Any]:
        """Return nested lists of numbers, one per sequence."""
        pieces = torch.split(self._values, self.lengths_cpu.tolist()) if len(self) else ()
        return [piece.tolist() for piece in pieces]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return self._values.dtype

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self._values.device

    @property
    def requires_grad(self) -> bool:
        """True if the values require gradients."""
        return self._values.requires_grad

    def mask(self) -> Tensor:
        """Return the mask of the padded batch, ``(B, longest)`` bool, True for real elements.

        Waits for a GPU if the lengths are only there.

        Example:
            >>> Ragged([torch.ones(2), torch.ones(1)]).mask().tolist()
            [[True, True], [True, False]]
        """
        return torch.arange(self.max_length, device=self.device) < self.lengths.unsqueeze(1)

    def _host_offsets(self) -> Tensor:
        refuse_jit_trace("an index of sequences")
        return (
            self._offsets
            if self._offsets.is_cpu
            else segments.offsets_from_lengths(self.lengths_cpu)
        )

    def _needs_lengths_of(self, name: str, other: FlatBatch, whose: str) -> None:
        """Raise if this batch, the argument ``name``, has other lengths than ``other``.

        NOTE (trust): lengths that are only on a device are not checked, which would wait for it;
        nor are numbers under torch.compile, which cannot trace a branch on them.
        """
        if self._offsets is other._offsets:
            return
        fix = "build both from the same lengths, or cut the longer sequences with r[:, :k]"
        if torch.compiler.is_compiling():
            torch._check(self._values.shape[0] == other._values.shape[0])
            torch._check(self._count == other._count)
            return
        if self._count != other._count:
            got, rule = f"{len(self)} sequences", f"a batch of {len(other)} sequences, like {whose}"
            raise ShapeError(name, got, rule, fix)
        mine, theirs = self._known_lengths(), other._known_lengths()
        is_compared = mine is not None and theirs is not None
        if not is_compared:
            if self._values.shape[0] != other._values.shape[0]:
                got = f"{self._values.shape[0]} elements"
                rule = f"a batch of {other._values.shape[0]} elements, like {whose}"
                raise ShapeError(name, got, rule, fix)
            return
        if torch.equal(mine, theirs):  # type: ignore[arg-type]
            return
        index = int((mine != theirs).nonzero()[0])  # type: ignore[attr-defined]
        got = f"length {int(mine[index])} for sequence {index}"  # type: ignore[index]
        rule = f"a batch with the lengths of {whose}, here {int(theirs[index])}"  # type: ignore[index]
        raise ShapeError(name, got, rule, fix)

    def _needs_elements(self, name: str, least: int = 1) -> None:
        """Raise if a sequence has fewer elements.

        NOTE (asserts): numbers that only a device or a graph has are asserted there, without
        waiting.
        """
        refuse_jit_trace(f"a call of {name}, which reads the lengths")
        lengths = self._known_lengths()
        if lengths is None or torch.compiler.is_compiling():
            lengths = self._offsets.diff()
        rule = f"at least {least} for {name}"
        self._needs_true("each length", lengths >= least, rule, "a sequence with fewer steps")

    def _needs_steps(self, name: str, exists: Tensor) -> None:
        """Raise if an index of steps does not exist."""
        self._needs_true(
            name, exists, "steps that each sequence has", "a step that one does not have"
        )

    def _needs_true(self, name: str, holds: Tensor, rule: str, got: str = "others") -> None:
        """Raise, or assert on the device, that all of ``holds`` is True."""
        if not torch.compiler.is_compiling():
            holds = plain(holds)  # raises if it differs from sample to sample of torch.vmap
        if not holds.is_cpu or records_operators():
            torch._assert_async(holds.all(), f"{name} must be {rule}, got {got}.")
        elif not bool(holds.all()):
            fix = "leave those out, e.g. r[r.lengths > 0], or pass empty= if the method has it"
            raise DimensionError(name, got, rule, fix)

    def _value(self, name: str, value: Any) -> Any:
        """Return a number in the dtype of the values; raise if it does not fit."""
        return check_value(name, value, self.values.dtype)
