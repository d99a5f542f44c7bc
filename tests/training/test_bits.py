"""A stored model's predictions have the same bits at any number of threads, in batches of any
size.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from made_datasets import dataset
from raglane.data import Dataset
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.records import offsets_of
from raglane.native.library import has_cell
from raglane.training.checkpoint import SavedModel
from raglane.training.inference import answering, predict
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.settings import INITIAL_STATES, LAYERS, NORMALISED_LAYERS, POOLINGS, Settings

pytestmark = [
    pytest.mark.skipif(
        not has_cell("gru"), reason="the cpu kernels promise the bits, and are not built"
    ),
    pytest.mark.usefixtures("any_threads"),
]

_BLOCKS = ("mamba", "mamba2", "gated_delta_net", "mlstm", "rglru")
# An odd number of units leaves a partial vector, where torch rounds differently.
_SMALL: dict[str, Any] = {"hidden_size": 13, "num_layers": 2}


def _records(is_tokens: bool) -> Dataset:
    random = np.random.default_rng(3)
    lengths = random.integers(0, 9, 12)
    count = int(lengths.sum())
    values = (
        random.integers(0, 20, count).astype(str).astype(object)
        if is_tokens
        else random.normal(size=(count, 3))
    )
    return dataset(
        values if is_tokens else values.astype(np.float32),
        offsets_of(lengths),
        labels=tuple(random.integers(0, 5, 12).astype(str)),
        tags=random.integers(0, 7, count).astype(str).astype(object),
        channels=() if is_tokens else ("a", "b", "c"),
    )


def _predictions(settings: Settings, is_tokens: bool = False) -> list[dict[str, list[Any]]]:
    records = _records(is_tokens)
    preprocessor = Preprocessor.fit(records, task=settings.task, missing=settings.missing)
    model = SequenceModel(ModelConfig.of(settings, preprocessor)).eval()
    for weight in model.parameters():
        # Products of features, as in Mamba, grow from step to step of a forecast.
        torch.nn.init.normal_(weight, std=0.1 if settings.cell in _BLOCKS else 0.5)
    saved, tables = SavedModel(model, preprocessor, {}), []
    has_horizon = settings.task in ("forecast", "language")
    options: dict[str, Any] = {"horizon": 3} if has_horizon else {"probabilities": True}
    for threads, batch_size in ((1, 256), (3, 256), (2, 7), (1, 1)):
        torch.set_num_threads(threads)
        tables.append(predict(saved, records, batch_size=batch_size, **options).columns)
    return tables


def _assert_equal(settings: Settings, is_tokens: bool = False) -> None:
    first, *others = _predictions(settings, is_tokens)
    for other in others:
        assert other == first, settings


@pytest.mark.parametrize("cell", LAYERS)
def test_every_cell(cell: str) -> None:
    # grud reads three columns per channel, and does not forecast.
    needed: dict[str, Any] = _SMALL | ({"missing": "elapsed"} if cell == "grud" else {})
    _assert_equal(Settings(cell=cell, bidirectional=True, **needed))
    _assert_equal(Settings("tag", cell, **needed))
    if cell != "grud":
        _assert_equal(Settings("forecast", cell, **needed))
    if cell in NORMALISED_LAYERS:
        _assert_equal(Settings(cell=cell, layer_norm=True, **_SMALL))


@pytest.mark.parametrize(
    "settings",
    [
        Settings("language", **_SMALL),
        Settings("language", tie_weights=True, **_SMALL),
        Settings("language", "lstm", layer_norm=True, **_SMALL),
        *(Settings(pooling=pooling, **_SMALL) for pooling in POOLINGS),
        *(Settings(initial_state=initial_state, **_SMALL) for initial_state in INITIAL_STATES),
    ],
)
def test_tokens(settings: Settings) -> None:
    _assert_equal(settings, is_tokens=True)


def test_cells_without_a_kernel_are_computed_row_by_row() -> None:
    settings = Settings(cell="cfc", **_SMALL)
    model = SequenceModel(
        ModelConfig.of(settings, Preprocessor.fit(_records(False), task=settings.task))
    )
    gates = torch.randn(50, 65)
    with answering(model):
        assert torch.equal(
            torch.sigmoid(gates), torch.cat([torch.sigmoid(row) for row in gates.split(1)])
        )
