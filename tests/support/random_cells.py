"""Random user-defined cells from a grammar, and comparisons of the results of several engines.

A seed determines the states and sizes of a cell, and a formula for each new state and the output.
Formulas consist of linear layers, block-diagonal products, gates, norms, softmax, pointwise
functions, slices and concatenations of columns, constants and buffers. ``str(cell)`` shows them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raglane as rl

_POINTWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "elu": F.elu,
    "softplus": F.softplus,
    "leaky_relu": F.leaky_relu,
    "neg": torch.neg,
    "abs": torch.abs,
    "erf": torch.erf,
    "bell": lambda a: torch.exp(-a.abs()),
    "log1p": lambda a: torch.log1p(a * a),
    "rsqrt": lambda a: torch.rsqrt(1 + a * a),
    "inverse": lambda a: 1 / (1 + a.square()),
    "sqrt": lambda a: torch.sqrt(a * a + 0.1),
    "clamp": lambda a: a.clamp(-0.5, 0.7),
    "softsign": F.softsign,
    "hardtanh": F.hardtanh,
}
_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "share": lambda a, b: a / (1 + b.abs()),
    "where": lambda a, b: torch.where(a > b, a, 0.5 * b),
    "scaled": lambda a, b: torch.add(a, b, alpha=0.3),
}
_ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda a: a.softmax(1),
    "centred": lambda a: a - a.mean(1, keepdim=True),
    "by largest": lambda a: a - a.amax(1, keepdim=True),
    "by length": lambda a: a * torch.rsqrt(a.square().mean(1, keepdim=True) + 0.1),
    "by first": lambda a: a * a[:, :1],
    "total": lambda a: a + 0.1 * a.sum(1, keepdim=True),
    "norm": lambda a: F.layer_norm(a, a.shape[1:]),
    "reversed": lambda a: a.flip(1),
}

Formula = Callable[[dict[str, Tensor]], Tensor]


class _Drawn(NamedTuple):
    """A formula, its text, and the number of its columns."""

    run: Formula
    text: str
    width: int


class RandomCell(nn.Module):
    """A random cell in float64 for :class:`raglane.nn.Recurrent`, with formulas of a nesting
    depth.
    """

    def __init__(self, seed: int, depth: int = 3) -> None:
        super().__init__()
        chance = random.Random(seed)
        self._chance = chance
        self.seed = seed
        self.input_size = chance.choice([1, 2, 3, 5, 8])
        self.sizes = [
            chance.choice([1, 2, 3, 4, 6, 8, 17]) for _ in range(chance.choice([1, 1, 2, 3]))
        ]
        self.hidden_size = self.sizes[0]
        self.output_size = chance.choice([self.hidden_size, 1, 5])
        self.is_tuple = len(self.sizes) > 1 or chance.random() < 0.3
        self.parts = nn.ModuleList()
        self.vectors = nn.ParameterList()
        self.constant: Tensor
        self.register_buffer("constant", torch.full((1,), chance.random(), dtype=torch.float64))
        self._widths = {"x": self.input_size} | {
            f"s{place}": size for place, size in enumerate(self.sizes)
        }
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self._prepared = chance.random() < 0.3
            if self._prepared:
                self.ready = nn.Linear(self.input_size, 6, dtype=torch.float64)
                self._widths["x"] = 6
            self.begins = chance.random() < 0.3
            if self.begins:
                self.beginning = nn.Parameter(torch.randn(sum(self.sizes), dtype=torch.float64))
            self._new = [
                self._next_state(f"s{place}", size, depth) for place, size in enumerate(self.sizes)
            ]
            self._widths |= {f"new{place}": size for place, size in enumerate(self.sizes)}
            self._output = self._formula(self.output_size, depth - 1)
        del self._chance  # a module with a random generator would run in plain torch

    def __str__(self) -> str:
        lines = [f"new{place} = {drawn.text}" for place, drawn in enumerate(self._new)]
        prepared = ["x = linear 6(x), prepared"] if self._prepared else []
        sizes = f"input {self.input_size}, states {self.sizes}{', learned' if self.begins else ''}"
        return "\n".join(
            [f"cell {self.seed}: {sizes}", *prepared, *lines, f"output = {self._output.text}"]
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RandomCell:
        """Draw the same cell again, since formulas refer to the modules of their cell."""
        twin = RandomCell(self.seed)
        twin.load_state_dict(self.state_dict())
        return twin

    def initial_state(self, batch_size: int) -> Any:
        """Return zeros, or a learned state."""
        start = self.beginning if self.begins else torch.zeros(sum(self.sizes), dtype=torch.float64)
        states = tuple(part.expand(batch_size, -1) for part in start.split(self.sizes))
        return states if self.is_tuple else states[0]

    def prepare(self, values: Tensor, offsets: Tensor) -> Tensor:  # noqa: ARG002
        """Return the input, or a linear layer of it."""
        return self.ready(values) if self._prepared else values

    def step(self, x_t: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Evaluate the formulas."""
        states = state if self.is_tuple else (state,)
        known = {"x": x_t} | {f"s{place}": part for place, part in enumerate(states)}
        new = tuple(drawn.run(known) for drawn in self._new)
        output = self._output.run(known | {f"new{place}": part for place, part in enumerate(new)})
        return output, (new if self.is_tuple else new[0])

    # -- the grammar
    # ----------------------------------------------------------------------------------------------

    def _next_state(self, name: str, width: int, depth: int) -> _Drawn:
        """Draw a bounded new state: a gate between the state and a formula, a squashed formula, or
        a leak.
        """
        drawn, kind = self._formula(width, depth), self._chance.choice(["gate", "squash", "leak"])
        if kind == "squash":
            return _Drawn(lambda at: torch.tanh(drawn.run(at)), f"tanh({drawn.text})", width)
        if kind == "leak":
            run: Formula = lambda at: 0.6 * at[name] + torch.tanh(drawn.run(at))  # noqa: E731
            return _Drawn(run, f"0.6 {name} + tanh({drawn.text})", width)
        gate = self._formula(width, depth - 1)
        return _Drawn(
            lambda at: torch.lerp(torch.tanh(drawn.run(at)), at[name], torch.sigmoid(gate.run(at))),
            f"gate({gate.text}: {name}, tanh({drawn.text}))",
            width,
        )

    def _formula(self, width: int, depth: int) -> _Drawn:
        """Draw a formula with a number of columns."""
        fitting = [name for name, size in self._widths.items() if size == width]
        if depth <= 0 and fitting:
            name = self._chance.choice(fitting)
            return _Drawn(lambda at: at[name], name, width)
        if depth <= 0:
            return self._linear(width, 0)
        rules = [
            self._linear,
            self._linear,
            self._pointwise,
            self._binary,
            self._gate,
            self._norm,
            self._row,
        ]
        rules += [self._vector, self._joined, self._cut, self._number]
        rules += [self._heads] if width > 1 and width % 2 == 0 else []
        return self._chance.choice(rules)(width, depth)

    def _linear(self, width: int, depth: int) -> _Drawn:
        """Draw a linear layer, sometimes an existing one, or one with a parametrization."""
        known = [
            part
            for part in self.parts
            if isinstance(part, nn.Linear) and part.out_features == width
        ]
        if known and self._chance.random() < 0.3:
            layer: Any = self._chance.choice(known)
            inner, again = self._formula(layer.in_features, min(depth - 1, 1)), " again"
        else:
            name = self._chance.choice(list(self._widths))
            inner, again = (
                (self._formula(self._widths[name], depth - 1) if depth > 0 else self._leaf(name)),
                "",
            )
            layer = nn.Linear(
                inner.width, width, bias=self._chance.random() < 0.7, dtype=torch.float64
            )
            if self._chance.random() < 0.1:
                layer = nn.utils.parametrizations.weight_norm(layer)
            self.parts.append(layer)
        return _Drawn(
            lambda at: layer(inner.run(at)), f"linear{again} {width}({inner.text})", width
        )

    def _leaf(self, name: str) -> _Drawn:
        return _Drawn(lambda at: at[name], name, self._widths[name])

    def _pointwise(self, width: int, depth: int) -> _Drawn:
        name, inner = self._chance.choice(list(_POINTWISE)), self._formula(width, depth - 1)
        return _Drawn(lambda at: _POINTWISE[name](inner.run(at)), f"{name}({inner.text})", width)

    def _binary(self, width: int, depth: int) -> _Drawn:
        name = self._chance.choice(list(_BINARY))
        one, two = self._formula(width, depth - 1), self._formula(width, depth - 1)
        return _Drawn(
            lambda at: _BINARY[name](one.run(at), two.run(at)),
            f"{name}({one.text}, {two.text})",
            width,
        )

    def _gate(self, width: int, depth: int) -> _Drawn:
        gate, inner = self._formula(width, depth - 1), self._formula(width, depth - 1)
        return _Drawn(
            lambda at: torch.sigmoid(gate.run(at)) * inner.run(at),
            f"sigmoid({gate.text}) * {inner.text}",
            width,
        )

    def _norm(self, width: int, depth: int) -> _Drawn:
        """Draw a norm over all columns or groups of them; of one or two columns it would be a step
        function.
        """
        inner = self._formula(width, depth - 1)
        groups = self._chance.choice([1, 2]) if width % 2 == 0 and width >= 6 else 1
        if width < 3:
            return inner
        kind: Any = (
            nn.LayerNorm(width, eps=0.05) if groups == 1 else nn.GroupNorm(groups, width, eps=0.05)
        )
        norm = kind.double()
        self.parts.append(norm)
        return _Drawn(lambda at: norm(inner.run(at)), f"norm of {groups}({inner.text})", width)

    def _row(self, width: int, depth: int) -> _Drawn:
        name, inner = self._chance.choice(list(_ROWS)), self._formula(width, depth - 1)
        if name == "norm" and width < 3:
            return inner
        return _Drawn(lambda at: _ROWS[name](inner.run(at)), f"{name}({inner.text})", width)

    def _vector(self, width: int, depth: int) -> _Drawn:
        """Draw a factor or a summand per column."""
        vector = nn.Parameter(torch.randn(width, dtype=torch.float64))
        self.vectors.append(vector)
        inner = self._formula(width, depth - 1)
        if self._chance.random() < 0.5:
            return _Drawn(
                lambda at: inner.run(at) * vector.sigmoid(), f"vector * ({inner.text})", width
            )
        return _Drawn(lambda at: inner.run(at) + vector, f"vector + {inner.text}", width)

    def _number(self, width: int, depth: int) -> _Drawn:
        """Use a buffer and a constant."""
        inner = self._formula(width, depth - 1)
        return _Drawn(
            lambda at: 1.1 * inner.run(at) + self.constant, f"1.1 * ({inner.text}) + buffer", width
        )

    def _joined(self, width: int, depth: int) -> _Drawn:
        """Concatenate the columns of two formulas."""
        if width == 1:
            return self._pointwise(width, depth)
        first = self._chance.randint(1, width - 1)
        one, two = self._formula(first, depth - 1), self._formula(width - first, depth - 1)
        return _Drawn(
            lambda at: torch.cat([one.run(at), two.run(at)], 1), f"[{one.text} | {two.text}]", width
        )

    def _cut(self, width: int, depth: int) -> _Drawn:
        """Take one block of columns of a wider formula."""
        place, inner = self._chance.choice([0, 1, 2]), self._formula(3 * width, depth - 1)
        return _Drawn(
            lambda at: inner.run(at).chunk(3, 1)[place], f"block {place} of ({inner.text})", width
        )

    def _heads(self, width: int, depth: int) -> _Drawn:
        """Draw a block-diagonal product of two blocks."""
        inner = self._formula(width, depth - 1)
        weight = nn.Parameter(
            torch.randn(2, width // 2, width // 2, dtype=torch.float64) / width**0.5
        )
        self.vectors.append(weight)

        def run(at: dict[str, Tensor]) -> Tensor:
            read = inner.run(at)
            blocks = read.reshape(read.shape[0], 2, width // 2).transpose(0, 1)
            return torch.bmm(blocks, weight).transpose(0, 1).reshape(read.shape[0], width)

        return _Drawn(run, f"heads({inner.text})", width)


class Answer(NamedTuple):
    """Outputs and final states of a run, and gradients by name."""

    results: list[Tensor]
    gradients: dict[str, Tensor]


Engine = Callable[
    [RandomCell, Tensor, Sequence[int], tuple[Tensor, ...]], tuple[Tensor, tuple[Tensor, ...]]
]
"""Runs a cell on values ``(N, D)``, lengths and initial states ``(B, size)``; returns outputs ``(N,
output_size)`` and final states."""


def naive(
    cell: RandomCell, values: Tensor, lengths: Sequence[int], states: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run the equations one sequence and one element at a time."""
    outputs, finals = [values.new_zeros(0, cell.output_size)], []
    prepared = cell.prepare(values, torch.tensor([0, *lengths]).cumsum(0))
    for number, part in enumerate(prepared.split(list(lengths))):
        state = tuple(state[number : number + 1] for state in states)
        for place in range(len(part)):
            output, new = cell.step(part[place : place + 1], state if cell.is_tuple else state[0])
            state = tuple(new) if cell.is_tuple else (new,)
            outputs.append(output)
        finals.append(state)
    return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(*finals, strict=True))


def engine(**options: str) -> Engine:
    """Return a layer with a backend and a schedule as an engine."""

    def run(
        cell: RandomCell, values: Tensor, lengths: Sequence[int], states: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        layer = rl.nn.Recurrent(cell, **options)  # type: ignore[arg-type]
        hx = tuple(part.unsqueeze(0) for part in states)
        several = len(hx) > 1
        out, final = layer(
            rl.Ragged.from_flat(values, lengths=list(lengths)), hx if several else hx[0]
        )
        return out.values, tuple(part.squeeze(0) for part in (final if several else (final,)))

    return run


def ask(seed: int, run: Engine) -> Answer:
    """Return an engine's answer for the random cell and batch of a seed."""
    cell, chance = RandomCell(seed), random.Random(seed + 1)
    draws = torch.Generator().manual_seed(seed)
    lengths = [chance.choice([0, 1, 2, 3, 5, 9]) for _ in range(chance.choice([1, 3, 8]))] + [4]

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)

    values = randn(sum(lengths), cell.input_size).requires_grad_()
    states = tuple(randn(len(lengths), size).mul(0.5).requires_grad_() for size in cell.sizes)
    output, final = run(cell, values, lengths, states)
    results = [output, *final]
    leaves = {"values": values} | {f"s{place}": part for place, part in enumerate(states)}
    leaves |= {name: part for name, part in cell.named_parameters() if name != "beginning"}
    slopes = [randn(*part.shape) for part in results]
    pairs = [
        (part, slope) for part, slope in zip(results, slopes, strict=True) if part.requires_grad
    ]
    parts, slopes = [part for part, _ in pairs], [slope for _, slope in pairs]
    found = torch.autograd.grad(
        parts, list(leaves.values()), slopes, allow_unused=True, materialize_grads=True
    )
    return Answer([part.detach() for part in results], dict(zip(leaves, found, strict=True)))


def difference(mine: Answer, wanted: Answer, tolerance: float = 1e-10) -> str | None:
    """Describe the first result with an error above the tolerance, relative to the largest number,
    if any.
    """
    named = {f"result {place}": part for place, part in enumerate(mine.results)} | mine.gradients
    for (name, own), other in zip(
        named.items(), [*wanted.results, *wanted.gradients.values()], strict=True
    ):
        if own.shape != other.shape:
            return f"{name}: shape {tuple(own.shape)} in place of {tuple(other.shape)}"
        if own.numel():
            error = float((own - other).abs().max()) / max(1.0, float(other.abs().max()))
            if not error <= tolerance:
                return f"{name}: relative error {error:.1e}"
    return None
