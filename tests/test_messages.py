"""Messages to users are one line of printable characters, of a length that can be read."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from torch._utils import ExceptionWrapper

from raglane import errors
from raglane._utils.messages import message, printable, quote, quote_all, shorten
from raglane.cli import main
from raglane.cli.console import log, log_error
from raglane.errors import DataError, RaglaneError
from raglane.report.figures import confusion_png, confusion_table, curves

# An escape sequence, line breaks of every kind, a zero byte, marks that turn the direction, half a
# pair, markup.
EVIL = "a\x1b[31mb\nc\r\x0b\x85\u2028\0\u202e\u2066\u200b\ud800[red]d[/red]"
SHOWN = "a\\x1b[31mb\\nc\\r\\x0b\\x85\\u2028\\x00\\u202e\\u2066\\u200b\\ud800[red]d[/red]"

_KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, RaglaneError)
]


def test_unprintable_characters_are_escaped() -> None:
    assert printable(EVIL) == SHOWN
    assert printable(SHOWN) == SHOWN
    assert printable("née 日本 ü 😀") == "née 日本 ü 😀"


@pytest.mark.parametrize("kind", _KINDS)
def test_every_error_is_one_printable_line(kind: type[RaglaneError]) -> None:
    """Also one whose message no helper put together."""
    error = kind(f"{EVIL}: wrong")
    assert str(error) == f"{SHOWN}: wrong"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kind()) == ""


def test_the_error_of_a_worker_keeps_the_lines_of_its_trace() -> None:
    """A DataLoader makes it anew, of its class and with the trace in its message."""
    try:
        raise DataError("a\nb", "c", "d", "e")
    except DataError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 0")
    with pytest.raises(DataError, match="Caught DataError in DataLoader worker") as caught:
        wrapped.reraise()
    lines = str(caught.value).split("\n")
    assert len(lines) > 3
    assert lines[-2].endswith("DataError: a\\nb must be d, got c. E.")
    assert all(line.isprintable() for line in lines)


def test_a_long_value_loses_its_middle() -> None:
    assert shorten("x" * 12, 12) == "x" * 12
    assert shorten("begin" + "x" * 1000 + "end", 20) == "beginxxxxxxx...xxend"
    text = message(
        "x" * 5000 + " in line 7", quote("y" * 5000) + " in row 3", EVIL * 500, "z" * 5000
    )
    assert text.isprintable()
    assert len(text) < 2000
    assert " in line 7 must be " in text
    assert ", got 'yyy" in text
    assert "' in row 3. Zzz" in text


class _Silent:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_any_value_can_be_quoted() -> None:
    """A number of thousands of digits, too, which Python refuses to write."""
    for value in (
        EVIL,
        "e" * 10**6,
        b"\x1b" * 1000,
        [EVIL] * 10**4,
        10**6000,
        [10**6000],
        _Silent(),
    ):
        assert quote(value).isprintable()
        assert 0 < len(quote(value)) <= 80


def test_a_list_of_names_ends_with_how_many_there_are_more() -> None:
    assert quote_all([EVIL, 2]) == f"{EVIL!r}, 2"
    assert quote_all(range(20)).endswith("18, 19")
    assert quote_all(range(21)).endswith("18, 19 and 1 more")
    assert len(quote_all(["n" * 1000] * 10**5)) < 2000


def test_lines_that_are_printed_stay_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log(EVIL, "second")
    log_error(EVIL)
    printed = capsys.readouterr()
    assert printed.out == f"{SHOWN}\nsecond\n"
    assert printed.err == f"{SHOWN}\n"


def test_a_stream_that_lacks_a_character_shows_its_escape(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "out.txt").open("w", encoding="ascii") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        log("née")
    assert (tmp_path / "out.txt").read_bytes() == b"n\\xe9e\n"


@pytest.mark.parametrize(
    "arguments",
    [
        [EVIL],
        ["train", f"--{EVIL}"],
        ["train", "--epochs", EVIL],
        ["train", f"{EVIL}.csv"],
        ["train", EVIL],
        ["train", "--task", EVIL],
        ["train", "--format", EVIL, "."],
        ["evaluate", EVIL],
        ["predict", "run", "-o", EVIL],
        ["predict", "run", "-o", f"{EVIL}/p.csv"],
        ["bench", "--cells", EVIL],
        ["bench", "--lengths", f"{EVIL}.txt"],
        ["train", "x" * 100_000],
        ["x" * 100_000],
    ],
    ids=range(14),
)
def test_typed_text_cannot_control_the_terminal(
    arguments: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([argument.replace("\0", "") for argument in arguments]) == 2
    printed, told = capsys.readouterr()
    assert printed == ""
    assert told.endswith("\n")
    assert told[:-1].isprintable()
    assert len(told) < 2500
    assert list(tmp_path.iterdir()) == []


def test_the_trace_is_printable_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "no\x1b[31m.csv", "--debug"]) == 2
    assert "Traceback" in (told := capsys.readouterr().err)
    assert all(line.isprintable() for line in told.split("\n"))


def test_names_in_tables_and_pictures_are_text() -> None:
    labels = [EVIL, "$\\frac{1$ ^", "z" * 500]
    matrix = [[1, 0, 0], [0, 2, 1], [0, 0, 3]]
    table = confusion_table(matrix, labels).text()
    assert all(line.isprintable() for line in table.split("\n"))
    assert len(table.split("\n")) == 4
    assert len(table) < 2000
    assert confusion_png(matrix, labels, f"${EVIL}\\frac{{\nsecond $^")[1:4] == b"PNG"
    assert (
        curves([{"epoch": 1, "train_loss": 0.5, "train_accuracy": 0.5}], "accuracy", "a $^{ b")[1:4]
        == b"PNG"
    )
