"""A function from tables to tables of predictions: kinds, order, bits, processes, and what is no
table of sequences.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow
import pytest

import raglane as rl
from raglane.errors import ArgumentTypeError, CheckpointError, DataError
from raglane.runs import tables


@pytest.fixture(scope="module")
def table() -> Any:
    """Walks with their names."""
    random = np.random.default_rng(1)
    walks = [random.normal(size=random.integers(1, 9)).tolist() for _ in range(30)]
    kinds = ["up" if sum(walk) > 0 else "down" for walk in walks]
    return pd.DataFrame(
        {"id": [f"w{number}" for number in range(30)], "walk": walks, "kind": kinds}
    )


def test_tables_of_all_kinds_and_in_any_parts(table: Any, tmp_path: Path) -> None:
    run = rl.fit(table, epochs=2, hidden_size=4, threads=1, output=tmp_path / "run")
    predict_batch = run.predictor(probabilities=True)
    whole = run.predict(table, probabilities=True)
    arrow = pyarrow.Table.from_pandas(table, preserve_index=False)
    for given, columns in (
        (table.drop(columns="kind"), lambda found: found.to_dict("list")),
        *((given, lambda found: found.to_pydict()) for given in (arrow, arrow.to_batches()[0])),
        (pl.from_pandas(table), lambda found: found.to_dict(as_series=False)),
        (table.to_dict("list"), dict),
    ):
        assert columns(predict_batch(given)) == whole.columns, type(given)
    parts = pd.concat([predict_batch(table[start : start + 7]) for start in range(0, 30, 7)])
    assert parts.to_dict("list") == whole.columns
    assert parts.index.equals(table.index)
    assert (
        predict_batch(table.sample(frac=1, random_state=3)).loc[table.index].to_dict("list")
        == whole.columns
    )
    nothing = predict_batch(table.head(0))
    assert (len(nothing), nothing.columns.tolist()) == (
        0,
        [name for name in whole.columns if name != "id"],
    )


def test_a_process_reads_the_model_once(
    table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rl.fit(table, epochs=1, hidden_size=4, threads=1)
    run.save(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for one in (rl.load("model"), run):
        sent = pickle.dumps(one.predictor())
        monkeypatch.chdir(tmp_path.parent)
        assert len(sent) < 500 or one is run
        monkeypatch.setattr(tables, "_RUNS", {})
        first, second = pickle.loads(sent), pickle.loads(sent)
        assert first(table).equals(second(table))
        assert first.run is second.run
    from_folder = pickle.dumps(rl.load(tmp_path / "model").predictor())
    (tmp_path / "model" / "weights.safetensors").unlink()
    monkeypatch.setattr(tables, "_RUNS", {})
    with pytest.raises(CheckpointError, match="weights"):
        pickle.loads(from_folder)(table)


def test_tables_without_sequences_are_refused(table: Any) -> None:
    predict_batch = rl.fit(table, epochs=1, hidden_size=4, threads=1).predictor()
    for given in (3, "walks.csv", [[0.1, 0.2]], {"walk": [[0.1], [0.2]], "id": ["a"]}):
        with pytest.raises(ArgumentTypeError, match="table"):
            predict_batch(given)
    with pytest.raises(DataError, match="no column 'walk'"):
        predict_batch(table.drop(columns="walk"))
    texts, pairs = table.assign(walk="c d"), table.assign(more=table.walk)
    for one, columns in ((texts, {"sequence": "walk"}), (pairs, {"features": ["walk", "more"]})):
        assert (
            len(rl.fit(one, epochs=1, hidden_size=4, threads=1, **columns).predictor()(one.head(0)))
            == 0
        )
