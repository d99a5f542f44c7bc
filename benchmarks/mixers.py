"""Language models of transformers of four layers with and without ``rl.accelerate``: times of a
training step, of reading prompts, of generating 33 tokens after one of them, of 33 steps of the
first block with its cache, where it can be called alone, and of a training step and reading by the
first recurrent mixer without its Linear layers: each returns the output, or the gradient of its
input, that it computed in its first call, so that all else has the numbers and the layouts of memory
of a whole mixer.

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
from torch import Tensor, nn

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
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": WIDTH,
}
GRIFFIN = {"num_attention_heads": 4, "head_dim": 64, "intermediate_size": WIDTH, "lru_width": WIDTH}
# The names of recurrent mixers in these models.
MIXERS = (".mixer", ".linear_attn", ".temporal_block", ".mlstm_layer")
# The classes of transformers, and sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Mamba": ("Mamba", "MambaConfig", {}),
    "FalconMamba": ("FalconMamba", "FalconMambaConfig", {}),
    "Mamba-2": ("Mamba2", "Mamba2Config", {"num_heads": 8, "head_dim": 64, "n_groups": 1}),
    "Qwen3.5": ("Qwen3_5", "Qwen3_5TextConfig", DELTA),
    "Qwen3-Next": ("Qwen3Next", "Qwen3NextConfig", {**DELTA, **EXPERTS}),
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


class Recalled(torch.autograd.Function):
    """The output and the gradient of the first call of a Linear layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RecalledLinear) -> Tensor:
        ctx.layer = layer
        if layer.output is None:
            layer.output = layer.linear(x)
        return layer.output.data

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        layer = ctx.layer
        if layer.gradient is None:
            layer.gradient = grad @ layer.linear.weight
        return layer.gradient, None


class RecalledLinear(nn.Module):
    """A Linear layer that costs nothing after its first call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.output: Tensor | None = None
        self.gradient: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Recalled.apply(x, self)
        return result


def mixer_of(model: Any) -> Any:
    """A copy of the first recurrent mixer whose Linear layers cost nothing."""
    name = next(name for name, _ in model.named_modules() if name.endswith(MIXERS))
    mixer = copy.deepcopy(model.get_submodule(name))
    for name, module in list(mixer.named_modules()):
        if isinstance(module, nn.Linear):
            mixer.set_submodule(name, RecalledLinear(module))
    return mixer


def output_of(mixer: Any, x: Tensor) -> Tensor:
    options = {}
    if type(mixer).__name__.endswith("RecurrentBlock"):
        positions = torch.arange(x.shape[1])[None]
        options = {"position_ids": positions, "attention_mask": None, "use_cache": False}
    result = mixer(x, **options)
    output: Tensor = result[0] if isinstance(result, tuple) else result
    return output


def train_mixer(mixer: Any, x: Tensor) -> None:
    mixer.zero_grad()
    x.grad = None
    output_of(mixer, x).backward(x.detach())


@torch.no_grad()
def read_mixer(mixer: Any, x: Tensor) -> None:
    output_of(mixer, x)


# Of whole models, and of mixers.
RUNS: dict[str, Callable[..., None]] = {
    "train": train,
    "read": read,
    "generate": generate,
}
RUNS_OF_MIXERS: dict[str, Callable[..., None]] = {
    "train mixer": train_mixer,
    "read mixer": read_mixer,
}


def calls_of(title: str, models: dict[str, Any], tokens: Tensor) -> dict[str, Callable[[], None]]:
    """A run of each model; none if its first block cannot be called alone, or its mixer without
    its Linear layers.
    """
    if title in RUNS:
        return {each: partial(RUNS[title], model, tokens) for each, model in models.items()}
    if title in RUNS_OF_MIXERS:
        x = torch.randn(*tokens.shape, WIDTH, requires_grad=True)
        mixers = {each: mixer_of(model) for each, model in models.items()}
        # Transformers multiplies by the weight of this layer, outside of its forward.
        if hasattr(mixers["transformers"], "dt_proj"):
            return {}
        outputs = [output_of(mixer, x) for mixer in mixers.values()]
        torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-3, atol=1e-3)
        return {each: partial(RUNS_OF_MIXERS[title], mixer, x) for each, mixer in mixers.items()}
    if not hasattr(getattr(models["transformers"], "backbone", None), "layers"):
        return {}
    return {each: steps_of(model, tokens) for each, model in models.items()}


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
    kinds = [*RUNS, "step", *RUNS_OF_MIXERS]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds)
    parser.add_argument("names", nargs="*", default=list(MODELS))
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print("| model | | raglane ms | transformers ms | ratio |")
    print("| --- " * 5 + "|")
    for name in chosen.names:
        kind, config, sizes = MODELS[name]
        torch.manual_seed(0)
        if name.startswith("Qwen"):
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
            calls = calls_of(title, models, tokens)
            if not calls:
                continue
            clock = time.process_time if chosen.threads == 1 else time.perf_counter
            times = interleave(calls, chosen.rounds, clock=clock)
            ours, others = [1e3 * statistics.median(times[each]) for each in models]
            cells = [name, title, f"{ours:.4g}", f"{others:.4g}", f"{others / ours:.1f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
