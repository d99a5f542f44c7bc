"""Texts cut into tokens, and tokens joined to texts again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import message, quote, require
from raglane.errors import ArgumentError

SPLITS = ("words", "characters", "bytes")
"""How texts can be cut; the name of a tokenizer file of Hugging Face, which ends in ``.json``, is a fourth way."""


def check_split(split: str) -> None:
    """Raise unless texts can be cut in this way."""
    if split in SPLITS or (split.endswith(".json") and Path(split).is_file()):
        return
    got = quote(split) + (", and no such file" if split.endswith(".json") else "")
    rule = f"one of {', '.join(SPLITS)}, or a tokenizer file of Hugging Face (tokenizer.json)"
    raise ArgumentError(message("split", got, rule, "pass e.g. characters"))


def split_texts(texts: Sequence[str], split: str) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.int64]]:
    """Cut texts into tokens."""
    if split == "words":
        parts: list[Any] = [text.split() for text in texts]
    elif split == "characters":
        parts = [list(text) for text in texts]
    elif split == "bytes":
        parts = [list(text.encode().decode("latin-1")) for text in texts]
    else:
        parts = [encoded.tokens for encoded in _tokenizer(split).encode_batch(list(texts), add_special_tokens=False)]
    lengths = np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))
    tokens = np.empty(int(lengths.sum()), dtype=object)
    tokens[:] = [token for part in parts for token in part]
    return tokens, lengths


def join_tokens(tokens: Sequence[str], split: str | None) -> str:
    """The text of some tokens."""
    if split == "characters":
        return "".join(tokens)
    if split == "bytes":
        return "".join(tokens).encode("latin-1", errors="replace").decode(errors="replace")
    if split in (None, "words"):
        return " ".join(tokens)
    decoder = _tokenizer(split).decoder
    return " ".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))


def characters_in(tokens: Sequence[str], texts: int, split: str | None) -> int | None:
    """How many characters some texts have, with the break at the end of each line."""
    if split == "characters":
        return len(tokens) + texts
    if split == "bytes":
        # Those that go on with a character of UTF-8 begin with the bits 10.
        return sum(ord(token) & 0xC0 != 0x80 for token in tokens) + texts
    # A word ends in a space, or with the line.
    return sum(map(len, tokens)) + len(tokens) if split == "words" else None


def _tokenizer(path: str | None) -> Any:
    tokenizers = require("tokenizers", "text")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        got = f"{quote(path)} ({' '.join(str(error).split())[:100]})"
        raise ArgumentError(message("split", got, "a readable tokenizer file", "write it again")) from error
