"""A local Ray cluster trains and predicts the same as one process, also if a worker is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

import raglane as rl
from raglane.cli import main
from raglane.errors import DataError
from raglane.runs import ray_predictions
from raglane.runs.progress import LineWatcher
from raglane.training.checkpoint import read_tensors

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="needs the extra ray")


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_TRAIN_V2_ENABLED": "1"}
    small = {"object_store_memory": 80_000_000, "include_dashboard": False}
    ray.init(num_cpus=2, log_to_driver=False, logging_level="ERROR", **small)
    yield
    ray.shutdown()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Three Parquet files of walks."""
    random = np.random.default_rng(0)
    (tmp_path / "data").mkdir()
    for number in range(3):
        walks = [random.normal(size=random.integers(0, 9)) for _ in range(100)]
        kinds = ["up" if walk.sum() > 0 else "down" for walk in walks]
        table = pyarrow.table({"walk": [walk.tolist() for walk in walks], "kind": kinds})
        pyarrow.parquet.write_table(
            table, tmp_path / "data" / f"{number}.parquet", row_group_size=20
        )
    return tmp_path / "data"


def _processes(name: str) -> list[int]:
    """Return the processes of this cluster with a name."""
    found = []
    for place in Path("/proc").iterdir():
        try:
            if (
                name not in (place / "cmdline").read_text()
                or "ray::" not in (place / "cmdline").read_text()
            ):
                continue
            parents = [int(place.name)]
            while parents[-1] > 1 and parents[-1] != os.getpid():
                parents.append(
                    int(
                        (Path("/proc") / str(parents[-1]) / "stat")
                        .read_text()
                        .rsplit(")", 1)[1]
                        .split()[1]
                    )
                )
        except (OSError, ValueError):
            continue
        if parents[-1] == os.getpid():
            found.append(int(place.name))
    return sorted(found)


def _train(data: Path, out: Path, *more: str) -> dict[str, Any]:
    options = (
        "--epochs 4 --hidden-size 5 --batch-size 20 --dropout 0.2 --threads 1 --processes 2".split()
    )
    assert main(["train", str(data / "0.parquet"), "--output", str(out), *options, *more]) == 0
    found: dict[str, Any] = json.loads((out / "last" / "training.json").read_text())["state"]
    for row in found["history"]:
        del row["seconds"], row["elements_per_second"]
    return found


def test_training_with_a_worker_killed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _train(data, tmp_path / "processes")
    killed: list[int] = []
    seen = []

    def kill(watcher: LineWatcher, row: dict[str, float], is_best: bool) -> None:
        seen.append(row["epoch"])
        if row["epoch"] == 2 and not killed:
            killed.extend(_processes("TrainWorker")[:1])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(LineWatcher, "epoch_done", kill)
    found = _train(data, tmp_path / "ray", "--engine", "ray")
    assert killed
    assert seen[-1] == 4
    assert found == whole
    for part in ("best", "last"):
        mine, theirs = (
            read_tensors(tmp_path / name / part / "weights.safetensors")
            for name in ("ray", "processes")
        )
        assert all(mine[name].equal(theirs[name]) for name in theirs), part
    assert not (tmp_path / "ray" / ".ray").exists()


def test_predictions_are_the_same_for_any_workers_and_with_one_killed(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--epochs", "1", "--hidden-size", "5", "--threads", "1", "--quiet"]
    assert (
        main(["train", str(data / "0.parquet"), "--output", str(tmp_path / "run"), *options]) == 0
    )
    monkeypatch.setattr(ray_predictions, "_ROWS", 40)
    run = rl.load(tmp_path / "run")
    assert (
        ray_predictions.predict_on_ray(run, str(data), tmp_path / "one", 1, probabilities=True)
        == 300
    )
    stop = threading.Event()

    def kill() -> None:
        partial = tmp_path / ".two.partial"
        while not stop.wait(0.01):
            if partial.exists() and any(partial.iterdir()) and (found := _processes("MapWorker")):
                os.kill(found[0], signal.SIGKILL)
                killed.append(found[0])
                return

    killed: list[int] = []
    killer = threading.Thread(target=kill)
    killer.start()
    try:
        ray_predictions.predict_on_ray(run, str(data), tmp_path / "two", 2, probabilities=True)
    finally:
        stop.set()
        killer.join()
    assert killed
    files = {path.name: path.read_bytes() for path in (tmp_path / "one").iterdir()}
    assert files == {path.name: path.read_bytes() for path in (tmp_path / "two").iterdir()}
    assert len(files) == 9
    got = pyarrow.parquet.read_table(tmp_path / "two")
    assert got["id"].to_pylist() == list(range(300))
    alone = run.predict(str(data / "1.parquet"), probabilities=True)
    assert got["p_up"].to_pylist()[100:200] == alone["p_up"]
    # An existing folder is refused, and invalid rows are named.
    assert (
        main(
            [
                "predict",
                str(tmp_path / "run"),
                str(data),
                "-o",
                str(tmp_path / "two"),
                "--engine",
                "ray",
            ]
        )
        == 2
    )
    assert "a new folder" in capsys.readouterr().err
    pyarrow.parquet.write_table(pyarrow.table({"walk": [[1.0], None]}), data / "3.parquet")
    with pytest.raises(DataError, match=r"3.parquet, rows from 300: .*null"):
        ray_predictions.predict_on_ray(run, str(data), tmp_path / "three", 2)
    assert not (tmp_path / "three").exists()
    assert not list(tmp_path.glob(".*"))
