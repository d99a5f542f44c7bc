"""Small files of every format, valid or with odd cells and names, and corrupted or not."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq

from raglane.data import FORMATS, Columns
from raglane.data.splitting import SPLITS
from raglane.tasks import TASKS

_NUMBERS = ["0", "1", "-2.5", "1e5", "1e999", "-1e999", "NaN", "nan", "inf", "?", "", " ", "NA", "1_0", "0x1",
            "9" * 5000, "9" * 25, str(2**63), str(-(2**63) - 1), "1.2.3", "--1", "١٢", "1e-400", "1,5", "true",
            "None"]  # fmt: skip
_TEXTS = ["a", "b", "up", "", " ", "a b", "née", "\u202eevil", "\x1b[31mred", "[red]x[/]", "a\tb", "日本", "x" * 3000,
          "\u2028", "a,b", 'say "hi"', "a:b", "'", "@data", "#", "%s", "{0}", "$x^{$", "NaN", "1"]  # fmt: skip
_NAMES = ["id", "t", "time", "x", "y", "label", "x0", "", " ", "naïve", "Unnamed: 0", "a.b", "__index_level_0__", "ID",
          "\x1b[2J", "a,b", '"', "日", "n" * 500, "step", "date", "null"]  # fmt: skip
_TIMES = [
    "1",
    "2",
    "3.5",
    "2024-01-01",
    "2024-02-30",
    "01.02.2024",
    "",
    "nan",
    "inf",
    "soon",
    "12:30",
    str(2**62 + 1),
]
_PIECES = [b"@", b"@dimensions " + b"9" * 5000, b":", b",", b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf",
           b"\xff\xfe", b"\xfe\xff", b'"', b"'", b"[", b"]", b"{", b"}", b"[" * 2000, b"9" * 5000, b"1e999", b"NaN",
           b"Infinity", b"-", b"?", b"\x1b[31m", b"\\u0000", b"\\ud800", b"\xed\xa0\x80", "\u202e".encode(), b"@data",
           b"@classLabel true a", b"null", b" ", b"\t", b"PAR1", b"\x80\x80\x80\x80", b"_",
           "é".encode("latin-1"), b"#"]  # fmt: skip


def _ts(chance: random.Random) -> bytes:
    """Make a ``.ts`` file, sometimes with an odd directive or value."""
    channels = chance.randint(1, 3)
    head = [
        f"@dimensions {channels}",
        "@classLabel true a b",
        f"@univariate {str(channels == 1).lower()}",
    ]
    odd = ["@", "", "@dimensions", "@dimensions -1", "@seriesLength x", "@equalLength", "@targetLabel true",
           "@data 1", "@timestamps perhaps", "@missing", "@problemName \udcff", "# note",
           "@equalLength true"]  # fmt: skip
    head += chance.sample(odd, chance.choice([0, 0, 0, 1, 2]))
    chance.shuffle(head)
    lines = [*head, "@data"]
    for _ in range(chance.choice([0, 1, 3, 5, 5])):
        steps = chance.choice([0, 1, 2, 4])
        values = [[_number(chance) for _ in range(steps)] for _ in range(channels)]
        lines.append(
            ":".join([*(",".join(channel) for channel in values), chance.choice("aaaabbbbBc")])
        )
    return "\n".join(lines).encode(errors="surrogateescape") + b"\n"


def _number(chance: random.Random) -> str:
    return chance.choice(_NUMBERS) if chance.random() < 0.05 else f"{chance.uniform(-9, 9):.3f}"


def _names(chance: random.Random, usual: list[str]) -> list[str]:
    """Draw names of columns: the usual ones, or any, with repetitions."""
    if chance.random() < 0.8:
        return usual
    return [chance.choice(_NAMES) for _ in range(chance.randint(0, 6))]


def _text(chance: random.Random) -> bytes:
    """Make lines of words."""
    return "\n".join(chance.choice(_TEXTS) for _ in range(chance.randint(0, 4))).encode(
        errors="replace"
    )


def _csv(chance: random.Random) -> bytes:
    """Make rows of numbers or words, with an id and maybe a time."""
    names = _names(chance, ["id", "t", "x", "y"] if chance.random() < 0.6 else ["id", "word", "y"])
    pools: dict[str, list[str]] = {
        "id": ["p", "q"],
        "t": _TIMES,
        "x": _NUMBERS,
        "y": ["u"],
        "word": _TEXTS,
    }
    wild = chance.random() < 0.5
    rows = [names]
    for row in range(chance.choice([0, 1, 2, 6, 6, 6])):
        tame = {
            "id": "pq"[row % 2],
            "t": str(row),
            "x": f"{row}.5",
            "y": "uv"[row % 2],
            "word": "abc"[row % 3],
        }
        cells = [
            chance.choice(pools.get(name, _TEXTS + _NUMBERS))
            if wild and chance.random() < 0.3
            else tame.get(name, "1")
            for name in names
        ]
        if chance.random() < 0.05:
            cells = cells[:-1] if chance.random() < 0.5 else [*cells, "9"]
        rows.append(cells)
    quoted = [
        '"' + cell.replace('"', '""') + '"' if set(cell) & set(',"\n') else cell
        for row in rows
        for cell in row
    ]
    feed = iter(quoted)
    return "\n".join(",".join(next(feed) for _ in row) for row in rows).encode() + b"\n"


def _cell(chance: random.Random, depth: int = 0) -> Any:
    """Draw any value of JSON."""
    kind = chance.randint(0, 9 if depth < 4 else 5)
    if kind <= 1:
        return chance.choice(
            [0, 1, -3, 2.5, 1e300, float("nan"), float("inf"), 2**53 + 1, 2**63, -(2**64), 10**30]
        )
    if kind <= 3:
        return chance.choice(_TEXTS)
    if kind <= 5:
        return chance.choice([None, True, False])
    if kind <= 8:
        return [_cell(chance, depth + 1) for _ in range(chance.randint(0, 3))]
    return {chance.choice(_NAMES): _cell(chance, depth + 1) for _ in range(chance.randint(0, 2))}


def _column(chance: random.Random, count: int) -> list[Any]:
    """Draw a column of sequences, labels or ids."""
    lengths = [chance.choice([0, 1, 2, 3]) for _ in range(count)]
    width = chance.choice([0, 1, 2, 3])
    columns: list[list[Any]] = [
        [[chance.uniform(-1, 1) for _ in range(length)] for length in lengths],
        [
            [[chance.uniform(-1, 1) for _ in range(width)] for _ in range(length)]
            for length in lengths
        ],
        [
            [[chance.uniform(-1, 1)] * chance.choice([0, 1, 2]) for _ in range(length)]
            for length in lengths
        ],
        [[chance.choice(_TEXTS) for _ in range(length)] for length in lengths],
        [chance.choice(_TEXTS) for _ in lengths],
        [chance.choice(["u", "v"]) for _ in lengths],
        [chance.randint(-3, 3) for _ in lengths],
        [chance.choice([True, False]) for _ in lengths],
        [None for _ in lengths],
        [chance.randint(0, 2**63) for _ in lengths],
    ]
    return chance.choice(columns)


def _rows(chance: random.Random) -> tuple[list[str], list[list[Any]]]:
    """Draw the names and columns of a table."""
    count = chance.choice([0, 1, 2, 5, 5, 5])
    names = _names(chance, ["x", "y"] if chance.random() < 0.7 else ["id", "x", "y"])
    columns = [_column(chance, count) for _ in names]
    if names[-2:] == ["x", "y"]:
        lengths = [chance.choice([0, 1, 2, 4]) for _ in range(count)]
        columns[-2] = [[[chance.uniform(-1, 1)] * 2 for _ in range(length)] for length in lengths]
        columns[-1] = [chance.choice(["u", "v"]) for _ in lengths]
        if chance.random() < 0.2:  # a row per element
            columns[-2] = [chance.choice([0.5, None, 2.5]) for _ in lengths]
        elif chance.random() < 0.3:
            columns[-1] = [[chance.choice(["u", "v"]) for _ in range(length)] for length in lengths]
    return names, columns


def _jsonl(chance: random.Random) -> bytes:
    """Make a JSON object per line, sometimes with another key."""
    names, columns = _rows(chance)
    lines = []
    for row in zip(*columns, strict=True):
        content = dict(zip(names, row, strict=True))
        if chance.random() < 0.1:
            content[chance.choice(_NAMES)] = _cell(chance)
        whole = _cell(chance) if chance.random() < 0.02 else content
        lines.append(json.dumps(whole, ensure_ascii=chance.random() < 0.5))
    is_array = chance.random() < 0.2
    return f"[{', '.join(lines)}]".encode() if is_array else "\n".join(lines).encode() + b"\n"


_KINDS = [pa.list_(pa.float32()), pa.list_(pa.float16()), pa.list_(pa.decimal128(20, 3)), pa.list_(pa.uint64()),
          pa.list_(pa.float64(), 2), pa.large_list(pa.int8()), pa.list_(pa.list_(pa.float32(), 2)),
          pa.list_(pa.binary()), pa.struct([("a", pa.int8())]),
          pa.list_(pa.list_(pa.list_(pa.int32()))), pa.list_(pa.dictionary(pa.int8(), pa.string())), pa.large_string(),
          pa.dictionary(pa.int32(), pa.string()), pa.binary(), pa.timestamp("ns"), pa.date32(),
          pa.uint64(), pa.float64(), pa.decimal256(60, 2), pa.null(), pa.duration("s"),
          pa.list_(pa.bool_()), pa.list_(pa.timestamp("s")), pa.list_(pa.null())]  # fmt: skip
_VALUES = [
    None,
    [],
    [1],
    [1, 2],
    [[1, 2]],
    "a",
    ["a", "b"],
    b"\xff",
    1,
    2.5,
    {"a": 1},
    [[[1]]],
    [None],
    [True],
]


def _odd_array(chance: random.Random, count: int) -> Any:
    """Draw an Arrow array of any type, maybe with nulls or invalid UTF-8."""
    if chance.random() < 0.2:
        texts = pa.array([chance.choice([b"a", b"\xff", b"b\xc3", b"\0"]) for _ in range(count)])
        return (
            texts.view(pa.string())
            if chance.random() < 0.5
            else pa.array([[t] for t in texts.to_pylist()]).cast(pa.list_(pa.binary()))
        )
    kind = chance.choice(_KINDS)
    fitting: list[Any] = []
    for value in _VALUES:
        with contextlib.suppress(pa.ArrowException, TypeError, ValueError, OverflowError):
            pa.array([value], kind)
            fitting.append(value)
    return pa.array([chance.choice(fitting) for _ in range(count)], kind)


def _table(chance: random.Random) -> Any:
    """Draw an Arrow table."""
    names, columns = _rows(chance)
    count = len(columns[0]) if columns else 0
    arrays = []
    for column in columns:
        try:
            arrays.append(_odd_array(chance, count) if chance.random() < 0.2 else pa.array(column))
        except (pa.ArrowException, OverflowError):
            arrays.append(pa.array([1] * count))
    return pa.Table.from_arrays(arrays, names=names)


def _arrow(chance: random.Random) -> bytes:
    """Make an Arrow file, or a stream."""
    table, sink = _table(chance), pa.BufferOutputStream()
    writer = pa.ipc.new_file if chance.random() < 0.7 else pa.ipc.new_stream
    with contextlib.suppress(pa.ArrowException), writer(sink, table.schema) as file:
        file.write_table(table, max_chunksize=chance.choice([1, 3, 100]))
    return sink.getvalue().to_pybytes()


def _parquet(chance: random.Random) -> bytes:
    """Make a Parquet file."""
    table, sink = _table(chance), io.BytesIO()
    options: dict[str, Any] = {
        "compression": chance.choice(["none", "snappy"]),
        "use_dictionary": chance.random() < 0.5,
    }
    with contextlib.suppress(pa.ArrowException):  # a type that Parquet does not support
        pq.write_table(table, sink, row_group_size=chance.choice([1, 3, 100]), **options)
    return sink.getvalue()


def _npz(chance: random.Random) -> bytes:
    """Make a file of arrays."""
    count, sink = chance.randint(0, 4), io.BytesIO()
    shapes = [(count,), (count, 3), (count, 2, 2), (5,), (5, 2), ()]
    kinds: list[type[Any]] = [float, int, str, bool, object]
    arrays: dict[str, Any] = {
        name: np.zeros(chance.choice(shapes), chance.choice(kinds))
        for name in chance.sample(_NAMES, 3)
    }
    if chance.random() < 0.5:
        arrays["lengths"] = np.array([chance.randint(-1, 3) for _ in range(count)])
    np.savez(sink, **arrays)
    return sink.getvalue()


def _conll(chance: random.Random) -> bytes:
    words = ["Ann", "#", "# go", "1", "1-2", "1.1", "-DOCSTART-", "é", "_", ""]
    tags = ["O", "B-PER", "I-PER", "S-X", "NOUN", "_"]
    mark = chance.choice([" ", "\t", "  "])
    lines = []
    for _ in range(chance.randint(0, 12)):
        row = [
            chance.choice(words),
            *(chance.choice(tags) for _ in range(chance.choice([0, 1, 1, 1, 2]))),
        ]
        lines.append(mark.join(row) if chance.random() < 0.8 else "")
    return "\n".join(lines).encode()


def _arff(chance: random.Random) -> bytes:
    count = chance.randint(0, 4)
    names = [chance.choice(["att", "x y", "é"]) + str(number) for number in range(count)]
    lines = ["@relation r", *(f"@attribute '{name}' numeric" for name in names)]
    if chance.random() < 0.4:
        lines = ["@relation r", "@attribute s relational", *lines[1:], "@end s"]
    lines += ["@attribute class {a,b}", "@data"]
    for _ in range(chance.randint(0, 5)):
        numbers = ",".join(_number(chance) for _ in range(count))
        lines.append(chance.choice([numbers, f"'{numbers}\\n{numbers}'", "{0 1}"]) + ",a")
    return "\n".join(lines).encode()


def _layout(chance: random.Random) -> bytes:
    """A table with lines above or below the header, or without one, between any marks."""
    mark = chance.choice([" ", "  ", "\t", ";", "|", ","])
    above = chance.choice(["", "", "Report\n", "\n\n", "# by hand\n", "sep=;\n", "a;;;\n"])
    names = chance.choice(["id", "# id"]), "t", "x", "y"
    rows = [list(names)] if chance.random() < 0.8 else []
    rows += [["", "s", "m", "K"]] * chance.choice([0, 0, 1, 2])
    for row in range(chance.randint(0, 6)):
        rows.append([str(row // 2), str(row), _number(chance), chance.choice(["a", "b", "-", "1"])])
    text = above + "\n".join(mark.join(row) for row in rows)
    return text.encode(chance.choice(["utf-8", "utf-8", "utf-8", "utf-16"]))


_BUILDERS = {
    "conll": _conll,
    "arff": _arff,
    "dat": _layout,
    "ts": _ts,
    "npz": _npz,
    "csv": _csv,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "arrow": _arrow,
    "text": _text,
}


def _corrupt(chance: random.Random, content: bytes) -> bytes:
    """Flip, cut, insert, remove or repeat some bytes."""
    corrupted = bytearray(content)
    if content.startswith(b"PAR1") and chance.random() < 0.7:
        # In the pages and not in the footer, without which a reader gives up at once.
        for _ in range(chance.choice([1, 3])):
            corrupted[chance.randrange(len(corrupted) // 3 + 1)] ^= 1 << chance.randrange(8)
        return bytes(corrupted)
    for _ in range(chance.choice([1, 1, 2, 5])):
        place = chance.randrange(len(corrupted) + 1)
        end = min(len(corrupted), place + chance.choice([1, 2, 8, 64]))
        match chance.randint(0, 6):
            case 0 if place < len(corrupted):
                corrupted[place] ^= 1 << chance.randrange(8)
            case 1:
                del corrupted[place:]
            case 2:
                corrupted[place:place] = chance.choice(_PIECES)
            case 3:
                del corrupted[place:end]
            case 4:
                corrupted[place:place] = corrupted[place:end] * chance.choice([1, 2, 50])
            case 5:
                lines = bytes(corrupted).split(b"\n")
                chance.shuffle(lines)
                corrupted = bytearray(b"\n".join(lines))
            case _ if place < len(corrupted):
                corrupted[place] = chance.randrange(256)
    return bytes(corrupted)


def build(chance: random.Random, folder: Path) -> tuple[Path, str | None, Columns]:
    """Write a file, or a folder of texts; return its path, format and columns."""
    kind = chance.choice([*_BUILDERS, "folder"])
    if kind == "folder":
        path = folder / "texts"
        path.mkdir()
        names = ("a.txt", "b.txt", "note.md", "c/d.csv", "e/f.csv", "labels.csv", "g.csv")
        for name in chance.sample(names, chance.randint(0, 4)):
            text = b"file,label\na,1\nb,2\n" if name == "labels.csv" else b"anna\nbob\n\n c \n"
            if name.endswith("csv") and name != "labels.csv":
                text = _csv(chance)
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(_corrupt(chance, text) if chance.random() < 0.7 else text)
    else:
        content = _BUILDERS[kind](chance)
        path = folder / f"data.{'txt' if kind == 'text' else kind}"
        if kind in ("csv", "jsonl") and chance.random() < 0.1:
            path, content = path.with_name(f"{path.name}.gz"), gzip.compress(content)
        path.write_bytes(_corrupt(chance, content) if chance.random() < 0.5 else content)
    form = (
        chance.choice([name for name in FORMATS if name != "xlsx"])
        if chance.random() < 0.03
        else None
    )

    def some(usual: str) -> str | None:
        return chance.choice([None, None, usual, usual, usual, chance.choice(_NAMES)])

    columns = Columns(
        header=chance.choice([None] * 9 + ["id,t,x,y"]),
        no_header=chance.random() < 0.05,
        label_from_name=chance.choice([None] * 9 + ["[a-e]"]),
        task=chance.choice(["classify", "classify", *TASKS]),
        need_labels=chance.random() < 0.7,
        sequence=some("x"),
        label=some("y"),
        id=some("id"),
        time=chance.choice([None, None, None, "t", chance.choice(_NAMES)]),
        features=chance.choice([None, None, None, ("x",), (chance.choice(_NAMES),)]),
        split=chance.choice([None, None, *SPLITS]),
        tokens=chance.choice([None, None, True, False]),
        time_gaps=chance.random() < 0.1,
    )
    return (
        path,
        form,
        columns
        if chance.random() < 0.3
        else Columns(task=columns.task, need_labels=columns.need_labels),
    )
