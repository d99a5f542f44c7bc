"""Resets within sequences, and other people's kernels of Triton: those of TorchRL and FlashRNN, if
they are installed.

All begin with inputs on the device and end with the outputs of every step, or the gradients of
inputs and weights.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import raglane as rl
from on_device.base import Context, Item, NotHereError, Part, Row
from on_device.layers import build
from on_device.timing import milliseconds, times_table

__all__ = ["CELLS", "HIDDEN", "PART", "SIZES", "compile_torchrl", "measure"]

HIDDEN = 128
SIZES = ((128, 16), (512, 64))
CELLS = ("GRU", "LSTM")
_TORCHRL, _FLASHRNN = "TorchRL, resets", "FlashRNN, no resets"
_ALLOWED = 1e-3
_ROUNDS, _SECONDS = 15, 3.0
# One step in so many begins an episode.
_EPISODE = 16
# The fewest sequences of an instance of TorchRL's kernels for this many units.
_FEWEST = 16
# The most seconds for others' kernels of a size to compile.
_PATIENCE = 45.0

Outputs = Callable[[], Tensor]

_late: set[tuple[str, str]] = set()  # cells and variants that took more time to compile


def _kernels_of_torchrl() -> Any:
    if importlib.util.find_spec("torchrl") is None:
        raise NotHereError("TorchRL")
    return importlib.import_module("torchrl.modules.tensordict_module._rnn_triton")


def compile_torchrl(device: torch.device, share: int, shares: int) -> Row:
    """Compile some configurations of TorchRL's GRU, which its tuning tries; those of its LSTM take
    a quarter hour.
    """
    kernels, (batch, steps) = _kernels_of_torchrl(), SIZES[0]
    for name in ("fwd", "bwd"):
        every = getattr(kernels, f"_{name.upper()}_CONFIGS")
        fitting = [each for each in every if each.kwargs["BLOCK_B"] >= _FEWEST]
        getattr(kernels, f"_gru_{name}_kernel").configs = fitting[share % len(fitting) :: shares]
    begun = time.monotonic()
    _once(device, "GRU", batch, steps, _TORCHRL)
    return {"TorchRL, s": round(time.monotonic() - begun, 1)}


def _once(device: torch.device, cell: str, batch: int, steps: int, name: str) -> None:
    """Run the kernels of others once, forward and backward, and without gradients."""
    outputs = _Ways(device, cell, batch, steps).each[name]()
    outputs().sum().backward()
    with torch.no_grad():
        outputs()


def _compile(device: torch.device, cell: str, batch: int, steps: int, name: str) -> None:
    """Compile and tune the kernels of others in another process, which can be ended; the disk keeps
    the results.
    """
    if (cell, name) not in _late:
        process = multiprocessing.get_context("spawn").Process(
            target=_once, args=(device, cell, batch, steps, name)
        )
        process.start()
        process.join(_PATIENCE)
        if not process.is_alive():
            return
        process.kill()
        _late.add((cell, name))
    raise NotHereError(f"compilation takes more than {_PATIENCE:g} s")


def _torchrl(layer: Any, cell: str, values: Tensor, resets: Tensor) -> Outputs:
    run = getattr(_kernels_of_torchrl(), f"{cell.lower()}_triton")
    states = [values.new_zeros(*values.shape[:2], HIDDEN)] * (2 if cell == "LSTM" else 1)
    weights = [
        getattr(layer, f"{kind}_l0") for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    ]
    return lambda: run(values, *states, *weights, resets, input_precision="ieee")[0]


def _flashrnn(layer: Any, cell: str, values: Tensor) -> Outputs:
    if importlib.util.find_spec("flashrnn") is None:
        raise NotHereError("FlashRNN")
    if cell != "LSTM":
        raise NotHereError(f"a kernel of Triton for the {cell} in FlashRNN")
    flashrnn, gates = importlib.import_module("flashrnn").flashrnn, 4
    batch, steps, _ = values.shape

    def run() -> Tensor:
        inputs = torch.nn.functional.linear(values, layer.weight_ih_l0, layer.bias_ih_l0)
        weight = layer.weight_hh_l0.view(gates, 1, HIDDEN, HIDDEN)
        bias = layer.bias_hh_l0.view(gates, 1, HIDDEN)
        rows = inputs.view(batch, steps, gates, 1, HIDDEN)
        out, _ = flashrnn(
            rows, weight, bias, function="lstm", backend="triton_fused", dtype="float32"
        )
        return out[0].reshape(batch, steps, HIDDEN)

    return run


class _Ways:
    """The variants, by name as functions that prepare their calls, and what they share."""

    def __init__(self, device: torch.device, cell: str, batch: int, steps: int) -> None:
        self.layer = layer = build(cell, (HIDDEN, HIDDEN), device, torch.float32)
        self.values = values = torch.randn(batch, steps, HIDDEN, device=device, requires_grad=True)
        resets, lengths = torch.rand(batch, steps, device=device) < 1 / _EPISODE, [steps] * batch
        self.flags = flags = rl.Ragged.from_flat(resets.flatten(), lengths=lengths)

        def ours(own: rl.Ragged | None, backend: str = "auto") -> Tensor:
            with rl.use_backend(backend=backend):
                out, _ = layer(
                    rl.Ragged.from_flat(values.flatten(0, 1), lengths=lengths), resets=own
                )
            return out.values.unflatten(0, (batch, steps))

        self.ours = ours
        self.each: dict[str, Callable[[], Outputs]] = {
            "ours, no resets": lambda: partial(ours, None),
            "ours by cuDNN, no resets": lambda: partial(ours, None, "torch"),
            "ours, resets": lambda: partial(ours, flags),
            "ours by cuDNN, resets": lambda: partial(ours, flags, "torch"),
            _TORCHRL: lambda: _torchrl(layer, cell, values, resets),
            _FLASHRNN: lambda: _flashrnn(layer, cell, values),
        }


def measure(device: torch.device, cell: str, batch: int, steps: int, rounds: int = _ROUNDS) -> Row:
    """Compare each variant with the reference, and time it."""
    ways = _Ways(device, cell, batch, steps)
    layer, values = ways.layer, ways.values
    gradient = torch.randn(batch, steps, HIDDEN, device=device)

    def train(outputs: Outputs) -> list[Tensor]:
        return list(torch.autograd.grad(outputs(), [values, *layer.parameters()], gradient))

    calls: dict[str, Callable[[], object]] = {}
    faults: dict[str, str] = {}
    for name, make in ways.each.items():
        try:
            outputs = make()
            if name in (_TORCHRL, _FLASHRNN):
                _compile(device, cell, batch, steps, name)
            right = ways.ours(ways.flags if name.endswith(", resets") else None, "reference")
            wrong = float((outputs() - right).detach().abs().max())
            if not wrong < _ALLOWED:
                raise ArithmeticError(f"off by {wrong:.1e}, and {_ALLOWED:.0e} is allowed")
            train(outputs)
        # Any error ends only this variant.
        except Exception as error:
            faults[name] = f"{type(error).__name__}: {error}"[:200]
            continue
        calls[f"{name}, train"] = partial(train, outputs)
        calls[f"{name}, infer"] = torch.no_grad()(outputs)
    row: Row = {"milliseconds": milliseconds(calls, device, rounds, _SECONDS)}
    own = [fault for name, fault in faults.items() if name.startswith("ours")]
    return row | ({"faults": faults} if faults else {}) | ({"fault": own[0]} if own else {})


def _items(context: Context) -> Iterator[Item]:
    if context.device.type != "cuda":
        raise NotHereError("a GPU")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for batch, steps in SIZES:
        for cell in CELLS:
            yield Item(
                f"{cell} H {HIDDEN} B {batch} T {steps}",
                partial(measure, context.device, cell, batch, steps),
            )


def _table(rows: list[Row]) -> list[str]:
    lines = times_table(rows, {"layer": lambda row: row["key"]})
    return [*lines, "", "Milliseconds. All products are of float32, without TF32."]


PART = Part(
    "rivals", "how fast are resets, and kernels of Triton by others?", _items, _table, share=0.5
)
