"""The whole recipe in one class: sequences in, one vector per sequence or element out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_count, check_dropout, check_dtype, check_flag, check_kind, check_signature
from raglane._utils.messages import message
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.pooling import POOLINGS
from raglane.nn.recurrent.cell_layers import (
    GRUD,
    SLSTM,
    CfC,
    CoupledLSTM,
    LayerNormGRU,
    LayerNormLSTM,
    PeepholeLSTM,
)
from raglane.nn.recurrent.elementwise_layers import QRNN, SRU, IndRNN, MinGRU, MinLSTM
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.torch_layers import GRU, LSTM, RNN
from raglane.ragged import Ragged

LAYERS: dict[str, Callable[..., RecurrentLayer]] = {
    "lstm": LSTM,
    "gru": GRU,
    "rnn": RNN,
    "indrnn": IndRNN,
    "sru": SRU,
    "qrnn": QRNN,
    "mingru": MinGRU,
    "minlstm": MinLSTM,
    "peephole_lstm": PeepholeLSTM,
    "coupled_lstm": CoupledLSTM,
    "slstm": SLSTM,
    "grud": GRUD,
    "cfc": CfC,
}
"""The recurrent layers by name."""

_NORMALISED: dict[str, Callable[..., RecurrentLayer]] = {"lstm": LayerNormLSTM, "gru": LayerNormGRU}


class SequenceEncoder(nn.Module):
    """Embed, run a recurrent network, pool: in place of padding, sorting, packing, unpacking, gathering and masking.

    Args:
        input_size: features of an element or, with ``embedding``, the number of tokens.
        hidden_size: units of a layer and direction.
        layer: a key of ``LAYERS``; or what makes a recurrent layer from ``(input_size, hidden_size, **options)``, such
            as a class of ``rl.nn``.
        embedding: the size of a token's embedding; None where elements are vectors of floats. No index is kept for
            padding: there is none.
        pooling: how the elements of a sequence become one vector: ``"summary"``, the layer's ``summary``, which is what
            the network knew after it had read the whole sequence, in each direction; or a key of
            ``raglane.nn.pooling.POOLINGS``, of which ``"last"`` takes the last element, whose backward half has read
            that element only. None gives one vector per element.
        num_layers: layers on top of each other.
        bidirectional: also run from the end to the start.
        dropout: the share of units zeroed between layers, and in what comes out.
        layer_norm: normalise inside the recurrence; of the named layers ``lstm`` and ``gru`` can.
        device, dtype: of the parameters.
        **options: further ones of the layer, such as ``initial_state`` or ``zoneout``.

    Attributes:
        output_size: features of what comes out.

    Raises:
        ArgumentError: an argument out of its range.
        ArgumentTypeError: a ``layer`` that makes no recurrent layer of Raglane's, or an option that it does not take.

    Example:
        >>> encoder = SequenceEncoder(1000, 64, "lstm", embedding=32, pooling="attention", bidirectional=True)
        >>> batch = Ragged([torch.tensor([5, 17, 3]), torch.tensor([999])])
        >>> encoder(batch).shape, encoder.output_size
        (torch.Size([2, 128]), 128)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        layer: str | Callable[..., RecurrentLayer] = "gru",
        *,
        embedding: int | None = None,
        pooling: str | None = "summary",
        num_layers: int = 1,
        bidirectional: bool = False,
        dropout: float = 0.0,
        layer_norm: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        width = check_count("input_size", input_size)
        check_dtype(dtype)
        # Only what was given: a maker of layers without parameters need not take the two.
        placed: dict[str, Any] = {
            name: value for name, value in (("device", device), ("dtype", dtype)) if value is not None
        }
        # Another module may be put in place of the torch.nn.Embedding.
        self.embedding: Any = None
        if embedding is not None:
            self.embedding = nn.Embedding(width, check_count("embedding", embedding), **placed)
            width = embedding
        self.recurrent = _made(
            _layer_class(layer, check_flag("layer_norm", layer_norm)),
            width,
            check_count("hidden_size", hidden_size),
            num_layers=check_count("num_layers", num_layers),
            bidirectional=check_flag("bidirectional", bidirectional),
            # Between layers: there is no such place in a single one.
            dropout=check_dropout(dropout) if num_layers != 1 else 0.0,
            **placed,
            **options,
        )
        self.dropout = nn.Dropout(check_dropout(dropout))
        self.output_size = self.recurrent.output_size
        known = ("summary", *POOLINGS)
        if pooling is not None and not (isinstance(pooling, str) and pooling in known):
            rule = f"one of {', '.join(known)}, or None for one vector per element"
            raise ArgumentError(message("pooling", repr(pooling), rule, "choose one of them"))
        self.pooling = pooling
        self.pool = None if pooling in (None, "summary") else POOLINGS[pooling](self.output_size, **placed)

    def forward(self, batch: Ragged) -> Any:
        """Encode a batch.

        Args:
            batch: sequences of ``(L, input_size)`` floats, or of ``(L,)`` tokens.

        Returns:
            ``(B, output_size)``, or without pooling a Ragged ``(N, output_size)``. An empty sequence's vector is
            zeros; with ``pooling="summary"`` it is its initial state.

        Raises:
            ArgumentTypeError: not a Ragged, or elements that are not tokens where tokens belong.
            ShapeError: elements of the wrong size.
            ArgumentError: a token out of range; on a GPU, torch's own kernel says so.
        """
        embedded = self.embed(batch)
        if self.pooling == "summary":
            out, state = self.recurrent(embedded, return_output=not self.recurrent.cell.output_is_state)
            summary: Tensor = self.dropout(self.recurrent.summary(out, state))
            return summary
        out, _ = self.recurrent(embedded)
        return out.map(self.dropout) if self.pool is None else self.dropout(self.pool(out))

    def extra_repr(self) -> str:
        """The settings that the inner modules do not show."""
        return f"pooling={self.pooling!r}, output_size={self.output_size}"

    def embed(self, batch: Ragged) -> Ragged:
        """The input of the recurrent layer: the embeddings of tokens, or the floats themselves.

        Args:
            batch: as for the call.

        Raises:
            ArgumentTypeError, ShapeError, ArgumentError: as the call does.
        """
        check_kind("batch", batch, Ragged, "a Ragged", "wrap it with rl.Ragged(sequences)")
        if self.embedding is None:
            return batch
        if not isinstance(self.embedding, nn.Embedding):
            # Somebody's own, which knows what it reads.
            return batch.map(self.embedding)
        if batch.dtype not in (torch.int64, torch.int32):
            rule, fix = "a batch of tokens of int64 or int32", "leave embedding out for elements of floats"
            raise ArgumentTypeError(message("batch", f"values of {batch.dtype}", rule, fix))
        if batch.features:
            rule = "a batch of one token per element"
            raise ShapeError(message("batch", f"elements of shape {tuple(batch.features)}", rule, "reshape it"))
        # Only where looking does not wait for a device.
        if not torch.compiler.is_compiling() and batch.values.is_cpu and batch.values.numel():
            lowest, highest = map(int, batch.values.aminmax())
            if lowest < 0 or highest >= self.embedding.num_embeddings:
                rule = f"tokens from 0 to input_size - 1 = {self.embedding.num_embeddings - 1}"
                fix = "map unknown tokens to a token of the vocabulary, or build the encoder with a larger input_size"
                raise ArgumentError(message("batch", f"tokens from {lowest} to {highest}", rule, fix))
        return batch.map(self.embedding)


def _layer_class(layer: Any, layer_norm: bool) -> Callable[..., RecurrentLayer]:
    """The class or function that makes the recurrent layer."""
    known = _NORMALISED if layer_norm else LAYERS
    if isinstance(layer, str) and layer in known:
        return known[layer]
    if callable(layer) and not layer_norm and not isinstance(layer, nn.Module):
        return layer  # type: ignore[no-any-return]
    if layer_norm:
        rule = f"one of {', '.join(known)} with layer_norm"
        raise ArgumentError(message("layer", repr(layer), rule, "choose one of them, or leave layer_norm out"))
    rule = f"one of {', '.join(known)}, or a function that builds a layer, such as a class of rl.nn"
    raise ArgumentError(message("layer", repr(layer), rule, "choose one of them"))


def _made(make: Callable[..., Any], width: int, hidden_size: int, **options: Any) -> RecurrentLayer:
    """The recurrent layer."""
    rule = "a function that builds a layer of rl.nn from (input_size, hidden_size, **options)"
    check_signature("layer", make, rule, width, hidden_size, **options)
    layer = make(width, hidden_size, **options)
    if not isinstance(layer, RecurrentLayer):
        got = f"a function that returns a {type(layer).__module__}.{type(layer).__name__}"
        raise ArgumentTypeError(message("layer", got, rule, f"choose one of {', '.join(LAYERS)}, or a class of rl.nn"))
    return layer
