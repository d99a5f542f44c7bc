"""``CellLayer``, the base of layers of our cells, and those with a matrix product per step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Unpack

import torch
from torch import Tensor, nn

from raglane import cells
from raglane._utils.checks import (
    check_clip,
    check_count,
    check_dropout,
    check_dtype,
    check_flag,
    check_whole,
)
from raglane.cells import CELLS, CellSpec
from raglane.nn.recurrent.layer import Call, RecurrentLayer, StepFunction
from raglane.nn.recurrent.stack import Options

# The arguments in repr, if they differ from these.
_DEFAULTS = {
    "num_layers": 1,
    "bias": True,
    "batch_first": False,
    "dropout": 0.0,
    "bidirectional": False,
}


class CellLayer(RecurrentLayer):
    """The base of layers with the parameters of a cell's ``shapes``, e.g. ``weight_ih_l0``."""

    _cell_name: ClassVar[str]  # a key of ``CELLS``, for layers without arguments of their own
    # The keyword arguments of a class, with their defaults. It sets them before the call of
    # ``super().__init__``, which makes its cell.
    _own: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__()
        self.input_size = check_count("input_size", input_size)
        self.hidden_size = check_count("hidden_size", hidden_size)
        self.num_layers = check_count("num_layers", num_layers)
        self.bias = check_flag("bias", bias)
        self.batch_first = check_flag("batch_first", batch_first)
        self.bidirectional = check_flag("bidirectional", bidirectional)
        self.dropout = check_dropout(dropout)
        check_dtype(dtype)
        self._cell = cell = self._make_cell()
        directions = 2 if bidirectional else 1
        self._all_weights: list[list[str]] = []  # as in torch's layers
        for index in range(num_layers):
            width = input_size if index == 0 else directions * cell.state_sizes(hidden_size)[0]
            for suffix in ("", "_reverse")[:directions]:
                shapes = (cell.above() if index else cell).shapes(width, hidden_size, bias)
                self._all_weights.append([f"{name}_l{index}{suffix}" for name in shapes])
                for name, shape in shapes.items():
                    parameter = (
                        None
                        if shape is None
                        else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    )
                    self.register_parameter(f"{name}_l{index}{suffix}", parameter)
        self.reset_parameters()
        self._set_options(**options)

    def _make_cell(self) -> CellSpec:
        """Return the cell; a layer's own arguments are attributes by then."""
        return CELLS[self._cell_name]

    @property
    def cell(self) -> CellSpec:
        """The cell that the layer runs."""
        return self._cell

    def reset_parameters(self) -> None:
        """Initialise parameters as the cell defines it, and learned initial states with zeros."""
        # A module for initial states initialises its own.
        for name, parameter in self.named_parameters(recurse=False):
            kind, _, _ = name.rpartition("_l")
            if kind:
                self._cell.initialise(kind, parameter.detach(), self.hidden_size)
            elif name.startswith("initial_"):
                nn.init.zeros_(parameter)

    def extra_repr(self) -> str:
        """Return the sizes, and the arguments that differ from their defaults."""
        defaults = _DEFAULTS | self._own
        chosen = [
            f"{name}={getattr(self, name)!r}"
            for name, value in defaults.items()
            if getattr(self, name) != value
        ]
        sizes = (str(self.input_size), str(self.hidden_size))
        return ", ".join(filter(None, (*sizes, *chosen, super().extra_repr())))

    def _weights(self) -> tuple[Any, ...]:
        """Return the weights by name, because parametrizations and functional_call replace them."""
        kind = self._cell.weights_type
        return tuple(
            [kind(*[getattr(self, name) for name in names]) for names in self._all_weights]
        )


class _ClampedLSTM(CellLayer):
    """The base of LSTMs that clamp the arguments of gates and candidate if ``clip`` is given."""

    if TYPE_CHECKING:
        __call__: Call[tuple[Tensor, Tensor]]
        step: StepFunction[tuple[Tensor, Tensor]]

    _own: ClassVar[dict[str, Any]] = {"clip": None}
    clip: float | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        clip: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.clip = clip
        first = (input_size, hidden_size, num_layers, bias, batch_first, dropout)
        super().__init__(*first, bidirectional, device, dtype, **options)


class PeepholeLSTM(_ClampedLSTM):
    """The LSTM with peepholes on ragged batches: its gates also read the cell state.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments. In addition, ``clip`` clamps
    the arguments of the gates and of the candidate to ``-clip`` to ``clip``, like the attribute of
    the ONNX operator LSTM; by default they are not clamped.

    Example:
        >>> out, (h, c) = PeepholeLSTM(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return cells.PeepholeLSTM(check_clip(self.clip))


class CoupledLSTM(_ClampedLSTM):
    """The LSTM with coupled gates on ragged batches: its input gate is ``1 - f``.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments. In addition, ``clip`` clamps
    the arguments of the gates and of the candidate to ``-clip`` to ``clip``, like the attribute of
    the ONNX operator LSTM; by default they are not clamped.

    Example:
        >>> out, (h, c) = CoupledLSTM(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return cells.CoupledLSTM(check_clip(self.clip))


class LayerNormLSTM(CellLayer):
    """The LSTM with layer normalisation inside the recurrence, on ragged batches.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments.

    Example:
        >>> out, (h, c) = LayerNormLSTM(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[tuple[Tensor, Tensor]]
        step: StepFunction[tuple[Tensor, Tensor]]

    _cell_name = "layernorm_lstm"


class LayerNormGRU(CellLayer):
    """The GRU with layer normalisation inside the recurrence, on ragged batches.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments.

    Example:
        >>> out, h = LayerNormGRU(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[Tensor]
        step: StepFunction[Tensor]

    _cell_name = "layernorm_gru"


class SLSTM(CellLayer):
    """The sLSTM on ragged batches: exponential gates, and a recurrence in heads.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments. In addition, ``num_heads`` is the
    number of groups of units, 1 by default; each group reads only its own state. With
    ``input_weights=False``, the input is the part of the gates ``i, f, z, o`` that does not depend
    on the state, computed by the caller: ``input_size`` is then ``4 * hidden_size``. The state is
    ``(h, c, n, m)``.

    Example:
        >>> out, (h, c, n, m) = SLSTM(3, 4, num_heads=2)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, n.shape
        (torch.Size([7, 4]), torch.Size([1, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[tuple[Tensor, Tensor, Tensor, Tensor]]
        step: StepFunction[tuple[Tensor, Tensor, Tensor, Tensor]]

    _own: ClassVar[dict[str, Any]] = {"num_heads": 1, "input_weights": True}
    num_heads: int
    input_weights: bool

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_heads: int = 1,
        input_weights: bool = True,
        **options: Unpack[Options],
    ) -> None:
        self.num_heads = num_heads
        self.input_weights = input_weights
        first = (input_size, hidden_size, num_layers, bias, batch_first, dropout)
        super().__init__(*first, bidirectional, device, dtype, **options)

    def _make_cell(self) -> CellSpec:
        return cells.SLSTM(
            check_count("num_heads", self.num_heads),
            check_flag("input_weights", self.input_weights),
        )

    def _like(self, weights: tuple[Any, ...]) -> Tensor | None:
        return weights[0].hidden


class GRUD(CellLayer):
    """The GRU with decay on ragged batches: for missing values and irregular times.

    An element has three columns per channel: the value, 1 if it is missing, and the time since the
    last value of the channel; :func:`raglane.data.mark_missing` computes them. :doc:`/cells` has
    the equations and the paper, :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments.

    Example:
        >>> series = rl.Ragged([torch.tensor([[1.0], [torch.nan], [3.0]]), torch.tensor([[torch.nan]])])
        >>> out, h = GRUD(3, 4)(rl.data.mark_missing(series))
        >>> out.values.shape, h.shape
        (torch.Size([4, 4]), torch.Size([1, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[Tensor]
        step: StepFunction[Tensor]

    _cell_name = "grud"


class CfC(CellLayer):
    """The closed-form continuous-time network on ragged batches: for irregular times.

    :doc:`/cells` has the equations and the paper,
    :class:`~raglane.nn.recurrent.layer.RecurrentLayer` the arguments. In addition,
    ``backbone_units`` is the size of the hidden layer within a step (by default ``hidden_size``),
    and ``gap_column`` the column of the input with the time since the previous element. Without it,
    and in all layers above the first, a step takes the time 1.

    Example:
        >>> out, h = CfC(3, 4, gap_column=2)(Ragged([torch.rand(5, 3), torch.rand(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 4]), torch.Size([1, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[Tensor]
        step: StepFunction[Tensor]

    _own: ClassVar[dict[str, Any]] = {"backbone_units": None, "gap_column": None}
    backbone_units: int | None
    gap_column: int | None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backbone_units: int | None = None,
        gap_column: int | None = None,
        **options: Unpack[Options],
    ) -> None:
        self.backbone_units = backbone_units
        self.gap_column = gap_column
        first = (input_size, hidden_size, num_layers, bias, batch_first, dropout)
        super().__init__(*first, bidirectional, device, dtype, **options)

    def _make_cell(self) -> CellSpec:
        if self.backbone_units is not None:
            check_count("backbone_units", self.backbone_units)
        if self.gap_column is not None:
            check_whole("gap_column", self.gap_column, 0, "count the columns from 0")
        return cells.CfC(self.backbone_units, self.gap_column)
