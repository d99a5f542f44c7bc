"""Other cells of the same width beside a layer: architecture is a choice too."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from raglane import nn
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.planner.batches import epoch_of, thin_out
from raglane.planner.probe import device_of, make_batch, step_of, time_in_turns
from raglane.planner.rows import Row
from raglane.planner.ways import Way, at, ways_of
from raglane.ragged import Ragged

__all__ = ["compare_cells"]

_CELLS: dict[str, Callable[..., RecurrentLayer]] = {
    "LSTM": nn.LSTM,
    "GRU": nn.GRU,
    "RNN": nn.RNN,
    "IndRNN": nn.IndRNN,
    "SRU": nn.SRU,
    "QRNN": nn.QRNN,
    "MinGRU": nn.MinGRU,
    "MinLSTM": nn.MinLSTM,
}

# Elements that are timed at most.
_ELEMENTS = 4096


def compare_cells(layer: RecurrentLayer, lengths: Tensor, best: Row) -> dict[str, float]:
    """The time of a training step of other cells, in proportion to that of the layer, measured in turns."""
    device = device_of(layer)
    batch = make_batch(layer, _sample(lengths, best))
    calls = {"": _step(layer, batch, best.way)}
    for name, kind in _CELLS.items():
        if type(layer) is kind:
            continue
        sizes = {"num_layers": layer.num_layers, "bidirectional": layer.bidirectional}
        other = kind(layer.input_size, layer.hidden_size, **sizes).to(device, batch.values.dtype)
        ways = ways_of(other, [batch.values.dtype], [best.threads])
        calls[name] = _step(other.train(layer.training), batch, ways[0])
    times = dict(zip(calls, time_in_turns(list(calls.values()), device), strict=True))
    own = times.pop("")
    found = {name: taken / own for name, taken in times.items()}
    return dict(sorted(found.items(), key=lambda item: item[1]))


def _step(layer: RecurrentLayer, batch: Ragged, way: Way) -> Callable[[], object]:
    call = step_of(layer, batch, "train")

    def run() -> None:
        with at(way):
            call()

    return run


def _sample(lengths: Tensor, best: Row) -> Tensor:
    """The lengths of a typical batch: of those of the row, the one whose number of elements is the median."""
    part, _ = thin_out(lengths)
    batches = epoch_of(part, best.limit, grouped=best.grouped).batches
    typical = sorted(batches, key=lambda batch: int(batch.sum()))[len(batches) // 2]
    kept = int((typical.cumsum(0) <= _ELEMENTS).sum())
    return typical[: max(kept, 1)].clamp(max=_ELEMENTS)
