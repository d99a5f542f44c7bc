"""Files of predictions: forecasts have a row per step with its date, tags in CSV a row per word."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest

import raglane as rl
from commands import Capsys, prints
from raglane.training.results import Predictions

_QUICK: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "threads": 1, "validation_fraction": 0}


def _rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def _sales(path: Path, channels: int = 1) -> str:
    dates = ("2023-11-30", "2023-12-31", "2024-01-31")
    header = ["shop", "month", *(f"c{n}" for n in range(channels))]
    lines = [
        [shop, date, *(str(index + step + n) for n in range(channels))]
        for index, shop in enumerate("ab")
        for step, date in enumerate(dates)
    ]
    path.write_text("\n".join(",".join(line) for line in [header, *lines]) + "\n")
    return str(path)


def test_a_forecast_has_a_row_per_step_with_its_date(tmp_path: Path, capsys: Capsys) -> None:
    data = _sales(tmp_path / "sales.csv")
    run = rl.fit(data, task="forecast", id="shop", time="month", output=tmp_path / "run", **_QUICK)
    predictions = run.predict(data, horizon=2)
    assert [len(steps) for steps in predictions["prediction"]] == [2, 2]
    command = ["predict", str(tmp_path / "run"), data, "--horizon", "2"]
    prints([*command, "-o", str(tmp_path / "p.csv")], capsys, "2 sequences of 2 steps")
    rows = _rows(tmp_path / "p.csv")
    assert list(rows[0]) == ["shop", "step", "month", "prediction"]
    dates = ["2024-02-29", "2024-03-31"]
    assert [(row["shop"], row["step"], row["month"]) for row in rows] == [
        (shop, str(step), date) for shop in "ab" for step, date in enumerate(dates, 1)
    ]
    numbers = [forecast for steps in predictions["prediction"] for (forecast,) in steps]
    assert [float(row["prediction"]) for row in rows] == numbers
    # Standard output is the file.
    assert prints(command, capsys) == (tmp_path / "p.csv").read_text()
    prints([*command, "-o", str(tmp_path / "p.jsonl")], capsys)
    lines = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text().splitlines()]
    assert [line["month"] for line in lines] == dates * 2
    assert [line["prediction"] for line in lines] == numbers
    prints([*command, "-o", str(tmp_path / "p.parquet")], capsys)
    table = pyarrow.parquet.read_table(tmp_path / "p.parquet")
    assert str(table.schema.field("month").type) == "date32[day]"
    assert table.column("prediction").to_pylist() == numbers
    assert predictions.to_pandas().shape == (4, 4)


def test_quantiles_and_channels_have_columns() -> None:
    data = [[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]] * 2 + [[]]
    options: dict[str, Any] = {"loss": "quantile", "quantile": [0.1, 0.5]}
    run = rl.fit(data[:2], task="forecast", **_QUICK, **options)
    predictions = run.predict(data, horizon=3)
    names = ["prediction_x0", "prediction_x1", "q0.1_x0", "q0.1_x1", "q0.5_x0", "q0.5_x1"]
    table = predictions.named()
    assert list(table) == ["id", "step", *names]
    assert (table["id"], table["step"]) == ([0] * 3 + [1] * 3, [1, 2, 3] * 2)
    assert predictions["prediction"][2] is None
    assert table["q0.1_x1"][4] == predictions["q0.1"][1][1][1]


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_tags_have_their_words(suffix: str, tmp_path: Path, capsys: Capsys) -> None:
    data = tmp_path / "words.jsonl"
    texts = [["the", "cat", "sat"], [], ["=1+1", "dogs"]]
    tags = [["D", "N", "V"], [], ["D", "N"]]
    data.write_text(
        "".join(
            json.dumps({"id": f"s{n}", "words": text, "tags": named}) + "\n"
            for n, (text, named) in enumerate(zip(texts * 3, tags * 3, strict=True))
        )
    )
    run = rl.fit(
        str(data), task="tag", sequence="words", label="tags", output=tmp_path / "run", **_QUICK
    )
    out = tmp_path / f"p{suffix}"
    more = ["--escape-formulas"] if suffix == ".csv" else []
    prints(["predict", str(tmp_path / "run"), str(data), "-o", str(out), *more], capsys)
    predicted = run.predict(str(data))
    if suffix == ".csv":
        rows = _rows(out)
        assert list(rows[0]) == ["id", "step", "words", "prediction", "probability"]
        words = [word for text in texts * 3 for word in text]
        assert [row["words"] for row in rows] == [
            f"'{word}" if word.startswith("=") else word for word in words
        ]
        assert [row["step"] for row in rows[:5]] == ["1", "2", "3", "1", "2"]
        assert [row["id"] for row in rows[:5]] == ["s0"] * 3 + ["s2"] * 2
        flat = [tag for tags in predicted["prediction"] for tag in tags]
        assert [row["prediction"] for row in rows] == flat
        return
    rows = (
        [json.loads(line) for line in out.read_text().splitlines()]
        if suffix == ".jsonl"
        else pyarrow.parquet.read_table(out).to_pylist()
    )
    assert [row["words"] for row in rows] == texts * 3
    assert [row["prediction"] for row in rows] == predicted["prediction"]


def test_numbers_have_a_row_per_element_in_csv(tmp_path: Path, capsys: Capsys) -> None:
    data = tmp_path / "load.csv"
    rows = [f"{n % 2},2024-01-{1 + n // 2:02} 06:00,{n},{2 * n}" for n in range(8)]
    data.write_text("meter,time,x,load\n" + "\n".join(rows) + "\n")
    named: dict[str, Any] = {"task": "regress", "id": "meter", "time": "time", "label": "load"}
    run = rl.fit(str(data), output=tmp_path / "run", **named, **_QUICK)
    prints(["predict", str(tmp_path / "run"), str(data), "-o", str(tmp_path / "p.csv")], capsys)
    table = _rows(tmp_path / "p.csv")
    assert [(row["meter"], row["step"], row["time"]) for row in table] == [
        (str(meter), str(1 + day), f"2024-01-0{1 + day} 06:00:00")
        for meter in range(2)
        for day in range(4)
    ]
    flat = [number for numbers in run.predict(str(data))["prediction"] for number in numbers]
    assert [float(row["prediction"]) for row in table] == flat
    lists = Predictions({"id": [1], "prediction": [[0.5, 1.5]]})
    assert lists.named() == {"id": [1], "prediction": [[0.5, 1.5]]}


def test_an_evaluation_ends_with_all_steps(tmp_path: Path, capsys: Capsys) -> None:
    data = _sales(tmp_path / "sales.csv")
    run = rl.fit(data, task="forecast", id="shop", time="month", output=tmp_path / "run", **_QUICK)
    command = ["evaluate", str(tmp_path / "run"), data, "--horizon", "2", "-o", str(tmp_path / "e")]
    last = prints(command, capsys).splitlines()[-1]
    evaluation = run.evaluate(data, horizon=2)
    rows = evaluation.measured.table
    means = {name: (rows[0][name] + rows[1][name]) / 2 for name in rows[0] if name != "step"}
    assert evaluation.ahead() == pytest.approx(means)
    names = {"mae": "MAE", "persistence_mae": "persistence MAE", "mean_mae": "mean MAE"}
    errors = ", ".join(f"{name} {means[key]:.3f}" for key, name in names.items())
    assert last == f"all 2 steps: {errors}"
    assert run.evaluate(data).ahead() == {}


@pytest.mark.parametrize("options", [{}, {"loss": "quantile", "quantile": [0.1, 0.5, 0.9]}])
def test_the_report_draws_forecasts_and_the_truth(options: dict[str, Any], tmp_path: Path) -> None:
    rows = [f"{shop},{step},{step % 4 + shop}" for shop in range(5) for step in range(30)]
    data = tmp_path / "shops.csv"
    data.write_text("shop,time,sold\n" + "\n".join(rows) + "\n")
    quick = _QUICK | {"validation_fraction": 0.1}
    rl.fit(str(data), task="forecast", id="shop", output=tmp_path / "run", **quick, **options)
    page = (tmp_path / "run/report.html").read_text()
    for shop in range(3):
        assert f"Forecast of the last 3 elements of {shop}." in page
    assert "of 3." not in page
    truth = "On the validation part, from the elements before; the line is the truth."
    section = page.partition('<section id="forecasts"')[2].partition("</section>")[0]
    assert re.findall("<figcaption>(.*)</figcaption>", section) == [f"0. {truth}", "1", "2"]
    # One element ahead is a part of the scores, and binary vectors have no curve.
    rl.fit([[0.0, 1.0] * 9] * 3, task="forecast", output=tmp_path / "rolls", **_QUICK)
    assert "Forecast of" not in (tmp_path / "rolls/report.html").read_text()
