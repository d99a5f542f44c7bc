"""Language models of transformers of four layers with and without ``rl.accelerate``: times of a
training step, of reading prompts, of generating 33 tokens after one of them, and of 33 steps of the
first block with its cache, where it can be called alone.

Requires transformers 5.24 or later. Both take turns in one process; on one thread the times are
those of the processor, otherwise those of the clock. ``--layers 24 --only generate
step`` leaves the longer runs out.

    python benchmarks/mixers.py --threads 1
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from harness.timing import interleave

import raglane as rl

WIDTH = 256
SIZES = {"vocab_size": 256, "hidden_size": WIDTH, "pad_token_id": 0}
LINEAR = ["linear_attention"] * 3 + ["full_attention"]
DELTA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 2 * WIDTH,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
GRIFFIN = {"num_attention_heads": 4, "head_dim": 64, "intermediate_size": WIDTH, "lru_width": WIDTH}
# The classes of transformers, and sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mamba": ("Mamba", "MambaConfig", {}),
    "FalconMamba": ("FalconMamba", "FalconMambaConfig", {}),
    "Mamba-2": ("Mamba2", "Mamba2Config", {"num_heads": 8, "head_dim": 64, "n_groups": 1}),
    "Qwen3.5": ("Qwen3_5", "Qwen3_5TextConfig", DELTA),
    "RecurrentGemma": ("RecurrentGemma", "RecurrentGemmaConfig", GRIFFIN),
    "xLSTM": ("xLSTM", "xLSTMConfig", {"num_heads": 4}),
}


def train(model: Any, tokens: torch.Tensor) -> None:
    model.train()
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()


@torch.no_grad()
def read(model: Any, tokens: torch.Tensor) -> None:
    model.eval()
    model(tokens, use_cache=False)


@torch.no_grad()
def generate(model: Any, tokens: torch.Tensor) -> None:
    model.eval()
    model.generate(tokens[:1, :4], max_new_tokens=33, do_sample=False)


def step(model: Any, row: torch.Tensor, cache: Any) -> None:
    block = model.backbone.layers[0]
    with torch.no_grad():
        for _ in range(33):
            block(row, cache=cache)


def steps_of(model: Any, tokens: torch.Tensor) -> Callable[[], None]:
    """The steps of the first block after a few tokens."""
    with torch.no_grad():
        cache = model.eval()(tokens[:1, :4], use_cache=True).cache
    return partial(step, model, torch.ones(1, 1, WIDTH), cache)


RUNS: dict[str, Callable[..., None]] = {
    "train": train,
    "read": read,
    "generate": generate,
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--layers", type=int, default=4, help="a multiple of 4")
    parser.add_argument("--only", nargs="+", choices=[*RUNS, "step"], default=[*RUNS, "step"])
    parser.add_argument("names", nargs="*", default=list(MODELS))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print("| model | | raglane ms | transformers ms | ratio |")
    print("| --- " * 5 + "|")
    for name in chosen.names:
        kind, config, sizes = MODELS[name]
        torch.manual_seed(0)
        if kind == "Qwen3_5":
            sizes = {**sizes, "layer_types": LINEAR * (chosen.layers // 4)}
        sizes = {**SIZES, **sizes, "num_hidden_layers": chosen.layers}
        settings = getattr(transformers, config)(eos_token_id=None, **sizes)
        theirs = getattr(transformers, f"{kind}ForCausalLM")(settings)
        models = {"raglane": rl.accelerate(copy.deepcopy(theirs)), "transformers": theirs}
        tokens = torch.randint(1, 256, (chosen.rows, chosen.steps))
        with torch.no_grad():
            outputs = [model.eval()(tokens[:, :32]).logits for model in models.values()]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)
        for title in chosen.only:
            calls: dict[str, Callable[[], None]] = {}
            if title != "step":
                calls = {
                    each: partial(RUNS[title], model, tokens) for each, model in models.items()
                }
            elif hasattr(getattr(theirs, "backbone", None), "layers"):
                calls = {each: steps_of(model, tokens) for each, model in models.items()}
            else:
                continue
            clock = time.process_time if chosen.threads == 1 else time.perf_counter
            times = interleave(calls, chosen.rounds, clock=clock)
            ours, others = [1e3 * statistics.median(times[each]) for each in models]
            cells = [name, title, f"{ours:.4g}", f"{others:.4g}", f"{others / ours:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
