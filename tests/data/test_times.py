"""Times of rows: their forms, repeats and gaps, and ids of several columns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raglane.cli import main
from raglane.data import Columns, read
from raglane.errors import DataError

SERIES = Columns(task="forecast")


def series(path: Path, times: list[str], header: str = "when,load") -> Path:
    """Write a series whose values are the numbers of its rows."""
    rows = [f"{time},{row}" for row, time in enumerate(times)]
    path.write_text("\n".join([header, *rows]) + "\n")
    return path


@pytest.mark.parametrize(
    "times",
    [
        ["31/01/2024", "02/02/2024", "01/01/2024"],
        ["1/31/2024", "2/2/2024", "1/1/2024"],
        ["31.1.2024", "2.2.2024", "1.1.2024"],
        ["31-Jan-2024", "02-Feb-2024", "01-Jan-2024"],
        ['"Jan 31, 2024"', '"Feb 2, 2024"', '"Jan 1, 2024"'],
        ["2024/01/31", "2024/02/02", "2024/01/01"],
        ["1/31/2024 1:00 PM", "1/31/2024 11:00 PM", "1/31/2024 2:00 AM"],
        ["31/01/24 13:00:01", "31/01/24 13:00:02", "31/01/24 12:59:59"],
    ],
)
def test_rows_are_sorted_by_dates_of_every_form(tmp_path: Path, times: list[str]) -> None:
    data = read(series(tmp_path / "x.csv", times), SERIES)
    assert data.records.values.ravel().tolist() == [2, 0, 1]
    assert "time column: 'when' (the only one of dates)" in data.notes
    in_order = read(tmp_path / "x.csv", Columns(task="forecast", time="none"))
    assert in_order.records.values.ravel().tolist() == [0, 1, 2]
    assert any(note.startswith("left out, because they are dates: when") for note in in_order.notes)


def test_a_format_decides_what_the_column_leaves_open(tmp_path: Path) -> None:
    path = series(tmp_path / "x.csv", ["01/02/2024", "02/01/2024"])
    with pytest.raises(DataError, match="days and months are all below 13"):
        read(path, SERIES)
    for form, order in (("%d/%m/%Y", [1, 0]), ("%m/%d/%Y", [0, 1])):
        data = read(path, Columns(task="forecast", time_format=form))
        assert data.records.values.ravel().tolist() == order
    with pytest.raises(DataError, match="times of the form %Y"):
        read(path, Columns(task="forecast", time_format="%Y"))


def test_a_date_and_a_time_of_day_are_one_time(tmp_path: Path) -> None:
    times = ["2024-01-02,08:00", "2024-01-01,09:00", "2024-01-01,08:00"]
    path = series(tmp_path / "x.csv", times, "Date,Time,load")
    data = read(path, SERIES)
    assert data.records.values.ravel().tolist() == [2, 1, 0]
    assert "time columns: 'Date' and 'Time' (a date and a time of day)" in data.notes
    named = read(path, Columns(task="forecast", time="Date,Time"))
    assert named.records.values.ravel().tolist() == [2, 1, 0]


def test_the_repeated_hour_of_a_clock_change(tmp_path: Path) -> None:
    hours = ["01:00", "02:00", "02:00", "03:00"]
    offsets = ["+02:00", "+02:00", "+01:00", "+01:00"]
    zoned = [f"2024-10-27T{hour}{offset}" for hour, offset in zip(hours, offsets, strict=True)]
    data = read(series(tmp_path / "zoned.csv", zoned[::-1]), SERIES)
    assert data.records.values.ravel().tolist() == [3, 2, 1, 0]
    local = series(tmp_path / "local.csv", [f"2024-10-27T{hour}" for hour in hours])
    with pytest.raises(DataError, match="1 of 4 rows repeat one"):
        read(local, SERIES)
    kept = read(local, Columns(task="forecast", duplicate_times="keep"))
    assert kept.records.values.ravel().tolist() == [0, 1, 2, 3]


def test_a_few_times_that_repeat_are_kept_and_counted(tmp_path: Path) -> None:
    times = [f"2024-01-{day:02}" for day in range(1, 31)]
    data = read(series(tmp_path / "x.csv", [*times, times[3]]), SERIES)
    assert data.records.values.ravel().tolist()[:6] == [0, 1, 2, 3, 30, 4]
    assert "1 of 31 rows repeat the time of another and keep" in str(data.notes)


def test_gaps_of_a_regular_series_are_counted(tmp_path: Path) -> None:
    times = [f"2024-01-{day:02}" for day in range(1, 31) if day not in (10, 20, 21)]
    path = series(tmp_path / "x.csv", times)
    note = next(note for note in read(path, SERIES).notes if "gap" in note)
    assert note.startswith("2 gaps in steps of 1 d, the first before data row 9 (id 0)")
    timed = read(path, Columns(task="forecast", time_gaps=True))
    assert not any("2 gaps" in note for note in timed.notes)
    months = [f"{2020 + n // 12}-{n % 12 + 1:02}-28" for n in range(30) if n != 14]
    note = next(
        note for note in read(series(tmp_path / "m.csv", months), SERIES).notes if "gap" in note
    )
    assert note.startswith("1 gap in steps of 1 month, the first before data row 14 (id 0)")
    weekdays = np.arange("2024-01-01", "2024-03-01", dtype="datetime64[D]")
    for regular in (months[:14], weekdays[np.is_busday(weekdays)].astype(str).tolist()):
        path = series(tmp_path / "r.csv", regular)
        assert not any("gap" in note for note in read(path, SERIES).notes)
    whole = series(tmp_path / "y.csv", times[:9])
    assert not any("gap" in note for note in read(whole, SERIES).notes)


def test_ids_of_several_columns_that_are_alike_when_joined(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b,t,x\np/q,r,0,1\np/q,r,1,2\np,q/r,0,3\np,q/r,1,4\n")
    with pytest.raises(DataError, match="alike with / between them"):
        read(path, Columns(task="forecast", id="a,b"))


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl", "pandas"])
def test_panels_of_every_format(tmp_path: Path, kind: str) -> None:
    pandas = pytest.importorskip("pandas")
    rows = [
        (shop, item, f"2024-01-{day:02}", day)
        for shop in "xy"
        for item in "uv"
        for day in range(1, 7)
    ]
    frame = pandas.DataFrame(rows, columns=["shop", "item", "day", "sold"])
    frame["both"] = frame["shop"] + frame["item"]

    def source(table: Any) -> Any:
        path = tmp_path / f"x.{kind}"
        if kind == "csv":
            table.to_csv(path, index=False)
        elif kind == "parquet":
            table.to_parquet(path)
        elif kind == "jsonl":
            table.to_json(path, orient="records", lines=True)
        return table if kind == "pandas" else path

    single = read(source(frame[["both", "day", "sold"]]), SERIES)
    assert (single.ids, single.channels) == (("xu", "xv", "yu", "yv"), ("sold",))
    several = source(frame[["shop", "item", "day", "sold"]])
    with pytest.raises(DataError, match="shop,item"):
        read(several, SERIES)
    named = read(several, Columns(task="forecast", id="shop,item"))
    assert named.ids == ("x/u", "x/v", "y/u", "y/v")
    assert named.records.values.ravel().tolist() == [1, 2, 3, 4, 5, 6] * 4


def test_predictions_have_the_names_of_the_users_columns(tmp_path: Path) -> None:
    rows = [f"{a},{b},{t},{t + ord(b)}\n" for a in "xy" for b in "uv" for t in range(6)]
    data = tmp_path / "x.csv"
    data.write_text("shop,item,day,sold\n" + "".join(rows))
    run = str(tmp_path / "run")
    fast = ["--epochs", "1", "--hidden-size", "4", "--threads", "1", "--quiet"]
    named = ["--task", "forecast", "--id-column", "shop,item", "--output", run]
    assert main(["train", str(data), *named, *fast]) == 0
    output = tmp_path / "p.csv"
    assert main(["predict", run, str(data), "-o", str(output), "--id-column", "shop,item"]) == 0
    lines = output.read_text().splitlines()
    assert lines[0].startswith("shop,item,")
    assert [line.split(",")[:2] for line in lines[1:]] == [[a, b] for a in "xy" for b in "uv"]


def test_pairs_of_texts_are_told_by_their_names(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for header in ("word,phones", "phones,word", "source,target", "text,translation"):
        path.write_text(f"{header}\nabc,x y z\nde,x y\n")
        data = read(path, Columns(task="transcribe"))
        first = 1 if header.startswith("phones") else 0
        assert data.columns.sequence == header.split(",")[first]
        assert data.columns.label == header.split(",")[1 - first]


def test_steps_of_several_channels(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    names = [f"{axis}{step}" for step in range(4) for axis in "xyz"]
    values = np.arange(24).reshape(2, 12)
    values_in_text = ["up," + ",".join(map(str, row)) for row in values]
    path.write_text("\n".join([f"kind,{','.join(names)}", *values_in_text]) + "\n")
    data = read(path)
    assert data.channels == ("x", "y", "z")
    np.testing.assert_array_equal(data.records.values, values.reshape(8, 3))
    # Other data of the same columns may have more steps.
    longer = [*names, "x4", "y4", "z4"]
    path.write_text(f"kind,{','.join(longer)}\nup,{','.join(map(str, range(15)))}\n")
    assert read(path, data.columns).lengths.tolist() == [5]
