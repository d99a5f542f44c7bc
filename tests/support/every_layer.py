"""Every recurrent layer, small and in float64, with comparisons for the tests of all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from cell_requests import possible
from naive_cells import naive_network
from raglane.cells import CELLS
from raglane.errors import DispatchError
from raglane.kernels.contract import Request, Result
from raglane.kernels.cpu.backend import run_layer
from raglane.kernels.dispatch import BACKENDS
from raglane.native import missing_kernels
from raglane.nn.recurrent.stack import one_or_tuple
from raglane.schedules import SCHEDULES

D, H = 3, 4
LENGTHS = [3, 0, 1, 5, 2]


class Kind(NamedTuple):
    """A layer's class, the key of its cell in CELLS, and the options that select the cell."""

    layer: str
    cell: str
    options: dict[str, Any] = {}  # noqa: RUF012

    def __str__(self) -> str:
        return self.cell


KINDS = [
    Kind("RNN", "rnn_tanh"),
    Kind("RNN", "rnn_relu", {"nonlinearity": "relu"}),
    Kind("LSTM", "lstm"),
    Kind("PeepholeLSTM", "peephole_lstm"),
    Kind("CoupledLSTM", "coupled_lstm"),
    Kind("LayerNormLSTM", "layernorm_lstm"),
    Kind("GRU", "gru"),
    Kind("GRU", "gru_reset_before", {"reset_after": False}),
    Kind("LayerNormGRU", "layernorm_gru"),
    Kind("SLSTM", "slstm"),
    Kind("GRUD", "grud"),
    Kind("CfC", "cfc"),
    Kind("IndRNN", "indrnn_relu"),
    Kind("IndRNN", "indrnn_tanh", {"nonlinearity": "tanh"}),
    Kind("SRU", "sru"),
    Kind("QRNN", "qrnn"),
    Kind("MinGRU", "mingru"),
    Kind("MinLSTM", "minlstm"),
]
GATED = [
    kind for kind in KINDS if kind.layer in ("RNN", "LSTM", "PeepholeLSTM", "CoupledLSTM", "GRU")
]
"""The layers that support ``clip``."""

LAYERS = {
    **{kind.cell: kind for kind in KINDS},
    "lstm projected": Kind("LSTM", "lstm", {"proj_size": 2}),
}
"""All kinds by cell, and an LSTM whose two states differ in size."""

PAIRS = [
    (schedule, name)
    for name, backend in BACKENDS.items()
    for schedule in backend.schedules
    if name != "triton" and (name != "cpu" or missing_kernels() is None)
]
"""Every schedule with every available backend that computes in float64; a backend may still refuse
a cell."""


def build(kind: Kind | str, *args: Any, units: int = H, **options: Any) -> Any:
    """Build a layer of a kind, or of a name in ``LAYERS``, in float64, with 3 features and 4
    units.
    """
    kind = LAYERS[kind] if isinstance(kind, str) else kind
    return getattr(rl.nn, kind.layer)(
        D, units, *args, **{"dtype": torch.float64, **kind.options, **options}
    )


READING = [name for name in LAYERS if build(name).cell.reads_state]
"""The layers that multiply the state by weights."""

# Regularisation of every layer and of those in READING; each kind alone.
_ZONEOUT: dict[str, Any] = {"input_dropout": 0.3, "zoneout": 0.4}
READ: dict[str, Any] = {"state_dropout": 0.3, "weight_dropout": 0.2}
SINGLE: list[dict[str, Any]] = [
    {"input_dropout": 0.4},
    {"state_dropout": 0.4},
    {"weight_dropout": 0.4},
    {"zoneout": 0.4},
    {"weight_dropout": 0.4, "dropout": 0.3},
]


def regularisation_of(name: str, **others: Any) -> dict[str, Any]:
    """Return all kinds of regularisation that a layer supports."""
    return {**_ZONEOUT, **(READ if name in READING else {}), **others}


def a_batch(lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.float64) -> rl.Ragged:
    """Return a batch of random values that require gradients."""
    values = torch.randn(sum(lengths), D, dtype=torch.float64).to(dtype)
    return rl.Ragged.from_flat(values.requires_grad_(), lengths=list(lengths))


def a_state(layer: Any, count: int) -> Any:
    """Return a random initial state that requires gradients."""
    rows, sizes = layer.num_layers * (2 if layer.bidirectional else 1), layer.state_sizes
    made = [torch.randn(rows, count, size, dtype=torch.float64) for size in sizes]
    return one_or_tuple(tuple(part.requires_grad_() for part in possible(layer.cell, made)))


def parts(state: Any) -> tuple[Any, ...]:
    """Return a state, or its history, as a tuple, also if it has one part."""
    return tuple(state) if isinstance(state, tuple | list) else (state,)


def results_of(answer: Any) -> list[Tensor]:
    """Return all tensors of a layer's result: outputs, final states, and states of every step."""
    output, state, *states = answer
    histories = [part.values for layer in (states[0] if states else []) for part in parts(layer)]
    values = [] if output is None else [output.values if isinstance(output, rl.Ragged) else output]
    return [*values, *parts(state), *histories]


def slopes(result: Tensor) -> Tensor:
    """Return the gradient of a loss with a different weight for every number of a result."""
    return torch.cos(
        torch.arange(result.numel(), dtype=torch.float64, device=result.device)
    ).view_as(result)


def gradients(results: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients of that loss, zeros for a tensor that it does not depend on."""
    used = [result for result in results if result.requires_grad]
    grads = [slopes(result).to(result.dtype) for result in used]
    options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
    return list(torch.autograd.grad(used, list(wanted), grads, **options))


def assert_same(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], tolerance: float = 1e-12, what: str = ""
) -> None:
    """Assert that the errors relative to the largest number are within a tolerance."""
    assert len(ours) == len(theirs)
    for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
        where = f"{what} {index}"
        assert own.shape == other.shape, where
        assert own.dtype is other.dtype, where
        if other.numel():
            scale = max(1.0, float(other.detach().abs().max()))
            error = float((own.detach() - other.detach()).abs().max()) / scale
            assert error <= tolerance, f"{where}: relative error {error:.2e}"


def assert_alike_everywhere(layer: Any, run: Callable[[Any, rl.Ragged], list[Tensor]]) -> None:
    """Assert that all schedules and backends that support a layer give the same results and
    gradients.
    """
    batch, seen = a_batch(), []
    for schedule, backend in PAIRS:
        try:
            with rl.use_backend(schedule=schedule, backend=backend):
                results = run(layer, batch)
        except DispatchError:
            continue
        seen.append([*results, *gradients(results, [batch.values, *layer.parameters()])])
    assert len(seen) >= len(SCHEDULES)
    for other in seen[1:]:
        assert_same(other, seen[0])


def assert_same_for_every_input(layer: Any, hx: Any = None) -> None:
    """Assert that every kind of input gives the numbers of a Ragged, in its own kind; ``hx`` is of
    three sequences.
    """
    first, batch = layer.batch_first, a_batch([4, 1, 5])
    out, state = layer(batch, hx)
    assert isinstance(out, rl.Ragged)
    assert out.lengths.tolist() == [4, 1, 5]
    expected = [out.values, *parts(state)]

    padded, lengths = batch.to_padded(first, total_length=7)
    padded_out = out.to_padded(first, total_length=7)[0]
    assert_same(
        results_of(layer(padded, hx, lengths=lengths)), [padded_out, *parts(state)], what="padded"
    )

    theirs = torch.nn.utils.rnn.pack_padded_sequence(padded, lengths, first, enforce_sorted=False)
    for packed in (batch.to_packed(), theirs):
        packed_out, packed_state = layer(packed, hx)
        assert isinstance(packed_out, rl.packing.PackedSequence)
        assert packed_out.sorted_indices is packed.sorted_indices
        assert_same(
            [rl.Ragged.from_packed(packed_out).values, *parts(packed_state)],
            expected,
            what="packed",
        )

    own = None if hx is None else one_or_tuple(tuple(part[:, 2] for part in parts(hx)))
    assert_same(
        results_of(layer(batch[2], own)),
        [out[2], *(part[:, 2] for part in parts(state))],
        what="single",
    )

    equal = a_batch([3, 3, 3])
    out, state = layer(equal, hx)
    dense = results_of(layer(equal.to_padded(first)[0], hx))
    assert_same(dense, [out.to_padded(first)[0], *parts(state)], what="dense")


def watch_backends(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list that gets the backend and the schedule of every layer that is run."""
    ran: list[tuple[str, str]] = []

    def watched(name: str, run: Any, request: Any, schedule: str) -> Any:
        ran.append((name, schedule))
        return run(request, schedule)

    def kernel(*args: Any, **options: Any) -> Any:
        ran.append(("cpu", "lanes"))
        return run_layer(*args, **options)

    for name, backend in BACKENDS.items():
        monkeypatch.setattr(backend, "run", partial(watched, name, backend.run))
    monkeypatch.setattr("raglane.nn.recurrent.call.run_layer", kernel)
    return ran


def assert_nan_stays_in_its_sequence(layer: Any) -> None:
    """Assert that a sequence of NaN changes neither values nor gradients of the sequences before
    and after it.
    """
    clean = [torch.randn(length, D, dtype=torch.float64) for length in (3, 2, 4)]
    seen = []
    for middle in (clean[1], torch.full_like(clean[1], torch.nan)):
        values = torch.cat([clean[0], middle, clean[2]]).requires_grad_()
        torch.manual_seed(1)
        out, state = layer(rl.Ragged.from_flat(values, lengths=[3, 2, 4]))
        kept = [out[0], out[2], *(part[:, [0, 2]] for part in parts(state))]
        (grad,) = gradients(kept, [values])
        seen.append([*kept, grad[:3], grad[5:]])
    assert all(bool(part.isfinite().all()) for part in seen[1])
    assert_same(seen[1], seen[0])


def has_torch_lstm_under_autocast(kind: str) -> bool:
    """Return True if torch runs a padded LSTM under autocast: oneDNN does not on every
    processor.
    """
    try:
        with torch.autocast(kind, dtype=torch.bfloat16):
            nn.LSTM(1, 1, device=kind)(torch.zeros(1, 1, 1, device=kind))
    except RuntimeError:
        return False
    return True


def truth_of(
    kind: Kind, layer: Any, batch: rl.Ragged, hx: Any, clip: float | None = None
) -> Result:
    """Apply the naive formulas to the layer's parameters."""
    cell = CELLS[kind.cell]
    weights = tuple(
        cell.weights_type(
            *(getattr(layer, f"{name}_l{index}{suffix}", None) for name in cell.shapes(D, H))
        )
        for index in range(layer.num_layers)
        for suffix in ("", "_reverse")[: 2 if layer.bidirectional else 1]
    )
    request = Request(
        cell,
        batch.values,
        batch.offsets,
        batch.lengths_cpu,
        parts(hx),
        weights,
        layers=layer.num_layers,
        directions=2 if layer.bidirectional else 1,
    )
    return naive_network(request, clip=clip)
