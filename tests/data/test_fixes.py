"""The fixes of messages lead to a reading, and never to one that was followed before."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raglane.data import Columns, read
from raglane.errors import DataError

DAYS = [f"2024-01-{day:02}" for day in range(1, 9)]
SHOPS = [(country, shop) for country in "xy" for shop in "uv"]

TABLES = {
    "ids of two columns": ["date,country,shop,sold"]
    + [f"{day},{country},{shop},{row}" for row, day in enumerate(DAYS) for country, shop in SHOPS],
    "one series": ["time,load"] + [f"{day},{row}" for row, day in enumerate(DAYS)],
    "days or months": ["date,load"] + [f"0{row}/0{row}/2024,{row}" for row in range(1, 9)],
    "days and months": ["date,load", "31/01/2024,1", "1/31/2024,2"],
    "times of day": ["time,load"] + [f"0{row}:00,{row}" for row in range(8)],
    "two columns of dates": ["from,to,load"]
    + [f"{day},{day},{row}" for row, day in enumerate(DAYS)],
    "times that repeat": ["time,load"] + [f"{day},{row}" for row, day in enumerate(DAYS * 2)],
    "zones": ["time,load", "2024-01-01T00:00,1", "yesterday,2", "2024-01-03T00:00,3"],
    "two texts": ["a,b", "cat,k a t", "dog,d o g"],
    "two columns of words": ["id,a,b,x", "1,p,q,1", "1,p,q,2", "2,r,s,3"],
}


def error_of(path: Path, columns: Columns) -> DataError | None:
    try:
        read(path, columns)
    except DataError as error:
        return error
    return None


def attempts(path: Path, columns: Columns) -> list[dict[str, Any]]:
    """Return the fixes that were followed until the file is read."""
    followed: list[dict[str, Any]] = []
    while (error := error_of(path, columns)) is not None:
        fixes: dict[str, Any] = dict(error.fixes)
        assert fixes, f"no fix: {error}"
        assert fixes not in followed, f"a circle: {error}"
        for name, value in fixes.items():
            assert getattr(columns, name) != value, f"already there: {error}"
            # The message has the argument too.
            assert str(value) in str(error), error
        followed.append(fixes)
        columns = replace(columns, **fixes)
    return followed


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("task", ["classify", "forecast", "tag", "transcribe"])
def test_fixes_lead_to_a_reading(tmp_path: Path, name: str, task: str) -> None:
    path = tmp_path / "data.csv"
    path.write_text("\n".join(TABLES[name]) + "\n")
    attempts(path, Columns(task=task))


@pytest.mark.parametrize("id", ["country", "shop", "shop,country"])
def test_ids_that_were_named_are_in_the_fix(tmp_path: Path, id: str) -> None:
    path = tmp_path / "data.csv"
    path.write_text("\n".join(TABLES["ids of two columns"]) + "\n")
    followed = attempts(path, Columns(task="forecast", id=id, features=("sold",)))
    assert followed in ([], [{"id": "country,shop"}])
    assert (followed == []) == ("," in id)
