"""``raglane evaluate``: how good a model is on data with labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from raglane.cli import console, options

if TYPE_CHECKING:
    import torch

    from raglane.data.records import Records
    from raglane.training.checkpoint import SavedModel
    from raglane.training.inference import Evaluation


_Data = Annotated[Path | None, options.argument("Data with labels. Without it: what the run was to be tested on.")]

# Above this many classes a table is wider than a terminal: it goes to its file only.
_WIDEST_TABLE = 20

# The same for the rows of a table.
_LONGEST_TABLE = 30


@options.command
def evaluate(
    run: options.Run,
    data: _Data = None,
    *,
    columns: options.Columns,
    format: options.Format = None,
    batch_size: options.PredictionBatchSize = 256,
    top: options.Top = 1,
    horizon: options.Horizon = 1,
    device: options.Device = "auto",
    quiet: options.Quiet = False,
    cell: options.Cell = None,
) -> None:
    """Measure the best model of a run: its loss, the metrics of its task, and the simple rules that it has to beat.

    The numbers go to evaluation.json in the run's folder; a confusion matrix to confusion.png and confusion.txt, a row
    per label or number to table.txt, predictions against the truth to points.png. The model card and the page keep what
    was measured at the end of the training.

    For example:

    raglane evaluate runs/vowels

    raglane evaluate runs/names more-names.csv --label-column language

    raglane evaluate runs/meters later.csv --horizon 24
    """
    from raglane.runs.run import load
    from raglane.training.checkpoint import model_folder
    from raglane.training.folder import EVALUATION, IS_BACK, at_work
    from raglane.training.inference import pick_device

    def say(line: str) -> None:
        if not quiet:
            console.say(line)

    # Before anything is read, which can take a while.
    where = pick_device(device)
    model_folder(run)
    with at_work(run, "run") as is_back:
        if is_back:
            say(IS_BACK)
        model = load(run, cell=cell)
        records = model.test_part() if data is None else model.read(data, format=format, **columns)
        tell_empty(records, model.task, say)
        asked = {"batch_size": batch_size, "top": top, "horizon": horizon}
        report(run, model.saved, records, device=where, say=say, name="evaluation", asked=asked)
        if columns.get("on_bad_row") == "skip":
            tell_skipped(len(records.skipped), run / EVALUATION, say)


def tell_skipped(count: int, where: Path, say: Callable[[str], None]) -> None:
    """Say how many rows were left out."""
    say(f"rows left out: {count:,}" + (f"; {where} says which, and why" if count else ""))


def tell_empty(records: Records, task: str, say: Callable[[str], None]) -> None:
    """Say how many sequences are empty where each gets a class all the same."""
    from raglane.data.records import note_empty

    if task == "classify" and (note := note_empty(records)):
        say(note)


def report(
    folder: Path,
    saved: SavedModel,
    records: Records,
    *,
    device: torch.device,
    say: Callable[[str], None],
    name: str,
    asked: Mapping[str, int] | None = None,
    is_short: bool = False,
) -> None:
    """Measure the best model of a run, say how good it is, and write the numbers and the matrix in its folder."""
    from raglane._utils.files import write_files
    from raglane.training import inference
    from raglane.training.folder import EVALUATION
    from raglane.training.stored import to_json

    evaluation = inference.evaluate(saved, records, device=device, **(asked or {}))
    say(f"{name}: {_numbers(evaluation)} ({evaluation.sequences:,} sequences of {records.source.name})")
    details = _details(folder, evaluation, say=None if is_short else say)
    content = {"data": str(records.source), **evaluation.to_config()}
    if records.skipped:
        content["skipped"] = [asdict(row) for row in records.skipped]
    write_files({folder / EVALUATION: to_json(content)} | {folder / name: made for name, made in details.items()})
    if not is_short:
        say(f"written: {', '.join([str(folder / EVALUATION), *details])}")


def _details(folder: Path, evaluation: Evaluation, say: Callable[[str], None] | None) -> dict[str, bytes]:
    """The matrix, the table and the pictures that belong to the numbers, as files by their names."""
    from raglane._utils.table import Table
    from raglane.report.figures import confusion_png, confusion_table, points_png

    details: dict[str, bytes] = {}
    tables: dict[str, tuple[Table, bool]] = {}
    measured, numbers, labels = evaluation.measured, evaluation.numbers, evaluation.labels
    if evaluation.confusion is not None:
        matrix = evaluation.confusion.tolist()
        title = f"{folder.name}\naccuracy {numbers['accuracy']:.3f}, macro-F1 {numbers['macro_f1']:.3f}"
        details["confusion.png"] = confusion_png(matrix, labels, title)
        tables["confusion.txt"] = confusion_table(matrix, labels), len(labels) <= _WIDEST_TABLE
    if measured.table:
        tables["table.txt"] = Table.of("Numbers", measured.table), len(measured.table) <= _LONGEST_TABLE
    for name, (table, is_small) in tables.items():
        text = table.text()
        details[name] = f"{text}\n".encode()
        if say is not None and is_small:
            for line in text.splitlines():
                say(line)
    if measured.points:
        details["points.png"] = points_png(measured.points, f"{folder.name}\n{_numbers(evaluation)}")
    return details


def _numbers(evaluation: Evaluation) -> str:
    """The numbers in a line, the metric first."""
    numbers = evaluation.numbers
    names = {key: key.replace("macro_f1", "macro-F1").replace("_", " ") for key in numbers if key != "loss"}
    metrics = [f"{name} {numbers[key]:.3f}" for key, name in names.items()]
    return ", ".join([*metrics, f"loss {numbers['loss']:.4f}"])
