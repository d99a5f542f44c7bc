"""Which mixers of transformers become which of ours."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from raglane.nn.porting.transformers.base import Mixer
from raglane.nn.porting.transformers.block import SteppedBlock, SwappedBlock
from raglane.nn.porting.transformers.delta import (
    ACTIVATIONS,
    DeltaMixer,
    InterleavedDeltaMixer,
    KimiMixer,
    OlmoDeltaMixer,
)
from raglane.nn.porting.transformers.griffin import GriffinMixer
from raglane.nn.porting.transformers.mamba import JambaMixer, MambaMixer
from raglane.nn.porting.transformers.mamba2 import (
    BambaMixer,
    FalconH1Mixer,
    GraniteMixer,
    Mamba2Mixer,
)
from raglane.nn.porting.transformers.xlstm import XlstmBlock, XlstmMixer

# By the name of the class in a module ``transformers.models``.
FAMILIES: dict[str, type[Any]] = {
    "MambaMixer": MambaMixer,
    "MambaBlock": SteppedBlock,
    "FalconMambaMixer": MambaMixer,
    "FalconMambaBlock": SteppedBlock,
    "JambaMambaMixer": JambaMixer,
    "JambaMambaDecoderLayer": SwappedBlock,
    "Mamba2Mixer": Mamba2Mixer,
    "BambaMixer": BambaMixer,
    "FalconH1Mixer": FalconH1Mixer,
    "Zamba2MambaMixer": BambaMixer,
    "NemotronHMamba2Mixer": BambaMixer,
    "GraniteMoeHybridMambaLayer": GraniteMixer,
    "RecurrentGemmaRecurrentBlock": GriffinMixer,
    "xLSTMLayer": XlstmMixer,
    "xLSTMBlock": XlstmBlock,
    "Qwen3NextGatedDeltaNet": InterleavedDeltaMixer,
    "Qwen3_5GatedDeltaNet": DeltaMixer,
    "Qwen3_5MoeGatedDeltaNet": DeltaMixer,
    "OlmoHybridGatedDeltaNet": OlmoDeltaMixer,
    "KimiLinearDeltaAttention": KimiMixer,
}


_OURS = (Mixer, SwappedBlock, SteppedBlock, XlstmBlock)


def mixer_of(kind: type[Any]) -> type[Any] | None:
    """Return the base of the converted class of a mixer or block, or None for other classes."""
    for parent in kind.__mro__:
        if parent.__name__ in FAMILIES and parent.__module__.startswith("transformers.models."):
            return FAMILIES[parent.__name__]
    return None


def is_mixer(module: nn.Module) -> bool:
    """Return True for a mixer or block that is not converted."""
    return mixer_of(type(module)) is not None and not isinstance(module, _OURS)


def reason_to_leave_mixer(mixer: nn.Module) -> str:
    """Return why a mixer cannot be converted, or "" if it can."""
    kind = type(mixer)
    owner = next(parent for parent in kind.__mro__ if "forward" in vars(parent))
    if "forward" in vars(mixer):
        return "its forward was replaced on the instance"
    if owner.__name__ not in FAMILIES:
        return f"{kind.__name__} has a forward of its own"
    names = inspect.signature(kind.forward).parameters
    config = getattr(mixer, "config", None)
    if getattr(config, "weight_mode", "single") != "single":
        return "its weights are fused"
    if hasattr(mixer, "mlstm_layer") and mixer_of(type(mixer.mlstm_layer)) is None:
        return "its layer is of the package xlstm"
    if kind.__name__.startswith("xLSTM"):
        return ""
    if "cache" not in names and ("cache_params" in names or "kwargs" not in names):
        return "it is of a version of transformers below 5.24, whose caches differ"
    if getattr(mixer, "activation", "silu") not in ACTIVATIONS and not hasattr(mixer, "act"):
        return f"its activation is {mixer.activation}"
    if any(hasattr(module, "_hf_hook") for module in mixer.children()):
        return "its weights are offloaded, piece by piece"
    return ""
