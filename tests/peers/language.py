"""Packages for language."""

from __future__ import annotations

from typing import Any

import torch
from comparison import Example

_TEXTS = [
    "the cat sat on the mat",
    "a dog",
    "birds fly over the old red house",
    "it rains today in the north",
]


def flair() -> Example:
    """A sequence tagger of flair with a bidirectional LSTM and a CRF."""
    from flair.data import Dictionary, Sentence
    from flair.embeddings import OneHotEmbeddings
    from flair.models import SequenceTagger

    words = Dictionary()
    for word in " ".join(_TEXTS).split():
        words.add_item(word)
    tags = Dictionary(add_unk=False)
    for tag in ("DET", "NOUN", "OTHER"):
        tags.add_item(tag)
    sentences = []
    for text in _TEXTS:
        sentence = Sentence(text)
        for place, token in enumerate(sentence):
            token.add_label("pos", ("DET", "NOUN", "OTHER")[(len(token.text) + place) % 3])
        sentences.append(sentence)
    embeddings = OneHotEmbeddings(vocab_dictionary=words, embedding_length=24)
    model = SequenceTagger(
        embeddings,
        tags,
        "pos",
        hidden_size=32,
        rnn_layers=2,
        dropout=0.0,
        word_dropout=0.0,
        locked_dropout=0.0,
    )

    def loss(module: Any, batch: Any) -> Any:
        for sentence in batch:
            sentence.clear_embeddings()
        total, count = module.forward_loss(batch)
        return total / count, total

    return Example(model, [sentences, sentences[:2]], loss)


def stanza() -> Example:
    """The character language model of stanza, on packed words of different lengths."""
    from stanza.models.common.char_model import CharacterLanguageModel
    from stanza.models.common.vocab import CharVocab

    args = {"char_emb_dim": 12, "char_hidden_dim": 48, "char_num_layers": 1}
    rates = dict.fromkeys(("char_dropout", "char_unit_dropout", "char_rec_dropout"), 0.0)
    model = CharacterLanguageModel(args | rates, {"char": CharVocab([*" ".join(_TEXTS)], "x")})
    batches = []
    for part in range(2):
        lengths = sorted((len(text) - part for text in _TEXTS), reverse=True)
        characters = torch.randint(4, 16, (len(_TEXTS), lengths[0]))
        batches.append((characters, lengths))

    def loss(module: Any, batch: Any) -> Any:
        characters, lengths = batch
        output, hidden, decoded = module(characters, lengths)
        scores = decoded[:, :-1].flatten(0, 1)
        return torch.nn.functional.cross_entropy(scores, characters[:, 1:].flatten()), [
            output,
            *hidden,
        ]

    return Example(model, batches, loss)


def xlstm() -> Example:
    """A stack of sLSTM blocks of xlstm, with its vanilla backend."""
    from xlstm import xLSTMBlockStack, xLSTMBlockStackConfig
    from xlstm.blocks.slstm.block import sLSTMBlockConfig
    from xlstm.blocks.slstm.layer import sLSTMLayerConfig

    layer = sLSTMLayerConfig(backend="vanilla", num_heads=4, recurrent_weight_init="standard")
    model = xLSTMBlockStack(
        xLSTMBlockStackConfig(
            slstm_block=sLSTMBlockConfig(slstm=layer),
            num_blocks=2,
            embedding_dim=64,
            slstm_at="all",
            dropout=0.0,
        )
    )
    batches = [torch.randn(8, 64, 64) for _ in range(2)]

    def loss(module: Any, batch: Any) -> Any:
        output = module(batch)
        return (output - 1).square().mean(), output

    return Example(model, batches, loss)
