"""Language models: tokens, metrics, chunks, penalties, and generated texts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from made_datasets import dataset
from raglane.data import Dataset
from raglane.data.columns import Columns
from raglane.data.prepare.encoders import END, UNKNOWN
from raglane.data.prepare.preprocess import Preprocessor
from raglane.data.records import offsets_of
from raglane.data.splitting import split_texts
from raglane.errors import ArgumentError, DataError
from raglane.ragged import Ragged
from raglane.training.batches import ChunkedBatches, chunked_order
from raglane.training.checkpoint import load_model
from raglane.training.inference import evaluate, predict, sample
from raglane.training.model import ModelConfig, SequenceModel, activity
from raglane.training.run import train
from raglane.training.settings import Settings

_QUICK = Settings("language", epochs=6, hidden_size=16, embedding=8, lr=0.03, threads=1)


def _texts(texts: list[str], split: str = "characters") -> Dataset:
    tokens, lengths = split_texts(texts, split)
    return dataset(tokens, offsets_of(lengths), columns=Columns("language", split=split))


def test_a_tokenizer_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"to": 0, "be": 1, "?": 2}, unk_token="?")
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    tokens, lengths = split_texts(["to be", "or"], str(tmp_path / "tokenizer.json"))
    assert (tokens.tolist(), lengths.tolist()) == (["to", "be", "?"], [2, 1])
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(ArgumentError, match="a readable tokenizer file"):
        split_texts(["to"], str(tmp_path / "bad.json"))


def test_a_text_is_between_end_tokens() -> None:
    records = _texts(["ab", "", "b"])
    fitted = Preprocessor.fit(records, task="language")
    assert fitted.vocabulary == (UNKNOWN, END, "b", "a")
    data = fitted.apply(records)
    assert [data[row]["inputs"].tolist() for row in range(3)] == [[1, 3, 2], [1], [1, 2]]
    assert [data[row]["target"].tolist() for row in range(3)] == [[3, 2, 1], [1], [2, 1]]
    # The end token in the data is an unknown token.
    new = dataset(np.array(["a", END], dtype=object), offsets_of([2]))
    assert fitted.apply(new, require_targets=False)[0]["inputs"].tolist() == [1, 3, 0]


def test_an_evaluation_by_hand(tmp_path: Path) -> None:
    records = _texts(["abab", "aab", "", "bz"], "characters")
    train(_QUICK, _texts(["abab", "aab", "ba"]), None, tmp_path)
    saved = load_model(tmp_path)
    numbers = evaluate(saved, records).numbers
    bits = predict(saved, records).columns["bits"]
    nats, count = 0.0, 0
    data = saved.preprocessor.apply(records)
    for place, item in enumerate(data[row] for row in range(len(data))):
        predicted = saved.model(Ragged([item["inputs"]])).values.log_softmax(-1).detach()
        mine = -float(predicted[torch.arange(len(predicted)), item["target"]].sum())
        assert bits[place] == pytest.approx(mine / math.log(2), rel=1e-5)
        nats, count = nats + mine, count + len(predicted)
    assert count == 9 + 4
    assert numbers["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    # Nine characters, and the ends of four lines.
    assert numbers["bits_per_character"] == pytest.approx(nats / math.log(2) / 13, rel=1e-5)
    assert numbers["unknown"] == pytest.approx(1 / 13)
    shares = [4 / 13, 4 / 13, 4 / 13, 1 / 13]
    assert numbers["unigram_perplexity"] == pytest.approx(
        math.exp(-sum(share * math.log(share) for share in shares))
    )


def test_chunks_have_the_outputs_of_whole_sequences() -> None:
    records = _texts(["abcabcabc", "ab", "", "cabca"])
    fitted = Preprocessor.fit(records, task="language")
    data = fitted.apply(records)
    model = SequenceModel(ModelConfig.of(replace(_QUICK, cell="lstm"), fitted)).eval()
    whole = model(Ragged([data[row]["inputs"] for row in range(len(data))]))
    assert isinstance(whole, Ragged)
    chunks = chunked_order(data, replace(_QUICK, batch_size=2, bptt_steps=3))
    for epoch in (0, 1):
        parts: dict[int, list[torch.Tensor]] = {row: [] for row in range(4)}
        state = None
        chunks.set_epoch(epoch)
        for batch in ChunkedBatches(chunks):
            assert batch.begins is not None
            out, state = model.run_chunk(batch.inputs, state, batch.begins)
            for row, piece in zip(batch.index.tolist(), out, strict=True):
                if row >= 0:
                    parts[row].append(piece)
        for row in range(4):
            assert torch.equal(torch.cat(parts[row]), whole[row])


def test_tied_weights_and_dropped_tokens(tmp_path: Path) -> None:
    records = _texts(["abcd", "dcba", "abab"])
    settings = replace(
        _QUICK, tie_weights=True, embedding_dropout=0.4, weight_dropout=0.2, cell="lstm"
    )
    train(settings, records, None, tmp_path)
    saved = load_model(tmp_path)
    config = saved.model.config
    parameters = list(saved.model.parameters())
    assert config.count() == (sum(weight.numel() for weight in parameters), len(parameters))
    inputs = Ragged([torch.tensor([1, 2, 3, 4, 5])])
    embedding = saved.model.encoder.embedding
    assert embedding is not None
    saved.model.train()
    torch.manual_seed(0)
    dropped = saved.model.encoder.embed(inputs).values
    is_zero = (dropped == 0).all(1)
    assert 0 < int(is_zero.sum()) < 5
    assert torch.allclose(dropped[~is_zero], embedding.weight[1:][~is_zero] / 0.6)
    saved.model.eval()
    assert torch.equal(saved.model.encoder.embed(inputs).values, embedding.weight[1:])


def test_searched_continuations_are_the_likeliest(tmp_path: Path) -> None:
    train(replace(_QUICK, epochs=2), _texts(["abba", "caba", "bc"]), None, tmp_path)
    model = load_model(tmp_path).model.eval()
    texts = Ragged([torch.tensor([1, 3, 2]), torch.tensor([1])])
    with torch.no_grad():
        found = model.search(texts, 2, beam_size=30, n_best=5)
        for item, text in enumerate(texts):
            scores = {}
            for first, second in itertools.product(range(1, 5), repeat=2):
                logits = model(Ragged([torch.cat([text, torch.tensor([first])])])).values[-2:]
                logits[:, 0] = -torch.inf
                log_probs = logits.log_softmax(1)
                output = () if first == 1 else (first,) if second == 1 else (first, second)
                scores[output] = float(
                    log_probs[0, first] + (log_probs[1, second] if output else 0)
                )
            best = sorted(scores, key=lambda output: -scores[output])[:5]
            places = range(5 * item, 5 * item + 5)
            assert [tuple(found.tokens[place].tolist()) for place in places] == best
            assert found.scores[list(places)].tolist() == pytest.approx(
                [scores[output] for output in best], rel=1e-5
            )


def test_drawn_texts(tmp_path: Path) -> None:
    train(
        replace(_QUICK, epochs=60, bptt_steps=4, batch_size=2),
        _texts(["abcdef"] * 4),
        None,
        tmp_path,
    )
    saved = load_model(tmp_path)
    assert sample(saved, temperature=0) == sample(saved, temperature=1e-320) == ["abcdef"]
    assert sample(saved, prompt="abc", temperature=0, count=2, max_length=2) == ["abcde"] * 2
    assert predict(saved, _texts(["abc"]), horizon=5).columns["prediction"] == [["d", "e", "f"]]
    assert sample(saved, beam_size=1) == ["abcdef"]
    unknown = predict(saved, _texts(["abzz"]), horizon=9).columns["prediction"][0]
    assert sample(saved, prompt="abzz", temperature=0, max_length=9) == ["abzz" + "".join(unknown)]
    found = sample(saved, prompt="abc", beam_size=4, count=2, max_length=2)
    assert (len(found), found[0]) == (2, "abcde")
    with pytest.raises(ArgumentError, match="temperature must be 1"):
        sample(saved, beam_size=2, temperature=0.5)
    one, same, other = (
        sample(saved, temperature=5.0, count=3, max_length=20, seed=seed) for seed in (0, 0, 1)
    )
    assert one == same != other
    assert len(set(one)) > 1
    assert UNKNOWN not in "".join(one + other)
    for name, value in (
        ("count", 0),
        ("max_length", 0),
        ("temperature", -1.0),
        ("seed", -1),
        ("beam_size", 0),
        ("beam_size", 1001),
    ):
        with pytest.raises(ArgumentError, match=name):
            sample(saved, **{name: value})  # type: ignore[arg-type]
    numbers = dataset(np.zeros((2, 1), np.float32), offsets_of([2]), channels=("x",))
    with pytest.raises(DataError, match=r"sequences of numbers.*got .language."):
        train(_QUICK, numbers, None, tmp_path / "no")


def test_penalties_of_large_outputs_and_changes(tmp_path: Path) -> None:
    """Each penalty reduces its term, for whole texts and for chunks."""
    words = np.array(list("abcabdabeabc" * 4), dtype=object)
    data = dataset(
        words, offsets_of([24, 24]), columns=Columns(task="language", split="characters")
    )
    for steps in (None, 6):
        sizes = {}
        for name, large, change in (
            ("none", 0.0, 0.0),
            ("large", 30.0, 0.0),
            ("change", 0.0, 30.0),
        ):
            settings = Settings(
                "language",
                epochs=8,
                hidden_size=8,
                lr=0.02,
                bptt_steps=steps,
                batch_size=2,
                threads=1,
            )
            settings = replace(settings, activation_penalty=large, temporal_penalty=change)
            train(settings, data, None, tmp_path, overwrite=True)
            model = load_model(tmp_path / "last").model
            inputs = load_model(tmp_path).preprocessor.apply(data).batch()["inputs"]
            assert isinstance(inputs, Ragged)
            out, _ = model.encoder.recurrent(model.encoder.embed(inputs))
            changes = torch.cat([sequence.diff(dim=0) for sequence in out])
            sizes[name] = (
                float(out.values.square().mean().detach()),
                float(changes.square().mean().detach()),
            )
            assert model.penalty is None
        assert sizes["large"][0] < 0.5 * sizes["none"][0]
        assert sizes["change"][1] < 0.5 * sizes["none"][1]


def test_activity_penalties_are_sums_over_elements() -> None:
    outputs = Ragged([torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0]])])
    assert float(activity(outputs, outputs, 1.0, 0.0)) == 14.0
    assert float(activity(outputs, outputs, 0.0, 1.0)) == 4.0
