"""The selective scan and linear attention, and the plain torch code of transformers: times of a
call and of a training step.

Requires transformers 5.24 or later for the comparison; without it the other columns are empty. A
row is one run, in which both take turns. The share is that of the processor's peak of
multiply-adds, for an inference on equal lengths that takes 2 multiply-adds per number of a state
and step, and 3 with the delta rule.

    python benchmarks/recurrences.py --threads 1
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from harness.timing import interleave, peak
from torch import Tensor

import raglane as rl

# A lognormal distribution, as in docs/performance.md: 0.4 of a padded batch is real.
LENGTHS = {"equal": [512] * 8, "fill 0.4": [512, 310, 251, 182, 140, 110, 84, 52]}
CHANNELS = 512
STATES = 16
STEPS = 2048
HEADS = 8
SIZE = 64


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


class Attention:
    """Linear attention of one sequence, and transformers' in chunks."""

    def __init__(self, delta: bool) -> None:
        self.delta = delta
        name = "gated delta rule" if delta else "Mamba-2"
        self.title = f"{name}, {HEADS} heads of {SIZE} x {SIZE}, T {STEPS}"
        self.tensors = {name: torch.randn(STEPS, HEADS, SIZE) for name in "qkv"}
        self.tensors["k"] = torch.nn.functional.normalize(self.tensors["k"], dim=-1)
        self.tensors["dt"] = torch.rand(STEPS, HEADS)
        self.tensors["A"] = -torch.rand(HEADS)
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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--without-training-scans", action="store_true", help="theirs take a minute"
    )
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    try:
        import transformers  # noqa: F401

        has_peer = True
    except ImportError:
        has_peer = False
    multiply = peak(torch.float32)
    assert multiply is not None
    fastest = multiply() / min(interleave({"peak": multiply}, 5)["peak"])
    print("| recurrence | | ms | share of the peak | transformers ms | ratio |")
    print("| --- " * 6 + "|")
    for case in (Scan("equal"), Scan("fill 0.4"), Attention(False), Attention(True)):
        if has_peer:
            pair = case.ours(case.tensors), case.theirs(case.tensors)
            torch.testing.assert_close(*pair, rtol=1e-3, atol=1e-3)
        for run in (infer, train):
            calls = {"ours": partial(run, case.ours, case.tensors)}
            is_slow = isinstance(case, Scan) and run is train
            if has_peer and not (is_slow and chosen.without_training_scans):
                calls["theirs"] = partial(run, case.theirs, case.tensors)
            times = interleave(calls, 1 if is_slow and "theirs" in calls else chosen.rounds)
            medians = {name: 1e3 * statistics.median(samples) for name, samples in times.items()}
            ours = medians["ours"]
            share = case.operations / (ours / 1e3) / fastest if run is infer else 0
            theirs = medians.get("theirs")
            cells = [case.title, run.__name__, f"{ours:.3g}", f"{share:.2f}" if share else ""]
            cells += ["", ""] if theirs is None else [f"{theirs:.4g}", f"{theirs / ours:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
