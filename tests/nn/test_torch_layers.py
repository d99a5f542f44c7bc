"""RNN, LSTM and GRU compared with torch's layers, which run one sequence at a time without padding
or packing.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import (
    PAIRS,
    D,
    H,
    a_batch,
    a_state,
    assert_nan_stays_in_its_sequence,
    assert_same,
    assert_same_for_every_input,
    gradients,
    parts,
    results_of,
)
from raglane.nn.recurrent.stack import one_or_tuple
from strategies import sequences_of

KINDS: list[dict[str, Any]] = [
    {"kind": "RNN", "nonlinearity": "tanh"},
    {"kind": "RNN", "nonlinearity": "relu"},
    {"kind": "GRU"},
    {"kind": "LSTM"},
    {"kind": "LSTM", "proj_size": 3},
]
ARGUMENTS = [
    {**kind, "num_layers": layers, "bias": bias, "bidirectional": both}
    for kind, layers, bias, both in itertools.product(KINDS, (1, 2), (True, False), (False, True))
]
DEEP = [arguments for arguments in ARGUMENTS if arguments["num_layers"] == 2 and arguments["bias"]]
LENGTHS = [4, 0, 1, 7, 4, 2]
HERE = sorted({backend for _, backend in PAIRS})


def name_of(arguments: Any) -> str:
    return "-".join(f"{key}={value}" for key, value in arguments.items())


def pair_of_layers(
    arguments: dict[str, Any], dtype: torch.dtype = torch.float64, **ours: Any
) -> tuple[Any, Any]:
    """Build torch's layer and ours with the same weights."""
    options = {"dtype": dtype, **{key: value for key, value in arguments.items() if key != "kind"}}
    first = ours.pop("batch_first", False)
    theirs = getattr(nn, arguments["kind"])(D, H, batch_first=first, **options)
    mine = getattr(rl.nn, arguments["kind"])(D, H, batch_first=first, **options, **ours)
    mine.load_state_dict(theirs.state_dict())
    return theirs, mine


def one_by_one(layer: nn.RNNBase, sequences: list[Tensor], hx: Any) -> list[Tensor]:
    """Run torch's layer on each sequence: the outputs ``(N, K * size)``, and the states ``(L * K,
    B, size)``.
    """
    size = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
    outputs, finals = [], []
    for row, sequence in enumerate(sequences):
        own = tuple(part[:, row : row + 1].contiguous() for part in parts(hx))
        out, state = sequence.new_zeros((0, 1, size)), own
        if len(sequence):
            out, state = layer(sequence.unsqueeze(1), one_or_tuple(own))
        outputs.append(out.squeeze(1))
        finals.append(parts(state))
    return [torch.cat(outputs), *(torch.cat(columns, 1) for columns in zip(*finals, strict=True))]


def compare(
    arguments: dict[str, Any], lengths: list[int], dtype: torch.dtype = torch.float64, **ours: Any
) -> None:
    """Compare outputs, states and all gradients of a batch with those of one sequence at a time."""
    theirs, mine = pair_of_layers(arguments, dtype, **ours)
    sequences = sequences_of(lengths, (D,), dtype, requires_grad=True)
    hx = one_or_tuple(
        tuple(
            part.detach().to(dtype).requires_grad_() for part in parts(a_state(mine, len(lengths)))
        )
    )
    results, expected = (
        results_of(mine(rl.Ragged(sequences), hx)),
        one_by_one(theirs, sequences, hx),
    )
    tolerance = 1e-5 if dtype is torch.float32 else 1e-12
    assert_same(results, expected, tolerance, "result")
    found = gradients(results, [*sequences, *parts(hx), *mine.parameters()])
    assert_same(
        found,
        gradients(expected, [*sequences, *parts(hx), *theirs.parameters()]),
        tolerance,
        "gradient",
    )


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=name_of)
def test_ragged_equals_one_by_one(arguments: dict[str, Any]) -> None:
    compare(arguments, LENGTHS, torch.float64 if arguments["bias"] else torch.float32)


# torch.compile reads every tensor's .grad and suppresses the warning, unless it is an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_compiled_under_a_default_device() -> None:
    layer = rl.nn.GRU(5, 4, backend="torch")
    compiled: Any = torch.compile(layer, backend="eager", dynamic=True)
    with torch.device(torch.get_default_device()):
        for lengths in ([3, 2], [4, 1, 2]):
            batch = rl.Ragged(sequences_of(lengths, (5,), torch.float32))
            assert_same(results_of(compiled(batch)), results_of(layer(batch)), 1e-6)


@pytest.mark.parametrize(("schedule", "backend"), PAIRS)
@pytest.mark.parametrize("arguments", DEEP, ids=name_of)
def test_every_schedule_and_backend(arguments: dict[str, Any], schedule: str, backend: str) -> None:
    compare(arguments, LENGTHS, schedule=schedule, backend=backend)


def test_a_batch_without_elements_has_gradients_of_zero() -> None:
    layer = rl.nn.LSTM(5, 4, backend="torch")
    out, (h, _) = layer(rl.Ragged([torch.empty(0, 5)]))
    (out.values.sum() + h.sum()).backward()
    assert all(p.grad is not None and not p.grad.any() for p in layer.parameters())


@pytest.mark.parametrize(
    ("backend", "first"), [("auto", True), ("torch", False), ("reference", True)]
)
@pytest.mark.parametrize("kind", KINDS, ids=name_of)
def test_like_in_like_out(kind: dict[str, Any], first: bool, backend: str) -> None:
    _, layer = pair_of_layers(
        {**kind, "num_layers": 2, "bidirectional": True}, batch_first=first, backend=backend
    )
    assert_same_for_every_input(layer, a_state(layer, 3))
    assert_same_for_every_input(layer)


@pytest.mark.parametrize(
    ("chosen", "first"), [("auto", False), ("auto", True), ("reference", True)]
)
@pytest.mark.parametrize("arguments", DEEP, ids=name_of)
def test_a_tensor_without_lengths_is_torchs(
    arguments: dict[str, Any], first: bool, chosen: str, device: torch.device
) -> None:
    theirs, mine = pair_of_layers(arguments, batch_first=first, backend=chosen)
    inputs = torch.randn(3, 6, D, dtype=torch.float64)
    results = results_of(mine(inputs))
    assert_same(results, results_of(theirs(inputs)))
    # As torch's, because callers take views of it; cuDNN's outputs with batch_first are transposed
    # ones.
    assert results[0].is_contiguous() or (first and device.type == "cuda")


@pytest.mark.parametrize(("schedule", "backend"), PAIRS)
def test_a_nan_stays_in_its_sequence(schedule: str, backend: str) -> None:
    options: dict[str, Any] = {"schedule": schedule, "backend": backend, "dtype": torch.float64}
    assert_nan_stays_in_its_sequence(rl.nn.LSTM(D, H, 2, bidirectional=True, **options))


@pytest.mark.parametrize("kind", ["RNN", "LSTM", "GRU"])
def test_weights_are_torchs(kind: str) -> None:
    """The same names, in the same order, and the same numbers after the same seed."""
    torch.manual_seed(3)
    theirs = getattr(nn, kind)(5, 4, 2)
    torch.manual_seed(3)
    mine = getattr(rl.nn, kind)(5, 4, 2)
    assert isinstance(mine, nn.RNNBase)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert_same(list(mine.parameters()), list(theirs.parameters()), 0.0)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("kind", ["GRU", "LSTM"])
def test_a_pack_on_every_backend(kind: str, backend: str) -> None:
    """A pack contains empty sequences only in its order, which torch's kernels do not read."""
    layer = getattr(rl.nn, kind)(D, H, 2, bidirectional=True, backend=backend, dtype=torch.float64)
    for counts in ([1, 3, 2], [3, 0, 2], [0, 0, 4, 0], [0, 1, 1]):
        batch = a_batch(counts)
        for state in (None, a_state(layer, len(counts))):
            out, final = layer(batch.to_packed(), state)
            with rl.use_backend(backend="reference", schedule="each"):
                wanted = results_of(layer(batch, state))
            assert_same([rl.Ragged.from_packed(out).values, *parts(final)], wanted)
