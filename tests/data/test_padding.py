"""Elements that do not count: the padding at the end of sequences, and the label -100."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from raglane.data import Columns, convert, read

NAN = float("nan")


def padded(*lengths: int, size: int = 5, channels: int = 2) -> np.ndarray:
    """Return ``(B, size, channels)`` numbers, NaN from the length of each sequence on."""
    array = np.full((len(lengths), size, channels), NAN, dtype=np.float32)
    for row, length in enumerate(lengths):
        array[row, :length] = np.arange(length * channels).reshape(length, channels)
    return array


def as_files(folder: Path, array: np.ndarray) -> dict[str, Any]:
    """Return the same sequences in every form that may be padded."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    labels = ["up", "down", "up"]
    rows = [":".join(",".join(map(str, row)) for row in sequence.T) for sequence in array]
    header = "@univariate false\n@dimensions 2\n@classLabel true up down\n@data\n"
    ts = folder / "x.ts"
    lines = [f"{row}:{label}" for row, label in zip(rows, labels, strict=True)]
    ts.write_text(header + "\n".join(lines) + "\n")
    table = pyarrow.table({"x": array.tolist(), "kind": labels})
    parquet.write_table(table, folder / "x.parquet")
    names = [f"{axis}{step}" for step in range(array.shape[1]) for axis in "ab"]
    csv = folder / "x.csv"
    cells = [",".join(map(str, sequence.ravel())) for sequence in array]
    body = [f"{row},{cell},{labels[row]}" for row, cell in enumerate(cells)]
    csv.write_text("\n".join([f"id,{','.join(names)},kind", *body]) + "\n")
    np.savez(folder / "x.npz", x=array, kind=np.array(labels))
    return {
        "array": array,
        "list": list(array),
        "table": table,
        **{name: folder / f"x.{name}" for name in ("ts", "parquet", "csv", "npz")},
    }


@pytest.mark.parametrize("kind", ["array", "list", "table", "ts", "parquet", "csv", "npz"])
def test_a_sequence_ends_before_elements_that_are_missing(tmp_path: Path, kind: str) -> None:
    array = padded(5, 2, 4)
    array[0, 1] = NAN  # within a sequence it is an element
    array[2, 3, 0] = NAN  # the other channel is there
    source = as_files(tmp_path, array)[kind]
    labels = ["up", "down", "up"] if kind in ("array", "list") else None
    data = read(source, labels=labels)
    assert data.lengths.tolist() == [5, 2, 4]
    assert any("1 element" in note or "end" in note for note in data.notes)
    assert np.isnan(data.records.values[1]).all()
    kept = read(source, Columns(keep_trailing=True), labels=labels)
    assert kept.lengths.tolist() == [5, 5, 5]


def test_every_store_has_the_lengths_without_padding(tmp_path: Path) -> None:
    files = as_files(tmp_path, padded(5, 2, 4))
    for source in (files["parquet"], files["table"]):
        data = rl.data.Dataset(source)
        assert data.lengths.tolist() == [5, 2, 4]
        assert [len(data[row]["inputs"]) for row in range(3)] == [5, 2, 4]
    convert([files["ts"]], tmp_path / "converted", Columns())
    assert rl.data.Dataset(tmp_path / "converted").lengths.tolist() == [5, 2, 4]


def test_a_sequence_without_a_value_keeps_one_missing_element() -> None:
    data = read(padded(3, 0), Columns(need_labels=False))
    assert data.lengths.tolist() == [3, 1]


def test_elements_with_labels_are_no_padding() -> None:
    array = padded(3, 2, size=3, channels=1)
    tagged = read(array, Columns(task="tag"), labels=[["a", "b", "a"]] * 2)
    assert tagged.lengths.tolist() == [3, 3]
    # So a model of labels per element answers for each element.
    assert tagged.columns.keep_trailing


def test_one_rule_in_training_and_prediction() -> None:
    array = padded(*[5, 3] * 6)
    quick: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "threads": 1}
    run = rl.fit(array, [0, 1] * 6, **quick)
    short = [sequence[: 5 - 2 * (row % 2)] for row, sequence in enumerate(array)]
    alike = rl.fit(short, [0, 1] * 6, **quick)
    for first, other in zip(run.model.parameters(), alike.model.parameters(), strict=True):
        assert torch.equal(first, other)
    assert (
        run.predict(array, probabilities=True).columns
        == alike.predict(short, probabilities=True).columns
    )
    kept = rl.fit(array, [0, 1] * 6, keep_trailing=True, missing="zero", **quick)
    with pytest.raises(rl.errors.DataError, match="nan"):
        rl.fit(array, [0, 1] * 6, keep_trailing=True, **quick)
    assert kept.read(array, need_labels=False).lengths.tolist() == [5] * 12


def test_the_label_of_elements_that_do_not_count() -> None:
    words = [["[CLS]", "a", "b", "[SEP]"], ["[CLS]", "b", "[SEP]"]] * 8
    labels = [[-100, 1, 0, -100], [-100, 0, -100]] * 8
    quick: dict[str, Any] = {
        "task": "tag",
        "epochs": 30,
        "hidden_size": 8,
        "threads": 1,
        "lr": 0.05,
    }
    run = rl.fit(words, labels, validation_fraction=0, **quick)
    assert run.labels == ("0", "1")
    assert (
        "labels: -100 is no class: 32 of 56 elements of the training part do not count" in run.notes
    )
    evaluation = run.evaluate(words, labels)
    assert evaluation.count == 24
    assert evaluation.numbers["accuracy"] == 1.0
    assert evaluation.confusion is not None
    assert int(evaluation.confusion.sum()) == 24
    predicted = run.predict(words[:2]).columns["prediction"]
    assert set(np.hstack(predicted).tolist()) <= {0, 1}


def test_a_negative_label_among_others_is_a_class() -> None:
    words = [["a", "b"], ["b", "a"]] * 4
    quick: dict[str, Any] = {"task": "tag", "epochs": 1, "hidden_size": 4, "threads": 1}
    assert rl.fit(words, [[-100, -1], [-1, -100]] * 4, **quick).labels == ("-100", "-1")
    assert rl.fit(words, [["-100", "x"], ["x", "-100"]] * 4, **quick).labels == ("-100", "x")
