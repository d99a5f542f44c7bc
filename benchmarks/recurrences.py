"""The selective scan and linear attention, and the plain torch code of transformers and mambapy:
times of a call and of a training step, and the memory of a training step.

Requires transformers 5.24 or later and mambapy for the comparison; without them their columns are
empty. A row is one run, in which all take turns. The share is that of the processor's peak of
multiply-adds, for an inference on equal lengths that takes 2 multiply-adds per number of a state
and step, and 3 with the delta rule. The bound of a scan is the time of its exponentials, at the rate
that ``make rates`` prints for ``exp``, and of its multiply-adds at the peak, one after the other. On
one thread the times are those of the processor, otherwise those of the clock.
``RAGLANE_ISA=avx2`` measures another instruction set.

    python benchmarks/recurrences.py --threads 1 2 --exponentials 2.5
    python benchmarks/recurrences.py memory
    python benchmarks/recurrences.py training-scan
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from harness.memory import peak_of
from harness.timing import interleave, peak
from torch import Tensor

import raglane as rl
from raglane.native.library import library

# A lognormal distribution, as in docs/performance.md: 0.4 of a padded batch is real.
LENGTHS = {
    "equal": [512] * 8,
    "fill 0.4": [512, 310, 251, 182, 140, 110, 84, 52],
    "4 x 256": [256] * 4,
}
CHANNELS = 512
STATES = 16
STEPS = 2048
HEADS = 8
SIZE = 64
# Exponentials, and multiplications and multiply-adds, of a number of a state and a step of a scan. A
# training step computes the forward pass twice.
OF_SCANS = {"infer": (1, 4), "train": (2, 18)}
# The packages, and the methods of a case that call them.
PEERS = {"transformers": "theirs", "mambapy": "by_mambapy"}


def padded(batch: rl.Ragged) -> Tensor:
    """The values ``(B, T, ...)`` with zeros at the ends."""
    return batch.to_padded()[0]


class Scan:
    """A selective scan of lengths, and transformers' of the padded batch."""

    name = "selective scan"

    def __init__(self, lengths: str) -> None:
        self.title = f"{self.name}, {lengths}, d {CHANNELS}, S {STATES}"
        self.lengths = LENGTHS[lengths]
        count = sum(self.lengths)
        sizes = {"x": (CHANNELS,), "dt": (CHANNELS,), "B": (1, STATES), "C": (1, STATES)}
        self.tensors = {name: torch.randn(count, *shape) for name, shape in sizes.items()}
        self.tensors["dt"] *= 0.5
        self.tensors["A"] = -torch.rand(CHANNELS, STATES) * 8 - 0.1
        self.tensors["D"] = torch.randn(CHANNELS)
        self.operations = 0.0
        self.numbers = count * CHANNELS * STATES

    def batch(self, tensor: Tensor) -> rl.Ragged:
        return rl.Ragged.from_flat(tensor, lengths=self.lengths)

    def ours(self, tensors: dict[str, Tensor]) -> Tensor:
        batches: Any = {name: self.batch(tensors[name]) for name in ("x", "dt", "B", "C")}
        y, _ = rl.nn.selective_scan(**batches, A=tensors["A"], D=tensors["D"], softplus=True)
        return y.values

    def theirs(self, tensors: dict[str, Tensor]) -> Tensor:
        from transformers.models.mamba.modeling_mamba import mamba_selective_scan as scan

        x, dt, of_b, of_c = (padded(self.batch(tensors[name])) for name in ("x", "dt", "B", "C"))
        y = scan(
            *(x.transpose(1, 2), dt.transpose(1, 2), tensors["A"]),
            *(of_b[:, :, 0].transpose(1, 2), of_c[:, :, 0].transpose(1, 2), tensors["D"]),
            delta_softplus=True,
        )
        y = y[0] if isinstance(y, tuple) else y
        y = y.transpose(1, 2)
        return torch.cat([part[:length] for part, length in zip(y, self.lengths, strict=True)])

    def by_mambapy(self, tensors: dict[str, Tensor]) -> Tensor:
        """The parallel scan of mambapy, of the padded batch."""
        from mambapy.pscan import pscan

        x, dt, of_b, of_c = (padded(self.batch(tensors[name])) for name in ("x", "dt", "B", "C"))
        delta = torch.nn.functional.softplus(dt)
        decays = (delta.unsqueeze(3) * tensors["A"]).exp()
        h = pscan(decays, (delta * x).unsqueeze(3) * of_b)
        y = (h @ of_c.transpose(2, 3)).squeeze(3) + tensors["D"] * x
        return torch.cat([part[:length] for part, length in zip(y, self.lengths, strict=True)])


class Attention:
    """Linear attention of one sequence, and transformers' in chunks."""

    by_mambapy = None

    def __init__(self, delta: bool) -> None:
        self.delta = delta
        name = "gated delta rule" if delta else "Mamba-2"
        self.title = f"{name}, {HEADS} heads of {SIZE} x {SIZE}, T {STEPS}"
        self.tensors = {name: torch.randn(STEPS, HEADS, SIZE) for name in "qkv"}
        self.tensors["k"] = torch.nn.functional.normalize(self.tensors["k"], dim=-1)
        self.tensors["dt"] = torch.rand(STEPS, HEADS)
        self.tensors["A"] = -torch.rand(HEADS)
        self.numbers = 0
        self.operations = 2.0 * (3 if delta else 2) * STEPS * HEADS * SIZE * SIZE

    def ours(self, tensors: dict[str, Tensor]) -> Tensor:
        parts = [tensors[name] for name in "qkv"]
        parts += [tensors["dt"] * tensors["A"], tensors["dt"]]
        batches: Any = [rl.Ragged.from_flat(part, lengths=[STEPS]) for part in parts]
        return rl.nn.linear_attention(*batches, delta=self.delta)[0].values

    def theirs(self, tensors: dict[str, Tensor]) -> Tensor:
        q, k, v, dt = (tensors[name].unsqueeze(0) for name in ("q", "k", "v", "dt"))
        if self.delta:
            from transformers.models.qwen3_next import modeling_qwen3_next as qwen

            # Their queries are multiplied by SIZE ** -0.5.
            decays = dt * tensors["A"]
            y = qwen.torch_chunk_gated_delta_rule(q * SIZE**0.5, k, v, decays, dt)[0]
        else:
            from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan as scan

            y = scan(v, dt, tensors["A"], k, q, 256)
        y = y[0] if isinstance(y, tuple) else y
        return y.reshape(STEPS, HEADS, SIZE)


def infer(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        function(tensors)


def train(function: Callable[..., Tensor], tensors: dict[str, Tensor]) -> None:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    function(leaves).sum().backward()


def memory() -> None:
    """Print the peak memory of a training step of a scan, without inputs, outputs and gradients."""
    steps, channels, states = 4096, 1536, 16
    tensors = [torch.randn(steps, channels), 0.5 * torch.randn(steps, channels)]
    tensors += [-torch.rand(channels, states), *torch.randn(2, steps, 1, states).unbind()]
    leaves = [tensor.requires_grad_() for tensor in tensors]

    def batch(tensor: Tensor) -> rl.Ragged:
        return rl.Ragged.from_flat(tensor, lengths=[len(tensor)])

    def step(count: int) -> None:
        x, dt, rates, *of_groups = leaves
        of_b, of_c = [batch(each[:count]) for each in of_groups]
        y, _ = rl.nn.selective_scan(
            batch(x[:count]), batch(dt[:count]), rates, of_b, of_c, softplus=True
        )
        y.values.backward(torch.ones_like(y.values))

    step(8)
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    # The output, its gradient, and the gradients of x and dt before they are added.
    counted = 4 * steps * channels * 4
    above = peak_of(partial(step, steps)) - counted
    share = above / (4 * steps * channels * states)
    print(
        f"T {steps}, d {channels}, S {states}: {above / 2**20:.0f} MiB, {share:.4f} of T d S floats"
    )


def compare(
    case: Scan | Attention, run: Callable[..., None], rounds: int, is_short: bool
) -> dict[str, float]:
    """The median milliseconds of a call by each package, and ``ours``."""
    calls = {"ours": partial(run, case.ours, case.tensors)}
    is_slow = isinstance(case, Scan) and run is train
    for peer in installed():
        function = getattr(case, PEERS[peer])
        if function is not None and not (is_slow and is_short and peer == "transformers"):
            calls[peer] = partial(run, function, case.tensors)
    rounds = 1 if is_slow and "transformers" in calls else rounds
    times = interleave(calls, rounds, clock=clock())
    return {name: 1e3 * statistics.median(samples) for name, samples in times.items()}


def clock() -> Callable[[], float]:
    """The time of the processor for one thread, which other programs change less; else the wall's."""
    return time.process_time if torch.get_num_threads() == 1 else time.perf_counter


def installed() -> list[str]:
    """The packages that can be compared."""
    return [name for name in PEERS if find_spec(name) is not None]


def check(case: Scan | Attention) -> None:
    """Raise if a package has other results."""
    for peer in installed():
        function = getattr(case, PEERS[peer])
        if function is not None:
            pair = case.ours(case.tensors), function(case.tensors)
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)


def print_rows(threads: int, rounds: int, is_short: bool, exponentials: float | None) -> None:
    """Print the rows of a number of threads."""
    torch.set_num_threads(threads)
    multiply = peak(torch.float32)
    assert multiply is not None
    fastest = multiply() / min(interleave({"peak": multiply}, 5, clock=clock())["peak"])
    for case in (Scan("equal"), Scan("fill 0.4"), Attention(False), Attention(True)):
        check(case)
        for run in (infer, train):
            medians = compare(case, run, rounds, is_short)
            ours = medians["ours"]
            share = case.operations / (ours / 1e3) / fastest if run is infer else 0
            cells = [case.title, run.__name__, str(threads), f"{ours:.3g}"]
            cells.append(f"{share:.2f}" if share else "")
            bound = 0.0
            if exponentials is not None:
                of_exp, of_sums = OF_SCANS[run.__name__]
                seconds = of_exp / (1e9 * exponentials * threads) + 2 * of_sums / fastest
                bound = 1e3 * case.numbers * seconds
            cells.append(f"{ours / bound:.2f}" if bound else "")
            for peer in installed():
                other = medians.get(peer)
                cells += ["", ""] if other is None else [f"{other:.4g}", f"{other / ours:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


def training_scan() -> None:
    """Print a training step of a scan short enough for transformers, whose time grows faster than it."""
    case = Scan("4 x 256")
    medians = compare(case, train, 1, False)
    for peer in installed():
        ratio = medians[peer] / medians["ours"]
        print(f"{case.title}: {medians['ours']:.3g} ms, {peer} {medians[peer]:.4g} ms, {ratio:.0f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "part", nargs="?", choices=["times", "memory", "training-scan"], default="times"
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--exponentials", type=float, help="a thousand million per second, of make rates"
    )
    parser.add_argument(
        "--without-training-scans", action="store_true", help="theirs take a minute"
    )
    chosen = parser.parse_args()
    torch.manual_seed(0)
    if chosen.part == "memory":
        torch.set_num_threads(chosen.threads[0])
        memory()
        return
    if chosen.part == "training-scan":
        torch.set_num_threads(chosen.threads[0])
        training_scan()
        return
    columns = ["recurrence", "", "threads", "ms", "share of the peak", "times the bound"]
    for peer in installed():
        columns += [f"{peer} ms", "ratio"]
    print(f"Instruction set: {library().isa}.\n")
    print(f"| {' | '.join(columns)} |\n" + "| --- " * len(columns) + "|")
    for threads in chosen.threads:
        print_rows(threads, chosen.rounds, chosen.without_training_scans, chosen.exponentials)


if __name__ == "__main__":
    main()
