"""Text files, with a sequence of characters, words or bytes per line, and folders of them.

A text file has no labels. In a folder each file is a class, named by its stem. Files other than
``*.txt``, hidden files, subfolders, and texts about the data such as ``README.txt``, in capitals,
are left out with a note. A ``*.txt`` that cannot be read, such as a broken link, is an error,
because its class would be missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from raglane._utils.messages import quote
from raglane.data.sources.files import data_error, decode, has_utf8, open_error, read_bytes

# Explicit names, because a class may have a name in capitals.
ABOUT = (
    "README",
    "SOURCE",
    "SOURCES",
    "LICENSE",
    "LICENCE",
    "COPYING",
    "NOTICE",
    "AUTHORS",
    "CHANGES",
    "CITATION",
)


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines of a text, or of the texts in a folder, with the class of each."""

    path: Path
    lines: list[str]
    classes: list[str] | None = None
    # The number of texts in a folder.
    texts: int = 1
    notes: tuple[str, ...] = ()


def stripped_lines(path: Path) -> list[str]:
    """Return the lines of a text that are not blank, without white space at their ends."""
    return list(filter(None, map(str.strip, decode(path, read_bytes(path)).split("\n"))))


def lines_in(path: Path) -> Lines:
    """Return the lines of a text."""
    return Lines(path, stripped_lines(path))


def folder_lines(path: Path) -> Lines:
    """Return the lines of the texts in a folder, each with the name of its text as a class."""
    texts, left_out = texts_in(path)
    lines = [stripped_lines(text) for text in texts]
    if not any(lines):
        rule = "a folder with at least one line"
        raise data_error(path, "texts of blank lines only", rule, "check the files")
    stems = np.array([text.stem for text in texts], dtype=object)
    classes = np.repeat(stems, list(map(len, lines))).tolist()
    notes = (f"left out: {', '.join(left_out)}",) if left_out else ()
    return Lines(path, [line for each in lines for line in each], classes, len(texts), notes)


def texts_in(path: Path) -> tuple[list[Path], list[str]]:
    """Return the text files of a folder, and the names of the other entries."""
    try:
        entries = sorted(path.iterdir())
    except NotADirectoryError as error:
        raise data_error(path, "a file", "a folder, for this format", "pass the folder") from error
    except OSError as error:
        raise open_error(path, error) from error
    texts = [
        entry
        for entry in entries
        if entry.suffix == ".txt"
        and not entry.name.startswith(".")
        and entry.stem not in ABOUT
        and not entry.is_dir()
    ]
    if not texts:
        got = f"{len(entries)} entries, none of them a text" if entries else "an empty folder"
        raise data_error(
            path, got, "a folder with one .txt file per class", "add them, or pass a file"
        )
    odd = next((entry.name for entry in texts if not has_utf8(entry.name)), None)
    if odd is not None:
        raise data_error(
            path, f"a file named {quote(odd)}", "a folder of file names in UTF-8", "rename the file"
        )
    kept = set(texts)
    return texts, [entry.name for entry in entries if entry not in kept]
