"""A conditional random field as a sum over all paths."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from raglane import Ragged
from raglane.nn.crf import CRF

TAGS = 3


def random_crf(tags: int = TAGS, dtype: torch.dtype = torch.float64) -> CRF:
    crf = CRF(tags, dtype=dtype)
    with torch.no_grad():
        for parameter in crf.parameters():
            parameter.normal_()
    return crf


def random_batch(lengths: list[int], tags: int = TAGS) -> tuple[Ragged, Ragged]:
    emissions = Ragged.from_flat(torch.randn(sum(lengths), tags, dtype=torch.float64), lengths=lengths)
    return emissions, emissions._like(torch.randint(0, tags, (sum(lengths),)))


def all_paths(crf: CRF, emissions: Tensor) -> tuple[list[tuple[int, ...]], Tensor]:
    """Return every path through one sequence, and the score of each."""
    paths = list(itertools.product(range(crf.num_tags), repeat=emissions.shape[0]))
    scores = []
    for path in paths:
        score = emissions.new_zeros(())
        for step, tag in enumerate(path):
            score = score + emissions[step, tag]
            score = score + (crf.start[tag] if step == 0 else crf.transitions[path[step - 1], tag])
        scores.append(score + crf.end[path[-1]] if path else score)
    return paths, torch.stack(scores)


def by_hand(crf: CRF, emissions: Ragged, tags: Ragged) -> dict[str, Tensor]:
    """Compute the results of the methods from the list of all paths."""
    found: dict[str, list[Tensor]] = {
        "log_partition": [],
        "log_likelihood": [],
        "marginals": [],
        "tags": [],
        "score": [],
    }
    for sequence, own in zip(emissions, tags, strict=True):
        paths, scores = all_paths(crf, sequence)
        found["log_partition"].append(scores.logsumexp(0))
        found["log_likelihood"].append(scores.log_softmax(0)[paths.index(tuple(own.tolist()))])
        best = int(scores.argmax())
        found["score"].append(scores[best])
        found["tags"].append(torch.tensor(paths[best], dtype=torch.int64))
        shares = scores.softmax(0)
        through = torch.tensor(paths, dtype=torch.int64).view(len(paths), len(own))
        ways = torch.nn.functional.one_hot(through, crf.num_tags).to(shares.dtype)
        found["marginals"].append(torch.einsum("p,plc->lc", shares, ways))
    empty = {"marginals": torch.zeros(0, crf.num_tags, dtype=torch.float64), "tags": torch.zeros(0, dtype=torch.int64)}
    nothing = torch.zeros(0, dtype=torch.float64)
    return {
        name: torch.cat([empty[name], *parts]) if name in empty else torch.stack(parts) if parts else nothing
        for name, parts in found.items()
    }


def ours(crf: CRF, emissions: Ragged, tags: Ragged) -> dict[str, Tensor]:
    best, score = crf.decode(emissions)
    return {
        "log_partition": crf.log_partition(emissions),
        "log_likelihood": crf.log_likelihood(emissions, tags),
        "marginals": crf.marginals(emissions).values,
        "tags": best.values,
        "score": score,
    }


def close(name: str, own: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(own, expected, rtol=1e-10, atol=1e-10, msg=lambda text: f"{name}: {text}")
