"""Layers of the cells that torch does not have, with the arguments and parameter names of torch's layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from raglane import cells
from raglane.cells import CELLS, CellSpec
from raglane.cells.elementwise import ElementwiseWeights
from raglane.errors import ArgumentError, ArgumentTypeError, explain
from raglane.nn.functional import Network
from raglane.nn.init import forget_bias_
from raglane.nn.layer import OPTIONS, RecurrentLayer, check_clip, check_count, check_dropout

__all__ = [
    "QRNN",
    "SRU",
    "CoupledLSTM",
    "IndRNN",
    "LayerNormGRU",
    "LayerNormLSTM",
    "MinGRU",
    "MinLSTM",
    "PeepholeLSTM",
]


class _CellLayer(RecurrentLayer):
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
        **options: those of every layer, :class:`raglane.nn.layer.RecurrentLayer`.

    Raises:
        ArgumentError: an argument out of its range.
        ArgumentTypeError: one that the layer does not have.
    """

    # What is shown of a layer where it is not this, in this order.
    _defaults: ClassVar[dict[str, Any]] = {
        "num_layers": 1,
        "bias": True,
        "batch_first": False,
        "dropout": 0.0,
        "bidirectional": False,
    }

    def __init__(
        self,
        cell: CellSpec,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        unit_forget_bias: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.input_size = check_count("input_size", input_size)
        self.hidden_size = check_count("hidden_size", hidden_size)
        self.num_layers = check_count("num_layers", num_layers)
        self.bias = _check_flag("bias", bias)
        self.batch_first = _check_flag("batch_first", batch_first)
        self.bidirectional = _check_flag("bidirectional", bidirectional)
        self.dropout = check_dropout(dropout)
        _check_dtype(dtype)
        _check_names(options)
        self._cell = cell
        directions = 2 if bidirectional else 1
        for index in range(num_layers):
            width = input_size if index == 0 else directions * cell.state_sizes(hidden_size)[0]
            for suffix in ("", "_reverse")[:directions]:
                for name, shape in cell.shapes(width, hidden_size, bias).items():
                    parameter = None if shape is None else nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
                    self.register_parameter(f"{name}_l{index}{suffix}", parameter)
        self.reset_parameters()
        self._set_options(**options)
        if _check_flag("unit_forget_bias", unit_forget_bias):
            forget_bias_(self)

    @property
    def cell(self) -> CellSpec:
        """The equations."""
        return self._cell

    def reset_parameters(self) -> None:
        """Fill all parameters anew, as the cell has it."""
        # Not those of a module that makes the initial states, which knows itself how to begin.
        for name, parameter in self.named_parameters(recurse=False):
            kind, _, _ = name.rpartition("_l")
            if kind:
                self._cell.initialise(kind, parameter.detach(), self.hidden_size)

    def extra_repr(self) -> str:
        """Torch's line, with what was chosen of the rest."""
        given = {name: getattr(self, name) for name in self._defaults}
        chosen = [f"{name}={value!r}" for name, value in given.items() if value != self._defaults[name]]
        parts = [str(self.input_size), str(self.hidden_size), *chosen, super().extra_repr()]
        return ", ".join(part for part in parts if part)

    def _network(self) -> Network:
        """The layer's description for the kernels, with the weights as they are now."""
        weights = tuple(self._weights())
        return Network(
            self._cell,
            weights,
            weights[0].input,
            self.input_size,
            self.hidden_size,
            self._cell.state_sizes(self.hidden_size),
            self.num_layers,
            2 if self.bidirectional else 1,
            self.dropout,
            self.training,
            self.schedule,
            self.backend,
            self.regularisation,
            None if self.initial_state == "zeros" else self._own_initial,
        )

    def _weights(self) -> Iterator[Any]:
        """One layer and direction after the other, read by name: parametrizations and functional_call replace them."""
        names = tuple(self._cell.shapes(1, 1))
        for index in range(self.num_layers):
            for suffix in ("", "_reverse")[: 2 if self.bidirectional else 1]:
                yield self._cell.weights_type(*[getattr(self, f"{name}_l{index}{suffix}") for name in names])


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ArgumentError(explain(name, repr(value), "True or False", "choose one of them"))
    return value


def _check_dtype(dtype: Any) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        rule = "a floating-point dtype, or None for torch's default"
        raise ArgumentError(explain("dtype", repr(dtype), rule, "pass torch.float32, say"))


def _check_names(options: dict[str, Any]) -> None:
    for name, value in options.items():
        if name not in OPTIONS:
            rule = f"this layer takes torch's arguments and {', '.join(OPTIONS)}"
            raise ArgumentTypeError(explain(name, repr(value), rule, "leave it out"))


class IndRNN(_CellLayer):
    """The independently recurrent network on ragged batches: each unit remembers itself alone.

    The equation and the paper stand in :mod:`raglane.cells.indrnn`. Deep stacks and long sequences are what it is for.

    Args:
        input_size, hidden_size, num_layers: sizes.
        nonlinearity: ``"relu"`` or ``"tanh"``.
        *args: ``bias, batch_first, dropout, bidirectional, device, dtype``, as torch's RNN has them.
        max_length: the length of the longest sequence to be stable for: recurrent weights are held between
            ``-2 ** (1 / max_length)`` and that (section 4.1 of the paper), so that a state can at most double over
            such a sequence. Without it they are not bound.
        **kwargs: the rest, and the options of every layer, :class:`raglane.nn.layer.RecurrentLayer`.

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = IndRNN(3, 4, num_layers=2, max_length=1000)
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 4]), torch.Size([2, 2, 4]))
    """

    _defaults: ClassVar[dict[str, Any]] = {**_CellLayer._defaults, "nonlinearity": "relu", "max_length": None}
    # On the class as well: layers that make their own initial state look at their weights while they are built.
    max_length: int | None = None

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: Literal["relu", "tanh"] = "relu",
        *args: Any,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        if nonlinearity not in ("relu", "tanh"):
            raise ArgumentError(explain("nonlinearity", repr(nonlinearity), "'relu' or 'tanh'", "choose one of them"))
        super().__init__(CELLS[f"indrnn_{nonlinearity}"], input_size, hidden_size, num_layers, *args, **kwargs)
        self.nonlinearity = nonlinearity
        self.max_length = None if max_length is None else check_count("max_length", max_length)

    def _weights(self) -> Iterator[ElementwiseWeights]:
        for weights in super()._weights():
            if self.max_length is None:
                yield weights
            else:
                bound: Any = _Bound.apply(weights.recurrent, 2 ** (1 / self.max_length))  # type: ignore[no-untyped-call]
                yield weights._replace(recurrent=bound)


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


class PeepholeLSTM(_CellLayer):
    """The LSTM with peepholes on ragged batches: its gates see the memory too.

    The equations and the paper stand in :mod:`raglane.cells.peephole_lstm`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype``, as
            torch's layers have them.
        clip: hold the arguments of the gates and of the candidate between ``-clip`` and ``clip``, as the ONNX operator
            LSTM can.
        **kwargs: the options of every layer, :class:`raglane.nn.layer.RecurrentLayer`, and
            ``unit_forget_bias`` to begin with the forget gate open (:func:`raglane.nn.init.forget_bias_`).

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = PeepholeLSTM(3, 4, bidirectional=True)
        >>> out, (h, c) = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    _defaults: ClassVar[dict[str, Any]] = {**_CellLayer._defaults, "clip": None}

    def __init__(self, *args: Any, clip: float | None = None, **kwargs: Any) -> None:
        super().__init__(cells.PeepholeLSTM(check_clip(clip)), *args, **kwargs)
        self.clip = clip


class CoupledLSTM(_CellLayer):
    """The LSTM with coupled gates on ragged batches: it forgets as much as it takes up.

    The equations and the paper stand in :mod:`raglane.cells.coupled_lstm`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype``, as
            torch's layers have them.
        clip: hold the arguments of the gates and of the candidate between ``-clip`` and ``clip``, as the ONNX operator
            LSTM can.
        **kwargs: the options of every layer, :class:`raglane.nn.layer.RecurrentLayer`, and
            ``unit_forget_bias`` to begin with the forget gate open (:func:`raglane.nn.init.forget_bias_`).

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = CoupledLSTM(3, 4, bidirectional=True)
        >>> out, (h, c) = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    _defaults: ClassVar[dict[str, Any]] = {**_CellLayer._defaults, "clip": None}

    def __init__(self, *args: Any, clip: float | None = None, **kwargs: Any) -> None:
        super().__init__(cells.CoupledLSTM(check_clip(clip)), *args, **kwargs)
        self.clip = clip


class LayerNormLSTM(_CellLayer):
    """The LSTM with layer normalisation inside the recurrence, on ragged batches.

    The equations and the paper stand in :mod:`raglane.cells.layernorm`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype``, as
            torch's layers have them.
        **kwargs: the options of every layer, :class:`raglane.nn.layer.RecurrentLayer`, and
            ``unit_forget_bias`` to begin with the forget gate open (:func:`raglane.nn.init.forget_bias_`).

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = LayerNormLSTM(3, 4, bidirectional=True)
        >>> out, (h, c) = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(CELLS["layernorm_lstm"], *args, **kwargs)


class LayerNormGRU(_CellLayer):
    """The GRU with layer normalisation inside the recurrence, on ragged batches.

    The equations and the paper stand in :mod:`raglane.cells.layernorm`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype``, as
            torch's layers have them.
        **kwargs: the options of every layer, :class:`raglane.nn.layer.RecurrentLayer`.

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = LayerNormGRU(3, 4, bidirectional=True)
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(CELLS["layernorm_gru"], *args, **kwargs)


class SRU(_CellLayer):
    """The simple recurrent unit on ragged batches: a gated memory without a matrix in the time loop.

    The equations and the paper stand in :mod:`raglane.cells.sru`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype``, as
            torch's layers have them.
        **kwargs: the options of every layer, :class:`raglane.nn.layer.RecurrentLayer`, and
            ``unit_forget_bias`` to begin with the forget gate open (:func:`raglane.nn.init.forget_bias_`).

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = SRU(3, 4, bidirectional=True)
        >>> out, (h, c) = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(CELLS["sru"], *args, **kwargs)


class QRNN(_CellLayer):
    """The pooling of quasi-recurrent networks on ragged batches, with products of width one.

    The equations and the paper stand in :mod:`raglane.cells.qrnn`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype``, as
            torch's layers have them.
        **kwargs: the options of every layer, :class:`raglane.nn.layer.RecurrentLayer`, and
            ``unit_forget_bias`` to begin with the forget gate open (:func:`raglane.nn.init.forget_bias_`).

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = QRNN(3, 4, bidirectional=True)
        >>> out, (h, c) = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(CELLS["qrnn"], *args, **kwargs)


class MinGRU(_CellLayer):
    """The minimal GRU on ragged batches: its gate looks at the input alone.

    The equations and the paper stand in :mod:`raglane.cells.mingru`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype``, as
            torch's layers have them.
        **kwargs: the options of every layer, :class:`raglane.nn.layer.RecurrentLayer`.

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = MinGRU(3, 4, bidirectional=True)
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(CELLS["mingru"], *args, **kwargs)


class MinLSTM(_CellLayer):
    """The minimal LSTM on ragged batches: its gates look at the input alone.

    The equations and the paper stand in :mod:`raglane.cells.minlstm`.

    Args:
        *args: ``input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype``, as
            torch's layers have them.
        **kwargs: the options of every layer, :class:`raglane.nn.layer.RecurrentLayer`, and
            ``unit_forget_bias`` to begin with the forget gate open (:func:`raglane.nn.init.forget_bias_`).

    Raises:
        ArgumentError: an argument out of its range.

    Example:
        >>> from raglane import Ragged
        >>> layer = MinLSTM(3, 4, bidirectional=True)
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]))
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(CELLS["minlstm"], *args, **kwargs)
