"""RNN, LSTM and GRU that take ragged batches: torch's layers, with one more way to call them.

They are built on ``torch.nn.RNNBase``, which brings the parameters, their initialisation and ``state_dict``, and not on
``torch.nn.LSTM`` and its kin, because ``torch.compile`` refuses every instance of those three.
"""

from __future__ import annotations

from typing import Any, Literal, Unpack

import torch

from raglane import cells
from raglane._utils.checks import check_clip, check_count, check_dropout, check_dtype, check_flag
from raglane._utils.messages import message
from raglane.cells import CELLS, CellSpec
from raglane.cells.spec import Weights
from raglane.errors import ArgumentError
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.stack import Options, settings_of

_CELL_OF_MODE = {"LSTM": "lstm", "GRU": "gru", "RNN_TANH": "rnn_tanh", "RNN_RELU": "rnn_relu"}


class _TorchLayer(RecurrentLayer, torch.nn.RNNBase):
    """What the three have in common.

    Parameters, initialisation and ``state_dict`` are torch's own, so that weights go either way.
    """

    # Torch's equations, where there is none; also for the layers that ``rl.accelerate`` converts.
    _variant: CellSpec | None = None
    _settings = settings_of("mode", "_variant", "proj_size")

    def __init__(
        self,
        mode: str,
        variant: CellSpec | None,
        as_torch: tuple[Any, ...],
        proj_size: int = 0,
        device: Any = None,
        dtype: Any = None,
        **options: Any,
    ) -> None:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional = as_torch
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
        """Fill all parameters anew as torch does; learned initial states are zeros again."""
        bound = self.hidden_size**-0.5 if self.hidden_size > 0 else 0.0
        for name, parameter in self.named_parameters(recurse=False):
            if name.startswith("initial_"):
                torch.nn.init.zeros_(parameter)
            else:
                torch.nn.init.uniform_(parameter, -bound, bound)

    @property
    def cell(self) -> CellSpec:
        """The equations."""
        if self._variant is not None:
            return self._variant
        if self.mode not in _CELL_OF_MODE:
            rule = f"one of {', '.join(_CELL_OF_MODE)}"
            raise ArgumentError(message("mode", repr(self.mode), rule, "do not change it"))
        return CELLS[_CELL_OF_MODE[self.mode]]

    def extra_repr(self) -> str:
        """Torch's line, with the other options that were chosen."""
        if self._variant is None:
            return super().extra_repr()
        return f"{super().extra_repr()}, cell={self._variant.name!r}"

    def _weights(self) -> tuple[Weights, ...]:
        """Read by name: parametrizations and functional_call replace them."""
        # A parameter is found there sooner than by getattr; what took the place of one, by getattr alone.
        parameters, found = self._parameters, []
        projects = self.proj_size > 0
        for names in self._all_weights:
            try:
                part: list[Any] = [parameters[name] for name in names]
            except KeyError:
                part = [getattr(self, name) for name in names]
            if not self.bias:
                part[2:2] = (None, None)
            elif len(part) < 4:
                rule = "False, since the layer was built without biases"
                raise ArgumentError(message("bias", repr(self.bias), rule, "build a layer with bias=True"))
            found.append(Weights(part[0], part[1], part[2], part[3], part[-1] if projects else None))
        return tuple(found)


def _check_proj_size(proj_size: Any, hidden_size: int, mode: str) -> int:
    """A projection's size as it is."""
    if mode != "LSTM" and proj_size != 0:
        raise ArgumentError(
            message("proj_size", repr(proj_size), "0, since only an LSTM projects its state", "leave it out")
        )
    if isinstance(proj_size, bool) or not isinstance(proj_size, int) or not 0 <= proj_size < hidden_size:
        rule = f"a whole number below hidden_size, {hidden_size}, or 0 for no projection"
        raise ArgumentError(message("proj_size", repr(proj_size), rule, "pass a smaller one, or leave it out"))
    return proj_size


class RNN(_TorchLayer):
    """Elman's network on ragged batches: :class:`torch.nn.RNN` with every argument and parameter of it.

    ``h_t = tanh(W_ih x_t + b_ih + W_hh h_{t-1} + b_hh)``, or relu in place of tanh.

    Args:
        input_size, hidden_size, num_layers, nonlinearity, bias, batch_first, dropout, bidirectional, device, dtype: as
            torch has them.
        clip: hold the gates' arguments between ``-clip`` and ``clip``, as the ONNX operator can.
        **options: those of every layer, see
            :class:`~raglane.nn.recurrent.layer.RecurrentLayer`.

    Raises:
        ArgumentError: an argument out of its range.
        ArgumentTypeError: an argument that the layer does not have.
        DispatchError: no such schedule, backend or pair.

    Example:
        >>> from raglane import Ragged
        >>> layer = RNN(3, 4, nonlinearity="relu")
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape
        (torch.Size([7, 4]), torch.Size([1, 2, 4]))
    """

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
        if nonlinearity not in ("tanh", "relu"):
            raise ArgumentError(message("nonlinearity", repr(nonlinearity), "'tanh' or 'relu'", "choose one of them"))
        variant = None if clip is None else cells.Elman(nonlinearity, check_clip(clip))
        as_torch = (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        super().__init__(f"RNN_{nonlinearity.upper()}", variant, as_torch, device=device, dtype=dtype, **options)
        self.nonlinearity = nonlinearity


class LSTM(_TorchLayer):
    """Long short-term memory on ragged batches: :class:`torch.nn.LSTM` with every argument and parameter of it.

    The equations, with torch's gate order, are in :doc:`/cells`.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, proj_size, device, dtype: as
            torch has them.
        clip: hold the gates' arguments between ``-clip`` and ``clip``, as the ONNX operator can.
        **options: those of every layer, see
            :class:`~raglane.nn.recurrent.layer.RecurrentLayer`.

    Raises:
        ArgumentError: an argument out of its range.
        ArgumentTypeError: an argument that the layer does not have.
        DispatchError: no such schedule, backend or pair.

    Example:
        >>> from raglane import Ragged
        >>> layer = LSTM(3, 4, bidirectional=True)
        >>> out, (h, c) = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> out.values.shape, h.shape, c.shape
        (torch.Size([7, 8]), torch.Size([2, 2, 4]), torch.Size([2, 2, 4]))
    """

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
        as_torch = (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        super().__init__("LSTM", variant, as_torch, proj_size, device=device, dtype=dtype, **options)


class GRU(_TorchLayer):
    """Gated recurrent units on ragged batches: :class:`torch.nn.GRU` with every argument and parameter of it.

    The equations, with torch's gate order, are in :doc:`/cells`.

    Args:
        input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, device, dtype: as torch has
            them.
        reset_after: False to reset the state before the product, as the paper does (Keras' ``reset_after``,
            ``linear_before_reset`` of the ONNX operator).
        clip: hold the gates' arguments between ``-clip`` and ``clip``, as the ONNX operator can.
        **options: those of every layer, see
            :class:`~raglane.nn.recurrent.layer.RecurrentLayer`.

    Raises:
        ArgumentError: an argument out of its range.
        ArgumentTypeError: an argument that the layer does not have.
        DispatchError: no such schedule, backend or pair.

    Example:
        >>> from raglane import Ragged
        >>> layer = GRU(3, 4)
        >>> out, h = layer(Ragged([torch.randn(5, 3), torch.randn(2, 3)]))
        >>> torch.equal(out.last(), h[-1])
        True
    """

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
        as_torch = (input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional)
        super().__init__("GRU", variant, as_torch, device=device, dtype=dtype, **options)
