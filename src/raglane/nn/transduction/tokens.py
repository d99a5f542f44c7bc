"""Sequences of tokens: their checks, and the base of the modules that read them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raglane._utils.checks import check_count, check_dropout, check_dtype, check_fits, check_kind
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn.encoder import layer_class, recurrent_layer
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.ragged import Ragged


def as_tokens(name: str, sequences: Any, count: int | None = None) -> Ragged:
    """Return sequences of integers, from 0 to ``count - 1`` with a count, as int64 on the CPU."""
    batch = sequences if isinstance(sequences, Ragged) else None
    if isinstance(sequences, (list, tuple)):
        batch = Ragged(list(sequences))
    if batch is not None and batch.values.numel() == 0:
        return Ragged.from_flat(
            torch.zeros(0, dtype=torch.int64, device="cpu"), lengths=batch.lengths_cpu
        )
    is_real = batch is not None and (batch.dtype.is_floating_point or batch.dtype.is_complex)
    if batch is None or is_real or batch.dtype is torch.bool or batch.values.dim() != 1:
        got = (
            type(sequences).__name__
            if batch is None
            else f"{batch.dtype}, elements of shape {tuple(batch.feature_shape)}"
        )
        rule = "a Ragged of tokens, (N,) of an integer dtype"
        fix = "wrap them with rl.Ragged(list_of_tokens)"
        raise ArgumentTypeError(name, got, rule, fix)
    values = batch.values.detach().to("cpu", torch.int64).contiguous()
    if count is not None:
        lowest, highest = map(int, values.aminmax())
        if lowest < 0 or highest >= count:
            got = f"token {lowest if lowest < 0 else highest}"
            raise ArgumentError(
                name, got, f"tokens from 0 to {count - 1}", "check how tokens are numbered"
            )
    return Ragged.from_flat(values, lengths=batch.lengths_cpu)


class TokenReader(nn.Module):
    """The base of decoders: an embedding, and a recurrent layer that reads ``more`` numbers too."""

    def __init__(
        self,
        num_tokens: int,
        hidden_size: int,
        cell: str | Callable[..., RecurrentLayer],
        embedding: int | None,
        dropout: float,
        num_layers: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        options: dict[str, Any],
        more: int = 0,
    ) -> None:
        super().__init__()
        check_dtype(dtype)
        self.num_tokens = check_count("num_tokens", num_tokens)
        self.hidden_size = check_count("hidden_size", hidden_size)
        width = hidden_size if embedding is None else check_count("embedding", embedding)
        self.dropout = nn.Dropout(check_dropout(dropout))
        self.embedding = nn.Embedding(num_tokens, width, device=device, dtype=dtype)
        if device is not None:
            options["device"] = device
        if dtype is not None:
            options["dtype"] = dtype
        options["num_layers"] = check_count("num_layers", num_layers)
        options["dropout"] = dropout if num_layers != 1 else 0.0
        self.recurrent = recurrent_layer(
            layer_class(cell, layer_norm=False), width + more, hidden_size, **options
        )
        if self.recurrent.bidirectional:
            rule = "a layer of one direction, because later tokens are unknown"
            fix = "leave bidirectional out"
            raise ArgumentTypeError("cell", "a bidirectional layer", rule, fix)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.dropout(self.embedding(tokens))

    def _check_elements(self, name: str, batch: Any, size: str) -> None:
        """Raise unless elements of a Ragged have the number of features of the attribute ``size``."""
        check_kind(name, batch, Ragged, "a Ragged", "wrap a list of sequences with rl.Ragged")
        if batch.values.dim() != 2 or batch.values.shape[1] != getattr(self, size):
            got = f"elements of shape {tuple(batch.feature_shape)}"
            rule = f"{size} = {getattr(self, size)} features"
            raise ShapeError(name, got, rule, "pass an encoder's output of this size")
        check_fits(name, batch.values, self.embedding.weight)
