"""Text from a language model: drawn, or the likeliest."""

from __future__ import annotations

import torch
from torch import Tensor

from raglane._utils.checks import check_kind, check_real
from raglane._utils.messages import message
from raglane.data.encoders import END
from raglane.data.epochs import check_least
from raglane.data.splitting import join_tokens, split_texts
from raglane.errors import ArgumentError
from raglane.ragged import Ragged
from raglane.training.checkpoint import SavedModel
from raglane.training.inference import answering
from raglane.training.model import END_TOKEN, UNKNOWN_TOKEN


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
        fix = "train one with the task 'language'"
        raise ArgumentError(message("run", f"a run of the task {saved.task}", "a run of a language model", fix))
    check_kind("prompt", prompt, str, "a text", "pass a str")
    for name, number, least in (("count", count, 1), ("length", length, 1), ("seed", seed, 0)):
        check_least(name, number, least)
    rule = "at least 0, and finite"
    check_real("temperature", temperature, rule, lambda number: 0 <= number < float("inf"), "pass e.g. 0.8")
    device = device or torch.device("cpu")
    words, split = saved.preprocessor.vocabulary or (), saved.preprocessor.split
    table = {token: place for place, token in enumerate(words) if token != END}
    begun = split_texts([prompt], split or "words")[0].tolist()
    start = torch.tensor([END_TOKEN, *(table.get(token, UNKNOWN_TOKEN) for token in begun)], device=device)
    # On the CPU, so that a seed means the same text everywhere.
    generator = torch.Generator().manual_seed(seed)

    def pick(logits: Tensor) -> Tensor:
        if temperature == 0:
            return logits.argmax(-1)
        shares = (logits.cpu().double() / temperature).softmax(-1)
        return torch.multinomial(shares, 1, generator=generator).squeeze(1).to(logits.device)

    model = saved.model.to(device)
    with answering(model):
        drawn = model.generate(Ragged([start] * count), length, pick).tolist()
    texts = []
    for row in drawn:
        end = row.index(END_TOKEN) if END_TOKEN in row else len(row)
        texts.append(join_tokens([*begun, *(words[place] for place in row[:end])], split))
    return texts
