"""Type checkers accept right programs, find mistakes, and have the names of the program."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

import raglane as rl
from face_types import STUB, stub
from raglane._utils.options import options
from raglane.data.columns import Columns
from raglane.kernels.dispatch import AUTO, BACKENDS
from raglane.nn.encoder import LAYERS, CellName, EncoderOptions, PoolingName
from raglane.nn.pooling import POOLINGS
from raglane.nn.recurrent.stack import OPTIONS, BackendName, Schedule
from raglane.runs.options import ColumnOptions, FitOptions
from raglane.runs.sources import SequenceSource
from raglane.schedules import SCHEDULES
from raglane.training.settings import Settings

HERE = Path(__file__).parent


def test_programs_of_users() -> None:
    """A mistake that is not found has an ignore that is not needed, which is an error."""
    files = [str(HERE / name) for name in ("right.py", "mistakes.py")]
    command = [sys.executable, "-m", "mypy", "--no-error-summary", *files]
    ran = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, check=False)
    assert (ran.stdout, ran.returncode) == ("", 0)


@pytest.mark.skipif(not torch.__version__.startswith("2.13."), reason="written with torch 2.13")
def test_the_methods_of_a_ragged_are_those_of_the_table() -> None:
    assert STUB.read_text(encoding="utf-8") == stub()


def test_choices_are_the_names_of_the_tables() -> None:
    assert set(get_args(Schedule)) == {AUTO, *SCHEDULES}
    assert set(get_args(BackendName)) == {AUTO, *BACKENDS}
    assert set(get_args(CellName)) == set(LAYERS)
    assert set(get_args(PoolingName)) == {"final", *POOLINGS}


@pytest.mark.parametrize(
    ("kinds", "typed"),
    [((Columns, SequenceSource), ColumnOptions), ((Columns, SequenceSource, Settings), FitOptions)],
)
def test_options_are_the_settings(kinds: tuple[Any, ...], typed: Any) -> None:
    described = {name: option for kind in kinds for name, option in options(kind).items()}
    hints = get_type_hints(typed)
    assert hints.keys() == described.keys()
    for name, option in described.items():
        literals = {
            choice for part in [hints[name], *get_args(hints[name])] for choice in get_args(part)
        }
        words = {word for word in literals if isinstance(word, str)}
        if option.or_else is None and option.choices:
            assert words == set(option.choices), name
        if option.also:
            assert words == {option.also}, name


def test_help_lists_the_arguments_that_a_layer_has() -> None:
    """Those of all layers are in :class:`Options`."""
    own = {
        "LSTM": {"proj_size", "clip"},
        "GRU": {"reset_after", "clip"},
        "RNN": {"nonlinearity", "clip"},
        "IndRNN": {"nonlinearity", "max_length"},
        "SLSTM": {"num_heads", "input_weights"},
        "CfC": {"backbone_units", "gap_column"},
        "PeepholeLSTM": {"clip"},
        "CoupledLSTM": {"clip"},
    }
    blocks = ("Mamba", "Mamba2", "GatedDeltaNet", "MLSTM", "RGLRU")
    common = set(inspect.signature(rl.nn.GRUD).parameters)
    for name in ("GRUD", "SRU", "QRNN", "MinGRU", "MinLSTM", "LayerNormLSTM", "LayerNormGRU", *own):
        assert set(inspect.signature(getattr(rl.nn, name)).parameters) - common == own.get(
            name, set()
        )
    own |= {name: set(inspect.signature(getattr(rl.nn, name)).parameters) for name in blocks}
    accepted = set().union(*own.values()) | common - {"input_size", "hidden_size", "options"}
    assert accepted <= set(EncoderOptions.__annotations__) | set(OPTIONS) | {
        *inspect.signature(rl.nn.SequenceEncoder).parameters
    }
