"""Models and runs whose files hold what no model can: refused in one line by every command that reads them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import FAST, fails, tree, undrawn_pictures, write_steps  # noqa: F401
from raglane._utils import memory
from raglane.cli import main
from raglane.data.preprocess import Preprocessor
from raglane.errors import ArgumentError
from raglane.training.checkpoint import read_tensors, to_safetensors
from raglane.training.inference import Predictions
from raglane.training.predictions import write_predictions
from raglane.training.stored import finite, to_json

_WEIGHT = "encoder.recurrent.weight_hh_l0"
_MOMENT = "optimizer.1.exp_avg"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run."""
    folder = tmp_path_factory.mktemp("work")
    data = write_steps(folder / "ok.csv")
    assert main(["train", str(data), "--out", str(folder / "run"), *FAST, "--quiet"]) == 0
    return folder


def _refused(work: Path, file: str, content: bytes, capsys: pytest.CaptureFixture[str], *pieces: str) -> None:
    """Every command that reads the file names it, and changes nothing."""
    path = work / "run" / file
    before = path.read_bytes()
    run, data = str(work / "run"), str(work / "ok.csv")
    commands = {
        "best": [["predict", run, data, "-o", str(work / "p.csv")], ["evaluate", run, data]],
        "last": [["train", "--resume", "--out", run, "--epochs", "3"]],
        "run.json": [["train", "--resume", "--out", run, "--epochs", "3"], ["evaluate", run]],
    }
    path.write_bytes(content)
    damaged = tree(work)
    try:
        for command in commands[Path(file).parts[0]]:
            fails(command, capsys, str(path), *pieces)
            assert tree(work) == damaged
    finally:
        path.write_bytes(before)


def _with(number: float) -> Callable[[Tensor], Tensor]:
    def put(tensor: Tensor) -> Tensor:
        changed = tensor.clone()
        changed[0, 0] = number
        return changed

    return put


@pytest.mark.parametrize("folder", ["best", "last"])
def test_weights_that_no_model_has(work: Path, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = f"{folder}/weights.safetensors"
    weights = read_tensors(work / "run" / file)
    changes: list[tuple[Callable[[Tensor], Tensor], str]] = [
        (_with(math.nan), "numbers that are not finite"),
        (_with(-math.inf), "numbers that are not finite"),
        (torch.Tensor.double, "dtype torch.float64 where torch.float32 is expected"),
        (torch.Tensor.half, "dtype torch.float16"),
        (lambda tensor: tensor.to(torch.complex64), "dtype torch.complex64"),
        (lambda tensor: tensor.to(torch.int64), "dtype torch.int64"),
        (lambda tensor: tensor.T, "shape (4, 12) where (12, 4) is expected"),
        (torch.Tensor.flatten, "shape (48,) where"),
    ]
    for change, piece in changes:
        _refused(work, file, to_safetensors(weights | {_WEIGHT: change(weights[_WEIGHT])}), capsys, _WEIGHT, piece)
    _refused(work, file, to_safetensors(weights | {"head.more": weights[_WEIGHT]}), capsys, "an unknown tensor")
    absent = {name: tensor for name, tensor in weights.items() if name != _WEIGHT}
    smaller = weights | {_WEIGHT: weights[_WEIGHT][:, :-1]}
    pieces = {
        "best": (" in 5 tensors where config.json describes ", " in 6 tensors where config.json describes "),
        "last": (f"no tensor '{_WEIGHT}'", "shape (12, 3) where (12, 4) is expected"),
    }
    for content, piece in zip((absent, smaller), pieces[folder], strict=True):
        _refused(work, file, to_safetensors(content), capsys, piece)


def test_an_optimizer_that_no_run_has(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = "last/training.safetensors"
    tensors = read_tensors(work / "run" / file)
    changes: list[tuple[str, Callable[[Tensor], Tensor]]] = [
        (_MOMENT, _with(math.nan)),
        (_MOMENT, torch.Tensor.double),
        (_MOMENT, lambda tensor: tensor.to(torch.complex64)),
        (_MOMENT, lambda tensor: tensor[1:]),
    ]
    for name, change in changes:
        # The tensors are named in the one file, and what they belong to in the other.
        content = to_safetensors(tensors | {name: change(tensors[name])})
        path = work / "run" / file
        before = path.read_bytes()
        path.write_bytes(content)
        try:
            fails(["train", "--resume", "--out", str(work / "run"), "--epochs", "3"], capsys, "training.json")
        finally:
            path.write_bytes(before)


@pytest.mark.parametrize("file", ["run.json", "last/training.json", "best/config.json"])
def test_json_that_no_file_of_a_run_holds(work: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    for content, piece in (
        (b"[" * 100_000 + b"]" * 100_000, "brackets that are nested"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "brackets that are nested"),
        (b'{"a": NaN}', "NaN, which is not finite"),
        (b'{"a": -Infinity}', "-Infinity, which is not finite"),
        (b'{"a": 1e999}', "1e999, which is not finite"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"\xff\xfe\x00", "decode"),
        (b"null", "JSON that is not an object"),
    ):
        _refused(work, file, content, capsys, piece)


def test_a_file_for_which_there_is_no_memory(
    work: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = work / "run" / "best" / "config.json"
    monkeypatch.setattr("raglane.training.stored.available_memory", lambda: 1000)
    piece = f"a file of {path.stat().st_size:,} bytes, which needs up to {32 * path.stat().st_size:,} bytes"
    _refused(work, "best/config.json", path.read_bytes(), capsys, piece, "where 1,000 are available")


def test_what_the_system_tells_of_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "_LIMITS", (str(limit), str(tmp_path / "none")))
    free = memory.available_memory()
    assert 2**20 < free < 2**50
    limit.write_text("max\n")
    assert memory.available_memory() > 2**20
    limit.write_text("4096\n")
    assert memory.available_memory() == 4096


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_scaling_that_no_data_has(work: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    content = json.loads((work / "run" / "best" / "config.json").read_text())
    wrong: list[Any] = [10**400, 1e300, True, "1", None]
    for number in [*wrong, 0.0, -1.0] if name == "std" else wrong:
        scaling = content["preprocessor"] | {name: [number, 1.0]}
        damaged = json.dumps(content | {"preprocessor": scaling}).encode()
        _refused(work, "best/config.json", damaged, capsys)


def test_a_preprocessor_is_never_scaled_by_what_is_not_finite() -> None:
    for std in (0.0, -1.0, math.nan, math.inf, 1e39):
        with pytest.raises(ArgumentError, match=r"^std must be finite float32 numbers above 0.*, got "):
            Preprocessor("classify", ("a",), (0.0,), (std,), labels=("x", "y"))
    for mean in (math.nan, math.inf, -1e39):
        with pytest.raises(ArgumentError, match=r"^mean must be finite float32 numbers.*, got "):
            Preprocessor("classify", ("a",), (mean,), (1.0,), labels=("x", "y"))


def test_what_is_written_is_strict_json(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data so far from that of the training that the model's answers are not finite."""
    huge = tmp_path / "huge.csv"
    huge.write_text("id,t,a,b,label\ns,0,3e38,-3e38,x\nr,0,0,0,y\n")
    config = work / "run" / "best" / "config.json"
    before = config.read_bytes()
    content = json.loads(before)
    content["preprocessor"] |= {"mean": [-3e38, 3e38], "std": [1e-30, 1e-30]}
    config.write_text(json.dumps(content))
    try:
        assert main(["evaluate", str(work / "run"), str(huge), "-q"]) == 0
        for suffix in ("csv", "jsonl", "parquet"):
            output = str(tmp_path / f"p.{suffix}")
            assert main(["predict", str(work / "run"), str(huge), "-o", output, "--probabilities", "-q"]) == 0
    finally:
        config.write_bytes(before)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    numbers = json.loads((work / "run" / "evaluation.json").read_text(), parse_constant=refuse)
    assert numbers["loss"] is None
    rows = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert rows[0]["probability"] is None
    assert (tmp_path / "p.csv").read_text().splitlines()[1].endswith(",,,")


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    assert finite({"a": [1, math.inf, [math.nan]], "b": "nan"}) == {"a": [1, None, [None]], "b": "nan"}
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_json({"a": math.nan})
    table = Predictions({"id": [0], "prediction": [[[math.nan, 1.0]]]})
    write_predictions(tmp_path / "p.csv", table)
    assert (tmp_path / "p.csv").read_text() == 'id,prediction\n0,"[[null, 1.0]]"\n'
