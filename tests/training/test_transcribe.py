"""The task transcribe: data, losses, greedy answers, error rates and the commands."""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from commands import FAST, Capsys, fails, prints, read_rows
from raglane.cli import main
from raglane.data import Columns, Dataset, Preprocessor, read
from raglane.errors import ArgumentError, ExportError
from raglane.training.checkpoint import SavedModel
from raglane.training.inference import evaluate, predict
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.settings import DECODERS, Settings
from raglane.transduction import ctc_greedy_search

_BEST = ("prediction", "score", "n_best", "n_best_scores")
_WORDS = "zero one two three four five six seven eight nine".split()


def _digits(count: int, seed: int = 0) -> tuple[list[str], list[str]]:
    """Return digits in words, such as "one two", and in figures, "12"."""
    chance = random.Random(seed)
    rows = [[chance.randrange(10) for _ in range(chance.randint(1, 5))] for _ in range(count)]
    return [" ".join(_WORDS[digit] for digit in row) for row in rows], [
        "".join(map(str, row)) for row in rows
    ]


def _write(path: Path, inputs: list[Any], targets: list[Any]) -> Path:
    """Write a file of two columns, input and target."""
    if path.suffix == ".jsonl":
        rows = [
            json.dumps({"input": one, "target": other})
            for one, other in zip(inputs, targets, strict=True)
        ]
    else:
        mark = "\t" if path.suffix == ".tsv" else ","
        rows = [mark.join(row) for row in (("input", "target"), *zip(inputs, targets, strict=True))]
    path.write_text("\n".join(rows) + "\n")
    return path


def _random_model(records: Dataset, **more: Any) -> SavedModel:
    settings = Settings("transcribe", hidden_size=5, embedding=4, **more)
    preprocessor = Preprocessor.fit(records, task="transcribe")
    torch.manual_seed(0)
    model = SequenceModel(ModelConfig.of(settings, preprocessor)).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight)
    return SavedModel(model, preprocessor, {})


@pytest.mark.parametrize(
    ("suffix", "targets", "split", "expected"),
    [
        (".csv", ["ba a", "", "bb"], None, [tuple("ba a"), (), ("b", "b")]),
        (".tsv", ["ba a", "b", "bb"], "words", [("ba", "a"), ("b",), ("bb",)]),
        (".jsonl", ["ba a", "", "bb"], None, [tuple("ba a"), (), ("b", "b")]),
        (".jsonl", [["b", "b", "a"], [], ["a"]], None, [("b", "b", "a"), (), ("a",)]),
        (".jsonl", [[3, 3, 1], [], [2]], None, [("3", "3", "1"), (), ("2",)]),
    ],
    ids=["csv", "words", "text", "lists", "numbers"],
)
def test_targets_of_every_form(
    tmp_path: Path, suffix: str, targets: Any, split: str | None, expected: Any
) -> None:
    inputs = ["u v", "v", "w u u"]
    columns = Columns("transcribe", sequence="input", label="target", label_split=split)
    path = _write(tmp_path / f"a{suffix}", inputs, targets)
    from_file, in_memory = read(path, columns), read(inputs, columns, labels=targets)
    for data in (from_file, in_memory, read(path, from_file.columns)):
        assert data.targets is not None
        assert data.targets.values.tolist() == expected
        fitted = Preprocessor.fit(data, task="transcribe")
        assert fitted.labels == tuple(sorted({label for own in expected for label in own}))
        assert fitted.label_split == (
            None if isinstance(targets[0], list) else split or "characters"
        )
        batch = rl.collate(fitted.apply(data).__getitems__([2, 0]))
        places = [[fitted.labels.index(label) + 1 for label in expected[row]] for row in (2, 0)]
        assert [own.tolist() for own in batch["target"]] == places


def test_columns_are_guessed_if_their_names_are_usual(tmp_path: Path, capsys: Capsys) -> None:
    inputs, targets = _digits(20)
    path = _write(tmp_path / "a.csv", inputs, targets)
    command = ["train", str(path), "--task", "transcribe", "--output", str(tmp_path / "run"), *FAST]
    assert main(command) == 0
    assert "sequence column: 'input'" not in capsys.readouterr().err
    path.write_text(path.read_text().replace("input,target", "spoken,figures"))
    fails([*command, "--overwrite"], capsys, "2 candidates", "--sequence-column")
    named = ["--sequence-column", "spoken", "--label-column"]
    fails([*command, "--overwrite", *named, "number"], capsys, "no column 'number'")
    assert main([*command, "--overwrite", *named, "figures"]) == 0
    # Numbers can be no target, so a text beside them is, whatever its name.
    spoken = tmp_path / "spoken.jsonl"
    spoken.write_text(
        '{"frames": [[0.5], [1.5], [0.5]], "text": "a"}\n{"frames": [[2.5], [1.5]], "text": "b"}\n'
        * 4
    )
    prints(["train", str(spoken), *command[2:], "--overwrite"], capsys, "sequence column: 'frames'")


@pytest.mark.parametrize("seed", range(4))
def test_the_best_path_is_collapsed(seed: int) -> None:
    chance = np.random.default_rng(seed)
    lengths = [0, 1, 5, 0, 9, 2, 0]
    log_probs = rl.Ragged(
        [torch.from_numpy(chance.normal(size=(length, 3))).log_softmax(-1) for length in lengths]
    )
    found = ctc_greedy_search(log_probs)
    assert found.times is not None
    for place, own in enumerate(log_probs):
        labels = own.argmax(1).tolist() if len(own) else []
        runs, start = [], 0
        for label, group in groupby(labels):
            end = start + len(list(group))
            runs += [(label, start, end)] if label else []
            start = end
        assert found.tokens[place].tolist() == [label for label, *_ in runs]
        assert found.times[place].tolist() == [list(times) for _, *times in runs]
        assert float(found.scores[place]) == pytest.approx(
            sum(own.amax(1).tolist()) if len(own) else 0.0
        )


def _distance(found: Any, known: Any) -> int:
    row = list(range(len(found) + 1))
    for place, label in enumerate(known, 1):
        before, row = row, [place]
        row += [0] * len(found)
        for at, other in enumerate(found, 1):
            row[at] = min(before[at] + 1, row[at - 1] + 1, before[at - 1] + (label != other))
    return row[-1]


def test_rates_are_those_of_the_predictions() -> None:
    chance = random.Random(1)
    inputs = ["".join(chance.choices("uvw", k=chance.randint(0, 12))) for _ in range(30)]
    targets = (
        ["".join(chance.choices("ab ", k=chance.randint(0, 6))) for _ in range(24)]
        + ["ab b"] * 5
        + ["aab"]
    )
    known = read(inputs, Columns("transcribe", split="characters"), labels=targets)
    data = read(inputs, Columns("transcribe", split="characters"), labels=[*targets[:-1], "?ab"])
    saved = _random_model(known)
    evaluation = evaluate(saved, data, batch_size=7)
    texts = predict(saved, data)["prediction"]
    truth = [*targets[:-1], "?ab"]
    errors = [_distance(*pair) for pair in zip(texts, truth, strict=True)]
    total = sum(map(len, truth))
    words = [_distance(a.split(), b.split()) for a, b in zip(texts, truth, strict=True)]
    expected = {
        "token_error_rate": sum(errors) / total,
        "cer": sum(errors) / total,
        "wer": sum(words) / sum(len(text.split()) for text in truth),
        "exact_match": errors.count(0) / len(errors),
    }
    assert {name: evaluation[name] for name in expected} == pytest.approx(expected)
    commonest = sum(_distance("ab b", own) for own in truth) / total
    assert evaluation["commonest_token_error_rate"] == pytest.approx(commonest)
    assert sum(row["count"] for row in evaluation.measured.table) == sum(errors)
    assert [row["errors"] for row in evaluation.measured.table] == [
        "insertions",
        "deletions",
        "substitutions",
    ]
    # The loss leaves the unseen label out.
    seen = read(inputs, Columns("transcribe", split="characters"), labels=[*targets[:-1], "ab"])
    assert evaluation["loss"] * total == pytest.approx(evaluate(saved, seen)["loss"] * (total - 1))
    assert evaluation.count == total


def test_errors_of_empty_targets_count_in_any_batch() -> None:
    columns = Columns("transcribe", split="characters")
    training = read(["u", "uv", "vu", "vv"], columns, labels=["a"] * 4)
    held_out = read(["u", "v", "vv"], columns, labels=["", "a", ""])
    run: Any = rl.fit(
        training, validation=held_out, epochs=30, batch_size=1, hidden_size=4, lr=0.1, threads=1
    )
    row = run.result.state.history[run.result.state.best_epoch - 1]
    assert row["validation_token_error_rate"] == run.evaluate(held_out)["token_error_rate"] > 0


@pytest.mark.parametrize("cell", ["lstm", "cfc"])
def test_predictions_have_the_same_bits_in_any_batch(cell: str) -> None:
    chance = random.Random(2)
    inputs = [chance.choices("uvwxyz", k=chance.randint(0, 9)) for _ in range(25)]
    data = read(inputs, Columns("transcribe"), labels=[own[:3] for own in inputs])
    saved = _random_model(data, cell=cell, bidirectional=True)
    first, *others = (predict(saved, data, batch_size=size).columns for size in (256, 7, 1))
    assert any(first["prediction"])
    for other in others:
        assert other == first


def test_digits_are_learned(tmp_path: Path, capsys: Capsys) -> None:
    """Words to figures, from training to the card, with a test file of its own."""
    data, test = (
        _write(tmp_path / f"{name}.csv", *_digits(300, seed))
        for seed, name in enumerate(("a", "b"))
    )
    run, named = str(tmp_path / "run"), ["--sequence-column", "input", "--label-column", "target"]
    options = [
        "--split",
        "characters",
        "--bidirectional",
        "--hidden-size",
        "24",
        "--lr",
        "0.01",
        "--threads",
        "1",
    ]
    command = [
        "train",
        str(data),
        "--task",
        "transcribe",
        "--output",
        run,
        "--test",
        str(test),
        *named,
        *options,
    ]
    printed = prints([*command, "--epochs", "6"], capsys, "token error rate ")
    assert "fewer elements than labels" not in printed
    assert main(["train", "--resume", "--output", run, "--epochs", "8", "--quiet"]) == 0
    loaded = rl.load(run)
    assert loaded.evaluate(str(test))["token_error_rate"] < 0.05
    assert loaded.predict(["one nine nine", "two"])["prediction"] == ["199", "2"]
    (times,) = loaded.predict(["one two"])["times"]
    assert len(times) == 2
    assert 0 <= times[0][0] < times[0][1] <= times[1][0] < times[1][1] <= len("one two")
    card = (tmp_path / "run" / "card.md").read_text()
    for piece in (
        "trained to transcribe",
        "## Examples",
        "| input | target | prediction |",
        "substitutions",
    ):
        assert piece in card, piece
    prints(["evaluate", run, str(test)], capsys, "WER ")
    assert main(["predict", run, str(test), "-o", str(tmp_path / "p.jsonl"), "--quiet"]) == 0
    rows = read_rows(tmp_path / "p.jsonl")
    assert set(rows[0]) == {"id", "prediction", "score", "times"}
    assert [row["prediction"] for row in rows] == loaded.predict(str(test))["prediction"]


def test_an_exported_file_has_what_decodes_it(tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs raglane[export]")
    inputs, targets = _digits(40)
    run = rl.fit(
        inputs,
        targets,
        task="transcribe",
        split="characters",
        epochs=2,
        hidden_size=8,
        progress=False,
    )
    exported = run.export(tmp_path / "a.onnx", layout="flat")
    about = json.loads((tmp_path / "a.json").read_text())
    assert (about["task"], about["output"], about["blank"]) == (
        "transcribe",
        "output_log_probabilities",
        0,
    )
    assert about["labels"] == list(run.labels)
    text = inputs[0]
    places = [about["vocabulary"].index(token) for token in text]
    session = onnxruntime.InferenceSession(exported.path)
    (log_probs,) = session.run(
        None, {"values": np.array(places), "offsets": np.array([0, len(places)])}
    )
    best = [label for label, _ in groupby(log_probs.argmax(1).tolist()) if label]
    assert (
        "".join(about["labels"][label - 1] for label in best)
        == run.predict([text])["prediction"][0]
    )


@pytest.mark.parametrize("decoder", DECODERS)
def test_every_decoder_is_trained_saved_and_searched(tmp_path: Path, decoder: Any) -> None:
    inputs, targets = _digits(24)
    options: dict[str, Any] = {
        "split": "characters",
        "hidden_size": 6,
        "threads": 1,
        "progress": False,
    }
    run = rl.fit(
        inputs,
        targets,
        task="transcribe",
        decoder=decoder,
        output=tmp_path / "run",
        epochs=2,
        **options,
    )
    weights = list(run.model.parameters())
    assert run.model.config.count() == (sum(weight.numel() for weight in weights), len(weights))
    again = rl.load(tmp_path / "run")
    found, same = (
        run.predict(inputs, n_best=3).columns,
        again.predict(inputs, n_best=3, beam_size=16).columns,
    )
    assert same == found
    assert ("times" in found) == (decoder != "attention")
    for best, score, texts, scores in zip(*(found[name] for name in _BEST), strict=True):
        assert (texts[0], scores[0]) == (best, score)
        assert scores == sorted(scores, reverse=True)
        assert len(set(texts)) == len(texts) == 3
    greedy = run.predict(inputs)["prediction"]
    errors = sum(_distance(*pair) for pair in zip(greedy, targets, strict=True))
    rate = run.evaluate(inputs, targets)["token_error_rate"]
    assert rate == pytest.approx(errors / sum(map(len, targets)))
    beam = sum(
        _distance(*pair)
        for pair in zip(run.predict(inputs, beam_size=5)["prediction"], targets, strict=True)
    )
    assert run.evaluate(inputs, targets, beam_size=5)["token_error_rate"] == pytest.approx(
        beam / sum(map(len, targets))
    )
    with pytest.raises(ArgumentError, match="n_best must be at most 1000"):
        run.predict(inputs, n_best=1001)
    if decoder != "ctc":
        with pytest.raises(ExportError, match="a model with one output per element"):
            run.export(tmp_path / "a.onnx")


def test_a_beam_sums_over_alignments() -> None:
    chance = random.Random(3)
    inputs = [chance.choices("uvwxyz", k=chance.randint(1, 4)) for _ in range(12)]
    saved = _random_model(read(inputs, Columns("transcribe"), labels=["ab"] * 12))
    table = predict(saved, read(inputs, Columns("transcribe", need_labels=False)), beam_size=200)
    for place, (text, score) in enumerate(zip(table["prediction"], table["score"], strict=True)):
        one = read([inputs[place]], Columns("transcribe"), labels=[text or "a"])
        if text:
            assert evaluate(saved, one)["loss"] * len(text) == pytest.approx(-score, rel=1e-4)


def test_attention_writes_in_any_order_and_length() -> None:
    chance = random.Random(4)
    rows = [[chance.randrange(3) for _ in range(chance.randint(1, 3))] for _ in range(120)]
    inputs, targets = (
        [[f"w{digit}" for digit in row] for row in rows],
        [[*row[::-1], *row[::-1]] for row in rows],
    )
    options: dict[str, Any] = {
        "hidden_size": 24,
        "lr": 0.02,
        "threads": 1,
        "progress": False,
        "epochs": 10,
    }
    run = rl.fit(
        inputs, targets, task="transcribe", decoder="attention", bidirectional=True, **options
    )
    assert not any("fewer elements" in note for note in run.notes)
    assert run.evaluate(inputs, targets)["token_error_rate"] < 0.1
    assert run.predict([["w0", "w2"]])["prediction"] == [[2, 0, 2, 0]]


def test_targets_of_lists_give_lists() -> None:
    inputs = [[float(step) for step in range(length)] for length in (4, 6, 5, 7)] * 3
    options: dict[str, Any] = {
        "epochs": 1,
        "hidden_size": 4,
        "progress": False,
        "validation_fraction": 0,
    }
    run = rl.fit(inputs, [[7, 7], [], [8], [9, 8]] * 3, task="transcribe", **options)
    assert run.labels == ("7", "8", "9")
    evaluation = run.evaluate(inputs, [[7], [12, 8], [], [9]] * 3)
    assert not {"cer", "wer"} & set(evaluation.numbers)
    assert evaluation.count == 12
    predicted = run.predict(inputs)["prediction"]
    assert all(isinstance(label, int) for own in predicted for label in own)


def test_labels_that_only_the_validation_part_has() -> None:
    inputs, targets = _digits(30)
    options: dict[str, Any] = {
        "task": "transcribe",
        "split": "characters",
        "hidden_size": 4,
        "progress": False,
    }
    run: Any = rl.fit(inputs, targets, validation=(["one two"], ["1?!?2"]), epochs=1, **options)
    assert any(
        note.startswith("labels that only the validation part has: 2, in 3 places")
        for note in run.notes
    )
    assert np.isfinite(run.result.state.history[0]["validation_loss"])


def test_sequences_too_short_for_ctc(capsys: Capsys, tmp_path: Path) -> None:
    inputs, targets = ["a b c", "a b c", "a", "b b"] * 5, ["xy", "xxy", "xyx", "yy"] * 5
    options: dict[str, Any] = {
        "epochs": 1,
        "hidden_size": 4,
        "progress": False,
        "validation_fraction": 0,
    }
    # "xxy" requires four elements.
    found = "15 of 20 training sequences with fewer elements than labels (row 1)"
    run = rl.fit(inputs, targets, task="transcribe", **options)
    (line,) = (note for note in run.notes if "fewer elements" in note)
    assert line.startswith(found)
    path = _write(tmp_path / "a.jsonl", ["a", "b"] * 5, ["xy", "yx"] * 5)
    named = ["--sequence-column", "input", "--label-column", "target", "--split", "words"]
    command = [
        "train",
        str(path),
        "--task",
        "transcribe",
        "--output",
        str(tmp_path / "run"),
        *named,
        *FAST,
    ]
    command += ["--decoder", "ctc", "--validation-fraction", "0"]
    fails(command, capsys, "10 of 10 training sequences", "--split characters")


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        (
            ["--task", "classify", "--decoder", "ctc"],
            "--decoder must be unset for all tasks except transcribe",
        ),
        (
            ["--task", "classify", "--label-split", "words"],
            "--label-split must be left out for all tasks except",
        ),
        (["--task", "transcribe", "--bptt-steps", "5"], "--bptt-steps must be None"),
        (["--task", "transcribe", "--pooling", "mean"], "--pooling must be final"),
        (["--task", "transcribe", "--class-weights", "balanced"], "--class-weights must be none"),
        (
            ["--task", "transcribe", "--too-long", "chunk", "--batch-elements", "50"],
            "whose targets cannot be cut",
        ),
        (
            ["--task", "transcribe", "--label-split", "syllables"],
            "--label-split must be one of words",
        ),
    ],
)
def test_options_without_a_meaning(
    tmp_path: Path, capsys: Capsys, options: list[str], piece: str
) -> None:
    path = _write(tmp_path / "a.jsonl", *_digits(10))
    named = ["--sequence-column", "input", "--label-column", "target"]
    fails(
        ["train", str(path), "--output", str(tmp_path / "run"), *named, *FAST, *options],
        capsys,
        piece,
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "piece"),
    [
        (["--beam-size", "0"], "--beam-size must be at least 1, got 0"),
        (["--n-best", "0"], "--n-best must be at least 1, got 0"),
        (["--n-best", "3", "--beam-size", "2"], "--n-best must be at most the beam size, 2, got 3"),
        (["--probabilities"], "--probabilities must be left out"),
        (["--horizon", "2"], "--horizon must be left out"),
    ],
)
def test_options_of_predictions(
    tmp_path: Path, capsys: Capsys, options: list[str], piece: str
) -> None:
    inputs, targets = _digits(10)
    run = rl.fit(
        inputs,
        targets,
        task="transcribe",
        split="characters",
        epochs=1,
        hidden_size=4,
        progress=False,
    )
    run.save(tmp_path / "run")
    path = _write(tmp_path / "a.jsonl", inputs, targets)
    fails(
        ["predict", str(tmp_path / "run"), str(path), "--sequence-column", "input", *options],
        capsys,
        piece,
    )


def test_labels_that_all_differ_may_be_sequences() -> None:
    inputs, targets = ["a b", "b a"] * 6, [f"text {letter}" for letter in "abcdefghijkl"]
    run = rl.fit(inputs, targets, epochs=1, hidden_size=4, validation_fraction=0, progress=False)
    assert any(
        note.startswith("labels: 12 different ones") and "transcribe" in note for note in run.notes
    )
