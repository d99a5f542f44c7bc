"""Conversions that are killed: the next call must give the bytes of an undisturbed conversion.

Files of three formats are converted, with some bad rows. In each round a conversion gets SIGKILL,
at a call of the file system or after a random time; in some rounds the conversion that continues is
killed too. Then the conversion is called again. All files must be equal, byte for byte, and nothing
else may be left in the folder.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa

from commands import tree
from fuzz.crashes import ended, kill_after, same
from raglane.data import Columns, convert
from small_files import small_steps, write_table

_COLUMNS = Columns(sequence="x", label="kind", id="id")


class Yard:
    """An empty folder that gets input files and the result of an undisturbed conversion."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "out"
        rows = [
            {
                "id": f"s{row}",
                "x": [[row + step / 8, -1.0] for step in range(row % 5)],
                "kind": "ab"[row % 2],
            }
            for row in range(60)
        ]
        lines = [json.dumps(row) if place % 7 else "{" for place, row in enumerate(rows)]
        (folder / "a.jsonl").write_text("\n".join(lines))
        table = pa.Table.from_pylist(
            [{**row, "kind": None if row["id"] == "s33" else row["kind"]} for row in rows]
        )
        write_table(folder / "b.parquet", table, 25)
        write_table(folder / "c.arrow", table, 20)
        with ended(folder, 0, "die") as calls:
            self.convert()
        self.calls = calls()
        self.whole = tree(self.output)
        assert len(self.whole) > 20, "too few shards"

    def convert(self) -> None:
        _convert(self.folder, 0)

    def clear(self) -> None:
        """Remove all converted files."""
        for path in (self.output, self.folder / ".out.converting"):
            shutil.rmtree(path, ignore_errors=True)

    def kill(self, moment: float) -> None:
        """Kill a conversion at a call, counted from 1; below 1: after that many seconds."""
        kill_after(moment if moment < 1 else 60, _convert, self.folder, int(moment))

    def check(self) -> None:
        """Convert again; raise an AssertionError if files are lost, differ or are left."""
        self.convert()
        same(tree(self.output), self.whole, "not the same")
        left = sorted(path.name for path in self.folder.iterdir())
        assert left == ["a.jsonl", "b.parquet", "c.arrow", "out"], left

    def play(self, number: int) -> None:
        draw = random.Random(number)
        self.clear()
        for _ in range(draw.choice([1, 1, 2])):
            self.kill(draw.choice([draw.randint(1, self.calls), draw.random() / 2]))
        self.check()


def _convert(folder: Path, moment: int) -> None:
    """Convert the files, and kill this process at a call if one is given."""
    inputs = [folder / name for name in ("a.jsonl", "b.parquet", "c.arrow")]
    with small_steps(), ended(folder, moment, "kill") if moment else nullcontext():
        convert(inputs, folder / "out", _COLUMNS, on_bad_row="skip")


def start(folder: Path) -> Callable[[int], None]:
    return Yard(folder).play
