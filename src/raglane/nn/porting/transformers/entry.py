"""The hook by which lengths enter a model of transformers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from raglane._utils.tracing import records_operators
from raglane.errors import ArgumentError
from raglane.nn.porting.transformers.base import Mixer
from raglane.nn.porting.transformers.families import mixer_of
from raglane.nn.porting.transformers.layout import mask_of, numbers_of


@dataclass(frozen=True)
class Entry:
    """Replaces the arguments of a model that say where sequences begin by those that its mixers
    get.

    Attributes:
        names: the arguments of the model, in their order.
        kind: the class of its mixers.
    """

    names: tuple[str, ...]
    kind: Any

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return other arguments, or None for the same."""
        call = dict(zip(self.names, args, strict=False)) | kwargs
        elements = call.get("input_ids")
        elements = call.get("inputs_embeds") if elements is None else elements
        if not isinstance(elements, Tensor) or elements.dim() < 2:
            return None
        result = numbers_of(call, elements.shape[:2], self.kind.needs_padding)
        if result is None:
            is_step = elements.shape[1] == 1 and not records_operators()
            if is_step and not self.kind.has_attention and mask_of(call) is not None:
                # It has no zeros, and each mixer would look.
                call["attention_mask"] = None
                return (), call
            return None
        numbers, are_several = result
        if not self.kind.is_passed:
            self.kind.remember(numbers)
            return None
        call["seq_idx"] = numbers - 1
        if not self.kind.has_attention:
            call["attention_mask"] = numbers
        elif are_several and call.get("attention_mask") is mask_of(call):
            # Other masks of attention are the caller's.
            call |= _apart(model, call, numbers, self.kind.needs_mask)
        return (), call

    def end(self, *_: Any) -> None:
        """Forget the numbers of the call."""
        self.kind.remember(None)


def _apart(
    model: nn.Module, call: dict[str, Any], numbers: Tensor, needs_mask: bool
) -> dict[str, Any]:
    """Return the arguments for which attention keeps sequences apart.

    Transformers finds sequences within a row by their positions, but only without a mask and
    without a cache.
    """
    cache = next((call[name] for name in _CACHES if call.get(name) is not None), None)
    if cache is not None or (call.get("use_cache") and not model.training):
        rule = "a call without a cache: attention of transformers would mix the sequences of a row"
        fix = "pass use_cache=False, or one sequence in a row"
        raise ArgumentError("use_cache", "several sequences in a row, with a cache", rule, fix)
    steps = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    changes = numbers[:, 1:] != numbers[:, :-1]
    begins = torch.cat([torch.ones_like(changes[:, :1]), changes], 1) | (numbers == 0)
    starts = torch.where(begins, steps, 0).cummax(1).values
    rest: dict[str, Any] = {"attention_mask": None, "use_cache": False}
    positions = call.get("position_ids")
    is_padded = call.get("attention_mask") is not None
    if positions is None or (is_padded and positions.dim() == 2):
        rest["position_ids"] = steps - starts
    if needs_mask:
        is_hidden = starts.unsqueeze(2) != starts.unsqueeze(1)
        is_hidden = is_hidden | (steps.unsqueeze(2) < steps.unsqueeze(1))
        dtype: Any = model.dtype
        mask = torch.zeros(is_hidden.shape, dtype=dtype, device=numbers.device)
        mask = mask.masked_fill(is_hidden, torch.finfo(dtype).min)
        rest["attention_mask"] = mask.unsqueeze(1)
    return rest


_CACHES = ("cache", "past_key_values", "cache_params")


def enter(model: nn.Module) -> None:
    """Give all models of transformers in a model that have converted mixers the hook, once."""
    for module in model.modules():
        hooks = module._forward_pre_hooks.values()
        if not _is_model(module) or any(isinstance(hook, Entry) for hook in hooks):
            continue
        kinds = [mixer_of(type(part)) for part in module.modules() if isinstance(part, Mixer)]
        if kinds:
            names = tuple(inspect.signature(module.forward).parameters)
            entry = Entry(names, kinds[0])
            module.register_forward_pre_hook(entry, with_kwargs=True)
            if not entry.kind.is_passed:
                module.register_forward_hook(entry.end, always_call=True)


def _is_model(module: nn.Module) -> bool:
    return any(
        parent.__name__ == "PreTrainedModel" and parent.__module__.startswith("transformers.")
        for parent in type(module).__mro__
    )


def leave(model: nn.Module) -> None:
    """Remove the hooks of a model, and what a mixer has in addition."""
    for name in model.added if isinstance(model, Mixer) else ():
        vars(model).pop(name, None)
    for number, hook in list(model._forward_pre_hooks.items()):
        if isinstance(hook, Entry):
            del model._forward_pre_hooks[number]
            model._forward_pre_hooks_with_kwargs.pop(number, None)
    for number, hook in list(model._forward_hooks.items()):
        if isinstance(getattr(hook, "__self__", None), Entry):
            del model._forward_hooks[number]
            model._forward_hooks_always_called.pop(number, None)
