"""Cells: one step against PyTorch's own cells and against formulas written a second time, in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cell_requests import possible, random_weights
from looped import looped
from naive_cells import NAIVE_STEPS, naive_step
from raglane import cells
from raglane.cells import CELLS, CellSpec, Weights
from raglane.cells.elementwise import ElementwiseWeights, seen
from raglane.cells.spec import bounded, masked, summed_bias

D, H, P, R = 3, 5, 2, 4

# What PyTorch calls the cells that it has.
TORCH_CELLS: dict[str, Any] = {
    "rnn_tanh": lambda **options: nn.RNNCell(D, H, nonlinearity="tanh", **options),
    "rnn_relu": lambda **options: nn.RNNCell(D, H, nonlinearity="relu", **options),
    "lstm": lambda **options: nn.LSTMCell(D, H, **options),
    "gru": lambda **options: nn.GRUCell(D, H, **options),
}
READ_STATE = [name for name, cell in CELLS.items() if cell.reads_state]


def _step(
    cell: CellSpec, weights: Any, values: Tensor, state: tuple[Tensor, ...], mask: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    offsets = torch.tensor([0, 1, values.shape[0]], device=values.device)
    return cell.step(weights, cell.prepare(weights, values, offsets), state, mask)


def _randn(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device=device, requires_grad=True)


def _state(cell: CellSpec, device: torch.device, rows: int = R) -> tuple[Tensor, ...]:
    parts = possible(cell, [_randn(rows, size, device=device).detach() for size in cell.state_sizes(H)])
    return tuple(part.requires_grad_() for part in parts)


def _given(weights: Any) -> list[Tensor]:
    return [part for part in weights if part is not None]


def _assert_same(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], leaves: list[Tensor]) -> None:
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
    name: str, weights: Any, values: Tensor, state: tuple[Tensor, ...], masks: Tensor | None = None, clip: Any = None
) -> tuple[Tensor, ...]:
    rows = [
        naive_step(name, weights, x_t, tuple(before), None if masks is None else masks[row], clip)
        for row, (x_t, *before) in enumerate(zip(values, *state, strict=True))
    ]
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


# -- the equations ----------------------------------------------------------------------------------------------------


def test_every_cell_is_compared() -> None:
    assert set(NAIVE_STEPS) == set(CELLS)
    assert set(TORCH_CELLS) <= set(CELLS)
    assert all(cell.name == name for name, cell in CELLS.items())


@looped("bias", [True, False])
@looped("name", CELLS)
def test_step_is_the_papers(name: str, bias: bool, device: torch.device) -> None:
    cell = CELLS[name]
    weights, values, state = random_weights(cell, D, H, bias, device=device), _randn(R, D, device=device), None
    state = _state(cell, device)
    output, new = _step(cell, weights, values, state)
    assert torch.equal(output, new[0])
    _assert_same(new, _naive(name, weights, values, state), [values, *state, *_given(weights)])


@looped("bias", [True, False])
@looped("name", TORCH_CELLS)
def test_step_is_torchs(name: str, bias: bool, device: torch.device) -> None:
    cell = CELLS[name]
    module = TORCH_CELLS[name](bias=bias, device=device, dtype=torch.float64)
    weights = Weights(*(getattr(module, part) for part in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")))
    values, state = _randn(R, D, device=device), _state(cell, device)
    output, new = _step(cell, weights, values, state)
    wanted = module(values, state if len(state) > 1 else state[0])
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    assert torch.equal(output, new[0])
    _assert_same(new, wanted, [values, *state, *module.parameters()])
    _assert_same(_naive(name, weights, values, state), wanted, [values, *state, *module.parameters()])


def test_lstm_with_projection_is_torchs(device: torch.device) -> None:
    module: Any = nn.LSTM(D, H, proj_size=P, device=device, dtype=torch.float64)
    weights = Weights(
        module.weight_ih_l0, module.weight_hh_l0, module.bias_ih_l0, module.bias_hh_l0, module.weight_hr_l0
    )
    cell = CELLS["lstm"]
    assert cell.state_sizes(H, P) == (P, H)
    values = _randn(R, D, device=device)
    state = tuple(_randn(R, size, device=device) for size in (P, H))
    output, new = _step(cell, weights, values, state)
    wanted, final = module(values.unsqueeze(0), tuple(part.unsqueeze(0) for part in state))
    assert torch.equal(output, new[0])
    torch.testing.assert_close(output, wanted[0], rtol=1e-13, atol=1e-13)
    final = tuple(part[0] for part in final)
    _assert_same(new, final, [values, *state, *module.parameters()])
    _assert_same(_naive("lstm", weights, values, state), final, [values, *state, *module.parameters()])


@looped("clip", [0.3, 1.0])
@looped(
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
    weights, values, state = (
        random_weights(cell, D, H, device=device),
        _randn(R, D, device=device),
        _state(cell, device),
    )
    _, new = _step(cell, weights, values, state)
    _assert_same(new, _naive(name, weights, values, state, clip=clip), [values, *state, *_given(weights)])
    assert not torch.allclose(new[0], _step(CELLS[name], weights, values, state)[0])


# -- dropout's mask ---------------------------------------------------------------------------------------------------


@looped("name", READ_STATE)
def test_a_mask_acts_where_weights_read_the_state(name: str, device: torch.device) -> None:
    cell = CELLS[name]
    weights, values, state = (
        random_weights(cell, D, H, device=device),
        _randn(R, D, device=device),
        _state(cell, device),
    )
    masks = torch.tensor(
        [[0.0, 2.0, 0.0, 1.0, 0.5], [1.0] * H, [0.0] * H, [3.0, 1.0, 1.0, 1.0, 1.0]], device=device
    ).double()
    _, new = _step(cell, weights, values, state, masks)
    _assert_same(new, _naive(name, weights, values, state, masks), [values, *state, *_given(weights)])
    _, plain = _step(cell, weights, values, state)
    assert torch.equal(new[0][1], plain[0][1])
    # As a whole, for a relu may have closed all that a mask changes in one row.
    assert not torch.allclose(new[0][[0, 2, 3]], plain[0][[0, 2, 3]])


@looped("name", [name for name in CELLS if name not in READ_STATE])
def test_cells_whose_weights_read_no_state(name: str, device: torch.device) -> None:
    """Their new state is linear in the old one: no weight meets it."""
    cell = CELLS[name]
    weights, values, state = (
        random_weights(cell, D, H, device=device),
        _randn(R, D, device=device),
        _state(cell, device),
    )
    steps = [_step(cell, weights, values, tuple(scale * part for part in state))[1] for scale in (0.0, 1.0, 2.0)]
    for zero, one, two in zip(*steps, strict=True):
        torch.testing.assert_close(two - one, one - zero, rtol=0, atol=1e-14)


# -- what holds for every step ----------------------------------------------------------------------------------------


@looped("bias", [True, False])
@looped("name", CELLS)
def test_sizes_and_names(name: str, bias: bool) -> None:
    cell = CELLS[name]
    assert cell.state_sizes(H) == (H,) * len(cell.states)
    assert cell.states[0] == "h"
    assert len(set(cell.gates)) == len(cell.gates)
    shapes = cell.shapes(D, H, bias)
    # Of a channel's three columns a GRU-D multiplies two by these weights.
    assert shapes["weight_ih"] == (len(cell.gates) * H, D - (name == "grud"))
    assert len(shapes) == len(cell.weights_type._fields) - (cell.weights_type is Weights)  # that of a projection
    assert all((shape is None) or bias for name, shape in shapes.items() if name.startswith("bias"))
    assert list(shapes) == list(cell.above().shapes(H, H, not bias))  # the names depend on nothing
    prepared = cell.prepare(random_weights(cell, D, H, bias), torch.zeros(R, D).double(), torch.tensor([0, R]))
    assert prepared.shape[0] == R


@looped("name", CELLS)
def test_blocks_are_the_rows_of_a_gate(name: str) -> None:
    """The gates' blocks are of H rows each, one after the other, without a gap."""
    cell = CELLS[name]
    shapes = cell.shapes(D, H)
    blocks = [cell.block("weight_ih", gate, H) for gate in cell.gates]
    assert [row for block in blocks for row in range(block.start, block.stop)] == list(range(len(cell.gates) * H))
    # SRU's candidate has no bias.
    biased = cell.gates[1:] if name == "sru" else cell.gates
    rows = [row for gate in biased for row in range(H * len(cell.gates))[cell.block("bias_ih", gate, H)]]
    assert shapes["bias_ih"] == (len(rows),)
    assert rows == list(range(len(rows)))


@looped("name", CELLS)
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


@looped("name", CELLS)
def test_initial_weights(name: str) -> None:
    cell, size = CELLS[name], 64
    for parameter, shape in cell.shapes(D, size).items():
        if shape is None:
            continue
        tensor = torch.full(shape, torch.nan)
        cell.initialise(parameter, tensor, size)
        if name.startswith("layernorm") and not parameter.startswith("weight"):
            assert torch.equal(tensor, torch.full(shape, 1.0 if parameter.startswith("gain") else 0.0))
            continue
        if parameter in ("bias_dx", "bias_dh") or (name == "slstm" and parameter == "bias_ih"):
            spread = torch.linspace(3, 6, size) if name == "slstm" else torch.zeros(0)
            assert torch.equal(tensor[tensor != 0], spread)
            continue
        low, high = (0.0, 1.0) if name.startswith("indrnn") and parameter == "weight_hh" else (-1 / 8, 1 / 8)
        low, high = (0.0, high) if parameter == "weight_dh" else (low, high)
        if parameter == "weight_dx":
            assert 0 <= float(tensor) <= high
            continue
        assert low <= float(tensor.min()) < low + 0.2 * (high - low)
        assert high - 0.2 * (high - low) < float(tensor.max()) <= high


@looped("name", CELLS)
def test_a_step_changes_nothing_it_was_given(name: str, device: torch.device) -> None:
    cell = CELLS[name]
    weights, state = random_weights(cell, D, H, device=device), _state(cell, device)
    values, mask = _randn(R, D, device=device), _randn(R, H, device=device) if cell.reads_state else None
    given = [values, *state, *_given(weights), *([] if mask is None else [mask])]
    before = [part.detach().clone() for part in given]
    prepared = cell.prepare(weights, values, torch.tensor([0, R], device=device))
    kept = prepared.detach().clone()
    with torch.no_grad():
        cell.step(weights, prepared, state, mask)
    assert all(torch.equal(a, b) for a, b in zip([*before, kept], [*given, prepared], strict=True))


@looped("name", CELLS)
def test_a_step_of_no_rows(name: str, device: torch.device) -> None:
    cell = CELLS[name]
    weights, state = random_weights(cell, D, H, device=device), _state(cell, device, rows=0)
    prepared = cell.prepare(weights, _randn(0, D, device=device), torch.tensor([0], device=device))
    output, new = cell.step(weights, prepared, state)
    assert output.shape == (0, H)
    assert [part.shape for part in new] == [part.shape for part in state]
    gradients = torch.autograd.grad(new, _given(weights), new, allow_unused=True)
    assert all(gradient is None or not gradient.any() for gradient in gradients)


@looped("poison", [torch.nan, torch.inf])
@looped("name", CELLS)
def test_rows_do_not_look_at_each_other(name: str, poison: float, device: torch.device) -> None:
    cell = CELLS[name]
    weights, values, state = (
        random_weights(cell, D, H, device=device),
        _randn(R, D, device=device),
        _state(cell, device),
    )
    clean, _ = _step(cell, weights, values, state)
    with torch.no_grad():
        values[1] = torch.nan
        for part in state:
            part[1] = poison
    dirty, _ = _step(cell, weights, values, state)
    others = [0, 2, 3]
    torch.testing.assert_close(dirty[others], clean[others], rtol=0, atol=1e-14)
    for gradient in torch.autograd.grad(dirty[others].sum(), [values, *state], allow_unused=True):
        assert gradient is None or bool(gradient[others].isfinite().all())


@looped("name", CELLS)
@looped("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_stays_itself(name: str, dtype: torch.dtype, device: torch.device) -> None:
    cell = CELLS[name]
    weights = random_weights(cell, D, H, dtype=dtype, device=device)
    values = torch.randn(R, D, device=device).to(dtype)
    state = tuple(part.detach().to(dtype) for part in _state(cell, device))
    output, new = _step(cell, weights, values, state)
    assert {output.dtype, *(part.dtype for part in new)} == {dtype}
    precise = type(weights)(*(None if part is None else part.double() for part in weights))
    exact, _ = _step(cell, precise, values.double(), tuple(part.double() for part in state))
    tolerance = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), exact, rtol=tolerance, atol=tolerance)


@looped("name", CELLS)
def test_gradients_are_the_limits_of_differences(name: str, device: torch.device) -> None:
    cell = CELLS[name]
    weights, values, state = (
        random_weights(cell, D, H, device=device),
        _randn(R, D, device=device),
        _state(cell, device),
    )
    present = [part is not None for part in weights]

    def function(values: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        parts = iter(rest[len(state) :])
        again = type(weights)(*(next(parts) if is_given else None for is_given in present))
        return _step(cell, again, values, rest[: len(state)])[1]

    inputs = (values, *state, *_given(weights))
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


# -- single cells -----------------------------------------------------------------------------------------------------


def test_sru_lets_the_input_past_it(device: torch.device) -> None:
    """Where the sizes agree it is the input itself, else a product with it."""
    cell = CELLS["sru"]
    assert cell.shapes(H, H)["weight_skip"] is None
    assert cell.shapes(D, H)["weight_skip"] == (H, D)
    for size in (D, H):
        weights, values = random_weights(cell, size, H, device=device), _randn(R, size, device=device)
        shut = weights._replace(bias=torch.cat([torch.zeros(H), torch.full((H,), -1e4)]).double().to(device))
        output, _ = _step(cell, shut, values, _state(cell, device))
        wanted = values if size == H else values @ weights.skip.t()
        torch.testing.assert_close(output, wanted, rtol=0, atol=1e-14)


def test_summed_bias() -> None:
    one, two = torch.tensor([1.0]), torch.tensor([2.0])
    assert summed_bias(None, None) is None
    assert summed_bias(one, None) is one
    assert summed_bias(None, two) is two
    both = summed_bias(one, two)
    assert both is not None
    assert both.tolist() == [3.0]


def test_what_weights_read() -> None:
    state, mask = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 3.0]])
    assert masked(state, None) is state
    assert masked(state, mask).tolist() == [[0.0, 6.0]]
    weights = ElementwiseWeights(torch.zeros(4, 1), torch.tensor([1.0, 10.0, 100.0, 1000.0]))
    assert seen(weights, state, mask).tolist() == [[0.0, 60.0, 0.0, 6000.0]]
    assert bounded(state, None) is state
    assert bounded(-state, 1.5).tolist() == [[-1.0, -1.5]]
