"""The pictures of the documents are what their code draws, and those who cannot see them are told
what they show.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import load

_DOCS = Path(__file__).parents[2] / "docs"
_NUMBER = r"-?\d+(?:\.\d+)?"


def _parts(svg: str) -> tuple[list[str], list[float]]:
    """The words of a drawing and its numbers, without what names the version of matplotlib."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    return re.split(_NUMBER, svg), [float(number) for number in re.findall(_NUMBER, svg)]


def test_drawing_them_again_gives_the_same(tmp_path: Path) -> None:
    script = load(_DOCS / "draw.py")
    script.draw(tmp_path)
    drawn = {path.name: path for path in tmp_path.iterdir()}
    assert drawn.keys() == {path.name for path in script.FOLDER.iterdir()}
    for name, path in drawn.items():
        words, numbers = _parts(path.read_text(encoding="utf-8"))
        kept_words, kept_numbers = _parts((script.FOLDER / name).read_text(encoding="utf-8"))
        assert words == kept_words, name
        assert numbers == pytest.approx(kept_numbers, abs=0.01), name


def test_pictures_have_no_background_of_their_own() -> None:
    background = re.compile(r'<g id="patch_1">\s*<path d="[^"]*"\s+style="fill: none')
    for path in (_DOCS / "pictures").iterdir():
        assert background.search(path.read_text(encoding="utf-8")), path.name


def test_documents_show_each_picture_and_its_code() -> None:
    script = load(_DOCS / "draw.py")
    text = (_DOCS / "methods.md").read_text(encoding="utf-8")
    picture = re.compile(
        r'<picture>\n.*dark\)" srcset="(.*)">\n  <img alt="(.{80,})" src="(.*)">\n</picture>'
    )
    for name, code in script.CODE.items():
        before, after = text.split(f">>> picture = {code}\n\n```\n\n")
        shown = picture.match(after)
        assert shown is not None, name
        assert (shown[1], shown[3]) == (f"pictures/{name}-dark.svg", f"pictures/{name}.svg")
        assert before


def test_the_table_of_speedups_has_the_means_of_the_results() -> None:
    script = load(_DOCS / "draw.py")
    known = {name: script.speedups(name) for name in ("layers", "layers-amd")}
    ways = [(name, mode) for name in known for mode in script.MODES]
    text = (_DOCS / "performance.md").read_text(encoding="utf-8")
    for kind, words in zip(script.KINDS, ("different", "equal"), strict=True):
        for name, cell in script.CELLS.items():
            means = [f"{script.mean(known[page][mode, kind, cell]):.2f}" for page, mode in ways]
            assert f"| {name}, {words} lengths | {' | '.join(means)} |\n" in text
    slower = [
        sum(
            speedup < 1
            for key, speedups in known[page].items()
            if key[0] == mode
            for speedup in speedups
        )
        for page, mode in ways
    ]
    shown = " | ".join(f"{count or 'none'} of 45" for count in slower)
    assert f"| cases slower than PyTorch | {shown} |\n" in text


def test_every_picture_that_a_document_names_is_there() -> None:
    for path in _DOCS.glob("*.md"):
        for name in re.findall(r'src(?:set)?="([^"]*)"', path.read_text(encoding="utf-8")):
            assert (path.parent / name).is_file(), name
