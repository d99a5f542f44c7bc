"""A small Arrow table with a column of every kind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq


def small_table(rows: int = 40) -> pa.Table:
    chance = np.random.default_rng(3)
    words = [["abcde"[place] for place in chance.integers(0, 5, row * 7 % 5)] for row in range(rows)]
    return pa.table(
        {
            "words": words,
            "tags": [[word.upper() for word in row] for row in words],
            "x": [[[float(row), step, -1.5] for step in range(len(words[row]))] for row in range(rows)],
            "text": [" ".join(row) for row in words],
            "kind": ["uvw"[row % 3] for row in range(rows)],
            "name": [f"n{row}" for row in range(rows)],
            "total": [row / 3 for row in range(rows)],
            "two": [[row / 7, -float(row)] for row in range(rows)],
            "each": [[row / 5 + step for step in range(len(words[row]))] for row in range(rows)],
            "kinds": [["a", "b", "c"][: row % 4] for row in range(rows)],
            "sets": [[[word, "z"][: step % 3] for step, word in enumerate(row)] for row in words],
        }
    )


def written(table: pa.Table, folder: Path) -> Path:
    pq.write_table(table, path := folder / "a.parquet")
    return path
