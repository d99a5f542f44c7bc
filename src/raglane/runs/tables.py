"""Predictions for tables, in the worker processes of Spark, Dask or Ray."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from raglane._utils.json import finite
from raglane._utils.messages import require
from raglane.data.sources.frames import of_frame
from raglane.errors import ArgumentTypeError
from raglane.training.own_cell import named_code, take_code

# The runs that this process has loaded, by folder or by SHA-256 of the pickle.
_RUNS: dict[str, Any] = {}


class TablePredictor:
    """A function from a table of sequences to a table of predictions, which can be sent to other
    processes.

    Its pickle contains the path of the run's folder, or the model if the run is in memory. Each
    process loads the model once for all tables and copies of this function. On a CPU the
    predictions of a sequence have the same bits in any table.

    Args:
        run: the :class:`raglane.Run` that predicts.
        load: :func:`raglane.load`, for the other processes.
        options: of :meth:`raglane.Run.predict`.

    Example:
        >>> import raglane as rl
        >>> import pandas as pd
        >>> walks = pd.DataFrame({"walk": [[0.1, 0.5, 0.9], [0.9, 0.4], [0.2, 0.7]], "kind": ["up", "down", "up"]})
        >>> run = rl.fit(walks, epochs=60, hidden_size=8, lr=0.05, validation_fraction=0)
        >>> predict_batch = run.predictor()
        >>> predict_batch(walks[1:]).prediction.tolist()
        ['down', 'up']
    """

    def __init__(self, run: Any, load: Callable[[str], Any], **options: Any) -> None:
        self.options = options
        self._load = load
        if run.folder is not None:
            self._source: Any = str(run.folder.absolute())
            self._key = self._source
            self._code = named_code(run.model.config.cell)
        else:
            self._source = pickle.dumps(run)
            self._key = hashlib.sha256(self._source).hexdigest()
        _RUNS.setdefault(self._key, run)

    @property
    def run(self) -> Any:
        """The :class:`raglane.Run`, loaded at the first use in a process.

        Raises:
            CheckpointError: the folder of the run is missing or damaged.
        """
        if self._key not in _RUNS:
            if isinstance(self._source, str):
                take_code(self._code)
                _RUNS[self._key] = self._load(self._source)
            else:
                _RUNS[self._key] = pickle.loads(self._source)
        return _RUNS[self._key]

    def __call__(self, table: Any) -> Any:
        """Return the predictions for a table.

        Args:
            table: a table of pandas, polars or Arrow (a table or a record batch) with one row per
                sequence, or a dict of columns.

        Returns:
            A table of the same type with one row per sequence, in the same order; of pandas with
            the same index. Its columns are those of :meth:`raglane.Run.predict`, with ``id`` only
            if the table has IDs.

        Raises:
            ArgumentTypeError: not a table.
            DataError: the table does not fit the model.
        """
        arrow = require("pyarrow", "data")
        rows = _as_arrow(table, arrow)
        if rows.num_rows == 0:
            # Predict one sequence of one element for the types of the columns.
            preprocess = self.run.preprocessor
            example = (
                ["a"]
                if preprocess.is_tokens
                else np.zeros((1, len(preprocess.channels)), np.float32)
            )
            return _like(
                table, self._predict(self.run.read([example], need_labels=False), arrow).slice(0, 0)
            )
        records = self.run.read(rows, need_labels=False)
        if len(records) != rows.num_rows:
            got = f"{len(records)} sequences in {rows.num_rows} rows"
            fix = "gather the elements of a sequence into a list"
            raise ArgumentTypeError("table", got, "a table with one sequence per row", fix)
        return _like(table, self._predict(records, arrow))

    def _predict(self, records: Any, arrow: Any) -> Any:
        columns = finite(self.run.predict(records, **self.options).columns)
        if not records.has_ids:
            del columns["id"]
        return arrow.table({name: arrow.array(values) for name, values in columns.items()})


def _as_arrow(table: Any, arrow: Any) -> Any:
    """Return a table as a ``pyarrow.Table``."""
    try:
        if isinstance(table, dict):
            wide = {
                name: column.tolist()
                for name, column in table.items()
                if getattr(column, "ndim", 1) > 1
            }
            return arrow.table(table | wide)
        if hasattr(table, "iloc"):
            return of_frame(table.reset_index(drop=True))
        return arrow.table(table)
    except (arrow.ArrowException, TypeError, ValueError) as error:
        rule = "a table of pandas, polars or Arrow, or a dict of columns"
        raise ArgumentTypeError(
            "table", f"a {type(table).__name__}", rule, "pass one of these"
        ) from error


def _like(table: Any, answers: Any) -> Any:
    """Convert answers to the type of a table."""
    if isinstance(table, dict):
        return answers.to_pydict()
    if hasattr(table, "iloc"):
        return answers.to_pandas().set_index(table.index)
    if type(table).__module__.split(".")[0] == "polars":
        return type(table)(answers)
    return answers
