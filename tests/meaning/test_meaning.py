"""Files of other programs, read as their owners mean them: compared with a second reading."""

from __future__ import annotations

import io
import json
import wave
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

import raglane as rl
from raglane.data import Columns
from raglane.errors import DataError

_FILES = Path(__file__).parent / "files"


@dataclass
class Meaning:
    """The sequences of a file: numbers ``(L, C)``, or lists of tokens, in their order."""

    sequences: list[Any]
    labels: list[str] | None = None
    ids: list[Any] | None = None
    # A label per element.
    tags: list[str] | None = None
    # The texts to write.
    targets: list[str] | None = None


_Case = tuple[dict[str, Any], Callable[[Path], Meaning]]


def _rows(
    frame: pd.DataFrame,
    features: list[str],
    id: str = "id",
    time: str | None = "time",
    label: str | None = "kind",
) -> Meaning:
    """Return sequences of rows with one id, in the order of their times."""
    parts = [(name, frame[frame[id] == name]) for name in dict.fromkeys(frame[id])]
    if time is not None:
        parts = [(name, part.sort_values(time)) for name, part in parts]
    sequences = [part[features].to_numpy(float) for _, part in parts]
    labels = None if label is None else [str(part[label].iloc[0]) for _, part in parts]
    return Meaning(sequences, labels, [name for name, _ in parts])


def _long(read: Callable[[Path], pd.DataFrame]) -> _Case:
    return {}, lambda path: _rows(
        read(path).assign(time=lambda f: pd.to_datetime(f["time"])), ["x", "y"]
    )


def _texts(read: Callable[[Path], pd.DataFrame]) -> _Case:
    def meaning(path: Path) -> Meaning:
        frame = read(path)
        return Meaning([text.split() for text in frame["text"]], frame["label"].tolist())

    return {}, meaning


def _series(read: Callable[[Path], npt.NDArray[Any]], **columns: Any) -> _Case:
    """Return the case of one series ``(L,)`` or ``(L, C)`` to forecast."""

    def meaning(path: Path) -> Meaning:
        values = read(path).astype(float)
        return Meaning([values.reshape(len(values), -1)])

    return {"task": "forecast", **columns}, meaning


def _ts(path: Path) -> Meaning:
    """Read a .ts file by hand: channels between colons, the label last."""
    lines = path.read_text().split("@data\n")[1].strip().split("\n")
    sequences = [
        np.array([list(map(float, part.split(","))) for part in line.split(":")[:-1]]).T
        for line in lines
    ]
    return Meaning(sequences, [line.split(":")[-1] for line in lines])


def _padded(path: Path) -> Meaning:
    arrays = np.load(path)
    ends = [row[~np.isnan(row).all(1)] for row in arrays["x"]]
    return Meaning(ends, arrays["label"].tolist())


def _ucr(path: Path) -> Meaning:
    rows = [list(map(float, line.split())) for line in path.read_text().splitlines()]
    values = [np.array(row[1:]) for row in rows]
    labels = [line.split()[0] for line in path.read_text().splitlines()]
    return Meaning([row[~np.isnan(row)][:, None] for row in values], labels)


def _ucr_arff(path: Path) -> Meaning:
    rows = [line.split(",") for line in path.read_text().split("@data\n")[1].split()]
    return Meaning([np.array(row[:-1], float)[:, None] for row in rows], [row[-1] for row in rows])


def _uea_arff(path: Path) -> Meaning:
    rows = [line.split("'") for line in path.read_text().split("@data\n")[1].strip().split("\n")]
    parsed = [np.array([part.split(",") for part in row[1].split("\\n")], float).T for row in rows]
    return Meaning(parsed, [row[2].strip(",") for row in rows])


def _sounds(pattern: str, label: Callable[[Path], str]) -> Callable[[Path], Meaning]:
    def meaning(path: Path) -> Meaning:
        files = sorted(path.glob(pattern))
        arrays = []
        for file in files:
            with wave.open(str(file)) as sound:
                samples = np.frombuffer(sound.readframes(sound.getnframes()), "<i2")
                arrays.append(samples.reshape(-1, sound.getnchannels()) / 2.0**15)
        ids = [str(file.relative_to(path).with_suffix("")) for file in files]
        return Meaning(arrays, list(map(label, files)), ids)

    return meaning


def _words(
    label: int, word: int = 0, mark: str | None = None, skip: tuple[str, ...] = ("#\t", "-DOC")
) -> Callable[[Path], Meaning]:
    def meaning(path: Path) -> Meaning:
        blocks = path.read_text().strip().split("\n\n")
        lines = [
            [line.split(mark) for line in block.split("\n") if not line.startswith(skip)]
            for block in blocks
        ]
        rows = [
            [row for row in block if row[0].isdigit() or not row[0][:1].isdigit()]
            for block in lines
        ]
        rows = [block for block in rows if block]
        words = [[row[word] for row in block] for block in rows]
        return Meaning(words, tags=[row[label] for block in rows for row in block])

    return meaning


def _lists(read: Callable[[Path], dict[str, list[Any]]]) -> _Case:
    def meaning(path: Path) -> Meaning:
        columns = read(path)
        tags = [str(tag) for row in columns["ner_tags"] for tag in row]
        return Meaning([list(row) for row in columns["tokens"]], tags=tags)

    return {"task": "tag", "sequence": "tokens", "label": "ner_tags"}, meaning


def _imdb(path: Path) -> Meaning:
    files = sorted(path.glob("neg/*.txt")) + sorted(path.glob("pos/*.txt"))
    texts = [file.read_text().split() for file in files]
    return Meaning(texts, [file.parent.name for file in files])


def _news(path: Path) -> Meaning:
    files = sorted(path.glob("*/*"))
    return Meaning(
        [file.read_text().split() for file in files],
        [file.parent.name for file in files],
        [str(file.relative_to(path)) for file in files],
    )


def _physionet(path: Path) -> Meaning:
    frames = [pd.read_csv(file, sep="|") for file in sorted(path.glob("*.psv"))]
    tags = [str(tag) for frame in frames for tag in frame["SepsisLabel"]]
    values = [frame[["HR", "O2Sat"]].to_numpy() for frame in frames]
    return Meaning(values, ids=["p1", "p2"], tags=tags)


def _wide(path: Path) -> Meaning:
    frame = pd.read_csv(path)
    values = [row[~np.isnan(row)][:, None] for row in frame.filter(like="t").to_numpy(float)]
    return Meaning(values, frame["kind"].tolist())


def _panel(path: Path) -> Meaning:
    return _rows(pd.read_csv(path, parse_dates=["ds"]), ["y", "z"], "unique_id", "ds", None)


def _stores(path: Path) -> Meaning:
    frame = pd.read_csv(path)
    keys = frame["country"] + "/" + frame["store"]
    return _rows(frame.assign(id=keys), ["sold"], time="day", label=None)


def _m4(path: Path) -> Meaning:
    frame = pd.read_csv(path, index_col=0)
    rows = [row[~np.isnan(row)][:, None] for row in frame.to_numpy(float)]
    return Meaning(rows, ids=frame.index.tolist())


def _traffic(path: Path) -> Meaning:
    frame = pd.read_csv(path, index_col=0)
    return Meaning([row[:, None] for row in frame.to_numpy(float)], ids=frame.index.tolist())


def _power(path: Path) -> Meaning:
    frame = pd.read_csv(path, sep=";", na_values="?")
    times = pd.to_datetime(frame["Date"] + " " + frame["Time"], dayfirst=True)
    return Meaning([frame.iloc[times.argsort()][["Power", "Volt"]].to_numpy(float)])


def _gluonts(path: Path) -> Meaning:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return Meaning(
        [np.array(row["target"])[:, None] for row in rows], ids=[row["item_id"] for row in rows]
    )


def _har(path: Path) -> Meaning:
    files = sorted(path.glob("*/*.txt"))
    return Meaning([np.loadtxt(file) for file in files], [file.parent.name for file in files])


def _names(path: Path) -> Meaning:
    lines = [
        (file.stem, line)
        for file in sorted(path.glob("*.txt"))
        for line in file.read_text().split()
    ]
    return Meaning([list(line) for _, line in lines], [name for name, _ in lines])


def _tatoeba(path: Path) -> Meaning:
    frame = pd.read_csv(path, sep="\t")
    return Meaning([text.split() for text in frame["source"]], targets=frame["target"].tolist())


def _ecg(path: Path) -> Meaning:
    table = np.loadtxt(path, delimiter=",")
    words = [line.split(",")[-1] for line in path.read_text().splitlines()]
    return Meaning([row[:-1, None] for row in table], words)


def _read_csv(**options: Any) -> Callable[[Path], pd.DataFrame]:
    return lambda path: pd.read_csv(path, **options)


_CASES: dict[str, _Case] = {
    "pandas_index.csv": _long(_read_csv(index_col=0)),
    "pandas_semicolon.csv": _long(_read_csv(sep=";", decimal=",")),
    "pandas_tabs.tsv": _long(_read_csv(sep="\t")),
    "pandas.csv.gz": _long(_read_csv()),
    "pandas_utf16.csv": _long(_read_csv(sep="\t", encoding="utf-16")),
    "pandas.parquet": _long(pd.read_parquet),
    "pandas_lines.jsonl": _long(lambda path: pd.read_json(path, lines=True)),
    "openpyxl.xlsx": _long(lambda path: pd.read_excel(path, engine="calamine")),
    **{
        f"pandas_{orient}.json": _texts(partial(pd.read_json, orient=orient))
        for orient in ("columns", "index", "split", "table", "records")
    },
    "pandas_levels.csv": _series(
        lambda path: pd.read_csv(path, header=[0, 1], index_col=0).to_numpy()
    ),
    "pandas_dates.csv": _series(
        lambda path: pd.read_csv(path, index_col=0).sort_index().to_numpy()
    ),
    "pandas_thousands.csv": _series(
        lambda path: pd.read_csv(path, index_col=0, thousands=",").sort_index().to_numpy()
    ),
    "pandas_wide.csv": ({}, _wide),
    "pandas_text.txt": _series(lambda path: pd.read_csv(path, sep=r"\s+").to_numpy()),
    "panel.csv": ({"task": "forecast"}, _panel),
    "polars.csv": _long(_read_csv()),
    "polars.ndjson": _long(lambda path: pd.read_json(path, lines=True)),
    "polars.arrow": _long(lambda path: pa.feather.read_feather(path, memory_map=False)),
    "polars_lists.parquet": (
        {},
        lambda path: Meaning(
            [np.array(row)[:, None] for row in pq.read_table(path)["values"].to_pylist()],
            list(map(str, pq.read_table(path)["kind"].to_pylist())),
        ),
    ),
    "arrow_dictionary.parquet": _long(pd.read_parquet),
    "arrow.feather": _long(pd.read_feather),
    "arrow_texts.csv": _texts(_read_csv()),
    "datasets.csv": _texts(_read_csv()),
    "datasets.jsonl": _lists(lambda path: pd.read_json(path, lines=True).to_dict("list")),
    "datasets_columns.json": _lists(lambda path: json.loads(path.read_text())),
    "datasets_folder": _lists(
        lambda path: pa.ipc.open_stream(next(path.glob("*.arrow"))).read_all().to_pydict()
    ),
    "aeon_equal.ts": ({}, _ts),
    "aeon_unequal.ts": ({}, _ts),
    "sktime_equal.ts": ({}, _ts),
    "sktime_nested.ts": ({}, _ts),
    "tslearn_padded.npz": ({}, _padded),
    "ucr_TRAIN.tsv": ({}, _ucr),
    "ucr_2015.txt": ({}, _ucr),
    "ucr.arff": ({}, _ucr_arff),
    "uea.arff": ({}, _uea_arff),
    "statsmodels_sunspots.csv": _series(lambda path: pd.read_csv(path)[["SUNACTIVITY"]].to_numpy()),
    "statsmodels_co2.csv": _series(lambda path: pd.read_csv(path)[["co2"]].to_numpy()),
    "numpy_header.txt": _series(lambda path: np.loadtxt(path)[:, 1:]),
    "numpy.csv": _series(lambda path: np.loadtxt(path, delimiter=",")[:, 1:], header="t,u,v"),
    "sound_classes": ({}, _sounds("*/*.wav", lambda file: file.parent.name)),
    "sound_names": (
        {"label_from_name": "^[0-9]"},
        _sounds("*.wav", lambda file: file.name[0]),
    ),
    "conllu.conllu": ({"task": "tag"}, _words(3, 1, "\t", ("# ",))),
    "conll2003.txt": ({"task": "tag"}, _words(3)),
    "germeval.iob2": ({"task": "tag", "label": "3"}, _words(2, 1)),
    "wnut17.conll": ({"task": "tag"}, _words(1, skip=("-DOC",))),
    "mit_movies.bio": ({"task": "tag"}, _words(0, 1)),
    "power.txt": ({"task": "forecast"}, _power),
    "jena.csv": _series(lambda path: pd.read_csv(path).iloc[:, 1:].to_numpy()),
    "electricity.txt": _series(
        lambda path: pd.read_csv(path, sep=";", decimal=",", index_col=0).to_numpy()
    ),
    "logger.csv": _series(lambda path: pd.read_csv(path, header=2).iloc[1:, 1:].to_numpy()),
    "excel.csv": (
        {},
        lambda path: _rows(pd.read_csv(path, sep=";", skiprows=1, decimal=","), ["x"], time="t"),
    ),
    "ecg_no_header.csv": ({"header": "a,b,c,d,e,kind", "wide": True, "label": "kind"}, _ecg),
    "silso.csv": _series(
        lambda path: pd.read_csv(path, sep=";", header=None)[[3]].to_numpy(),
        header="year,month,time,spots",
        time="time",
        features=("spots",),
    ),
    "gluonts.jsonl": ({"task": "forecast"}, _gluonts),
    "m4.csv": ({"task": "forecast"}, _m4),
    "traffic.csv": ({"task": "forecast"}, _traffic),
    "physionet": ({"task": "tag", "label": "SepsisLabel"}, _physionet),
    "imdb": ({}, _imdb),
    "news": ({}, _news),
    "har": ({}, _har),
    "names": ({}, _names),
    "tatoeba.tsv": ({"task": "transcribe"}, _tatoeba),
    "store.csv": ({"task": "forecast", "id": "country,store"}, _stores),
}


@pytest.mark.parametrize("name", _CASES)
def test_files_are_read_as_their_owners_mean_them(name: str) -> None:
    path = _FILES / name
    if path.suffix == ".xlsx":
        pytest.importorskip("python_calamine")
    if name.startswith("sound"):
        pytest.importorskip("soundfile")
    options, meaning = _CASES[name]
    expected = meaning(path)
    data = rl.data.read(path, Columns(**options))
    records = data.records
    assert records.lengths.tolist() == list(map(len, expected.sequences))
    if records.is_tokens:
        assert records.values.tolist() == [word for row in expected.sequences for word in row]
    else:
        values = np.concatenate(expected.sequences).astype(np.float32)
        np.testing.assert_array_equal(records.values, values)
    if expected.labels is not None:
        assert list(records.labels or ()) == expected.labels
    if expected.ids is not None:
        assert list(records.ids or ()) == expected.ids
    if expected.tags is not None:
        assert records.tags is not None
        assert records.tags.tolist() == expected.tags
    if expected.targets is not None:
        assert records.targets is not None
        assert ["".join(row) for row in records.targets.values] == expected.targets


# Files that are refused, with what the message says, and how the way that it names is read.
_REFUSED: dict[str, tuple[dict[str, Any], str, Callable[[Path], Any]]] = {
    "pandas.pkl": ({}, "pass the object to rl.fit", pd.read_pickle),
    "pandas_lists.csv": ({}, "to_parquet", lambda path: _with_lists(path)),
    "sklearn.svmlight": ({}, "without an order", lambda path: _svmlight(path)),
    "tslearn.txt": ({}, "lines of different numbers", lambda path: _tslearn(path)),
    "numpy.csv": ({"task": "forecast"}, "no_header=True", lambda path: _no_header(path)),
    "ecg_no_header.csv": ({}, "no_header=True", lambda path: _no_header(path)),
}


def _with_lists(path: Path) -> Any:
    return pd.read_csv(path, converters={"x": json.loads})


def _svmlight(path: Path) -> Any:
    rows = [line.split() for line in path.read_text().splitlines()]
    frame = pd.DataFrame([[float(pair.split(":")[1]) for pair in row[1:]] for row in rows])
    return frame.assign(id=range(len(frame)), kind=[row[0] for row in rows])


def _tslearn(path: Path) -> Any:
    lines = [line.split("|") for line in path.read_text().strip().splitlines()]
    return [np.array([part.split() for part in line], float).T for line in lines]


def _no_header(path: Path) -> Any:
    return rl.data.read(path, Columns(task="forecast", no_header=True)).records.values


@pytest.mark.parametrize("name", _REFUSED)
def test_refused_with_a_way_that_works(name: str) -> None:
    options, way, read = _REFUSED[name]
    with pytest.raises(DataError, match=way):
        rl.data.read(_FILES / name, Columns(**options))
    data = read(_FILES / name)
    assert len(rl.data.read(data, Columns(need_labels=False)))


def test_every_file_is_tested() -> None:
    names = {path.name for path in _FILES.iterdir()}
    assert names == {*_CASES, *_REFUSED, "spans.jsonl"}
    assert len(_CASES) >= 40


def test_spans_are_no_classes() -> None:
    content = (_FILES / "spans.jsonl").read_text()
    assert json.loads(io.StringIO(content).readline())["label"][0] == [0, 3, "PER"]
    for task in ("classify", "tag", "multilabel", "regress"):
        with pytest.raises(DataError):
            rl.data.read(_FILES / "spans.jsonl", Columns(task=task))
