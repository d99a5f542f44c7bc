"""Streams of a stored run have the bits of ``run.predict``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow
import pytest
import torch

import raglane as rl
from made_datasets import dataset
from raglane.data.records import offsets_of
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError, ShapeError
from raglane.serve import Engine

RNG = np.random.default_rng(0)
SERIES = [(5 * RNG.normal(size=(n, 2)) + 3).astype(np.float32) for n in (4, 9, 1, 8)] * 3
HOLES = [np.where(RNG.random(part.shape) < 0.3, np.nan, part).astype(np.float32) for part in SERIES]
LABELS = ["a", "b", "a", "c"] * 3
TEXTS = ["ab ba ab", "b a", "ab ab ab ab"] * 4
TAGS = [["x" if number > 3 else "y" for number in part[:, 0]] for part in SERIES]


def fit(data: Any, labels: Any = None, **options: Any) -> rl.Run:
    return rl.fit(data, labels, epochs=1, hidden_size=8, validation_fraction=0, **options)


def served(engine: Engine, data: Any, split: int = 3) -> list[torch.Tensor]:
    """Return the results of each sequence, pushed in parts next to the others."""
    streams = [engine.open() for _ in data]
    for at in range(0, max(map(len, data)), split):
        for stream, part in zip(streams, data, strict=True):
            if at < len(part):
                stream.push(part[at : at + split])
        engine.step()
    results = [stream.pull() for stream in streams]
    for stream in streams:
        stream.close()
    return results


@pytest.mark.parametrize(
    ("data", "labels", "options"),
    [
        *[
            (SERIES, LABELS, {"pooling": name})
            for name in ("final", "attention", "logsumexp", "mean", "max", "last")
        ],
        (SERIES, LABELS, {"cell": "slstm", "num_layers": 2}),
        *[
            (SERIES, LABELS, {"cell": cell, "num_layers": 2, "pooling": pooling})
            for cell in ("mamba", "mamba2", "gated_delta_net", "mlstm", "rglru")
            for pooling in ("final", "mean")
        ],
        (SERIES, LABELS, {"cell": "lstm", "zoneout": 0.1, "initial_state": "learned"}),
        (SERIES, [float(part.mean()) for part in SERIES], {"task": "regress"}),
        (SERIES, [["u"], ["v", "u"], [], ["v"]] * 3, {"task": "multilabel"}),
        (SERIES, None, {"task": "forecast"}),
        (SERIES, None, {"task": "forecast", "season": 3}),
        (
            SERIES,
            None,
            {"task": "forecast", "season": 5, "loss": "quantile", "quantile": [0.2, 0.5]},
        ),
        *[
            (HOLES, None, {"task": "forecast", "season": 2, "keep_trailing": True, "missing": name})
            for name in ("forward", "zero")
        ],
        # A stream cannot tell a missing frame at its end from padding.
        *[
            (HOLES, LABELS, {"keep_trailing": True, **options})
            for options in (
                {"missing": "zero"},
                {"missing": "forward"},
                {"missing": "elapsed"},
                {"missing": "elapsed", "cell": "grud", "num_layers": 2},
            )
        ],
    ],
)
def test_the_last_results_are_predictions(data: Any, labels: Any, options: dict[str, Any]) -> None:
    run = fit(data, labels, **options)
    engine = Engine(run, max_streams=20)
    wanted = run.predict(data)
    last = torch.stack([rows[-1] for rows in served(engine, data)])
    assert engine.columns(last) == {name: wanted[name] for name in wanted.columns if name != "id"}
    # Every earlier result is the prediction for the frames so far.
    prefixes = [data[1][:end] for end in range(1, 10)]
    (rows,) = served(engine, data[1:2])
    wanted = run.predict(prefixes)
    assert engine.columns(rows) == {name: wanted[name] for name in wanted.columns if name != "id"}


@pytest.mark.parametrize("task", ["forecast", "multilabel"])
def test_probabilities_do_not_depend_on_their_position(task: str) -> None:
    bits = [
        np.random.default_rng(at).integers(0, 2, (2 + at % 7, 2)).astype(np.float32)
        for at in range(200)
    ]
    run = fit(bits, [["u", "v"], ["u"]] * 100 if task == "multilabel" else None, task=task)
    options: dict[str, Any] = {"probabilities": True} if task == "multilabel" else {}
    wanted = run.predict(bits, **options)
    assert task == "multilabel" or run.model.is_binary
    engine = Engine(run, max_streams=200)
    last = torch.stack([rows[-1] for rows in served(engine, bits)])
    for at, row in enumerate(last.split(1)):
        found = engine.columns(row, **options)
        assert found == {name: wanted[name][at : at + 1] for name in wanted.columns if name != "id"}


def test_tags() -> None:
    with pytest.raises(DispatchError, match=r"reads sequences from the end\. .*--no-bidirectional"):
        Engine(fit(SERIES, TAGS, task="tag"), max_streams=20)
    run = fit(SERIES, TAGS, task="tag", bidirectional=False)
    engine, wanted = Engine(run, max_streams=20), run.predict(SERIES, probabilities=True)
    for place, rows in enumerate(served(engine, SERIES)):
        columns = engine.columns(rows, probabilities=True)
        assert columns == {name: wanted[name][place] for name in wanted.columns if name != "id"}


@pytest.mark.parametrize("options", [{}, {"tie_weights": True, "embedding": 8}])
def test_language(options: dict[str, Any]) -> None:
    run = fit(TEXTS, task="language", **options)
    engine, wanted = Engine(run, max_streams=1), run.predict(TEXTS)["prediction"]
    for text, following in zip(TEXTS, wanted, strict=True):
        with engine.open() as stream:
            stream.push(text)
            engine.step()
            assert engine.columns(stream.pull()[-1:])["prediction"] == [following]


def test_tokens() -> None:
    run = fit(TEXTS, ["q", "r", "q"] * 4)
    engine, wanted = Engine(run, max_streams=20), run.predict(TEXTS)["probability"]
    with pytest.raises(ShapeError, match="the same task, channels, tokens and labels"):
        engine.swap(fit([text.replace("a", "c") for text in TEXTS], ["q", "r", "q"] * 4))
    last = torch.stack([rows[-1] for rows in served(engine, [text.split() for text in TEXTS], 2)])
    assert engine.columns(last)["probability"] == wanted
    with pytest.raises(ArgumentTypeError, match="a list of tokens"):
        engine.open().push([1, 2])


def test_a_state_continues_filled_values() -> None:
    engine = Engine(fit(HOLES, LABELS, missing="forward"), max_streams=2)
    part = np.array([[1.0, np.nan], [np.nan, 2.0], [np.nan, np.nan]], np.float32)
    (whole,) = served(engine, [part])
    stream = engine.open()
    stream.push(part[:2])
    engine.step()
    moved = engine.open(stream.state())
    moved.push(part[2:])
    engine.step()
    assert torch.equal(moved.pull(), whole[2:])


def test_infinite_numbers_are_refused_as_in_predictions() -> None:
    stream = (
        engine := Engine(fit([np.nan_to_num(part) for part in HOLES], LABELS), max_streams=1)
    ).open()
    stream.push(torch.tensor([[3e38, 1.0]]))
    for frames in ([[1.0, 2.0], [1.0, torch.inf]], torch.tensor([[1.0, 2.0], [1.0, torch.inf]])):
        with pytest.raises(ArgumentError, match="an infinite number in frame 1"):
            stream.push(frames)
    assert engine.step() == 1
    assert stream.pull().isfinite().all()


@pytest.mark.parametrize("cell", ["gru", "grud", "cfc"])
def test_times_between_observations_continue(cell: str) -> None:
    """The time gap of the first frame is ignored, those of other frames are added up over chunks
    and moves.
    """
    parts = [
        np.append(part[:, :1], RNG.exponential(size=(len(part), 1)), 1).astype(np.float32)
        for part in HOLES
    ]
    rows, offsets = np.concatenate(parts), offsets_of([len(part) for part in parts])
    data = dataset(rows, offsets, labels=tuple(LABELS), channels=("x", "time_gap"))
    run = fit(data, missing="elapsed", cell=cell)
    engine, wanted = Engine(run, max_streams=20), run.predict(data)
    last = torch.stack([rows[-1] for rows in served(engine, parts, 2)])
    assert engine.columns(last) == {name: wanted[name] for name in wanted.columns if name != "id"}
    state = None
    for frame in parts[1]:
        with engine.open(state) as stream:
            stream.push(frame[None])
            engine.step()
            found, state = stream.pull(), stream.state()
    assert torch.equal(found[0], last[1])


def test_runs_that_are_refused() -> None:
    with pytest.raises(DispatchError, match="model must be"):
        Engine(fit(SERIES, LABELS, bidirectional=True), max_streams=1)
    columns = {
        "text": ["a b", "b a", "a a"] * 3,
        "kind": ["x", "y", "x"] * 3,
        "colour": ["red", "blue", "red"] * 3,
    }
    with pytest.raises(DispatchError, match="the features 'colour'"):
        Engine(
            fit(pyarrow.table(columns), sequence="text", label="kind", static=["colour"]),
            max_streams=1,
        )


def test_missing_numbers_and_columns_of_a_module() -> None:
    with pytest.raises(ArgumentError, match="frames must be numbers other than NaN"):
        Engine(fit(SERIES, LABELS), max_streams=1).open().push(HOLES[1])
    with pytest.raises(ArgumentError, match="model must be a run"):
        Engine(rl.nn.GRU(3, 4), max_streams=1).columns(torch.zeros(1, 4))


@pytest.mark.parametrize("change", ["labels", "channels", "task"])
def test_a_swap_to_a_run_of_another_meaning(change: str) -> None:
    """Although its frames and results have the same shapes."""
    walks = [np.random.default_rng(seed).normal(size=(5, 2)) for seed in range(8)]
    options: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "validation_fraction": 0}
    run = rl.fit(walks, ["up", "down"] * 4, **options)
    engine = Engine(run, max_streams=1)
    engine.swap(rl.fit(walks, ["down", "up"] * 4, **options))
    labels: Any = ["up", "left"] * 4 if change == "labels" else ["up", "down"] * 4
    data: Any = walks
    if change == "channels":
        pandas = pytest.importorskip("pandas")
        data = [pandas.DataFrame(walk, columns=["x", "y"]) for walk in walks]
    if change == "task":
        labels = [["up"], ["down"]] * 4
        options["task"] = "multilabel"
    with pytest.raises(ShapeError, match="same task, channels, tokens and labels"):
        engine.swap(rl.fit(data, labels, **options))
