"""Time ragged beam search and teacher forcing against padded ones of the same attention decoder in
plain torch.

    python benchmarks/beam_search.py --threads 2 > benchmarks/results/beam-search.md

The padded search keeps the rows of finished items until the last item is done. Its model is torch's
LSTM cell and attention by batched products over the padded memory. An item of L tokens has a memory
of 2 L elements. The decoders are not trained: the end token is impossible before token L, and the
others afterwards, so that outputs have the drawn lengths. Both take turns, a ratio is the median
over rounds, and the scores of both are compared first.

Teacher forcing is a training step, the loss and all gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import Any

import torch
from harness.lengths import LENGTHS
from harness.timing import interleave
from torch import Tensor, nn
from torch.nn import functional as F

import raglane as rl
from raglane.native.machine import cpu_name

ITEMS, HIDDEN, TOKENS = 64, 512, 1000
NEVER = -30.0


def stopped(log_probs: Tensor, late: Tensor) -> Tensor:
    """Forbid the end token, 0, before an item's length, and all others after it."""
    others = log_probs[:, 1:] + NEVER * late.unsqueeze(1)
    return torch.cat([(log_probs[:, 0] + NEVER * ~late).unsqueeze(1), others], 1)


class Ragged:
    """The library's search and loss."""

    def __init__(self, decoder: Any, memory: rl.Ragged, targets: rl.Ragged) -> None:
        self.decoder, self.memory, self.targets = decoder, memory, targets

    def search(self, beam: int, rows: int | None) -> Tensor:
        inner, stops = self.decoder._search_step(self.memory), self.targets.lengths

        def step(tokens: Tensor, state: Any) -> Any:
            log_probs, inside = inner(tokens, state["inside"])
            late = state["position"] >= stops[inside["item"]]
            return stopped(log_probs, late), {"inside": inside, "position": state["position"] + 1}

        count = len(self.memory)
        state = {
            "inside": self.decoder._start(self.memory, None),
            "position": torch.zeros(count).long(),
        }
        starts = torch.zeros(count, dtype=torch.int64)
        options: dict[str, Any] = {
            "beam_size": beam,
            "max_length": self.targets.lengths + 8,
            "rows": rows,
        }
        with torch.no_grad():
            return rl.transduction.beam_search(step, starts, state, end=0, **options).scores

    def loss(self) -> Tensor:
        return self.decoder.loss(self.memory, self.targets)


class Padded:
    """The same model and search on padded tensors."""

    def __init__(self, decoder: Any, memory: rl.Ragged, targets: rl.Ragged) -> None:
        self.decoder, self.lengths = decoder, targets.lengths
        self.cell, self.layer = (
            nn.LSTMCell(HIDDEN, HIDDEN).to(memory.dtype),
            nn.LSTM(HIDDEN, HIDDEN, batch_first=True).to(memory.dtype),
        )
        self.layer.load_state_dict(decoder.recurrent.state_dict())
        weights = decoder.recurrent.state_dict().items()
        self.cell.load_state_dict({name.removesuffix("_l0"): part for name, part in weights})
        self.memory, _ = memory.to_padded(batch_first=True)
        self.missing = ~memory.mask().unsqueeze(1)
        self.targets, _ = targets.to_padded(batch_first=True)
        self.goals = F.pad(self.targets, (0, 1))
        self.goals[torch.arange(self.goals.shape[1]) > self.lengths.unsqueeze(1)] = -100

    def logits(self, outputs: Tensor) -> Tensor:
        """Return logits ``(B, U, V)`` of outputs ``(B, U, H)`` of the layer."""
        decoder = self.decoder
        query = decoder.attention.query(outputs)
        if decoder.attention.key is None:
            scores = query @ self.memory.transpose(1, 2)
        else:
            keys = decoder.attention.key(self.memory)
            scores = (query.unsqueeze(2) + keys.unsqueeze(1)).tanh() @ decoder.attention.vector
        context = scores.masked_fill(self.missing, -torch.inf).softmax(2) @ self.memory
        return decoder.head(torch.tanh(decoder.combine(torch.cat([context, outputs], 2))))  # type: ignore[no-any-return]

    def loss(self) -> Tensor:
        outputs, _ = self.layer(self.decoder.embedding(F.pad(self.targets, (1, 0))))
        return F.cross_entropy(self.logits(outputs).flatten(0, 1), self.goals.flatten())

    def search(self, beam: int) -> Tensor:
        with torch.no_grad():
            return self._search(beam)

    def _search(self, beam: int) -> Tensor:
        count = len(self.lengths)
        scores = self.memory.new_full((count, beam), -torch.inf)
        scores[:, 0] = 0
        tokens, state = torch.zeros(count * beam, dtype=torch.int64), None
        best = self.memory.new_full((count,), -torch.inf)
        shift = torch.arange(count).unsqueeze(1) * beam
        # The paths that a search must keep to return its tokens.
        parents, path = [], []
        for position in range(int(self.lengths.max()) + 8):
            state = self.cell(self.decoder.embedding(tokens), state)
            log_probs = self.logits(state[0].view(count, beam, HIDDEN)).log_softmax(2)
            late = (position >= self.lengths).repeat_interleave(beam)
            log_probs = stopped(log_probs.flatten(0, 1), late).view(count, beam, -1)
            totals, order = (scores.unsqueeze(2) + log_probs).flatten(1).topk(2 * beam)
            token, parent = order % TOKENS, order // TOKENS
            ended = totals[:, :beam].masked_fill(token[:, :beam] != 0, -torch.inf)
            best = torch.maximum(best, ended.amax(1))
            scores, places = totals.masked_fill(token == 0, -torch.inf).topk(beam)
            tokens, rows = (
                token.gather(1, places).flatten(),
                (parent.gather(1, places) + shift).flatten(),
            )
            state = tuple(part[rows] for part in state)
            parents.append(rows)
            path.append(tokens)
            if bool((best >= scores[:, 0]).all()):
                break
        return best


def parts(attention: str, count: int, dtype: torch.dtype = torch.float32) -> tuple[Ragged, Padded]:
    torch.manual_seed(0)
    decoder = rl.transduction.AttentionDecoder(TOKENS, HIDDEN, HIDDEN, attention=attention).to(
        dtype
    )
    lengths = torch.tensor(LENGTHS["lognormal"].draw(count))
    memory = rl.Ragged.from_flat(
        torch.randn(2 * int(lengths.sum()), HIDDEN, dtype=dtype), lengths=2 * lengths
    )
    targets = rl.Ragged.from_flat(torch.randint(1, TOKENS, (int(lengths.sum()),)), lengths=lengths)
    return Ragged(decoder, memory, targets), Padded(decoder, memory, targets)


def check(attention: str) -> None:
    """Compare scores and losses. In float32, rounding decides between extensions that are almost
    equal.
    """
    ragged, padded = parts(attention, 8, torch.float64)
    for beam in (4, 16):
        expected = padded.search(beam)
        for rows in (None, 2 * beam):
            torch.testing.assert_close(ragged.search(beam, rows), expected, rtol=1e-9, atol=0)
    torch.testing.assert_close(ragged.loss(), padded.loss(), rtol=1e-9, atol=0)


def step(model: Ragged | Padded, wanted: list[nn.Parameter]) -> Any:
    return torch.autograd.grad(model.loss(), wanted)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="time of the processor, for one thread and a busy machine",
    )
    parser.add_argument(
        "--only", default="", help="measure only rows of the table that contain this text"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    clock = time.process_time if chosen.cpu_time else time.perf_counter
    print("# Beam search and attention decoders\n")
    command = f"--threads {chosen.threads}{' --cpu-time' if chosen.cpu_time else ''}"
    print(f"`python benchmarks/beam_search.py {command}`: {cpu_name()}, torch {torch.__version__}.")
    print(f"Items of lognormal lengths, LSTM of {HIDDEN}, {TOKENS} tokens, float32.\n")
    print("| what | attention | items | rows | padded, ms | ragged, ms | padded / ragged |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for attention, count, beams in (("dot", 64, (4, 16)), ("additive", 16, (4,))):
        if chosen.only in attention:
            check(attention)
        ragged, padded = parts(attention, count)
        calls: dict[str, tuple[Any, Any]] = {}
        for beam in beams:
            for rows in (None, count // 4 * beam):
                name = f"beam {beam} | {attention} | {count} | {rows or 'all'}"
                calls[name] = partial(padded.search, beam), partial(ragged.search, beam, rows)
        shared = [
            part for name, part in ragged.decoder.named_parameters() if "recurrent" not in name
        ]
        theirs = partial(step, padded, [*padded.layer.parameters(), *shared])
        ours = partial(step, ragged, list(ragged.decoder.parameters()))
        calls[f"training step | {attention} | {count} | "] = theirs, ours
        for name, (theirs, ours) in calls.items():
            if chosen.only not in name:
                continue
            times = interleave({"padded": theirs, "ragged": ours}, chosen.rounds, clock=clock)
            pairs = zip(times["padded"], times["ragged"], strict=True)
            medians = (1e3 * statistics.median(times[name]) for name in ("padded", "ragged"))
            figures = " | ".join(f"{milliseconds:,.0f}" for milliseconds in medians)
            print(
                f"| {name} | {figures} | {statistics.median(a / b for a, b in pairs):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
