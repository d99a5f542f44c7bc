"""``raglane export``: runs as files, with their preprocessing, used from Python and JavaScript."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import raglane as rl
from raglane.cli import main
from raglane.data.encoders import FeatureEncoder
from raglane.data.preprocess import Preprocessor
from raglane.errors import ExportError
from raglane.runs.exported import RunModule
from raglane.runs.run import Run
from raglane.training.checkpoint import SavedModel
from raglane.training.model import ModelConfig, SequenceModel

pytest.importorskip("onnxscript", reason="needs raglane[export]")
pytest.importorskip("onnxruntime", reason="needs raglane[export]")

EXAMPLES = Path(__file__).parents[2] / "examples" / "export"
SEQUENCES = [[[100.1, -2.0], [100.3, 1.9], [99.0, 0.5]], [[100.7, 1.1]]]


def a_run() -> Run:
    """A model that no training has seen; its classes are as likely as its weights have it."""
    torch.manual_seed(0)
    scales = {"mean": (100.0, 0.5), "std": (0.5, 2.0), "missing": "elapsed"}
    preprocessor = Preprocessor("classify", ("a", "time_gap"), labels=("no", "yes"), **scales)  # type: ignore[arg-type]
    model = SequenceModel(ModelConfig("classify", "gru", input_size=6, output_size=2, hidden_size=8)).eval()
    with torch.no_grad():
        model.head.weight.mul_(9)
    return Run(SavedModel(model, preprocessor, {}))


def test_a_run_is_used_from_other_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder, path = a_run(), tmp_path / "model", tmp_path / "model.onnx"
    run.save(folder)
    assert main(["export", str(folder), str(path)]) == 0
    printed = capsys.readouterr().out
    assert f"metadata: {tmp_path}/model.json" in printed
    assert "verified in ONNX Runtime: " in printed
    described = json.loads((tmp_path / "model.json").read_text())
    assert described["labels"] == ["no", "yes"]
    assert described["channels"] == ["a", "time_gap"]
    assert described["missing"] == "elapsed"
    assert described["output"] == "output_probabilities"
    table = run.predict([np.array(sequence) for sequence in SEQUENCES])
    rows = zip(table["prediction"], table["probability"], strict=True)
    wanted = "".join(f"{label} {share:.4f}\n" for label, share in rows)
    command = [sys.executable, str(EXAMPLES / "classify.py"), str(path), json.dumps(SEQUENCES)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == wanted
    node = shutil.which("node")
    asked = [node or "", "-e", "require('onnxruntime-web')"]
    if node is None or subprocess.run(asked, capture_output=True, env=os.environ).returncode:
        return  # the part in JavaScript needs node and onnxruntime-web, found by NODE_PATH
    command = [node, str(EXAMPLES / "classify.js"), str(path), json.dumps(SEQUENCES)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == wanted


def test_what_a_graph_does_not_prepare_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = a_run()
    beside = replace(run.preprocess, features=(FeatureEncoder("weight"),))
    with pytest.raises(ExportError, match=r"features must be .*run\.model.*, got 1 in columns of their own"):
        RunModule(run.model, beside)
    folder = tmp_path / "model"
    run.save(folder)
    for place, words in {
        "model.txt": "ends in .onnx",
        "no/model.onnx": "a file in a folder that exists, got ... no/model.onnx'. ",
        "model/m.onnx": "no file of",
    }.items():
        assert main(["export", str(folder), str(tmp_path / place)]) == 2
        assert words in capsys.readouterr().err
    assert [part.name for part in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_leaves_neither_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a_run().save(tmp_path / "model")
    bring, calls = os.fsync, []

    def fill(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        bring(descriptor)

    monkeypatch.setattr(os, "fsync", fill)
    assert main(["export", str(tmp_path / "model"), str(tmp_path / "model.onnx"), "--no-verify"]) == 2
    assert f"{tmp_path}/model.json: No space left" in capsys.readouterr().err
    assert [part.name for part in tmp_path.iterdir()] == ["model"]


def test_a_missing_feature_is_filled_as_the_preprocessing_fills_it() -> None:
    rng, run = np.random.default_rng(0), a_run()
    lengths = [4, 0, 1, 9, 0]
    values = rng.normal([100, 0.5], [0.5, 2], size=(sum(lengths), 2)).astype(np.float32)
    values[rng.random(values.shape) < 0.5] = np.nan
    values[3, 1] = np.inf
    batch = rl.Ragged.from_flat(torch.from_numpy(values), lengths=lengths)
    for missing, channels in itertools.product(("zero", "forward", "elapsed"), (("a", "b"), ("a", "time_gap"))):
        preprocess = replace(run.preprocess, missing=missing, channels=channels)
        wanted = preprocess.scaled(values, batch.offsets.numpy())
        found = RunModule(run.model, preprocess)._preprocess(batch).values
        assert torch.allclose(found, torch.from_numpy(wanted), rtol=1e-6, atol=1e-6), (missing, channels)


def test_a_regression_answers_in_the_units_of_the_data() -> None:
    torch.manual_seed(0)
    preprocessor = Preprocessor(
        "regress", ("a",), mean=(2.0,), std=(4.0,), target_names=("y",), target_mean=(50.0,), target_std=(7.0,)
    )
    model = SequenceModel(ModelConfig("regress", "gru", input_size=1, output_size=1)).eval()
    run = Run(SavedModel(model, preprocessor, {}))
    sequences = [np.array([[1.0], [9.0]]), np.array([[4.0]])]
    batch = rl.Ragged([torch.tensor(part, dtype=torch.float32) for part in sequences])
    with torch.no_grad():
        found = RunModule(model, preprocessor)(batch)["prediction"].squeeze(1)
    assert torch.allclose(found.double(), torch.tensor(run.predict(sequences)["prediction"]).double(), rtol=1e-6)
