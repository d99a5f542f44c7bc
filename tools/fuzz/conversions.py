"""Conversions that die wherever they can, and what the same call makes of it: the bytes of one that nobody disturbed.

Files of four formats are converted, some of their rows bad. A round lets the conversion get SIGKILL, at a call of the
file system or at a moment that is drawn; now and then the one that goes on gets it, too. Then the conversion is called
again, and all files are compared, byte for byte; nothing else may be left beside them.

    python -m fuzz.conversions 100 1
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from fuzz.kill_points import ended
from fuzz.runs import same
from processes import CONTEXT
from raglane.data import Columns, convert
from small_files import small_steps

__all__ = ["Yard", "main"]

_COLUMNS = Columns(sequence="x", label="kind", id="id")


class Yard:
    """A folder with data, and what a conversion makes of it that nobody disturbs.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.output = folder, folder / "out"
        rows = [
            {"id": f"s{row}", "x": [[row + step / 8, -1.0] for step in range(row % 5)], "kind": "ab"[row % 2]}
            for row in range(60)
        ]
        lines = [json.dumps(row) if place % 7 else "{" for place, row in enumerate(rows)]
        (folder / "a.jsonl").write_text("\n".join(lines))
        table = pa.Table.from_pylist([{**row, "kind": None if row["id"] == "s33" else row["kind"]} for row in rows])
        pq.write_table(table, folder / "b.parquet", row_group_size=25)
        with pa.OSFile(str(folder / "c.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table, max_chunksize=20)
        self.inputs = [folder / name for name in ("a.jsonl", "b.parquet", "c.arrow")]
        self.convert()
        self.whole = self.contents()
        assert len(self.whole) > 20, "too few shards to attack"

    def convert(self) -> None:
        """The attacked call."""
        _convert(self.inputs, self.output)

    def contents(self) -> dict[str, bytes]:
        """What stands in the output."""
        return {str(path.relative_to(self.output)): path.read_bytes() for path in self.output.rglob("*")}

    def clear(self) -> None:
        """Nothing converted yet."""
        for path in (self.output, self.folder / ".out.converting"):
            shutil.rmtree(path, ignore_errors=True)

    def calls(self) -> int:
        """How many calls of the file system a conversion makes."""
        self.clear()
        with ended(self.folder, 0, "die") as calls:
            self.convert()
        return calls()

    def killed(self, moment: float) -> None:
        """Let a conversion get SIGKILL: at a call, counted from 1; below 1 after so many seconds."""
        process = CONTEXT.Process(target=_convert_until, args=(self.inputs, self.output, int(moment)), daemon=True)
        process.start()
        process.join(moment if moment < 1 else 60)
        process.kill()
        process.join()

    def check(self) -> None:
        """Convert again, and compare.

        Raises:
            AssertionError: something is lost, differs or is left.
        """
        self.convert()
        same(self.contents(), self.whole, "not the same")
        left = sorted(path.name for path in self.folder.iterdir())
        assert left == ["a.jsonl", "b.parquet", "c.arrow", "out"], left


def _convert(inputs: list[Path], output: Path) -> None:
    with small_steps():
        convert(inputs, output, _COLUMNS, on_bad_row="skip")


def _convert_until(inputs: list[Path], output: Path, moment: int) -> None:
    """What that process does: a call of the file system is its last."""
    if moment < 1:
        _convert(inputs, output)
        return
    real: Callable[..., Any] = os.kill

    class _Killed(BaseException):
        def __init__(self) -> None:
            real(os.getpid(), signal.SIGKILL)

    import fuzz.kill_points

    fuzz.kill_points.Died = _Killed  # type: ignore[misc,assignment]
    with ended(output.parent, moment, "die"):
        _convert(inputs, output)


def main(rounds: int = 100, seed: int = 1) -> int:
    """Attack so often, with what a seed draws, until something is lost, and print that.

    Args:
        rounds: how many conversions are killed.
        seed: of the moments.

    Returns:
        1 where something was lost, else 0.
    """
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        yard = Yard(Path(folder).resolve())
        calls = yard.calls()
        for number in range(rounds):
            moments = [draw.choice([draw.randint(1, calls), draw.random() / 2]) for _ in range(draw.choice([1, 1, 2]))]
            yard.clear()
            try:
                for moment in moments:
                    yard.killed(moment)
                yard.check()
            except AssertionError as error:
                print(f"python -m fuzz.conversions {number + 1} {seed}: killed at {moments}: {error}")
                return 1
    print(f"conversions: {rounds} rounds of seed {seed}, {calls} calls to die at, nothing lost")
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
