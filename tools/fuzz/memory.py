"""Layers with tensors that were replaced or changed, next to guard pages.

A round draws a layer, a batch and one change of a tensor, before the forward or between forward and
backward. If the change keeps the numbers, the results must be right; any other change must raise
one of Raglane's errors. An access beyond a tensor ends the process with a signal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.rnn import PackedSequence

import raglane as rl
from every_layer import gradients, parts
from fuzz.networks import KERNEL_LAYERS, drawn_kernels, error, hx
from guarded import guarded, guarded_allocations
from raglane.errors import RaglaneError

Change = Callable[[Tensor], Tensor]

# Changes that keep the numbers of a tensor.
HARMLESS: dict[str, Change] = {
    "nothing": lambda t: t,
    "apart": lambda t: torch.stack([t, t], -1)[..., 0],
    "turned": lambda t: t.t().contiguous().t() if t.dim() == 2 else t.flip(0).contiguous().flip(0),
    "negative view": lambda t: torch._neg_view(-t) if t.dtype.is_floating_point else t,
    "within": lambda t: torch.cat([t.new_full((3,), 7), t.reshape(-1), t.new_full((2,), 7)])[
        3:-2
    ].view(t.shape),
}

# Changes after which no kernel can compute.
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
    "integers": lambda t: t.to(torch.int32),
    "complex numbers": lambda t: t.to(torch.complex64),
    "on meta": lambda t: t.to("meta"),
    "sparse": lambda t: t.to_sparse(),
    "freed": lambda t: _shrunk(t, 0),
    "shrunk": lambda t: _shrunk(t, 1),
    "stretched": lambda t: _shrunk(t[..., :1].expand(t.shape).t() if t.dim() == 2 else t, 0),
}


def _shrunk(tensor: Tensor, share: int) -> Tensor:
    """Return a copy whose storage is freed (0) or one byte too small (1)."""
    copy = tensor.clone()
    copy.untyped_storage().resize_((copy.nbytes - 1) * share)
    return copy


def _by_set(layer: nn.Module, name: str, new: Tensor) -> None:
    with torch.no_grad():
        layer.get_parameter(name).set_(new)  # type: ignore[call-overload]


def _by_parametrization(layer: nn.Module, name: str, new: Tensor) -> None:
    class Given(nn.Module):
        def forward(self, _: Tensor) -> Tensor:
            return new.requires_grad_() if new.is_floating_point() else new

    parametrize.register_parametrization(layer, name, Given(), unsafe=True)


# Ways to replace a parameter; ``functional_call`` is another, used in the call itself.
_ROUTES: dict[str, Callable[[nn.Module, str, Tensor], Any]] = {
    "data": lambda layer, name, new: setattr(layer.get_parameter(name), "data", new),
    "set_": _by_set,
    "parameter": lambda layer, name, new: setattr(
        layer, name, nn.Parameter(new, new.is_floating_point())
    ),
    "state_dict": lambda layer, name, new: layer.load_state_dict(
        {**layer.state_dict(), name: new}, assign=True
    ),
    "parametrization": _by_parametrization,
}


class _NotPossibleError(Exception):
    """Torch itself refused the change, or the round has no such tensor."""


@dataclass
class Round:
    """The random choices of a round.

    Attributes:
        layer: on the cpu kernels, with guarded parameters.
        truth: the same in float64 on the reference backend.
        batch: the batch in float64.
        kind: of the input.
        leaf: the tensor of the input with the elements: flat values, a pack's data or a padded
            tensor.
        state: the initial states, or none.
        target: the changed tensor: ``input``, ``hx`` or a parameter.
        route: how a parameter is replaced.
        is_late: True if the change is made between forward and backward.
    """

    layer: Any
    truth: Any
    batch: rl.Ragged
    kind: str
    leaf: Tensor
    state: tuple[Tensor, ...]
    target: str
    route: str
    is_late: bool

    def change(self, change: Change) -> None:
        """Apply a change to the target.

        Raises:
            _NotPossibleError: torch refuses it, or there is no initial state.
        """
        try:
            if self.target == "input":
                self.leaf.data = change(self.leaf.detach())
            elif self.target == "hx":
                if not self.state:
                    raise _NotPossibleError
                self.state[0].data = change(self.state[0].detach())
            elif self.route != "functional_call":
                _ROUTES[self.route](
                    self.layer, self.target, change(self.layer.get_parameter(self.target).detach())
                )
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
            AttributeError,
            ValueError,
        ) as refused:
            raise _NotPossibleError from refused

    def _input(self, leaf: Tensor) -> tuple[Any, dict[str, Any]]:
        """Return the input of this kind with these elements, and other arguments, all of them
        guarded.
        """
        if self.kind == "ragged":
            return rl.Ragged._make(leaf, guarded(self.batch.offsets), None), {}
        if self.kind == "packed":
            packed = self.batch.to_packed()
            sizes, order = guarded(packed.batch_sizes), guarded(packed.sorted_indices)  # type: ignore[arg-type]
            return packed._replace(data=leaf, batch_sizes=sizes, sorted_indices=order), {}
        return leaf, {"lengths": guarded(self.batch.lengths_cpu)}

    def run(
        self, layer: Any, leaf: Tensor, state: tuple[Tensor, ...], between: Callable[[], None]
    ) -> list[Tensor]:
        """Return outputs, final states, and all gradients of a fixed loss; ``between`` is called
        before backward.
        """
        given, options = self._input(leaf)
        out, final = layer(given, hx(state), **options)
        results = [_elements(out), *parts(final)]
        leaves = [
            leaf,
            *state,
            *(getattr(layer, name) for name, _ in self.truth.named_parameters()),
        ]
        between()
        return [part.detach() for part in results] + gradients(results, leaves)

    def run_truth(self) -> list[Tensor]:
        state = tuple(part.detach().double().requires_grad_() for part in self.state)
        return self.run(
            self.truth, self.leaf.detach().double().requires_grad_(), state, lambda: None
        )

    def run_changed(self, change: Change) -> list[Tensor] | None:
        """Run with the change; return None if there are no results to compare."""
        if not self.is_late:
            self.change(change)
        if self.target not in ("input", "hx") and self.route == "functional_call":
            return self._run_functional(change)
        try:
            return self.run(
                self.layer,
                self.leaf,
                self.state,
                (lambda: self.change(change)) if self.is_late else lambda: None,
            )
        except RuntimeError as refused:
            # Autograd itself checks saved tensors and gradients.
            if self.is_late and not isinstance(refused, RaglaneError):
                raise _NotPossibleError from refused
            raise

    def _run_functional(self, change: Change) -> list[Tensor] | None:
        try:
            new = change(self.layer.get_parameter(self.target).detach())
        except (RuntimeError, NotImplementedError) as refused:
            raise _NotPossibleError from refused
        given, options = self._input(self.leaf)
        out, _ = torch.func.functional_call(
            self.layer, {self.target: new}, (given, hx(self.state)), options
        )
        _elements(out).double().sum().backward()
        return None if change in HARMLESS.values() else [out]


def _elements(out: Any) -> Tensor:
    """Return the tensor with the elements of an output of any kind."""
    return (
        out.values
        if isinstance(out, rl.Ragged)
        else out.data
        if isinstance(out, PackedSequence)
        else out
    )


def _draw(chance: random.Random) -> Round:
    dtype = chance.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    make = chance.choice(list(KERNEL_LAYERS.values()))
    sizes = chance.choice([1, 3, 8, 17]), chance.choice([4, 5, 15, 16, 17, 33])
    options = {
        "num_layers": chance.choice([1, 1, 2]),
        "bidirectional": chance.random() < 0.5,
        "bias": chance.random() < 0.7,
    }
    layer = make(*sizes, backend="cpu", dtype=dtype, **options)
    truth = make(*sizes, backend="reference", dtype=torch.float64, **options)
    truth.load_state_dict(layer.state_dict())
    for parameter in layer.parameters():
        parameter.data = guarded(parameter.data, before=chance.random() < 0.3)
    lengths = [chance.choice([0, 1, 2, 3, 7, 20]) for _ in range(chance.choice([1, 1, 2, 5, 9]))]
    if not sum(lengths):
        lengths[0] = 2
    values = torch.randn(sum(lengths), sizes[0]).to(dtype)
    batch, kind = (
        rl.Ragged.from_flat(values.double(), lengths=lengths),
        chance.choice(["ragged", "packed", "padded"]),
    )
    leaf = values
    if kind == "packed":
        leaf = batch.to_packed().data.to(dtype)
    if kind == "padded":
        leaf = batch.to_padded(batch_first=False, padding_value=9)[0].to(dtype)
    state: tuple[Tensor, ...] = ()
    if chance.random() < 0.5:
        rows = layer.num_layers * (2 if layer.bidirectional else 1), len(lengths)
        state = tuple(
            guarded(torch.randn(*rows, size).to(dtype)).requires_grad_()
            for size in layer.state_sizes
        )
    leaf = guarded(leaf, before=chance.random() < 0.3).requires_grad_()
    names = [name for name, _ in layer.named_parameters()]
    target, is_late = chance.choice([*names, *names, "input", "input", "hx"]), chance.random() < 0.4
    # Backward does not read a parameter that replaced another after the forward.
    route = chance.choice(["data", "set_"] if is_late else [*_ROUTES, "functional_call"])
    return Round(layer, truth, batch, kind, leaf, state, target, route, is_late)


def _has_effect(this: Round, change: str) -> bool:
    """Return True if a change does what its name says to a tensor that is still read."""
    if this.route == "set_" and change == "negative view":
        return False  # set_ takes the numbers of the storage, without the sign
    if this.target == "input" and this.kind == "padded" and change in ("a row more", "a row less"):
        return False  # only more or less padding
    # After the forward, the kernels no longer read a tensor of which they have a copy.
    is_clamped = getattr(this.layer, "max_length", None) is not None and this.target.startswith(
        "weight_hh"
    )
    is_copy = is_clamped or {"input": this.kind != "ragged", "hx": this.layer.num_layers > 1}.get(
        this.target, False
    )
    return not (this.is_late and is_copy)


def play(number: int) -> None:
    chance = random.Random(number)
    torch.manual_seed(number)
    this = _draw(chance)
    changes = HARMLESS if chance.random() < 0.4 else WRONG
    change = chance.choice(list(changes))
    if not _has_effect(this, change):
        return
    what = f"{change} {this.target} by {this.route}{' before backward' * this.is_late}, {type(this.layer).__name__}"
    truth = this.run_truth()
    with drawn_kernels(chance) as kernels:
        numbers = guarded(
            torch.randn(chance.randint(1, 40), dtype=chance.choice([torch.float32, torch.float64]))
        )
        try:
            with guarded_allocations(before=chance.random() < 0.3):
                for function in ("exp", "tanh", "sigmoid"):
                    kernels.apply(function, numbers)
                found = this.run_changed(changes[change])
        except RaglaneError as refused:
            if changes is HARMLESS:
                raise AssertionError(f"{what}: refused: {refused}") from refused
            return
        except _NotPossibleError:
            return
    if found is None:
        return
    assert changes is HARMLESS, f"{what}: not refused"
    tolerance = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 0.3}[this.leaf.dtype]
    # Rounding turns units of relu on and off, and with them their gradients.
    is_rounded = (
        this.leaf.dtype is torch.bfloat16 and getattr(this.layer, "nonlinearity", "") == "relu"
    )
    compared = 1 + len(this.layer.state_sizes) if is_rounded else len(truth)
    for index, pair in enumerate(list(zip(found, truth, strict=True))[:compared]):
        assert error(*pair) < tolerance, f"{what}: result {index} is off by {error(*pair):.3g}"
