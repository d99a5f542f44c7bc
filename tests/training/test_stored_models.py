"""Damaged files of models and runs: every command that reads them fails with one line."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from commands import FAST, Capsys, fails, tree, write_steps
from raglane._utils import memory
from raglane.cli import main
from raglane.data.prepare.preprocess import Preprocessor
from raglane.errors import ArgumentError
from raglane.training.checkpoint import parse_tensors, read_tensors, to_safetensors

_WEIGHT = "encoder.recurrent.weight_hh_l0"
_MODEL = {"task": "classify", "input_size": 2, "output_size": 2}
_MOMENT = "optimizer.1.exp_avg"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run."""
    folder = tmp_path_factory.mktemp("work")
    data = write_steps(folder / "ok.csv")
    assert main(["train", str(data), "--output", str(folder / "run"), *FAST, "--quiet"]) == 0
    return folder


def _refused(work: Path, file: str, content: bytes, capsys: Capsys, *pieces: str) -> None:
    """Assert that every command that reads the file names it, and changes nothing."""
    path = work / "run" / file
    before = path.read_bytes()
    run, data = str(work / "run"), str(work / "ok.csv")
    commands = {
        "best": [["predict", run, data, "-o", str(work / "p.csv")], ["evaluate", run, data]],
        "last": [["train", "--resume", "--output", run, "--epochs", "3"]],
        "run.json": [["train", "--resume", "--output", run, "--epochs", "3"], ["evaluate", run]],
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
    return lambda tensor: tensor.index_fill(0, torch.tensor([0]), number)


_CHANGES: list[tuple[Callable[[Tensor], Tensor], str]] = [
    (_with(math.nan), "numbers that are not finite"),
    (_with(-math.inf), "numbers that are not finite"),
    (torch.Tensor.double, "dtype torch.float64 where torch.float32 is expected"),
    (lambda tensor: tensor.to(torch.complex64), "dtype torch.complex64"),
    (torch.Tensor.long, "dtype torch.int64"),
    (lambda tensor: tensor.T, "shape (4, 12) where (12, 4) is expected"),
    (torch.Tensor.flatten, "shape (48,) where"),
]


@pytest.mark.parametrize("folder", ["best", "last"])
def test_damaged_weights(work: Path, folder: str, capsys: Capsys) -> None:
    file = f"{folder}/weights.safetensors"
    weights = read_tensors(work / "run" / file)
    for change, piece in _CHANGES:
        content = weights | {_WEIGHT: change(weights[_WEIGHT]).contiguous()}
        _refused(work, file, to_safetensors(content), capsys, _WEIGHT, piece)
    _refused(
        work,
        file,
        to_safetensors(weights | {"head.more": weights[_WEIGHT]}),
        capsys,
        "an unknown tensor",
    )
    whole = (work / "run" / file).read_bytes()
    _refused(
        work, file, whole[:-1] + bytes([whole[-1] ^ 1]), capsys, "other numbers than were written"
    )
    null = b'{"__metadata__":null}'  # as another program may write it
    assert parse_tensors(len(null).to_bytes(8, "little") + null, work) == {}
    absent = {name: tensor for name, tensor in weights.items() if name != _WEIGHT}
    smaller = weights | {_WEIGHT: weights[_WEIGHT][:, :-1]}
    pieces = {
        "best": (
            " in 5 tensors where config.json describes ",
            " in 6 tensors where config.json describes ",
        ),
        "last": (f"no tensor '{_WEIGHT}'", "shape (12, 3) where (12, 4) is expected"),
    }
    for content, piece in zip((absent, smaller), pieces[folder], strict=True):
        _refused(work, file, to_safetensors(content), capsys, piece)


@pytest.mark.parametrize(
    "change", [_with(math.nan), torch.Tensor.double, lambda tensor: tensor[1:]]
)
def test_a_damaged_optimizer(
    work: Path, tmp_path: Path, capsys: Capsys, change: Callable[[Tensor], Tensor]
) -> None:
    run = shutil.copytree(work / "run", tmp_path / "run")
    tensors = read_tensors(run / "last" / "training.safetensors")
    (run / "last" / "training.safetensors").write_bytes(
        to_safetensors(tensors | {_MOMENT: change(tensors[_MOMENT])})
    )
    fails(["train", "--resume", "--output", str(run), "--epochs", "3"], capsys, "training.json")


@pytest.mark.parametrize("file", ["run.json", "last/training.json", "best/config.json"])
def test_damaged_json(work: Path, file: str, capsys: Capsys) -> None:
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


@pytest.mark.parametrize(
    ("changes", "piece"),
    [
        ({"format_version": 99}, "at most 3 for this version ... format version 99"),
        ({"format": "other"}, "format 'other'"),
        ({"model": {"task": "classify"}}, "whole and unchanged"),
        ({"model": {"cell": "other"} | _MODEL}, "config.json: cell must be ... got 'other'"),
        ({"model": _MODEL}, "model without the entry 'cell'"),
        (
            {"model": {"cell": "gru", "layer": "gru"} | _MODEL},
            "model with the unknown entry 'layer'",
        ),
    ],
)
def test_a_damaged_configuration(
    work: Path, capsys: Capsys, changes: dict[str, Any], piece: str
) -> None:
    content = json.loads((work / "run" / "best" / "config.json").read_text())
    _refused(work, "best/config.json", json.dumps(content | changes).encode(), capsys, piece)


@pytest.mark.parametrize("name", ["config.json", "weights.safetensors"])
def test_a_file_that_is_missing_or_cut(
    work: Path, tmp_path: Path, capsys: Capsys, name: str
) -> None:
    model = shutil.copytree(work / "run" / "best", tmp_path / "best")
    content = (model / name).read_bytes()
    for part in (content[:-5], b""):
        (model / name).write_bytes(part)
        fails(["evaluate", str(model), str(work / "ok.csv")], capsys, name)
    (model / name).unlink()
    fails(
        ["evaluate", str(model), str(work / "ok.csv")],
        capsys,
        "without a saved model" if "json" in name else name,
    )


def test_a_file_that_does_not_fit_in_memory(
    work: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = work / "run" / "best" / "config.json"
    monkeypatch.setattr("raglane._utils.json.available_memory", lambda: 1000)
    piece = f"a file of {path.stat().st_size:,} bytes, which needs up to {32 * path.stat().st_size:,} bytes"
    _refused(
        work, "best/config.json", path.read_bytes(), capsys, piece, "where 1,000 are available"
    )


def test_available_memory_is_limited_by_the_control_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = tmp_path / "memory.max"
    groups = (str(limit), "memory.current", "inactive_file"), (str(tmp_path / "none"), "", "")
    monkeypatch.setattr(memory, "_GROUPS", groups)
    assert 2**20 < memory.available_memory() < 2**50
    (tmp_path / "memory.current").write_text("3000\n")
    (tmp_path / "memory.stat").write_text("active_file 1\ninactive_file 1000\n")
    for text, most in (("max", 2**50), ("4096", 2096), ("100", 0)):
        limit.write_text(text)
        assert min(most, 2**20) <= memory.available_memory() <= most


@pytest.mark.parametrize("name", ["mean", "std"])
def test_a_damaged_scaling(work: Path, name: str, capsys: Capsys) -> None:
    content = json.loads((work / "run" / "best" / "config.json").read_text())
    wrong: list[Any] = [10**400, 1e300, True, "1", None]
    for number in [*wrong, 0.0, -1.0] if name == "std" else wrong:
        scaling = content["preprocessor"] | {name: [number, 1.0]}
        _refused(
            work,
            "best/config.json",
            json.dumps(content | {"preprocessor": scaling}).encode(),
            capsys,
        )


@pytest.mark.parametrize(
    "scaling", [{"std": (value,)} for value in (0.0, -1.0, math.nan, 1e39)] + [{"mean": (-1e39,)}]
)
def test_a_preprocessor_refuses_a_scaling(scaling: dict[str, Any]) -> None:
    with pytest.raises(
        ArgumentError, match=f"^{next(iter(scaling))} must be finite float32 numbers.*, got "
    ):
        Preprocessor(
            "classify", ("a",), **{"mean": (0.0,), "std": (1.0,)} | scaling, labels=("x", "y")
        )


def test_numbers_that_are_not_finite_become_null(
    work: Path, tmp_path: Path, capsys: Capsys
) -> None:
    # Data so far from the training data that the predictions are not finite.
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
            assert (
                main(
                    ["predict", str(work / "run"), str(huge), "-o", output, "--probabilities", "-q"]
                )
                == 0
            )
    finally:
        config.write_bytes(before)

    def refuse(word: str) -> None:
        raise AssertionError(word)

    numbers = json.loads((work / "run" / "evaluation.json").read_text(), parse_constant=refuse)
    assert numbers["loss"] is None
    rows = [
        json.loads(line, parse_constant=refuse)
        for line in (tmp_path / "p.jsonl").read_text().splitlines()
    ]
    assert rows[0]["probability"] is None
    assert (tmp_path / "p.csv").read_text().splitlines()[1].endswith(",,,")
