"""RNN, LSTM and GRU on ragged batches, with torch's arguments, parameters and initialisation.

They inherit from ``torch.nn.RNNBase``, not from ``torch.nn.LSTM`` etc., because ``torch.compile``
cannot compile instances of those.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor

from raglane import cells
from raglane._utils.checks import (
    check_choice,
    check_clip,
    check_count,
    check_dropout,
    check_dtype,
    check_flag,
)
from raglane.cells import CELLS, CellSpec
from raglane.cells.spec import Weights
from raglane.errors import ArgumentError, MistypedError
from raglane.nn.recurrent.layer import Call, RecurrentLayer, StepFunction
from raglane.nn.recurrent.stack import Options, settings_of

_CELL_OF_MODE = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}


class _TorchLayer(RecurrentLayer, torch.nn.RNNBase):
    """The base of the three; ``state_dict`` is torch's."""

    # A cell with other equations than torch's; a class attribute for layers that ``rl.accelerate``
    # converts.
    _variant: CellSpec | None = None
    _settings = settings_of("mode", "_variant", "proj_size", "bias")
    _weights_are_parameters = True

    def __init__(
        self,
        mode: str,
        variant: CellSpec | None,
        as_torch: tuple[Any, ...],
        proj_size: int = 0,
        **options: Any,
    ) -> None:
        (
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
        ) = as_torch
        check_dtype(dtype)
        super().__init__(
            mode,
            check_count("input_size", input_size),
            check_count("hidden_size", hidden_size),
            check_count("num_layers", num_layers),
            check_flag("bias", bias),
            check_flag("batch_first", batch_first),
            check_dropout(dropout),
            check_flag("bidirectional", bidirectional),
            _check_proj_size(proj_size, hidden_size, mode),
            device,
            dtype,
        )
        self._variant = variant
        self._set_options(**options)

    def reset_parameters(self) -> None:
        """Initialise all parameters as torch does, and learned initial states with zeros."""
        bound = self.hidden_size**-0.5 if self.hidden_size > 0 else 0.0
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("initial_"):
                torch.nn.init.zeros_(parameter)
            else:
                torch.nn.init.uniform_(parameter, -bound, bound)

    @property
    def cell(self) -> CellSpec:
        """The cell that the layer runs."""
        if self._variant is not None:
            return self._variant
        if self.mode not in _CELL_OF_MODE:
            rule = f"one of {', '.join(_CELL_OF_MODE)}"
            raise ArgumentError("mode", repr(self.mode), rule, "do not change the attribute")
        return CELLS[_CELL_OF_MODE[self.mode]]

    def extra_repr(self) -> str:
        """Return the arguments that differ from their defaults."""
        if self._variant is None:
            return super().extra_repr()
        return f"{super().extra_repr()}, cell={self._variant.name!r}"

    def _weights(self) -> tuple[Weights, ...]:
        """Return the weights by name, because parametrizations and functional_call replace them."""
        # A lookup in _parameters is faster than getattr, which is needed only for replaced
        # parameters.
        parameters = self._parameters
        weights = []
        projects = self.proj_size > 0
        replaced: dict[str, Any] = {}
        for names in self._all_weights:
            try:
                tensors: list[Any] = [parameters[name] for name in names]
            except KeyError:
                replaced = replaced or self._replaced_weights()
                tensors = [replaced[name] for name in names]
            if not self.bias:
                tensors[2:2] = (None, None)
            elif len(tensors) < 4:
                rule = "False, since the layer was built without biases"
                raise ArgumentError("bias", repr(self.bias), rule, "build a layer with biases")
            projection = tensors[-1] if projects else None
            weights.append(Weights(tensors[0], tensors[1], tensors[2], tensors[3], projection))
        return tuple(weights)

    def _weights_in_order(self) -> Sequence[Any]:
        # Of the most common layer without the loop of _weights, which takes longer than its kernels.
        names = self._all_weights[0]
        if self.bias and len(names) == 4 and len(self._all_weights) == 1:
            try:
                return [*map(self._parameters.__getitem__, names), None]
            except KeyError:
                pass
        return super()._weights_in_order()

    def _replaced_weights(self) -> dict[str, Any]:
        """Return the weights by name, of which some are no parameters."""
        return {name: getattr(self, name) for names in self._all_weights for name in names}


def _check_proj_size(proj_size: Any, hidden_size: int, mode: str) -> int:
    """Return the size of an LSTM's projection if it is valid."""
    if mode != "LSTM" and proj_size != 0:
        raise ArgumentError(
            "proj_size", repr(proj_size), "0 for all layers but LSTM", "leave it out"
        )
    is_whole = isinstance(proj_size, int) and not isinstance(proj_size, bool)
    if not is_whole or not 0 <= proj_size < hidden_size:
        rule = f"a whole number below hidden_size, {hidden_size}, or 0 for no projection"
        raise (ArgumentError if is_whole else MistypedError)(
            "proj_size", repr(proj_size), rule, "pass a smaller number, or leave it out"
        )
    return proj_size


class RNN(_TorchLayer):
    """Elman's network on ragged batches, with the arguments and parameters of
    :class:`torch.nn.RNN`.

    ``h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)``, or relu instead of tanh.

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, device, dtype: as
            in torch.
        clip: clamp the arguments of the gates to ``-clip`` to ``clip``, like the attribute of the
            ONNX operator.
        **options: see :class:`~raglane.nn.recurrent.layer.RecurrentLayer`, also for the errors.

    Example:
        >>> layer = RNN(3, 4, nonlinearity="relu")
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 4]), torch.Size([1, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[Tensor]
        step: StepFunction[Tensor]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: Literal["tanh", "relu"] = "tanh",
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
        check_choice("nonlinearity", nonlinearity, ("tanh", "relu"))
        variant = None if clip is None else cells.Elman(nonlinearity, check_clip(clip))
        as_torch = (
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
        )
        super().__init__(f"RNN_{nonlinearity.upper()}", variant, as_torch, **options)
        self.nonlinearity = nonlinearity


class LSTM(_TorchLayer):
    """Long short-term memory on ragged batches, with the arguments and parameters of
    :class:`torch.nn.LSTM`.

    :doc:`/cells` has the equations, with torch's gate order.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype: as
            in torch.
        clip: clamp the arguments of the gates to ``-clip`` to ``clip``, like the attribute of the
            ONNX operator.
        **options: see :class:`~raglane.nn.recurrent.layer.RecurrentLayer`, also for the errors.

    Example:
        >>> layer = LSTM(3, 4, bidirectional=True)
        >>> out, (h, c) = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape, c.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]), torch.Size([2, 2, 4]))
    """

    if TYPE_CHECKING:
        __call__: Call[tuple[Tensor, Tensor]]
        step: StepFunction[tuple[Tensor, Tensor]]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        clip: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        variant = None if clip is None else cells.LSTM(check_clip(clip))
        as_torch = (
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
        )
        super().__init__("LSTM", variant, as_torch, proj_size, **options)


class GRU(_TorchLayer):
    """Gated recurrent units on ragged batches, with the arguments and parameters of
    :class:`torch.nn.GRU`.

    :doc:`/cells` has the equations, with torch's gate order.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as
            in torch.
        reset_after: False to reset the state before the product, as in the paper (Keras'
            ``reset_after``, ``linear_before_reset`` of the ONNX operator).
        clip: clamp the arguments of the gates to ``-clip`` to ``clip``, like the attribute of the
            ONNX operator.
        **options: see :class:`~raglane.nn.recurrent.layer.RecurrentLayer`, also for the errors.

    Example:
        >>> layer = GRU(3, 4)
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> torch.equal(out.last(), h[-1])
        True
    """

    if TYPE_CHECKING:
        __call__: Call[Tensor]
        step: StepFunction[Tensor]

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
        reset_after: bool = True,
        clip: float | None = None,
        **options: Unpack[Options],
    ) -> None:
        plain = check_flag("reset_after", reset_after) and clip is None
        variant = None if plain else cells.GRU(reset_after, check_clip(clip))
        as_torch = (
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device,
            dtype,
        )
        super().__init__("GRU", variant, as_torch, **options)
