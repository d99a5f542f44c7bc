"""Forecasts of TiRex on a CPU: its own loop over steps, and the model after rl.accelerate.

    python benchmarks/tirex_forecasts.py --threads 1 > benchmarks/results/tirex.md

Requires tirex-ts. The model has the sizes of the published one (12 blocks of 512 units with 4 heads,
patches of 32 values, a context of 2,048) and new weights: 1 and 64 series of 512 values, 128 values
ahead, which takes four passes. TiRex rounds its recurrence to bfloat16; ``float32`` is its loop
without the rounding, whose results ours must equal. All take turns, each figure is a median.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from functools import partial
from typing import Any

import torch
from harness.timing import interleave
from torch import Tensor, nn

import raglane as rl
from raglane.native.machine import cpu_name

CONTEXT, HORIZON = 512, 128
SERIES = (1, 64)


def model() -> Any:
    """Return TiRex with new weights."""
    from tirex.models.tirex import TiRexZero

    blocks = {"num_blocks": 12, "embedding_dim": 512, "num_heads": 4}
    config = {
        "input_patch_size": 32,
        "output_patch_size": 32,
        "quantiles": [decile / 10 for decile in range(1, 10)],
        "block_kwargs": blocks,
        "input_ff_dim": 2048,
    }
    torch.manual_seed(0)
    made = TiRexZero("torch", config, train_ctx_len=2048)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.02)
    return made.eval()


def in_float32(theirs: Any) -> Any:
    """Return a copy whose cells compute in float32: the loop of the package, without rounding."""
    changed = copy.deepcopy(theirs)
    for block in changed.blocks:
        cell = block.slstm_layer.slstm_cell
        cell._impl_torch = partial(_loop, cell)
    return changed


def _loop(cell: Any, gates: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    heads, gate_count = cell.config.num_heads, cell.config.num_gates
    bias = cell._bias_.view(heads, gate_count, -1).transpose(0, 1).flatten()
    flat = gates.reshape(*gates.shape[:2], -1)
    return cell._impl_forward_torch(flat, state, cell._recurrent_kernel_, bias)


def forecast(forecaster: Any, series: Tensor) -> Tensor:
    """Return the quantiles of the next values."""
    with torch.inference_mode():
        return forecaster._forecast_quantiles(series, prediction_length=HORIZON)[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    theirs = model()
    models = {
        "TiRex": theirs,
        "float32": in_float32(theirs),
        "accelerated": rl.accelerate(copy.deepcopy(theirs)),
    }
    print(
        f"# TiRex on a CPU\n\n{cpu_name()}, torch {torch.__version__}, {chosen.threads} thread(s)."
    )
    print("\n| series | " + " | ".join(f"{name} ms" for name in models) + " | ratio |")
    print("| --- " * (len(models) + 2) + "|")
    for count in SERIES:
        series = torch.randn(count, CONTEXT).cumsum(1)
        results = {name: forecast(each, series) for name, each in models.items()}
        torch.testing.assert_close(results["accelerated"], results["float32"], rtol=1e-4, atol=1e-3)
        calls = {name: partial(forecast, each, series) for name, each in models.items()}
        times = interleave(calls, chosen.rounds)
        ms = {name: 1e3 * statistics.median(samples) for name, samples in times.items()}
        cells = [f"{value:.1f}" for value in ms.values()]
        ratio = ms["TiRex"] / ms["accelerated"]
        print(f"| {count} | {' | '.join(cells)} | {ratio:.1f} |", flush=True)


if __name__ == "__main__":
    main()
