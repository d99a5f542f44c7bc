"""``rl.export.onnx`` and ``raglane export``: ONNX Runtime computes the outputs of the model."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from commands import Capsys, prints
from every_layer import GATED, KINDS, Kind
from exported import FEW, ODD, D, a_batch, largest_error, run_file, truth
from raglane.cli import main
from raglane.data.prepare.preprocess import Preprocessor
from raglane.errors import ArgumentError, ArgumentTypeError, ExportError
from raglane.export.signature import Signature
from raglane.export.verify import check_agrees, in_runtime
from raglane.runs.run import Run
from raglane.training.checkpoint import SavedModel
from raglane.training.model import ModelConfig, SequenceModel

pytest.importorskip("onnxscript", reason="needs raglane[export]")
pytest.importorskip("onnxruntime", reason="needs raglane[export]")


class Tagger(nn.Module):
    """An operator of ONNX in both directions, a Scan, and operations on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first = rl.nn.LSTM(D, 8, bidirectional=True, initial_state="learned")
        self.second = rl.nn.MinGRU(16, 6)
        self.pool = rl.nn.AttentionPooling(6, num_heads=2)
        self.head = nn.Linear(6, 4)
        for name in ("initial_h", "initial_c"):
            nn.init.normal_(self.first.get_parameter(name))

    def forward(self, batch: rl.Ragged, h: Tensor) -> dict[str, Any]:
        features, (first, _) = self.first(batch)
        out, state = self.second(features, h)
        return {
            "class": self.head(self.pool(out)).softmax(-1),
            "tags": out.map(self.head),
            "state": state,
            "first": first,
            "last": out.last(),
        }


# The padded layout has quick tests with a CRF and with runs below.
@pytest.mark.parametrize("layout", ["flat", pytest.param("padded", marks=pytest.mark.slow)])
def test_a_model_is_the_same_in_the_runtime(layout: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Tagger(), tmp_path / "model.onnx"
    example = (a_batch([3, 5]), torch.randn(1, 2, 6))
    exported: Any = rl.export.onnx(
        model, path, example=example, layout=layout, metadata={"labels": "a b"}
    )
    assert model.training
    assert exported.outputs == [
        "output_class",
        "output_tags",
        "output_state",
        "output_first",
        "output_last",
    ]
    assert exported.operators["LSTM"] == exported.operators["Scan"] == 1
    assert exported.verified.largest_difference < 1e-5
    assert exported.inputs["h"] == [1, "sequences", 6]
    import onnx

    stored = onnx.load(str(path))
    assert {prop.key: prop.value for prop in stored.metadata_props} == {"labels": "a b"}
    assert {part.domain for part in stored.opset_import} == {""}
    model.eval()
    for lengths in FEW:
        batch, h = a_batch(lengths), torch.randn(1, len(lengths), 6)
        error = largest_error(run_file(path, layout, batch, h=h), truth(model, layout, batch, h))
        assert error < 1e-5, (lengths, error)


class ChainTagger(nn.Module):
    """A CRF with integer scores, so that paths are often equally good, and forbidden
    transitions.
    """

    def __init__(self) -> None:
        super().__init__()
        self.head, self.crf = nn.Linear(D, 4), rl.nn.CRF(4)
        for part in self.parameters():
            nn.init.uniform_(part, -2, 2)
            part.data.round_()
        self.crf.transitions.data[1, 2] = -torch.inf
        self.crf.start_transitions.data[3] = self.crf.end_transitions.data[0] = -torch.inf

    def forward(self, batch: rl.Ragged) -> dict[str, rl.Ragged | Tensor]:
        emissions = batch.map(self.head)
        tags = self.crf.decode(emissions)
        likelihood = self.crf.score(emissions, tags) - self.crf.log_partition(emissions)
        return {"tags": tags, "likelihood": likelihood, "marginals": self.crf.marginals(emissions)}


def test_a_chain_is_decoded_in_the_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = ChainTagger(), tmp_path / "model.onnx"
    exported = rl.export.onnx(model, path, example=a_batch([3, 5]).map(torch.round))
    assert exported.outputs == ["output_tags", "output_likelihood", "output_marginals"]
    for lengths in [*FEW, [2] * 50]:
        batch = a_batch(lengths).map(torch.round)
        found, wanted = run_file(path, "padded", batch), truth(model, "padded", batch)
        assert found[0].tolist() == wanted[0].tolist(), lengths
        assert largest_error(found[1:], wanted[1:]) < 1e-5, lengths


# Runs a file on batches in a separate process, which may crash.
CHILD = """
import sys, numpy as np, onnxruntime
path, given, found = sys.argv[1:]
session = onnxruntime.InferenceSession(path)
batches, outputs = np.load(given), {}
for number in range(len({name.split(":")[0] for name in batches})):
    inputs = {part.name: batches[f"{number}:{part.name}"] for part in session.get_inputs()}
    outputs |= {f"{number}:{place}": part for place, part in enumerate(session.run(None, inputs))}
np.savez(found, **outputs)
"""


def outputs_of(path: Path, batches: list[dict[str, Tensor]]) -> list[list[Any]]:
    given, found = path.with_name("given.npz"), path.with_name("found.npz")
    arrays: dict[str, Any] = {
        f"{n}:{name}": x.numpy() for n, batch in enumerate(batches) for name, x in batch.items()
    }
    np.savez(given, **arrays)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, path, given, found], capture_output=True, text=True
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    stored = np.load(found)
    return [
        [stored[name] for name in stored if name.startswith(f"{n}:")] for n in range(len(batches))
    ]


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_no_lengths_end_the_runtime(layout: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Tagger().eval(), tmp_path / "model.onnx"
    rl.export.onnx(
        model, path, example=(a_batch([3, 5]), torch.randn(1, 2, 6)), layout=layout, verify=False
    )
    given, wanted = list[dict[str, Tensor]](), list[list[Tensor]]()
    is_flat = layout == "flat"
    make: Any = rl.Ragged.from_flat if is_flat else rl.Ragged.from_padded
    name = "offsets" if is_flat else "lengths"
    for size, second, taken in ODD[layout]:
        count = len(taken) - is_flat
        values, h = (
            torch.randn(size, D) if is_flat else torch.randn(count, size, D),
            torch.randn(1, count, 6),
        )
        batch = make(values, **{name: torch.tensor(taken).long()})
        given.append({"values": values, name: torch.tensor(second).long(), "h": h})
        wanted.append(truth(model, layout, batch, h, steps=size))
    for case, found, expected in zip(ODD[layout], outputs_of(path, given), wanted, strict=True):
        assert largest_error(found, expected) < 1e-5, case


class Looks(nn.Module):
    """A model that reads numbers of the batch in Python."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Module(), how
        self.head = nn.Linear(D, 4)

    def forward(self, batch: rl.Ragged) -> Tensor:
        last: Tensor = 0.3 * self.head(batch.last())
        if self.how == "if" and bool(last.sum() > 0):
            return last
        if self.how == "len":
            return last * len(batch)
        return torch.linalg.eigvals(last[:1].T @ last[:1]).real if self.how == "eig" else last


def test_layers_that_cannot_be_exported_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")
    expected = {
        "if": r"model\.0 must be .*does not depend on numbers of a batch.*, got a Looks that .*\. .* layout='flat'",
        "len": r"model must be .*without constants made of sizes, got a Sequential .* in place of len\(batch\)",
        "eig": r"model\.0 must be .*unlike aten::linalg_eig.*, got a Looks that cannot be exported",
    }
    refused: list[tuple[Any, str]] = [
        (nn.Sequential(Looks(how)), words) for how, words in expected.items()
    ]
    refused += [
        (
            rl.nn.GRU(D, 4).bfloat16(),
            r"weight_ih_l0 must be .*, got torch.bfloat16\. .*model\.float\(\)",
        ),
        (
            rl.nn.GRU(D + 1, 4),
            r"^model: input must be elements of input_size = 4 .*, got elements of shape",
        ),
        ("layer", r"model must be .*, got 'layer'"),
    ]
    for model, words in refused:
        with pytest.raises(ArgumentTypeError if model == "layer" else ExportError, match=words):
            rl.export.onnx(model, path, example=a_batch([2, 3]))
    with pytest.raises(ArgumentError, match="path must be "):
        rl.export.onnx(rl.nn.GRU(D, 4), tmp_path / "no" / "model.onnx", example=a_batch([2, 3]))
    assert path.read_bytes() == b"before"
    assert [part.name for part in tmp_path.iterdir()] == ["model.onnx"]


def test_a_file_that_differs_from_its_model_is_not_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # In float64, because a constant in float32 would be a difference.
    layer, path, batch = (
        Looks("nowhere").double(),
        tmp_path / "model.onnx",
        a_batch([2, 3]).to(torch.float64),
    )
    rl.export.onnx(layer, path, example=batch, verify=False)
    signature = Signature.of(layer, batch, "padded")
    signature.output_names[:] = ["output"]
    with torch.no_grad():
        check_agrees(in_runtime(path.read_bytes()), layer, signature)
        layer.head.weight[0, 0] += 0.01
        with pytest.raises(
            ExportError, match=r"output must be .*got a difference of \S+ of its largest number"
        ):
            check_agrees(in_runtime(path.read_bytes()), layer, signature)
    words = "model must be a graph that the runtime accepts, got an error of the runtime"
    with pytest.raises(ExportError, match=words):
        in_runtime(b"no model")


class Wide(nn.Module):
    """Operators in float64 whose attributes are float32 in ONNX."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = rl.nn.LayerNormLSTM(D, 4)
        self.after = nn.Sequential(
            nn.LeakyReLU(0.3), nn.CELU(0.7), nn.LayerNorm(4), nn.Hardsigmoid()
        )
        self.double()

    def forward(self, batch: rl.Ragged) -> Any:
        return self.after(self.layer(batch)[0].last())


def test_float64_is_float64_throughout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Wide(), a_batch([3, 5, 1]).to(torch.float64)
    rl.export.onnx(model, tmp_path / "model.onnx", example=batch, layout="flat")
    assert (
        largest_error(run_file(tmp_path / "model.onnx", "flat", batch), truth(model, "flat", batch))
        < 1e-13
    )


VARIANTS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "deep": [(kind, {"num_layers": 2, "bidirectional": True}) for kind in KINDS],
    "clipped": [(kind, {"bidirectional": True, "clip": 0.5}) for kind in GATED],
    "from lengths": [(kind, {"bias": False, "initial_state": "lengths"}) for kind in KINDS],
    "float64": [(kind, {"dtype": torch.float64, "bidirectional": True}) for kind in KINDS],
    "zoneout": [(kind, {"zoneout": 0.3}) for kind in KINDS],
    "projected": [
        (
            KINDS[2],
            {"proj_size": 5, "num_layers": 2, "bidirectional": True, "initial_state": "learned"},
        )
    ],
    "blocks": [
        (Kind("Mamba", "mamba"), {"state_size": 4}),
        (Kind("Mamba2", "mamba2"), {"state_size": 4, "num_groups": 2, "head_dim": 8}),
        (Kind("GatedDeltaNet", "gated_delta_net"), {"num_layers": 2}),
        (Kind("MLSTM", "mlstm"), {"num_heads": 2}),
        (Kind("RGLRU", "rglru"), {"num_heads": 2}),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["flat", "padded"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_cell_in_every_variant(variant: str, layout: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    for kind, options in VARIANTS[variant]:
        torch.manual_seed(0)
        layer = getattr(rl.nn, kind.layer)(D, 16, **{**kind.options, **options})
        if layer.initial_state == "learned":
            for name in ("initial_h", "initial_c"):
                nn.init.normal_(layer.get_parameter(name))
        dtype = next(layer.parameters()).dtype
        example = a_batch([3, 5]).to(dtype)
        given = options.get("initial_state") is None and "proj_size" not in options
        # Three sequences, because states have 1, 2 or 4 rows, which the export must not take for
        # sequences.
        example = rl.Ragged([*example.to_list(), example[0]])
        # States of previous sequences, because not all numbers are valid states of every cell.
        with torch.no_grad():
            _, hx = layer(rl.Ragged([torch.randn(4, D, dtype=dtype) for _ in range(len(example))]))
        exported: Any = rl.export.onnx(
            layer, path, example=(example, hx) if given else example, layout=layout
        )
        # Normalisation amplifies rounding errors; there the export checks the difference itself.
        is_normalised = kind.layer.startswith("LayerNorm") or kind.layer == "GatedDeltaNet"
        assert is_normalised or exported.verified.largest_difference < 1e-5, (str(kind), options)


EXAMPLES = Path(__file__).parents[2] / "examples" / "export"
SEQUENCES = [[[100.1, -2.0], [100.3, 1.9], [99.0, 0.5]], [[100.7, 1.1]]]


def a_run() -> Run:
    """Return an untrained model whose probabilities are not all near one half."""
    torch.manual_seed(0)
    scales = {"mean": (100.0, 0.5), "std": (0.5, 2.0), "missing": "elapsed"}
    preprocessor = Preprocessor("classify", ("a", "time_gap"), labels=("no", "yes"), **scales)  # type: ignore[arg-type]
    model = SequenceModel(
        ModelConfig("classify", "gru", input_size=6, output_size=2, hidden_size=8)
    ).eval()
    with torch.no_grad():
        model.head.weight.mul_(9)
    return Run(SavedModel(model, preprocessor, {}))


def test_a_run_is_used_from_other_programs(tmp_path: Path, capsys: Capsys) -> None:
    run, folder, path = a_run(), tmp_path / "model", tmp_path / "model.onnx"
    run.save(folder)
    printed = prints(["export", str(folder), "-o", str(path)], capsys)
    assert f"metadata: {tmp_path}/model.json" in printed
    assert "verified in ONNX Runtime: " in printed
    described = json.loads((tmp_path / "model.json").read_text())
    known = {"labels": ["no", "yes"], "channels": ["a", "time_gap"], "missing": "elapsed"}
    assert (known | {"output": "output_probabilities"}).items() <= described.items()
    table = run.predict([np.array(sequence) for sequence in SEQUENCES])
    rows = zip(table["prediction"], table["probability"], strict=True)
    wanted = "".join(f"{label} {share:.4f}\n" for label, share in rows)
    command = [sys.executable, str(EXAMPLES / "classify.py"), str(path), json.dumps(SEQUENCES)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == wanted
    node = shutil.which("node")
    asked = [node or "", "-e", "require('onnxruntime-web')"]
    if node is None or subprocess.run(asked, capture_output=True, env=os.environ).returncode:
        pytest.skip("JavaScript needs node and onnxruntime-web, which NODE_PATH must contain")
    command = [node, str(EXAMPLES / "classify.js"), str(path), json.dumps(SEQUENCES)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == wanted


def test_preprocessing_that_a_graph_lacks_is_refused(tmp_path: Path, capsys: Capsys) -> None:
    folder = tmp_path / "model"
    a_run().save(folder)
    for place, words in {
        "/": "ends in .onnx",
        "no/model.onnx": "path must be a file in a folder that exists, got ",
        "model/m.onnx": "output must be a file that is not of the run",
    }.items():
        assert main(["export", str(folder), "-o", str(tmp_path / place)]) == 2
        assert words in capsys.readouterr().err
    assert [part.name for part in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_leaves_neither_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    a_run().save(tmp_path / "model")
    bring, calls = os.fsync, []

    def fill(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        bring(descriptor)

    monkeypatch.setattr(os, "fsync", fill)
    assert (
        main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "model.onnx"), "--no-verify"])
        == 2
    )
    assert f"{tmp_path}/model.json: No space left" in capsys.readouterr().err
    assert [part.name for part in tmp_path.iterdir()] == ["model"]


class Returns(nn.Module):
    """Return outputs with the sizes of the input, and with others."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = rl.nn.LSTM(D, 4)

    def forward(self, batch: rl.Ragged) -> dict[str, Any]:
        out, _ = self.lstm(batch)
        return {"all": out, "last": out.last(), "rest": out[:, 1:]}


@pytest.mark.parametrize(
    ("layout", "all_steps", "rest"),
    [
        ("padded", "sequences steps 4", "sequences output_rest_steps 4"),
        ("flat", "elements 4", "output_rest_elements 4"),
    ],
)
def test_sizes_of_outputs_have_names(
    layout: Any, all_steps: str, rest: str, tmp_path: Path
) -> None:
    import onnx

    path = tmp_path / "model.onnx"
    rl.export.onnx(Returns(), path, example=a_batch([3, 5, 2]), layout=layout)
    sizes = {
        value.name: " ".join(
            each.dim_param or str(each.dim_value) for each in value.type.tensor_type.shape.dim
        )
        for value in onnx.load(path).graph.output
    }
    assert sizes["output_all"] == all_steps
    assert sizes["output_last"] == "sequences 4"
    assert sizes["output_rest"] == rest


def test_the_exporter_of_torch_names_ours() -> None:
    with pytest.raises(Exception, match=r"rl\.export\.onnx\(model, path, example=batch\)"):
        torch.onnx.export(Returns().eval(), (a_batch([3, 5]),), dynamo=True, verbose=False)
