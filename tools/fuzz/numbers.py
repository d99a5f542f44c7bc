"""Random networks on random batches against float64 truth, and bit for bit where bits are promised.

A round draws a layer, its options, a batch and a number of threads. Values, states and gradients are compared with the
reference kernel's in float64; outputs and states with those of the same sequences in other batches, at other numbers of
threads, and as inputs of other kinds; gradients with a second run's::

    python -m fuzz.numbers 1000 1
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import raglane as rl
from fuzz.rounds import play_rounds
from guarded import chosen_library
from raglane.native.library import has_cell, library

__all__ = ["LAYERS", "main", "play"]

LAYERS: dict[str, Callable[..., Any]] = {
    "rnn tanh": rl.nn.RNN,
    "rnn relu": partial(rl.nn.RNN, nonlinearity="relu"),
    "rnn clip": partial(rl.nn.RNN, clip=0.7),
    "lstm": rl.nn.LSTM,
    "lstm projected": lambda d, h, **options: rl.nn.LSTM(d, h, proj_size=max(1, h // 2), **options),
    "lstm checkpointed": lambda d, h, **options: rl.nn.LSTM(d, h, checkpoint_every=4, **options),
    "gru checkpointed": lambda d, h, **options: rl.nn.GRU(d, h, checkpoint_every=7, **options),
    "lstm clip": partial(rl.nn.LSTM, clip=0.7),
    "gru": rl.nn.GRU,
    "gru reset before": partial(rl.nn.GRU, reset_after=False),
    "indrnn relu": rl.nn.IndRNN,
    "indrnn tanh": partial(rl.nn.IndRNN, nonlinearity="tanh"),
    "indrnn bounded": partial(rl.nn.IndRNN, max_length=20),
    "sru": rl.nn.SRU,
    "qrnn": rl.nn.QRNN,
    "mingru": rl.nn.MinGRU,
    "minlstm": rl.nn.MinLSTM,
    "layernorm lstm": rl.nn.LayerNormLSTM,
    "layernorm gru": rl.nn.LayerNormGRU,
    "peephole lstm": rl.nn.PeepholeLSTM,
    "coupled lstm": rl.nn.CoupledLSTM,
    "slstm": rl.nn.SLSTM,
    "cfc": rl.nn.CfC,
}

# As shares of the largest number: differences below these are not looked into.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 0.03}


class Round:
    """What one round draws: a layer, its truth, its peer, a batch, its states and what is asked of it."""

    def __init__(self, chance: random.Random) -> None:
        self.name = chance.choice(list(LAYERS))
        self.dtype = chance.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        self.sizes = chance.choice([1, 2, 5, 16, 40]), chance.choice([2, 7, 16, 31, 33, 64, 100])
        if self.name.startswith("layernorm"):
            # The norm of two or three numbers is a step, whose slope no rounding leaves alone.
            self.sizes = self.sizes[0], max(16, self.sizes[1])
        self.options = {
            "num_layers": chance.choice([1, 1, 1, 2, 3]),
            "bidirectional": chance.random() < 0.4,
            "bias": chance.random() < 0.8,
        }
        most = chance.choice([3, 10, 40, 120])
        lengths = [chance.choice([0, 1, chance.randint(0, most)]) for _ in range(chance.choice([0, 1, 2, 5, 17, 60]))]
        self.lengths = lengths
        make = LAYERS[self.name]
        self.layer = make(*self.sizes, dtype=self.dtype, **self.options)
        scale = chance.choice([1.0, 1.0, 1.5])
        with torch.no_grad():
            for parameter in self.layer.parameters():
                parameter.mul_(scale)
        self.truth = make(*self.sizes, dtype=torch.float64, backend="reference", **self.options)
        self.truth.load_state_dict(self.layer.state_dict())
        self.peer = make(*self.sizes, dtype=self.dtype, backend="reference", **self.options)
        self.peer.load_state_dict(self.layer.state_dict())
        self.values = torch.randn(sum(lengths), self.sizes[0]).to(self.dtype)
        self.promises_bits = has_cell(self.layer.cell.name)
        rows = self.layer.num_layers * (2 if self.layer.bidirectional else 1), len(lengths)
        given = chance.random() < 0.5
        state = [torch.randn(*rows, n) for n in self.layer.state_sizes] if given else []
        self.state = tuple(
            # What an sLSTM divides by is above 0.
            (part.abs() + 0.5 if name == "n" else part).to(self.dtype)
            for name, part in zip(self.layer.cell.states, state, strict=False)
        )
        self.return_states = chance.random() < 0.2

    def moved(self) -> Round:
        """The same round with every number that goes in moved by a rounding or two."""

        def move(part: Tensor) -> Tensor:
            away = torch.empty_like(part, dtype=torch.float64).uniform_(-2, 2) * torch.finfo(self.dtype).eps
            return part.detach().double() * (1 + away)

        twin = copy.copy(self)
        twin.values, twin.state = move(self.values), tuple(move(part) for part in self.state)
        twin.truth = copy.deepcopy(self.truth)
        for parameter in twin.truth.parameters():
            parameter.data = move(parameter)
        return twin

    def __str__(self) -> str:
        given = ", states given" if self.state else ""
        return f"{self.name} {self.sizes} {self.dtype} {self.options} lengths {self.lengths}{given}"

    def run(self, layer: Any, values: Tensor, state: tuple[Tensor, ...], lengths: list[int]) -> list[Tensor]:
        """Output, final states and, where they are asked for, all states."""
        given = rl.Ragged.from_flat(values, lengths=lengths)
        found = layer(given, _hx(state), return_states=self.return_states)
        return _flat(found)

    def with_gradients(self, layer: Any) -> list[Tensor]:
        """The same and the gradients of values, states and weights for a fixed loss."""
        dtype = next(layer.parameters()).dtype
        values = self.values.to(dtype).requires_grad_()
        state = tuple(part.to(dtype).requires_grad_() for part in self.state)
        found = self.run(layer, values, state, self.lengths)
        pushed = [
            torch.linspace(-1, 2, max(1, part.numel()))[: part.numel()].view(part.shape).to(part) for part in found
        ]
        wanted = [values, *state, *layer.parameters()]
        # The final state of a batch without an element hangs on nothing.
        pairs = [(part, grad) for part, grad in zip(found, pushed, strict=True) if part.requires_grad]
        parts, pushed = [part for part, _ in pairs], [grad for _, grad in pairs]
        grads = torch.autograd.grad(parts, wanted, pushed, allow_unused=True, materialize_grads=True)
        return [part.detach() for part in found] + list(grads)


def _hx(state: tuple[Tensor, ...]) -> Any:
    return None if not state else state if len(state) > 1 else state[0]


def _flat(found: tuple[Any, ...]) -> list[Tensor]:
    out, final, *states = found
    parts = [out.values, *(final if isinstance(final, tuple) else (final,))]
    for layer in states[0] if states else ():
        parts += [part.values for part in (layer if isinstance(layer, tuple) else (layer,))]
    return parts


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN where NaN is."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    """How far each result is from the truth, in parts of the largest number."""
    pairs = zip(found, truth, strict=True)
    return [
        float((mine.double() - right).abs().max() / (1 + right.abs().max())) if mine.numel() else 0.0
        for mine, right in pairs
    ]


def _differs(found: list[Tensor], this: Round) -> str | None:
    """What is further from the truth than rounding explains.

    Where a tolerance is exceeded, two others are asked: the truth itself, how much it moves when every number that goes
    in is moved by a rounding or two (units of a relu turn on and off, and a layer norm of few numbers steps from side
    to side); and the same equations in plain torch of the same dtype, how far they are off (a network may grow beyond
    what its dtype can hold). Where that is as much as the largest number itself, no digit of the dtype means anything.
    """
    truth = this.with_gradients(this.truth)
    for index, (mine, right) in enumerate(zip(found, truth, strict=True)):
        if mine.shape != right.shape:
            return f"result {index} has shape {tuple(mine.shape)} in place of {tuple(right.shape)}"
    errors, tolerance = _errors(found, truth), _TOLERANCES[this.dtype]
    if max(errors) < tolerance:
        return None
    moved = [_errors(twin.with_gradients(twin.truth), truth) for twin in (this.moved() for _ in range(5))]
    peer = _errors(this.with_gradients(this.peer), truth)
    for index, error in enumerate(errors):
        allowed = tolerance + 10 * max(part[index] for part in moved) + 3 * peer[index]
        if peer[index] >= 1:
            continue
        # NaN means that the peer has left what the dtype can hold.
        if error > allowed or (error != error and allowed < math.inf):
            return f"result {index} is off by {error:.3g}, where {allowed:.3g} is the most that rounding explains"
    return None


def _other_bits(this: Round, whole: list[Tensor], chance: random.Random) -> str | None:
    """Whether the same sequences have other bits elsewhere: in other batches, layouts, at other numbers of threads."""
    states = 1 + len(this.layer.cell.states)
    starts = [sum(this.lengths[:index]) for index in range(len(this.lengths))]
    order = list(range(len(this.lengths)))
    chance.shuffle(order)
    cut = chance.randint(0, len(order))
    for part in (order[:cut], order[cut:]):
        torch.set_num_threads(chance.choice([1, 2, 3, 4]))
        rows = [row for b in part for row in range(starts[b], starts[b] + this.lengths[b])]
        with torch.no_grad():
            found = this.run(
                this.layer,
                this.values[rows],
                tuple(state[:, part] for state in this.state),
                [this.lengths[b] for b in part],
            )
        for index, (mine, all_of_it) in enumerate(zip(found, whole, strict=True)):
            same = all_of_it[:, part] if 0 < index < states else all_of_it[rows]
            if not _same_bits(mine, same):
                return f"result {index} has other bits in another batch"
    batch = rl.Ragged.from_flat(this.values, lengths=this.lengths)
    with torch.no_grad():
        padded, lengths = batch.to_padded(batch_first=False)
        of_padded = this.layer(padded, _hx(this.state), lengths=lengths)[0]
        if not _same_bits(rl.Ragged.from_padded(of_padded, lengths, batch_first=False).values, whole[0]):
            return "a padded tensor gives other bits"
        if this.lengths:
            of_packed = rl.Ragged.from_packed(this.layer(batch.to_packed(), _hx(this.state))[0])
            if not _same_bits(of_packed.values, whole[0]):
                return "a pack gives other bits"
    return None


def play(seed: int) -> str | None:
    """Play one round; returns what went wrong, if anything did."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    kernels = library()
    this, threads = Round(chance), torch.get_num_threads()
    flags = chance.choice([0, 0, 0, 2 | 8, 4 | 8, 2 | 16, 4 | 16])
    torch.set_num_threads(chance.choice([1, 2, 3, 4]))
    try:
        with chosen_library(replace(kernels.with_isa(chance.choice(kernels.isas)), flags=flags)):
            found, again = this.with_gradients(this.layer), this.with_gradients(this.layer)
            fault = _differs(found, this)
            if fault is None and not all(map(_same_bits, found, again)) and this.promises_bits:
                fault = "a second run gave other bits"
            if fault is None and this.promises_bits:
                with torch.no_grad():
                    whole = this.run(this.layer, this.values, this.state, this.lengths)
                if not all(map(_same_bits, whole, found)):
                    fault = "other bits where no gradient is wanted"
                fault = fault or _other_bits(this, whole, chance)
    finally:
        torch.set_num_threads(threads)
    return None if fault is None else f"{this}: {fault}"


def main(rounds: int = 1000, seed: int = 1) -> int:
    """Play so many rounds from a seed on, and count those that went wrong."""
    return play_rounds("numbers", play, rounds, seed)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])) > 0)
