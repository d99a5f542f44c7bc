"""Layers of the element-wise cells, whose time loop has no matrix product."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor

from raglane._utils.checks import check_choice, check_count, check_storage
from raglane._utils.tracing import has_autocast, has_tangent
from raglane.cells import CELLS, CellSpec
from raglane.cells.elementwise import ElementwiseWeights
from raglane.errors import ShapeError
from raglane.nn.recurrent.cell_layers import CellLayer
from raglane.nn.recurrent.layer import Call, StepFunction
from raglane.nn.recurrent.stack import Options


class IndRNN(CellLayer):
    """The independently recurrent network on ragged batches: each unit reads only its own state.

    It is for deep stacks and long sequences. :doc:`/cells` has the equation and the paper.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as
            in torch's RNN.
        nonlinearity: ``"relu"`` or ``"tanh"``.
        max_length: the length of the longest sequence. Recurrent weights are clamped to ``-2 ** (1
            / max_length)`` to ``2 ** (1 / max_length)``, rounded towards 0, so that a state at most
            doubles over such a sequence (section 4.1 of the paper). None does not clamp them.
        **options: see :class:`~raglane.nn.recurrent.layer.RecurrentLayer`, also for the errors.

    Example:
        >>> layer = IndRNN(3, 4, num_layers=2, max_length=1000)
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 4]), torch.Size([2, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[Tensor]
        step: StepFunction[Tensor]

    _own: ClassVar[dict[str, Any]] = {"nonlinearity": "relu", "max_length": None}
    nonlinearity: str
    max_length: int | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: Literal["relu", "tanh"] = "relu",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        max_length: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.nonlinearity = nonlinearity
        self.max_length = max_length
        first = (input_size, hidden_size, num_layers, bias, batch_first, dropout)
        super().__init__(*first, bidirectional, device, dtype, **options)

    def _make_cell(self) -> CellSpec:
        check_choice("nonlinearity", self.nonlinearity, ("relu", "tanh"))
        if self.max_length is not None:
            check_count("max_length", self.max_length)
        return CELLS[f"indrnn_{self.nonlinearity}"]

    def _weights(self) -> tuple[ElementwiseWeights, ...]:
        if self.max_length is None:
            return super()._weights()
        bound = 2 ** (1 / self.max_length)
        return tuple(
            [
                weights._replace(recurrent=_bounded(weights.recurrent, bound))
                for weights in super()._weights()
            ]
        )


def _bounded(weight: Any, bound: float) -> Any:
    """Clamp a weight; return an invalid one unchanged, because the backend's error names it."""
    if (
        not isinstance(weight, Tensor)
        or not weight.is_floating_point()
        or weight.layout is not torch.strided
    ):
        return weight
    try:
        check_storage("weight", weight)
    except ShapeError:
        return weight
    # Rounded towards 0: the nearest number may be outside, so that a bfloat16 state grows threefold
    # over 150 steps.
    step = _step_above_one(weight)
    bound = bound // step * step
    if has_tangent([weight]):
        return weight.clamp(
            -bound, bound
        )  # the forward mode has no gradients, and Dynamo refuses rules for it
    apply: Any = _Bound.apply
    return apply(weight, bound)


class _Bound(torch.autograd.Function):
    """Clamps numbers to a bound. Gradients that would move a number further outside are zeroed."""

    generate_vmap_rule = True

    @staticmethod
    def forward(numbers: Tensor, bound: float) -> Tensor:
        return numbers.clamp(-bound, bound)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[0])
        ctx.bound = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (numbers,) = ctx.saved_tensors
        # An optimizer's step is against the gradient.
        outwards = ((numbers > ctx.bound) & (grad < 0)) | ((numbers < -ctx.bound) & (grad > 0))
        return grad.masked_fill(outwards, 0.0), None


def _step_above_one(numbers: Tensor) -> float:
    """Return the spacing of numbers from 1 to 2 in the dtype of the computation, which autocast may
    choose.
    """
    kind = numbers.device.type
    casts = (
        numbers.dtype is not torch.float64
        and has_autocast(kind)
        and torch.is_autocast_enabled(kind)
    )
    return torch.finfo(torch.get_autocast_dtype(kind) if casts else numbers.dtype).eps


class SRU(CellLayer):
    """The simple recurrent unit on ragged batches: a gated memory without a matrix product in the
    time loop.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments.

    Example:
        >>> out, (h, c) = SRU(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[tuple[Tensor, Tensor]]
        step: StepFunction[tuple[Tensor, Tensor]]

    _cell_name = "sru"


class QRNN(CellLayer):
    """The quasi-recurrent network on ragged batches, with convolutions of width 1.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments.

    Example:
        >>> out, (h, c) = QRNN(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[tuple[Tensor, Tensor]]
        step: StepFunction[tuple[Tensor, Tensor]]

    _cell_name = "qrnn"


class MinGRU(CellLayer):
    """The minimal GRU on ragged batches: its gate reads only the input.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments.

    Example:
        >>> out, h = MinGRU(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[Tensor]
        step: StepFunction[Tensor]

    _cell_name = "mingru"


class MinLSTM(CellLayer):
    """The minimal LSTM on ragged batches: its gates read only the input.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments.

    Example:
        >>> out, h = MinLSTM(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[Tensor]
        step: StepFunction[Tensor]

    _cell_name = "minlstm"
