"""Tests that no operation on a Ragged waits for the device; CUDA graphs, streams, sanitizers, and
other dtypes.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import raglane as rl
from on_device.base import Context, Item, NotHereError, Part, Row
from on_device.layers import LAYERS, LOOPS, build
from raglane.nn.pooling import POOLINGS
from raglane.nn.transduction.attention import KINDS as ATTENTIONS

__all__ = ["PART", "SIZES"]

_LENGTHS, SIZES = [5, 0, 9, 1, 7, 7], (12, 16)
_D, _H = SIZES
# The tolerance relative to the largest number, against float64.
_ALLOWED = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}

# Cells of the sanitizer, and the most seconds of each of its tools.
_SANITIZED, _PATIENCE = ("LSTM", "LayerNormGRU", "SRU"), 60.0

Call = Callable[[], Any]
"""A function that returns a tensor, a Ragged, or several of them."""


class Given:
    """A batch on the device with lengths on the host, like that of a DataLoader, and its labels."""

    def __init__(self, device: torch.device) -> None:
        self.device, total = device, sum(_LENGTHS)
        self.values = torch.randn(total, _D, device=device).requires_grad_()
        self.batch = self.like(self.values)
        self.other = self.like(torch.rand(total, _D, device=device))
        self.labels = self.like(torch.arange(total, device=device) % _D)
        # One label per sequence, never the blank.
        ones = torch.ones(len(_LENGTHS), dtype=torch.int64, device=device)
        self.targets = rl.Ragged.from_flat(ones, lengths=[1] * len(_LENGTHS))
        self.per_sequence = torch.randn(len(_LENGTHS), _D, device=device)
        self.weight = torch.randn(3, _D, device=device)
        self.padded, self.lengths = (
            torch.randn(len(_LENGTHS), 9, _D, device=device),
            torch.tensor(_LENGTHS),
        )

    def like(self, values: Tensor) -> rl.Ragged:
        """Return flat values with the lengths of the batch."""
        return rl.Ragged.from_flat(values, lengths=_LENGTHS)


def _layer(given: Given, name: str, **options: Any) -> Call:
    layer = build(name, (_D, _H), given.device, torch.float32, **options)
    return lambda: layer(given.batch)


def _layer_with_resets(given: Given, name: str) -> Call:
    layer, resets = (
        build(name, (_D, _H), given.device, torch.float32),
        given.like(given.values.detach()[:, 0] > 1),
    )
    layer.warm_up(resets=True)
    return lambda: layer(given.batch, resets=resets)


def _deep_layer(given: Given, name: str) -> Call:
    layer = build(name, (_D, _H), given.device, torch.float32, num_layers=2, bidirectional=True)
    return lambda: layer(given.batch)


def _padded_layer(given: Given, name: str) -> Call:
    layer = build(name, (_D, _H), given.device, torch.float32, batch_first=True)
    return lambda: layer(given.padded, lengths=given.lengths)


def _pooling(given: Given, name: str) -> Call:
    pooling = POOLINGS[name](_D, device=given.device)
    return lambda: pooling(given.batch)


def _crf(given: Given, operation: Callable[[Any, Given], Any]) -> Call:
    crf = rl.nn.CRF(_D).to(given.device)
    return lambda: operation(crf, given)


def _decoder(given: Given, attention: Any) -> Call:
    decoder = rl.transduction.AttentionDecoder(
        3, _D, _H, attention=attention, scheduled_sampling=0.5, device=given.device
    )
    return lambda: decoder.loss(given.batch, given.targets)


def _plain(given: Given, operation: Callable[[Given], Any]) -> Call:
    return lambda: operation(given)


def _log_softmax(values: Tensor) -> Tensor:
    return values.log_softmax(-1)


OPERATIONS: dict[str, Callable[[Given], Any]] = {
    "first, last": lambda g: (g.batch.first(), g.batch.last()),
    "sum, mean": lambda g: (g.batch.sum(1), g.batch.mean(1)),
    "amax, amin": lambda g: (g.batch.amax(1, empty=0.0), g.batch.amin(1, empty=0.0)),
    "logsumexp, softmax": lambda g: (g.batch.logsumexp(1), g.batch.softmax(1)),
    "cumsum": lambda g: g.batch.cumsum(1),
    "reverse": lambda g: g.batch.reverse(),
    "shift": lambda g: (g.batch.shift(1), g.batch.shift(-2)),
    "broadcast": lambda g: g.batch.broadcast(g.per_sequence),
    "truncate": lambda g: g.batch.truncate(3),
    "windows": lambda g: g.batch.windows(2),
    "concat": lambda g: g.batch.concat(g.other),
    "select": lambda g: g.batch.select(torch.tensor([2, 0])),
    "slice": lambda g: g.batch[1:4],
    "arithmetic": lambda g: torch.relu(g.batch * 2 + g.other),
    "linear": lambda g: F.linear(g.batch, g.weight),
    "to_padded": lambda g: g.batch.to_padded(),
    "to_packed": lambda g: g.batch.to_packed().data,
    "from_padded": lambda g: rl.Ragged.from_padded(g.padded, g.lengths),
}
LOSSES: dict[str, Callable[[Given], Any]] = {
    "mse_loss": lambda g: F.mse_loss(g.batch, g.other),
    "l1_loss": lambda g: F.l1_loss(g.batch, g.other),
    "huber_loss": lambda g: F.huber_loss(g.batch, g.other),
    "binary_cross_entropy_with_logits": lambda g: F.binary_cross_entropy_with_logits(
        g.batch, g.other
    ),
    "cross_entropy": lambda g: F.cross_entropy(g.batch, g.labels),
    "nll_loss": lambda g: F.nll_loss(g.batch.map(_log_softmax), g.labels),
    "ctc_loss": lambda g: rl.transduction.ctc_loss(g.batch.map(_log_softmax), g.targets),
}
CRF: dict[str, Callable[[Any, Given], Any]] = {
    "loss": lambda crf, g: crf.loss(g.batch, g.labels),
    "marginals": lambda crf, g: crf.marginals(g.batch),
    "decode": lambda crf, g: crf.decode(g.batch),
}


def _checks(given: Given) -> Iterator[tuple[str, Callable[[], Call]]]:
    """Return the tested operations by name, each as a function that prepares it."""
    for name in LAYERS:
        yield f"layer {name}", partial(_layer, given, name)
        yield f"layer {name}, two in both directions", partial(_deep_layer, given, name)
        yield f"layer {name}, padded with lengths", partial(_padded_layer, given, name)
        if name not in LOOPS:
            yield f"layer {name}, by cuDNN", partial(_layer, given, name, backend="torch")
    for name in LOOPS:
        if "zoneout" not in name:  # whose masks are drawn per episode
            yield f"layer {name}, resets", partial(_layer_with_resets, given, name)
    for name, operation in OPERATIONS.items():
        yield f"operation {name}", partial(_plain, given, operation)
    for name in POOLINGS:
        yield f"pooling {name}", partial(_pooling, given, name)
    for name, operation in LOSSES.items():
        yield f"loss {name}", partial(_plain, given, operation)
    for name in ATTENTIONS:
        yield f"decoder with {name} attention", partial(_decoder, given, name)
    for name, of_crf in CRF.items():
        yield f"CRF {name}", partial(_crf, given, of_crf)


@contextmanager
def _listening(device: torch.device) -> Iterator[None]:
    """Raise an error if an operation waits for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _tensors(found: Any) -> list[Tensor]:
    """Return the tensors of a result."""
    if isinstance(found, rl.Ragged):
        return [found.values]
    if isinstance(found, Tensor):
        return [found]
    return [tensor for part in found for tensor in _tensors(part)]


def _check(context: Context, make: Callable[[], Call], values: Tensor) -> Row:
    call = make()

    def both() -> None:
        parts = [part for part in _tensors(call()) if part.requires_grad]
        if parts:
            torch.autograd.grad(
                parts, [values], [torch.ones_like(part) for part in parts], allow_unused=True
            )

    both()  # the initialisation of libraries may wait
    with _listening(context.device):
        both()
    return {"waits": "no"}


def _captured(context: Context, name: str) -> Row:
    """Capture a layer as a CUDA graph, and replay it with other values in the same memory."""
    if context.device.type != "cuda":
        raise NotHereError("a GPU")
    layer, given = (
        build(name, (_D, _H), context.device, torch.float32).eval(),
        Given(context.device),
    )
    values = given.values.detach()
    batch = given.like(values)
    with torch.no_grad():
        side = torch.cuda.Stream(context.device)
        side.wait_stream(torch.cuda.current_stream(context.device))
        with torch.cuda.stream(side):
            for _ in range(3):
                layer(batch)
        torch.cuda.current_stream(context.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = _tensors(layer(batch))
        values.copy_(torch.randn_like(values))
        graph.replay()
        for mine, right in zip(found, _tensors(layer(batch)), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
    return {"capture": "equal"}


def _sanitized(context: Context, tool: str) -> Row:
    """Run small calls of printed kernels, with resets, forward and backward, under a tool of
    compute-sanitizer.
    """
    if context.device.type != "cuda":
        raise NotHereError("a GPU")
    sanitizer = shutil.which("compute-sanitizer") or shutil.which(
        "/usr/local/cuda/bin/compute-sanitizer"
    )
    if sanitizer is None:
        raise NotHereError("compute-sanitizer of CUDA")
    sizes = f"({_D}, {_H}), torch.device('cuda'), torch.float32, backend='triton'"
    code = "import torch; from on_device.layers import build\n"
    code += f"for name in {_SANITIZED}: build(name, {sizes}).warm_up(resets=True)"
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, "-c", code]
    own = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in sys.path if part)}
    patience = max(1.0, min(_PATIENCE, context.left()))
    try:
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, check=False, timeout=patience
        )
    except subprocess.TimeoutExpired:
        raise NotHereError(f"more time than {patience:.0f} s") from None
    told = done.stdout + done.stderr
    return (
        {"errors": "none"} if done.returncode == 0 else {"fault": f"{tool}: {told.strip()[-2000:]}"}
    )


def _on_a_stream(context: Context, name: str) -> Row:
    """Compare a layer on a separate stream, forward and backward, with the default stream."""
    if context.device.type != "cuda":
        raise NotHereError("a GPU")
    layer, given = (
        build(name, (_D, _H), context.device, torch.float32).eval(),
        Given(context.device),
    )

    def gradients() -> tuple[Tensor, ...]:
        parts = [part for part in _tensors(layer(given.batch)) if part.requires_grad]
        wanted = [given.values, *layer.parameters()]
        return torch.autograd.grad(parts, wanted, [torch.ones_like(part) for part in parts])

    wanted = gradients()
    torch.cuda.synchronize(context.device)
    with torch.cuda.stream(torch.cuda.Stream(context.device)):
        found = gradients()
    torch.cuda.synchronize(context.device)
    for mine, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-4)
    return {"stream": "equal"}


def _second_dtype(context: Context, name: str, dtype: torch.dtype) -> Row:
    """Compare a layer in a dtype with float64 on the CPU, for the same rounded weights and
    values.
    """
    # Always the same: of 600 draws, torch's float16 arithmetic is off by more than is allowed in 2
    # of a LayerNormLSTM.
    torch.manual_seed(0)
    layer = build(name, (_D, _H), torch.device("cpu"), torch.float64).eval().to(dtype).double()
    values = torch.randn(sum(_LENGTHS), _D, dtype=torch.float64).to(dtype).double()
    wanted = _tensors(layer(rl.Ragged.from_flat(values, lengths=_LENGTHS)))
    layer.to(device=context.device, dtype=dtype)
    found = _tensors(layer(rl.Ragged.from_flat(values.to(context.device, dtype), lengths=_LENGTHS)))
    error = max(
        float(
            (mine.detach().cpu().double() - right.detach()).abs().max() / right.detach().abs().max()
        )
        for mine, right in zip(found, wanted, strict=True)
    )
    row: Row = {"relative error": error}
    allowed = _ALLOWED[dtype]
    return (
        row
        if error < allowed
        else row | {"fault": f"off by {error:.2g}, and {allowed:g} is allowed"}
    )


def _items(context: Context) -> Iterator[Item]:
    if context.device.type != "cuda" and not context.is_rehearsal:
        raise NotHereError("a GPU: a CPU is never waited for")
    given = Given(context.device)
    for name, make in _checks(given):
        yield Item(name, partial(_check, context, make, given.values))
    for tool in ("racecheck", "memcheck"):
        yield Item(tool, partial(_sanitized, context, tool))
    for name in LAYERS:
        yield Item(f"graph of {name}", partial(_captured, context, name))
        yield Item(f"stream with {name}", partial(_on_a_stream, context, name))
        for dtype in _ALLOWED:
            what = str(dtype).removeprefix("torch.")
            yield Item(f"{what} in {name}", partial(_second_dtype, context, name, dtype))


def _table(rows: list[Row]) -> list[str]:
    faulty = [row for row in rows if "fault" in row]
    lines = [f"{len(rows) - len(faulty)} of {len(rows)} hold.", ""]
    if faulty:
        lines += ["| what | fault |", "| --- | --- |"]
        lines += [
            f"| {row['key']} | {' '.join(row['fault'].split()).replace('|', '/')} |"
            for row in faulty
        ]
    return lines


PART = Part(
    "waits",
    "does anything wait for the device, and do graphs, streams and dtypes work?",
    _items,
    _table,
    share=0.25,
)
