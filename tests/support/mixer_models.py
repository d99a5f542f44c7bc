"""Small models of transformers with random weights, by family."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import Tensor, nn

import raglane as rl

ATTENTION = {"num_attention_heads": 2, "num_key_value_heads": 1, "intermediate_size": 16}
LAYERS = ["linear_attention", "full_attention", "linear_attention"]
OF_MAMBA2 = {
    "mamba_n_heads": 6,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_chunk_size": 4,
}
OF_DELTA = {
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": LAYERS,
    "num_hidden_layers": 3,
}
# Experts are computed one after another, also in float64.
EAGER = {"experts_implementation": "eager"}
# The name of the model and the configuration, and its sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 5, "num_hidden_layers": 2, "time_step_rank": 3}),
    "falcon_mamba": ("FalconMamba", {"state_size": 5, "num_hidden_layers": 2, "time_step_rank": 3}),
    "mamba2": (
        "Mamba2",
        {
            "state_size": 5,
            "num_hidden_layers": 2,
            "num_heads": 6,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        ATTENTION
        | OF_DELTA
        | EAGER
        | {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3_5": ("Qwen3_5", ATTENTION | OF_DELTA | {"head_dim": 8}),
    "olmo_hybrid": ("OlmoHybrid", ATTENTION | OF_DELTA),
    "bamba": ("Bamba", ATTENTION | OF_MAMBA2 | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": (
        "FalconH1",
        ATTENTION | OF_MAMBA2 | {"num_hidden_layers": 2, "head_dim": 8, "mamba_d_ssm": 48},
    ),
    "falcon_h1_norm": (
        "FalconH1",
        ATTENTION
        | OF_MAMBA2
        | {"num_hidden_layers": 2, "head_dim": 8, "mamba_d_ssm": 48, "mamba_rms_norm": True},
    ),
    "zamba2": (
        "Zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "attention_head_dim": 24,
            "intermediate_size": 16,
            "n_mamba_heads": 6,
            "mamba_headdim": 8,
            "mamba_ngroups": 2,
            "mamba_d_state": 5,
            "chunk_size": 4,
            "num_mem_blocks": 1,
            "adapter_rank": 4,
        },
    ),
    "jamba": (
        "Jamba",
        ATTENTION
        | EAGER
        | {
            "num_hidden_layers": 3,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 5,
            "mamba_dt_rank": 3,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        ATTENTION
        | {
            "layers_block_type": [*LAYERS, "mlp"],
            "head_dim": 8,
            "mamba_num_heads": 6,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 5,
            "chunk_size": 4,
        },
    ),
    "granite": (
        "GraniteMoeHybrid",
        ATTENTION
        | OF_MAMBA2
        | EAGER
        | {
            "layer_types": LAYERS,
            "num_hidden_layers": 3,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 8,
            "position_embedding_type": "rope",
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        {
            "num_hidden_layers": 3,
            "layer_types": LAYERS,
            "mlp_layer_types": ["dense"] * 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "intermediate_size": 16,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "linear_head_dim": 6,
            "linear_num_heads": 2,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    ),
    "recurrent_gemma": (
        "RecurrentGemma",
        {
            "num_hidden_layers": 3,
            "block_types": ["recurrent", "attention", "recurrent"],
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 12,
            "intermediate_size": 16,
            "lru_width": 24,
            "attention_window_size": 64,
        },
    ),
    "xlstm": (
        "xLSTM",
        {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "chunk_size": 4},
    ),
}
TOKENS = {"vocab_size": 50, "hidden_size": 24, "pad_token_id": 0, "bos_token_id": 1}


def small_model(family: str, **options: Any) -> Any:
    """Return a model in float64, in which no weight is 0 or 1."""
    transformers: Any = importlib.import_module("transformers")

    name, sizes = FAMILIES[family]
    of_text = name + ("TextConfig" if name == "Qwen3_5" else "Config")
    config = getattr(transformers, of_text)(**(TOKENS | {"eos_token_id": None} | sizes | options))
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def accelerated(model: Any) -> Any:
    """Return a copy of a model with converted mixers."""
    return rl.accelerate(copy.deepcopy(model))


def drawn_prompts(lengths: list[int]) -> list[Tensor]:
    """Return prompts without padding."""
    return [torch.randint(2, 50, (length,)) for length in lengths]


def padded(prompts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Return tokens and an attention mask."""
    longest = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(prompts):
        begin = longest - len(prompt) if side == "left" else 0
        tokens[row, begin : begin + len(prompt)] = prompt
        mask[row, begin : begin + len(prompt)] = 1
    return tokens, mask


def logits_of(model: Any, prompt: Tensor) -> Tensor:
    """Return the logits of one prompt, without a cache."""
    logits: Tensor = model(prompt.unsqueeze(0), use_cache=False).logits[0]
    return logits


def continued(model: Any, prompt: Tensor, count: int) -> Tensor:
    """Return the most probable next tokens, each computed from the beginning."""
    for _ in range(count):
        prompt = torch.cat([prompt, logits_of(model, prompt)[-1:].argmax(-1)])
    return prompt[-count:]


class LowRank(nn.Module):
    """A linear layer with an addition of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.calls = 0
        dtype = base.weight.dtype
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=dtype))

    @property
    def weight(self) -> Tensor:
        """The weight with the addition, for models that read it."""
        return self.base.weight + self.up @ self.down

    @property
    def bias(self) -> Any:
        """The bias."""
        return self.base.bias

    def forward(self, rows: Tensor) -> Tensor:
        """Return the product with both."""
        self.calls += 1
        output: Tensor = self.base(rows) + rows @ self.down.t() @ self.up.t()
        return output
