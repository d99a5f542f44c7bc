"""Writes docs/start.ipynb, the page Start as a notebook with its outputs: python docs/notebook.py.

A test compares its cells with the page, and runs them.
"""

from __future__ import annotations

import ast
import doctest
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGE, NOTEBOOK = DOCS / "start.md", DOCS / "start.ipynb"
_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```\n", flags=re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A cell: Markdown, Python or commands of a shell, and the output that the page shows."""

    kind: str
    source: str
    expected: str = ""


def cells(text: str) -> Iterator[Cell]:
    """Yield the cells of a page, without its link to the notebook. An example that prints something
    ends a cell.
    """
    text = re.sub(rf"^.*\({NOTEBOOK.name}\).*\n\n", "", text, flags=re.MULTILINE)
    place = 0
    for block in _BLOCK.finditer(text):
        if words := text[place : block.start()].strip():
            yield Cell("markdown", words)
        place = block.end()
        if block["language"] == "python":
            source = ""
            for example in doctest.DocTestParser().get_examples(block["text"]):
                source += example.source
                if example.want:
                    yield Cell("python", source, example.want)
                    source = ""
            if source:
                yield Cell("python", source)
        elif block["language"] == "console":
            for step in re.split(r"^\$ ", block["text"], flags=re.MULTILINE)[1:]:
                command, _, expected = step.partition("\n")
                yield Cell("shell", f"!{command}\n", expected)
        else:  # the installation
            # The notebook runs in its own folder, one below the root.
            text = block["text"].replace("pip install '.[", "pip install '..[")
            yield Cell("shell", re.sub(r"^pip", "%pip", text, flags=re.MULTILINE))
    if words := text[place:].strip():
        yield Cell("markdown", words)


def run(cell: Cell, names: dict[str, Any]) -> str:
    """Run the Python of a cell, and return the text of its last line's value, if it has one."""
    body = ast.parse(cell.source).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    value = (
        eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
        if isinstance(last, ast.Expr)
        else None
    )
    return "" if value is None else f"{value!r}\n"


def build(text: str) -> dict[str, Any]:
    """Run the cells of a page, and return the notebook. Commands run in a temporary folder;
    installations do not.
    """
    names: dict[str, Any] = {}
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for count, cell in enumerate(cells(text)):
            entry: dict[str, Any] = {"cell_type": "markdown", "id": f"cell-{count}", "metadata": {}}
            if cell.kind != "markdown":
                output = run(cell, names) if cell.kind == "python" else ""
                if cell.source.startswith("!"):
                    command, path = (
                        ["sh", "-c", cell.source.removeprefix("!")],
                        Path(sys.executable).parent,
                    )
                    env = {**os.environ, "PATH": f"{path}{os.pathsep}{os.environ['PATH']}"}
                    output = subprocess.run(
                        command,
                        cwd=folder,
                        env=env,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        check=True,
                    ).stdout
                shown = {
                    "output_type": "stream",
                    "name": "stdout",
                    "text": output.splitlines(keepends=True),
                }
                entry |= {
                    "cell_type": "code",
                    "execution_count": None,
                    "outputs": [shown] if output else [],
                }
            made.append(entry | {"source": cell.source.rstrip("\n").splitlines(keepends=True)})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def colab(urls: Mapping[str, str]) -> str:
    """Return the address that opens the notebook in Colab, or "" if the project's URLs have no
    GitHub repository.
    """
    found = re.fullmatch(r"https://github\.com/([\w.-]+/[\w.-]+?)/?", urls.get("Repository", ""))
    return (
        f"https://colab.research.google.com/github/{found[1]}/blob/main/docs/{NOTEBOOK.name}"
        if found
        else ""
    )


if __name__ == "__main__":
    notebook = build(PAGE.read_text(encoding="utf-8"))
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
