"""Layers that recompute gates in the backward pass, against layers that save them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu_networks import (
    DIVISIONS,
    LENGTHS,
    LIBRARY,
    MANY,
    MATRIX_CELLS,
    NO_TEAM,
    POISON,
    TEAM,
    TOLERANCE,
    Network,
    Use,
    assert_close,
    assert_same_bits,
    make,
    truth,
    with_gradients,
)
from raglane.kernels import reference
from raglane.kernels.cpu.backend import BACKEND
from raglane.native import library


def checkpointed(every: int, inner: Any = BACKEND) -> Any:
    """Return a backend that recomputes ``every`` steps at a time."""
    return SimpleNamespace(
        run=lambda request, schedule: inner.run(replace(request, checkpoint_every=every), schedule)
    )


def own(network: Network, found: list[Tensor]) -> list[Tensor]:
    """Return the results of ``with_gradients`` without gradients of weights, which are sums over
    all elements.
    """
    return found[: -sum(part is not None for weights in network.weights for part in weights)]


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("cell", MATRIX_CELLS)
@pytest.mark.usefixtures("two_threads")
def test_the_same_bits_as_of_a_layer_that_keeps_everything(cell: str, isa: str, use: Use) -> None:
    """Outputs, states, gradients of values and initial states; gradients of weights are sums in
    another order.
    """
    many = [40, 0, 1, 23, *[7] * 9]
    for dtype, sizes, lengths, every in (
        (torch.float32, (5, 17, 0), LENGTHS["mixed"], 2),
        (torch.float64, (7, 33, 0), LENGTHS["one long"], 4),
        (torch.float32, (16, 64, 0), many, 9),
        (torch.float64, (3, 8, 40 if cell == "lstm" else 0), many, 5),
        (torch.float32, (5, 17, 6 if cell == "lstm" else 0), LENGTHS["equal"], 1),
    ):
        for directions in (1, 2):
            network = make(cell, lengths, sizes, directions=directions).map(
                lambda t, dtype=dtype: t.to(dtype)  # type: ignore[misc]
            )
            use(isa, POISON)
            wanted = with_gradients(network, BACKEND)
            for flags in (NO_TEAM, TEAM):
                use(isa, flags | POISON)
                got = with_gradients(network, checkpointed(every))
                assert_same_bits(own(network, got), own(network, wanted))
                assert_close(got, [part.double() for part in wanted], TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("lengths", "every"),
    [(name, (1, 3, 100)[place % 3]) for place, name in enumerate([*LENGTHS, "mixed", "one long"])],
)
@pytest.mark.parametrize("cell", MATRIX_CELLS)
@pytest.mark.usefixtures("two_threads")
def test_agrees_with_the_reference(cell: str, lengths: str, every: int, use: Use) -> None:
    for index, isa in enumerate(LIBRARY.isas):
        use(isa, list(DIVISIONS.values())[index % len(DIVISIONS)] | POISON)
        for dtype, tolerance in TOLERANCE.items():
            is_narrow = dtype is torch.bfloat16
            if is_narrow and cell == "rnn_relu":
                continue  # rounding turns units on and off, and with them their gradients
            for directions in (1, 2):
                network, wanted = truth(cell, lengths, (5, 17, 0), directions, is_narrow)
                network = network.map(lambda t, dtype=dtype: t.to(dtype))  # type: ignore[misc]
                assert_close(with_gradients(network, checkpointed(every)), wanted, tolerance)


@pytest.mark.parametrize("cell", MATRIX_CELLS)
def test_bits_do_not_depend_on_the_threads(
    cell: str, use: Use, any_threads: Callable[[int], None]
) -> None:
    """Also of gradients of weights, with more elements in a round than the kernels pack
    together.
    """
    network = make(cell, MANY, (9, 37, 0), directions=2)
    for every in (100, 16):
        found = []
        for threads, flags in ((1, 0), (2, NO_TEAM), (3, TEAM), (4, 0)):
            any_threads(threads)
            use(flags=flags)
            found.append(with_gradients(network, checkpointed(every)))
            assert_same_bits(found[0], found[-1])
        assert_close(found[0], with_gradients(network, BACKEND), 1e-11)


def test_layers_states_and_partial_gradients() -> None:
    for cell in MATRIX_CELLS:
        network = make(cell, LENGTHS["mixed"], layers=2, directions=2)
        for backend in (checkpointed(2), checkpointed(2, reference.BACKEND)):
            got = with_gradients(network, backend, need_states=True)
            assert_close(got, with_gradients(network, reference.BACKEND, need_states=True), 1e-11)
        for chosen in (network.values, network.state[0], network.weights[1].hidden):
            found = []
            for every in (0, 2):
                leaves = network.map(
                    lambda t, chosen=chosen: t.clone().requires_grad_() if t is chosen else t  # type: ignore[misc]
                )
                (leaf,) = (part for part in leaves.tensors() if part.requires_grad)
                output, *_ = leaves.run(checkpointed(every))
                found.append(torch.autograd.grad(output.square().sum(), leaf)[0])
            torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_a_graph_that_is_kept_and_a_second_derivative() -> None:
    for cell in MATRIX_CELLS:
        if cell == "rnn_relu":
            continue  # its slope has a corner
        network = make(cell, LENGTHS["mixed"], (3, 5, 0)).map(lambda t: t.clone().requires_grad_())
        output, *_ = network.run(checkpointed(2))
        twice = [
            torch.autograd.grad(output.sum(), network.tensors(), retain_graph=True)
            for _ in range(2)
        ]
        assert_same_bits(list(twice[0]), list(twice[1]))

        def run(*tensors: Tensor, network: Network = network) -> Tensor:
            left = iter(tensors)
            return network.map(lambda _: next(left)).run(checkpointed(2))[0]

        # In the order in which map() goes through them.
        order = [
            *(part for part in network.weights[0] if part is not None),
            network.values,
            *network.state,
        ]
        assert torch.autograd.gradgradcheck(run, order, fast_mode=True)


@pytest.mark.parametrize("has_operators", [True, False])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("cell", MATRIX_CELLS)
def test_saved_tensors(
    cell: str, layers: int, directions: int, has_operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An LSTM saves outputs and c, other cells only outputs: a unit is N * H numbers."""
    if not has_operators:
        monkeypatch.setattr(library, "operators", lambda: None)
    network = make(cell, [50, 30, 0, 20], (16, 64, 0), layers, directions).map(Tensor.float)
    unit = 4 * 100 * 64 * directions * layers
    for every, least, most in (
        (10, *[(2 if cell == "lstm" else 1) * unit] * 2),
        (0, (6 if cell == "lstm" else 5 if cell == "gru" else 1) * unit, 1 << 40),
    ):
        leaves = network.map(lambda t: t.clone().requires_grad_())
        saved = {part.untyped_storage().data_ptr(): 0 for part in leaves.tensors()}

        def pack(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            if tensor.is_floating_point():
                saved.setdefault(
                    tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
                )
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            results = leaves.run(checkpointed(every))
        assert results
        assert least <= sum(saved.values()) <= most
