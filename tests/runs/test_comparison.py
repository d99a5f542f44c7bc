"""Comparisons of runs: differing settings, groups, output files; and loggers."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import raglane as rl
from commands import FAST, Capsys, fails, prints, read_csv, tree, write_steps
from made_datasets import dataset
from raglane.cli import main
from raglane.data.records import Feature, Targets, offsets_of
from raglane.report.figures import Compared, setting_svg
from raglane.runs.comparison import compare
from raglane.runs.comparison_page import comparison_page
from raglane.training.folder import LAST, find
from raglane.training.job import identity
from raglane.training.state import NUMBERS


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs on one file, held out in several ways, and one on another."""
    folder = tmp_path_factory.mktemp("runs")
    one, other = write_steps(folder / "one.csv"), write_steps(folder / "other.csv", 8)
    for name, data, more in (
        ("a", one, ["--cell", "gru", "--seed", "1", "--lr", "0.00012349"]),
        ("b", one, ["--cell", "lstm", "--seed", "2", "--validation-fraction", "0.3"]),
        ("c", other, ["--cell", "rnn"]),
    ):
        assert (
            main(
                [
                    "train",
                    str(data),
                    "--output",
                    str(folder / name),
                    *FAST,
                    *more,
                    "--test",
                    str(one),
                    "-q",
                ]
            )
            == 0
        )
    return folder


def test_only_differing_settings_are_shown(runs: Path) -> None:
    first, second = compare([runs / "a", runs / "b", runs / "c", runs / "a"])
    assert first.caption == "one.csv: classify, 2 runs"
    assert second.caption == "other.csv: classify, 1 run"
    assert first.columns[:5] == ["run", "cell", "lr", "seed", "validation-fraction"]
    assert second.columns[1] == "validation loss"
    rows = [dict(zip(first.columns, row, strict=True)) for row in first.rows]
    assert [row["validation loss"] for row in rows] == sorted(
        row["validation loss"] for row in rows
    )
    assert {row["lr"] for row in rows} == {"0.0001235", "0.003"}
    for row in rows:
        run = rl.load(row["run"])
        assert row["weights"] == sum(weight.numel() for weight in run.model.parameters())
        assert row["one.csv accuracy"] == run.evaluate()["accuracy"]
        history = read_csv(Path(row["run"]) / "curves.csv")
        assert row["seconds"] == pytest.approx(sum(float(epoch["seconds"]) for epoch in history))
        assert row["validation loss"] == min(float(epoch["validation_loss"]) for epoch in history)


def test_a_page_has_results_before_settings(runs: Path) -> None:
    html = comparison_page(compare([runs / "a", runs / "b"]), "raglane compare", "runs").decode()
    names = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', html)
    assert names[:2] == ["run", "validation loss"]
    assert names[-4:] == ["cell", "lr", "seed", "validation-fraction"]
    row = re.findall(r"<td[^>]*>([^<]*)</td>", html)
    assert {"gru", "lstm"} & {row[len(names) - 5]}


def test_other_losses_are_other_tables(tmp_path: Path) -> None:
    for loss in (None, "mse", "mae"):
        out = tmp_path / f"{loss}"
        rl.fit(
            [[0.1], [0.3]],
            [1.0, 2.0],
            task="regress",
            loss=loss,
            output=out,
            epochs=1,
            validation_fraction=0,
        )
    squared, absolute = compare([tmp_path / "None", tmp_path / "mae", tmp_path / "mse"])
    assert (len(squared.rows), absolute.caption) == (2, "data in memory: regress (mae), 1 run")


def test_tables_and_pictures_are_written_whole(runs: Path, tmp_path: Path, capsys: Capsys) -> None:
    folders = [str(runs / name) for name in "abc"]
    places = [str(tmp_path / f"table.{suffix}") for suffix in ("md", "csv", "png", "svg")]
    printed = prints(
        ["compare", *folders, *(word for place in places for word in ("-o", place))], capsys
    )
    assert printed.index("one.csv: classify") < printed.index("other.csv: classify")
    rows = read_csv(Path(places[1]))
    assert [row["cell"] for row in rows if row["run"] == folders[1]] == ["lstm"]
    assert float(rows[0]["validation loss"]) <= float(rows[1]["validation loss"])
    assert Path(places[0]).read_text().count("| run | ") == 2
    assert Path(places[2]).read_bytes()[1:4] == b"PNG"
    assert Path(places[3]).read_bytes().startswith((b"<svg", b"<?xml"))
    lists = Compared(
        "lists", ["run", "quantile", "seconds"], [["a", [0.1, 0.9], 1.0], ["b", "0.5", 2.0]]
    )
    assert b"<svg" in setting_svg(lists, "quantile")


def test_mistakes_end_in_one_line(runs: Path, tmp_path: Path, capsys: Capsys) -> None:
    broken, out = tmp_path / "broken", tmp_path / "table.md"
    run = str(runs / "a")
    fails(
        ["compare", run, str(tmp_path / "no"), "-o", str(out)],
        capsys,
        "no must be ... no such folder",
        "of a run",
    )
    fails(["compare", str(runs), "-o", str(out)], capsys, "a folder without a saved model")
    fails(
        ["compare", run, "-o", str(tmp_path / "table.txt")],
        capsys,
        "--output must be ",
        ".md, .csv, .png, .svg",
    )
    fails(["compare", run, "-o", str(tmp_path / "no" / "table.md")], capsys, "--output must be ")
    for name in (
        "run.json",
        "last/training.json",
        "best/config.json",
        "best/weights.safetensors",
        "evaluation.json",
    ):
        shutil.rmtree(broken, ignore_errors=True)
        shutil.copytree(run, broken)
        content = (broken / name).read_bytes()
        (broken / name).write_bytes(content[: len(content) // 2])
        fails(["compare", run, str(broken), "-o", str(out)], capsys, name)
    description = json.loads((runs / "a" / "run.json").read_text())
    shutil.copy(runs / "a" / "evaluation.json", broken)
    (broken / "run.json").write_text(json.dumps(description | {"identity": 3}))
    fails(["compare", str(broken)], capsys, "identity")
    assert not out.exists()
    assert {path.split("/")[0] for path in tree(tmp_path)} == {"broken"}


def test_test_data_of_one_name_in_two_folders_are_two(runs: Path, tmp_path: Path) -> None:
    for place, folder in (("a", "x"), ("b", "y")):
        (tmp_path / folder).mkdir()
        data = write_steps(tmp_path / folder / "test.csv", 8 if folder == "x" else 12)
        shutil.copytree(runs / place, tmp_path / place)
        assert main(["evaluate", str(tmp_path / place), str(data), "-q"]) == 0
    group = compare([tmp_path / "a", tmp_path / "b"])[0]
    places = [str(tmp_path / folder / "test.csv") for folder in ("x", "y")]
    assert {name for name in group.columns if name.endswith(".csv accuracy")} == {
        f"{place} accuracy".replace("_", " ") for place in places
    }
    for row in group.rows:
        found = dict(zip(group.columns, row, strict=True))
        place = places["ab".index(Path(found["run"]).name)]
        told = json.loads((Path(found["run"]) / "evaluation.json").read_text())
        assert found[f"{place} accuracy".replace("_", " ")] == told["accuracy"]
    assert {"test.csv accuracy", "one.csv accuracy"} <= set(
        compare([tmp_path / "a", runs / "b"])[0].columns
    )


def test_runs_of_an_earlier_version_share_the_columns_of_their_scores(
    runs: Path, tmp_path: Path
) -> None:
    for place, names in (("a", ("micro_F1", "macro_F1")), ("b", ("micro_f1", "macro_f1"))):
        shutil.copytree(runs / place, tmp_path / place)
        path = tmp_path / place / "evaluation.json"
        path.write_text(
            json.dumps({"data": "one.csv", **dict(zip(names, (0.5, 0.25), strict=True))})
        )
    group = compare([tmp_path / "a", tmp_path / "b"])[0]
    for row in group.rows:
        shown = dict(zip(group.columns, row, strict=True))
        assert (shown["one.csv micro-F1"], shown["one.csv macro-F1"]) == (0.5, 0.25)
    assert not any("f1" in name or "F1" in name.replace("-F1", "") for name in group.columns)


def test_a_history_of_an_earlier_version(runs: Path, tmp_path: Path) -> None:
    """Names of metrics had capitals, such as train_MAE."""
    folder = tmp_path / "a"
    shutil.copytree(runs / "a", folder)
    numbers = find(folder, LAST) / NUMBERS
    numbers.write_text(numbers.read_text().replace("_accuracy", "_ACCURACY"))
    assert rl.load(folder).history == rl.load(runs / "a").history


def _leaves(content: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the place of each value that is no object or list; of a list, only the first entry."""
    keys = (
        content
        if isinstance(content, dict)
        else range(min(len(content), 1))
        if isinstance(content, list)
        else ()
    )
    return [leaf for key in keys for leaf in _leaves(content[key], (*place, key))] or [place]


@pytest.mark.parametrize(
    "name", ["run.json", "evaluation.json", "best/config.json", "last/training.json"]
)
def test_any_changed_value_is_one_line_or_good(
    runs: Path, tmp_path: Path, capsys: Capsys, name: str
) -> None:
    """Such as a path that is a number, or a count of 10^30."""
    run = tmp_path / "run"
    shutil.copytree(runs / "a", run)
    content = (run / name).read_bytes()
    is_state = name == "last/training.json"
    command = ["train", "--resume", "--output", str(run)] if is_state else ["compare", str(run)]
    for number, leaf in enumerate(_leaves(json.loads(content))):
        value = 10**30 if is_state else ("x", 10**30, None)[number % 3]
        changed = json.loads(content)
        part = changed
        for key in leaf[:-1]:
            part = part[key]
        part[leaf[-1]] = value
        (run / name).write_text(json.dumps(changed))
        code, found = main(command), capsys.readouterr().err
        assert code in (0, 2), (leaf, value, found)
        assert [line for line in found.splitlines() if "warning" not in line] == [found.strip()] * (
            code == 2
        )


def test_data_is_the_same_in_any_order_and_parts() -> None:
    random = np.random.default_rng(0)
    lengths = [3, 0, 2, 5]
    values = random.normal(size=(10, 2)).astype(np.float32)
    words = np.array(list("abcabcabca"), dtype=object)
    numbers = random.normal(size=10).astype(np.float32)
    column = Feature("x", numbers)
    kinds: dict[str, dict[str, Any]] = {
        "labels": {"labels": ("a", "b", "a", "c")},
        "tags": {"tags": words},
        "numbers": {"targets": Targets(random.normal(size=(4, 2)), names=("x", "y"))},
        "nothing": {},
        "numbers per element": {"features": (column,)},
        "words per element": {"features": (Feature("x", words),)},
        "numbers per sequence": {"features": (Feature("x", numbers[:4], per_sequence=True),)},
        "two": {"features": (column, Feature("y", words[:4], per_sequence=True))},
        "another name": {"features": (replace(column, name="z"),)},
    }
    found = set()
    for kind, more in kinds.items():
        records = dataset(values, offsets_of(lengths), channels=("x0", "x1"), **more)
        whole = identity(records)
        assert identity(records.subset([3, 1, 0, 2])) == whole, kind
        assert identity(records.subset([3, 0]), records.subset([2, 1]), None) == whole, kind
        assert identity(records.subset([0, 1, 2])) != whole, kind
        other = values.copy()
        other[4, 1] += 1e-6
        assert (
            identity(dataset(other, offsets_of(lengths), channels=("x0", "x1"), **more)) != whole
        ), kind
        assert (
            identity(
                dataset(values[::-1].copy(), offsets_of(lengths), channels=("x0", "x1"), **more)
            )
            != whole
        ), kind
        assert (
            identity(dataset(values, offsets_of([3, 1, 1, 5]), channels=("x0", "x1"), **more))
            != whole
        ), kind
        found.add(whole)
    assert len(found) == len(kinds)
    assert re.fullmatch(r"4-[0-9a-f]{16}", whole)


def test_a_logger_gets_every_epoch(tmp_path: Path, capsys: Capsys) -> None:
    data = str(write_steps(tmp_path / "steps.csv"))
    out = tmp_path / "run"
    pytest.importorskip("tensorboard", reason="TensorBoard is not installed")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    assert main(["train", data, "--output", str(out), *FAST, "--logger", "tensorboard", "-q"]) == 0
    events = reader.EventAccumulator(str(out / "logs"))
    events.Reload()
    history = read_csv(out / "curves.csv")
    told = {event.step: event.value for event in events.Scalars("train_loss")}
    assert told == pytest.approx({int(row["epoch"]): float(row["train_loss"]) for row in history})


def test_a_logger_that_cannot_begin_is_one_line(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(*_: Any) -> None:
        raise RuntimeError("no key:\nlog in")

    monkeypatch.setattr(
        "raglane.runs.progress._PACKAGES", {"wandb": ("math",), "mlflow": ("no_such",)}
    )
    monkeypatch.setattr("raglane.runs.progress.require", lambda *_: None)
    monkeypatch.setattr("raglane.runs.progress.LoggingWatcher._create", made)
    command = [
        "train",
        str(write_steps(tmp_path / "steps.csv")),
        "--output",
        str(tmp_path / "run"),
        *FAST,
        "-q",
    ]
    fails([*command, "--logger", "mlflow"], capsys, "mlflow is not installed", "pip install")
    fails(
        [*command, "--logger", "wandb"],
        capsys,
        "--logger must be ... got 'wandb', which failed: no key: log in",
    )
    assert not (tmp_path / "run").exists()
