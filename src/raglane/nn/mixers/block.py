"""The base of blocks, which are cells, and of their layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_count, check_dtype
from raglane.cells.module import WholeCell
from raglane.errors import ArgumentError
from raglane.kernels import dispatch
from raglane.kernels.cpu.layer import offsets_of_steps
from raglane.kernels.cpu.steps import can_step
from raglane.nn.mixers.plain import has_hooks
from raglane.nn.mixers.step_table import forget, step_block
from raglane.nn.mixers.ways import STEPS, Way, Whole
from raglane.nn.recurrent.any_cell import Recurrent
from raglane.nn.recurrent.stack import Options

States = tuple[Tensor, ...]


class LayerOptions(Options, total=False):
    """The keyword arguments that all layers of blocks have."""

    batch_first: bool
    dropout: float
    bidirectional: bool
    device: torch.device | str | None
    dtype: torch.dtype | None


class Placed(TypedDict):
    """Where the parameters of a block are, and their dtype."""

    device: torch.device | str | None
    dtype: torch.dtype | None


class RecurrentBlock(nn.Module):
    """A cell of projections, a convolution and a linear recurrence.

    ``state_sizes`` are those of its states. With ``residual``, a block adds its input to its output,
    and reads it divided by its root mean square.
    """

    cell_type = WholeCell

    def __init__(self, input_size: int, hidden_size: int, state_sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.state_sizes = state_sizes
        self.residual_norm: nn.RMSNorm | None = None

    def mix(self, x: Tensor, states: States, way: Way) -> tuple[Tensor, States]:
        """Return the output of rows ``(R, input_size)``, and the states after them."""
        raise NotImplementedError

    def _initialise(self) -> None:
        """Initialise the parameters that no inner module has."""

    def reset_parameters(self) -> None:
        """Initialise all parameters as the reference implementation does."""
        for module in self.children():
            reset: Any = module.reset_parameters
            reset()
        with torch.no_grad():
            self._initialise()

    def renamed(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters of a checkpoint with the names and the order of this block."""
        return parts

    def initial_state(self, count: int) -> States:
        """Return zeros."""
        like = next(self.parameters())
        return tuple([like.new_zeros(count, size) for size in self.state_sizes])

    def step(self, x: Tensor, state: States) -> tuple[Tensor, States]:
        """Run one step of each sequence in plain torch."""
        return self._mixed(x, state, STEPS)

    def run_whole(self, values: Tensor, offsets: Tensor, states: States) -> tuple[Tensor, States]:
        """Run whole sequences, and return their outputs and final states."""
        return self._mixed(values, states, Whole(offsets, values.shape[0]))

    def _mixed(self, x: Tensor, states: States, way: Way) -> tuple[Tensor, States]:
        if way.is_one_step and can_step(x):
            stepped = self._stepped(x, states)
            if stepped is not None:
                return stepped
        return self._added(x, states, way)

    def _added(self, x: Tensor, states: States, way: Way) -> tuple[Tensor, States]:
        norm = self.residual_norm
        if norm is None:
            return self.mix(x, states, way)
        output, states = self.mix(way.normed(x, norm.weight, norm.eps or 0.0), states, way)
        return x + output, states

    def _stepped(self, x: Tensor, states: States) -> tuple[Tensor, States] | None:
        """Run one step by one call of the kernels, with the bits of whole sequences; None if that is
        not possible.
        """
        return step_block(self, x, states)

    def __setattr__(self, name: str, value: Any) -> None:
        forget(self)
        super().__setattr__(name, value)


class BlockLayer(Recurrent):
    """A layer of blocks. The parameters of a single one have the names of the block."""

    def __init__(
        self,
        kind: Callable[..., RecurrentBlock],
        input_size: int,
        hidden_size: int,
        num_layers: int,
        settings: dict[str, Any],
        **options: Unpack[LayerOptions],
    ) -> None:
        others: Any = {**options}
        placed: Placed = {"device": others.pop("device", None), "dtype": others.pop("dtype", None)}
        check_dtype(placed["dtype"])
        directions = 2 if options.get("bidirectional") else 1
        blocks: list[RecurrentBlock] = []

        def block(width: int, size: int) -> RecurrentBlock:
            blocks.append(kind(width, size, **settings, **placed))
            if len(blocks) > directions and width == size:
                blocks[-1].residual_norm = nn.RMSNorm(size, 1e-5, **placed)
            return blocks[-1]

        super().__init__(block, input_size, hidden_size, num_layers, **others)
        hook: Any = self.register_load_state_dict_pre_hook
        hook(_rename)
        if len(blocks) == 1:
            self._adopt()

    def _adopt(self) -> None:
        """Make the parameters and modules of the only block those of the layer."""
        cells: Any = self._modules.pop("cells")
        vars(self)["cells"] = cells
        # One dictionary for both, so that what is replaced in the layer is replaced in the block.
        for kind in ("_parameters", "_modules"):
            both = {**vars(cells[0])[kind], **vars(self)[kind]}
            vars(self)[kind] = both
            vars(cells[0])[kind] = both

    def step(
        self, x_t: Tensor, state: Any = None, *, resets: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """See :meth:`Recurrent.step`."""
        if resets is None and isinstance(state, tuple) and self._is_plain(x_t, state):
            block: Any = self.cells[0]
            way = Whole(offsets_of_steps(x_t.shape[0]), x_t.shape[0])
            output, final = block._mixed(x_t, tuple([each[0] for each in state]), way)
            return output, tuple([each.unsqueeze(0) for each in final])
        return super().step(x_t, state, resets=resets)

    def _is_plain(self, x_t: Tensor, state: States) -> bool:
        """Return True if a step is that of the only block, and its arguments fit."""
        if not self._is_one_block() or not can_step(x_t) or x_t.dim() != 2:
            return False
        weight = next(self.cells[0].parameters())
        if x_t.shape[1] != self.input_size or any(
            each.dtype is not x_t.dtype or not each.is_cpu for each in (weight, *state)
        ):
            return False
        shapes = [(1, x_t.shape[0], size) for size in self.state_sizes]
        return [each.shape for each in state] == shapes

    def _is_one_block(self) -> bool:
        """Return True if a step of the layer is that of one block alone, with the kernels."""
        choice = (self.schedule, self.backend, *dispatch.override())
        if choice != (dispatch.AUTO,) * 4 or self.num_layers > 1 or self.bidirectional:
            return False
        is_dropped = self.training and self.input_dropout > 0
        is_changed = type(self).forward is not Recurrent.forward or "step" in vars(self.cells[0])
        return not is_dropped and not is_changed and not has_hooks(self)

    def reset_parameters(self) -> None:
        """Initialise the blocks as the reference implementation does, and learned initial states
        with zeros.
        """
        for name, parameter in self._parameters.items():
            if name.startswith("initial_") and parameter is not None:
                nn.init.zeros_(parameter)
        for cell in self.cells:
            block: Any = cell
            block.reset_parameters()


def _rename(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Give the parameters of a checkpoint the names that a layer has."""
    for index, cell in enumerate(layer.cells):
        start = f"{prefix}cells.{index}." if "cells" in layer._modules else prefix
        names = [name for name in state if name.startswith(start)]
        parts = {name.removeprefix(start): state.pop(name) for name in names}
        state.update({start + name: tensor for name, tensor in cell.renamed(parts).items()})


def head_size(width: int, most: int) -> int:
    """Return the largest divisor of a width up to a number."""
    return next(size for size in range(min(width, most), 0, -1) if width % size == 0)


def check_optional_count(name: str, count: int | None) -> int | None:
    """Return a number of at least 1, or None."""
    return None if count is None else check_count(name, count)


def check_divides(name: str, count: int, whose: str, total: int) -> int:
    """Return a number of heads or groups, which must divide a size."""
    if total % check_count(name, count):
        rule = f"a divisor of {whose} = {total}"
        raise ArgumentError(name, str(count), rule, "pass such a number")
    return count


def convolution(channels: int, size: int, bias: bool, placed: Placed) -> nn.Conv1d:
    """Return the parameters of a convolution of each channel, with torch's names."""
    return nn.Conv1d(channels, channels, size, groups=channels, bias=bias, **placed)


def draw_step_bias(bias: Tensor) -> None:
    """Fill a bias whose softplus is a step size, drawn as a logarithm between 0.001 and 0.1."""
    sizes = torch.empty_like(bias, dtype=torch.float32)
    sizes.uniform_().mul_(math.log(0.1 / 1e-3)).exp_().mul_(1e-3)
    sizes.clamp_(min=1e-4)
    bias.copy_(sizes + (-torch.expm1(-sizes)).log())
