"""Models for other programs: stored programs of ``torch.export``, the operator, packages of
AOTInductor.
"""

from __future__ import annotations

import copy
import itertools
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from exported import FEW, ODD, D, a_batch, largest_error, truth
from own_cells import Leaky
from raglane.data.prepare.encoders import END, UNKNOWN, FeatureEncoder
from raglane.data.prepare.preprocess import Preprocessor
from raglane.errors import ArgumentError, ArgumentTypeError, ExportError
from raglane.export import aot
from raglane.export.aot import _KernelLoops
from raglane.export.signature import Signature, elements_of_padded, offsets_within
from raglane.export.tracing import traced
from raglane.export.verify import _difference, check_agrees
from raglane.kernels.graph import Loops
from raglane.native import missing_kernels
from raglane.native.library import operators
from raglane.runs.exported import RunModule, _description
from raglane.training.model import ModelConfig, SequenceModel
from scripts import Script

with_kernels = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))


class Tagger(nn.Module):
    """Layers of the kernels, a program, and operations on sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.first = rl.nn.LSTM(D, 8, 2, bidirectional=True, proj_size=4, initial_state="learned")
        self.second, self.third = rl.nn.SRU(8, 6), rl.nn.PeepholeLSTM(6, 5)
        nn.init.normal_(self.first.get_parameter("initial_h"))

    def forward(self, batch: rl.Ragged) -> tuple[Tensor, Tensor, Tensor]:
        out, state = self.third(self.second(self.first(batch)[0])[0])
        return out.values, out.mean(1, empty=0.0), state[0]


def stored(folder: Path, model: nn.Module, lists: list[list[int]], layout: str = "flat") -> None:
    """Store batches and the outputs of a model, for another process."""
    batches = [a_batch(lengths) for lengths in lists]
    inputs = [(b.values, b.offsets) if layout == "flat" else b.to_padded() for b in batches]
    torch.save(
        [(given, truth(model, layout, b)) for given, b in zip(inputs, batches, strict=True)],
        folder / "batches",
    )


COMPARE = """
for given, wanted in torch.load("{folder}/batches"):
    for found, right in zip(run(*given), wanted, strict=True):
        assert found.shape == right.shape, (found.shape, right.shape)
        assert ((found - right).abs() <= 1e-5).all(), (found, right)
print("raglane" in sys.modules, "the end")
"""


@with_kernels
@pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable:UserWarning"
)  # torch 2.11's own, when it loads
def test_a_stored_program_runs_in_a_fresh_process(script: Script, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tagger().eval()
    dims = {"batch": [{0: torch.export.Dim("elements")}, {0: torch.export.Dim("sequences") + 1}]}
    with torch.no_grad():
        program = torch.export.export(model, (a_batch([3, 5, 2]),), dynamic_shapes=dims)
    torch.export.save(program, tmp_path / "model.pt2")
    stored(tmp_path, model, FEW)
    code = f"""
import sys, torch
import raglane as rl, raglane.kernels.cpu.layer_operator, raglane.kernels.program.program_operator
module = torch.export.load("{tmp_path}/model.pt2").module(check_guards=False)
run = lambda values, offsets: module(rl.Ragged.from_flat(values, offsets=offsets))
"""
    done = script(code + COMPARE.format(folder=tmp_path))
    assert done.stdout == "True the end\n", done.stderr


BOTH: dict[str, Any] = {"bidirectional": True}
CELLS: list[Any] = [
    ("LSTM", BOTH | {"proj_size": 2}),
    ("GRU", {"bias": False}),
    ("RNN", BOTH),
    ("SRU", BOTH),
]
CELLS += [("QRNN", {}), ("IndRNN", {}), ("MinGRU", {"dtype": torch.float64})]


@pytest.mark.skipif(operators() is None, reason="raglane was installed without torch's operators")
def test_the_operator_of_the_kernels_needs_no_python(script: Script, tmp_path: Path) -> None:
    torch.manual_seed(0)
    library = rl.export.copy_operators(tmp_path / "operators")
    assert sorted(part.name for part in library.parent.iterdir()) == [
        "libraglane_cpu.so",
        "libraglane_torch.so",
    ]
    torch.ops.load_library(
        library
    )  # a second copy in a process that has run a layer registers nothing
    calls = []
    for name, options in CELLS:
        layer: Any = getattr(rl.nn, name)(D, 4, **options)
        batch = a_batch([3, 0, 5]).to(layer.weight_ih_l0.dtype)
        count = 2 if layer.bidirectional else 1
        states = [torch.randn(count, 3, size, dtype=batch.dtype) for size in layer.state_sizes]
        with torch.no_grad():
            out, final = layer(batch, tuple(states) if len(states) > 1 else states[0])
        weights = [part for one in layer._weights() for part in one]
        c = states[1] if len(states) > 1 else None
        given = (layer.cell.name, batch.values, batch.offsets, states[0], c, weights)
        calls.append((given, [out.values, *(final if isinstance(final, tuple) else (final,))]))
    torch.save(calls, tmp_path / "calls")
    code = f"""
import sys, torch
torch.ops.load_library("{library}")
calls = torch.load("{tmp_path}/calls")
for given, wanted in calls:
    found = torch.ops.raglane.layer(*given)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted)), given[0]
(cell, values, offsets, h, c, weights), _ = calls[0]
few, wide = weights[:5], [weights[0].double(), *weights[1:]]
falling, beyond = torch.tensor([0, 5, 3, 8]), torch.tensor([0, 3, 3, 9])
refused = [("tanh", values, offsets, h, c, weights), (cell, values[:, :2], offsets, h, c, weights),
           (cell, values, falling, h, c, weights), (cell, values, beyond, h, c, weights),
           (cell, values, offsets.int(), h, c, weights), (cell, values, offsets, h[:1], c, weights),
           (cell, values, offsets, h, None, weights), (cell, values, offsets, h, c, few),
           (cell, values, offsets, h, c, wide), (cell, values, offsets, h, c, [None] * 10),
           (cell, values, offsets, h[:, :2], c, weights), (cell, values[0], offsets, h, c, weights),
           (cell, values.half(), offsets, h, c, weights), (cell, values, offsets[:0], h, c, weights)]
for arguments in refused:
    try:
        torch.ops.raglane.layer(*arguments)
    except RuntimeError as error:
        assert "raglane: " in str(error), error
    else:
        raise AssertionError(arguments)
print("raglane" in sys.modules)
"""
    done = script(code)
    assert done.stdout == "False\n", done.stderr


def test_models_that_cannot_be_packages_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, batch = rl.nn.GRU(D, 4), a_batch([2, 3])
    with pytest.raises(ArgumentError, match=r"path must be.*ends in \.pt2.*got"):
        rl.export.aot_inductor(layer, tmp_path / "model.onnx", example=batch)
    with pytest.raises(ExportError, match=r"operators must be .*, got .*copy_operators"):
        rl.export.aot_inductor(
            layer, tmp_path / "model.pt2", example=batch, operators=tmp_path / "no.so"
        )
    monkeypatch.setattr(aot, "LIBRARY", "libraglane_missing.so")
    with pytest.raises(
        ExportError, match=r"operators must be .*, got an installation without them.*slower"
    ):
        rl.export.copy_operators(tmp_path / "operators")
    assert list(tmp_path.rglob("*.so")) == []


def test_a_layer_whose_states_are_asked_for_is_a_loop_beside_the_operator() -> None:
    class States(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = rl.nn.LSTM(D, 4), nn.BatchNorm1d(4)

        def forward(self, batch: rl.Ragged) -> Tensor:
            states: Any = self.layer.with_states(batch)[2]
            return cast(Tensor, states[0][0].map(self.norm).values)

    model, loops = States().eval(), _KernelLoops(has_kernels=True)
    traced(model, Signature.of(model, a_batch([3, 5]), "flat"), loops)
    assert (loops.layers, loops.loops) == (0, 1)


class Paired(nn.Module):
    """Numbers, tokens and resets of the same elements, and sequences of other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(5, 2), rl.nn.GRU(D + 2, 2, bidirectional=True)
        self.second, self.third = rl.nn.Recurrent(Leaky, 4, 4).float(), rl.nn.GRU(D, 4)

    def forward(self, numbers: Any, tokens: Any, others: Any, lengths: Tensor) -> tuple[Any, ...]:
        joined = torch.cat([numbers, tokens.map(self.embedding)], -1)
        for layer in (self.first, self.second):
            joined, _ = layer(joined, resets=tokens.map(lambda values: values == 0))
        last = self.third(others)[0].last(empty=0)
        return (
            joined,
            joined.mean() * last * lengths.unsqueeze(1),
            numbers,
            {"same": lengths, "twice": joined},
        )


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_batches_of_the_same_lengths_share_an_input(layout: str) -> None:
    def drawn(lengths: list[int]) -> Any:
        tokens = rl.Ragged.from_flat(torch.randint(5, (sum(lengths),)), lengths=lengths)
        return a_batch(lengths), tokens, a_batch(lengths[::-1]), torch.rand(len(lengths))

    model = Paired().eval()
    signature = Signature.of(model, drawn([3, 5]), layout)
    second = "offsets" if layout == "flat" else "lengths"
    names = [
        "numbers_values",
        f"numbers_{second}",
        "tokens_values",
        "others_values",
        f"others_{second}",
        "lengths",
    ]
    assert list(signature.inputs) == names
    with torch.no_grad():
        program = traced(model, signature, Loops())
        assert signature.output_names == [
            "output_0",
            "output_1",
            "output_2",
            "output_3_same",
            "output_3_twice",
        ]
        names = [*program.graph_signature.user_inputs, *program.graph_signature.user_outputs]
        assert len(set(names)) == len(names) == 11
        graph = program.module(check_guards=False)
        for lengths in FEW:
            given = drawn(lengths)
            found = [part.numpy() for part in graph(*signature.tensors(given))]
            assert largest_error(found, truth(model, layout, *given)) < 1e-5

    leaves: Any = signature.fresh([4, 0, 2], torch.Generator())
    assert [part.lengths.tolist() for part in leaves[:3]] == [[4, 0, 2], [4, 0, 2], [4, 6, 0]]


@with_kernels
def test_a_result_that_differs_from_the_model_is_found() -> None:
    torch.manual_seed(0)
    layer, batch, seen = rl.nn.GRU(D, 4).eval(), a_batch([3, 5]), list[list[int]]()

    def run(given: dict[str, Tensor], factor: float = 1 + 4e-6) -> list[Tensor]:
        seen.append(given["lengths"].tolist())
        out, state = layer(rl.Ragged.from_padded(given["values"], given["lengths"]))
        return [out.to_padded()[0], factor * state]

    signature = Signature.of(layer, batch, "padded")
    signature.output_names[:] = ["output_0", "output_1"]
    wrong = {1.001: r"a difference of 1\.0e-03 of its largest number", torch.nan: "other numbers"}
    packed: Any = rl.pack_weights(copy.deepcopy(layer))
    packed.rows = (row for row in range(3))  # which cannot be copied
    with torch.no_grad():
        assert check_agrees(run, packed, signature).largest_difference < 5e-6
        seen.clear()
        for model in (layer, rl.quantize(copy.deepcopy(layer))):
            seen.clear()
            verified = check_agrees(run, model, signature)
            assert 3e-6 < verified.largest_difference < 5e-6
            assert (len(seen[0]), seen[0] > [0], seen[-1]) == (1, True, [0, 0])
            assert (verified.sequences, verified.elements) == (
                sum(map(len, seen)),
                sum(map(sum, seen)),
            )
            for factor, words in wrong.items():
                with pytest.raises(ExportError, match=f"output_1 must be .*got {words}"):
                    check_agrees(partial(run, factor=factor), model, signature)
    odd = torch.tensor([0.0, torch.nan, -torch.inf])
    halves = odd[:1] + 0.125, odd[:1] + 0.25, 0.5
    for found, expected, share in (
        (odd, odd, 0),
        (-odd, odd, torch.inf),
        (odd > 0, odd < 0, torch.inf),
        halves,
    ):
        assert _difference("output", found.numpy(), expected, []) == share
    with pytest.raises(
        ExportError, match=r"output must be of the model's shape \(3,\), got shape \(1,\)"
    ):
        _difference("output", odd[:1].numpy(), odd, [])


def test_examples_that_say_too_little_are_refused() -> None:
    layer, batch, none = (
        rl.nn.GRU(D, 4),
        a_batch([2, 3]),
        rl.Ragged.from_flat(torch.zeros(0, D), lengths=[0, 0]),
    )
    refused: list[tuple[Any, str]] = [
        (
            torch.randn(2, 3, D),
            r"example must be a Ragged.*, got a Tensor\. .*rl\.Ragged\(sequences\)",
        ),
        ((batch, 3), "example must be .*got a Ragged, int"),
        (none, "example must be .*got no element"),
        (
            (batch, a_batch([1])),
            "example must be the same number in each batch, got 2 and 1 sequences",
        ),
        ((batch, torch.zeros(2, 2, 4)), r"example must be .*got hx of shape \(2, 2, 4\)"),
        ((batch, *[None] * 2, *[batch] * 5), "example must be .*, got 8 arguments"),
    ]
    for example, words in refused:
        with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
            Signature.of(layer, example, "padded")
    with pytest.raises(ArgumentError, match=r"layout must be .*got 'packed'"):
        Signature.of(layer, batch, "packed")


def test_invalid_lengths_and_offsets_are_clamped() -> None:
    for steps, given, taken in ODD["padded"]:
        padded = torch.randn(len(given), steps, D)
        expected = rl.Ragged.from_padded(padded, torch.tensor(taken).long())
        elements, offsets = elements_of_padded(padded, torch.tensor(given).long())
        assert offsets.tolist() == expected.offsets.tolist()
        assert torch.equal(elements, expected.values)
    for total, given, taken in ODD["flat"]:
        assert offsets_within(torch.tensor(given), total).tolist() == taken


class Joined(nn.Module):
    def forward(self, pair: Any, values: Any = None) -> Any:  # noqa: ARG002
        return pair[0].concat(pair[1])


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_an_output_of_other_lengths_has_its_own(layout: str) -> None:
    model, second = Joined().eval(), "offsets" if layout == "flat" else "lengths"
    signature = Signature.of(model, [a_batch([3, 5])] * 2, layout)
    assert list(signature.inputs) == ["pair_0_values", second, "pair_1_values"]
    named = Signature.of(model, (a_batch([3, 5]), torch.zeros(2)), layout)
    assert list(named.inputs) == ["pair_values", f"pair_{second}", "values"]
    graph = traced(model, signature, Loops()).module(check_guards=False)
    assert signature.output_names == ["output", f"output_{second}"]
    for lengths in FEW if layout == "flat" else [*FEW, []]:
        pair = [a_batch(lengths), a_batch(lengths)]
        wanted = pair[0].concat(pair[1])
        expected = (wanted.values, wanted.offsets) if layout == "flat" else wanted.to_padded()
        torch.testing.assert_close(tuple(graph(*signature.tensors(pair))), expected, rtol=0, atol=0)


@pytest.mark.slow
@with_kernels
@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("has_operators", [True, False])
def test_a_package_runs_without_raglane(
    script: Script, tmp_path: Path, has_operators: bool
) -> None:
    torch.manual_seed(0)
    model, path, layout = Tagger(), tmp_path / "model.pt2", "flat" if has_operators else "padded"
    library = rl.export.copy_operators(tmp_path) if has_operators else None
    made = rl.export.aot_inductor(
        model,
        path,
        example=a_batch([3, 5]),
        layout=layout,  # type: ignore[arg-type]
        operators=library,
    )
    assert (made.inputs[0], made.outputs) == ("values", ["output_0", "output_1", "output_2"])
    assert (made.layers, made.loops) == ((3, 1) if has_operators else (0, 6))
    assert made.verified is not None
    assert made.verified.largest_difference < 1e-5
    model.eval()
    if has_operators:
        stored(tmp_path, model, [*FEW, []], layout)
        load = f'torch.ops.load_library("{library}")\nrun = torch._inductor.aoti_load_package("{path}")'
        done = script(
            f"import sys, torch, torch._inductor\n{load}\n{COMPARE.format(folder=tmp_path)}",
            seconds=300,
        )
        assert done.stdout == "False the end\n", done.stderr
        return
    run: Any = torch._inductor.aoti_load_package(str(path))
    for lengths in [*FEW, []]:
        batch = a_batch(lengths)
        found = [part.detach().numpy() for part in run(*batch.to_padded())]
        assert largest_error(found, truth(model, layout, batch)) < 1e-5


TAGS = {"per_element": True}
NUMBERS: dict[str, Any] = {"channels": ("a",), "mean": (1e7 + 0.3,), "std": (4.0,)}
LABELS = NUMBERS | {"labels": ("x", "y")}
TARGETS = NUMBERS | {
    "target_names": ("u", "v"),
    "target_mean": (50.0, 0.5),
    "target_std": (7.0, 3.0),
}
TOKENS = {"input_size": 3, "embedding": 4, "output_size": 3} | TAGS
QUANTILES = {"loss": "quantile", "quantile": [0.1, 0.9]}
NEXT = {"output": "output_prediction", "per_element": False}
UNITS = {"targets": ["u", "v"], "quantiles": [0.1, 0.9]}
SCALE = torch.tensor([[7, 3, 7, 3], [50, 0.5, 50, 0.5]])
TASKS: list[tuple[str, Any, Any, Any, Any]] = [
    ("classify", LABELS, {}, lambda x: x.softmax(-1), {"per_element": False, "missing": None}),
    ("tag", LABELS, TAGS, lambda x: x.softmax(-1), {"inputs": ["values", "offsets"]} | TAGS),
    (
        "language",
        {"vocabulary": (UNKNOWN, END, "a")},
        TOKENS,
        lambda x: x.softmax(-1),
        {"begins_with": END},
    ),
    ("multilabel", LABELS, {}, torch.sigmoid, {"thresholds": [0.5, 0.5]}),
    ("transcribe", LABELS, TAGS, lambda x: x.log_softmax(-1), {"blank": 0}),
    ("regress", TARGETS, {"output_size": 4} | QUANTILES, lambda x: x * SCALE[0] + SCALE[1], UNITS),
    ("forecast", NUMBERS, QUANTILES, lambda x: x * 4 + 1e7 + 0.3, NEXT),
    ("forecast", NUMBERS, {"loss": "bce", "output_size": 1}, lambda x: x, NEXT),
]


@pytest.mark.parametrize(("task", "learned", "options", "convert", "known"), TASKS)
def test_a_task_answers_in_its_units(
    task: str, learned: Any, options: Any, convert: Any, known: Any
) -> None:
    torch.manual_seed(0)
    model: Any = SequenceModel(
        ModelConfig(task, "gru", **{"input_size": 1, "output_size": 2} | options)
    ).eval()
    preprocessor = Preprocessor(task, **learned)
    batch = rl.Ragged(
        [
            torch.tensor([1, 0, 2])
            if task == "language"
            else torch.tensor([[1e7], [1e7 + 9], [1e7 - 4]])
        ]
    )
    scaled = (
        batch.map(lambda part: ((part.double() - 1e7 - 0.3) / 4).float())
        if "mean" in learned
        else batch
    )
    with torch.no_grad():
        answers = model.forecast(scaled)[:, 0] if task == "forecast" else model(scaled)
        (found,) = RunModule(model, preprocessor)(batch).values()
    own, wanted = (
        part.values if isinstance(part, rl.Ragged) else part for part in (found, answers)
    )
    torch.testing.assert_close(own, convert(wanted.double()).float(), rtol=0, atol=1e-6)
    assert known.items() <= _description(model, preprocessor, "flat").items()


def test_a_missing_feature_is_filled_as_the_preprocessing_fills_it() -> None:
    rng = np.random.default_rng(0)
    model = SequenceModel(ModelConfig("classify", "gru", input_size=6, output_size=2))
    values = rng.normal([100, 0.5], [0.5, 2], size=(14, 2)).astype(np.float32)
    values[rng.random(values.shape) < 0.5] = np.nan
    values[3, 1] = np.inf
    batch = rl.Ragged.from_flat(torch.from_numpy(values), lengths=[4, 0, 1, 9, 0])
    kinds = itertools.product(
        ("zero", "forward", "elapsed"), (("a", "b"), ("a", "time_gap")), (0.5, 0.0)
    )
    for missing, channels, usual in kinds:
        preprocess = Preprocessor(
            "classify", channels, mean=(100.0, usual), std=(0.5, 2.0), missing=missing
        )
        wanted = preprocess.scaled(values, batch.offsets.numpy())
        found = RunModule(model, preprocess)._preprocess(batch).values
        assert torch.allclose(found, torch.from_numpy(wanted), rtol=1e-6, atol=1e-6), (
            missing,
            channels,
        )
    for decoder, features, words in (
        (None, (FeatureEncoder("weight"),), r"got 1 in columns of their own\. .*run\.model"),
        ("transducer", (), "got a model with the decoder transducer"),
    ):
        model.config = replace(model.config, task="transcribe", decoder=decoder)
        with pytest.raises(ExportError, match=f"model must be .*{words}"):
            RunModule(model, replace(preprocess, features=features))
