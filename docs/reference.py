"""A page per class and function of the API: those that the pages of docs/api list.

The file of a page has the whole entries, so that it reads alike on a code host. On the site a table
of names and first sentences is in their place, and each name leads to a page of its own.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from pydoc import locate

API = Path(__file__).parent / "api"
NAMES = API / "names"
# Pages of short entries, which are read as one.
WHOLE = ("errors", "results", "testing")
_BLOCK = re.compile(r"```\{eval-rst\}\n(?P<body>.*?)```\n", re.DOTALL)
_ENTRY = re.compile(
    r"^\.\. auto(?:class|function):: (?P<name>[\w.]+)\n(?:   .*\n)*\n*", re.MULTILINE
)
_ROLE = re.compile(r":\w+:`~?(?:raglane\.(?:\w+\.)*)?([\w.]+)`")
_SENTENCE_END = re.compile(r"(?<=[.:])\s+(?=[A-Z`*])|\n\n")


def _first_sentence(name: str) -> str:
    """Return the first sentence of a docstring, in one line and without links."""
    text = inspect.getdoc(locate(name)) or ""
    sentence = " ".join(_SENTENCE_END.split(text, maxsplit=1)[0].split())
    return _ROLE.sub(r"``\1``", sentence)


def _title(name: str) -> str:
    """Return a name as it is written after ``import raglane as rl``, which the search finds too."""
    return f"rl.{name.removeprefix('raglane.')}"


def _row(name: str) -> str:
    return f"   * - :py:obj:`{_title(name)} <{name}>`\n     - {_first_sentence(name)}\n"


def _table(block: re.Match[str]) -> str:
    """Return a block of entries with a table in their place."""
    names = [entry["name"] for entry in _ENTRY.finditer(block["body"])]
    if not names:
        return block[0]
    rest = _ENTRY.sub("", block["body"])
    rows = "".join(map(_row, names))
    return f"```{{eval-rst}}\n{rest}\n.. list-table::\n   :widths: 30 70\n\n{rows}```\n"


def listing(page: str, text: str) -> str:
    """Return the text of a page of docs/api for the site: its entries as tables with links."""
    if Path(page).parent.name != API.name or Path(page).name in WHOLE:
        return text
    names = [entry["name"] for entry in _ENTRY.finditer(text)]
    contents = "\n".join(f"names/{name}" for name in names)
    return f"{_BLOCK.sub(_table, text)}\n```{{toctree}}\n:hidden:\n\n{contents}\n```\n"


def write_pages() -> None:
    """Write a page per entry, and remove those of entries that are gone."""
    text_of = {
        NAMES / f"{entry['name']}.md": f"# {_title(entry['name'])}\n\n"
        f"```{{eval-rst}}\n{entry[0].rstrip()}\n```\n"
        for page in sorted(API.glob("*.md"))
        if page.stem not in WHOLE
        for entry in _ENTRY.finditer(page.read_text(encoding="utf-8"))
    }
    NAMES.mkdir(exist_ok=True)
    for path in set(NAMES.glob("*.md")) - set(text_of):
        path.unlink()
    for path, text in text_of.items():
        # Sphinx reads a page again if it is written.
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
