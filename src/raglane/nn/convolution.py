"""Convolutions over the steps of sequences."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor, nn

from raglane._utils.checks import (
    check_choice,
    check_count,
    check_dtype,
    check_fits,
    check_flag,
    check_whole,
)
from raglane.errors import ArgumentError, ShapeError
from raglane.nn.recurrent.any_cell import Recurrent
from raglane.nn.recurrent.stack import Options
from raglane.nn.row_convolution import convolve_rows, convolve_within
from raglane.nn.windows import Windows, slide
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged


class Conv1d(nn.Conv1d):
    """A convolution over the steps of each sequence.

    It equals :class:`torch.nn.Conv1d` on each sequence without others: it reads no other sequence,
    and pads each with zeros. Parameters, their initialisation and ``state_dict`` are torch's. All
    sequences are one long row, without padding to the longest.

    Args:
        in_channels: features of an element.
        out_channels: features of an output.
        kernel_size: the number of steps that an output reads.
        stride: the distance between outputs.
        padding: the number of zeros before and after each sequence; ``"valid"`` for none; or
            ``"same"`` for outputs of the lengths of the input, with ``stride=1``.
        dilation: the distance between the steps that an output reads.
        groups: the number of blocks of features that are independent of each other.
        bias: True to add a learned bias.
        padding_mode: ``"zeros"``; torch's other modes are refused.
        device, dtype: of the parameters.

    Attributes:
        weight: ``(out_channels, in_channels / groups, kernel_size)``.
        bias: ``(out_channels,)``, or None.

    Raises:
        ArgumentError: an argument is out of its range, or ``groups`` does not divide both sizes.
        ArgumentTypeError: an argument is of the wrong type.

    Example:
        >>> layer = Conv1d(3, 8, kernel_size=5, stride=2, padding=2)
        >>> out = layer(Ragged([torch.randn(7, 3), torch.randn(2, 3)]))
        >>> out.values.shape, out.lengths.tolist()
        (torch.Size([5, 8]), [4, 1])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int = 1,
        padding: int | Literal["same", "valid"] = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros"] = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_choice("padding_mode", padding_mode, ("zeros",), "pad the batch before the layer")
        sizes = {"in_channels": in_channels, "out_channels": out_channels}
        steps = {"kernel_size": kernel_size, "stride": stride, "dilation": dilation}
        for name, size in (sizes | steps).items():
            check_count(name, size)
        if isinstance(padding, str):
            check_choice("padding", padding, ("same", "valid"))
        else:
            check_whole("padding", padding, 0)
        if padding == "same" and stride != 1:
            fix = f"pass padding={dilation * (kernel_size - 1) // 2}"
            raise ArgumentError("padding", "'same'", "a number with a stride above 1", fix)
        _check_groups(groups, sizes)
        check_flag("bias", bias)
        check_dtype(dtype)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            device=device,
            dtype=dtype,
        )

    def forward(self, input: Ragged) -> Ragged:  # type: ignore[override]
        """Convolve each sequence.

        Args:
            input: ``(N, in_channels)``; lengths may be 0.

        Returns:
            ``(M, out_channels)``. A sequence of L steps has ``(L + padding - dilation *
            (kernel_size - 1) - 1) // stride + 1`` outputs, with the padding of both sides, or none
            if that is negative.

        Raises:
            ArgumentTypeError: ``input`` is not a Ragged.
            ShapeError: its features, dtype or device are not those of the layer.
            ArgumentError: the call is exported, and the number of outputs depends on the lengths.
        """
        check_ragged("input", input)
        if tuple(input.feature_shape) != (self.in_channels,):
            got = f"elements of shape {tuple(input.feature_shape)}"
            rule = f"in_channels = {self.in_channels} features"
            raise ShapeError("input", got, rule, "build the layer with the size of its input")
        check_fits("input", input.values, self.weight)
        # torch's record of the padding, from the last dimension to the first: left and right.
        left, right = self._reversed_padding_repeated_twice
        (size,), (stride,), (dilation,) = self.kernel_size, self.stride, self.dilation
        windows = Windows(size, stride, left, right, dilation)
        if windows.surplus == 0 and self.groups == 1 and input._is_on_host():
            rows = convolve_within(
                input.values, input.offsets, self.weight, self.bias, left, dilation
            )
            if rows is not None:
                return input._like(rows)
        return slide(input, windows, 0.0, self._convolved)

    if TYPE_CHECKING:

        def __call__(self, input: Ragged) -> Ragged: ...  # noqa: D102

    def _convolved(self, row: Tensor) -> Tensor:
        (stride,), (dilation,) = self.stride, self.dilation
        return convolve_rows(row, self.weight, self.bias, stride, dilation, self.groups)


def _check_groups(groups: Any, sizes: dict[str, int]) -> int:
    """Return the number of groups, which must divide the sizes."""
    count = check_count("groups", groups)
    if math.gcd(*sizes.values()) % count:
        rule = "a divisor of " + " and ".join(f"{name} = {size}" for name, size in sizes.items())
        raise ArgumentError("groups", str(count), rule, "pass such a number")
    return count


class _Convolution(nn.Module):
    """A cell whose state is the elements that the next ones read, oldest first."""

    bias: nn.Parameter | None

    def __init__(
        self, sizes: tuple[int, int, int], dilation: int, groups: int, bias: bool, **placed: Any
    ) -> None:
        super().__init__()
        self.input_size, self.output_size, self.kernel_size = sizes
        self.dilation = dilation
        self.groups = groups
        # A kernel of one element reads no others, but states have at least one column.
        self.hidden_size = max(1, (self.kernel_size - 1) * dilation * self.input_size)
        self.weight = nn.Parameter(
            torch.empty(self.output_size, self.input_size // groups, self.kernel_size, **placed)
        )
        of_output = nn.Parameter(torch.empty(self.output_size, **placed)) if bias else None
        self.register_parameter("bias", of_output)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters as torch's convolution does."""
        bound = (self.input_size // self.groups * self.kernel_size) ** -0.5
        for parameter in (self.weight, self.bias):
            if parameter is not None:
                nn.init.uniform_(parameter, -bound, bound)

    def initial_state(self, count: int) -> Tensor:
        """Return zeros, which are the padding."""
        return self.weight.new_zeros(count, self.hidden_size)

    def step(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the products of the weight with every ``dilation``-th element."""
        elements = x if self.kernel_size == 1 else torch.cat([state, x], 1)
        windows = elements.unflatten(1, (-1, self.input_size))[:, :: self.dilation]
        matrix = self.weight.permute(0, 2, 1)
        if self.groups == 1:
            matrix = matrix.reshape(self.output_size, -1)
            output = nn.functional.linear(windows.flatten(1), matrix, self.bias)
        else:
            # (groups, rows, elements and channels) times (groups, elements and channels, outputs).
            windows = windows.unflatten(2, (self.groups, -1)).permute(2, 0, 1, 3)
            matrix = matrix.reshape(self.groups, self.output_size // self.groups, -1).transpose(
                1, 2
            )
            output = torch.bmm(windows.flatten(2), matrix).permute(1, 0, 2).flatten(1)
            output = output if self.bias is None else output + self.bias
        return output, state if elements is x else elements[:, self.input_size :]


class CausalConv1d(Recurrent):
    """A convolution over the elements of each sequence, in which an element reads only itself and
    earlier ones.

    It equals :class:`torch.nn.Conv1d` with ``(kernel_size - 1) * dilation`` zeros before each
    sequence. It is a recurrent layer, whose state ``(1, B, (kernel_size - 1) * dilation *
    in_channels)`` is the elements that later ones read. So it is called like other layers, and runs
    in ``step`` and on streams. ``state_dict`` has torch's names. For other paddings and strides use
    :class:`Conv1d`.

    Args:
        in_channels: features of an element.
        out_channels: features of an output.
        kernel_size: the number of elements that an output reads.
        dilation: the distance between these elements.
        groups: the number of blocks of features that are independent of each other.
        bias: True to add a learned bias.
        batch_first: as in torch's layers.
        device, dtype: of the parameters.
        **options: ``schedule``, ``backend`` and ``initial_state``, as for other layers.

    Attributes:
        weight: ``(out_channels, in_channels / groups, kernel_size)``, as in torch.
        bias: ``(out_channels,)``, or None.

    Raises:
        ArgumentError: a size is not a whole number of at least 1, or ``groups`` does not divide
            both sizes.

    Example:
        >>> layer = CausalConv1d(3, 8, kernel_size=5)
        >>> out, state = layer(Ragged([torch.randn(4, 3), torch.randn(2, 3)]))
        >>> out.values.shape, state.shape
        (torch.Size([6, 8]), torch.Size([1, 2, 12]))
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Options],
    ) -> None:
        sizes = {"in_channels": in_channels, "out_channels": out_channels}
        for name, size in (sizes | {"kernel_size": kernel_size, "dilation": dilation}).items():
            check_count(name, size)
        check_dtype(dtype)
        count = _check_groups(groups, sizes)
        placed = {"device": device, "dtype": dtype}
        shape = (in_channels, out_channels, kernel_size)
        cell = _Convolution(shape, dilation, count, check_flag("bias", bias), **placed)
        super().__init__(cell, batch_first=batch_first, **options)
        self._adopt()

    def _adopt(self) -> None:
        """Make the parameters of the cell those of the layer, with torch's names."""
        cells: Any = self._modules.pop("cells")
        vars(self)["cells"] = cells
        # One dictionary for both, so that a parameter that is replaced in the layer is replaced in
        # the cell.
        parameters = {**cells[0]._parameters, **self._parameters}
        vars(self)["_parameters"] = parameters
        vars(cells[0])["_parameters"] = parameters

    def reset_parameters(self) -> None:
        """Initialise weight and bias as torch's convolution does, and a learned initial state with
        zeros.
        """
        super().reset_parameters()
        cell: Any = self.cells[0]
        cell.reset_parameters()
