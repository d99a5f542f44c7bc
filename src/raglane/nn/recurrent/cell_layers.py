"""Layers of the cells that torch does not have. Their arguments are those of torch's layers, see ``CellLayer``."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Unpack

import torch
from torch import Tensor, nn

from raglane import cells
from raglane.cells import CELLS, CellSpec
from raglane.cells.elementwise import ElementwiseWeights
from raglane.checks import check_flag
from raglane.errors import ArgumentError, message
from raglane.nn.arguments import check_clip, check_count, check_dropout, check_dtype
from raglane.nn.recurrent.layer import Options, RecurrentLayer

__all__ = [
    "QRNN",
    "SRU",
    "CellLayer",
    "CoupledLSTM",
    "IndRNN",
    "LayerNormGRU",
    "LayerNormLSTM",
    "MinGRU",
    "MinLSTM",
    "PeepholeLSTM",
]


# What is shown of a layer where it is not this, in this order.
_DEFAULTS: dict[str, Any] = {
    "num_layers": 1,
    "bias": True,
    "batch_first": False,
    "dropout": 0.0,
    "bidirectional": False,
}


class CellLayer(RecurrentLayer):
    """A stack of one kind of cell, with the parameters that its ``shapes`` name: ``weight_ih_l0`` and so on.

    Args:
        input_size: features of an element.
        hidden_size: units of a layer and direction.
        num_layers: layers on top of each other.
        bias: whether there are biases.
        batch_first: whether padded tensors are ``(B, T, D)``.
        dropout: the probability that an element of a layer's output is zeroed before the next layer reads it.
        bidirectional: also run from the end to the start.
        device, dtype: of the parameters.
        **options: those of every layer, :class:`~raglane.nn.recurrent.layer.RecurrentLayer`.

    Raises:
        ArgumentError: an argument out of its range.
        ArgumentTypeError: an argument that the layer does not have.
    """

    # The layer's own arguments, with their defaults.
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
        self._all_weights: list[list[str]] = []  # as torch's layers have it
        for index in range(num_layers):
            width = input_size if index == 0 else directions * cell.state_sizes(hidden_size)[0]
            for suffix in ("", "_reverse")[:directions]:
                shapes = cell.shapes(width, hidden_size, bias)
                self._all_weights.append([f"{name}_l{index}{suffix}" for name in shapes])
                for name, shape in shapes.items():
                    parameter = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(f"{name}_l{index}{suffix}", parameter)
        self.reset_parameters()
        self._set_options(**options)

    @abstractmethod
    def _make_cell(self) -> CellSpec:
        """The equations, from the layer's own arguments, which are its attributes by now."""

    @property
    def cell(self) -> CellSpec:
        """The equations."""
        return self._cell

    def reset_parameters(self) -> None:
        """Fill all parameters anew, as the cell has it."""
        # Not those of a module that makes the initial states, which initialises itself.
        for name, parameter in self.named_parameters(recurse=False):
            kind, _, _ = name.rpartition("_l")
            if kind:
                self._cell.initialise(kind, parameter.detach(), self.hidden_size)

    def extra_repr(self) -> str:
        """Torch's line, with the other options that were chosen."""
        defaults = _DEFAULTS | self._own
        chosen = [f"{name}={getattr(self, name)!r}" for name, value in defaults.items() if getattr(self, name) != value]
        parts = [str(self.input_size), str(self.hidden_size), *chosen, super().extra_repr()]
        return ", ".join(part for part in parts if part)

    def _weights(self) -> tuple[Any, ...]:
        """Read by name: parametrizations and functional_call replace them."""
        kind = self._cell.weights_type
        return tuple([kind(*[getattr(self, name) for name in names]) for names in self._all_weights])


class IndRNN(CellLayer):
    """The independently recurrent network on ragged batches: each unit remembers itself alone.

    The equation and the paper stand in :mod:`raglane.cells.indrnn`. Deep stacks and long sequences are what it is for.

    Args:
        input_size, hidden_size, num_layers: sizes.
        nonlinearity: ``"relu"`` or ``"tanh"``.
        bias, batch_first, dropout, bidirectional, device, dtype: as torch's RNN has them.
        max_length: the length of the longest sequence to be stable for: recurrent weights are held between
            ``-2 ** (1 / max_length)`` and that (section 4.1 of the paper), so that a state at most doubles over such
            a sequence. Without it they are not bounded.
        **options: those of every layer, :class:`~raglane.nn.recurrent.layer.RecurrentLayer`.

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = IndRNN(3, 4, num_layers=2, max_length=1000)
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 4]), torch.Size([2, 2, 4]))
    """

    _own: ClassVar[dict[str, Any]] = {"nonlinearity": "relu", "max_length": None}

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
        self.nonlinearity, self.max_length = nonlinearity, max_length
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            **options,
        )

    def _make_cell(self) -> CellSpec:
        if self.nonlinearity not in ("relu", "tanh"):
            got, rule = repr(self.nonlinearity), "'relu' or 'tanh'"
            raise ArgumentError(message("nonlinearity", got, rule, "choose one of them"))
        if self.max_length is not None:
            check_count("max_length", self.max_length)
        return CELLS[f"indrnn_{self.nonlinearity}"]

    def _weights(self) -> tuple[ElementwiseWeights, ...]:
        if self.max_length is None:
            return super()._weights()
        bound = 2 ** (1 / self.max_length)
        apply: Any = _Bound.apply
        return tuple([weights._replace(recurrent=apply(weights.recurrent, bound)) for weights in super()._weights()])


class _Bound(torch.autograd.Function):
    """Hold numbers within a bound, and their gradients from pushing them further out; inwards they may go."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, bound: float) -> Tensor:
        ctx.bound = bound
        ctx.save_for_backward(numbers)
        return numbers.clamp(-bound, bound)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (numbers,) = ctx.saved_tensors
        # A step goes against the gradient.
        outwards = ((numbers > ctx.bound) & (grad < 0)) | ((numbers < -ctx.bound) & (grad > 0))
        return grad.masked_fill(outwards, 0.0), None


class _ClippedLayer(CellLayer):
    """Layers of cells that can hold the arguments of their gates between ``-clip`` and ``clip``."""

    _own: ClassVar[dict[str, Any]] = {"clip": None}

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
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
            **options,
        )


class PeepholeLSTM(_ClippedLayer):
    """The LSTM with peepholes on ragged batches: its gates see the memory too.

    The equations and the paper stand in :mod:`raglane.cells.peephole_lstm`, the arguments in
    :class:`~raglane.nn.recurrent.cell_layers.CellLayer`; besides, ``clip`` holds the arguments of the gates and of the
    candidate between ``-clip`` and ``clip``, as the ONNX operator LSTM can.

    Example:
        >>> from raglane import Ragged
        >>> out, (h, c) = PeepholeLSTM(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return cells.PeepholeLSTM(check_clip(self.clip))


class CoupledLSTM(_ClippedLayer):
    """The LSTM with coupled gates on ragged batches: it forgets as much as it takes up.

    The equations and the paper stand in :mod:`raglane.cells.coupled_lstm`, the arguments in
    :class:`~raglane.nn.recurrent.cell_layers.CellLayer`; besides, ``clip`` holds the arguments of the gates and of the
    candidate between ``-clip`` and ``clip``, as the ONNX operator LSTM can.

    Example:
        >>> from raglane import Ragged
        >>> out, (h, c) = CoupledLSTM(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return cells.CoupledLSTM(check_clip(self.clip))


class LayerNormLSTM(CellLayer):
    """The LSTM with layer normalisation inside the recurrence, on ragged batches.

    The equations and the paper stand in :mod:`raglane.cells.layernorm`, the arguments in
    :class:`~raglane.nn.recurrent.cell_layers.CellLayer`.

    Example:
        >>> from raglane import Ragged
        >>> out, (h, c) = LayerNormLSTM(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return CELLS["layernorm_lstm"]


class LayerNormGRU(CellLayer):
    """The GRU with layer normalisation inside the recurrence, on ragged batches.

    The equations and the paper stand in :mod:`raglane.cells.layernorm`, the arguments in
    :class:`~raglane.nn.recurrent.cell_layers.CellLayer`.

    Example:
        >>> from raglane import Ragged
        >>> out, h = LayerNormGRU(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return CELLS["layernorm_gru"]


class SRU(CellLayer):
    """The simple recurrent unit on ragged batches: a gated memory without a matrix in the time loop.

    The equations and the paper stand in :mod:`raglane.cells.sru`, the arguments in
    :class:`~raglane.nn.recurrent.cell_layers.CellLayer`.

    Example:
        >>> from raglane import Ragged
        >>> out, (h, c) = SRU(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return CELLS["sru"]


class QRNN(CellLayer):
    """The pooling of quasi-recurrent networks on ragged batches, with products of width one.

    The equations and the paper stand in :mod:`raglane.cells.qrnn`, the arguments in
    :class:`~raglane.nn.recurrent.cell_layers.CellLayer`.

    Example:
        >>> from raglane import Ragged
        >>> out, (h, c) = QRNN(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return CELLS["qrnn"]


class MinGRU(CellLayer):
    """The minimal GRU on ragged batches: its gate looks at the input alone.

    The equations and the paper stand in :mod:`raglane.cells.mingru`, the arguments in
    :class:`~raglane.nn.recurrent.cell_layers.CellLayer`.

    Example:
        >>> from raglane import Ragged
        >>> out, h = MinGRU(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return CELLS["mingru"]


class MinLSTM(CellLayer):
    """The minimal LSTM on ragged batches: its gates look at the input alone.

    The equations and the paper stand in :mod:`raglane.cells.minlstm`, the arguments in
    :class:`~raglane.nn.recurrent.cell_layers.CellLayer`.

    Example:
        >>> from raglane import Ragged
        >>> out, h = MinLSTM(3, 4, bidirectional=True)(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def _make_cell(self) -> CellSpec:
        return CELLS["minlstm"]
