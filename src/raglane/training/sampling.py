"""Text from a language model: drawn, or the likeliest."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from raglane.checks import check_kind, check_real
from raglane.data.epochs import check_least
from raglane.data.splitting import join_tokens, split_texts
from raglane.data.vocabulary import END
from raglane.errors import ArgumentError, message
from raglane.ragged import Ragged
from raglane.training.checkpoint import SavedModel
from raglane.training.model import SequenceModel, answering

__all__ = ["go_on", "sample"]

# The places of the two special tokens of the vocabulary.
_UNKNOWN, _END = 0, 1


def go_on(model: SequenceModel, inputs: Ragged, most: int, pick: Callable[[Tensor], Tensor]) -> Tensor:
    """The tokens that follow some texts, each fed back to tell the next."""
    encoder = model.encoder
    recurrent, embedding = encoder.recurrent, encoder.embedding
    if embedding is None:
        raise ArgumentError(message("model", "a model of numbers", "a language model", "pass one"))
    out, state = recurrent(encoder.embed(inputs))
    output = out.last()
    tokens = torch.full((len(inputs), most), _END, dtype=torch.int64, device=inputs.device)
    ended = torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    for step in range(most):
        logits = model.answers(encoder.dropout(output))
        logits[:, _UNKNOWN] = -torch.inf
        tokens[:, step] = torch.where(ended, _END, pick(logits))
        ended = ended | (tokens[:, step] == _END)
        if step + 1 == most or bool(ended.all()):
            break
        output, state = recurrent.step(embedding(tokens[:, step]), state)
    return tokens


def sample(
    saved: SavedModel,
    *,
    prompt: str = "",
    count: int = 1,
    length: int = 200,
    temperature: float = 1.0,
    seed: int = 0,
    device: torch.device | None = None,
) -> list[str]:
    """Draw texts from a language model.

    Args:
        saved: of :func:`~raglane.training.checkpoint.load_model`.
        prompt: how each text begins; it is part of what is returned. Tokens that training has not seen are read as
            unknown.
        count: how many texts.
        length: the most tokens that are drawn for each; a text ends before them where the model ends it.
        temperature: what logits are divided by: below 1 the likely becomes likelier; 0 takes the likeliest.
        seed: of the draw: the same seed, the same texts.
        device: where to run; None for the CPU.

    Returns:
        ``count`` texts.

    Raises:
        ArgumentTypeError: an argument of the wrong kind.
        ArgumentError: the model is none of the task ``language``, or an argument is out of its range.
    """
    if saved.task != "language":
        fix = "train one with the task language"
        raise ArgumentError(message("run", f"a model of the task {saved.task}", "text comes of a language model", fix))
    check_kind("prompt", prompt, str, "a text", "pass a str")
    for name, number, least in (("count", count, 1), ("length", length, 1), ("seed", seed, 0)):
        check_least(name, number, least)
    rule = "at least 0, and finite"
    check_real("temperature", temperature, rule, lambda number: 0 <= number < float("inf"), "pass 0.8, say")
    device = device or torch.device("cpu")
    words, split = saved.preprocessor.vocabulary or (), saved.preprocessor.split
    table = {token: place for place, token in enumerate(words) if token != END}
    begun = split_texts([prompt], split or "words")[0].tolist()
    start = torch.tensor([_END, *(table.get(token, _UNKNOWN) for token in begun)], device=device)
    # On the CPU, so that a seed means the same text everywhere.
    generator = torch.Generator().manual_seed(seed)

    def pick(logits: Tensor) -> Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        shares = (logits.cpu().double() / temperature).softmax(-1)
        return torch.multinomial(shares, 1, generator=generator).squeeze(1).to(logits.device)

    model = saved.model.to(device)
    with answering(model):
        drawn = go_on(model, Ragged([start] * count), length, pick).tolist()
    texts = []
    for row in drawn:
        end = row.index(_END) if _END in row else len(row)
        texts.append(join_tokens([*begun, *(words[place] for place in row[:end])], split))
    return texts
