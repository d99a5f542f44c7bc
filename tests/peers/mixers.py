"""Language models of transformers with recurrent mixers, of four layers and a width of 64."""

from __future__ import annotations

from typing import Any

import torch
from comparison import Example

SIZES = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 4, "pad_token_id": 0}
LINEAR = ["linear_attention"] * 3 + ["full_attention"]


def _example(model: Any) -> Example:
    """Return a training on rows of 128 tokens; the mixers of transformers compute in float32."""
    batches = [torch.randint(1, 64, (2, 128)) for _ in range(2)]

    def loss(module: Any, tokens: Any) -> Any:
        output = module(tokens, labels=tokens, use_cache=False)
        return output.loss, output.logits

    return Example(model, batches, loss, dtypes=(torch.float32,))


def mamba() -> Example:
    """Mamba."""
    from transformers import MambaConfig, MambaForCausalLM

    return _example(MambaForCausalLM(MambaConfig(**SIZES)))


def falcon_mamba() -> Example:
    """FalconMamba."""
    from transformers import FalconMambaConfig, FalconMambaForCausalLM

    return _example(FalconMambaForCausalLM(FalconMambaConfig(**SIZES)))


def mamba2() -> Example:
    """Mamba-2."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    config = Mamba2Config(**SIZES, num_heads=4, head_dim=32, n_groups=1, state_size=32)
    return _example(Mamba2ForCausalLM(config))


def qwen3_5() -> Example:
    """Qwen3.5, three layers of the gated delta rule and one of attention."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = Qwen3_5TextConfig(
        **SIZES,
        layer_types=LINEAR,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    return _example(Qwen3_5ForCausalLM(config))


def bamba() -> Example:
    """Bamba, three layers of Mamba-2 and one of attention."""
    from transformers import BambaConfig, BambaForCausalLM

    config = BambaConfig(
        **SIZES,
        attn_layer_indices=[3],
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        mamba_n_heads=4,
        mamba_d_head=32,
        mamba_d_state=32,
    )
    return _example(BambaForCausalLM(config))


def recurrent_gemma() -> Example:
    """RecurrentGemma, two blocks of three recurrent."""
    from transformers import RecurrentGemmaConfig, RecurrentGemmaForCausalLM

    config = RecurrentGemmaConfig(
        **SIZES,
        num_attention_heads=4,
        head_dim=16,
        intermediate_size=128,
        lru_width=64,
    )
    return _example(RecurrentGemmaForCausalLM(config))


def xlstm() -> Example:
    """An xLSTM."""
    from transformers import xLSTMConfig, xLSTMForCausalLM

    return _example(xLSTMForCausalLM(xLSTMConfig(**SIZES, num_heads=4, mode="train")))
