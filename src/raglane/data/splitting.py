"""Split texts into tokens, and join tokens into texts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from raglane._utils.messages import quote, require
from raglane.errors import ArgumentError

SPLITS = ("words", "characters", "bytes")
"""The built-in ways to split texts; another is a tokenizer file of Hugging Face, whose name ends in
``.json``."""


def check_split(split: str, name: str = "split") -> None:
    """Raise unless ``split`` is one of ``SPLITS`` or an existing tokenizer file."""
    if split in SPLITS or (split.endswith(".json") and Path(split).is_file()):
        return
    got = quote(split) + (", and no such file" if split.endswith(".json") else "")
    rule = f"one of {', '.join(SPLITS)}, or a tokenizer file of Hugging Face (tokenizer.json)"
    raise ArgumentError(name, got, rule, "pass e.g. characters")


def split_texts(
    texts: Sequence[str], split: str
) -> tuple[npt.NDArray[np.object_], npt.NDArray[np.int64]]:
    """Split texts; return the tokens of all, ``(N,)`` object, and the number of tokens of each
    text.
    """
    if split == "words":
        tokens: list[Any] = [text.split() for text in texts]
    elif split == "characters":
        tokens = [list(text) for text in texts]
    elif split == "bytes":
        tokens = [list(text.encode().decode("latin-1")) for text in texts]
    else:
        tokens = [
            encoded.tokens
            for encoded in _tokenizer(split).encode_batch(list(texts), add_special_tokens=False)
        ]
    lengths = np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens))
    flat = np.empty(int(lengths.sum()), dtype=object)
    flat[:] = list(chain.from_iterable(tokens))
    return flat, lengths


def join_tokens(tokens: Sequence[str], split: str | None) -> str:
    """Join tokens into a text."""
    if split == "characters":
        return "".join(tokens)
    if split == "bytes":
        return "".join(tokens).encode("latin-1", errors="replace").decode(errors="replace")
    if split in (None, "words"):
        return " ".join(tokens)
    decoder = _tokenizer(split).decoder
    return " ".join(tokens) if decoder is None else str(decoder.decode(list(tokens)))


def characters_in(tokens: Sequence[str], texts: int, split: str | None) -> int | None:
    """Return the number of characters of some texts, with a line break after each; None for a
    tokenizer file.
    """
    if split == "characters":
        return len(tokens) + texts
    if split == "bytes":
        # The second and later bytes of a UTF-8 character begin with the bits 10.
        return sum(ord(token) & 0xC0 != 0x80 for token in tokens) + texts
    # A space or a line break follows each word.
    return sum(map(len, tokens)) + len(tokens) if split == "words" else None


def _tokenizer(path: str | None) -> Any:
    tokenizers = require("tokenizers", "text")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        got = f"{quote(path)} ({' '.join(str(error).split())[:100]})"
        raise ArgumentError("split", got, "a readable tokenizer file", "write it again") from error
