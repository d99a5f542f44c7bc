"""Missing devices, huge models and numbers, and invalid paths: one line, before data is read."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import FAST, Capsys, fails, tree, write_rows, write_steps
from raglane._utils import memory
from raglane.cli import main
from raglane.errors import ArgumentError
from raglane.training.machine import check_machine
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.settings import INITIAL_STATES, LAYERS, NORMALISED_LAYERS, POOLINGS, Settings


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data and a run of each kind."""
    folder = tmp_path_factory.mktemp("work")
    data = write_steps(folder / "ok.csv")
    for task in ("classify", "forecast"):
        assert (
            main(
                [
                    "train",
                    str(data),
                    "--task",
                    task,
                    "--output",
                    str(folder / task),
                    *FAST,
                    "--quiet",
                ]
            )
            == 0
        )
    return folder


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every reading of data or of a model fail the test."""

    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("data is read before the mistake is named")

    monkeypatch.setattr("raglane.runs.sources.SequenceSource.read", read)
    # Those that take the function first: one that is imported later would keep the one that fails.
    for name in ("runs.run", "runs.card", "runs.fit", "training.checkpoint"):
        monkeypatch.setattr(f"raglane.{name}.load_model", read)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize("name", ["cuda", "cuda:99", "meta", "cpu:0", "xla", ""])
def test_a_device_that_is_not_there(
    work: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    run, data = str(work / "classify"), str(work / "ok.csv")
    before = tree(work)
    for command in (
        ["train", data, "--output", str(work / "new")],
        ["train", "--resume", "--output", run, "--epochs", "3"],
        ["evaluate", run, data],
        ["predict", run, data, "-o", str(work / "p.csv")],
    ):
        fails([*command, "--device", name], capsys, f"device must be ... got {name!r}", "Pass ")
    assert tree(work) == before


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(
    "options",
    [
        ["--hidden-size", "1000000"],
        ["--num-layers", "1000000"],
        ["--hidden-size", "2147483647", "--num-layers", "2147483647"],
    ],
    ids=lambda options: options[0],
)
def test_a_model_for_which_there_is_no_memory(
    work: Path, capsys: Capsys, options: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 10**9)
    before = tree(work)
    told = "memory must be ... got a model of ... weights to train, which needs"
    command = ["train", str(work / "ok.csv"), "--output", str(work / "new"), *options]
    fails(command, capsys, told, "at most the 1,000,000,000 bytes", "--hidden-size")
    assert tree(work) == before


def test_an_embedding_for_which_there_is_no_memory(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size needs the data, so it is read; a table of floats has none."""
    monkeypatch.setattr(memory, "available_memory", lambda: 10**9)
    words = write_rows(
        tmp_path / "words.jsonl", ({"words": list("pqr"), "kind": "xy"[n % 2]} for n in range(12))
    )
    steps, run = write_steps(tmp_path / "ok.csv"), str(tmp_path / "run")
    # 4 tokens; the GRU reads the embedding with 12 rows, and training with Adam and saving take
    # each weight 9 times.
    needed = 9 * 4 * (4 * 10**8 + 12 * 10**8)
    fails(
        ["train", str(words), "--output", run, *FAST, "--embedding", "100000000"],
        capsys,
        f"needs {needed // 10**9:,},",
    )
    assert not Path(run).exists()
    assert (
        main(["train", str(steps), "--output", run, *FAST, "--embedding", "100000000", "--quiet"])
        == 0
    )


def test_the_batch_of_a_deep_model_counts_too(
    work: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [
        "train",
        str(work / "ok.csv"),
        "--hidden-size",
        "4",
        "--num-layers",
        "9",
        "--epochs",
        "1",
        "--quiet",
    ]
    weights, tensors = ModelConfig(
        "classify", "gru", hidden_size=4, num_layers=9, input_size=2, output_size=2
    ).count()
    model = 9 * 4 * weights + memory.TRAINED_TENSOR * tensors
    # 12 sequences of 1 to 4 steps, of which 1 is held out: at most 29 elements, and at least 25.
    monkeypatch.setattr(memory, "available_memory", lambda: model + 4 * 9 * 4 * 29)
    assert main([*command, "--output", str(tmp_path / "fits")]) == 0
    monkeypatch.setattr(memory, "available_memory", lambda: model + 4 * 9 * 4 * 20)
    fails(
        [*command, "--output", str(tmp_path / "run")], capsys, "memory must be ... got a model of"
    )
    assert main([*command, "--output", str(tmp_path / "run"), "--batch-size", "2"]) == 0


def test_weights_are_counted_without_a_model() -> None:
    kinds: list[dict[str, Any]] = [
        *(
            {"cell": cell, "initial_state": initial}
            for cell in LAYERS
            for initial in INITIAL_STATES
        ),
        *({"cell": cell, "layer_norm": True, "num_layers": 2} for cell in NORMALISED_LAYERS),
        *({"cell": "gru", "pooling": pooling, "num_layers": 1} for pooling in POOLINGS),
    ]
    sizes: dict[str, Any] = {"input_size": 6, "output_size": 4, "hidden_size": 6, "num_layers": 3}
    for kind, bidirectional, embedding in itertools.product(kinds, (False, True), (None, 7)):
        if kind["cell"] == "grud" and embedding is not None:
            continue  # it reads three columns for each channel, which an embedding does not have
        config = ModelConfig(
            "classify", **sizes | kind, bidirectional=bidirectional, embedding=embedding
        )
        before = torch.get_rng_state()
        counted = config.count()
        assert torch.equal(torch.get_rng_state(), before)
        weights = list(SequenceModel(config).parameters())
        assert counted == (sum(weight.numel() for weight in weights), len(weights)), config


def test_a_device_of_its_own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**6, 10**9))
    assert check_machine(Settings(device="cuda", hidden_size=4)) == torch.device("cuda")
    with pytest.raises(ArgumentError, match=r"at most the 1,000,000 bytes that are available"):
        check_machine(Settings(device="cuda", hidden_size=300))


def test_a_forecast_for_which_there_is_no_memory(work: Path, capsys: Capsys) -> None:
    command = [
        "predict",
        str(work / "forecast"),
        str(work / "ok.csv"),
        "-o",
        str(work / "p.csv"),
        "--horizon",
    ]
    fails([*command, str(10**18)], capsys, "memory must be ... got 24,", "Pass a smaller horizon")
    assert not (work / "p.csv").exists()


@pytest.mark.parametrize(
    ("name", "value"), [("hidden_size", 2 * 10**9), ("num_layers", 10**6), ("hidden_size", 70)]
)
def test_a_configuration_of_another_model(
    work: Path, tmp_path: Path, capsys: Capsys, name: str, value: int
) -> None:
    shutil.copytree(work / "classify", tmp_path / "run")
    config = tmp_path / "run" / "best" / "config.json"
    content = json.loads(config.read_text())
    content["model"][name] = value
    config.write_text(json.dumps(content))
    pieces = (
        ["needs", "bytes that are available"] if value > 10**9 else ["where config.json describes"]
    )
    fails(["evaluate", str(tmp_path / "run"), str(work / "ok.csv")], capsys, "best/", *pieces)


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", "1e999"),
        ("grad-clip", "1e39"),
        ("epochs", str(10**30)),
        ("threads", "5000"),
        ("seed", "9" * 5000),
    ],
)
def test_numbers_out_of_range(work: Path, capsys: Capsys, option: str, value: str) -> None:
    """tests/training/test_settings.py has those of all settings."""
    fails(
        ["train", str(work / "ok.csv"), "--output", str(work / "new"), f"--{option}", value],
        capsys,
        option,
    )
    assert not (work / "new").exists()


def test_paths_that_cannot_be(
    work: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, data, file = str(work / "classify"), str(work / "ok.csv"), tmp_path / "file"
    file.write_text("mine")
    (tmp_path / "p.csv").mkdir()
    monkeypatch.chdir(tmp_path)
    commands: dict[str, list[str]] = {
        "training": ["train", data, *FAST, "--output"],
        "--validation": ["train", data, "--output", "new", *FAST, "--validation"],
        "--test": ["train", data, "--output", "new", *FAST, "--test"],
        "DATA": ["train", "--output", "new", *FAST],
        "RUN": ["evaluate"],
        "--output": ["predict", run, data, "--output"],
        "'--output'": ["bench", "--cells", "gru", "--sizes", "3x5x4", "--output"],
    }
    for key, command in commands.items():
        name = "--output" if key == "training" else key
        for path, piece in (("", "an empty path"), ("a\0b", "which is no valid path")):
            fails([*command, path], capsys, name, piece)
    for path in ("file", "file/below", "/dev/null/run", "x" * 300):
        fails([*commands["training"], path], capsys, path[:20])
    for path in ("p.csv", "file/p.csv", "none/p.csv"):
        for name in ("--output", "'--output'"):
            fails([*commands[name], path], capsys, "output must be ")
    # Root may write everywhere.
    monkeypatch.setattr(os, "access", lambda *_: False)
    for name, path in (("training", "new"), ("--output", "a.csv")):
        fails([*commands[name], path], capsys, f"in a writable folder, which {tmp_path} is not")
    assert tree(tmp_path) == {"file": b"mine"}
