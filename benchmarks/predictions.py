"""Compare the planner's prediction of an epoch's time with measurements, on real or drawn lists of
lengths.

    python benchmarks/predictions.py names=names.txt 0.3x20 > benchmarks/results/predictions.md

A list is a file with one length per line, or FILLxMEAN: lengths are drawn with ``--seed``, with
this density of a batch of all and about this mean. For each cell, hidden size and list, every setting
(backend, schedule, batch size, order) is run on batches drawn from the list, taking turns, until
each has run for ``--seconds``; a training step is the layer's forward and backward pass, as the
planner counts it. The measured time of an epoch is seconds per element times the list's elements;
tables have microseconds per element. Before that, the planner measures each cell and hidden size.

The speed of the machine drifts. So the planner's yardstick is measured before and after every turn,
and the time of a turn is scaled by its ratio to the yardstick during the planner's measurement. The
last lines have the errors without that, and the difference between two halves of one measurement.
The share of measured times inside the planner's interval is counted with and without the scale.
Settings that the planner extrapolates are marked ``~`` and counted separately.

The recommended setting is measured again in turns with the fastest one, because the smallest of
many times is partly chance.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

import raglane as rl
from raglane.native.machine import cpu_name
from raglane.planner import Plan, Row, calibration
from raglane.planner.calibration import Calibration
from raglane.planner.model import LayerWay, at
from raglane.planner.predicted import epoch_of
from raglane.planner.probe import Yardstick, make_batch, step_of
from raglane.planner.texts import range_in_words

TORCH = ("LSTM", "GRU", "RNN")
CELLS, HIDDEN = (*TORCH, "MinGRU", "IndRNN"), (64, 128, 256)
SIZES = (32, 128)
# The number of sequences of a drawn list.
COUNT = 2000
# The number of batches that are prepared per setting, and their most numbers and elements.
BATCHES, NUMBERS, ELEMENTS = 24, 50_000_000, 400_000
# Longer steps are skipped, because too few fit into the time.
LONGEST = 3.0


@dataclass
class Setting:
    """A row of a plan with its measurements."""

    row: Row
    calls: list[Callable[[], object]]
    counts: list[int]
    seconds: float = 0.0
    turns: list[float] = field(default_factory=list)
    scaled: list[float] = field(default_factory=list)

    def turn(self, most: float, yardstick: Yardstick) -> None:
        """Run the batches repeatedly for some seconds, after warming up for as long."""
        with at(self.row.way):
            self._run(most / 2)
            before = yardstick.look()
            spent, done = self._run(most)
            look = (before + yardstick.look()) / 2
        self.seconds += spent
        self.turns.append(spent / done)
        self.scaled.append(spent / done / look)

    def _run(self, most: float) -> tuple[float, int]:
        """Run rounds of the batches, or a part of one, for about some seconds; return seconds and
        elements.
        """
        begun, spent, done = time.perf_counter(), 0.0, 0
        while spent < most:
            for call, count in zip(self.calls, self.counts, strict=True):
                call()
                done += count
                spent = time.perf_counter() - begun
                if spent > 2 * most:
                    break
        return spent, done

    @property
    def drift(self) -> list[float]:
        """The relative difference between the halves of its turns, a limit for predictions; empty
        for one turn.
        """
        half = len(self.scaled) // 2
        return (
            [abs(statistics.median(self.scaled[half:]) / statistics.median(self.scaled[:half]) - 1)]
            if half
            else []
        )

    def epoch(self, elements: int, look: float) -> float:
        """Return the median seconds of an epoch, scaled to a time of the yardstick."""
        return statistics.median(self.scaled) * look * elements


def settings_of(plan: Plan, layer: Any, lengths: torch.Tensor) -> list[Setting]:
    """Return the rows to run: every fast backend with all threads, two batch sizes, both orders."""
    found = []
    most = max(row.threads for row in plan.rows)
    for row in plan.rows:
        if (
            row.backend == "reference"
            or row.threads != most
            or row.batch_size not in SIZES
            or row.step_max > LONGEST
        ):
            continue
        drawn = epoch_of(lengths, row.limit, bucketed=row.bucketed, seed=1).batches
        order = np.random.default_rng(2).permutation(len(drawn))
        chosen = [drawn[place] for place in order[:BATCHES]]
        elements = min(ELEMENTS, NUMBERS // layer.input_size)
        kept = 1 + sum(
            int(total) <= elements
            for total in np.cumsum([int(batch.sum()) for batch in chosen])[1:]
        )
        calls = [step_of(layer, make_batch(layer, batch), "train") for batch in chosen[:kept]]
        found.append(Setting(row, calls, [int(batch.sum()) for batch in chosen[:kept]]))
    return found


def measure(found: list[Setting], seconds: float, yardstick: Yardstick) -> None:
    """Run all settings in turns, until each has run for some seconds."""
    while found:
        for setting in found:
            setting.turn(max(0.2, seconds / 12), yardstick)
        found = [setting for setting in found if setting.seconds < seconds]


calibrations: list[Calibration] = []
"""The calibration of the current layer, once it is measured."""


def once(calibrate: Callable[..., Calibration]) -> Callable[..., Calibration]:
    """Wrap a function that calibrates so that it measures each layer once, on a busy machine
    too.
    """

    def wrapped(*args: Any) -> Calibration:
        if not calibrations:
            calibrations.append(calibrate(*args))
        return calibrations[0]

    return wrapped


@dataclass
class Checked:
    """The measurements of a layer on a list, by setting.

    Attributes:
        found: the settings.
        ends: the recommended setting and the fastest, measured again; equal if it is the fastest.
        total: the number of elements of the list.
        look: the seconds of the yardstick during the planner's measurement.
    """

    found: list[Setting]
    ends: tuple[Setting, Setting]
    total: int
    look: float

    def epoch(self, setting: Setting) -> float:
        """Return the seconds of an epoch."""
        return setting.epoch(self.total, self.look)

    def miss(self, setting: Setting) -> float:
        """Return the relative error of the prediction."""
        return setting.row.train_seconds / self.epoch(setting) - 1

    def raw(self, setting: Setting) -> float:
        """Return the seconds of an epoch without the yardstick."""
        return statistics.median(setting.turns) * self.total

    def cost(self) -> float:
        """Return the time of an epoch with the recommended setting, relative to the fastest."""
        advised, fastest = map(self.epoch, self.ends)
        return advised / fastest

    def head(self) -> str:
        """Return the cells of the table of lists."""
        missed = list(map(self.miss, self.found))
        sizes = f"{statistics.median(map(abs, missed)):.1%} | {max(missed, key=abs):+.1%}"
        per = [1e6 * self.epoch(setting) / self.total for setting in self.ends]
        return f"{len(self.found)} | {sizes} | {per[0]:.3g} | {per[1]:.3g} | {self.cost():.2f}"

    def row(self, setting: Setting) -> str:
        """Return the cells of the table of settings."""
        one = setting.row
        words = f"{one.backend} {one.schedule}, {one.batch_size} {'bucketed' if one.bucketed else 'random'}"
        predicted = f"{'~' * one.is_rough}{one.train_seconds:.4g}"
        ends = range_in_words(one.train_range)
        return f"{words} | {predicted} | {ends} | {self.epoch(setting):.4g} | {self.miss(setting):+.1%}"


def check(layer: Any, lengths: torch.Tensor, seconds: float, yardstick: Yardstick) -> Checked:
    """Plan, then run the settings of the plan; the layer is measured in the first call."""
    threads, backends = (
        [torch.get_num_threads()],
        ["cpu", "torch"] if type(layer).__name__ in TORCH else ["cpu"],
    )
    plan = rl.plan(
        lengths, layer, batch_sizes=SIZES, threads=threads, backends=backends, fresh=True
    )
    found = settings_of(plan, layer, lengths)
    measure(found, seconds, yardstick)
    ends = found_ends(found, plan.best, seconds, yardstick)
    return Checked(found, ends, int(lengths.sum()), calibrations[0].yardstick)


def found_ends(
    found: list[Setting], best: Row, seconds: float, yardstick: Yardstick
) -> tuple[Setting, Setting]:
    """Measure the recommended setting and the fastest again."""
    advised = next(setting for setting in found if setting.row is best)
    fastest = min(found, key=lambda setting: setting.epoch(1, 1.0))
    if advised is fastest:
        return advised, advised
    again = (
        Setting(advised.row, advised.calls, advised.counts),
        Setting(fastest.row, fastest.calls, fastest.counts),
    )
    measure(list(again), 2 * seconds, yardstick)
    return again


def summary(every: list[Checked]) -> str:
    """Return the cost of the recommendations and the errors by kind, over all layers and lists, as
    Markdown.
    """
    costs = [one.cost() for one in every]
    lines = [
        f"The advice costs {max(costs):.2f} at most, {statistics.median(costs):.2f} in the median.",
        "",
    ]
    lines += [
        "| settings | how many | median miss | above 15 % | worst | inside | inside, raw | width |"
    ]
    lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
    kinds: dict[str, Callable[[Row], bool]] = {
        "All": lambda _: True,
        "Lanes": lambda row: row.backend == "cpu",
        "Torch, within what was measured": lambda row: row.backend == "torch" and not row.is_rough,
        "Torch, extrapolated (~)": lambda row: row.backend == "torch" and row.is_rough,
    }
    for kind, holds in kinds.items():
        pairs = [(one, setting) for one in every for setting in one.found if holds(setting.row)]
        if pairs:
            some = [one.miss(setting) for one, setting in pairs]
            large, typical = (
                sum(abs(miss) > 0.15 for miss in some),
                statistics.median(map(abs, some)),
            )
            errors = f"{len(some)} | {typical:.1%} | {large} | {max(some, key=abs):+.1%}"
            shares = f"{inside(pairs, Checked.epoch):.0%} | {inside(pairs, Checked.raw):.0%}"
            ratios = (
                setting.row.train_range[1] / setting.row.train_range[0] for _, setting in pairs
            )
            lines.append(f"| {kind} | {errors} | {shares} | {statistics.median(ratios):.2f} |")
    raw = [
        setting.row.train_seconds / one.raw(setting) - 1 for one in every for setting in one.found
    ]
    drifts = [drift for one in every for setting in one.found for drift in setting.drift]
    typical = statistics.median(map(abs, raw))
    lines += [
        "",
        f"Without the yardstick: median miss {typical:.1%}, worst {max(raw, key=abs):+.1%}.",
    ]
    if drifts:
        typical = statistics.median(drifts)
        lines.append(
            f"The halves of a measurement differ by {typical:.1%}, the median of all settings."
        )
    return "\n".join(lines)


def inside(
    pairs: list[tuple[Checked, Setting]], seconds: Callable[[Checked, Setting], float]
) -> float:
    """Return the share of measured epochs that are inside the planner's interval."""
    ends = [setting.row.train_range for _, setting in pairs]
    return statistics.mean(
        low <= seconds(*pair) <= high for (low, high), pair in zip(ends, pairs, strict=True)
    )


def lengths_of(text: str, seed: int) -> tuple[str, torch.Tensor]:
    """Return the name and the lengths of NAME=FILE or FILLxMEAN."""
    name, _, file = text.partition("=")
    if file:
        return name, torch.tensor(np.loadtxt(Path(file), dtype=np.int64))
    density, mean = map(float, name.split("x"))
    # A share u ** k of the longest has the mean 1 / (k + 1).
    shares = np.random.default_rng([seed, round(100 * density)]).random(COUNT) ** (1 / density - 1)
    return name, torch.tensor(np.maximum(1, np.rint(mean / density * shares)), dtype=torch.int64)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("lists", nargs="+", metavar="NAME=FILE|FILLxMEAN")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--hidden", nargs="+", type=int, default=HIDDEN)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # Calibrations of earlier runs must not be used.
        os.environ["RAGLANE_CACHE"] = folder
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    """Measure, and write the tables."""
    calibration.calibrate = once(calibration.calibrate)
    lists = dict(lengths_of(text, chosen.seed) for text in chosen.lists)
    print("# Predictions of the planner\n")
    where = f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"`python benchmarks/predictions.py` with {chosen.seconds:g} s per setting. {where}.\n")
    print(
        "| list | cell | H | settings | median miss | worst miss | advised, us | best found, us | costs |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    every: dict[str, Checked] = {}
    for cell, hidden in product(chosen.cells, chosen.hidden):
        layer = getattr(rl.nn, cell)(hidden, hidden)
        yardstick = Yardstick(layer, LayerWay("cpu", "lanes", "float32", torch.get_num_threads()))
        calibrations.clear()
        for name, lengths in lists.items():
            case = f"{name} | {cell} | {hidden}"
            every[case] = check(layer, lengths, chosen.seconds, yardstick)
            print(f"| {case} | {every[case].head()} |", flush=True)
    print(f"\n{summary(list(every.values()))}\n")
    print("| list | cell | H | setting | predicted, s | interval | measured, s | miss |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for case, one in every.items():
        for setting in one.found:
            print(f"| {case} | {one.row(setting)} |")


if __name__ == "__main__":
    main()
