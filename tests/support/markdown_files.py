"""The fenced blocks, anchors and links of Markdown files."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(
    r"^[ ]*(?P<mark>```+)(?P<info>[^\n`]*)\n(?P<text>.*?)^[ ]*(?P=mark)[ \t]*$",
    flags=re.DOTALL | re.MULTILINE,
)
_COMMENT = re.compile(r"<!--.*?-->", flags=re.DOTALL)
_CODE = re.compile(r"(`+)(.+?)\1", flags=re.DOTALL)
_HEADING = re.compile(r"^#{1,6}[ \t]+(.+?)[ \t]*#*[ \t]*$", flags=re.MULTILINE)
_LINK = re.compile(r"\]\(\s*<?([^()\s<>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
_NAMED_TARGET = re.compile(r"^\[[^\]]+\]:[ \t]+(\S+)", flags=re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after the fence, and its text."""

    words: tuple[str, ...]
    text: str

    @property
    def language(self) -> str:
        return self.words[0] if self.words else ""

    @property
    def file(self) -> str | None:
        """The name of the block's file, if its second word is one."""
        return (
            self.words[1]
            if len(self.words) == 2 and re.fullmatch(r"[\w/-]+\.\w+", self.words[1])
            else None
        )


def blocks(text: str) -> list[Block]:
    """Return the fenced blocks of a document in order, also those in lists."""
    return [
        Block(tuple(found["info"].split()), textwrap.dedent(found["text"]))
        for found in _FENCE.finditer(text)
    ]


def prose(text: str) -> str:
    """Return a document without fenced blocks and comments."""
    return _COMMENT.sub("", _FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return the anchors of a document's headings, as code hosts make them: the second of a name
    ends in -1.
    """
    found: list[str] = []
    for heading in _HEADING.findall(prose(text)):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", shown.replace("`", "")).replace(" ", "-")
        again = sum(
            name == slug or re.fullmatch(re.escape(slug) + r"-\d+", name) is not None
            for name in found
        )
        found.append(f"{slug}-{again}" if slug in found else slug)
    return set(found)


def links(text: str) -> list[str]:
    """Return the targets of a document's links and pictures."""
    bare = _CODE.sub("", prose(text))
    return [*_LINK.findall(bare), *_NAMED_TARGET.findall(bare)]


def broken_links(path: Path, root: Path) -> list[str]:
    """Return the links to files or headings that do not exist in the repository; others are not
    tried.
    """
    broken = []
    for link in links(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        is_there = target.exists() and target.is_relative_to(root)
        if is_there and anchor and target.suffix == ".md":
            is_there = anchor in anchors(target.read_text(encoding="utf-8"))
        if not is_there:
            broken.append(link)
    return broken
