"""Causal convolutions over the elements of sequences."""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_count, check_dtype, check_flag
from raglane.errors import ArgumentError
from raglane.nn.recurrent.any_cell import Recurrent
from raglane.nn.recurrent.stack import Options


class _Convolution(nn.Module):
    """A cell whose state is the elements that the next ones read, oldest first."""

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
        self.bias = nn.Parameter(torch.empty(self.output_size, **placed)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the parameters as torch's convolution does."""
        bound = (self.input_size // self.groups * self.kernel_size) ** -0.5
        for parameter in self.parameters():
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
    input_size)`` is the elements that later ones read. So it is called like other layers, and runs
    in ``step`` and on streams.

    Args:
        input_size: features of an element, torch's ``in_channels``.
        output_size: features of an output, torch's ``out_channels``.
        kernel_size: the number of elements that an output reads.
        dilation: the distance between these elements.
        groups: the number of blocks of features that are independent of each other.
        bias: True to add a learned bias.
        batch_first: as in torch's layers.
        device, dtype: of the parameters.
        **options: ``schedule``, ``backend`` and ``initial_state``, as for other layers.

    Attributes:
        weight: ``(output_size, input_size / groups, kernel_size)``, as in torch.
        bias: ``(output_size,)``, or None.

    Raises:
        ArgumentError: a size is not a whole number of at least 1, or ``groups`` does not divide
            both sizes.

    Example:
        >>> layer = CausalConv1d(3, 8, kernel_size=5)
        >>> out, state = layer(Ragged([torch.randn(4, 3), torch.randn(2, 3)]))
        >>> out.values.shape, state.shape
        (torch.Size([6, 8]), torch.Size([1, 2, 12]))
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
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
        names = ("input_size", "output_size", "kernel_size", "dilation", "groups")
        sizes = (input_size, output_size, kernel_size, dilation, groups)
        inputs, outputs, kernel, dilation, groups = map(check_count, names, sizes)
        check_dtype(dtype)
        if math.gcd(inputs, outputs) % groups:
            rule = f"a divisor of input_size = {inputs} and output_size = {outputs}"
            raise ArgumentError("groups", str(groups), rule, "pass such a number")
        placed = {"device": device, "dtype": dtype}
        cell = _Convolution(
            (inputs, outputs, kernel), dilation, groups, check_flag("bias", bias), **placed
        )
        super().__init__(cell, batch_first=batch_first, **options)

    @property
    def weight(self) -> Tensor:
        """The weight, with torch's shape."""
        cell: Any = self.cells[0]
        return cell.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias; None without one."""
        cell: Any = self.cells[0]
        return cell.bias
