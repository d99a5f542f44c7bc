"""Whether the planner predicts what happens: predicted against measured time of an epoch, on lists of real lengths.

    python benchmarks/predictions.py names=names.txt ewt=ewt.txt > benchmarks/results/predictions.md

Each list is a file with one length per line. For each cell, hidden size and list, every setting (backend, schedule,
batch size, order) is run on batches drawn from the list, taking turns, until each has run for ``--seconds``; a training
step is the layer's forward and backward pass, as the planner counts it. The measured time of an epoch is seconds per
element times the list's elements; tables have microseconds per element. The planner measures anew for each cell and
hidden size, before that.

The machine itself drifts, so that the planner's yardstick is looked at before and after every turn, and the time of a
turn is scaled to what the yardstick said while the planner measured. The last lines have the misses without that, and
how much two halves of one measurement differ. Settings of which the planner says that it extrapolates are marked ``~``
and counted by themselves.

What the advice costs is measured once more, the recommended setting in turns with the fastest that was found: the
smallest of many times is partly luck.
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
from raglane.planner import Row, advice
from raglane.planner.calibration import Calibration
from raglane.planner.model import Way, at
from raglane.planner.probe import Yardstick, make_batch, step_of
from raglane.planner.rows import epoch_of
from safety import processor

CELLS, HIDDEN = ("LSTM", "GRU", "MinGRU"), (64, 128, 256)
SIZES = (32, 128)
# Batches of a setting that are made before; numbers and elements that they have at most.
BATCHES, NUMBERS, ELEMENTS = 24, 50_000_000, 400_000
# A step that would take longer is left out: too few of them fit into the time.
LONGEST = 3.0


@dataclass
class Setting:
    """A row of a plan, and what was measured of it."""

    row: Row
    calls: list[Callable[[], object]]
    counts: list[int]
    seconds: float = 0.0
    turns: list[float] = field(default_factory=list)
    scaled: list[float] = field(default_factory=list)

    def turn(self, most: float, yardstick: Yardstick) -> None:
        """Go through the batches again and again for so long, as epochs do, after as long to get warm."""
        with at(self.row.way):
            self._run(most / 2)
            before = yardstick.look()
            spent, done = self._run(most)
            look = (before + yardstick.look()) / 2
        self.seconds += spent
        self.turns.append(spent / done)
        self.scaled.append(spent / done / look)

    def _run(self, most: float) -> tuple[float, int]:
        """Whole rounds of the batches for about so long, or a part of one: the seconds, and the elements done."""
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
        """How far the second half of its turns is off the first, which no prediction can know; empty for one turn."""
        half = len(self.scaled) // 2
        return [abs(statistics.median(self.scaled[half:]) / statistics.median(self.scaled[:half]) - 1)] if half else []

    def epoch(self, elements: int, look: float) -> float:
        """Seconds of an epoch where the yardstick takes so long: the median of the turns."""
        return statistics.median(self.scaled) * look * elements


def settings_of(plan: rl.Plan, layer: Any, lengths: torch.Tensor) -> list[Setting]:
    """The rows that are run: every fast backend with all threads, two batch sizes, both orders."""
    found = []
    most = max(row.threads for row in plan.rows)
    for row in plan.rows:
        if row.backend == "reference" or row.threads != most or row.batch_size not in SIZES or row.step_max > LONGEST:
            continue
        drawn = epoch_of(lengths, row.limit, grouped=row.grouped, seed=1).batches
        order = np.random.default_rng(2).permutation(len(drawn))
        chosen = [drawn[place] for place in order[:BATCHES]]
        elements = min(ELEMENTS, NUMBERS // layer.input_size)
        kept = 1 + sum(int(total) <= elements for total in np.cumsum([int(batch.sum()) for batch in chosen])[1:])
        calls = [step_of(layer, make_batch(layer, batch), "train") for batch in chosen[:kept]]
        found.append(Setting(row, calls, [int(batch.sum()) for batch in chosen[:kept]]))
    return found


def measure(found: list[Setting], seconds: float, yardstick: Yardstick) -> None:
    """All settings in turns, until each has run for so long."""
    while found:
        for setting in found:
            setting.turn(max(0.2, seconds / 12), yardstick)
        found = [setting for setting in found if setting.seconds < seconds]


calibrations: list[Calibration] = []
"""What the planner measured, the last one last."""


def remember(kept: Callable[..., Calibration]) -> Callable[..., Calibration]:
    """Let a function that gives calibrations leave them in the list."""

    def wrapped(*args: Any, **options: Any) -> Any:
        found = kept(*args, **options)
        if found is not None:
            calibrations.append(found)
        return found

    return wrapped


@dataclass
class Checked:
    """What was found of a layer on a list, by setting.

    Attributes:
        found: the settings.
        ends: the recommended one and the fastest, measured anew; twice the same where it is the fastest.
        total: elements of the list.
        look: seconds of the yardstick while the planner measured.
    """

    found: list[Setting]
    ends: tuple[Setting, Setting]
    total: int
    look: float

    def epoch(self, setting: Setting) -> float:
        """Seconds of an epoch."""
        return setting.epoch(self.total, self.look)

    def miss(self, setting: Setting) -> float:
        """How far the prediction is off."""
        return setting.row.train_seconds / self.epoch(setting) - 1

    def raw_miss(self, setting: Setting) -> float:
        """The same without the yardstick."""
        return setting.row.train_seconds / (statistics.median(setting.turns) * self.total) - 1

    def cost(self) -> float:
        """What an epoch as advised takes, in proportion to the fastest."""
        advised, fastest = map(self.epoch, self.ends)
        return advised / fastest

    def head(self) -> str:
        """The cells of the table of lists."""
        missed = list(map(self.miss, self.found))
        sizes = f"{statistics.median(map(abs, missed)):.1%} | {max(missed, key=abs):+.1%}"
        per = [1e6 * self.epoch(setting) / self.total for setting in self.ends]
        return f"{len(self.found)} | {sizes} | {per[0]:.3g} | {per[1]:.3g} | {self.cost():.2f}"

    def row(self, setting: Setting) -> str:
        """The cells of the table of settings."""
        one = setting.row
        words = f"{one.backend} {one.schedule}, {one.batch_size} {'grouped' if one.grouped else 'random'}"
        predicted = f"{'~' * one.is_rough}{one.train_seconds:.4g}"
        return f"{words} | {predicted} | {self.epoch(setting):.4g} | {self.miss(setting):+.1%}"


def check(layer: Any, lengths: torch.Tensor, seconds: float, yardstick: Yardstick) -> Checked:
    """Plan, then run the settings of the plan; the layer is measured anew where nothing is remembered of it."""
    plan = rl.plan(lengths, layer, batch_sizes=SIZES, threads=[torch.get_num_threads()], fresh=not calibrations)
    found = settings_of(plan, layer, lengths)
    measure(found, seconds, yardstick)
    ends = found_ends(found, plan.best, seconds, yardstick)
    return Checked(found, ends, int(lengths.sum()), calibrations[-1].yardstick)


def found_ends(found: list[Setting], best: Row, seconds: float, yardstick: Yardstick) -> tuple[Setting, Setting]:
    """The recommended setting and the fastest, measured anew."""
    advised = next(setting for setting in found if setting.row is best)
    fastest = min(found, key=lambda setting: setting.epoch(1, 1.0))
    if advised is fastest:
        return advised, advised
    again = Setting(advised.row, advised.calls, advised.counts), Setting(fastest.row, fastest.calls, fastest.counts)
    measure(list(again), 2 * seconds, yardstick)
    return again


def summary(every: list[Checked]) -> str:
    """What follows from all layers and lists: what the advice costs, and the misses by kind."""
    costs = [one.cost() for one in every]
    lines = [f"The advice costs {max(costs):.2f} at most, {statistics.median(costs):.2f} in the median.", ""]
    lines += ["| settings | how many | median miss | above 15 % | worst |", "| --- | --- | --- | --- | --- |"]
    kinds: dict[str, Callable[[Row], bool]] = {
        "All": lambda _: True,
        "Lanes": lambda row: row.backend == "cpu",
        "Torch, within what was measured": lambda row: row.backend == "torch" and not row.is_rough,
        "Torch, extrapolated (~)": lambda row: row.backend == "torch" and row.is_rough,
    }
    for kind, holds in kinds.items():
        some = [one.miss(setting) for one in every for setting in one.found if holds(setting.row)]
        if some:
            large, typical = sum(abs(miss) > 0.15 for miss in some), statistics.median(map(abs, some))
            lines.append(f"| {kind} | {len(some)} | {typical:.1%} | {large} | {max(some, key=abs):+.1%} |")
    raw = [one.raw_miss(setting) for one in every for setting in one.found]
    drifts = [drift for one in every for setting in one.found for drift in setting.drift]
    typical = statistics.median(map(abs, raw))
    lines += ["", f"Without the yardstick: median miss {typical:.1%}, worst {max(raw, key=abs):+.1%}."]
    if drifts:
        typical = statistics.median(drifts)
        lines.append(f"The halves of a measurement differ by {typical:.1%}, the median of all settings.")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lists", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--cells", nargs="+", choices=CELLS, default=CELLS)
    parser.add_argument("--hidden", nargs="+", type=int, default=HIDDEN)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # What an earlier run kept must not stand in for what this one measures.
        os.environ["RAGLANE_CACHE"] = folder
        compare(chosen)


def compare(chosen: argparse.Namespace) -> None:
    """Measure, and write the tables."""
    advice.calibrate = remember(advice.calibrate)
    lists = {name: torch.tensor(np.loadtxt(Path(file), dtype=np.int64)) for name, _, file in map(_split, chosen.lists)}
    print("# What the planner predicts, and what happens\n")
    where = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"`python benchmarks/predictions.py` with {chosen.seconds:g} s per setting. {where}.\n")
    print("| list | cell | H | settings | median miss | worst miss | advised, us | best found, us | costs |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    every: dict[str, Checked] = {}
    for cell, hidden in product(chosen.cells, chosen.hidden):
        layer = getattr(rl.nn, cell)(hidden, hidden)
        yardstick = Yardstick(layer, Way("cpu", "lanes", "float32", torch.get_num_threads()))
        calibrations.clear()
        for name, lengths in lists.items():
            case = f"{name} | {cell} | {hidden}"
            every[case] = check(layer, lengths, chosen.seconds, yardstick)
            print(f"| {case} | {every[case].head()} |", flush=True)
    print(f"\n{summary(list(every.values()))}\n")
    print("| list | cell | H | setting | predicted, s | measured, s | miss |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for case, one in every.items():
        for setting in one.found:
            print(f"| {case} | {one.row(setting)} |")


def _split(text: str) -> tuple[str, str, str]:
    return text.partition("=")


if __name__ == "__main__":
    main()
