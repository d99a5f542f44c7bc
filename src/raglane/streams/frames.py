"""The frames that streams accept, and their results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from raglane._utils.checks import check_storage, check_tensor, check_unmasked, is_stored
from raglane._utils.messages import quote
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.cpu.prepared import as_array
from raglane.streams.prepare import prepare
from raglane.streams.prepared import Prepared

_PLAIN: dict[torch.dtype, np.dtype[Any]] = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}


def _name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without that of its library."""
    return str(dtype).removeprefix("torch.")


class Frames:
    """The stages of a model, the frames that it accepts, and its results as columns."""

    def __init__(self, prepared: Prepared, passes_nan: bool, passes_infinite: bool = True) -> None:
        self.prepared = prepared
        self._passes_nan = passes_nan
        self._passes_infinite = passes_infinite or passes_nan
        self.width = prepared.width
        self.one = (1, self.width)  # the shape of one frame
        self.names: tuple[Any, ...] = ()  # of a run, the meaning of frames and results
        self.plain = _PLAIN.get(prepared.dtype) if len(prepared.features) == 1 else None
        shape = ", ".join(map(str, ("n", *prepared.features)))
        self._rule = f"frames of shape ({shape}), numbers of {_name_of(prepared.dtype)}"

    def array(self, frames: Any, check_count: Callable[[int], object]) -> npt.NDArray[Any]:
        """Return frames ``(n, width)``, bfloat16 as int16; raise as :meth:`rows`."""
        # Fast path: most of the time of a push is that of checks.
        array = frames
        if type(array) is Tensor and array.dtype in _PLAIN:
            with suppress(RuntimeError, TypeError):  # no memory that NumPy can read
                if is_stored(array):
                    array = array.numpy()
        if (
            type(array) is np.ndarray
            and array.dtype is self.plain
            and array.ndim == 2
            and array.shape[1] == self.width
        ):
            check_count(array.shape[0])
            if self.are_accepted(array):
                return array
        return as_array(self.rows(frames, check_count))

    def are_accepted(self, array: npt.NDArray[Any]) -> bool:
        """Return False if numbers may be NaN or infinite that the model does not accept."""
        # Only NaN gives NaN, and only large or infinite numbers an infinite sum.
        total = np.vdot(array, array)
        return bool(
            self._passes_nan or total < np.inf or (total == total and self._passes_infinite)
        )

    def rows(self, frames: Any, check_count: Callable[[int], object] | None = None) -> Tensor:
        """Return frames ``(n, width)``; raise if they do not fit the model. ``check_count`` may
        refuse their number before their values are read: an expanded tensor may have any number.
        """
        tensor = self._as_tensor(frames, check_count)
        check_tensor("frames", tensor)
        check_storage("frames", tensor)
        features = self.prepared.features
        is_fitting = tensor.dim() > 0 and tensor.shape[1:] == features
        if not is_fitting or tensor.dtype is not self.prepared.dtype or not tensor.is_cpu:
            got = f"shape {tuple(tensor.shape)}"
            if tensor.dtype is not self.prepared.dtype or not tensor.is_cpu:
                got += f" of {_name_of(tensor.dtype)}{'' if tensor.is_cpu else ' on a GPU'}"
            raise ShapeError("frames", got, self._rule, "reshape or convert them")
        if check_count is not None:
            check_count(tensor.shape[0])
        if tensor.requires_grad or tensor.is_neg():
            tensor = tensor.detach().resolve_neg()
        if len(features) != 1:
            tensor = tensor.reshape(tensor.shape[0], self.width)
        if tensor.numel():
            self._check_values(tensor)
        return tensor

    def _as_tensor(self, frames: Any, check_count: Callable[[int], object] | None) -> Any:
        """Return frames of lists or arrays as a tensor; their shape is not checked."""
        features = self.prepared.features
        if isinstance(frames, list | tuple):
            tensor = numbers(frames, self.prepared.dtype)
            return tensor.reshape(0, *features) if tensor.shape == (0,) else tensor
        if isinstance(frames, Tensor):
            return frames
        check_unmasked("frames", frames)
        is_array = isinstance(frames, np.ndarray)
        if check_count is not None and is_array and frames.shape[1:] == features:
            check_count(frames.shape[0])
        try:
            # Torch warns about memory that cannot be written, e.g. of bytes.
            is_fixed = is_array and not frames.flags.writeable
            return torch.as_tensor(frames.copy() if is_fixed else frames)
        except (TypeError, ValueError, RuntimeError) as error:
            fix = "pass lists of numbers, or an array"
            raise ArgumentTypeError("frames", quote(frames), self._rule, fix) from error

    def _check_values(self, rows: Tensor) -> None:
        """Raise for unknown tokens, and for numbers that the model does not accept."""
        dtype = self.prepared.dtype
        # NumPy needs less time than torch for a few numbers.
        least = rows.min() if dtype is torch.bfloat16 else rows.numpy().min()
        if dtype is torch.int64:
            if least < 0 or rows.max() >= self.prepared.tokens:
                got = f"tokens from {least} to {int(rows.max())}"
                rule = f"tokens from 0 to {self.prepared.tokens - 1}"
                raise ArgumentError("frames", got, rule, "replace unknown tokens")
        elif least != least and not self._passes_nan:
            got = f"NaN in frame {int(rows.isnan().any(1).nonzero()[0])}"
            fix = "correct them, or use a model that accepts missing numbers"
            raise ArgumentError("frames", got, "numbers other than NaN", fix)
        elif not self._passes_infinite and not rows.isfinite().all():
            got = f"an infinite number in frame {int((~rows.isfinite()).any(1).nonzero()[0])}"
            raise ArgumentError("frames", got, "finite numbers of float32", "correct them")

    def in_units(self, rows: Tensor) -> Tensor:
        """Return results in the units of the data, for a run of numbers; others unchanged."""
        return rows

    def columns(
        self,
        rows: Tensor,  # noqa: ARG002
        *,
        probabilities: bool = False,  # noqa: ARG002
        top: int = 1,  # noqa: ARG002
    ) -> dict[str, list[Any]]:
        """Return results as columns of predictions; only a run has them."""
        raise ArgumentError(
            "model", "a module", "a run", "pass the result of rl.load to the engine"
        )


def numbers(lists: Any, dtype: torch.dtype, name: str = "frames") -> Tensor:
    """Return lists of numbers, with None for NaN, as a tensor."""
    kinds = "iu" if dtype is torch.int64 else "iuf"
    try:
        array = np.array(lists)
        if array.dtype.kind == "O" and all(
            entry is None or type(entry) in (int, float) for entry in array.flat
        ):
            array = array.astype(np.float64)
    except (ValueError, TypeError, OverflowError, RecursionError):
        array = np.array("")
    if array.size and array.dtype.kind not in kinds:
        rule = (
            "lists of whole numbers"
            if dtype is torch.int64
            else "lists of numbers, of equal lengths"
        )
        raise ArgumentTypeError(name, quote(lists), rule, "send one list per element")
    with np.errstate(over="ignore"):
        array = array.astype(
            {torch.float32: np.float32, torch.int64: np.int64}.get(dtype, np.float64)
        )
    return torch.from_numpy(array).to(dtype)


@runtime_checkable
class HasStreamFrames(Protocol):
    """A model with frames of its own, as a :class:`raglane.Run` has."""

    def _stream_frames(self, dtype: torch.dtype | None, passes_nan: bool) -> Frames:
        """Return the stages of the model, and its frames and results."""
        ...


def frames_of(model: Any, features: Any, dtype: torch.dtype | None, passes_nan: bool) -> Frames:
    """Return the stages and the frames of a model."""
    if isinstance(model, HasStreamFrames):
        return model._stream_frames(dtype, passes_nan)
    return Frames(prepare(model, features, dtype), passes_nan)
