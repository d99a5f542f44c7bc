"""``rl.export.onnx``: files that ONNX Runtime runs as the model runs, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import GATED, KINDS
from exported import FEW, D, a_batch, largest_error, run_file, truth
from raglane.errors import ArgumentError, ArgumentTypeError, ExportError
from raglane.export.signature import Signature
from raglane.export.verify import check_agrees, in_runtime

pytest.importorskip("onnxscript", reason="needs raglane[export]")
pytest.importorskip("onnxruntime", reason="needs raglane[export]")


class Tagger(nn.Module):
    """An operator of ONNX in both directions, a Scan, and operations on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first = rl.nn.LSTM(D, 8, bidirectional=True, initial_state="learned")
        self.second = rl.nn.MinGRU(16, 6)
        self.pool = rl.nn.AttentionPooling(6, heads=2)
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


# What is padded has quick tests in test_crf.py and test_runs.py.
@pytest.mark.parametrize("layout", ["flat", pytest.param("padded", marks=pytest.mark.slow)])
def test_a_model_is_the_same_in_the_runtime(layout: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Tagger(), tmp_path / "model.onnx"
    example = (a_batch([3, 5]), torch.randn(1, 2, 6))
    exported = rl.export.onnx(model, path, example=example, layout=layout, metadata={"labels": "a b"})
    assert model.training
    assert exported.outputs == ["output_class", "output_tags", "output_state", "output_first", "output_last"]
    assert exported.operators["LSTM"] == exported.operators["Scan"] == 1
    assert exported.verified is not None
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


# Runs a file on batches in a process of its own, which a runtime may end by a signal.
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
    arrays: dict[str, Any] = {f"{n}:{name}": x.numpy() for n, batch in enumerate(batches) for name, x in batch.items()}
    np.savez(given, **arrays)
    done = subprocess.run([sys.executable, "-c", CHILD, path, given, found], capture_output=True, text=True)
    assert done.returncode == 0, (done.returncode, done.stderr[-2000:])
    stored = np.load(found)
    return [[stored[name] for name in stored if name.startswith(f"{n}:")] for n in range(len(batches))]


# How many steps or elements there are, what a file is given as lengths or offsets, and what it takes them for.
FAR = 2**62
ODD: dict[str, list[tuple[int, list[int], list[int]]]] = {
    "padded": [
        (0, [], []),
        (4, [], []),
        (0, [0, 3], [0, 0]),
        (4, [0, 0], [0, 0]),
        (4, [-1, 9], [0, 4]),
        (4, [FAR, -FAR, 1], [4, 0, 1]),
    ],
    "flat": [
        (0, [0], [0]),
        (0, [0, 3, 5], [0, 0, 0]),
        (6, [0, 4, 9], [0, 4, 6]),
        (6, [0, 5, 3, 4, 6], [0, 5, 5, 6, 6]),
        (6, [-3, -1, 4, 5], [0, 0, 4, 6]),
        (6, [FAR, -FAR, FAR, 0], [0, 0, 6, 6]),
    ],
}


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_no_lengths_end_the_runtime(layout: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Tagger().eval(), tmp_path / "model.onnx"
    rl.export.onnx(model, path, example=(a_batch([3, 5]), torch.randn(1, 2, 6)), layout=layout, verify=False)
    given: list[dict[str, Tensor]] = []
    wanted: list[list[Tensor]] = []
    for size, second, taken in ODD[layout]:
        held = torch.tensor(taken, dtype=torch.int64)
        count = len(taken) - (layout == "flat")
        values, h = torch.randn(size, D) if layout == "flat" else torch.randn(count, size, D), torch.randn(1, count, 6)
        is_flat = layout == "flat"
        batch = rl.Ragged.from_flat(values, held) if is_flat else rl.Ragged.from_padded(values, held)
        given.append({"values": values, "offsets" if is_flat else "lengths": torch.tensor(second).long(), "h": h})
        wanted.append(truth(model, layout, batch, h, steps=size))
    for case, found, expected in zip(ODD[layout], outputs_of(path, given), wanted, strict=True):
        assert largest_error(found, expected) < 1e-5, case


class Looks(nn.Module):
    """Python code that looks at numbers of the batch."""

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


def test_what_cannot_be_exported_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"before")
    expected = {
        "if": r"model\.0 must be .*does not depend on numbers of a batch.*, got a Looks that cannot be exported",
        "len": r"model .*without constants made of sizes.* len\(batch\).*, got a Sequential that cannot be exported",
        "eig": r"model\.0 must be .*unlike aten::linalg_eig.*, got a Looks that cannot be exported",
    }
    for how, words in expected.items():
        model = nn.Sequential(Looks(how))
        with pytest.raises(ExportError, match=words):
            rl.export.onnx(model, path, example=a_batch([2, 3]))
    with pytest.raises(ExportError, match=r"weight_ih_l0 must be .*float\(\).*, got torch.bfloat16"):
        rl.export.onnx(rl.nn.GRU(D, 4).bfloat16(), path, example=a_batch([2, 3]))
    assert path.read_bytes() == b"before"
    assert [part.name for part in tmp_path.iterdir()] == ["model.onnx"]


def test_examples_that_say_too_little_are_refused(tmp_path: Path) -> None:
    layer, path = rl.nn.GRU(D, 4), tmp_path / "model.onnx"
    batch, none = a_batch([2, 3]), rl.Ragged.from_flat(torch.zeros(0, D), lengths=[0, 0])
    refused: list[tuple[Any, Any, str]] = [
        (layer, torch.randn(2, 3, D), r"example must be .*rl\.Ragged.*, got a Tensor"),
        (layer, (batch, 3), "example must be .*got a Ragged, int"),
        (layer, none, "example must be .*got no element"),
        (layer, (batch, torch.zeros(2, 2, 4)), r"example must be .*got hx of shape \(2, 2, 4\)"),
        ("layer", batch, "model must be .*got "),
        (layer, (batch, None, None, batch, batch, batch, batch), "example must be .*forward names.*, got 7 arguments"),
        (rl.nn.GRU(D + 1, 4), batch, "^model: input must be [^;]*$.*, got elements of shape [^;]*"),
    ]
    for model, example, words in refused:
        with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
            rl.export.onnx(model, path, example=example)
    with pytest.raises(ArgumentError, match=r"layout must be .*got 'packed'"):
        rl.export.onnx(layer, path, example=batch, layout="packed")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="path must be "):
        rl.export.onnx(layer, tmp_path / "no" / "model.onnx", example=batch)
    assert not list(tmp_path.iterdir())


def test_a_file_that_differs_from_its_model_is_not_written(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # In float64, which says whether 0.3 is whole.
    layer, path, batch = Looks("nowhere").double(), tmp_path / "model.onnx", a_batch([2, 3]).to(torch.float64)
    rl.export.onnx(layer, path, example=batch, verify=False)
    signature = Signature.of(layer, batch, "padded")
    signature.output_names[:] = ["output"]
    with torch.no_grad():
        check_agrees(in_runtime(path.read_bytes()), layer, signature)
        layer.head.weight[0, 0] += 0.01
        with pytest.raises(ExportError, match=r"output must be .*got a difference of \S+ of its largest number"):
            check_agrees(in_runtime(path.read_bytes()), layer, signature)
    with pytest.raises(ExportError, match="that the runtime refuses"):
        in_runtime(b"no model")


class Wide(nn.Module):
    """Operators whose numbers ONNX keeps in float32, in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = rl.nn.LayerNormLSTM(D, 4)
        self.after = nn.Sequential(nn.LeakyReLU(0.3), nn.CELU(0.7), nn.LayerNorm(4), nn.Hardsigmoid())
        self.double()

    def forward(self, batch: rl.Ragged) -> Any:
        return self.after(self.layer(batch)[0].last())


def test_float64_is_float64_throughout(tmp_path: Path) -> None:
    torch.manual_seed(0)
    exported = rl.export.onnx(Wide(), tmp_path / "model.onnx", example=a_batch([3, 5, 1]).to(torch.float64))
    assert exported.verified is not None
    assert exported.verified.largest_difference < 1e-13


# ---- every cell ------------------------------------------------------------------------------------------------------

VARIANTS: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    "deep": [(kind, {"num_layers": 2, "bidirectional": True}) for kind in KINDS],
    "clipped": [(kind, {"bidirectional": True, "clip": 0.5}) for kind in GATED],
    "from lengths": [(kind, {"bias": False, "initial_state": "lengths"}) for kind in KINDS],
    "float64": [(kind, {"dtype": torch.float64, "bidirectional": True}) for kind in KINDS],
    "zoneout": [(kind, {"zoneout": 0.3}) for kind in KINDS],
    "projected": [(KINDS[2], {"proj_size": 5, "num_layers": 2, "bidirectional": True, "initial_state": "learned"})],
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
        dtype = layer.weight_ih_l0.dtype
        example = a_batch([3, 5]).to(dtype)
        given = options.get("initial_state") is None and "proj_size" not in options
        # Three sequences, since there are 1, 2 or 4 rows of states, which the export could take for sequences.
        example = rl.Ragged([*example.to_list(), example[0]])
        # As sequences before left them: not any numbers are states of every cell.
        with torch.no_grad():
            _, hx = layer(rl.Ragged([torch.randn(4, D, dtype=dtype) for _ in range(len(example))]))
        exported = rl.export.onnx(layer, path, example=(example, hx) if given else example, layout=layout)
        assert exported.verified is not None
        # Normalised, differences of rounding grow from step to step: there the export itself says what they may be.
        chaotic = kind.layer.startswith("LayerNorm")
        assert chaotic or exported.verified.largest_difference < 1e-5, (str(kind), options)
