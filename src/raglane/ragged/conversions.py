"""Conversions of ragged batches from and to other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from raglane import segments
from raglane._utils.checks import (
    check_flag,
    check_offsets,
    check_tensor,
    check_whole,
    read_integers,
    read_values,
)
from raglane._utils.messages import quote
from raglane._utils.tracing import index_arithmetic, records_operators, refuse_jit_trace
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.packing.convert import flatten_packed, flatten_padded, pack_flat
from raglane.packing.flat_values import flat_to_padded
from raglane.ragged.base import FlatBatch
from raglane.ragged.interop import from_arrow, from_nested, to_arrow, to_nested
from raglane.segments.indexing import place_rows, take_rows


class Conversions(FlatBatch):
    """The conversions of ``Ragged``. They do not loop over sequences, and are differentiable if
    they copy.
    """

    __slots__ = ()

    @classmethod
    def from_flat(cls, values: Any, *, offsets: Any = None, lengths: Any = None) -> Self:
        """Create a batch from flat values; a tensor or NumPy array is not copied.

        Args:
            values: ``(N, *features)``.
            offsets: ``(B + 1,)`` non-decreasing integers from 0 to ``N``: a tensor, an array or a
                list. Offsets on a GPU stay there and are not checked, which would wait for it.
            lengths: instead of offsets, ``(B,)`` integers of at least 0 with the sum ``N``.

        Raises:
            ArgumentTypeError: not exactly one of offsets and lengths, or no integers; values that
                are not numbers, or a nested, sparse or quantized tensor.
            ShapeError: offsets or lengths do not fit the values.

        Example:
            >>> Ragged.from_flat(torch.arange(6), lengths=[4, 2]).to_list()
            [tensor([0, 1, 2, 3]), tensor([4, 5])]
        """
        values = read_values(values, "values")
        if (offsets is None) == (lengths is None):
            rule = "given as exactly one of the two"
            fix = "pass lengths=[...] or offsets=[0, ...]"
            raise ArgumentTypeError(
                "offsets, lengths", "neither" if offsets is None else "both", rule, fix
            )
        if offsets is None:
            given = _own(read_integers(lengths, "lengths"), lengths)
            offsets = segments.offsets_from_lengths(given)
        else:
            given = None
            offsets = _own(read_integers(offsets, "offsets"), offsets)
        if offsets.device.type != "cpu":
            if offsets.is_meta and not values.is_meta:
                what = "offsets" if given is None else "lengths"
                raise ShapeError(
                    what, "a tensor without data, on meta", "integers", "pass a tensor with data"
                )
            return cls._make(values, offsets.to(values.device), None)
        lengths_cpu = segments.lengths_from_offsets(offsets) if given is None else given
        if not records_operators():  # the kernels check when they run
            check_offsets(offsets, values.shape[0], "offsets" if given is None else "lengths")
        return cls._make(values, offsets.to(values.device, non_blocking=True), lengths_cpu)

    @classmethod
    def from_steps(cls, steps: Sequence[Tensor], lengths: Any = None) -> Self:
        """Create a batch from its steps, the inverse of :meth:`steps`.

        Args:
            steps: for each step t one tensor ``(n, *features)``, with a row for each of the n
                sequences that have it, in the order of the batch. At least one.
            lengths: ``(B,)`` integers of at least 0: a list, an array, or a tensor, which is copied
                to the host. None if all sequences have all steps.

        Raises:
            ArgumentTypeError: ``steps`` is not a list of tensors.
            ShapeError: the steps do not fit the lengths, or each other.

        Example:
            >>> r = Ragged([[1.0, 2.0, 3.0], [4.0]])
            >>> sums, total = [], torch.zeros(2)
            >>> for rows, x_t in r.steps():
            ...     total = total.index_add(0, rows, x_t)
            ...     sums.append(total[rows])
            >>> Ragged.from_steps(sums, r.lengths).tolist()
            [[1.0, 3.0, 6.0], [4.0]]
        """
        refuse_jit_trace("a batch of steps")
        several = list(steps) if isinstance(steps, list | tuple) else []
        if not several or not all(isinstance(rows, Tensor) and rows.dim() for rows in several):
            got = quote(type(steps).__name__) if not several else "other entries"
            rule = "a list with one tensor (n, *features) for each step, and at least one"
            raise ArgumentTypeError("steps", got, rule, "append the result of each step to a list")
        if lengths is None:
            known = torch.full((several[0].shape[0],), len(several), device="cpu")
        else:
            known = read_integers(lengths, "lengths").cpu()
        counts = torch.from_numpy(segments.conjugate(known.numpy(), len(several)))
        rows = [step.shape[0] for step in several]
        if rows != counts.tolist() or (known.numel() and int(known.max()) > len(several)):
            rule = f"one row for each sequence that has the step: {counts.tolist()}"
            fix = "pass the lengths of the batch whose steps these are"
            raise ShapeError("steps", f"{rows} rows", rule, fix)
        try:
            values = torch.cat(several)
        except RuntimeError as error:
            shapes = sorted({tuple(step.shape[1:]) for step in several})
            rule = "tensors of the same features and device"
            raise ShapeError(
                "steps", f"features {shapes}", rule, "return the same at each step"
            ) from error
        offsets = segments.offsets_from_lengths(known)
        order = torch.argsort(segments.positions(offsets, int(offsets[-1])), stable=True)
        return cls._build(place_rows(values, order.to(values.device), values.shape[0]), known)

    @classmethod
    def from_padded(
        cls,
        padded: Tensor,
        lengths: Any = None,
        batch_first: bool = True,
        *,
        padding_side: Literal["left", "right"] = "right",
        mask: Tensor | None = None,
    ) -> Self:
        """Create a batch from the real elements of a padded tensor.

        Args:
            padded: ``(B, T, *features)``, or ``(T, B, *features)`` if ``batch_first`` is False.
            lengths: ``(B,)`` integers from 0 to ``T``, for padding on one side: a list, an array,
                or a tensor, which is copied to the host.
            batch_first: True if the batch is the first dimension of ``padded`` and of ``mask``.
            padding_side: with ``lengths``, the side of the padding, ``"right"`` or ``"left"``.
            mask: instead of lengths, ``(B, T)`` bool, True for real elements, for padding anywhere.
                Its sum is read on the host, which waits for a GPU.

        Raises:
            ArgumentTypeError: not exactly one of lengths and mask, or one of the wrong type.
            ShapeError: lengths or mask do not fit the padded tensor.

        Example:
            >>> padded = torch.tensor([[1, 2, 0], [3, 4, 5]])
            >>> Ragged.from_padded(padded, [2, 3]).to_list()
            [tensor([1, 2]), tensor([3, 4, 5])]
            >>> left = torch.tensor([[0, 1, 2], [3, 4, 5]])
            >>> Ragged.from_padded(left, [2, 3], padding_side="left").to_list()
            [tensor([1, 2]), tensor([3, 4, 5])]
            >>> Ragged.from_padded(left, mask=left > 0).to_list()
            [tensor([1, 2]), tensor([3, 4, 5])]
        """
        if (lengths is None) == (mask is None):
            rule = "given as exactly one of the two"
            fix = "pass the lengths, or a bool mask (B, T) for padding that is not on the right"
            raise ArgumentTypeError(
                "lengths, mask", "neither" if lengths is None else "both", rule, fix
            )
        batch_first = check_flag("batch_first", batch_first)
        if mask is not None:
            return cls._from_mask(check_tensor("padded", padded, 2), mask, batch_first)
        flat = flatten_padded(padded, lengths, batch_first, padding_side)
        return cls._make(flat.values, flat.offsets, flat.lengths)

    @classmethod
    def _from_mask(cls, padded: Tensor, mask: Tensor, batch_first: bool) -> Self:
        if not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise ArgumentTypeError("mask", str(kind), "a bool tensor", "pass e.g. mask.bool()")
        check_tensor("mask", mask)
        if mask.shape != padded.shape[:2]:
            rule = f"a tensor of the first two dimensions of padded, {tuple(padded.shape[:2])}"
            fix = "pass one entry for each element of the padded tensor"
            raise ShapeError("mask", f"shape {tuple(mask.shape)}", rule, fix)
        if not batch_first:
            padded, mask = padded.transpose(0, 1), mask.transpose(0, 1)
        index = mask.reshape(-1).nonzero().view(-1)
        flat = padded.reshape(-1, *padded.shape[2:])
        # Only copies to a device: one to the host would be read before it has arrived.
        index = index.to(flat.device, non_blocking=mask.is_cpu)
        return cls._build(take_rows(flat, index), mask.sum(1).cpu())

    @classmethod
    def from_packed(cls, packed: PackedSequence) -> Self:
        """Create a batch from a PackedSequence, in the caller's order.

        Args:
            packed: sorted or not; with :mod:`raglane.packing` also with sequences of length 0.

        Raises:
            ArgumentTypeError: not a PackedSequence.

        Example:
            >>> from raglane.packing import pack_sequence
            >>> Ragged.from_packed(pack_sequence([torch.tensor([1, 2]), torch.tensor([3])])).to_list()
            [tensor([1, 2]), tensor([3])]
        """
        flat = flatten_packed(packed)
        return cls._make(flat.values, flat.offsets, flat.lengths)

    @classmethod
    def from_nested(cls, nested: Tensor) -> Self:
        """Create a batch from a :mod:`torch.nested` tensor; the jagged layout shares its memory.

        Raises:
            ArgumentTypeError: not a nested tensor.
            ShapeError: ragged in another dimension than the first after the batch, or offsets on a
                CPU that do not fit its values.

        Example:
            >>> nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
            >>> Ragged.from_nested(nested).lengths.tolist()
            [2, 1]
        """
        values, offsets = from_nested(nested)
        return cls._make(values, offsets, offsets.diff() if offsets.device.type == "cpu" else None)

    @classmethod
    def from_arrow(cls, array: Any) -> Self:
        """Create a batch from an Arrow list array or a Series of lists of polars or pandas; numbers
        share its memory.

        Raises:
            MissingExtraError: pyarrow is not installed.
            ArgumentTypeError: not an Arrow array of lists of numbers.
            ArgumentError: the array contains a null.

        Example:
            >>> import pyarrow
            >>> Ragged.from_arrow(pyarrow.array([[1, 2], [], [3]])).lengths.tolist()
            [2, 0, 1]
        """
        values, offsets = from_arrow(array)
        return cls._make(values, offsets, offsets.diff())

    def to_list(self) -> list[Tensor]:
        """Return a view of each sequence. Waits for a GPU if the lengths are only there.

        Example:
            >>> Ragged([torch.tensor([1, 2]), torch.tensor([3])]).to_list()
            [tensor([1, 2]), tensor([3])]
        """
        refuse_jit_trace("a list of the sequences of a Ragged")
        return list(torch.split(self._values, self.lengths_cpu.tolist())) if len(self) else []

    def to_padded(
        self, batch_first: bool = True, padding_value: float = 0.0, total_length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a padded tensor and the lengths. Waits for a GPU if the lengths are only there.

        Args:
            batch_first: ``(B, T, *features)`` if True, else ``(T, B, *features)``.
            padding_value: the value of the padding.
            total_length: T, by default the longest length.

        Returns:
            The padded tensor, and the lengths ``(B,)`` int64 on the CPU.

        Raises:
            ArgumentTypeError: an argument of the wrong type, or a value that does not fit the
                dtype.
            ArgumentError: ``total_length`` below the longest length.

        Example:
            >>> padded, lengths = Ragged([torch.tensor([1, 2]), torch.tensor([3])]).to_padded()
            >>> padded.tolist(), lengths.tolist()
            ([[1, 2], [3, 0]], [2, 1])
        """
        fill, batch_first = (
            self._value("padding_value", padding_value),
            check_flag("batch_first", batch_first),
        )
        longest = self.max_length
        length = longest if total_length is None else check_whole("total_length", total_length)
        if length < longest:
            rule = f"at least the longest length, {longest}"
            fix = f"pass {longest} or more, or call r.truncate({total_length}) first"
            raise ArgumentError("total_length", str(total_length), rule, fix)
        check_whole(
            "total_length",
            length * max(len(self), 1),
            fix="pass a smaller one: this times the sequences",
        )
        padded = flat_to_padded(self._values, self._offsets, length, batch_first, fill)
        return padded, self.lengths_cpu.clone()

    def to_packed(self) -> PackedSequence:
        """Return a PackedSequence with ``sorted_indices``, which restore this order.

        Waits for a GPU if the lengths are only there. Only Raglane's layers accept sequences of
        length 0 in a pack.

        Example:
            >>> Ragged([torch.tensor([3]), torch.tensor([1, 2])]).to_packed().data.tolist()
            [1, 3, 2]
        """
        return pack_flat(self._values, self._offsets, self.lengths_cpu)

    def to_nested(self) -> Tensor:
        """Return a jagged :mod:`torch.nested` tensor that shares the memory.

        Example:
            >>> Ragged([torch.ones(2), torch.ones(1)]).to_nested().is_nested
            True
        """
        return to_nested(self._values, self._offsets, self.max_length)

    def to_transformers(self) -> dict[str, Any]:
        """Return the batch as one row, with the arguments by which models find its sequences.

        They are the keyword arguments of models of Hugging Face transformers for padding-free
        batches. Kernels of attention with variable lengths and of linear attention take
        ``cu_seq_lens_q``, those of Mamba ``seq_idx``.

        Returns:
            ``input_ids`` ``(1, N)`` of integers, or ``inputs_embeds`` ``(1, N, *features)`` of
            other values, both views; ``position_ids`` ``(1, N)`` int64; ``seq_idx`` ``(1, N)``
            int32, the sequence of each element; ``cu_seq_lens_q`` and ``cu_seq_lens_k`` ``(B +
            1,)`` int32; and the integers ``max_length_q`` and ``max_length_k``.

        Example:
            >>> inputs = Ragged([[7, 8], [9]]).to_transformers()
            >>> inputs["input_ids"].tolist(), inputs["position_ids"].tolist(), inputs["cu_seq_lens_q"].tolist()
            ([[7, 8, 9]], [[0, 1, 0]], [0, 2, 3])
        """
        is_token = self._values.dim() == 1 and not (
            self._values.is_floating_point() or self._values.is_complex()
        )
        ends, longest = self.cu_seqlens, self.max_length
        return {
            "input_ids" if is_token else "inputs_embeds": self._values.unsqueeze(0),
            "position_ids": self.positions.unsqueeze(0),
            "seq_idx": self.segment_ids.to(torch.int32).unsqueeze(0),
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": longest,
            "max_length_k": longest,
        }

    def to_numpy(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return values and offsets as NumPy arrays, which share the memory on a CPU. Waits for a
        device.

        Example:
            >>> values, offsets = Ragged([[1, 2], [3]]).to_numpy()
            >>> values.tolist(), offsets.tolist()
            ([1, 2, 3], [0, 2, 3])
        """
        refuse_jit_trace("a conversion to NumPy")
        return self._values.numpy(force=True), self.offsets.numpy(force=True)

    def to_arrow(self) -> Any:
        """Return a ``pyarrow`` LargeListArray, with features as fixed-size lists. Waits for a
        device.

        Raises:
            MissingExtraError: pyarrow is not installed.
            ArgumentTypeError: a dtype that Arrow does not have.

        Example:
            >>> Ragged([[1, 2], [3]]).to_arrow().to_pylist()
            [[1, 2], [3]]
        """
        refuse_jit_trace("a conversion to Arrow")
        return to_arrow(self._values, self.offsets)


@index_arithmetic
def _own(read: Tensor, given: Any) -> Tensor:
    """Copy integers that share memory with an argument, which the caller may change."""
    return read.clone() if isinstance(given, Tensor | np.ndarray) else read
