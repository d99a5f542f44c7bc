"""What is converted, against the same data read in the usual way; and data that cannot be, or not
all of it.
"""

from __future__ import annotations

import errno
import json
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import fsspec  # type: ignore[import-untyped]
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raglane._utils.lock import locked
from raglane.data import FORMATS, Columns, Dataset, Statistics, convert, read
from raglane.data.records import Records, offsets_of
from raglane.data.sources.locations import fingerprint
from raglane.errors import ArgumentError, DataError
from small_files import asked, refused, same, small_steps, write_table, written


@pytest.fixture
def table() -> pa.Table:
    """Tokens with a tag each, in Arrow."""
    words = [["a", "b", "a"], [], ["c"], ["b", "b"], ["a"], [], ["d", "a"]]
    tags = [[word.upper() for word in row] for row in words]
    return pa.table(
        {
            "words": words,
            "tags": tags,
            "kind": list("xyxyxxy"),
            "name": [f"n{row}" for row in range(7)],
        }
    )


def _rows(path: Path, rows: list[str]) -> Path:
    path.write_text("\n".join(rows))
    return path


# A sheet is one piece.
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "xlsx"])
def test_converted_data_equals_the_source(name: str, tmp_path: Path) -> None:
    path = written(name, tmp_path)
    with small_steps(4, 100):
        done = convert(path, tmp_path / "out", asked(name))
    whole, found = read(path, asked(name)), read(tmp_path / "out", asked(name))
    assert len(list((tmp_path / "out").glob("*.arrow"))) > 2
    same(found, whole)
    assert done.statistics == Statistics.from_config(
        json.loads((tmp_path / "out" / "statistics.json").read_text())
    )
    assert done.statistics.sequences == len(whole)
    lengths = np.load(tmp_path / "out" / "lengths.npy")
    assert lengths.dtype == np.int32
    assert lengths.tolist() == whole.element_counts.tolist()
    assert (done.statistics.longest, done.statistics.empty) == (lengths.max(), (lengths == 0).sum())
    # Once more, from what was converted.
    convert(tmp_path / "out", tmp_path / "again", asked(name))
    same(read(tmp_path / "again", asked(name)), whole)


def test_statistics_of_large_numbers_keep_their_differences() -> None:
    values = (1e8 + np.arange(6000) % 7).astype(np.float32)[:, None]
    records = Records(values, offsets_of([1] * 6000), channels=("x",))
    parts = [
        Statistics.of(records.select(np.arange(start, start + 100)))
        for start in range(0, 6000, 100)
    ]
    channel = sum(parts, Statistics()).channels["x"]
    assert channel.deviation == pytest.approx(values.astype(np.float64).std(), rel=1e-9)
    assert channel.mean == pytest.approx(values.astype(np.float64).mean(), rel=1e-12)


def test_many_files_a_pattern_a_folder_and_a_url(table: pa.Table, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    pq.write_table(table.slice(0, 3), tmp_path / "in" / "a.parquet")
    pq.write_table(table.slice(3, 2), tmp_path / "in" / "b.parquet")
    with fsspec.open("memory://far/c.parquet", "wb") as file:
        pq.write_table(table.slice(5), file)
    columns = Columns(sequence="words", label="kind", id="name")
    pq.write_table(table, tmp_path / "all.parquet")
    whole = read(tmp_path / "all.parquet", columns)
    url = "memory://far/*.parquet"
    for number, inputs in enumerate(
        ([str(tmp_path / "in" / "?.parquet"), url], [tmp_path / "in", "memory://far/c.parquet"])
    ):
        convert(inputs, tmp_path / f"out{number}", columns)
        same(read(tmp_path / f"out{number}"), whole)


def test_a_conversion_that_was_done_is_not_done_again(tmp_path: Path) -> None:
    path = written("jsonl", tmp_path)
    assert not convert(path, tmp_path / "out").was_there
    before = (tmp_path / "out" / "dataset.json").stat().st_mtime_ns
    assert convert(path, tmp_path / "out").was_there
    assert (tmp_path / "out" / "dataset.json").stat().st_mtime_ns == before
    _rows(path, path.read_text().split("\n")[:5])
    refused(
        ["contains other converted data", "overwrite"],
        convert,
        path,
        tmp_path / "out",
        error=ArgumentError,
    )
    assert convert(path, tmp_path / "out", overwrite=True).statistics.sequences == 3
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["data.jsonl", "out"]


def test_a_fingerprint_is_of_size_ends_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raglane.data.sources.locations._EDGE", 2)
    found = [
        fingerprint(str(_rows(tmp_path / "a", [text])))
        for text in ("abcde", "Xbcde", "abcdX", "abcdde")
    ]
    found += [
        fingerprint(str(tmp_path)),
        fingerprint(str((tmp_path / "a").rename(tmp_path / "b").parent)),
    ]
    assert len(set(found)) == 6
    _rows(tmp_path / ".hidden", [""])
    assert fingerprint(str(tmp_path)) == found[-1]


def test_bad_rows_are_left_out_and_listed(tmp_path: Path) -> None:
    good = '{"x": [1, 2], "kind": "a"}'
    bad = ["{", '{"x": [null], "kind": "a"}', '{"x": [1]}', '{"x": ["word"], "kind": "a"}']
    first = _rows(tmp_path / "a.jsonl", [good, *bad[:2], good])
    # The last piece has only bad rows, behind the last shard.
    second = _rows(tmp_path / "b.jsonl", [good, good, good, *bad[2:], good, *bad[:2]])
    refused(
        ["a.jsonl, line 2 must be ", "got bad JSON"], convert, [first, second], tmp_path / "out"
    )
    with small_steps(3, 1):
        done = convert([first, second], tmp_path / "out", on_bad_row="skip", overwrite=True)
    assert (done.skipped, done.statistics.sequences) == (6, 6)
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "skipped.jsonl").read_text().splitlines()
    ]
    places = [("a", 2), ("a", 3), ("b", 4), ("b", 5), ("b", 7), ("b", 8)]
    assert [(Path(row["location"]).stem, row["place"]) for row in rows] == [
        (file, f"line {n}") for file, n in places
    ]
    assert "bad JSON" in rows[0]["error"]
    assert "a null" in rows[1]["error"]
    with pytest.raises(DataError, match=r"line 1 must be .*got bad JSON"):
        convert(_rows(tmp_path / "c.jsonl", ["{", "["]), tmp_path / "none", on_bad_row="skip")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"x": ["a"], "y": "b"}', "tokens or features"),
        ('{"x": [[1, 2]], "y": "b"}', "tokens or features"),
        ('{"z": [1], "y": "b"}', "no column 'x'"),
    ],
)
def test_schemas_that_differ_between_files_are_refused(
    tmp_path: Path, row: str, words: str
) -> None:
    first = _rows(tmp_path / "a.jsonl", ['{"x": [], "y": "b"}', '{"x": [1], "y": "b"}'])
    second = _rows(tmp_path / "b.jsonl", [row])
    with pytest.raises(DataError, match=words) as caught:
        convert([first, second], tmp_path / "out")
    assert str(caught.value).startswith(str(second))
    more = _rows(tmp_path / "c.jsonl", ['{"x": [1], "y": "b", "id": 3}'])
    assert convert([first, more], tmp_path / "out").statistics.sequences == 3
    odd = _rows(tmp_path / "d.jsonl", ['{"x": [1], "y": "b", "id": "n"}'])
    refused(
        [f"{odd} must be", "ids: texts", "after numbers"], convert, [more, odd], tmp_path / "other"
    )


def test_damaged_files_are_named(table: pa.Table, tmp_path: Path) -> None:
    columns = Columns(sequence="words", label="kind")
    good = write_table(tmp_path / "a.parquet", table)
    for name in ("a.parquet", "a.arrow"):
        content = write_table(tmp_path / name, table).read_bytes()
        bad = tmp_path / f"bad-{name}"
        place = 30 if name == "a.parquet" else content.index(b"aba") - 30
        overwritten = content[:place] + b"\xff" * 60 + content[place + 60 :]
        for damaged in (content[: len(content) // 2], content[:-9], overwritten):
            bad.write_bytes(damaged)
            told = refused(
                (), partial(convert, overwrite=True), [good, bad], tmp_path / "out", columns
            )
            assert told.startswith(str(bad))


def test_unreachable_locations_are_named(tmp_path: Path) -> None:
    for url in ("memory://nowhere/a.parquet", "nosuch://a/b.parquet", "memory://nowhere/*.parquet"):
        with pytest.raises(DataError, match=f"{url[:8]}.*(no valid response|no file)") as caught:
            convert(url, tmp_path / "out")
        assert "\n" not in str(caught.value)
    refused(["no such file"], convert, tmp_path / "a.parquet", tmp_path / "out")
    refused(
        ["a pattern that matches a file, got no file"],
        convert,
        str(tmp_path / "*.parquet"),
        tmp_path / "out",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_keeps_what_is_done_and_the_next_call_goes_on(tmp_path: Path) -> None:
    rows = [
        json.dumps({"x": [float(row)] * (8000 if row == 40 else 3), "y": "a"}) for row in range(60)
    ]
    path = _rows(tmp_path / "a.jsonl", rows)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with small_steps(10, 100):
        convert(path, tmp_path / "undisturbed")
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
        try:
            with pytest.raises(OSError, match=r"\[Errno") as caught:
                convert(path, tmp_path / "out")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, before)
        assert caught.value.errno == errno.EFBIG
        assert not (tmp_path / "out").exists()
        done = convert(path, tmp_path / "out")
    assert done.resumed == 40
    for file in (tmp_path / "undisturbed").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def test_an_output_that_must_not_be_touched(tmp_path: Path) -> None:
    path = written("jsonl", tmp_path)
    (tmp_path / "full").mkdir()
    _rows(tmp_path / "full" / "mine.txt", ["mine"])
    for overwrite in (False, True):
        refused(
            ["contains something else"],
            convert,
            path,
            tmp_path / "full",
            overwrite=overwrite,
            error=ArgumentError,
        )
    refused(["a file"], convert, path, path, error=ArgumentError)
    with pytest.raises(ArgumentError, match="which is, or is in, the data"):
        convert(tmp_path / "full", tmp_path / "full" / "out")
    with locked(tmp_path / ".out.converting"), ThreadPoolExecutor(1) as pool:
        refused(
            [" writes"], pool.submit(convert, path, tmp_path / "out").result, error=ArgumentError
        )
    refused(
        ["jsonl' twice"],
        convert,
        [path, f"{path.parent}/*.jsonl"],
        tmp_path / "out",
        error=ArgumentError,
    )
    refused(
        ["one of raise, skip"],
        convert,
        path,
        tmp_path / "out",
        on_bad_row="drop",
        error=ArgumentError,
    )


def test_a_conversion_resumes_only_with_the_same_arguments(tmp_path: Path) -> None:
    good = [json.dumps({"x": [row], "y": "a"}) for row in range(9)]
    path = _rows(tmp_path / "a.jsonl", [*good, "{"])
    with small_steps(2, 1), pytest.raises(DataError, match="line 10"):
        convert(path, tmp_path / "out")
    assert (tmp_path / ".out.converting").is_dir()
    other = _rows(tmp_path / "b.jsonl", good[:2])
    with small_steps(2, 1):
        refused(
            ["an unfinished conversion of other data"],
            convert,
            other,
            tmp_path / "out",
            error=ArgumentError,
        )
        assert convert(path, tmp_path / "other", on_bad_row="skip").statistics.sequences == 9
        assert convert(other, tmp_path / "out", overwrite=True).statistics.sequences == 2
    assert not (tmp_path / ".out.converting").exists()


@pytest.mark.parametrize("label", ["sets", "numbers", "steps"])
def test_lengths_are_those_of_the_sequences_not_of_other_lists(label: str, tmp_path: Path) -> None:
    labels = {
        "sets": [["a"], ["a", "b"], []],
        "numbers": [[0.5, 1.5]] * 3,
        "steps": [[[1.0, 2.0]] * 3, [], [[3.0, 4.0]]],
    }
    lengths, task = [3, 0, 1], "multilabel" if label == "sets" else "regress"
    words = [["w"] * length for length in lengths]
    table = pa.table(
        {
            "sets": labels["sets"],
            "y": labels[label],
            "words": words,
            "more": [["m"] * n for n in lengths],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    columns = Columns(task=task, sequence="words", label="y", features=("more",))
    assert Dataset(tmp_path / "a.parquet", columns).lengths.tolist() == lengths
    done = convert(tmp_path / "a.parquet", tmp_path / "out", columns)
    assert np.load(done.folder / "lengths.npy").tolist() == lengths
    assert Dataset(done.folder).lengths.tolist() == lengths


def test_missing_values_of_all_pieces_are_counted(tmp_path: Path) -> None:
    x = [[1.0, np.nan], [np.nan], [], [np.inf, 2.0], [np.nan, np.nan, 3.0]]
    pq.write_table(
        pa.table({"x": x, "y": list("ababa"), "s": [1.0, None, None, 2.0, None]}),
        tmp_path / "a.parquet",
    )
    columns = Columns(sequence="x", label="y", static=("s",), keep_trailing=True)
    with small_steps(1, 16):
        found = convert(tmp_path / "a.parquet", tmp_path / "out", columns).statistics
    assert [(channel.count, channel.missing) for channel in found.channels.values()] == [(3, 5)]
    assert found.features["s"].missing == 3
    assert found == read(tmp_path / "a.parquet", columns).statistics


def test_pieces_that_could_be_read_either_way_are_read_as_those_before(tmp_path: Path) -> None:
    # In the rows of the first sequence the number to learn changes; in none of the others.
    numbers = [[0.5, 1.5], [2.0], [3.0], [4.0, 4.0], [5.0], [6.0], [7.0, 7.0]]
    rows = [
        f"{row},{step},{number}"
        for row, each in enumerate(numbers)
        for step, number in enumerate(each)
    ]
    path = _rows(tmp_path / "a.csv", ["id,x,y", *rows])
    columns = Columns(task="regress", label="y")
    with small_steps(4, 16):
        convert(path, tmp_path / "out", columns)
    found, whole = read(tmp_path / "out", columns), read(path, columns)
    same(found, whole)
    assert found.targets is not None
    assert found.targets.per_element
    assert found.targets.values.tolist() == [[n] for each in numbers for n in each]


def test_an_arrow_file_of_elements_without_rows_is_refused(tmp_path: Path) -> None:
    columns = {"id": pa.array([], pa.string()), "x": pa.array([], pa.float64())}
    with pa.ipc.new_file(tmp_path / "data.arrow", pa.table(columns).schema) as writer:
        writer.write_table(pa.table(columns))
    with pytest.raises(DataError, match="got no rows"):
        convert(
            tmp_path / "data.arrow",
            tmp_path / "converted",
            Columns(id="id", features=("x",), need_labels=False),
        )
    assert not (tmp_path / "converted").exists()
