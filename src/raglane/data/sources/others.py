"""Files that are not read, with the way that works for each kind, and files without a suffix."""

from __future__ import annotations

from pathlib import Path

from raglane._utils.messages import argument, quote
from raglane.data.sources import conll
from raglane.data.sources.files import data_error, open_error, opened, suffix_of
from raglane.data.sources.layout import LOOK, UTF16, are_numbers, is_table
from raglane.errors import DataError

_PANDAS = "read it with pandas.{}, and write it with to_parquet"
_UNPACK = "unpack it, and pass the file or the folder inside"
_PICKLE = (
    "load it yourself if you trust its author, and pass the object to rl.fit, or write .parquet"
)
_ARRAYS = "write the arrays with numpy.savez(path, x=..., label=...)"

# What a suffix is, and the way that works.
_WAYS: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (".pkl", ".pickle", ".joblib", ".p", ".dill"), ("a pickle, which can run code", _PICKLE)
    ),
    **dict.fromkeys((".pt", ".pth", ".ckpt"), ("a file of torch.save", _PICKLE)),
    **dict.fromkeys((".xls", ".ods"), ("a spreadsheet", "save it as .xlsx or .csv")),
    **dict.fromkeys(
        (".sqlite", ".sqlite3", ".db", ".db3", ".duckdb"),
        ("a database", "query it with pandas.read_sql, and write the table with to_parquet"),
    ),
    **dict.fromkeys((".zip", ".tar", ".tgz", ".7z", ".rar"), ("an archive", _UNPACK)),
    **dict.fromkeys((".bz2", ".xz", ".zst"), ("a compressed file", "unpack it, or write .gz")),
    **dict.fromkeys((".h5", ".hdf5", ".hdf"), ("HDF5", "read it with h5py; " + _ARRAYS)),
    **dict.fromkeys((".nc", ".cdf"), ("NetCDF", "read it with xarray, and write a table")),
    ".mat": ("a file of MATLAB", "read it with scipy.io.loadmat; " + _ARRAYS),
    ".npy": ("one array", _ARRAYS + ", or pass a folder with an array per sequence"),
    **dict.fromkeys(
        (".wav", ".flac", ".ogg", ".aiff", ".aif"),
        ("one recording", "pass the folder, in which each file is a sequence"),
    ),
    **dict.fromkeys(
        (".mp3", ".m4a"),
        ("compressed sound", "write .wav, and pass the folder, in which each file is a sequence"),
    ),
    ".dta": ("a file of Stata", _PANDAS.format("read_stata")),
    ".sav": ("a file of SPSS", _PANDAS.format("read_spss")),
    **dict.fromkeys((".sas7bdat", ".xpt"), ("a file of SAS", _PANDAS.format("read_sas"))),
    ".orc": ("ORC", _PANDAS.format("read_orc")),
    ".avro": ("Avro", "read it with fastavro, and write .jsonl"),
    **dict.fromkeys((".rds", ".rdata"), ("a file of R", "write it with write.csv")),
    **dict.fromkeys((".xml", ".html", ".htm"), ("markup", "write its table as .csv or .jsonl")),
    **dict.fromkeys((".yaml", ".yml"), ("YAML", "write a JSON object per line as .jsonl")),
    **dict.fromkeys((".edf", ".bdf"), ("EDF", "read it with mne; " + _ARRAYS)),
    **dict.fromkeys(
        (".svm", ".svmlight", ".libsvm"), ("rows of features, without an order", _ARRAYS)
    ),
    ".tsf": ("a file of the forecasting archive", "write a table with id, time and value"),
}

# The first bytes of files that are no text.
_MAGIC: dict[bytes, str] = {
    b"PAR1": "parquet",
    b"ARROW1": "arrow",
    b"SQLite format 3": ".sqlite",
    b"PK\x03\x04": ".zip",
    b"\x80\x04": ".pkl",
    b"\x80\x05": ".pkl",
    b"\x89HDF": ".h5",
    b"RIFF": ".wav",
    b"\x93NUMPY": ".npy",
}


def format_of_content(path: Path) -> str | None:
    """Return the name of the format that a file begins as; None for a text without columns.

    Raises:
        DataError: a file that is no text, and not read.
    """
    try:
        with opened(path) as file:
            head = file.read(LOOK)
    except OSError as error:
        raise open_error(path, error) from error
    name = next((name for start, name in _MAGIC.items() if head.startswith(start)), None)
    if name is not None and name.startswith("."):
        raise unread(path, name)
    if name is not None:
        return name
    encoding = "utf-16" if head.startswith(UTF16) else "utf-8-sig"
    text = head.decode(encoding, errors="replace")
    if conll.is_conll(text):
        return "conll"
    if is_table(text):
        return "csv"
    if are_numbers(text):
        fix = f'write {{"x": [...]}} per line as .jsonl; {argument("format", "text")} reads characters'
        raise data_error(path, "lines of different numbers", "a table of equal rows", fix)
    return None


def unread(path: Path, suffix: str) -> DataError:
    """Return the error for a file of a kind that is not read, with the way that works."""
    kind, way = _WAYS[suffix]
    return data_error(path, kind, "a file of a format that is read", way)


def check_suffix(path: Path) -> None:
    """Raise a DataError for a suffix of a kind that is not read, and for standard input."""
    if str(path) == "-":
        fix = "save it first, as in: program > data.csv"
        raise data_error(path, "standard input", "a file or a folder", fix)
    suffix = suffix_of(path)
    if suffix in _WAYS:
        raise unread(path, suffix)


def unknown(path: Path, suffixes: str) -> DataError:
    """Return the error for a file of an unknown suffix, or of none."""
    got = f"the suffix {quote(path.suffix)}" if path.suffix else "no suffix"
    rule = f"a file with the suffix {suffixes}, or a folder of files"
    fix = f"name the format with {argument('format')}, e.g. csv or text, or write .parquet"
    return data_error(path, got, rule, fix)
