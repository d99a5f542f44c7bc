"""Predictions table by table, in the processes of Spark, Dask, Ray or whoever else holds a large table in parts."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from raglane._utils.messages import message, require
from raglane.errors import ArgumentTypeError
from raglane.training.own_cell import named_code, take_code
from raglane.training.stored import finite

# The runs that this process has read, by what a predictor calls them.
_RUNS: dict[str, Any] = {}


class TablePredictor:
    """A function from a table of sequences to a table of predictions, which can be sent to other processes.

    It is pickled as the folder of its run, or as the model where that is in memory alone. Each process reads the model
    once, however many tables and copies of this function come to it. On a CPU a sequence has the same predictions, bit
    for bit, in whatever table it comes.

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
        self.options, self._load = options, load
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
        """What predicts, read at the first call in a process.

        Raises:
            CheckpointError: the folder of the run is not there, or damaged.
        """
        if self._key not in _RUNS:
            source = self._source
            if isinstance(source, str):
                take_code(self._code)
                _RUNS[self._key] = self._load(source)
            else:
                _RUNS[self._key] = pickle.loads(source)
        return _RUNS[self._key]

    def __call__(self, table: Any) -> Any:
        """The predictions for a table.

        Args:
            table: of pandas, polars or Arrow (a table or a record batch), a row per sequence; or a dict of columns.

        Returns:
            A table of the same kind, with a row for each of its rows, in their order, and of pandas with their index.
            It has the columns of :meth:`raglane.Run.predict`; ``id`` only where the table names its sequences.

        Raises:
            ArgumentTypeError: not a table.
            DataError: the table does not fit the model.
        """
        arrow = require("pyarrow", "data")
        rows = _as_arrow(table, arrow)
        if rows.num_rows == 0:
            # As many columns as ever, of the same kinds.
            return _like(table, self._columns(self._made_up(), arrow).slice(0, 0))
        records = self.run.read(rows, need_labels=False)
        if len(records) != rows.num_rows:
            got = f"{len(records)} sequences in {rows.num_rows} rows"
            fix = "gather the elements of a sequence into a list"
            raise ArgumentTypeError(message("table", got, "a table with one sequence per row", fix))
        return _like(table, self._columns(records, arrow))

    def _columns(self, records: Any, arrow: Any) -> Any:
        columns = finite(self.run.predict(records, **self.options).columns)
        if records.ids is None:
            del columns["id"]
        return arrow.table({name: arrow.array(values) for name, values in columns.items()})

    def _made_up(self) -> Any:
        """A sequence of one element, for the kinds of the columns."""
        preprocess = self.run.preprocess
        if preprocess.is_tokens:
            return self.run.read([["a"]], need_labels=False)
        return self.run.read([np.zeros((1, len(preprocess.channels)), np.float32)], need_labels=False)


def _as_arrow(table: Any, arrow: Any) -> Any:
    """A ``pyarrow.Table``."""
    try:
        if isinstance(table, dict):
            return arrow.table({name: _as_lists(column) for name, column in table.items()})
        if isinstance(table, arrow.RecordBatch):
            return arrow.Table.from_batches([table])
        if hasattr(table, "iloc"):
            return arrow.Table.from_pandas(table, preserve_index=False)
        return arrow.table(table)
    except (arrow.ArrowException, TypeError, ValueError) as error:
        rule = "a table of pandas, polars or Arrow, or a dict of columns"
        raise ArgumentTypeError(message("table", f"a {type(table).__name__}", rule, "pass one of these")) from error


def _as_lists(column: Any) -> Any:
    return column.tolist() if isinstance(column, np.ndarray) and column.ndim > 1 else column


def _like(given: Any, answers: Any) -> Any:
    """A table of answers, of the kind that was given."""
    if isinstance(given, dict):
        return answers.to_pydict()
    if hasattr(given, "iloc"):
        return answers.to_pandas().set_index(given.index)
    if type(given).__module__.split(".")[0] == "polars":
        return type(given)(answers)
    return answers
