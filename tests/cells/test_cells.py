"""Cells: one step against PyTorch's own cells and against formulas written a second time, in
float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cell_requests import possible, random_weights
from naive_cells import NAIVE_STEPS, naive_step
from raglane import cells
from raglane.cells import CELLS, CellSpec, Weights

D, H, R = 3, 5, 4

# What PyTorch calls the cells that it has.
TORCH_CELLS: dict[str, Any] = {
    "rnn_tanh": lambda **options: nn.RNNCell(D, H, nonlinearity="tanh", **options),
    "rnn_relu": lambda **options: nn.RNNCell(D, H, nonlinearity="relu", **options),
    "lstm": lambda **options: nn.LSTMCell(D, H, **options),
    "gru": lambda **options: nn.GRUCell(D, H, **options),
}
READ_STATE = [name for name, cell in CELLS.items() if cell.reads_state]


def _step(
    cell: CellSpec,
    weights: Any,
    values: Tensor,
    state: tuple[Tensor, ...],
    mask: Tensor | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    offsets = torch.tensor([0, 1, values.shape[0]], device=values.device)
    return cell.step(weights, cell.prepare(weights, values, offsets), state, mask)


def _randn(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


def _state(cell: CellSpec, device: torch.device, units: int = H) -> tuple[Tensor, ...]:
    parts = possible(
        cell, [_randn(R, size, device=device).detach() for size in cell.state_sizes(units)]
    )
    return tuple(part.requires_grad_() for part in parts)


def _drawn(
    name: str, device: torch.device, bias: bool = True
) -> tuple[CellSpec, Any, Tensor, tuple[Tensor, ...]]:
    """A cell with random weights, values and states."""
    cell = CELLS[name]
    return (
        cell,
        random_weights(cell, D, H, bias, device=device),
        _randn(R, D, device=device),
        _state(cell, device),
    )


def _given(weights: Any) -> list[Tensor]:
    return [part for part in weights if part is not None]


def _assert_same(
    ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], leaves: list[Tensor]
) -> None:
    """States and gradients to the last bits of float64."""
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)
    weighting = [torch.randn_like(part) for part in theirs]
    # QRNN and SRU have a state that nothing reads: no gradient on either side.
    pairs = zip(
        torch.autograd.grad(ours, leaves, weighting, retain_graph=True, allow_unused=True),
        torch.autograd.grad(theirs, leaves, weighting, retain_graph=True, allow_unused=True),
        strict=True,
    )
    for mine, wanted in pairs:
        assert (mine is None) == (wanted is None)
        if mine is not None:
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def _naive(
    name: str,
    weights: Any,
    values: Tensor,
    state: tuple[Tensor, ...],
    masks: Tensor | None = None,
    clip: Any = None,
) -> tuple[Tensor, ...]:
    rows = [
        naive_step(name, weights, x_t, tuple(before), None if masks is None else masks[row], clip)
        for row, (x_t, *before) in enumerate(zip(values, *state, strict=True))
    ]
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def test_every_cell_is_compared() -> None:
    assert set(NAIVE_STEPS) == set(CELLS)
    assert set(TORCH_CELLS) <= set(CELLS)
    assert all(cell.name == name for name, cell in CELLS.items())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CELLS)
def test_step_is_the_papers(name: str, bias: bool, device: torch.device) -> None:
    cell, weights, values, state = _drawn(name, device, bias)
    output, new = _step(cell, weights, values, state)
    assert torch.equal(output, new[0])
    _assert_same(new, _naive(name, weights, values, state), [values, *state, *_given(weights)])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", TORCH_CELLS)
def test_step_is_torchs(name: str, bias: bool, device: torch.device) -> None:
    cell = CELLS[name]
    module = TORCH_CELLS[name](bias=bias, device=device, dtype=torch.float64)
    weights = Weights(
        *(getattr(module, part) for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"))
    )
    values, state = _randn(R, D, device=device), _state(cell, device)
    output, new = _step(cell, weights, values, state)
    wanted = module(values, state if len(state) > 1 else state[0])
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert torch.equal(output, new[0])
    _assert_same(new, wanted, [values, *state, *module.parameters()])
    _assert_same(
        _naive(name, weights, values, state), wanted, [values, *state, *module.parameters()]
    )


@pytest.mark.parametrize("clip", [0.3, 1.0])
@pytest.mark.parametrize(
    ("name", "clipped"),
    [
        ("rnn_tanh", lambda clip: cells.Elman("tanh", clip)),
        ("rnn_relu", lambda clip: cells.Elman("relu", clip)),
        ("lstm", cells.LSTM),
        ("peephole_lstm", cells.PeepholeLSTM),
        ("coupled_lstm", cells.CoupledLSTM),
        ("gru", lambda clip: cells.GRU(True, clip)),
        ("gru_reset_before", lambda clip: cells.GRU(False, clip)),
    ],
)
def test_clip(name: str, clipped: Any, clip: float, device: torch.device) -> None:
    cell = clipped(clip)
    assert cell.name not in CELLS  # no kernel may take it for the plain cell
    _, weights, values, state = _drawn(name, device)
    _, new = _step(cell, weights, values, state)
    _assert_same(
        new, _naive(name, weights, values, state, clip=clip), [values, *state, *_given(weights)]
    )
    assert not torch.allclose(new[0], _step(CELLS[name], weights, values, state)[0])


@pytest.mark.parametrize("name", READ_STATE)
def test_a_mask_acts_where_weights_read_the_state(name: str, device: torch.device) -> None:
    cell, weights, values, state = _drawn(name, device)
    masks = torch.tensor(
        [[0.0, 2.0, 0.0, 1.0, 0.5], [1.0] * H, [0.0] * H, [3.0, 1.0, 1.0, 1.0, 1.0]], device=device
    ).double()
    _, new = _step(cell, weights, values, state, masks)
    _assert_same(
        new, _naive(name, weights, values, state, masks), [values, *state, *_given(weights)]
    )
    _, plain = _step(cell, weights, values, state)
    assert torch.equal(new[0][1], plain[0][1])
    # As a whole, for a relu may have closed all that a mask changes in one row.
    assert not torch.allclose(new[0][[0, 2, 3]], plain[0][[0, 2, 3]])


@pytest.mark.parametrize("heads", [1, 2, 3, 6])
def test_heads_read_their_own_units(heads: int, device: torch.device) -> None:
    cell, values = cells.SLSTM(heads), _randn(R, D, device=device)
    weights, state = random_weights(cell, D, 6, device=device), _state(cell, device, 6)
    masks = torch.rand(R, 6, dtype=torch.float64, device=device)
    _, new = _step(cell, weights, values, state, masks)
    _assert_same(
        new, _naive("slstm", weights, values, state, masks), [values, *state, *_given(weights)]
    )


@pytest.mark.parametrize("name", [name for name in CELLS if name not in READ_STATE])
def test_cells_whose_weights_read_no_state(name: str, device: torch.device) -> None:
    """Their new state is linear in the old one: no weight meets it."""
    cell, weights, values, state = _drawn(name, device)
    steps = [
        _step(cell, weights, values, tuple(scale * part for part in state))[1]
        for scale in (0.0, 1.0, 2.0)
    ]
    for zero, one, two in zip(*steps, strict=True):
        torch.testing.assert_close(two - one, one - zero, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", CELLS)
def test_a_gates_bias_moves_that_gate(name: str, device: torch.device) -> None:
    """What ``block`` names is what ``prepare`` adds: seen by the columns that a bias changes."""
    cell = CELLS[name]
    values, offsets = _randn(R, D, device=device), torch.tensor([0, R], device=device)
    for gate in cell.gates[1:] if name == "sru" else cell.gates:
        weights = random_weights(cell, D, H, device=device)
        field = cell.weights_type._fields[list(cell.shapes(D, H)).index("bias_ih")]
        before = cell.prepare(weights, values, offsets)
        with torch.no_grad():
            getattr(weights, field)[cell.block("bias_ih", gate, H)] += 1
        moved = (cell.prepare(weights, values, offsets) - before).abs().sum(0).nonzero().flatten()
        assert moved.tolist() == list(range(before.shape[1])[cell.block("weight_ih", gate, H)])


@pytest.mark.parametrize(
    ("name", "parameter", "low", "high"),
    [
        *((name, "weight_ih", -1 / 8, 1 / 8) for name in CELLS),
        ("lstm", "bias_hh", -1 / 8, 1 / 8),
        ("indrnn_tanh", "weight_hh", 0.0, 1.0),
        ("grud", "weight_dh", 0.0, 1 / 8),
        ("layernorm_lstm", "gain_ih", 1.0, 1.0),
        ("layernorm_gru", "bias_ih", 0.0, 0.0),
        ("grud", "bias_dh", 0.0, 0.0),
    ],
)
def test_initial_weights_are_uniform_or_constant(
    name: str, parameter: str, low: float, high: float
) -> None:
    tensor = torch.full(CELLS[name].shapes(D, 64)[parameter], torch.nan)  # type: ignore[arg-type]
    CELLS[name].initialise(parameter, tensor, 64)
    assert low <= float(tensor.min()) <= low + 0.19 * (high - low)
    assert high - 0.19 * (high - low) <= float(tensor.max()) <= high


def test_sru_lets_the_input_past_it(device: torch.device) -> None:
    """Where the sizes agree it is the input itself, else a product with it."""
    cell = CELLS["sru"]
    assert cell.shapes(H, H)["weight_skip"] is None
    assert cell.shapes(D, H)["weight_skip"] == (H, D)
    for size in (D, H):
        weights, values = (
            random_weights(cell, size, H, device=device),
            _randn(R, size, device=device),
        )
        shut = weights._replace(
            bias=torch.cat([torch.zeros(H), torch.full((H,), -1e4)]).double().to(device)
        )
        output, _ = _step(cell, shut, values, _state(cell, device))
        torch.testing.assert_close(
            output, values if size == H else values @ weights.skip.t(), rtol=0, atol=1e-14
        )
