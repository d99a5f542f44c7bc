"""Predictions for Parquet files on a Ray cluster: Ray Data distributes blocks of rows to actors
that hold the model.

The files alone determine the blocks. Each block becomes one file with a fixed name, written
atomically, so the output has the same bytes for any number of workers. The block of a lost worker
is predicted again, and written once.
"""

from __future__ import annotations

import glob
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from raglane._utils.files import check_writable, put_folder, write_file
from raglane._utils.messages import quote, require
from raglane.errors import ArgumentError, DataError, RaglaneError
from raglane.runs.run import Run
from raglane.runs.tables import TablePredictor
from raglane.training.predictions import parquet_bytes
from raglane.training.ranks.ray_workers import check_machines, connected

# The most rows of a block that has several row groups; a row group is never split.
_ROWS = 16_384


class RowGroups(NamedTuple):
    """A range of row groups of a file, with the index of its first row over all files."""

    path: str
    groups: tuple[int, int]
    first: int
    rows: int


def predict_on_ray(
    run: Run, data: str, output: Path, workers: int | None = None, **options: Any
) -> int:
    """Write predictions for Parquet files to a folder, and return the number of rows."""
    if os.path.lexists(output):
        raise ArgumentError("output", quote(str(output)), "a new folder", "name another folder")
    check_writable("output", output)
    blocks = list(_blocks(data))
    ray = connected()
    require("ray.data", "ray")
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = 0
    partial = output.with_name(f".{output.name}.partial").absolute()
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        check_machines(ray, partial, "output")
        rows = [{"block": number} for number in range(len(blocks))]
        strategy = ray.data.ActorPoolStrategy(
            size=workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        )
        done = (
            ray.data.from_items(rows, override_num_blocks=len(rows))
            .map_batches(
                _Worker,
                fn_constructor_args=(run.predictor(**options), tuple(blocks), str(partial)),
                compute=strategy,
                batch_size=1,
                num_cpus=1,
            )
            .take_all()
        )
        _check(done, len(blocks))
        put_folder(partial, output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sum(block.rows for block in blocks)


def _blocks(data: str) -> Iterator[RowGroups]:
    """Yield the blocks of the files, in the order of the file names."""
    parquet = require("pyarrow.parquet", "data")
    arrow = require("pyarrow", "data")
    paths = sorted(
        glob.glob(os.path.join(data, "*.parquet")) if os.path.isdir(data) else glob.glob(data)
    )
    if not paths:
        fix = "name Parquet files, or a folder of them; raglane predict without --engine reads other formats"
        raise DataError("data", f"{quote(data)}", "the path of at least one Parquet file", fix)
    before = 0
    for path in paths:
        try:
            metadata = parquet.read_metadata(path)
        except (arrow.ArrowException, OSError) as error:
            got = "a damaged file, or another format"
            raise DataError(path, got, "a Parquet file", "copy it again, or convert it") from error
        begin = 0
        rows = 0
        for group in range(metadata.num_row_groups):
            count = metadata.row_group(group).num_rows
            if rows and rows + count > _ROWS:
                yield RowGroups(os.path.abspath(path), (begin, group), before, rows)
                begin = group
                before = before + rows
                rows = 0
            rows += count
        yield RowGroups(os.path.abspath(path), (begin, metadata.num_row_groups), before, rows)
        before += rows


class _Worker:
    """A Ray actor that holds the model."""

    def __init__(
        self, predictor: TablePredictor, blocks: tuple[RowGroups, ...], folder: str
    ) -> None:
        self._predictor = predictor
        self._blocks = blocks
        self._folder = Path(folder)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Predict blocks; return their numbers, and for each an error message or ''."""
        numbers = [int(index) for index in batch["block"]]
        return {
            "block": np.array(numbers),
            "error": np.array([self._predict(index) for index in numbers], dtype=object),
        }

    def _predict(self, index: int) -> str:
        path = self._folder / f"part-{index:05d}.parquet"
        if path.exists():
            # A worker wrote it before it was lost.
            return ""
        block = self._blocks[index]
        try:
            write_file(path, _predictions(self._predictor, block))
        except RaglaneError as error:
            return f"{block.path}, rows from {block.first}: {error}"
        return ""


def _predictions(predictor: TablePredictor, block: RowGroups) -> bytes:
    """Return the predictions for a block as a Parquet file."""
    arrow = require("pyarrow", "data")
    parquet = require("pyarrow.parquet", "data")
    with parquet.ParquetFile(block.path) as file:
        table = file.read_row_groups(list(range(*block.groups)))
    # Sort by length for backends that pad. The batches do not affect the bits of a prediction.
    order = np.argsort(-_lengths(table), kind="stable")
    answers = predictor(table.take(order)).take(np.argsort(order, kind="stable"))
    if "id" not in answers.column_names:
        answers = answers.add_column(
            0, "id", arrow.array(np.arange(block.first, block.first + len(answers)))
        )
    return parquet_bytes(answers.combine_chunks())


def _lengths(table: Any) -> Any:
    """Return the lengths of the first column of lists or texts; zeros without one."""
    types = require("pyarrow", "data").types
    compute = require("pyarrow.compute", "data")
    for field in table.schema:
        is_list = types.is_list(field.type) or types.is_large_list(field.type)
        if is_list or types.is_string(field.type):
            column = table[field.name]
            lengths = compute.list_value_length(column) if is_list else compute.utf8_length(column)
            return compute.fill_null(lengths, 0).to_numpy()
    return np.zeros(table.num_rows, np.int64)


def _check(done: list[dict[str, Any]], count: int) -> None:
    """Raise if a block failed or is missing."""
    failed = sorted((row["block"], row["error"]) for row in done if row["error"])
    if failed:
        raise DataError(str(failed[0][1]))
    missing = set(range(count)) - {int(row["block"]) for row in done}
    if missing:
        got = f"no result for {len(missing)} of {count} blocks"
        raise DataError("engine", got, "one result per block", "run the command again")
