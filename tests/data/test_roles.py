"""Decisions about columns, without files: (columns, task) -> roles and notes."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from raglane.data import Columns
from raglane.data.roles import Facts, Refusal, Roles, Shape, decide, guess_task
from raglane.data.typed import dates
from raglane.data.typed.column import TextColumn, Typed, written

DAYS = ("2024-01-01", "2024-01-02", "2024-01-03", "2024-01-04")


def table(**columns: Iterable[object]) -> Facts:
    return Facts({name: written(list(map(str, entries))) for name, entries in columns.items()})


def panel(
    name: str,
    ids: tuple[object, ...] = ("N1", "N2", "N3"),
    time: str = "ds",
    times: tuple[object, ...] = DAYS,
) -> Facts:
    """Return the facts of a series for each id."""
    rows = [(id, day) for id in ids for day in times]
    return table(
        **{
            name: [id for id, _ in rows],
            time: [day for _, day in rows],
            "y": range(len(rows)),
        }
    )


@pytest.mark.parametrize(
    ("facts", "asked", "roles"),
    [
        (panel("unique_id"), {}, (Shape.ELEMENTS, ("unique_id",), ("ds",))),
        (panel("item_id", time="timestamp"), {}, (Shape.ELEMENTS, ("item_id",), ("timestamp",))),
        (panel("store", time="day"), {}, (Shape.ELEMENTS, ("store",), ("day",))),
        (
            panel("store_nbr", (1, 2, 3), "day", (1, 2, 3, 4)),
            {},
            (Shape.ELEMENTS, ("store_nbr",), ("day",)),
        ),
        (table(time=DAYS, load=range(4)), {}, (Shape.ELEMENTS, (), ("time",))),
        (table(month=(1, 2, 1, 2), load=range(4)), {}, (Shape.ELEMENTS, (), ())),
        (table(when=DAYS, load=range(4)), {}, (Shape.ELEMENTS, (), ("when",))),
        (table(when=DAYS, load=range(4)), {"time": "none"}, (Shape.ELEMENTS, (), ())),
        (
            table(Date=("1/2/2024", "13/2/2024"), Time=("17:24:00", "17:25:00"), load=(1, 2)),
            {},
            (Shape.ELEMENTS, (), ("Date", "Time")),
        ),
        (
            table(a="xxyy", b="xyxy", time=(1, 1, 1, 1), load=range(4)),
            {"id": "a,b"},
            (Shape.ELEMENTS, ("a", "b"), ("time",)),
        ),
        (table(text=("a b", "c"), n=(1, 2)), {}, (Shape.TEXTS, (), ())),
        (table(id=(1, 2), t0=(1, 2), t1=(1, 2), t2=(1, 2)), {}, (Shape.STEPS, ("id",), ())),
        (table(t0=(1, 2), t1=(1, 2), t2=(1, 2)), {}, (Shape.ELEMENTS, (), ())),
        (table(V1=("Y1", "Y2"), V2=(1, 2), V3=(1, 2), V4=(1, 2)), {}, (Shape.STEPS, ("V1",), ())),
        (
            table(**{"page": ("a", "b")} | dict.fromkeys(DAYS, (1, 2))),
            {},
            (Shape.STEPS, ("page",), ()),
        ),
    ],
)
def test_roles_without_a_file(
    facts: Facts, asked: dict[str, Any], roles: tuple[Shape, tuple[str, ...], tuple[str, ...]]
) -> None:
    found = roles_of(facts, **asked)
    assert (found.shape, found.id, found.time) == roles


def roles_of(facts: Facts, **asked: Any) -> Roles:
    found = decide(facts, Columns(task="forecast", **asked))
    assert isinstance(found, Roles), found
    return found


def test_steps_of_several_prefixes_are_channels_in_any_order_of_columns() -> None:
    by_step = table(id="ab", **{f"{axis}{step}": "12" for step in range(3) for axis in "xyz"})
    by_channel = table(id="ab", **{f"{axis}{step}": "12" for axis in "xyz" for step in range(3)})
    for facts in (by_step, by_channel):
        steps = roles_of(facts).steps
        assert steps.channels == ("x", "y", "z")
        assert steps.columns[1] == ("y0", "y1", "y2")


def test_numbered_channels_of_one_series_name_the_option() -> None:
    roles = roles_of(table(t0=(1, 2), t1=(1, 2), t2=(1, 2)))
    assert (
        "with the channels t0 to t2; Columns(wide=True) makes each row a sequence" in roles.id_note
    )
    assert roles_of(table(t0=(1, 2), x=(1, 2), y=(1, 2))).id_note.endswith("are one series")


def test_dates_as_names_are_in_the_order_of_the_dates() -> None:
    names = ("1/10/2024", "1/9/2024", "1/31/2024")
    facts = table(page="ab", **dict.fromkeys(names, "12"))
    steps = roles_of(facts).steps
    assert steps.columns == (("1/9/2024", "1/10/2024", "1/31/2024"),)


def test_ids_of_several_columns_are_named_in_the_fix() -> None:
    rows = [(a, b, day) for day in DAYS for a in "xy" for b in "uv"]
    facts = table(
        row_id=range(16),
        date=[day for *_, day in rows],
        a=[a for a, *_ in rows],
        b=[b for _, b, _ in rows],
        sold=range(16),
    )
    refusal = decide(facts, Columns(task="forecast"))
    assert isinstance(refusal, Refusal)
    assert refusal.fixes == {"id": "a,b"}
    assert roles_of(facts, **refusal.fixes).id == ("a", "b")


def test_a_calendar_is_not_the_id_of_a_series() -> None:
    rows = [(month, day) for month in range(1, 7) for day in range(1, 29)]
    facts = table(
        month=[month for month, _ in rows], day=[day for _, day in rows], load=range(len(rows))
    )
    assert roles_of(facts).id == ()


@pytest.mark.parametrize(
    ("entries", "format"),
    [
        (["31/01/2024", "01/02/2024"], "%d/%m/%Y"),
        (["01/02/2024", "1/31/2024"], "%m/%d/%Y"),
        (["20.1.2024", "2.1.2024"], "%d.%m.%Y"),
        (["20-Jan-2024"], "%d-%b-%Y"),
        (["01/31/2024 1:05 PM"], "%m/%d/%Y %I:%M %p"),
        (["2024/01/31 13:05:01"], "%Y/%m/%d %H:%M:%S"),
        (["2024-01-31"], None),
        (["1991 Jul"], None),
    ],
)
def test_the_form_of_dates_is_told_by_the_whole_column(
    entries: list[str], format: str | None
) -> None:
    column = np.array(entries, dtype=object)
    assert dates.format_of(column) == format
    assert dates.parsed(column, format).notna().all()


def test_days_and_months_that_may_be_either_are_ambiguous() -> None:
    found = dates.format_of(np.array(["01/02/2024", "03/04/2024"], dtype=object))
    assert found == dates.Ambiguous(("%d/%m/%Y", "%m/%d/%Y"), "01/02/2024")
    mixed = dates.format_of(np.array(["31/01/2024", "1/31/2024"], dtype=object))
    assert mixed == dates.Contradiction("31/01/2024", "1/31/2024")


@pytest.mark.parametrize(
    "values", [[3, None, 5], [0.5, None, float("nan")], ["a", None, "a"], [True, None, False]]
)
def test_a_typed_column_has_the_numbers_and_words_of_its_texts(values: list[Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    typed = Typed(pyarrow.chunked_array([values]))
    texts = TextColumn(typed.words())
    for one, other in zip(typed.numbers(), texts.numbers(), strict=True):
        np.testing.assert_array_equal(one, other)
    rows = np.array([0, 0, 0])
    np.testing.assert_array_equal(typed.same_as(rows), texts.same_as(rows))
    assert [typed.text(row) for row in range(3)] == texts.words().tolist()
    assert typed.take(np.array([2, 0])).words().tolist() == texts.words()[[2, 0]].tolist()


def test_the_numbers_of_a_typed_column_are_read_without_texts() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    column = Typed(pyarrow.chunked_array([[1, 2], [3]]))
    numbers, odd = column.numbers()
    assert numbers.tolist() == [1.0, 2.0, 3.0]
    assert not odd.any()
    assert "_words" not in vars(column)


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        ([[1, 2], [3]], "tag"),
        ([[0.5, 1.5], [2.5]], "regress"),
        ([[1, 2], [3, 4]], "regress"),
        ([[1], [2, 3]], "multilabel"),
        ([[[1], [2]], [[3]]], "regress"),
        ([[[1], [2, 3]], [[4]]], "multilabel"),
        ([["a"], ["b", "c"]], "multilabel"),
        (["a", "b"], "classify"),
        ([0.5, 1.5], "regress"),
    ],
)
def test_tasks_are_told_by_the_labels_of_lists(labels: list[Any], task: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"x": [[0.5, 1.0], [2.0]], "y": labels})
    columns = {name: Typed(table.column(name)) for name in table.column_names}
    kinds = {field.name: field.type for field in table.schema}
    tasks = ["classify", "tag", "regress", "multilabel"]
    guess = guess_task(Facts(columns, kinds), Columns(sequence="x"), tasks)
    assert not isinstance(guess, Refusal)
    assert (guess.task, guess.roles.sequence, guess.roles.label) == (task, "x", "y")
