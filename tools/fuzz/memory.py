"""Attacks on memory: layers whose tensors are not what they were built with, beside pages that nobody may touch.

A round draws a layer, a batch and one change to a tensor of it, before the forward or between forward and backward. A
change that leaves the numbers alone must give the right numbers; any other must give one of Raglane's errors. To read
or write past a tensor ends the process with a signal, so rounds run in a process of their own::

    python -m fuzz.memory 1000 1

A third argument is a folder whose ``lib`` holds another build of the kernels, a sanitized one say.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

import raglane as rl
import raglane.native
from fuzz.rounds import play_rounds
from guarded import chosen_library, guarded, guarded_allocations
from raglane.errors import RaglaneError
from raglane.native.library import library

__all__ = ["HARMLESS", "LAYERS", "ROUTES", "WRONG", "main", "play"]

Change = Callable[[Tensor], Tensor]

LAYERS: dict[str, Callable[..., Any]] = {
    "rnn": rl.nn.RNN,
    "lstm": rl.nn.LSTM,
    "projected": lambda d, h, **options: rl.nn.LSTM(d, h, proj_size=max(1, h - 3), **options),
    "gru": rl.nn.GRU,
    "checkpointed": lambda d, h, **options: rl.nn.LSTM(d, h, checkpoint_every=3, **options),
    "checkpointed gru": lambda d, h, **options: rl.nn.GRU(d, h, checkpoint_every=5, **options),
    "indrnn": rl.nn.IndRNN,
    "mingru": rl.nn.MinGRU,
    "minlstm": rl.nn.MinLSTM,
    "qrnn": rl.nn.QRNN,
    "sru": rl.nn.SRU,
}

HARMLESS: dict[str, Change] = {
    "nothing": lambda t: t,
    "apart": lambda t: torch.stack([t, t], -1)[..., 0],
    "turned": lambda t: t.t().contiguous().t() if t.dim() == 2 else t.flip(0).contiguous().flip(0),
    "negative view": lambda t: torch._neg_view(-t) if t.dtype.is_floating_point else t,
    "within": lambda t: torch.cat([t.new_full((3,), 7), t.reshape(-1), t.new_full((2,), 7)])[3:-2].view(t.shape),
}
"""What leaves the numbers of a tensor alone."""

WRONG: dict[str, Change] = {
    "one number": lambda t: torch.ones(1, 1, dtype=t.dtype),
    "no numbers": lambda t: t.new_empty(0),
    "a scalar": lambda t: t.new_zeros(()),
    "a row less": lambda t: t[:-1].clone() if len(t) > 1 else t.new_empty(0),
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "a column less": lambda t: t[..., :-1].clone() if t.dim() > 1 else t[:0],
    "a dimension more": lambda t: t.unsqueeze(0),
    "flat": lambda t: t.reshape(-1) if t.dim() > 1 else t.view(1, -1),
    "wider numbers": lambda t: t.to(torch.float32 if t.dtype is torch.float64 else torch.float64),
    "narrower numbers": lambda t: t.to(torch.float16),
    "whole numbers": lambda t: t.to(torch.int32),
    "complex numbers": lambda t: t.to(torch.complex64),
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "freed": lambda t: _shrunk(t, 0),
    "shrunk": lambda t: _shrunk(t, 1),
    "stretched": lambda t: _shrunk(t[..., :1].expand(t.shape).t() if t.dim() == 2 else t, 0),
}
"""What no kernel can compute with."""


def _shrunk(tensor: Tensor, share: int) -> Tensor:
    """A copy whose storage was cut to nothing, or by one byte."""
    copy = tensor.clone()
    copy.untyped_storage().resize_((copy.nbytes - 1) * share)
    return copy


def _by_data(layer: nn.Module, name: str, new: Tensor) -> None:
    layer.get_parameter(name).data = new


def _by_set(layer: nn.Module, name: str, new: Tensor) -> None:
    with torch.no_grad():
        layer.get_parameter(name).set_(new)  # type: ignore[call-overload]


def _by_parameter(layer: nn.Module, name: str, new: Tensor) -> None:
    setattr(layer, name, nn.Parameter(new, requires_grad=new.is_floating_point()))


def _by_state_dict(layer: nn.Module, name: str, new: Tensor) -> None:
    layer.load_state_dict({**layer.state_dict(), name: new}, assign=True)


def _by_parametrization(layer: nn.Module, name: str, new: Tensor) -> None:
    class Given(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            return new.requires_grad_() if new.is_floating_point() else new

    parametrize.register_parametrization(layer, name, Given(), unsafe=True)


ROUTES: dict[str, Callable[[nn.Module, str, Tensor], None]] = {
    "data": _by_data,
    "set_": _by_set,
    "parameter": _by_parameter,
    "state_dict": _by_state_dict,
    "parametrization": _by_parametrization,
}
"""How a parameter becomes another; ``functional_call`` is used where a layer is called."""


@dataclass
class Round:
    """What one round draws.

    Attributes:
        layer: on the cpu kernels.
        truth: the same in float64 on the reference kernel.
        batch: the batch of the truth.
        kind: of input.
        leaf: the tensor of the input that holds the elements: flat values, a pack's data or a padded tensor.
        state: the initial states, or nothing.
        names: of the parameters.
    """

    layer: Any
    truth: Any
    batch: rl.Ragged
    kind: str
    leaf: Tensor
    state: tuple[Tensor, ...]
    names: list[str]

    def input(self, leaf: Tensor) -> tuple[Any, dict[str, Any]]:
        """The input of the round's kind around a leaf, and what is given beside it; all of it is guarded."""
        if self.kind == "ragged":
            return rl.Ragged._make(leaf, guarded(self.batch.offsets), None), {}
        if self.kind == "packed":
            packed = self.batch.to_packed()
            sizes, order = guarded(packed.batch_sizes), guarded(packed.sorted_indices)  # type: ignore[arg-type]
            return packed._replace(data=leaf, batch_sizes=sizes, sorted_indices=order), {}
        return leaf, {"lengths": guarded(self.batch.host_lengths)}


def draw(chance: random.Random) -> Round:
    """A random layer and batch."""
    dtype = chance.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    name = chance.choice(list(LAYERS))
    sizes = chance.choice([1, 3, 8, 17]), chance.choice([4, 5, 15, 16, 17, 33])
    options = {
        "num_layers": chance.choice([1, 1, 2]),
        "bidirectional": chance.random() < 0.5,
        "bias": chance.random() < 0.7,
    }
    layer = LAYERS[name](*sizes, backend="cpu", dtype=dtype, **options)
    truth = LAYERS[name](*sizes, backend="reference", dtype=torch.float64, **options)
    truth.load_state_dict(layer.state_dict())
    for parameter in layer.parameters():
        parameter.data = guarded(parameter.data, before=chance.random() < 0.3)
    lengths = [chance.choice([0, 1, 2, 3, 7, 20]) for _ in range(chance.choice([1, 1, 2, 5, 9]))]
    if not sum(lengths):
        lengths[0] = 2
    values = torch.randn(sum(lengths), sizes[0]).to(dtype)
    batch, kind = rl.Ragged.from_flat(values.double(), lengths=lengths), chance.choice(["ragged", "packed", "padded"])
    leaf = values
    if kind == "packed":
        leaf = batch.to_packed().data.to(dtype)
    if kind == "padded":
        leaf = batch.to_padded(batch_first=False, padding_value=9)[0].to(dtype)
    state: tuple[Tensor, ...] = ()
    if chance.random() < 0.5:
        rows = layer.num_layers * (2 if layer.bidirectional else 1), len(lengths)
        state = tuple(guarded(torch.randn(*rows, size).to(dtype)).requires_grad_() for size in layer.state_sizes)
    leaf = guarded(leaf, before=chance.random() < 0.3).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    return Round(layer, truth, batch, kind, leaf, state, names)


def run(layer: Any, this: Round, leaf: Tensor, state: tuple[Tensor, ...], between: Callable[[], None]) -> list[Tensor]:
    """The output's elements, the final states, and all gradients of a fixed loss; ``between`` comes before backward."""
    given, options = this.input(leaf)
    hx = None if not state else state if len(state) > 1 else state[0]
    out, final = layer(given, hx, **options)
    results = [elements(out), *(final if isinstance(final, tuple) else (final,))]
    loss = torch.stack([(part.double().sin() * _ramp(part)).sum() for part in results]).sum()
    wanted = [leaf, *state, *(getattr(layer, name) for name in this.names)]
    between()
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True)
    return [part.detach() for part in results] + list(grads)


def elements(out: Any) -> Tensor:
    """What holds the elements of an output of any kind."""
    if isinstance(out, rl.Ragged):
        return out.values
    tensor: Tensor = out.data if isinstance(out, PackedSequence) else out
    return tensor


def _ramp(part: Tensor) -> Tensor:
    return torch.linspace(-1, 2, max(1, part.numel()), dtype=torch.float64)[: part.numel()].view(part.shape)


def wrong(found: list[Tensor], truth: list[Tensor], dtype: torch.dtype) -> str | None:
    """What differs by more than the rounding of a dtype, if anything does."""
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.3}[dtype]
    for index, (mine, right) in enumerate(zip(found, truth, strict=True)):
        if mine.shape != right.shape:
            return f"result {index} has shape {tuple(mine.shape)} in place of {tuple(right.shape)}"
        error = float((mine.double() - right).abs().max() / (1 + right.abs().max())) if mine.numel() else 0.0
        if not error < tolerance:
            return f"result {index} is off by {error:.3g}"
    return None


def play(seed: int) -> str | None:
    """Play one round; returns what went wrong, if anything did."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    kernels = library()
    flags = chance.choice([0, 0, 2 | 8, 4 | 8, 2 | 16, 4 | 16]) | 1
    chosen = replace(kernels.with_isa(chance.choice(kernels.isas)), flags=flags)
    torch.set_num_threads(chance.choice([1, 2]))
    this = draw(chance)
    target = chance.choice([*this.names, *this.names, "input", "input", "hx"])
    changes = HARMLESS if chance.random() < 0.4 else WRONG
    change = chance.choice(list(changes))
    late = chance.random() < 0.4
    # Backward does not read a parameter put in another's place after the forward.
    route = chance.choice(["data", "set_"] if late else [*ROUTES, "functional_call"])
    if not _means_something(this, target, change, route, late=late):
        return None
    what = f"{change} {target} by {route}{' before backward' if late else ''}, {type(this.layer).__name__}"
    truth = run(
        this.truth,
        this,
        this.leaf.detach().double().requires_grad_(),
        tuple(part.detach().double().requires_grad_() for part in this.state),
        lambda: None,
    )
    counted = guarded(torch.randn(chance.randint(1, 40), dtype=chance.choice([torch.float32, torch.float64])))
    for function in ("exp", "tanh", "sigmoid"):
        with guarded_allocations():
            chosen.apply(function, counted)
    try:
        with chosen_library(chosen), guarded_allocations(before=chance.random() < 0.3):
            found = _attack(this, target, changes[change], route, late=late)
    except RaglaneError as error:
        return None if changes is WRONG else f"{what}: refused: {error}"
    except _NotPossibleError:
        return None
    if found is None:
        return None
    if changes is WRONG:
        return f"{what}: passed in silence"
    difference = wrong(found, truth, this.leaf.dtype)
    return None if difference is None else f"{what}: {difference}"


def _means_something(this: Round, target: str, change: str, route: str, *, late: bool) -> bool:
    """Whether a change is seen at all, and is what it says."""
    if route == "set_" and change == "negative view":
        return False  # what is set takes the numbers of the storage, not the sign
    if target == "input" and this.kind == "padded" and change in ("a row more", "a row less"):
        return False  # more or less padding
    # What was copied or cut out by then is not what the caller has in hand.
    is_copied = (target == "input" and this.kind != "ragged") or (target == "hx" and this.layer.num_layers > 1)
    return not (late and is_copied)


class _NotPossibleError(Exception):
    """Torch itself refused the change, or the round does not have what was to be changed."""


def _attack(this: Round, target: str, change: Change, route: str, *, late: bool) -> list[Tensor] | None:
    layer, leaf, state = this.layer, this.leaf, this.state

    def attack() -> None:
        try:
            if target == "input":
                leaf.data = change(leaf.detach())
            elif target == "hx":
                if not state:
                    raise _NotPossibleError
                state[0].data = change(state[0].detach())
            elif route != "functional_call":
                ROUTES[route](layer, target, change(layer.get_parameter(target).detach()))
        except (RuntimeError, TypeError, NotImplementedError, AttributeError, ValueError) as error:
            raise _NotPossibleError from error

    if not late:
        attack()
    if target not in ("input", "hx") and route == "functional_call":
        return _functional(this, target, change)
    try:
        return run(layer, this, leaf, state, attack if late else lambda: None)
    except RaglaneError:
        raise
    except RuntimeError as error:
        # Autograd checks what it saved and what comes back by itself.
        if late:
            raise _NotPossibleError from error
        raise


def _functional(this: Round, target: str, change: Change) -> list[Tensor] | None:
    """The layer with another tensor for one call."""
    try:
        new = change(this.layer.get_parameter(target).detach())
    except (RuntimeError, NotImplementedError) as error:
        raise _NotPossibleError from error
    given, options = this.input(this.leaf)
    hx = None if not this.state else this.state if len(this.state) > 1 else this.state[0]
    out, _ = torch.func.functional_call(this.layer, {target: new}, (given, hx), options)
    elements(out).double().sum().backward()
    return None if change in HARMLESS.values() else [out]


def main(rounds: int = 1000, seed: int = 1) -> int:
    """Play so many rounds from a seed on, and count those that went wrong."""
    return play_rounds("memory", play, rounds, seed)


if __name__ == "__main__":
    *numbers, kernels = sys.argv[1:] if len(sys.argv) > 3 else [*sys.argv[1:], ""]
    if kernels:
        raglane.native.__path__.insert(0, kernels)
    sys.exit(main(*map(int, numbers)) > 0)
