"""An encoder from sequences to one vector per sequence or element."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Unpack, cast

import torch
from torch import nn

from raglane._utils.checks import (
    check_choice,
    check_count,
    check_dropout,
    check_dtype,
    check_flag,
    check_signature,
)
from raglane._utils.messages import nearest, quote, same_word
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.pooling import POOLINGS
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.stack import Options
from raglane.ragged import Ragged
from raglane.ragged.interop import check_ragged

CellName = Literal[
    "lstm",
    "gru",
    "rnn",
    "indrnn",
    "sru",
    "qrnn",
    "mingru",
    "minlstm",
    "peephole_lstm",
    "coupled_lstm",
    "slstm",
    "grud",
    "cfc",
    "mamba",
    "mamba2",
    "gated_delta_net",
    "mlstm",
    "rglru",
]
PoolingName = Literal["final", "last", "first", "mean", "max", "logsumexp", "attention"]
LAYERS: Mapping[str, str] = {
    "lstm": "recurrent.torch_layers.LSTM",
    "gru": "recurrent.torch_layers.GRU",
    "rnn": "recurrent.torch_layers.RNN",
    "indrnn": "recurrent.elementwise_layers.IndRNN",
    "sru": "recurrent.elementwise_layers.SRU",
    "qrnn": "recurrent.elementwise_layers.QRNN",
    "mingru": "recurrent.elementwise_layers.MinGRU",
    "minlstm": "recurrent.elementwise_layers.MinLSTM",
    "peephole_lstm": "recurrent.cell_layers.PeepholeLSTM",
    "coupled_lstm": "recurrent.cell_layers.CoupledLSTM",
    "slstm": "recurrent.cell_layers.SLSTM",
    "grud": "recurrent.cell_layers.GRUD",
    "cfc": "recurrent.cell_layers.CfC",
    "mamba": "mixers.mamba.Mamba",
    "mamba2": "mixers.mamba2.Mamba2",
    "gated_delta_net": "mixers.gated_delta_net.GatedDeltaNet",
    "mlstm": "mixers.mlstm.MLSTM",
    "rglru": "mixers.rglru.RGLRU",
}
"""The module and class of each recurrent layer, which are imported when a model has one."""

_NORMALISED: Mapping[str, str] = {
    "lstm": "recurrent.cell_layers.LayerNormLSTM",
    "gru": "recurrent.cell_layers.LayerNormGRU",
}


class EncoderOptions(Options, total=False):
    """The keyword arguments of layers; those in addition to :class:`Options` are for layers that
    have them.
    """

    bias: bool
    batch_first: bool
    proj_size: int
    nonlinearity: Literal["relu", "tanh"]
    reset_after: bool
    clip: float | None
    num_heads: int
    input_weights: bool
    backbone_units: int | None
    gap_column: int | None
    max_length: int | None
    state_size: int
    kernel_size: int
    expand: int
    dt_rank: int | None
    conv_bias: bool
    head_dim: int | None
    num_groups: int
    dt_limit: tuple[float, float] | None
    eps: float
    num_value_heads: int | None
    key_size: int | None
    value_size: int | None
    width: int | None


class SequenceEncoder(nn.Module):
    """Embedding, recurrent layers and pooling in one module, without padding.

    Args:
        input_size: the number of features of an element, or with ``num_embeddings`` the size of a
            token's embedding.
        hidden_size: units per layer and direction.
        cell: the name of a layer, e.g. ``"lstm"`` or ``"PeepholeLSTM"``, in any case of letters; or
            a function ``(input_size, hidden_size, **options)`` that returns a recurrent layer, such
            as a class of ``rl.nn``.
        num_embeddings: the number of different tokens; None if elements are vectors of floats. No
            index is reserved for padding.
        pooling: how the elements of a sequence become one vector. ``"final"`` is the layer's
            ``final``: its final state, both directions concatenated. Or ``"last"``, the last
            element, of which the backward half has read only that element; ``"first"``, ``"mean"``,
            ``"max"``, ``"logsumexp"`` or ``"attention"``. None returns one vector per element.
        num_layers: the number of recurrent layers.
        bidirectional: True to also run from the end to the start.
        dropout: the probability that a unit is zeroed between layers, and in the result.
        layer_norm: True for normalisation inside the recurrence, for the layers ``"lstm"`` and
            ``"gru"``.
        device, dtype: of the parameters.
        **options: further options of the layer, such as ``initial_state`` or ``zoneout``.

    Attributes:
        output_size: the number of features of the result.

    Raises:
        ArgumentError: an argument is out of its range.
        ArgumentTypeError: ``cell`` does not return a recurrent layer of Raglane, or does not accept
            an option.

    Example:
        >>> encoder = SequenceEncoder(32, 64, "lstm", num_embeddings=1000, pooling="attention", bidirectional=True)
        >>> batch = Ragged([torch.tensor([5, 17, 3]), torch.tensor([999])])
        >>> encoder(batch).shape, encoder.output_size
        (torch.Size([2, 128]), 128)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        cell: CellName | Callable[..., RecurrentLayer] = "gru",
        *,
        num_embeddings: int | None = None,
        pooling: PoolingName | None = "final",
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        layer_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Unpack[EncoderOptions],
    ) -> None:
        super().__init__()
        width = check_count("input_size", input_size)
        check_dtype(dtype)
        # Only those that were passed: a function for layers without parameters need not accept
        # them.
        placed: dict[str, Any] = {
            name: value
            for name, value in (("device", device), ("dtype", dtype))
            if value is not None
        }
        # Any, because users may replace the torch.nn.Embedding.
        self.embedding: Any = None
        if num_embeddings is not None:
            count = check_count("num_embeddings", num_embeddings)
            self.embedding = nn.Embedding(count, width, **placed)
        self.recurrent = recurrent_layer(
            layer_class(cell, check_flag("layer_norm", layer_norm)),
            width,
            check_count("hidden_size", hidden_size),
            num_layers=check_count("num_layers", num_layers),
            bidirectional=check_flag("bidirectional", bidirectional),
            # Dropout acts between layers, and torch warns if there is only one.
            dropout=check_dropout(dropout) if num_layers != 1 else 0.0,
            **placed,
            **options,
        )
        self.dropout = nn.Dropout(check_dropout(dropout))
        self.output_size = self.recurrent.output_size
        if pooling is not None:
            check_choice(
                "pooling",
                pooling,
                ("final", *POOLINGS),
                "pass one of these, or None for one per element",
            )
        self.pooling = pooling
        self.pool = (
            None if pooling in (None, "final") else POOLINGS[pooling](self.output_size, **placed)
        )

    def forward(self, batch: Ragged) -> Any:
        """Encode a batch.

        Args:
            batch: sequences of ``(L, input_size)`` floats, or of ``(L,)`` tokens.

        Returns:
            ``(B, output_size)``, or without pooling a Ragged ``(N, output_size)``. The vector of an
            empty sequence is zeros, or with ``pooling="final"`` its initial state.

        Raises:
            ArgumentTypeError: ``batch`` is not a Ragged, or does not contain tokens although
                ``num_embeddings`` is set.
            ShapeError: elements have the wrong size.
            ArgumentError: a token is out of range; on a GPU, torch's own kernel checks that.
        """
        embedded = self.embed(batch)
        if self.pooling == "final":
            out, state = self.recurrent(
                embedded, return_output=not self.recurrent.cell.output_is_state
            )
            return self.dropout(self.recurrent.final(out, state))
        out, _ = self.recurrent(embedded)
        return out.map(self.dropout) if self.pool is None else self.dropout(self.pool(out))

    if TYPE_CHECKING:

        def __call__(self, batch: Ragged) -> Any: ...  # noqa: D102

    def extra_repr(self) -> str:
        """Return the settings that the inner modules do not show."""
        return f"pooling={self.pooling!r}, output_size={self.output_size}"

    def embed(self, batch: Ragged) -> Ragged:
        """Return the input of the recurrent layer: the embeddings of tokens, or ``batch`` itself.

        Args:
            batch: as in the call.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as in the call.
        """
        check_ragged("batch", batch)
        if self.embedding is None:
            return batch
        if not isinstance(self.embedding, nn.Embedding):
            # A user-defined module checks its own input.
            return batch.map(self.embedding)
        if batch.dtype not in (torch.int64, torch.int32):
            rule = "a batch of tokens of int64 or int32"
            fix = "leave num_embeddings out for elements of floats"
            raise ArgumentTypeError("batch", f"values of {batch.dtype}", rule, fix)
        if batch.feature_shape:
            rule = "a batch of one token per element"
            raise ShapeError(
                "batch", f"elements of shape {tuple(batch.feature_shape)}", rule, "reshape it"
            )
        # Only on the CPU: reading values would wait for a device.
        if not torch.compiler.is_compiling() and batch.values.is_cpu and batch.values.numel():
            lowest, highest = map(int, batch.values.aminmax())
            if lowest < 0 or highest >= self.embedding.num_embeddings:
                rule = f"tokens from 0 to num_embeddings - 1 = {self.embedding.num_embeddings - 1}"
                fix = "replace unknown tokens, or build the encoder with larger num_embeddings"
                raise ArgumentError("batch", f"tokens from {lowest} to {highest}", rule, fix)
        return batch.map(self.embedding)


def layer_class(cell: Any, layer_norm: bool) -> Callable[..., RecurrentLayer]:
    """Return the class or function that creates the recurrent layer."""
    classes = _NORMALISED if layer_norm else LAYERS
    name = same_word(cell, classes) if isinstance(cell, str) else ""
    if name in classes:
        module, _, kind = classes[name].rpartition(".")
        return cast("type[RecurrentLayer]", getattr(import_module(f"raglane.nn.{module}"), kind))
    if callable(cell) and not layer_norm and not isinstance(cell, nn.Module):
        return cell
    other = (
        " with layer_norm=True"
        if layer_norm
        else ", or a function that returns a layer, such as a class of rl.nn"
    )
    fix = f"choose one of them{', or leave layer_norm out' if layer_norm else ''}"
    near = nearest(cell, classes) if isinstance(cell, str) else None
    fix = f"pass {near!r}" if near else fix
    raise ArgumentError("cell", quote(cell), f"one of {', '.join(classes)}{other}", fix)


def recurrent_layer(
    make: Callable[..., Any], width: int, hidden_size: int, /, **options: Any
) -> RecurrentLayer:
    """Create the recurrent layer."""
    rule = "a function (input_size, hidden_size, **options) that returns a layer of rl.nn"
    check_signature("cell", make, rule, width, hidden_size, **options)
    layer = make(width, hidden_size, **options)
    if not isinstance(layer, RecurrentLayer):
        got = f"a function that returns a {type(layer).__module__}.{type(layer).__name__}"
        raise ArgumentTypeError(
            "cell", got, rule, f"choose one of {', '.join(LAYERS)}, or a class of rl.nn"
        )
    return layer
