"""Small functions of training, each by an example."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from made_datasets import dataset, of_tensors
from raglane.data.order import BatchLimit, BatchSampler
from raglane.data.preprocess import Preprocessor
from raglane.data.records import offsets_of
from raglane.errors import ArgumentError, DivergedError
from raglane.ragged import Ragged
from raglane.runs.progress import epoch_line
from raglane.runs.sources import ColumnNames, Source, chosen_columns, renamed
from raglane.training.batches import (
    Batch,
    ChunkedBatches,
    Remaining,
    batches_in_order,
    chunked_order,
    make_batch,
    training_order,
)
from raglane.training.checkpoint import describe
from raglane.training.job import fingerprint, identity
from raglane.training.machine import check_machine, threads_of
from raglane.training.model import Mixed, ModelConfig, SequenceModel, activity
from raglane.training.options import RUN, Rule, check, flag_of, option, options
from raglane.training.own_cell import is_own, label_of
from raglane.training.ranks import SINGLE, Ranks, lost, ranks_of
from raglane.training.settings import ModelSettings, Settings, left_to_plan
from raglane.training.state import Totals, TrainingState, check_losses, curves_csv, rate_of, warning
from raglane.training.stored import build, checked, finite, parse_json, rule_of, to_json
from raglane.training.tasks import Score, make_task, settle
from raglane.training.tasks.labels import (
    Classify,
    MultiLabel,
    accuracy,
    best_thresholds,
    confusion_matrix,
    f1_scores,
    macro_f1,
)
from raglane.training.tasks.language import Language
from raglane.training.tasks.numbers import Forecast, Regress, loss_of_errors


def _batch(inputs: torch.Tensor, target: torch.Tensor) -> Batch:
    return Batch(Ragged([inputs]), target, torch.tensor([0]))


def test_a_class_is_scored_by_accuracy() -> None:
    task = Classify(Preprocessor("classify", labels=("a", "b")), ModelSettings("classify"))
    batch = _batch(torch.ones(2, 1), torch.tensor([1]))
    assert float(task.score(torch.tensor([[0.0, 2.0]]), batch).metric) == 1.0
    assert make_task(Preprocessor("classify", labels=("no", "yes")), ModelSettings("classify")).metric == "accuracy"


def test_a_token_is_scored_in_bits() -> None:
    task = Language(Preprocessor("language", vocabulary=("<unk>", "<end>")), ModelSettings("language"))
    batch = _batch(torch.tensor([1]), torch.tensor([1]))
    assert float(task.score(Ragged([torch.zeros(1, 2)]), batch).metric) == 1.0


def test_sets_of_labels_are_scored_by_exact_matches() -> None:
    task = MultiLabel(Preprocessor("multilabel", ("x",), labels=("a", "b")), ModelSettings("multilabel"))
    score = task.score(torch.tensor([[2.0, -2.0]]), _batch(torch.ones(2, 1), torch.tensor([[1.0, 0.0]])))
    assert float(score.mean_loss) == pytest.approx(0.127, abs=5e-4)
    assert float(score.metric / score.count) == 1.0
    shares, targets = torch.tensor([[0.1], [0.3], [0.2]]), torch.tensor([[0.0], [1.0], [0.0]])
    assert best_thresholds(shares, targets).tolist() == [0.25]


def test_numbers_are_scored_in_the_units_of_the_data() -> None:
    fitted = Preprocessor("regress", ("x",), target_names=("height",), target_mean=(0.0,), target_std=(10.0,))
    batch = _batch(torch.ones(2, 1), torch.tensor([[4.0]]))
    score = Regress(fitted, ModelSettings("regress")).score(torch.tensor([[3.0]]), batch)
    assert (float(score.loss), float(score.metric), float(score.baseline)) == (1.0, 10.0, 40.0)


def test_a_forecast_is_scored_in_the_units_of_the_data() -> None:
    fitted = Preprocessor("forecast", ("x",), mean=(0.0,), std=(10.0,))
    task = Forecast(fitted, ModelSettings("forecast"))
    batch = _batch(torch.tensor([[1.0]]), torch.tensor([[4.0]]))
    score = task.score(Ragged([torch.tensor([[3.0]])]), batch)
    assert (float(score.loss), float(score.metric), float(score.baseline)) == (1.0, 10.0, 30.0)


def test_the_loss_of_each_error() -> None:
    errors = torch.tensor([-2.0, 0.5])
    losses = [loss_of_errors(errors, name, 0.75).tolist() for name in ("mse", "mae", "huber", "quantile")]
    assert losses == [[4.0, 0.25], [2.0, 0.5], [1.5, 0.125], [1.5, 0.125]]


def test_a_forecast_of_zeros_and_ones_has_the_loss_bce() -> None:
    roll = dataset(np.array([[0.0], [1.0]], np.float32), offsets_of([2]), channels=("x0",))
    assert settle(Settings("forecast"), roll)[0].loss == "bce"


def test_metrics_of_classes() -> None:
    matrix = torch.tensor([[1, 1], [0, 2]])
    assert confusion_matrix(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2).tolist() == [[1, 1], [0, 1]]
    assert accuracy(matrix) == 0.75
    assert f1_scores(matrix).tolist() == [2 / 3, 0.8]
    # A class that never occurs has no score.
    assert macro_f1(torch.tensor([[1, 1, 0], [0, 2, 0], [0, 0, 0]])) == pytest.approx(0.7333, abs=5e-5)


def test_activity_penalties_are_sums_over_elements() -> None:
    outputs = Ragged([torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0]])])
    assert float(activity(outputs, outputs, 1.0, 0.0)) == 14.0
    assert float(activity(outputs, outputs, 0.0, 1.0)) == 4.0


def test_categories_are_embedded_beside_numbers() -> None:
    assert Mixed(2, [(5, 3)])(torch.tensor([[0.5, 0.1, 4.0]])).shape == (1, 5)


def test_a_model_in_a_line() -> None:
    model = SequenceModel(ModelConfig("classify", "gru", input_size=12, output_size=9))
    assert describe(model) == "GRU, 64 units, 1 layer, 15,561 weights"


def test_a_batch_goes_to_a_device_with_its_targets() -> None:
    batch = _batch(torch.ones(3, 2), torch.tensor([1])).to(torch.device("cpu"))
    assert batch.targets is not None
    assert batch.targets.tolist() == [1]
    values, offsets = torch.arange(12.0).view(6, 2), torch.tensor([0, 2, 6])
    made = make_batch(of_tensors(values, offsets, torch.tensor([1, 0])).__getitems__([1]))
    assert made.targets is not None
    assert made.targets.tolist() == [0]


def test_batches_of_chunks() -> None:
    data = of_tensors(torch.arange(5), torch.tensor([0, 5]), forecast=True)
    chunks = chunked_order(data, Settings("forecast", batch_size=1, bptt_steps=3))
    assert [batch.inputs.values.tolist() for batch in ChunkedBatches(chunks)] == [[0, 1, 2], [3]]


def test_batches_of_an_epoch_and_what_is_left_of_it() -> None:
    order = training_order(torch.tensor([3, 1, 2]), Settings(batch_size=2))
    assert [len(batch) for batch in order] == [2, 1]
    assert sorted(row for batch in order for row in batch) == [0, 1, 2]
    assert batches_in_order(torch.tensor([3, 0, 1, 4, 2]), BatchLimit(sequences=2)) == [[0, 1], [2, 3], [4]]
    begun = BatchSampler([3, 1, 2], BatchLimit(sequences=1))
    begun.load_state_dict(begun.state_dict(done=2))
    rest = Remaining(begun)
    assert (len(rest), len(list(rest)), len(rest)) == (1, 1, 1)


def test_the_learning_rate_rises_and_falls() -> None:
    settings = Settings(lr=0.4, lr_schedule="cosine", epochs=4, warmup=2)
    rates = [round(rate_of(settings, TrainingState(epoch=epoch), 1), 3) for epoch in range(4)]
    assert rates == [0.2, 0.4, 0.4, 0.2]


def test_a_loss_out_of_proportion_ends_a_run() -> None:
    check_losses({"train_loss": 700.0}, TrainingState(start_loss=2.3), Settings())
    with pytest.raises(
        DivergedError, match=r"^lr must be .*got 1, and a training loss of 7000 in epoch 1, which began at 2.3"
    ):
        check_losses({"train_loss": 7000.0}, TrainingState(start_loss=2.3), Settings(lr=1.0))
    rows = [{"train_loss": 2.1}, {"train_loss": 45.0}]
    state = TrainingState(epoch=2, best_epoch=1, best_loss=2.1, history=rows, start_loss=2.3)
    assert warning(state) == "the training loss ends at 45 and began at 2.1: a smaller lr, or grad_clip=1, may help"


def test_sums_over_an_epoch() -> None:
    totals = Totals()
    totals.add(Score(torch.tensor(3.0), torch.tensor(1), torch.tensor(2), torch.tensor(0.0)), elements=7)
    assert (totals.mean_loss, totals.mean_metric, totals.elements) == (1.5, 0.5, 7)


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


def test_data_has_a_fingerprint_and_an_identity() -> None:
    words = dataset(np.array(["a", "b"], dtype=object), offsets_of([2]))
    assert fingerprint(words) == fingerprint(words)
    assert fingerprint(words) != fingerprint(words, words)
    both = dataset(np.array(["a", "b", "b"], dtype=object), offsets_of([2, 1]), labels=("x", "y"))
    assert identity(both) == identity(both.subset([1]), both.subset([0]))
    assert identity(both) != identity(both.subset([0, 0]))


def test_a_cell_is_one_of_a_file_by_its_form() -> None:
    assert [is_own(name) for name in ("cells/leaky.py:Leaky", "gru", "leaky.py")] == [True, False, False]
    assert [label_of(name) for name in ("cells/leaky.py:Leaky", "gru")] == ["Leaky", "gru"]


@dataclass
class _Point:
    x: float


def test_stored_values_are_checked_by_the_types_of_fields() -> None:
    assert build(_Point, {"x": 2}, "point") == _Point(2)
    with pytest.raises(ValueError, match=r"^point.x = None, which is not a number$"):
        build(_Point, {"x": None}, "point")
    assert checked(float | None, 3, "lr") == 3
    assert rule_of(ValueError("lr = 'x', which is not a number")) == "a number"


def test_json_that_a_person_can_read() -> None:
    assert to_json({"a": [1, 2]}) == b'{\n  "a": [\n    1,\n    2\n  ]\n}\n'
    assert finite({"loss": math.nan, "rows": [1.5, math.inf]}) == {"loss": None, "rows": [1.5, None]}
    assert parse_json(b'{"a": 1}', Path("config.json")) == {"a": 1}


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
