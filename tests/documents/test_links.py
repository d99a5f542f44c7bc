"""The links within the repository's Markdown lead somewhere: to a file that is there, and to a
heading of it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from markdown_files import anchors, blocks, broken_links, links

ROOT = Path(__file__).parents[2]
_FOLDERS = ("", "docs", "examples", "benchmarks")
DOCUMENTS = sorted(
    {
        path
        for folder in _FOLDERS
        for path in (ROOT / folder).glob("**/*.md" if folder else "*.md")
        if path.is_file()
    }
)


def test_documents_are_found() -> None:
    assert {str(path.relative_to(ROOT)) for path in DOCUMENTS} >= {
        "README.md",
        "CHANGELOG.md",
        "docs/methods.md",
        "examples/README.md",
        "benchmarks/results/layers.md",
    }


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links_lead_somewhere(path: Path) -> None:
    assert broken_links(path, ROOT) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text(
        "# Its `title`, twice\n\n# Its title, twice\n\n```\n# no heading\n```\n"
    )
    text = """[a](b.md) [b](b.md#its-title-twice) [c](b.md#its-title-twice-1) [d](https://nowhere.invalid) `[e](no.md)`
![f](picture.png) [g](b.md#no-heading) [h](#missing) [i](../outside.md)

[named]: gone.md

```
[j](no.md)
```
"""
    (tmp_path / "a.md").write_text(text)
    (tmp_path.parent / "outside.md").write_text("")
    broken = ["picture.png", "b.md#no-heading", "#missing", "../outside.md", "gone.md"]
    assert broken_links(tmp_path / "a.md", tmp_path) == broken


def test_anchors_are_those_of_a_code_host() -> None:
    text = (
        "# On a GPU: `rl.cost`\n## What's *new*, [here](a.md)\n## A_b - c\n### On a GPU: rl.cost\n"
    )
    assert anchors(text) == {"on-a-gpu-rlcost", "whats-new-here", "a_b---c", "on-a-gpu-rlcost-1"}
    assert links("[a\nb](c.md)") == ["c.md"]


def test_blocks_are_found_in_lists_too() -> None:
    text = "```text a.csv\nid\n```\n\n- item\n\n  ```python\n  if x:\n      y\n  ```\n````md\n```\n````\n"
    found = [(block.language, block.file, block.text) for block in blocks(text)]
    assert found == [
        ("text", "a.csv", "id\n"),
        ("python", None, "if x:\n    y\n"),
        ("md", None, "```\n"),
    ]
