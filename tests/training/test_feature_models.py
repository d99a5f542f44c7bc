"""Models of data with features in addition to the main column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

import raglane as rl
from made_datasets import changed, dataset
from raglane.data import Columns, Dataset, Feature, Preprocessor, convert, read
from raglane.data.records import offsets_of
from raglane.errors import DataError
from raglane.nn.embeddings import Mixed
from raglane.ragged import Ragged
from raglane.training.batches import RareTokens
from raglane.training.model import ModelConfig, SequenceModel
from raglane.training.settings import Settings

_QUICK: dict[str, Any] = {"hidden_size": 8, "threads": 1, "validation_fraction": 0}


def _records(count: int = 40, *, tokens: bool = False) -> Dataset:
    """Sequences of noise, whose label depends only on the town."""
    random = np.random.default_rng(0)
    lengths = random.integers(1, 4, count)
    total = int(lengths.sum())
    values = random.normal(size=(total, 1)).astype(np.float32)
    if tokens:
        values = np.array(["u", "v"], dtype=object)[random.integers(0, 2, total)]
    towns = np.array(["Rome", "Bonn", "Oslo"], dtype=object)[random.integers(0, 3, count)]
    days = np.array(["mon", "tue"], dtype=object)[random.integers(0, 2, total)]
    ages = random.normal(size=count).astype(np.float32)
    return dataset(
        values,
        offsets_of(lengths),
        labels=tuple("south" if town == "Rome" else "north" for town in towns),
        channels=() if tokens else ("x0",),
        features=(
            Feature("town", towns, per_sequence=True),
            Feature("day", days),
            Feature("age", ages, per_sequence=True),
        ),
    )


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True, "pooling": "attention"}]
)
def test_weights_are_counted_before_any_is_made(tokens: bool, options: dict[str, Any]) -> None:
    preprocessor = Preprocessor.fit(_records(tokens=tokens), task="classify")
    config = ModelConfig.of(Settings(hidden_size=5, embedding=3, **options), preprocessor)
    weights = list(SequenceModel(config).parameters())
    assert config.count() == (sum(weight.numel() for weight in weights), len(weights))
    assert ModelConfig.from_config(config.to_config()) == config
    config.check_fits(preprocessor)
    assert config.embeddings[:2] == [(4, 3), (3, 2)]
    with pytest.raises(ValueError, match="categories"):
        replace(config, categories=[*config.categories[:-1], 9]).check_fits(preprocessor)


def test_a_mixed_embedding_by_hand() -> None:
    mixed = Mixed(1, [(3, 2), (2, 1)])
    tables: Any = mixed.tables
    found = mixed(torch.tensor([[0.5, 2.0, 1.0], [0.25, 0.0, 0.0]]))
    rows = [torch.tensor([0.5]), tables[0].weight[2], tables[1].weight[1]]
    assert torch.equal(found[0], torch.cat(rows))
    assert torch.equal(found[1, 1:3], tables[0].weight[0])


@pytest.mark.parametrize("tokens", [False, True])
def test_a_label_that_depends_on_a_feature_is_learned(tmp_path: Path, tokens: bool) -> None:
    data = _records(tokens=tokens)
    run = rl.fit(data, epochs=12, lr=0.05, output=tmp_path / "run", **_QUICK)
    assert run.evaluate(data)["accuracy"] == 1
    again = rl.load(tmp_path / "run")
    answers = again.predict(data)
    assert answers["prediction"] == list(data.labels or ())
    # A sequence has the same bits in any batch.
    alone = [again.predict(data.subset([row]))["probability"][0] for row in range(5)]
    assert alone == answers["probability"][:5]
    with pytest.raises(DataError, match=r"'town'.*no such feature"):
        again.predict(changed(data, features=()))


def _towns() -> Dataset:
    """Sequences with a town each, one of which is the unknown token, and a day per element."""
    towns = np.array(["Rome", "Rome", "Oslo", "<unk>"], dtype=object)
    days = np.array(["mo", "tu", "mo", "we", "tu", "mo"], dtype=object)
    features = (Feature("town", towns, per_sequence=True), Feature("day", days, per_sequence=False))
    values = np.ones((6, 1), np.float32)
    return dataset(
        values,
        offsets_of([1, 1, 3, 1]),
        labels=("a", "b", "a", "b"),
        channels=("x0",),
        features=features,
    )


def test_categories_that_occur_once_are_read_as_unknown() -> None:
    settings, data = Settings(unk_dropout=1.0), _towns()
    preprocessor = Preprocessor.fit(data, task="classify")
    dataset = preprocessor.apply(data)
    rare: Any = RareTokens.of(dataset, preprocessor, settings)
    # Oslo is on three elements of its one sequence. The unknown town is not a category.
    assert [words.tolist() for words in rare.rare] == [
        [False, False, True],
        [False, False, False, True],
    ]
    hidden = rare._replaced_columns(dataset.tensors().values)
    assert hidden[:, 1].tolist() == [1, 1, 0, 0, 0, 0]
    assert hidden[:, 2].tolist() == [1, 2, 1, 0, 2, 1]
    assert torch.equal(hidden[:, 0], dataset.tensors().values[:, 0])
    assert RareTokens.of(dataset, preprocessor, Settings(unk_dropout=0.0)) is None


def test_the_same_categories_are_rare_in_a_converted_folder(tmp_path: Path) -> None:
    rows = [
        {"x": [[1.0]] * length, "town": town, "kind": kind}
        for length, town, kind in (
            (1, "Rome", "a"),
            (2, "Rome", "b"),
            (4, "Oslo", "a"),
            (1, "Bonn", "b"),
        )
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    columns = Columns(label="kind", static=("town",), categorical=("town",))
    convert(tmp_path / "a.parquet", tmp_path / "folder", columns)
    found = []
    for data in (read(tmp_path / "a.parquet", columns), Dataset(tmp_path / "folder", columns)):
        preprocessor = Preprocessor.fit(data, task="classify")
        rare: Any = RareTokens.of(preprocessor.apply(data), preprocessor, Settings())
        vocabulary = preprocessor.features[0].vocabulary or ()
        found.append(
            {word: bool(hidden) for word, hidden in zip(vocabulary, rare.rare[0], strict=True)}
        )
    assert found[0] == found[1] == {"<unk>": False, "Rome": False, "Oslo": True, "Bonn": True}


def test_the_end_of_a_text_is_never_hidden() -> None:
    data = dataset(np.array(list("abac"), dtype=object), offsets_of([2, 2]))
    preprocessor = Preprocessor.fit(data, task="language")
    rare: Any = RareTokens.of(
        preprocessor.apply(data), preprocessor, Settings(task="language", unk_dropout=1.0)
    )
    assert preprocessor.vocabulary == ("<unk>", "<end>", "a", "b", "c")
    assert rare.rare[0].tolist() == [False, False, False, True, True]


def test_a_forecast_keeps_the_features_of_a_sequence() -> None:
    """Several steps equal one step at a time, with each forecast appended to the data."""
    data = changed(_records(), labels=None)
    data = changed(
        data, features=tuple(feature for feature in data.features if feature.per_sequence)
    )
    run = rl.fit(data, task="forecast", epochs=2, missing="zero", **_QUICK)
    ahead = np.array(run.predict(data, horizon=3)["prediction"])
    known, found = data, []
    for _ in range(3):
        step = np.array(run.predict(known)["prediction"])[:, 0]
        found.append(step)
        parts = [
            np.concatenate([known.values[start:end], step[row : row + 1].astype(np.float32)])
            for row, (start, end) in enumerate(
                zip(known.offsets[:-1], known.offsets[1:], strict=True)
            )
        ]
        known = changed(
            known, values=np.concatenate(parts), offsets=offsets_of([len(part) for part in parts])
        )
    np.testing.assert_allclose(ahead, np.stack(found, axis=1), rtol=1e-4, atol=1e-5)
    assert run.evaluate(data, horizon=1)["mae"] > 0


def test_features_of_elements_are_not_known_ahead() -> None:
    data = changed(_records(), labels=None)
    run = rl.fit(data, task="forecast", epochs=1, **_QUICK)
    assert len(run.predict(data)) == 40
    with pytest.raises(DataError, match=r"horizon must be .*got 2, with the features 'day'"):
        run.predict(data, horizon=2)


def test_a_dropped_category_is_dropped_everywhere() -> None:
    torch.manual_seed(0)
    preprocessor = Preprocessor.fit(_records(), task="classify")
    model = SequenceModel(ModelConfig.of(Settings(embedding_dropout=0.9), preprocessor)).train()
    columns = preprocessor.apply(_records()).tensors().values
    embedded = model.encoder.embed(
        Ragged.from_flat(columns, lengths=torch.tensor([len(columns)]))
    ).values
    dropped = (embedded[:, 2:5] == 0).all(1)
    assert dropped.any()
    for town in columns[dropped, 2].unique():
        assert dropped[columns[:, 2] == town].all()
