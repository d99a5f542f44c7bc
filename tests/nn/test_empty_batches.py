"""Batches whose sequences are all empty, and batches without sequences: results are recorded by
autograd as those of other batches, on every backend, for every kind of cell and of input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import raglane as rl
from raglane.errors import DispatchError
from raglane.kernels.dispatch import BACKENDS

D, H = 3, 4


class Leaky(nn.Module):
    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.linear = nn.Linear(input_size, hidden_size)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = 0.9 * state + self.linear(x_t)
        return state.tanh(), state


class Plain(Leaky):
    """A cell that no program runs."""

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, state = super().step(x_t, state)
        return output.atan(), state


class Learned(Leaky):
    """A cell with a learned initial state, and with a state that is never recorded."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.start = nn.Parameter(torch.randn(hidden_size))

    def initial_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return self.start.expand(batch_size, -1), torch.zeros(batch_size, 1)

    def step(self, x_t: Tensor, state: Any) -> Any:
        output, memory = super().step(x_t, state[0])
        return output, (memory, (state[1] + 1).detach())


MAKERS: dict[str, Callable[..., Any]] = {
    "LSTM": rl.nn.LSTM,
    "GRU": rl.nn.GRU,
    "RNN": rl.nn.RNN,
    "MinGRU": rl.nn.MinGRU,
    "SLSTM": rl.nn.SLSTM,
    "LayerNormLSTM": rl.nn.LayerNormLSTM,
    "GRUD": rl.nn.GRUD,
    "LSTMCell": lambda *sizes, **kw: rl.nn.Recurrent(nn.LSTMCell, *sizes, **kw),
    "Leaky": lambda *sizes, **kw: rl.nn.Recurrent(Leaky, *sizes, **kw),
    "Plain": lambda *sizes, **kw: rl.nn.Recurrent(Plain, *sizes, **kw),
    "Learned": lambda *sizes, **kw: rl.nn.Recurrent(Learned, *sizes, **kw),
}


def flat(*lengths: int) -> rl.Ragged:
    return rl.Ragged.from_flat(
        torch.randn(sum(lengths), D), lengths=torch.tensor(lengths, dtype=torch.int64)
    )


Call = tuple[Any, dict[str, Any]]
INPUTS: dict[str, list[Callable[[], Call]]] = {
    "ragged": [lambda: (flat(2, 0, 3), {}), lambda: (flat(0, 0), {}), lambda: (flat(), {})],
    "all states": [
        lambda: (flat(2, 0, 3), {"_with_states": True}),
        lambda: (flat(0, 0), {"_with_states": True}),
        lambda: (flat(), {"_with_states": True}),
    ],
    "without output": [
        lambda: (flat(2, 0), {"return_output": False}),
        lambda: (flat(0), {"return_output": False}),
    ],
    "padded": [
        lambda: (torch.randn(5, 2, D), {"lengths": [5, 0]}),
        lambda: (torch.randn(5, 2, D), {"lengths": [0, 0]}),
        lambda: (torch.randn(0, 2, D), {"lengths": [0, 0]}),
        lambda: (torch.randn(5, 0, D), {"lengths": []}),
    ],
    "without lengths": [
        lambda: (torch.randn(5, 2, D), {}),
        lambda: (torch.randn(5, 0, D), {}),
        lambda: (torch.randn(0, 2, D), {}),
    ],
}


def recorded(layer: Any, call: Call) -> tuple[list[bool], list[bool], list[Tensor | None]]:
    """Return which results are recorded, which parameters get a gradient, and the gradients."""
    results = [
        part.values if isinstance(part, rl.Ragged) else part
        for part in tree_leaves(layer(call[0], **call[1]))
    ]
    results = [part for part in results if isinstance(part, Tensor) and part.is_floating_point()]
    has = [part.requires_grad for part in results]
    torch.stack([part.square().sum() for part in results if part.requires_grad]).sum().backward()
    grads = [part.grad for part in layer.parameters()]
    return has, [grad is not None for grad in grads], grads


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("name", MAKERS)
def test_results_of_empty_batches_are_recorded_as_others(name: str, backend: str) -> None:
    ran = 0
    for options in ({}, {"num_layers": 2, "bidirectional": True}):
        for other, *empty in INPUTS.values():
            try:
                with rl.use_backend(backend=backend):
                    wanted = recorded(MAKERS[name](D, H, **options), other())
            except DispatchError:
                continue  # the backend does not run this cell
            ran += 1
            assert all(wanted[0][:1])
            for call in empty:
                layer = MAKERS[name](D, H, **options)
                with rl.use_backend(backend=backend):
                    found = recorded(layer, call())
                assert found[:2] == wanted[:2]
                for parameter, grad in zip(layer.parameters(), found[2], strict=True):
                    if grad is None:
                        continue
                    assert grad.shape == parameter.shape
                    assert name == "Learned" or not bool(grad.any())
    assert ran or backend in ("cpu", "program", "torch", "triton")


@pytest.mark.parametrize("backend", ["auto", "torch", "reference"])
def test_the_state_of_an_empty_batch_is_its_initial_one_with_the_gradient(backend: str) -> None:
    layer, begin = rl.nn.GRU(D, H), torch.randn(1, 2, H, requires_grad=True)
    with rl.use_backend(backend=backend):
        _, state = layer(flat(0, 0), begin)
    assert torch.equal(state, begin)
    (grad,) = torch.autograd.grad((2 * state).sum(), begin)
    assert torch.equal(grad, torch.full_like(begin, 2.0))
