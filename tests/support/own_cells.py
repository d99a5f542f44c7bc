"""User-defined cells, and a naive loop for comparison."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import D, parts


class Leaky(nn.Module):
    """The smallest cell: one state of hidden_size zeros, and an output that differs from the
    state.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.linear = nn.Linear(input_size + hidden_size, hidden_size, dtype=torch.float64)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = 0.9 * state + self.linear(torch.cat([x_t, state], 1)).tanh()
        return state.atan(), state


class Whole(nn.Module):
    """The largest cell: two learned states of other sizes, a prepare, and another output size."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.output_size = (
            input_size,
            hidden_size,
            hidden_size + 1,
        )
        self.begin = nn.Parameter(torch.randn(hidden_size, dtype=torch.float64))
        self.input = nn.Linear(input_size, hidden_size, dtype=torch.float64)
        self.inner = nn.Linear(hidden_size + 2, hidden_size + 2, dtype=torch.float64)
        self.output = nn.Linear(hidden_size + 2, self.output_size, dtype=torch.float64)

    def initial_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return self.begin.expand(batch_size, -1), torch.ones(batch_size, 2, dtype=torch.float64)

    def prepare(self, values: Tensor, offsets: Tensor) -> Tensor:
        # Reads the element before, so it is more than a matrix product.
        return self.input(values + 0.5 * rl.segments.shift(values, offsets, 1))

    def step(
        self, x_t: Tensor, state: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        wide = self.inner(torch.cat(state, 1)).tanh()
        new = (wide[:, : self.hidden_size] + x_t, wide[:, self.hidden_size :])
        return self.output(torch.cat(new, 1)), new


class Moved(nn.LSTMCell):
    """A subclass of torch's LSTMCell that overrides forward."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size, dtype=torch.float64)

    def forward(self, input: Tensor, hx: Any = None) -> tuple[Tensor, Tensor]:
        h, c = super().forward(input, hx)
        return h, 0.5 * c


class Halved(nn.GRUCell):
    """A subclass of torch's GRUCell, with one state, that overrides forward."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size, dtype=torch.float64)

    def forward(self, input: Tensor, hx: Any = None) -> Tensor:
        return 0.5 * super().forward(input, hx)


class Listed(Leaky):
    """A cell with a list of states and an LSTMCell inside."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.inside = nn.LSTMCell(input_size, hidden_size, dtype=torch.float64)

    def initial_state(self, batch_size: int) -> list[Tensor]:
        return [torch.zeros(batch_size, self.hidden_size, dtype=torch.float64) for _ in range(2)]

    def step(self, x_t: Tensor, state: Any) -> Any:
        h, c = self.inside(x_t, tuple(state))
        return h, [h, c]


class Fixed(nn.Module):
    """A cell without parameters."""

    input_size = hidden_size = D

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state + x_t, 0.5 * state + x_t.sin()


OWN: list[Any] = [Leaky, Whole, Moved, Halved, Listed]


def naive(layer: Any, sequences: list[Tensor], hx: Any = None) -> tuple[list[Tensor], list[Tensor]]:
    """Run a layer's modules one layer, direction, sequence and step at a time."""
    pieces, finals = sequences, []
    for depth in range(layer.num_layers):
        sides = []
        for direction in range(2 if layer.bidirectional else 1):
            index = depth * (2 if layer.bidirectional else 1) + direction
            module, outputs, left = layer.cells[index], [], []
            for row, piece in enumerate(pieces):
                state: Any = torch.zeros(1, layer.hidden_size, dtype=torch.float64)
                if isinstance(module, Moved):
                    state = (state, state)
                if hasattr(module, "initial_state"):
                    state = module.initial_state(1)
                if hx is not None:
                    given = tuple(part[index, row : row + 1] for part in parts(hx))
                    state = given if isinstance(state, tuple | list) else given[0]
                # Both directions prepare the sequence in its own order.
                ready = piece
                if hasattr(module, "prepare"):
                    ready = module.prepare(piece, torch.tensor([0, len(piece)]))
                steps: list[Tensor] = [piece.new_zeros(1, 0)] * len(piece)
                for t in range(len(piece))[:: -1 if direction else 1]:
                    x_t = ready[t : t + 1]
                    if hasattr(module, "step"):
                        steps[t], state = module.step(x_t, state)
                    else:
                        state = module(x_t, state)
                        steps[t] = parts(state)[0]
                size = getattr(module, "output_size", module.hidden_size)
                outputs.append(torch.cat(steps) if steps else piece.new_zeros(0, size))
                left.append(parts(state))
            sides.append(outputs)
            finals.append([torch.cat(column) for column in zip(*left, strict=True)])
        pieces = [torch.cat(pair, 1) for pair in zip(*sides, strict=True)]
    return pieces, [torch.stack(column) for column in zip(*finals, strict=True)]
