"""The help pages list the options of the dataclasses with their defaults."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import re
from typing import Any

import pytest

from raglane.cli import main
from raglane.cli.app import app
from raglane.data import FORMATS
from raglane.data.records import ROLES
from raglane.runs.sources import ColumnNames
from raglane.training.options import flag_of, options
from raglane.training.settings import Settings


@functools.cache
def _page(command: str) -> str:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("COLUMNS", "300")
        assert main([command, "--help"]) == 0
    return re.sub(r"[│\s]+", " ", printed.getvalue())


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Settings)])
def test_every_setting_is_an_option(name: str) -> None:
    option, default, page = options(Settings)[name], getattr(Settings(), name), _page("train")
    flag = option.flag or f"--{name.replace('_', '-')}"
    shown = f"({option.unset})" if default is None else default
    ending = "" if default is False else f" [default: {shown}]"
    assert re.search(f" {flag} \\S+ {re.escape(option.help + ending)} ", page), page
    panel = page.index(f"─ {option.panel} ─")
    assert panel < page.index(f" {flag} <" if f" {flag} <" in page else f" {flag} ", panel)


@pytest.mark.parametrize("command", ["train", "evaluate", "predict"])
def test_every_role_of_a_column_is_an_option(command: str) -> None:
    assert tuple(options(ColumnNames)) == (*ROLES, "split", "tokens", "time_gaps", "on_bad_row")
    page = _page(command)
    assert f" --format {'|'.join(FORMATS)} " in page
    for name, option in options(ColumnNames).items():
        assert f" {flag_of(ColumnNames, name)} " in page
        assert option.help + (f" [default: ({option.unset})]" if option.unset else "") in page


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.callback.__name__)
def test_the_help_is_wrapped_by_the_terminal_and_leaves_nothing_out(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "600")
    assert main([command.callback.__name__, "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for paragraph in (inspect.getdoc(command.callback.__wrapped__) or "").split("\n\n"):
        assert " ".join(paragraph.split()) in lines
