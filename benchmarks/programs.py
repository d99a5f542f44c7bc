"""Cells as programs of the kernels, against a loop in plain torch.

    python benchmarks/programs.py > benchmarks/results/programs.md
    python benchmarks/programs.py --only layers --hidden 256
    python benchmarks/programs.py --only xlstm

Each row compares a layer with ``auto`` and the same layer with ``backend="reference",
schedule="packed"``, in turns in one run: medians. The table also has the goals. sLSTM is also
compared with the plain torch backend of the package ``xlstm``, if it is installed. The last tables
have the cost of the first call in a new process, with an empty cache folder and with a filled one,
and the number of training batches after which it is amortised. ``--only`` runs one part, each of a
few minutes. ``--tiny`` runs everything once, on small sizes, without measuring.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from harness.lengths import LENGTHS
from harness.timing import interleave
from torch import Tensor, nn

import raglane as rl
from raglane.kernels.dispatch import BACKENDS
from raglane.native.machine import cpu_name

__all__ = ["LAYERS", "main"]

TODAY = {"backend": "reference", "schedule": "packed"}


class Sizes(NamedTuple):
    """The sizes and repetitions of a run."""

    hidden: tuple[int, ...] = (128, 256)
    sequences: int = 64
    rounds: int = 9
    seconds: float = 1.5
    layers: int | None = None
    xlstm: tuple[int, int, int, int] = (64, 512, 8, 64)
    """Numbers of sequences, steps, heads, and units per head."""


TINY = Sizes((8,), 3, 1, 0.0, 1, (2, 3, 2, 4))


class Leaky(nn.Module):
    """The cell of the README."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.linear = nn.Linear(input_size, hidden_size)
        self.decay = nn.Parameter(torch.full((hidden_size,), 2.0))

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step."""
        state = torch.lerp(self.linear(x_t), state, self.decay.sigmoid())
        return state.tanh(), state


class Perceptron(nn.Module):
    """A cell whose state passes through two linear layers and a layer norm."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inner = nn.Linear(input_size + hidden_size, hidden_size)
        self.norm = nn.LayerNorm(hidden_size)
        self.outer = nn.Linear(hidden_size, hidden_size)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step."""
        state = (
            state + self.outer(torch.relu(self.norm(self.inner(torch.cat([x_t, state], 1))))).tanh()
        )
        return state, state


class FastWeights(nn.Module):
    """A cell whose state is a matrix, to which each step adds an outer product."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.output_size = hidden_size // 4
        self.input_size, self.hidden_size = input_size, self.output_size**2
        self.linear = nn.Linear(input_size, 3 * self.output_size + 1)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step."""
        size = self.output_size
        query, key, value, decay = self.linear(x_t).split([size, size, size, 1], 1)
        memory = state.unflatten(1, (size, size)) * decay.sigmoid().unsqueeze(2)
        memory = memory + value.unsqueeze(2) * key.unsqueeze(1)
        return torch.bmm(memory, query.unsqueeze(2)).squeeze(2), memory.flatten(1)


class Slots(nn.Module):
    """A cell that reads a memory of 32 slots by attention, and writes where it reads."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.output_size = hidden_size // 4
        self.input_size, self.hidden_size = input_size, 32 * self.output_size
        self.linear = nn.Linear(input_size, 3 * self.output_size)

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """One step."""
        query, erased, added = self.linear(x_t).chunk(3, 1)
        memory = state.unflatten(1, (32, self.output_size))
        scores = torch.einsum("bsd,bd->bs", memory, query) * self.output_size**-0.5
        weights = scores.softmax(1).unsqueeze(2)
        read = (weights * memory).sum(1)
        memory = memory * (1 - weights * erased.sigmoid().unsqueeze(1))
        return read, (memory + weights * added.tanh().unsqueeze(1)).flatten(1)


def _of_matrices(cell: Any, input_size: int, hidden_size: int) -> Any:
    """Return a layer whose state is a matrix: 32 or 64 columns for 128 or 256 units."""
    return rl.nn.Recurrent(cell(input_size, hidden_size))


LAYERS: dict[str, tuple[Callable[..., Any], tuple[float, float]]] = {
    "LayerNormLSTM": (rl.nn.LayerNormLSTM, (4, 3)),
    "LayerNormGRU": (rl.nn.LayerNormGRU, (4, 3)),
    "PeepholeLSTM": (rl.nn.PeepholeLSTM, (4, 3)),
    "CoupledLSTM": (rl.nn.CoupledLSTM, (4, 3)),
    "GRU, reset before": (partial(rl.nn.GRU, reset_after=False), (4, 3)),
    "LSTM, zoneout": (partial(rl.nn.LSTM, zoneout=0.1), (4, 3)),
    "GRU, zoneout": (partial(rl.nn.GRU, zoneout=0.1), (4, 3)),
    "LSTM, state dropout": (partial(rl.nn.LSTM, state_dropout=0.2), (4, 3)),
    "GRU, state dropout": (partial(rl.nn.GRU, state_dropout=0.2), (4, 3)),
    "Leaky": (partial(rl.nn.Recurrent, Leaky), (4, 0)),
    "MLP with layer norm": (partial(rl.nn.Recurrent, Perceptron), (4, 0)),
    "SLSTM": (rl.nn.SLSTM, (4, 0)),
    "fast weights": (partial(_of_matrices, FastWeights), (5, 5)),
    "slots": (partial(_of_matrices, Slots), (5, 5)),
}
"""Functions that make a layer from its sizes, with the speed-up to reach for 128 and for 256
units."""


def _infer(layer: Any, batch: rl.Ragged) -> None:
    with torch.inference_mode():
        layer(batch)


def _train(layer: Any, batch: rl.Ragged, leaves: Sequence[Tensor], slope: Tensor) -> None:
    torch.autograd.grad(layer(batch)[0].values, leaves, slope, allow_unused=True)


def _call(layer: Any, batch: rl.Ragged, mode: str) -> Callable[[], None]:
    """Return a function that runs a step of training or inference on a batch."""
    layer.train(mode == "training")
    if mode == "inference":
        return partial(_infer, layer, batch)
    values = batch.values.clone().requires_grad_()
    wanted = batch.with_values(values)
    return partial(
        _train,
        layer,
        wanted,
        [values, *layer.parameters()],
        torch.randn(len(values), layer.output_size),
    )


def _medians(calls: Mapping[str, Callable[[], object]], sizes: Sizes) -> dict[str, float]:
    """Return the milliseconds of each call."""
    for call in calls.values():
        call()
    taken = interleave(calls, sizes.rounds, most_seconds=sizes.seconds)
    return {name: 1e3 * statistics.median(times) for name, times in taken.items()}


def _with(layer: Any, **options: str) -> Any:
    """Return the layer with another backend."""
    twin = copy.deepcopy(layer)
    for name, value in options.items():
        setattr(twin, name, value)
    return twin


def _batch(rule: str, hidden: int, sizes: Sizes) -> rl.Ragged:
    lengths = LENGTHS[rule].draw(sizes.sequences)
    return rl.Ragged.from_flat(torch.randn(sum(lengths), hidden), lengths=lengths)


def reach(sizes: Sizes) -> None:
    """Print the table of all layers."""
    print(
        "| layer | lengths | H | mode | run by | now, ms | plain torch, ms | times as fast | asked for |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, (make, bars) in list(LAYERS.items())[: sizes.layers]:
        for hidden in sizes.hidden:
            layer = make(hidden, hidden)
            for rule in ("lognormal", "ewt"):
                batch = _batch(rule, hidden, sizes)
                for mode in ("training", "inference"):
                    calls = {
                        "now": _call(_with(layer), batch, mode),
                        "before": _call(_with(layer, **TODAY), batch, mode),
                    }
                    found = _medians(calls, sizes)
                    who = rl.explain(layer.train(mode == "training"), batch).backend
                    bar = (
                        bars[hidden > 128]
                        if mode == "training"
                        or name not in ("Leaky", "MLP with layer norm", "SLSTM")
                        else 0
                    )
                    times = f"{found['now']:.2f} | {found['before']:.2f} | {found['before'] / found['now']:.2f}"
                    print(
                        f"| {name} | {rule} | {hidden} | {mode} | {who} | {times} | {bar or ''} |",
                        flush=True,
                    )


def by_hand(sizes: Sizes) -> None:
    """Print the LSTM as a program against the hand-written LSTM."""
    print("\n## The LSTM as a program and by hand\n")
    if "program" not in BACKENDS:
        print("There is no backend that runs programs.")
        return
    print("| lengths | H | mode | program, ms | by hand, ms | program / by hand | asked for |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for hidden in sizes.hidden:
        layer = rl.nn.LSTM(hidden, hidden)
        for rule in ("lognormal", "ewt"):
            batch = _batch(rule, hidden, sizes)
            for mode in ("training", "inference"):
                ways = {
                    name: _call(_with(layer, backend=name), batch, mode)
                    for name in ("program", "cpu")
                }
                found = _medians(ways, sizes)
                times = f"{found['program']:.2f} | {found['cpu']:.2f} | {found['program'] / found['cpu']:.2f}"
                print(f"| {rule} | {hidden} | {mode} | {times} | 1.15 |", flush=True)


def against_authors(sizes: Sizes) -> None:
    """Print the inference of the sLSTM against the package of its authors."""
    count, steps, heads, units = sizes.xlstm
    print("\n## The sLSTM against its authors' package\n")
    print(f"{count} sequences of {steps}, {heads} heads of {units}, inference:\n")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of another package
            package = importlib.import_module("xlstm.blocks.slstm.cell")
    except ImportError:
        print("The package xlstm is not installed.")
        return
    hidden = heads * units
    options = {"hidden_size": hidden, "num_heads": heads, "backend": "vanilla", "dtype": "float32"}
    theirs = package.sLSTMCell(package.sLSTMCellConfig(**options)).eval()
    ours = rl.nn.SLSTM(hidden, hidden, num_heads=heads).eval()
    inputs = nn.Linear(hidden, 4 * hidden)
    values = torch.randn(count, steps, hidden)
    batch = rl.Ragged(list(values))

    def run(cell: Any) -> None:
        with torch.inference_mode():
            cell(inputs(values))

    ways: dict[str, Callable[[], object]] = {
        "ours": partial(_infer, ours, batch),
        "eager": partial(run, theirs),
    }
    compiled = copy.deepcopy(theirs)
    try:
        if sizes.layers is not None:
            raise NotImplementedError  # compilation takes longer than everything else
        # Only one step is compiled: their loop would be one graph of all its steps.
        compiled.pointwise = torch.compile(compiled.pointwise)
        run(compiled)
        ways["torch.compile"] = partial(run, compiled)
    except Exception as error:  # a missing compiler raises many kinds of errors
        print(f"torch.compile does not run here: {type(error).__name__}.\n")
    found = _medians(ways, sizes._replace(seconds=4 * sizes.seconds))
    print("| | ms | theirs / ours | asked for |\n| --- | --- | --- | --- |")
    for name, taken in found.items():
        bar = "" if name == "ours" else "5"
        print(f"| {name} | {taken:.1f} | {taken / found['ours']:.2f} | {bar} |", flush=True)


def first_call(names: Sequence[str], hidden: int, sequences: int) -> float:
    """Return the seconds of the first training step of each layer, minus those of a later step."""
    batch = _batch("lognormal", hidden, Sizes(sequences=sequences))
    _call(
        rl.nn.LSTM(hidden, hidden), batch, "training"
    )()  # the cost of the first call of any layer
    steps = [_call(LAYERS[name][0](hidden, hidden), batch, "training") for name in names]
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        for step in steps:
            step()
        taken.append(time.perf_counter() - begun)
    return max(0.0, taken[0] - taken[1])


def break_even(sizes: Sizes) -> None:
    """Print the cost of the first call, and the number of batches of 32 after which it is
    amortised.
    """
    hidden, sequences = sizes.hidden[0], min(32, sizes.sequences)
    print(
        f"\n## The first call\n\nTraining, {sequences} sequences of lognormal lengths, {hidden} units. A process reads"
    )
    print(
        "from the disk what another one has traced. Asked for: to break even within 60 batches, and within 20 from"
    )
    print("the disk.\n\n| layer | first call, ms | from the disk | now | plain torch", end=" ")
    print("| batches to break even | from the disk |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in list(LAYERS)[: sizes.layers]:
        spent = [1e3 * taken for taken in _in_processes([name], hidden, sequences, sizes)]
        batch = _batch("lognormal", hidden, sizes._replace(sequences=sequences))
        layer = LAYERS[name][0](hidden, hidden)
        ways = {
            "now": _call(_with(layer), batch, "training"),
            "before": _call(_with(layer, **TODAY), batch, "training"),
        }
        found = _medians(ways, sizes)
        gain = found["before"] - found["now"]
        earned = [f"{taken / gain:.0f}" if gain > 0 else "never" for taken in spent]
        times = f"{spent[0]:.0f} | {spent[1]:.0f} | {found['now']:.2f} | {found['before']:.2f}"
        print(f"| {name} | {times} | {earned[0]} | {earned[1]} |", flush=True)
    if sizes.layers is not None:
        return  # a process per number takes longer than everything else
    print(
        "\nTwelve layers:\n\n| layers | first call, s | from the disk, s | asked for |\n| --- | --- | --- | --- |"
    )
    for what, names, bar in (
        ("of one class", [next(iter(LAYERS))] * 12, 2),
        ("of twelve classes", list(LAYERS), 4),
    ):
        cold, kept = _in_processes(names, hidden, sequences, sizes)
        print(f"| {what} | {cold:.2f} | {kept:.2f} | {bar} |", flush=True)


def _in_processes(names: Sequence[str], hidden: int, sequences: int, sizes: Sizes) -> list[float]:
    """Return the cost of the first call in a new process, with an empty cache folder and with a
    filled one.
    """
    command = [sys.executable, __file__, "--first", "; ".join(names), str(hidden), str(sequences)]
    found: list[list[float]] = [[], []]
    for _ in range(3 if sizes.layers is None else 1):
        with tempfile.TemporaryDirectory() as folder:
            own = os.environ | {"RAGLANE_CACHE": folder}
            for taken in found:
                ran = subprocess.run(command, capture_output=True, text=True, check=True, env=own)
                taken.append(float(ran.stdout))
    return [statistics.median(taken) for taken in found]


PARTS: dict[str, Callable[[Sizes], None]] = {
    "layers": reach,
    "hand": by_hand,
    "xlstm": against_authors,
    "first": break_even,
}
"""The parts, by the name that ``--only`` takes."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure everything, and print the tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true", help="small sizes, once")
    parser.add_argument(
        "--first", nargs=3, metavar=("LAYERS", "H", "B"), help="only the first call"
    )
    parser.add_argument("--threads", type=int, default=2, help="of the processor")
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    parser.add_argument(
        "--hidden",
        nargs="+",
        type=int,
        choices=Sizes().hidden,
        help="units, where several are measured",
    )
    chosen = parser.parse_args(arguments)
    torch.manual_seed(0)
    if chosen.first:
        torch.set_num_threads(chosen.threads)
        print(first_call(chosen.first[0].split("; "), int(chosen.first[1]), int(chosen.first[2])))
        return
    before = torch.get_num_threads()
    torch.set_num_threads(chosen.threads)
    sizes = TINY if chosen.tiny else Sizes(hidden=tuple(chosen.hidden or Sizes().hidden))
    print("# Programs\n")
    print(
        f"`python benchmarks/programs.py`: {cpu_name()}, {chosen.threads} threads, torch {torch.__version__}.\n"
    )
    print(f"{sizes.sequences} sequences, D = H, float32, medians of calls that take turns:\n")
    try:
        for name, part in PARTS.items():
            if chosen.only in (None, name):
                part(sizes)
    finally:
        torch.set_num_threads(before)


if __name__ == "__main__":
    main()
