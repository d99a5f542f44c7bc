"""Options from a TOML file, and the options of the help pages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import raglane as rl
from commands import FAST, Capsys, fails, prints, tree, write_steps
from raglane._utils.options import flag_of, options
from raglane.cli import main
from raglane.cli.app import application
from raglane.cli.once import whole_names
from raglane.data import FORMATS
from raglane.data.columns import ROLES, Columns
from raglane.runs.configuration import key_of, run_config
from raglane.runs.sources import SequenceSource
from raglane.training.settings import LAYERS, Settings
from scripts import Script


def _shown(capsys: Capsys, *arguments: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values and origins that --show-config prints."""
    printed = prints(["train", *arguments, "--show-config"], capsys)
    lines = [line for line in printed.splitlines() if "  # " in line]
    origins = {
        line.removeprefix("# ").replace(":", " ").split()[0]: line.rpartition("  # ")[2]
        for line in lines
    }
    return tomllib.loads(printed), origins


def test_an_option_goes_before_the_file_and_the_file_before_the_default(
    tmp_path: Path, capsys: Capsys
) -> None:
    file = tmp_path / "my.toml"
    file.write_text(
        'data = "a.csv"\ncell = "lstm"\nhidden-size = 12\nbidirectional = true\nlr = 1\nfeature_column = ["a"]\n'
    )
    config = ["--config", str(file)]
    values, origins = _shown(capsys, *config, "--hidden-size", "8")
    expected = {
        "data": "a.csv",
        "cell": "lstm",
        "hidden-size": 8,
        "num-layers": 1,
        "bidirectional": True,
        "lr": 1,
    }
    assert {name: values[name] for name in expected} == expected
    assert values["feature-column"] == ["a"]
    names = {
        "file": "data cell feature-column",
        "option": "hidden-size",
        "default": "num-layers bptt-steps task",
    }
    assert all(origins[name] == origin for origin, known in names.items() for name in known.split())
    for arguments in (
        [*config, "--ignore", "bidirectional"],
        ["--ignore", "bidirectional", *config],
    ):
        values, origins = _shown(capsys, *arguments)
        assert (values["bidirectional"], origins["bidirectional"], values["hidden-size"]) == (
            False,
            "default",
            12,
        )
    file.write_text('batch-size = "auto"')
    assert _shown(capsys, *config)[0]["batch-size"] == "auto"
    # What is printed says the same again.
    again = tmp_path / "again.toml"
    again.write_text(prints(["train", *config, "--seed", "3", "--show-config"], capsys))
    assert _shown(capsys, "--config", str(again))[0] == _shown(capsys, *config, "--seed", "3")[0]


def test_a_search_is_described_before_it_runs(tmp_path: Path, capsys: Capsys) -> None:
    file, again = tmp_path / "my.toml", tmp_path / "again.toml"
    data = str(write_steps(tmp_path / "steps.csv"))
    file.write_text(
        'hidden-size = 4\n[search]\ncell = ["gru", "rnn"]\nlr = {low = 0.001, high = 0.1, log = true}\n'
    )
    command = [
        "tune",
        data,
        "--config",
        str(file),
        "--num-layers",
        "1",
        "--label-column",
        "a",
        "--show-config",
    ]
    printed = prints(command, capsys)
    found = tomllib.loads(printed)
    # The task is that of the labels, numbers here, so that no pooling is searched; what is searched
    # is not fixed.
    assert (found["task"], found["hidden-size"], found["num-layers"]) == ("regress", 4, 1)
    assert found["search"]["lr"] == {"low": 0.001, "high": 0.1, "log": True}
    assert set(found["search"]) == {"cell", "lr", "bidirectional", "dropout", "batch-size"}
    assert not set(found["search"]) & set(found)
    for line in ('cell = ["gru", "rnn"]', "batch-size = [16", "task = "):
        comment = {
            "cell": "file",
            "batc": "default",
            "task": "guessed from the labels of the data",
        }[line[:4]]
        assert any(
            one.startswith(line) and one.endswith(f"# {comment}") for one in printed.splitlines()
        ), line
    again.write_text(printed)
    assert tomllib.loads(prints(["tune", "--config", str(again), "--show-config"], capsys)) == found
    assert not (tmp_path / "runs").exists()


def test_every_option_can_stand_in_a_file(tmp_path: Path, capsys: Capsys) -> None:
    kinds: tuple[Any, ...] = (Settings, Columns, SequenceSource)
    values, origins = _shown(capsys)
    known = {key_of(kind, name) for kind in kinds for name in options(kind)}
    assert set(origins) == known | {
        "data",
        "format",
        "validation",
        "test",
        "output",
        "overwrite",
        "quiet",
    }
    file = tmp_path / "all.toml"
    for name, value in values.items():
        file.write_text(f"{name} = {json.dumps(value)}")
        assert _shown(capsys, "--config", str(file))[1][name] == "file", name


def test_a_run_holds_the_file_that_repeats_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_steps(tmp_path / 'odd "ü" \x7f.csv')
    assert (
        main(
            [
                "train",
                'odd "ü" \x7f.csv',
                "--output",
                "one",
                *FAST,
                "--cell",
                "rnn",
                "--label-column",
                "label",
            ]
        )
        == 0
    )
    monkeypatch.chdir("/")
    config = str(tmp_path / "one" / "run.toml")
    assert main(["train", "--config", config, "--output", str(tmp_path / "two"), "-q"]) == 0
    one, two = tree(tmp_path / "one"), tree(tmp_path / "two")
    for name in ("best/weights.safetensors", "best/config.json", "run.json", "run.toml"):
        assert one[name] == two[name], name


def test_of_data_in_memory_the_file_says_that_it_must_be_named(
    tmp_path: Path, capsys: Capsys
) -> None:
    out = tmp_path / "run"
    rl.fit(
        [[0.1, 0.9], [0.8, 0.2]],
        ["a", "b"],
        epochs=1,
        hidden_size=2,
        validation_fraction=0,
        output=out,
    )
    again = ["train", "--config", str(out / "run.toml"), "--output", str(tmp_path / "again")]
    fails(again, capsys, "an empty path; name a file")
    assert not (tmp_path / "again").exists()
    assert main([*again, str(write_steps(tmp_path / "steps.csv")), "-q"]) == 0
    half_a_pair = {
        **json.loads((tmp_path / "again" / "run.json").read_text())["data"],
        "path": "a\udcff.csv",
    }
    assert tomllib.loads(run_config(Settings(), half_a_pair).decode())["data"] == ""


def test_a_mistake_in_a_file_is_one_line_that_names_it(tmp_path: Path, capsys: Capsys) -> None:
    file, out = tmp_path / "my.toml", tmp_path / "run"
    data = str(write_steps(tmp_path / "steps.csv"))
    for text, *pieces in (
        ("hiden-size = 3", "the option 'hiden-size'", "Write hidden-size"),
        ('cel = "gru"', "Write cell"),
        ("xyzzy = 1", "See --help for all options"),
        ("[hidden-size]\na = 1", "hidden-size in", "a whole number"),
        ("hidden-size = '8'", "hidden-size in", "my.toml must be ... got '8'", "a whole number"),
        ("hidden-size = 0", "hidden-size in", "got 0", "at least 1"),
        ("hidden-size = true", "hidden-size in", "a whole number"),
        ("batch-size = 'fast'", "batch-size in", "a whole number"),
        ("bidirectional = 1", "bidirectional in", "true or false"),
        ("feature-column = 'a'", "feature-column in", "a list"),
        ("lr = nan", "lr in", "above 0 and at most 3.4e38"),
        ("cell = 'foo'", "cell in", "one of lstm"),
        ("test = ''", "an empty path"),
        ("hidden-size = ", "my.toml must be ... got Invalid value (at "),
    ):
        file.write_text(text)
        fails(["train", data, "--config", str(file), "--output", str(out)], capsys, *pieces)
    file.write_bytes(b"\xff\xfe")
    fails(["train", "--config", str(file)], capsys, "my.toml must be ... got", "a TOML file")
    file.write_text("#" * 1_000_001)
    fails(["train", "--config", str(file)], capsys, "of 1,000,001 bytes")
    for place in (tmp_path / "no.toml", tmp_path, Path("/dev/zero")):
        fails(["train", "--config", str(place)], capsys, f"--config must be ... got {place}")
    fails(["train", "--ignore", "hiden-size"], capsys, "--ignore must be ", "Write hidden-size")
    fails(["train", "--resume", "--output", str(out), "--show-config"], capsys, "Leave one out")
    assert not out.exists()


def test_shells_complete_commands_options_and_choices(script: Script) -> None:
    ways: dict[str, tuple[str, dict[str, str]]] = {
        "bash": ("raglane train --cell mi", {"COMP_CWORD": "3"}),
        "zsh": ("raglane train --cell mi", {}),
        "fish": ("raglane train --cell mi", {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}),
    }
    for shell, (words, more) in ways.items():
        name = "COMP_WORDS" if shell == "bash" else "_TYPER_COMPLETE_ARGS"
        environment = {name: words, "_RAGLANE_COMPLETE": f"complete_{shell}", **more}
        done = script(
            "import sys; from raglane.cli import main; sys.exit(main([]))", 60, **environment
        )
        assert done.returncode == 0, done.stderr
        words_of_it = re.split(r"[\s\"()]+", done.stdout)
        assert {choice for choice in LAYERS if choice in words_of_it} == {"mingru", "minlstm"}, (
            shell,
            done.stdout,
        )


@functools.cache
def _page(command: str) -> str:
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setenv("COLUMNS", "300")
        assert main([command, "--help-all"]) == 0
    return re.sub(r"[│\s]+", " ", printed.getvalue())


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Settings)])
def test_every_setting_is_an_option(name: str) -> None:
    option, default, page = options(Settings)[name], getattr(Settings(), name), _page("train")
    flag = option.flag or f"--{name.replace('_', '-')}"
    shown = f"({option.unset})" if default is None or option.unset else default
    ending = "" if default is False else f" [default: {shown}]"
    assert re.search(f" {flag} \\S+ {re.escape(option.help + ending)} ", page), page
    panel = page.index(f"─ {option.panel} ─")
    assert panel < page.index(f" {flag} <" if f" {flag} <" in page else f" {flag} ", panel)


@pytest.mark.parametrize("command", ["train", "evaluate", "predict"])
def test_every_role_of_a_column_is_an_option(command: str) -> None:
    kinds: tuple[Any, ...] = (Columns, SequenceSource)
    others = {"split", "label_split", "tokens", "keep_trailing", "on_bad_row"}
    described = {(kind, name): option for kind in kinds for name, option in options(kind).items()}
    assert {name for _, name in described} == {*ROLES, *others}
    page = _page(command)
    assert f" --format {'|'.join(FORMATS)} " in page
    for (kind, name), option in described.items():
        assert f" {flag_of(kind, name)} " in page
        assert option.help + (f" [default: ({option.unset})]" if option.unset else "") in page


@pytest.mark.parametrize(
    "command", application().registered_commands, ids=lambda command: command.callback.__name__
)
def test_the_help_is_wrapped_by_the_terminal_and_leaves_nothing_out(
    command: Any, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    monkeypatch.setenv("COLUMNS", "600")
    lines = [
        line.strip() for line in prints([command.callback.__name__, "--help"], capsys).splitlines()
    ]
    for paragraph in (inspect.getdoc(command.callback.__wrapped__) or "").split("\n\n"):
        assert " ".join(paragraph.split()) in lines


def test_names_of_options_may_be_shortened() -> None:
    flags = [
        "--output",
        "--bidirectional",
        "--no-bidirectional",
        "--batch-size",
        "--batch-elements",
    ]
    words = [
        "--out",
        "a",
        "--outp=b",
        "--no-bi",
        "--batch-s",
        "2",
        "--batch",
        "--x",
        "-o",
        "--",
        "--out",
    ]
    expected = ["--output", "a", "--output=b", "--no-bidirectional", "--batch-size", "2"]
    assert whole_names(words, flags) == [*expected, "--batch", "--x", "-o", "--", "--out"]
