"""Cells that torch has no kernel for: printed for Triton, and as loops of torch's operations.

The layer on a ragged batch, by Triton and by the reference kernel, is compared with the equations
of its cell on all sequences at once, for each step of the longest one, with input products computed
before: as torch's operations, compiled, and as a replayed CUDA graph of one step. Layers that run
long sequences in chunks are timed on such sequences with chunks and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import torch
from harness.lengths import LENGTHS
from torch import Tensor

import raglane as rl
from on_device.base import Context, Item, NotHereError, Part, Row
from on_device.layers import LINEAR, LOOPS, build
from on_device.timing import milliseconds, times_table
from raglane.kernels.program.backend import MACHINES

__all__ = ["PART", "SIZES", "calls_of"]

SIZES = ((64, 256), (256, 128), (16, 512))
_ROUNDS, _SECONDS = 5, 2.5
_ALLOWED = 1e-4  # as in the comparison before the first use

State = tuple[Tensor, ...]
Step = Callable[[Tensor, State], tuple[Tensor, State]]
Calls = Callable[[], Callable[[], object]]


def _walk(step: Step, prepared: Tensor, state: State) -> State:
    """Run steps over ``(T, B, G * H)``."""
    for row in prepared:
        _, state = step(row, state)
    return state


def _train(step: Step, prepared: Tensor, state: State) -> object:
    """Run steps, and backward to the input products."""
    leaf = prepared.detach().requires_grad_()
    last = _walk(step, leaf, state)[0]
    return torch.autograd.grad(last, [leaf], torch.ones_like(last))


def _graph_of(step: Step, prepared: Tensor, state: State) -> Callable[[], object]:
    """Run steps as a graph of one step, whose input and state are in fixed memory."""
    row, kept = prepared[0].clone(), tuple(part.clone() for part in state)
    device = prepared.device
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):
            step(row, kept)
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, new = step(row, kept)
        for old, part in zip(kept, new, strict=True):
            old.copy_(part)

    def replay() -> None:
        for now in prepared:
            row.copy_(now)
            graph.replay()

    return replay


def calls_of(
    device: torch.device, name: str, count: int, hidden: int
) -> tuple[dict[str, Calls], Row]:
    """Return each variant as a function that makes its call, and facts of the batch."""
    layer = build(name, (hidden, hidden), device, torch.float32)
    lengths = LENGTHS["lognormal"].draw(count)
    values = torch.randn(sum(lengths), hidden, device=device, requires_grad=True)
    batch = rl.Ragged.from_flat(values, lengths=lengths)
    gradient = torch.randn(count, hidden, device=device)
    cell, weights = layer.cell, layer._weights()[0]
    steps = max(lengths)
    with torch.no_grad():
        every = torch.arange(steps + 1, device=device) * count
        inputs = torch.randn(steps * count, hidden, device=device)
        prepared = cell.prepare(weights, inputs, every).view(steps, count, -1)
        state = tuple(torch.zeros(count, size, device=device) for size in layer.state_sizes)

    def step(row: Tensor, state: State) -> tuple[Tensor, State]:
        found: tuple[Tensor, State] = cell.step(weights, row, state)
        return found

    def train() -> object:
        out, _ = layer(batch)
        return torch.autograd.grad(
            out.last(), [values, *layer.parameters()], gradient, allow_unused=True
        )

    def by_reference(call: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with rl.use_backend(backend="reference"):
                return call()

        return run

    torch._dynamo.reset()
    compiled: Any = torch.compile(step)
    quiet = torch.no_grad()
    ways: dict[str, Calls] = {
        "layer, train": lambda: train,
        "layer, infer": lambda: quiet(lambda: layer(batch)),
        "reference, train": lambda: by_reference(train),
        "reference, infer": lambda: by_reference(quiet(lambda: layer(batch))),
        "compiled, train": lambda: partial(_train, compiled, prepared, state),
        "compiled, infer": lambda: quiet(partial(_walk, compiled, prepared, state)),
    }
    if device.type == "cuda":
        ways["graph, infer"] = lambda: quiet(quiet(_graph_of)(step, prepared, state))
    return ways, {"elements": sum(lengths), "steps": steps}


def _error(found: Any, right: Any) -> float:
    """Return the largest error of a layer's output, relative to 1 and the largest number."""
    return float(
        (found[0].values - right[0].values).abs().max() / (1 + right[0].values.abs().max())
    )


def _run(context: Context, name: str, count: int, hidden: int) -> Row:
    ways, row = calls_of(context.device, name, count, hidden)
    calls, faults = {}, {}
    torch.manual_seed(0)  # of dropout and zoneout
    with rl.use_backend(backend="reference"):
        right = ways["layer, infer"]()()
    for way, make in ways.items():
        try:
            call = make()
            torch.manual_seed(0)
            found = call()
            if way == "layer, infer" and not _error(found, right) < _ALLOWED:
                raise ArithmeticError(
                    f"off by {_error(found, right):.1e}, and {_ALLOWED:.0e} is allowed"
                )
            calls[way] = call
        # Any error ends only this variant.
        except Exception as error:
            faults[way] = f"{type(error).__name__}: {error}"[:200]
    row["milliseconds"] = milliseconds(
        calls, context.device, 3 if context.is_rehearsal else _ROUNDS, _SECONDS
    )
    own = [fault for way, fault in faults.items() if way.startswith("layer")]
    return row | ({"faults": faults} if faults else {}) | ({"fault": own[0]} if own else {})


def _in_chunks(context: Context, name: str, hidden: int, longest: int) -> Row:
    """Time long sequences in chunks and without; the outputs of both are compared."""
    device, lengths = context.device, [longest, longest // 5, 700, 5]
    layer, machine = build(name, (hidden, hidden), device, torch.float32), MACHINES[device.type]
    values = torch.randn(sum(lengths), hidden, device=device, requires_grad=True)
    batch = rl.Ragged.from_flat(values, lengths=lengths)

    def train() -> Any:
        found = layer(batch)
        torch.autograd.grad(found[0].values.sum(), [values, *layer.parameters()])
        return found

    uncut = machine._replace(places=lambda *given: machine.places(*given[:3], longest))

    def whole(call: Callable[[], Any]) -> Any:
        with mock.patch.dict(MACHINES, {device.type: uncut}):
            return call()

    def infer() -> Any:
        with torch.no_grad():
            return layer(batch)

    calls: dict[str, Callable[[], Any]] = {"layer, train": train, "layer, infer": infer}
    calls |= {
        f"uncut, {mode}": partial(whole, call)
        for mode, call in (("train", train), ("infer", infer))
    }
    error = _error(calls["uncut, infer"](), infer())
    rounds = 3 if context.is_rehearsal else _ROUNDS
    row: Row = {"elements": sum(lengths), "steps": longest, "error": error}
    row["milliseconds"] = milliseconds(calls, device, rounds, _SECONDS)
    return row if error < _ALLOWED else row | {"fault": f"chunks are off by {error:.1e}"}


def _items(context: Context) -> Iterator[Item]:
    if context.device.type != "cuda" and not context.is_rehearsal:
        raise NotHereError("a GPU")
    hidden, longest = (8, 1500) if context.is_rehearsal else (256, 16_384)
    for name in LINEAR:
        yield Item(
            f"{name} H {hidden} B 4 long", partial(_in_chunks, context, name, hidden, longest)
        )
    for count, hidden in ((4, 8),) if context.is_rehearsal else SIZES:
        for name in LOOPS:
            yield Item(f"{name} H {hidden} B {count}", partial(_run, context, name, count, hidden))


def _table(rows: list[Row]) -> list[str]:
    lines = times_table(
        rows,
        {
            "layer": lambda row: row["key"],
            "elements; steps": lambda row: f"{row['elements']:,}; {row['steps']}",
        },
    )
    return [
        *lines,
        "",
        "Milliseconds. A layer computes only existing elements; the steps compute a padded batch.",
    ]


PART = Part(
    "loops", "how fast are the cells that torch has no kernel for?", _items, _table, share=0.4
)
