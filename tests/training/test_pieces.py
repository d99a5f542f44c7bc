"""Small functions of training, each by an example."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from raglane.errors import ArgumentError
from raglane.ragged import Ragged
from raglane.runs.progress import epoch_line
from raglane.runs.sources import ColumnNames, Source, chosen_columns, renamed
from raglane.training.checkpoint import describe
from raglane.training.machine import check_machine, threads_of
from raglane.training.model import ModelConfig, SequenceModel, activity
from raglane.training.options import RUN, Rule, check, flag_of, option, options
from raglane.training.ranks import SINGLE, Ranks, lost, ranks_of
from raglane.training.settings import Settings, left_to_plan
from raglane.training.state import curves_csv
from raglane.training.stored import build, checked, rule_of


def test_activity_penalties_are_sums_over_elements() -> None:
    outputs = Ragged([torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0]])])
    assert float(activity(outputs, outputs, 1.0, 0.0)) == 14.0
    assert float(activity(outputs, outputs, 0.0, 1.0)) == 4.0


def test_a_model_in_a_line() -> None:
    model = SequenceModel(ModelConfig("classify", "gru", input_size=12, output_size=9))
    assert describe(model) == "GRU, 64 units, 1 layer, 15,561 weights"


def test_a_history_as_a_table() -> None:
    assert curves_csv([{"epoch": 1, "train_loss": 0.5}]) == b"epoch,train_loss\n1,0.5\n"
    row = {"epoch": 2, "train_loss": 0.5, "train_accuracy": 0.75, "elements_per_second": 1200.0}
    assert epoch_line(row, 30) == "epoch  2/30  loss 0.5000  accuracy 0.750  1,200 elements/s"


def test_the_machine_gives_a_device_and_threads() -> None:
    assert check_machine(Settings(device="cpu")) == torch.device("cpu")
    assert [threads_of(Settings(ranks=10**6)), threads_of(Settings(ranks=4, threads=3))] == [1, 3]
    assert threads_of(Settings()) is None
    assert left_to_plan({"batch_size": "auto", "epochs": 3}) == ({"epochs": 3}, "batch_size")


def test_ranks_of_an_environment() -> None:
    ranks = ranks_of({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"})
    assert ranks is not None
    assert (ranks.rank, ranks.count, ranks.local) == (3, 4, 1)
    assert ranks_of({}) is None


def test_one_rank_sums_by_itself_and_is_never_lost() -> None:
    assert (SINGLE.rank, SINGLE.count) == (0, 1)
    assert SINGLE.sums(torch.tensor(2.0), torch.tensor(3)) == [2.0, 3.0]
    assert not SINGLE.is_lost(RuntimeError("Connection closed by peer"))
    assert Ranks(0, 2).is_lost(RuntimeError("gloo/transport/tcp/pair.cc: Connection closed by peer"))
    assert str(lost("rank 1, killed by SIGKILL", None)).startswith("ranks must be ")


@dataclass
class _Point:
    x: float


def test_stored_values_are_checked_by_the_types_of_fields() -> None:
    assert build(_Point, {"x": 2}, "point") == _Point(2)
    with pytest.raises(ValueError, match=r"^point.x = None, which is not a number$"):
        build(_Point, {"x": None}, "point")
    assert checked(float | None, 3, "lr") == 3
    assert rule_of(ValueError("lr = 'x', which is not a number")) == "a number"


@dataclass
class _Walk:
    steps: int = option(3, "How far.", RUN, Rule(lambda steps: steps > 0, "above 0", "pass 3, say"))


def test_options_are_fields_with_rules_and_help() -> None:
    assert (_Walk().steps, options(_Walk)["steps"].help) == (3, "How far.")
    with pytest.raises(ArgumentError, match=r"^steps must be above 0, got 0. Pass 3, say.$"):
        check(_Walk(0))
    assert [flag_of(Settings, name) for name in ("cell", "batch_size")] == ["--cell", "--batch-size"]


def test_columns_of_data() -> None:
    assert chosen_columns({"features": ("a", "b")}) == {"features": ["a", "b"]}
    names = renamed(ColumnNames(label="kind", features=["a", "b"]), {"sequence": "steps"})
    assert (names.sequence, names.label, names.features) == ("steps", "kind", None)
    assert Source(None, None).name == "japanese-vowels"
