"""The transducer's loss and its gradients (``rl.transduction.rnnt_loss``) against a padded twin in plain
torch.

    python benchmarks/transducer.py > benchmarks/results/transducer.md

The twin computes the joint for all frames and labels of a padded batch, log-softmax, and the
recursion over diagonals, by autograd. Both take turns in one process, and a figure is a median. The
peak is that of a new process for each, over the memory before the step. Frames and states are
random numbers, whose gradients are computed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from harness.memory import peak_of
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import raglane as rl
from raglane.native.machine import cpu_name

BATCH, FRAMES, LABELS, HIDDEN = 16, 400, 60, 512
NEVER = -1e30  # the derivative of logaddexp of two infinities is NaN
CASES = [(classes, equal) for classes in (1024, 128) for equal in (False, True)]


class Problem:
    """A batch with lengths from half to the whole, or of equal lengths."""

    def __init__(self, classes: int, equal: bool) -> None:
        torch.manual_seed(0)
        frames, labels = (
            torch.full((BATCH,), most) if equal else torch.randint(most // 2, most + 1, (BATCH,))
            for most in (FRAMES, LABELS)
        )
        self.frames, self.labels = frames, labels
        self.encoder = torch.randn(int(frames.sum()), HIDDEN, requires_grad=True)
        self.predictor = torch.randn(int(labels.sum()) + BATCH, HIDDEN, requires_grad=True)
        self.targets = rl.Ragged.from_flat(
            torch.randint(1, classes, (int(labels.sum()),)), lengths=labels
        )
        self.joint = torch.nn.Linear(HIDDEN, classes)

    def gradients(self, loss: Tensor) -> tuple[Tensor, ...]:
        return loss.detach(), *torch.autograd.grad(
            loss, [self.encoder, self.predictor, *self.joint.parameters()]
        )

    def raglane(self) -> tuple[Tensor, ...]:
        encoder = rl.Ragged.from_flat(self.encoder, lengths=self.frames)
        predictor = rl.Ragged.from_flat(self.predictor, lengths=self.labels + 1)
        return self.gradients(
            rl.transduction.rnnt_loss(encoder, predictor, self.targets, self.joint)
        )

    def logits(self) -> Tensor:
        """``(B, T, U + 1, C)``."""
        encoder = pad_sequence(self.encoder.split(self.frames.tolist()), batch_first=True)
        predictor = pad_sequence(self.predictor.split((self.labels + 1).tolist()), batch_first=True)
        return self.joint((encoder.unsqueeze(2) + predictor.unsqueeze(1)).tanh_())  # type: ignore[no-any-return]

    def padded(self) -> tuple[Tensor, ...]:
        scores = self.logits().log_softmax(-1)
        count, frames, states, _ = scores.shape
        following = pad_sequence(
            [torch.cat([part, part.new_zeros(1)]) for part in self.targets], batch_first=True
        )
        index = torch.stack([torch.zeros_like(following), following], -1)
        picked = scores.gather(3, index.unsqueeze(1).expand(-1, frames, -1, -1))
        # Row d of the skewed tables is the diagonal t + u = d.
        column = torch.arange(states)
        frame = torch.arange(frames + states - 1).unsqueeze(1) - column
        outside = (frame < 0) | (frame >= self.frames[:, None, None])
        skewed = picked[:, frame.clamp(0, frames - 1), column].masked_fill(
            outside.unsqueeze(-1), NEVER
        )
        blank, label = (part.unbind(1) for part in skewed.unbind(-1))
        never = scores.new_full((count, 1), NEVER)
        alpha = torch.cat([scores.new_zeros(count, 1), never.expand(-1, states - 1)], 1)
        rows = [alpha]
        for stay, emit in zip(blank, label, strict=True):
            alpha = torch.logaddexp(alpha + stay, torch.cat([never, (alpha + emit)[:, :-1]], 1))
            rows.append(alpha)
        ends = torch.stack(rows)[self.frames + self.labels, torch.arange(count), self.labels]
        return self.gradients(-ends.sum() / self.labels.sum())


WAYS = ("raglane", "padded")


def timed(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start


def times(
    problem: Problem, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """The median seconds of each, which agree with the padded twin."""
    expected = problem.padded()
    for way in WAYS:
        for own, other in zip(getattr(problem, way)(), expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))
    del expected
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way, seconds in taken.items():
            seconds.append(timed(getattr(problem, way), clock))
    return {way: statistics.median(seconds) for way, seconds in taken.items()}


def peak(way: str, classes: int, equal: bool) -> float:
    """The peak memory of a step in MB, in a new process."""
    command = [
        sys.executable,
        __file__,
        "--peak",
        way,
        "--classes",
        str(classes),
        *(["--equal"] if equal else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return float(done.stdout)


def measure(way: str, classes: int, equal: bool) -> float:
    problem = Problem(classes, equal)
    small = Problem(classes, equal)  # loads all libraries
    small.frames, small.labels = torch.tensor([3]), torch.tensor([2])
    small.encoder, small.predictor = small.encoder.detach()[:3], small.predictor.detach()[:3]
    small.encoder.requires_grad_(), small.predictor.requires_grad_()
    small.targets = rl.Ragged([[1, 2]])
    getattr(small, way)()
    return peak_of(getattr(problem, way)) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak")
    parser.add_argument("--classes", type=int)
    parser.add_argument("--equal", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="CPU time on one thread, if the machine has other work",
    )
    args = parser.parse_args()
    torch.set_num_threads(1 if args.cpu_time else 2)
    clock = time.process_time if args.cpu_time else time.perf_counter
    if args.peak:
        print(measure(args.peak, args.classes, args.equal))
        return
    print("# The transducer's loss\n")
    kind = "CPU time of 1 thread" if args.cpu_time else "2 threads"
    print(
        f"`python benchmarks/transducer.py`: {cpu_name()}, {kind}, torch {torch.__version__}, float32.\n"
    )
    print(
        f"{BATCH} sequences of up to {FRAMES} frames and {LABELS} labels, joint of {HIDDEN}. Times and peak memory of\n"
        "the joint, the loss and all gradients. In brackets: relative to the padded twin.\n"
    )
    print("| classes | lengths |", " | ".join(f"{name}, s" for name in WAYS), "|", end=" ")
    print(" | ".join(f"{name}, MB" for name in WAYS), "|\n" + "| --- " * (2 + 2 * len(WAYS)) + "|")
    for classes, equal in CASES:
        if args.classes not in (None, classes):
            continue
        seconds = times(Problem(classes, equal), args.rounds, clock)
        megabytes = (
            dict.fromkeys(WAYS, 0.0)
            if args.no_memory
            else {way: peak(way, classes, equal) for way in WAYS}
        )
        cells = [f"{seconds[way]:.2f} ({seconds[way] / seconds['padded']:.2f})" for way in WAYS]
        cells += [
            f"{megabytes[way]:,.0f} ({megabytes[way] / (megabytes['padded'] or 1):.2f})"
            for way in WAYS
        ]
        print(
            f"| {classes:,} | {'equal' if equal else 'half to whole'} |",
            " | ".join(cells),
            "|",
            flush=True,
        )


if __name__ == "__main__":
    main()
