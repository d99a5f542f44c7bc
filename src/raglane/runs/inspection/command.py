"""The command that trains as the recommendation says: a line for a shell."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from raglane.runs.inspection.contents import Contents
from raglane.planner import Row
from raglane.training.options import flag_of, options
from raglane.training.settings import Settings



def words_of(chosen: Any, always: str = "") -> list[str]:
    """The flags and values that choose what an object of options has, but for what is the default."""
    words: list[str] = []
    known = options(chosen)
    for field in dataclasses.fields(chosen):
        value = getattr(chosen, field.name)
        is_default = value == field.default and field.name != always
        if field.name not in known or value is None or is_default:
            continue
        flag = flag_of(type(chosen), field.name)
        if value is True:
            words.append(flag)
        else:
            for entry in value if isinstance(value, list | tuple) else [value]:
                words += [flag, str(entry)]
    return words


def recommended(settings: Settings, best: Row, contents: Contents) -> Settings:
    """The settings of a training that follows a recommendation."""
    chosen = replace(settings, batch_size=best.batch_size or settings.batch_size, threads=best.threads)
    chosen = replace(chosen, bucket=best.grouped)
    return replace(chosen, missing="zero") if contents.missing and chosen.missing == "error" else chosen


def train_line(path: Path | None, kind: str, format: str | None, columns: Any, settings: Settings) -> str:
    """``raglane train`` for a shell."""
    data = [] if path is None else ["DATA"] if kind == "lengths" else [_not_an_option(str(path))]
    named = [] if format is None else ["--format", format]
    return shell_line(["raglane", "train", *data, *words_of(settings, "batch_size"), *words_of(columns), *named])


def shell_line(words: Iterable[str]) -> str:
    """Words as a shell takes them."""
    return " ".join(map(shlex.quote, words))


def _not_an_option(path: str) -> str:
    return f"./{path}" if path.startswith("-") else path
