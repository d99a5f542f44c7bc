"""Texts cut into bytes, characters and words, against Python's own."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from raglane.data import Columns, convert, read
from raglane.data.splitting import SPLITS, characters_in, join_tokens, split_texts

# Characters of one to four bytes, one made of two, and none.
_TEXTS = ["to be", "\u00e9", "a\u0301b", "\u65e5\u672c \U0001f600", "", " x  y "]


def test_texts_are_cut_into_what_was_named() -> None:
    wanted = {
        "words": [text.split() for text in _TEXTS],
        "characters": [list(text) for text in _TEXTS],
        "bytes": [[chr(byte) for byte in text.encode()] for text in _TEXTS],
    }
    for split in SPLITS:
        tokens, lengths = split_texts(_TEXTS, split)
        assert lengths.tolist() == list(map(len, wanted[split])), split
        assert tokens.tolist() == list(chain.from_iterable(wanted[split])), split
        for text, part in zip(_TEXTS, wanted[split], strict=True):
            assert join_tokens(part, split) == (" ".join(text.split()) if split == "words" else text)
            if split != "words":
                # With the break at the end of the line.
                assert characters_in(part, 1, split) == len(text) + 1


def test_bytes_of_every_format_are_those_of_utf8(tmp_path: Path) -> None:
    texts = [text for text in _TEXTS if text.strip()]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("\n".join(map(str.strip, texts)), encoding="utf-8")
    pq.write_table(pa.table({"text": list(map(str.strip, texts)), "y": ["a"] * len(texts)}), tmp_path / "a.parquet")
    wanted = [[chr(byte) for byte in text.strip().encode()] for text in texts]
    for path, sequence in ((tmp_path / "texts", None), (tmp_path / "a.parquet", "text")):
        columns = Columns(sequence=sequence, split="bytes")
        for records in (read(path, columns), read(convert(path, tmp_path / f"{path.stem}.out", columns).folder)):
            assert records.lengths.tolist() == list(map(len, wanted))
            assert records.values.tolist() == list(chain.from_iterable(wanted))
