"""Speed on the device, end to end: from values and offsets there to last states and gradients
there.

All variants begin with flat values and offsets on the device and lengths on the host, like those of
a DataLoader, and end with the last state of each sequence and the gradients of values and weights.
Padding, packing and gathering of the last step are included in torch's times.
"""

from __future__ import annotations

import itertools
import operator
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from harness.lengths import LENGTHS
from torch import Tensor
from torch.nn.utils.rnn import pack_padded_sequence

import raglane as rl
from on_device.base import Context, Item, NotHereError, Part, Row
from on_device.layers import state_of
from on_device.timing import milliseconds, times_table
from raglane.segments import offsets_from_lengths

__all__ = ["CELLS", "PART", "TRITON", "Case", "cases"]

CELLS, _LENGTHS, _DTYPES = ("LSTM", "GRU", "RNN"), ("lognormal", "ewt"), ("float32", "bfloat16")
_HIDDEN, _BATCHES = (256, 128, 512, 64, 1024), (64, 256, 16)
# How much further from the first case each step along an axis is: lengths and dtypes matter less
# than sizes.
_STEPS = (1, 1, 1, 4, 4, 0)
# The sizes for which the printed kernels are measured too: larger ones take a minute to compile.
TRITON = (256, 128, 512, 64)
# The tolerance relative to the largest number, against torch packed in float64.
_ALLOWED = {"float32": 1e-3, "bfloat16": 0.1}
_ROUNDS, _SECONDS = 7, 1.0
OURS, PACKED, TF32 = "ours", "torch packed", "torch packed, TF32"

Step = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A layer on a batch; D is H."""

    cell: str
    hidden: int
    batch: int
    lengths: str
    dtype: str
    mode: str

    def __str__(self) -> str:
        return f"{self.cell} H {self.hidden} B {self.batch} {self.lengths} {self.dtype} {self.mode}"


def cases(is_rehearsal: bool) -> list[Case]:
    """Return all cases, sorted by their distance from an LSTM of medium size."""
    hidden, batches = ((8,), (4,)) if is_rehearsal else (_HIDDEN, _BATCHES)
    axes: list[tuple[Any, ...]] = [CELLS, hidden, batches, _LENGTHS, _DTYPES, ("train", "infer")]

    def distance(place: tuple[int, ...]) -> int:
        return sum(map(operator.mul, place, _STEPS))

    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        Case(*(axis[place] for axis, place in zip(axes, each, strict=True)))
        for each in sorted(places, key=distance)
    ]


def _padded(values: Tensor, offsets: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return a padded tensor ``(B, T, D)`` and its mask, in plain torch."""
    steps = torch.arange(int(lengths.max()), device=values.device)
    mask = steps < offsets.diff()[:, None]
    rows = (offsets[:-1, None] + steps).clamp(max=values.shape[0] - 1)
    return values[rows] * mask[:, :, None], mask


def _steps(
    layer: Any, own: Any, values: Tensor, offsets: Tensor, lengths: Tensor
) -> dict[str, Step]:
    """Return the forward function of each variant, up to the last states, by name."""

    def ours() -> list[Tensor]:
        batch = rl.Ragged.from_flat(values, lengths=lengths)
        return [part[-1] for part in state_of(own(batch)[1])]

    def ours_padded() -> list[Tensor]:
        with rl.use_backend(schedule="padded", backend="torch"):
            return ours()

    def ours_by(backend: str) -> list[Tensor]:
        with rl.use_backend(backend=backend):
            return ours()

    def packed() -> list[Tensor]:
        padded, _ = _padded(values, offsets, lengths)
        packs = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
        return [part[-1] for part in state_of(layer(packs)[1])]

    def padded() -> list[Tensor]:
        rows, _ = _padded(values, offsets, lengths)
        out, _ = layer(rows)
        return [out[torch.arange(len(lengths), device=out.device), offsets.diff() - 1]]

    def masked() -> list[Tensor]:
        rows, mask = _padded(values, offsets, lengths)
        out = layer(rows)[0] * mask[:, :, None]
        return [out[torch.arange(len(lengths), device=out.device), offsets.diff() - 1]]

    ways = {
        OURS: ours,
        "ours padded": ours_padded,
        PACKED: packed,
        "torch padded": padded,
        "torch masked": masked,
    }
    is_printed = own is not None and values.is_cuda and own.hidden_size in TRITON
    each = {"ours by Triton": "triton", "ours by cuDNN": "torch"} if is_printed else {}
    return ways | {name: partial(ours_by, backend) for name, backend in each.items()}


def _finish(
    step: Step, parts: list[Tensor], gradient: Tensor, case: Case, device: torch.device
) -> Callable[[], Any]:
    """Return the timed functions: the last states, and in training the gradients of a loss on
    ``h``.
    """
    half = (
        torch.autocast(device.type, dtype=torch.bfloat16)
        if case.dtype == "bfloat16"
        else nullcontext()
    )

    def train() -> list[Tensor]:
        with half:
            h = step()[0]
        return [h.detach(), *torch.autograd.grad(h, parts, gradient.to(h.dtype))]

    def infer() -> list[Tensor]:
        with torch.no_grad(), half:
            return step()[:1]

    return train if case.mode == "train" else infer


def _run(context: Context, case: Case) -> Row:
    device = context.device
    generator = torch.Generator("cpu").manual_seed(case.hidden * case.batch)
    lengths = torch.tensor(LENGTHS[case.lengths].draw(case.batch), dtype=torch.int64, device="cpu")
    offsets = offsets_from_lengths(lengths).to(device)
    values = torch.randn(int(lengths.sum()), case.hidden, generator=generator).to(device)
    gradient = torch.randn(case.batch, case.hidden, generator=generator).to(device)
    layer = getattr(torch.nn, case.cell)(case.hidden, case.hidden, batch_first=True).to(device)
    own = getattr(rl.nn, case.cell)(case.hidden, case.hidden, device=device)
    own.load_state_dict(layer.state_dict())
    exact = getattr(torch.nn, case.cell)(
        case.hidden, case.hidden, batch_first=True, device=device
    ).double()
    exact.load_state_dict(layer.state_dict())

    def timed(layer: Any, own: Any, values: Tensor) -> dict[str, Callable[[], Any]]:
        leaf = values.clone().requires_grad_()
        found: dict[str, Callable[[], Any]] = {}
        for name, step in _steps(layer, own, leaf, offsets, lengths).items():
            weights = list((own if name.startswith("ours") else layer).parameters())
            found[name] = _finish(step, [leaf, *weights], gradient, case, device)
        return found

    full = replace(case, dtype="float64")
    leaf = values.double().requires_grad_()
    step = _steps(exact, None, leaf, offsets, lengths)[PACKED]
    truth = _finish(step, [leaf, *exact.parameters()], gradient.double(), full, device)()
    calls, faults = timed(layer, own, values), {}
    if case.dtype == "float32" and device.type == "cuda":
        calls[TF32] = _with_tf32(calls[PACKED])
    for name, call in list(calls.items()):
        allowed = _ALLOWED["bfloat16" if name == TF32 else case.dtype]
        try:
            wrong = _largest_error(call(), truth)
        # Any error ends only this row.
        except Exception as error:
            faults[name] = f"{type(error).__name__}: {error}"[:200]
            del calls[name]
            continue
        if not wrong < allowed:
            faults[name] = f"off by {wrong:.1e}, and {allowed:.0e} is allowed"
            del calls[name]
    times = milliseconds(calls, device, 3 if context.is_rehearsal else _ROUNDS, _SECONDS)
    row: Row = {"milliseconds": times, "elements": int(lengths.sum()), "density": _density(lengths)}
    # "ours padded" runs torch's kernel, which some processors lack in bfloat16.
    ours = [
        name
        for name in faults
        if name == OURS or (name.startswith(OURS) and "torch padded" not in faults)
    ]
    return (
        row | ({"faults": faults} if faults else {}) | ({"fault": faults[ours[0]]} if ours else {})
    )


def _with_tf32(call: Callable[[], Any]) -> Callable[[], Any]:
    """Let cuDNN round products to TF32, as PyTorch does by default."""

    def run() -> Any:
        torch.backends.cudnn.allow_tf32 = True
        try:
            return call()
        finally:
            torch.backends.cudnn.allow_tf32 = False

    return run


def _density(lengths: Tensor) -> float:
    return round(float(lengths.sum() / (len(lengths) * lengths.max())), 3)


def _largest_error(found: list[Tensor], truth: list[Tensor]) -> float:
    return max(
        float((mine.double() - right).abs().max() / right.abs().max().clamp(min=1e-30))
        for mine, right in zip(found, truth, strict=True)
    )


def _items(context: Context) -> Iterator[Item]:
    if context.device.type != "cuda" and not context.is_rehearsal:
        raise NotHereError("a GPU; benchmarks/layers.py measures CPUs")
    # No TF32, like in the tests, except where a name says so.
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for case in cases(context.is_rehearsal):
        yield Item(str(case), partial(_run, context, case))


def ratio(times: Mapping[str, float]) -> float | None:
    """Return the time of torch's fastest variant over ours, both without TF32."""
    others = [time for name, time in times.items() if name.startswith("torch") and name != TF32]
    return min(others) / times[OURS] if others and OURS in times else None


def _table(rows: list[Row]) -> list[str]:
    timed = [row for row in rows if row.get("milliseconds")]
    ratios = [found for row in timed if (found := ratio(row["milliseconds"])) is not None]
    lines = []
    if ratios:
        mean = statistics.geometric_mean(ratios)
        lines += [
            f"The fastest of torch's ways over ours: {mean:.2f} on average, {min(ratios):.2f} at worst.",
            "",
        ]
    lines += times_table(
        rows,
        {
            "case": lambda row: row["key"],
            "elements; density": lambda row: f"{row['elements']:,}; {row['density']:.2f}",
            "ratio": lambda row: (
                "-" if (found := ratio(row["milliseconds"])) is None else f"{found:.2f}"
            ),
        },
    )
    return [*lines, "", "Milliseconds; the medians of rounds in which all took turns."]


PART = Part(
    "speed",
    "how fast are RNN, LSTM and GRU against torch's ways, end to end?",
    _items,
    _table,
    share=0.4,
)
