"""The reader of CSV in long form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from raglane.data import Columns, convert, read
from raglane.errors import DataError
from small_files import put, refused

pytest.importorskip("pandas")


def write(folder: Path, text: str) -> Path:
    return put(folder / "data.csv", text)


def test_sequences_come_in_order_of_first_appearance(tmp_path: Path) -> None:
    records = read(write(tmp_path, "id,a,b,label\nz,1,2,up\nb,3,4,down\nz,5,6.5,up\n10,7,,down\n"))
    assert (records.ids, records.labels) == (("z", "b", "10"), ("up", "down", "down"))
    assert (records.channels, records.lengths.tolist()) == (("a", "b"), [2, 1, 1])
    np.testing.assert_array_equal(
        records.values, np.array([[1, 2], [5, 6.5], [3, 4], [7, np.nan]], np.float32)
    )
    wanted = (
        "id column: 'id' (by its name)",
        "label column: 'label' (the only candidate)",
        "features: a, b",
    )
    assert {*wanted} <= {*records.notes}


@pytest.mark.parametrize("name", ["t", "Time", "timestamp", "step", "date"])
def test_a_time_column_is_known_by_its_name(tmp_path: Path, name: str) -> None:
    path = write(
        tmp_path, f"id , {name}, x, y \na, 2024-01-02, 1, p\na,2024-01-01,2,p\nb,2024-01-01,3,q\n"
    )
    records = read(path)
    assert records.values.tolist() == [[2], [1], [3]]
    assert (records.labels, records.channels) == (("p", "q"), ("x",))
    assert f"time column: {name!r} (by its name)" in records.notes
    # It is a feature where the user says so, and words are not times.
    path = write(tmp_path, f"id,{name},x,y\na,2,1,p\na,1,2,p\n")
    named = read(path, Columns(label="y", features=(name,)))
    assert named.values.tolist() == [[2], [1]]
    assert (
        "no time column: rows keep the order of the file; name one with Columns(time=...)"
        in named.notes
    )
    words = read(write(tmp_path, f"id,{name},y\na,walk,p\na,run,p\n"), Columns(label="y"))
    assert words.values.tolist() == ["walk", "run"]
    assert any(note.startswith(f"no time column: {name!r} holds words") for note in words.notes)


@pytest.mark.parametrize(
    ("times", "row"),
    [
        (["31/01/2024", "02/01/2024", "01.01.2024"], 2),
        (["2024-01-03", "2024-13-02", "2024-01-01"], 1),
        (["3", "", "x"], 1),
        (["12:30", "12:20", "12:10"], 0),
        (["3", "1e999", "1"], 1),
        (["2024-01-03", "2", "2024-01-01"], 1),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_times_that_cannot_be_read_are_refused(
    tmp_path: Path, times: list[str], row: int, named: bool
) -> None:
    rows = "".join(f"a,{time},{x},p\n" for x, time in enumerate(times))
    path = write(tmp_path, f"id,date,x,y\n{rows}")
    words = repr(times[row][:20])[:-1], f"in data row {row}, column 'date'", "Columns(time=...)"
    refused(words, read, path, Columns(time="date" if named else None))
    # Another column can be the time.
    assert read(path, Columns(time="x", features=("x",), label="y")).values.tolist() == [
        [0],
        [1],
        [2],
    ]


def test_times_with_and_without_a_zone_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "id,t,x,y\na,2024-01-01 09:00,1,p\na,2024-01-01T08:00+01:00,2,p\n")
    got = "'2024-01-01T08:00+01:00' and '2024-01-01 09:00' in column 't'"
    refused((got, "all have a zone, or none"), read, path, Columns(label="y"))


@pytest.mark.parametrize(
    "times",
    [
        ["9", "10", "100"],
        ["1700000000000000001", "1700000000000000002", "1700000000000000003"],
        [
            "2024-01-01T00:00:00.000000001",
            "2024-01-01T00:00:00.000000002",
            "2024-01-01T00:00:00.000000003",
        ],
        ["2024-01-01T12:00+05:00", "2024-01-01T08:00Z", "2024-01-01 07:00-0200"],
        ["2023-12-31T10:00:00", "2024-01-15", "2024-03-01"],
    ],
)
def test_numbers_sort_by_value_and_dates_by_moment(tmp_path: Path, times: list[str]) -> None:
    rows = "".join(f"a,{times[x]},{x},p\n" for x in (2, 0, 1))
    assert read(write(tmp_path, f"id,t,x,y\n{rows}"), Columns(label="y")).values.tolist() == [
        [0],
        [1],
        [2],
    ]


def test_two_columns_of_times_must_agree(tmp_path: Path) -> None:
    """A clock that orders the rows and a date that is passed over would shuffle them."""
    text = "id,date,time,x,y\na,20240101,930,1,p\na,20240102,815,2,p\nb,20231230,700,3,q\n"
    words = ["'time' and 'date', which order the rows differently", "Columns(time=...)"]
    refused(words, read, write(tmp_path, text), Columns(label="y"))
    for time, expected in (("date", [[1], [2], [3]]), ("time", [[2], [1], [3]])):
        named = Columns(label="y", time=time, features=("x",))
        assert read(write(tmp_path, text), named).values.tolist() == expected
    agreeing = "id,step,time,x,y\na,2,0.5,1,p\na,1,0.25,2,p\nb,1,0.125,3,q\n"
    assert read(write(tmp_path, agreeing), Columns(label="y")).values[:, 1].tolist() == [2, 1, 3]


def test_columns_without_a_name_are_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, ",id,x,y,\n0,1,2,a,\n1,1,3,a,\n")
    records = read(path)
    assert records.channels == ("x",)
    assert "left out, because they have no name: 2 columns" in records.notes
    refused(["no column ''"], read, path, Columns(features=("",), label="y"))
    # So pandas calls one without a name; numbers may be names too, such as wavelengths.
    path = write(tmp_path, "Unnamed: 0,Unnamed: 0.1,id,x,y\n7,4,1,2,a\n8,5,1,3,a\n")
    assert (read(path).channels, read(path, Columns(id="Unnamed: 0", label="y")).ids) == (
        ("x",),
        (7, 8),
    )
    for header in ("0", "0,1,2", "850.5,851,853.2,860", "2024-01-31,2024-02-01"):
        path = write(tmp_path, f"{header}\n{header.replace('-', '')}\n")
        assert read(path, Columns(task="forecast")).channels == (*header.split(","),)


def test_numbers_of_thousands_of_digits(tmp_path: Path) -> None:
    """A feature is infinite, a label a word, an id a text; a time is refused."""
    huge = "9" * 5000
    records = read(
        write(tmp_path, f"id,x,y\n{huge},1,{huge}\n{huge},{huge},{huge}\n2,1,3\n"),
        Columns(label="y"),
    )
    assert (records.ids, records.labels) == ((huge, "2"), (huge, "3"))
    assert records.values.tolist() == [[1], [np.inf], [1]]
    refused(
        ["'999", "' in data row 0, column 't'"], read, write(tmp_path, f"id,t,x,y\n1,{huge},1,a\n")
    )
    assert read(write(tmp_path, f"id,x,y\n{2**63},1,a\n")).ids == (str(2**63),)
    assert read(write(tmp_path, f"id,x,y\n{10**18 - 1},1,a\n")).ids == (10**18 - 1,)


def test_numbers_of_pythons_syntax_alone_are_damage(tmp_path: Path) -> None:
    for cell in ("1_5", "\u0663", "0x10"):
        for text in (f"id,x,y\n1,2,a\n1,3,a\n1,{cell},a\n", f"id,x,y\n1,NA,a\n1,3,a\n1,{cell},a\n"):
            refused(
                [f"'{cell}' in data row 2 (id 1), column 'x'"],
                read,
                write(tmp_path, text),
                Columns(label="y"),
            )


def test_a_number_beyond_float32_is_told_from_infinity(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"row 0 \(id 'a'\), step 1, channel 'x'.*does not fit float32"
    ):
        read(write(tmp_path, "id,x,y\na,1,p\na,1e300,p\n")).refuse_missing()


def test_a_random_table_against_a_loop(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    ids = random.integers(0, 12, 200)
    times = random.permutation(200)
    values = random.normal(size=(200, 2)).astype(np.float32)
    rows = [
        f"{key},{time},{x!r},{y!r},c{key % 3}"
        for key, time, (x, y) in zip(ids, times, values.tolist(), strict=True)
    ]
    records = read(write(tmp_path, "id,t,x,y,kind\n" + "\n".join(rows) + "\n"), Columns(time="t"))
    order = list(dict.fromkeys(ids.tolist()))
    expected = [
        i for key in order for i in sorted(np.flatnonzero(ids == key), key=lambda i: int(times[i]))
    ]
    np.testing.assert_array_equal(records.values, values[expected])
    assert records.ids == tuple(order)
    assert records.labels == tuple(f"c{key % 3}" for key in order)


def test_a_column_of_words_gives_tokens(tmp_path: Path) -> None:
    text = 'sequence_id,word,topic\n1,the,pets\n1,NA,pets\n1,null,pets\n2," a, b",cars\n2,x,cars\n'
    records = read(write(tmp_path, text))
    assert (records.is_tokens, records.labels) == (True, ("pets", "cars"))
    assert records.values.tolist() == ["the", "NA", "null", " a, b", "x"]
    assert any("tokens" in note for note in records.notes)


def test_tags_are_one_a_row(tmp_path: Path) -> None:
    path = write(tmp_path, "id,word,pos\n1,the,DET\n1,cat,NOUN\n2,run,VERB\n")
    records: Any = read(path, Columns(task="tag", label="pos"))
    assert [*zip(records.tags, records.values, strict=True)] == [
        ("DET", "the"),
        ("NOUN", "cat"),
        ("VERB", "run"),
    ]
    refused(
        ["2 candidates for the label column: 'word', 'pos'", "Columns(label=...)"],
        read,
        path,
        Columns(task="tag"),
    )
    path = write(tmp_path, "id,x,pos\n1,0.5,1\n1,1.5,0\n2,2.5,1\n")
    tags: Any = read(path, Columns(task="tag")).tags
    assert tags.tolist() == ["1", "0", "1"]


def test_integer_labels_are_told_from_features(tmp_path: Path) -> None:
    records = read(write(tmp_path, "id,x,steps,y\n1,0.5,3,7\n1,1.5,4,7\n2,2.5,5,8\n"))
    assert (records.labels, records.channels) == (("7", "8"), ("x", "steps"))


def test_a_word_among_numbers_is_a_mistake_and_a_number_among_words_a_token(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'1\.2x' in data row 1 \(id 1\), column 'x'"):
        read(write(tmp_path, "id,x,y\n1,1.1,a\n1,1.2x,a\n1,1.3,a\n"), Columns(label="y"))
    assert read(write(tmp_path, "id,x,y\n1,route,a\n1,66,a\n")).values.tolist() == ["route", "66"]


def test_chosen_columns_read_another_file_in_the_same_way(tmp_path: Path) -> None:
    found = read(write(tmp_path, "series,x,y\n1,2,a\n1,3,a\n")).columns
    assert found == Columns(id="series", label="y", features=("x",))
    records = read(
        write(tmp_path, "id,z,y,x,series\n9,8,b,7,6\n"), replace(found, need_labels=False)
    )
    assert (records.ids, records.channels, records.values.tolist()) == ((6,), ("x",), [[7]])


@pytest.mark.parametrize(
    "columns", [Columns(need_labels=False, label="y"), Columns(task="forecast", label="y")]
)
def test_labels_are_not_needed_to_predict_or_forecast(tmp_path: Path, columns: Columns) -> None:
    for text in ("id,x,y\n1,2,\n1,3,b\n", "id,x\n1,2\n1,3\n"):
        records = read(write(tmp_path, text), columns)
        assert records.labels is None
        assert records.channels == ("x",)


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        # A number, a word, a feature of a sequence, and the columns after the label.
        ("id,y,x\n1,p,1\n1,p\n1,p,2\n", Columns(label="y"), "line 3 .* data row 1 without 'x'"),
        ("id,y,w\n1,p,a\n1,p,b\n2,q\n", Columns(label="y"), "line 4 .* data row 2 without 'w'"),
        ("id,x,y,s\n1,1,a,4\n1,2,a\n", Columns(label="y", static=("s",)), "line 3 .* without 's'"),
        ("id,x,y\n1,1,a\n1\n", Columns(), "line 3 .* data row 1 without 'x', 'y'"),
        # Lines are counted in the file: blank ones, ends of lines in quotes, and the separator.
        ('id,w,y\n\n1,"a\nb ""c""\n",p\n \n1,c\n', Columns(label="y"), "line 7 .* data row 1 "),
        ("sep=;\nid;x;y\n1;0,5;a\n1;0,25\n", Columns(), "line 4 .* data row 1 without 'y'"),
        # A text per row, without ids.
        ("label,text\na,one two\nb\n", Columns(), "line 3 .* data row 1 without 'text'"),
        # The rows of a sequence are not consecutive.
        ("id,x,y\n1,1,a\n2,1,b\n1,2\n", Columns(), "line 4 .* data row 2 without 'y'"),
    ],
)
def test_a_row_that_ends_before_the_last_column(
    tmp_path: Path, text: str, columns: Columns, words: str
) -> None:
    path = write(tmp_path, text)
    with pytest.raises(DataError, match=words):
        read(path, columns)
    with pytest.raises(DataError, match=words):
        convert(path, tmp_path / "converted", columns)


def test_rows_that_are_cut_are_left_out_by_name(tmp_path: Path) -> None:
    path = write(tmp_path, "id,x,y\n1,1,a\n1,2,a\n2,1\n2,2,b\n3,1,b\n4")
    records = read(path, Columns(label="y"), on_bad_row="skip")
    assert records.ids == (1, 3)
    assert [row.place for row in records.skipped] == ["data row 2 (id '2')", "data row 5 (id '4')"]
    assert "line 4" in records.skipped[0].error
    assert "line 7" in records.skipped[1].error


def test_columns_that_are_steps_may_end_before_the_last(tmp_path: Path) -> None:
    records = read(write(tmp_path, "label,t0,t1,t2\na,1,2,3\n\nb,4\na,5,6\n"))
    assert records.lengths.tolist() == [3, 1, 2]
    assert "2 rows with fewer entries than the header; the first: line 4" in records.notes
    assert not any(
        "fewer" in note for note in read(write(tmp_path, "label,t0,t1,t2\na,1,2,3\n")).notes
    )


def test_a_column_without_a_name_may_be_absent(tmp_path: Path) -> None:
    records = read(write(tmp_path, "id,x,y,\n1,1,a\n2,2,b\n"))
    assert records.labels == ("a", "b")


def test_missing_numbers_and_infinity(tmp_path: Path) -> None:
    records = read(
        write(tmp_path, "id,y,x,z\n1,p,nan,1\n1,p,NA,2\n1,p,?,3\n1,p, ,4\n1,p,-inf,5\n1,p,6,\n")
    )
    expected = np.array([np.nan, np.nan, np.nan, np.nan, -np.inf, 6], np.float32)
    np.testing.assert_array_equal(records.values[:, 0], expected)
    assert np.isnan(records.values[5, 1])


@pytest.mark.parametrize(
    ("text", "columns", "words"),
    [
        ("x,y\n1,a\n", Columns(), ["no id column", "'x', 'y'", "Columns(id=...)"]),
        (
            "id,x,y\n1,1,a\n",
            Columns(label="z"),
            ["no column 'z'", "'id', 'x', 'y'", "Columns(label=...)"],
        ),
        ("id,x,y,z\n1,1,a,b\n", Columns(), ["2 candidates", "'y', 'z'", "Columns(label=...)"]),
        (
            "1,0,0.5,a\n1,1,0.6,a\n2,0,0.7,b\n",
            Columns(),
            ["got no header, but '1', '0', '0.5', 'a'"],
        ),
        (
            "2024-01-01,0.5\n2024-01-02,0.25\n",
            Columns(task="forecast"),
            ["got no header, but '2024-01-01', '0.5'"],
        ),
        ("id,x,y\n1,1,a\n1 ,2,a\n", Columns(label="y"), ["'1 ' and '1' in column 'id'"]),
        ("id,x,y\n1,1,a\n2,2,a \n", Columns(label="y"), ["'a ' and 'a' in column 'y'"]),
        # A non-breaking space, a tab, an ideographic space, a space without width, two spaces.
        ("id,x,y\nq 1,1,a\nq\xa01,2,a\n", Columns(), ["'q\\xa01' and 'q 1' in column 'id'"]),
        ("id,x,y\nq\t1,1,a\nq\u30001,2,a\n", Columns(), ["'q\\u30001' and 'q\\t1'"]),
        ("id,x,y\nq,1,a\n\u200bq,2,a\n", Columns(), ["'\\u200bq' and 'q' in column 'id'"]),
        ("id,x,y\nq,1,a\nr,2,a\xa0\n", Columns(label="y"), ["'a\\xa0' and 'a' in column 'y'"]),
        ("id,x,y\nq  1,1,a\nq 1,2,a\n", Columns(), ["'q  1' and 'q 1' in column 'id'"]),
        # Without a label, another column would be taken as one.
        ("id,x,age,label\n1,2,3,\n2,2,4,\n", Columns(), ["'label', which is empty in all rows"]),
        ("id,x,w,Class\n1,2,p,\n2,2,q,NaN\n", Columns(), ["'Class', which is empty in all rows"]),
        ("id,x,tags\n1,2,\n1,2,\n", Columns(task="tag"), ["'tags', which is empty in all rows"]),
        ("id,t0,t1,t2,label\n1,2,1,2,\n", Columns(), ["'label', which is empty in all rows"]),
        (
            "id,x,label\n1,1,a\n1,2,b\n",
            Columns(),
            ["the label 'b' in data row 1", "Columns(task='tag')"],
        ),
        (
            "id,x\n1,1.5\n1,2.5\n",
            Columns(),
            ["no candidate for the label column", "Columns(label=...)"],
        ),
        ("id,y\n1,a\n", Columns(), ["no feature column", "Columns(features=...)"]),
        (
            "id,t,x,y\nb,1,1,a\nc,1,1,a\nb,1,2,a\n",
            Columns(label="y"),
            ["time '1' again in data row 2 (id 'b')"],
        ),
        (
            "id,x,y\n1,1,a\n2,1,b\n1,1,b\n",
            Columns(label="y"),
            ["the label 'b' in data row 2 (id 1), column 'y'"],
        ),
        (
            "id,x,y\n1,1,a\n2,1,\n",
            Columns(label="y"),
            ["the missing label '' in data row 1 (id 2)", "'y'"],
        ),
        (
            "id,x,y\n1,1,a\n,1,b\n",
            Columns(label="y"),
            ["the missing id '' in data row 1, column 'id'"],
        ),
        (
            "id,x,y\n1,1,a\n2,1,NaN\n",
            Columns(label="y"),
            ["the missing label 'NaN' in data row 1 (id 2)"],
        ),
        (
            "id,w,y\n1,the,a\n1,,a\n2,a,b\n",
            Columns(),
            ["the missing token '' in data row 1 (id 1), column 'w'"],
        ),
        # The label with a mistake, and a last line that is cut.
        (
            "id,x,y\n1,1,a\n1,2,a\n2,1,b\n2,2,c\n",
            Columns(),
            ["the label 'c' in data row 3", "Columns(task='tag')"],
        ),
        (
            "id,x,y\n1,1,a\n1,2,a\n2,1,b\n2,2",
            Columns(),
            [", line 5 must be ", "data row 3 without 'y'", "on_bad_row='skip'"],
        ),
        (
            "id,x,y\n1,1,a\n1,2,a\n2,1,b\n2,2,",
            Columns(),
            ["the label '' in data row 3 (id 2), column 'y', after 'b'"],
        ),
        (
            "id,n,label\n1,7,a\n1,7,a\n2,8,b\n2,8,\n",
            Columns(),
            ["the label '' in data row 3 (id 2), column 'label'"],
        ),
        ("id,x,x,y\n1,1,2,a\n", Columns(), ["two columns 'x'", "Rename one"]),
        (
            "id;x;y;z\na;1.562;0,5;p\na;950;0,5;p\n",
            Columns(label="z"),
            ["'1.562'", "without marks of thousands"],
        ),
        (
            "id,x,y,z\na,1.5%,1,p\na,-2 %,2,p\nb,\u22125,3,q\n",
            Columns(label="z"),
            ["'1.5%' in data row 0", "% and $"],
        ),
        ("id,x,y\n", Columns(), ["no rows"]),
        ("\ufeff", Columns(), ["an empty file"]),
        (
            "id,x,y\n1,1,a\n1,1,a,4,5\n",
            Columns(),
            ["rows of several sizes (Expected 3 fields in line 3, saw 5)"],
        ),
        # pandas would cut off the last column, with a warning.
        ("id,x,y\n1,2,a,9\n1,3,a,9\n", Columns(), ["rows of several sizes"]),
        ('id,x,y\n1,1,"a\n1,1,a\n', Columns(), ["rows of several sizes"]),
        ('id,x,y\n1,"1,5",a\n', Columns(label="y"), ["'1,5' in data row 0", "decimal points"]),
        (
            "id;x;y\n1;2.5;a\n1;1,234;a\n",
            Columns(label="y"),
            ["'1,234' in data row 1", "one decimal mark"],
        ),
        (
            "id;x;y\n1;1,5;a\n1;2.5;a\n",
            Columns(label="y"),
            ["'2.5' in data row 1", "one decimal mark"],
        ),
        ("id;x;y\n1;k.A.;a\n1;1,5;a\n1;2,5;a\n", Columns(label="y"), ["'k.A.' in data row 0"]),
        (
            "id,t,x,y\nid,t,x,y\n1,1,1,a\n2,2,2,b\n",
            Columns(),
            ["the header again in data row 0", "one header"],
        ),
        ("text,label\na b,x\nc,y\ntext,label\n", Columns(), ["the header again in data row 2"]),
    ],
)
def test_bad_files(tmp_path: Path, text: str, columns: Columns, words: list[str]) -> None:
    assert refused(words, read, write(tmp_path, text), columns).startswith(str(tmp_path))


def test_only_numbers_have_their_decimal_commas_replaced(tmp_path: Path) -> None:
    wide = read(
        write(tmp_path, "\ufeffsep=;\r\nlabel;1.0;2.0;3.0\na;,5;1,5;2\nb;1;2;3,5\n"),
        Columns(wide=True, label="label"),
    )
    assert wide.values.ravel().tolist() == [0.5, 1.5, 2, 1, 2, 3.5]
    found = read(
        write(tmp_path, 'id;t;"x, y";kind\n1,5;0,5;,25;1,0\n1,5;0,25;1e3;1,0\n1.5;1;;2,0\n'),
        Columns(label="kind"),
    )
    assert (found.ids, found.labels) == (("1,5", "1.5"), ("1,0", "2,0"))
    np.testing.assert_array_equal(found.values.ravel(), [1000, 0.25, np.nan])
    texts = read(
        write(tmp_path, '"SEP=;"\nid;word\n1;3,14\n1;is\n1;.\n2;pi\n'), Columns(need_labels=False)
    )
    assert texts.values.tolist() == ["3,14", "is", ".", "pi"]
    assert {*map(type, (*texts.values.tolist(), *(found.labels or ())))} == {str}


@pytest.mark.parametrize(
    ("times", "gaps"),
    [
        (["1949-01", "1949-03", "1949-02"], [0, 59, 31]),
        (["1970 Q1", "1970 Q3", "1970 Q2"], [0, 181, 90]),
        (["1970Q1", "1971Q1", "1970-Q4"], [0, 365, 273]),
        (["1991 Jul", "1991 Sep", "1991 Aug"], [0, 62, 31]),
    ],
)
def test_months_and_quarters_are_times(tmp_path: Path, times: list[str], gaps: list[int]) -> None:
    path = write(
        tmp_path, "month,x\n" + "".join(f"{time},{row}\n" for row, time in enumerate(times))
    )
    records = read(path, Columns(task="forecast", time_gaps=True))
    assert "time column: 'month' (by its name)" in records.notes
    assert records.values[:, 0].tolist() == [0, 2, 1]
    np.testing.assert_allclose(records.values[:, 1].cumsum() / 86400, sorted(gaps))


def test_a_year_is_a_time_unless_it_comes_twice(tmp_path: Path) -> None:
    text = "id,year,x\na,1950,1\na,1949,2\nb,1949,3\n"
    assert read(write(tmp_path, text), Columns(task="forecast")).values.tolist() == [[2], [1], [3]]
    assert read(write(tmp_path, text + "b,1949,4\n"), Columns(task="forecast")).channels == (
        "year",
        "x",
    )


_WIDE = "id,t1,t2,t3,label\nz,1,2,3,up\nb,4,,6,down\n10,7,,,up\n"


def test_numbered_columns_are_steps(tmp_path: Path) -> None:
    records = read(write(tmp_path, _WIDE))
    assert (records.ids, records.labels) == (("z", "b", "10"), ("up", "down", "up"))
    # An empty entry at the end is no step; another one is missing.
    assert records.lengths.tolist() == [3, 3, 1]
    np.testing.assert_array_equal(
        records.values[:, 0], np.array([1, 2, 3, 4, np.nan, 6, 7], np.float32)
    )
    assert "each row is a sequence, whose steps are the columns t1 to t3" in records.notes
    # Another file is read in the same way.
    new = write(tmp_path, "id,t1,t2,t3\na,1,2,\n")
    assert read(new, replace(records.columns, need_labels=False)).values.tolist() == [[1], [2]]
    without_ids = read(write(tmp_path, "x0,x1,x2,y\n1,2,3,up\n4,5,6,down\n"))
    assert (without_ids.ids, without_ids.values[:, 0].tolist()) == ((0, 1), [1, 2, 3, 4, 5, 6])
    skipped = read(
        write(tmp_path, "id,t1,t2,t3,y\na,1,2,3,p\nb,1,2,3,\nc,4,5,6,q\n"), on_bad_row="skip"
    )
    assert (skipped.ids, len(skipped.skipped)) == (("a", "c"), 1)


@pytest.mark.parametrize(
    ("text", "columns"),
    [
        (_WIDE, Columns(features=("t1", "t2", "t3"))),
        (_WIDE + "z,1,2,3,up\n", Columns()),
        (_WIDE.replace("t3", "t4"), Columns()),
        ("id,t1,t2,label\na,1,2,p\nb,3,4,q\n", Columns()),
        ("id,time,t1,t2,t3,label\nz,0,1,2,3,up\nz,1,4,5,6,up\n", Columns()),
    ],
    ids=["named", "repeated id", "a gap", "two", "times"],
)
def test_numbered_columns_that_are_channels(tmp_path: Path, text: str, columns: Columns) -> None:
    assert len(read(write(tmp_path, text), columns).channels) > 1


def test_named_columns_are_steps(tmp_path: Path) -> None:
    text = "id,jan,feb,label\na,1,2,0\nb,3,4,1\n"
    records = read(write(tmp_path, text), Columns(wide=True))
    assert (records.values[:, 0].tolist(), records.labels) == ([1, 2, 3, 4], ("0", "1"))
    assert records.columns.features == ("jan", "feb")
    path = write(tmp_path, text + "a,5,6,1\n")
    refused(["the id 'a' twice", "one row per id"], read, path, Columns(wide=True))
    words, wrong = "id,word,label\na,p,x\nb,q,y\n", "t0,t1,t2,label\n1,2,3,u\n1,O,3,v\n1,2,3,u\n"
    for text, got in ((words, "no column of numbers"), (wrong, "'O' in data row 1")):
        refused([got], read, write(tmp_path, text), Columns(wide=True, label="label"))


def test_another_file_has_more_steps_or_fewer(tmp_path: Path) -> None:
    first = read(write(tmp_path, "t0,t1,t2,label\n1,2,3,u\n"))
    records = read(write(tmp_path, "t0,t1,t2,t3,u0,label\n1,2,3,4,9,u\n5,6,,,,v\n"), first.columns)
    assert (records.values[:, 0].tolist(), records.channels) == ([1, 2, 3, 4, 5, 6], first.channels)
    assert read(write(tmp_path, "t0,label\n7,u\n"), records.columns).values.tolist() == [[7]]
    for header, lost in (("t1,t2,label", "t0"), ("t0,t2,label", "t1")):
        refused([f"no column '{lost}'"], read, write(tmp_path, f"{header}\n1,2,u\n"), first.columns)
    named = read(write(tmp_path, "t0,t1,label\n1,2,u\n"), Columns(wide=True, features=("t0", "t1")))
    assert (named.channels, named.columns.features) == (("t0 to t1",), ("t0", "t1"))


def test_the_time_since_the_element_before(tmp_path: Path) -> None:
    path = write(tmp_path, "id,t,x\nb,5,1\na,3,2\na,1,3\nb,9,4\na,7,5\n")
    records = read(path, Columns(task="forecast", time_gaps=True))
    rows = [[1, 0], [4, 4], [3, 0], [2, 2], [5, 4]]
    assert (records.channels, records.values.tolist()) == (("x", "time_gap"), rows)
    path.write_text("id,t,x\na,2024-01-01T00:00:00,1\na,2024-01-01T00:00:01,2\n")
    assert read(path, Columns(task="forecast", time_gaps=True)).values[:, 1].tolist() == [0, 1]
    path.write_text("id,x\na,1\n")
    refused(
        ["no time column", "Columns(time=...)"],
        read,
        path,
        Columns(task="forecast", time_gaps=True),
    )


@pytest.mark.parametrize(
    ("first", "second"), [("2024-01-30 12:00", "2024-02-01 12:00"), ("30.01.2024", "01.02.2024")]
)
def test_the_only_column_of_dates_is_a_time_and_one_that_comes_twice_is_refused(
    tmp_path: Path, first: str, second: str
) -> None:
    text = f"id,ordered,x,kind\na,{second},1,p\na,{first},2,p\nb,{first},3,q\n"
    records = read(write(tmp_path, text))
    assert "time column: 'ordered' (the only one of dates)" in records.notes
    assert (records.values.tolist(), records.features) == ([[2], [1], [3]], ())
    assert read(write(tmp_path, text), Columns(categorical=("ordered",))).values.tolist() == [
        [1],
        [2],
        [3],
    ]
    codes = "id,code,host,x,kind\na,12.34.5678,192.168.100.200,1,p\na,11.12.2013,192.168.1.7,2,p\n"
    records = read(write(tmp_path, codes), Columns(label="kind"))
    assert [feature.name for feature in records.features] == ["code", "host"]
    path = write(tmp_path, text + f"b,{first},4,q\n")
    refused(["1 of 4 rows repeat one", "Columns(duplicate_times='keep')"], read, path)
    kept = read(path, Columns(duplicate_times="keep"))
    assert kept.values.tolist() == [[2], [1], [3], [4]]
    assert "1 of 4 rows repeat the time of another and keep the order of the file" in str(
        kept.notes
    )
    assert read(path, Columns(duplicate_times="mean")).values.tolist() == [[2], [1], [3.5]]
    assert read(path, Columns(duplicate_times="first")).values.tolist() == [[2], [1], [3]]


def test_a_label_of_json_that_is_null_in_all_rows(tmp_path: Path) -> None:
    rows = '{"x":[1.0,2.0],"age":3,"label":null}\n{"x":[1.0],"age":4,"label":null}\n'
    path = put(tmp_path / "data.jsonl", rows)
    with pytest.raises(DataError, match="'label', which is empty in all rows"):
        read(path)
    assert read(path, Columns(label="age")).labels == ("3", "4")
    assert read(path, Columns(need_labels=False)).labels is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('id,x,y\n1,"1,234.5",2\n1,12,3\n1,"2,345,678",4\n', [1234.5, 12, 2345678]),
        ("id;x;y\n1;1.234,5;2\n1;12,25;3\n1;2.345;4\n1;;5\n", [1234.5, 12.25, 2345, np.nan]),
        ("id;x;y\n1;-1.234.567;2\n1;500;3\n", [-1234567, 500]),
        ('id,x,y\n1,"1,234",2\n1,12,3\n', None),
        ('id,x,y\n1,"1,234.5",2\n1,"1,5",3\n', None),
        ("id;x;y\n1;1.234,5;2\n1;0.5;3\n", None),
    ],
)
def test_marks_of_thousands(tmp_path: Path, text: str, expected: list[float] | None) -> None:
    """The whole column decides; one that may have another reading is refused with the fix."""
    path = tmp_path / "x.csv"
    path.write_text(text)
    if expected is None:
        refused(["without marks of thousands"], read, path, Columns(task="forecast"))
        return
    data = read(path, Columns(task="forecast"))
    np.testing.assert_array_equal(data.records.values[:, 0], np.array(expected, np.float32))
    assert "marks of thousands are left out: x" in data.notes


def test_dates_without_a_name_are_the_time(tmp_path: Path) -> None:
    """Pandas writes the index of a table without a name."""
    path = tmp_path / "x.csv"
    path.write_text(",load\n2024-01-02,2\n2024-01-03,3\n2024-01-01,1\n")
    data = read(path, Columns(task="forecast"))
    assert data.records.values.ravel().tolist() == [1, 2, 3]
    assert "time column: 'time' (by its name)" in data.notes


@pytest.mark.parametrize("cells", [("[1.0, 2.0]", "[3.0]"), ("['a', 'b']", "[]")])
@pytest.mark.parametrize("name", ["series", "text"])
def test_lists_written_as_texts_are_refused(
    tmp_path: Path, cells: tuple[str, str], name: str
) -> None:
    path = tmp_path / "x.csv"
    path.write_text(f'id,{name},label\n1,"{cells[0]}",a\n2,"{cells[1]}",b\n')
    refused(["lists written as texts", f"'{name}'", "to_parquet"], read, path, Columns())


def test_a_message_as_a_header_is_data(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("ham\tsee you there\nspam\tfree entry now\nham\tnot yet\n")
    refused(["no header", "'ham'", "no_header=True"], read, path, Columns())
    columns = Columns(header="label,text", no_header=True)
    assert read(path, columns).labels == ("ham", "spam", "ham")
