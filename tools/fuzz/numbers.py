"""Random networks on random batches, compared with float64, and bit for bit where bits are
promised.

Values, states and gradients must agree with the reference backend in float64. Outputs and states
must have the bits of the same sequences in other batches, with other numbers of threads, and as
inputs of other kinds; gradients those of a second run.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import torch
from torch import Tensor

import raglane as rl
from cell_requests import possible
from every_layer import gradients, results_of
from fuzz.networks import KERNEL_LAYERS, LAYERS, drawn_kernels, error, hx

# Smaller errors, as shares of the largest number, are not examined.
_TOLERANCES = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 0.03}


class Round:
    """A layer, the same layer in float64 (truth) and on the reference backend (peer), a batch and
    initial states.
    """

    def __init__(self, chance: random.Random) -> None:
        self.name = chance.choice(list(LAYERS))
        self.dtype = chance.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
        self.sizes = chance.choice([1, 2, 5, 16, 40]), chance.choice([2, 7, 16, 31, 33, 64, 100])
        if self.name.startswith("layernorm"):
            # The norm of two or three numbers is nearly a step function, so rounding changes its
            # slope.
            self.sizes = self.sizes[0], max(16, self.sizes[1])
        self.options = {
            "num_layers": chance.choice([1, 1, 1, 2, 3]),
            "bidirectional": chance.random() < 0.4,
            "bias": chance.random() < 0.8,
        }
        most = chance.choice([3, 10, 40, 120])
        lengths = [
            chance.choice([0, 1, chance.randint(0, most)])
            for _ in range(chance.choice([0, 1, 2, 5, 17, 60]))
        ]
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
        self.promises_bits = self.name in KERNEL_LAYERS
        self.state: tuple[Tensor, ...] = ()
        if chance.random() < 0.5:
            rows = self.layer.num_layers * (2 if self.layer.bidirectional else 1), len(lengths)
            state = possible(
                self.layer.cell, [torch.randn(*rows, size) for size in self.layer.state_sizes]
            )
            self.state = tuple(part.to(self.dtype) for part in state)
        self.with_states = chance.random() < 0.2

    def moved(self) -> Round:
        """Return the same round with every input moved by one or two roundings."""

        def move(part: Tensor) -> Tensor:
            away = (
                torch.empty_like(part, dtype=torch.float64).uniform_(-2, 2)
                * torch.finfo(self.dtype).eps
            )
            return part.detach().double() * (1 + away)

        twin = copy.copy(self)
        twin.values, twin.state = move(self.values), tuple(move(part) for part in self.state)
        twin.truth = copy.deepcopy(self.truth)
        for parameter in twin.truth.parameters():
            parameter.data = move(parameter)
        return twin

    def __str__(self) -> str:
        states = ", with initial states" if self.state else ""
        return (
            f"{self.name} {self.sizes} {self.dtype} {self.options} lengths {self.lengths}{states}"
        )

    def run(
        self, layer: Any, values: Tensor, state: tuple[Tensor, ...], lengths: list[int]
    ) -> list[Tensor]:
        """Return the output, the final states and, in some rounds, all states."""
        batch = rl.Ragged.from_flat(values, lengths=lengths)
        return results_of(layer(batch, hx(state), _with_states=self.with_states))

    def with_gradients(self, layer: Any) -> list[Tensor]:
        """Return the same, and the gradients of values, states and weights for a fixed loss."""
        dtype = next(layer.parameters()).dtype
        values = self.values.to(dtype).requires_grad_()
        state = tuple(part.to(dtype).requires_grad_() for part in self.state)
        found = self.run(layer, values, state, self.lengths)
        return [part.detach() for part in found] + gradients(
            found, [values, *state, *layer.parameters()]
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are equal, with NaN at the same places."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


def _errors(found: list[Tensor], truth: list[Tensor]) -> list[float]:
    return [error(*pair) for pair in zip(found, truth, strict=True)]


def _check_errors(found: list[Tensor], this: Round) -> None:
    """Raise an AssertionError if a result is further from the truth than rounding explains.

    Above the tolerance, an error may still be the network's: units of a ReLU that turn on, a norm
    of few numbers, or growth beyond the range of the dtype. So it is compared with how much the
    truth moves when every input moves by a rounding or two, and with the error of the same
    equations in plain torch. If that is as large as the numbers themselves, the result means
    nothing and is not compared.
    """
    truth = this.with_gradients(this.truth)
    errors, tolerance = _errors(found, truth), _TOLERANCES[this.dtype]
    if all(wrong < tolerance for wrong in errors):
        return
    moved = [
        _errors(twin.with_gradients(twin.truth), truth) for twin in (this.moved() for _ in range(5))
    ]
    peer = _errors(this.with_gradients(this.peer), truth)
    for index, wrong in enumerate(errors):
        if peer[index] >= 1:
            continue
        allowed = tolerance + 10 * max(part[index] for part in moved) + 3 * peer[index]
        # Allowed is NaN if the peer left the range of the dtype.
        is_too_large = wrong > allowed or (math.isnan(wrong) and allowed < math.inf)
        assert not is_too_large, (
            f"result {index} is off by {wrong:.3g}, and rounding explains at most {allowed:.3g}"
        )


def _check_bits(this: Round, whole: list[Tensor], chance: random.Random) -> None:
    """Raise an AssertionError if the same sequences have other bits in another batch, layout or
    number of threads.
    """
    states = 1 + len(this.layer.cell.states)
    starts = [sum(this.lengths[:index]) for index in range(len(this.lengths))]
    order = list(range(len(this.lengths)))
    chance.shuffle(order)
    cut = chance.randint(0, len(order))
    for part in (order[:cut], order[cut:]):
        torch.set_num_threads(chance.choice([1, 2, 3, 4]))
        rows = [row for b in part for row in range(starts[b], starts[b] + this.lengths[b])]
        state = tuple(state[:, part] for state in this.state)
        found = this.run(this.layer, this.values[rows], state, [this.lengths[b] for b in part])
        for index, (mine, full) in enumerate(zip(found, whole, strict=True)):
            same = full[:, part] if 0 < index < states else full[rows]
            assert _same_bits(mine, same), f"result {index} has other bits in another batch"
    batch = rl.Ragged.from_flat(this.values, lengths=this.lengths)
    padded, lengths = batch.to_padded(batch_first=False)
    of_padded = this.layer(padded, hx(this.state), lengths=lengths)[0]
    of_padded = rl.Ragged.from_padded(of_padded, lengths, batch_first=False)
    assert _same_bits(of_padded.values, whole[0]), "a padded tensor has other bits"
    if this.lengths:
        of_packed = rl.Ragged.from_packed(this.layer(batch.to_packed(), hx(this.state))[0])
        assert _same_bits(of_packed.values, whole[0]), "a pack has other bits"


def play(number: int) -> None:
    chance = random.Random(number)
    torch.manual_seed(number)
    this = Round(chance)
    try:
        with drawn_kernels(chance):
            found = this.with_gradients(this.layer)
            _check_errors(found, this)
            if not this.promises_bits:
                return
            again = this.with_gradients(this.layer)
            assert all(map(_same_bits, found, again)), "a second run gave other bits"
            with torch.no_grad():
                whole = this.run(this.layer, this.values, this.state, this.lengths)
                assert all(map(_same_bits, whole, found)), "other bits without gradients"
                _check_bits(this, whole, chance)
    except AssertionError as fault:
        raise AssertionError(f"{this}: {fault}") from fault
