"""The state that goes from chunk to chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from batches import numbered, random_batch
from every_layer import parts
from own_cells import Listed
from raglane.data.order.tbptt import TBPTTSampler
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.native import missing_kernels
from raglane.nn.recurrent.carry import carried

LENGTHS = [7, 0, 1, 12, 3, 0, 30, 1, 5, 2]


def run_in_chunks(
    layer: Any, data: rl.Ragged, batch_size: int, steps: int
) -> tuple[rl.Ragged, tuple[Tensor, ...]]:
    """Outputs and final states of all sequences, as if they had been run whole."""
    outputs: list[list[Tensor]] = [[] for _ in range(len(data))]
    finals: list[tuple[Tensor, ...]] = [()] * len(data)
    state = None
    for chunk in TBPTTSampler(data, batch_size, steps, seed=2):
        out, state = layer(chunk.inputs, state, begins=chunk.begins)
        for row, (sequence, ends) in enumerate(
            zip(chunk.sequences.tolist(), chunk.ends.tolist(), strict=True)
        ):
            if sequence >= 0:
                outputs[sequence].append(out[row])
            if ends:
                finals[sequence] = tuple(part[:, row] for part in parts(state))
    return (
        rl.Ragged([torch.cat(pieces) for pieces in outputs]),
        tuple(torch.stack(rows, 1) for rows in zip(*finals, strict=True)),
    )


@pytest.mark.skipif(bool(missing_kernels()), reason="the cpu kernels are not built")
@pytest.mark.parametrize("steps", [1, 3, 8, 40])
@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_in_chunks_the_cpu_kernels_give_the_bits_of_the_whole(
    kind: str, steps: int, batch_size: int, device: torch.device
) -> None:
    with torch.device("cpu"):
        layer = getattr(rl.nn, kind)(3, 17, num_layers=2, backend="cpu")
        data = random_batch([*LENGTHS, *torch.randint(0, 20, (5,)).tolist()], dtype=torch.float32)
        out, final = layer(data)
        found, found_final = run_in_chunks(layer, data, batch_size, steps)
    assert torch.equal(found.values, out.values)
    assert all(torch.equal(*pair) for pair in zip(found_final, parts(final), strict=True))


class FirstElement(nn.Module):
    """An initial state computed from the first element."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4, dtype=torch.float64)

    def forward(self, batch: rl.Ragged) -> Tensor:
        return self.linear(batch.first()).unsqueeze(0)


def learned_lstm() -> rl.nn.LSTM:
    layer = rl.nn.LSTM(3, 4, num_layers=2, initial_state="learned", dtype=torch.float64)
    for part in "hc":
        nn.init.normal_(layer.get_parameter(f"initial_{part}"))
    return layer


MAKERS: dict[str, Callable[[], Any]] = {
    "LSTM with projections": lambda: rl.nn.LSTM(
        3, 6, num_layers=2, proj_size=4, dtype=torch.float64
    ),
    "learned LSTM": learned_lstm,
    "GRU of the first element": lambda: rl.nn.GRU(
        3, 4, initial_state=FirstElement(), dtype=torch.float64
    ),
    "MinGRU": lambda: rl.nn.MinGRU(3, 4, num_layers=2, dtype=torch.float64),
    "own cell": lambda: rl.nn.Recurrent(Listed(3, 4)),
}


@pytest.mark.parametrize("steps", [1, 4, 40])
@pytest.mark.parametrize("name", list(MAKERS))
def test_in_chunks_every_layer_gives_what_it_gives_whole(name: str, steps: int) -> None:
    layer = MAKERS[name]()
    layer.backend = "reference"
    data = random_batch(LENGTHS)
    out, final = layer(data)
    found, found_final = run_in_chunks(layer, data, 3, steps)
    torch.testing.assert_close(found.values, out.values, rtol=0, atol=1e-12)
    torch.testing.assert_close(found_final, parts(final), rtol=0, atol=1e-12)


@pytest.mark.parametrize("steps", [1, 4, 40])
def test_gradients_stop_at_the_border_of_chunks(steps: int) -> None:
    data, weights = random_batch(LENGTHS), random_batch(LENGTHS, 4)
    layer = learned_lstm()
    state = None
    for chunk in TBPTTSampler(data, 3, steps, targets=weights):
        assert isinstance(chunk.targets, rl.Ragged)
        out, state = layer(chunk.inputs, state, begins=chunk.begins)
        (out * chunk.targets).values.sum().backward()

    # The same sequences one by one, through torch's layer.
    plain = nn.LSTM(3, 4, num_layers=2, batch_first=True, dtype=torch.float64)
    plain.load_state_dict(
        {name: value for name, value in layer.state_dict().items() if "initial" not in name}
    )
    learned = [
        layer.get_parameter(f"initial_{part}").detach().clone().requires_grad_() for part in "hc"
    ]
    for sequence, weight in zip(data, weights, strict=True):
        hx = tuple(part.unsqueeze(1) for part in learned)
        for piece, part in zip(sequence.split(steps), weight.split(steps), strict=True):
            if len(piece) > 0:
                out, (h, c) = plain(piece.unsqueeze(0), hx)
                (out * part).sum().backward()
                hx = h.detach(), c.detach()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(layer.get_parameter(name).grad, parameter.grad)
    for part, name in zip(learned, "hc", strict=True):
        torch.testing.assert_close(layer.get_parameter(f"initial_{name}").grad, part.grad)


def test_earlier_contents_of_a_row_are_not_read() -> None:
    layer = rl.nn.GRU(3, 4)
    chunk = random_batch([2, 2, 0, 0], dtype=torch.float32)
    old = torch.full((1, 4, 4), torch.nan)
    old[0, 1] = 1
    hx = carried(layer, chunk, old, torch.tensor([True, False, True, False]))
    assert torch.equal(hx[0, :3], torch.tensor([0.0, 1.0, 0.0]).unsqueeze(1).expand(3, 4))
    out, _ = layer(chunk, hx)
    assert out.values.isfinite().all()


def test_the_first_chunk_needs_no_state_and_a_later_one_does() -> None:
    layer = rl.nn.LSTM(3, 4, initial_state="learned")
    chunk = random_batch([2, 0], dtype=torch.float32)
    h, c = carried(layer, chunk, None, torch.tensor([True, False]))
    assert torch.equal(h.detach().add_(0), torch.zeros(1, 2, 4))  # not a view of the parameter
    assert torch.equal(c, h)
    with pytest.raises(
        ArgumentError, match=r"hx must be .*got None, and row 0 that does not begin"
    ):
        layer(chunk, begins=torch.tensor([False, False]))


@torch.no_grad()
def test_a_compiled_model_carries_without_a_break() -> None:
    layer = rl.nn.GRU(3, 4)

    def model(chunk: rl.Ragged, state: Any, begins: Tensor) -> Any:
        return layer(chunk, state, begins=begins)

    compiled = torch.compile(model, backend="eager", fullgraph=True)
    states: list[Any] = [None, None]
    for chunk in TBPTTSampler(random_batch(LENGTHS, dtype=torch.float32), 3, 4):
        outputs = []
        for number, run in enumerate((model, compiled)):
            out, states[number] = run(chunk.inputs, states[number], chunk.begins)
            outputs.append(out.values)
        torch.testing.assert_close(*outputs)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            {"layer": rl.nn.GRU(3, 4, bidirectional=True)},
            ArgumentTypeError,
            "begins must be None.*got a tensor, for a bidirectional",
        ),
        ({"input": torch.ones(2, 5, 3)}, ArgumentTypeError, "input must be .*got a Tensor"),
        ({"input": numbered([1, 2])}, ShapeError, "input must be .*input_size = 3"),
        ({"hx": torch.zeros(1, 3, 4)}, ShapeError, r"hx \(h\) must be .*got shape \(1, 3, 4\)"),
        ({"hx": (torch.zeros(1, 2, 4),) * 2}, ArgumentTypeError, "hx must be .*got a tuple"),
        ({"begins": torch.ones(2)}, ArgumentTypeError, "begins must be .*got torch.float32"),
        (
            {"begins": torch.ones(3, dtype=torch.bool)},
            ShapeError,
            r"begins must be .*got shape \(3,\)",
        ),
    ],
)
def test_states_that_cannot_be_carried(
    change: dict[str, Any], error: type[Exception], words: str
) -> None:
    arguments: dict[str, Any] = {
        "input": rl.Ragged([torch.ones(2, 3), torch.ones(1, 3)]),
        "hx": torch.zeros(1, 2, 4),
        "begins": torch.tensor([True, False]),
    }
    layer = change.get("layer", rl.nn.GRU(3, 4))
    arguments |= {name: value for name, value in change.items() if name != "layer"}
    with pytest.raises(error, match=words):
        layer(**arguments)
