"""Bases of converted models of reinforcement learning: rollouts in one call, with resets.

sb3-contrib runs a layer step by step if an episode starts within a sequence, and torchrl splits the
sequences at these steps and pads the parts.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.nn.recurrent.stack import one_or_tuple
from raglane.ragged import Ragged


class ResettingPolicy:
    """The base of a converted recurrent policy of sb3-contrib."""

    def _process_sequence(
        self, features: Tensor, states: Any, starts: Tensor, lstm: Any
    ) -> tuple[Tensor, Any]:
        """Return outputs ``(B * T, H)`` of ``B`` equally long sequences, and their final states."""
        policy: Any = self
        if not isinstance(policy, ResettingPolicy):
            # A closure that replaces this method still calls it after rl.to_torch.
            method = inspect.getattr_static(type(policy), "_process_sequence")
            return method.__get__(policy, type(policy))(features, states, starts, lstm)
        count = states[0].shape[1]
        if starts.numel() == count or lstm.bidirectional or not isinstance(lstm, RecurrentLayer):
            return super()._process_sequence(features, states, starts, lstm)  # type: ignore[misc]
        lengths = torch.full((count,), starts.numel() // count, device="cpu")
        batch = Ragged._build(features.reshape(-1, lstm.input_size), lengths)
        output, states = lstm(batch, states, resets=batch._like(starts.reshape(-1) > 0))
        return output.values, states


class ResettingModule:
    """The base of a converted LSTMModule or GRUModule of torchrl, instead of backend "scan"."""

    @property
    def recurrent_backend(self) -> str:
        """The backend that torchrl runs without splits, unless the layer was replaced."""
        layers: Any = self
        return (
            "scan"
            if any(isinstance(layer, RecurrentLayer) for layer in layers.children())
            else "pad"
        )

    def _lstm_scan_with_resets(
        self, input: Tensor, h: Tensor, c: Tensor, _: Any, starts: Tensor
    ) -> Any:
        return _run_episodes(self.lstm, input, (h, c), starts)  # type: ignore[attr-defined]

    def _gru_scan_with_resets(self, input: Tensor, h: Tensor, _: Any, starts: Tensor) -> Any:
        return _run_episodes(self.gru, input, (h,), starts)  # type: ignore[attr-defined]


def _run_episodes(
    layer: Any, input: Tensor, states: tuple[Tensor, ...], starts: Tensor
) -> tuple[Tensor, ...]:
    """Return outputs ``(B, T, H)``, and states ``(B, T, L, H)``, 0 except where episodes end.

    An episode begins with the state of its first step in ``states``, which are ``(B, T, L, H)``.
    """
    count, steps = input.shape[:2]
    starts = starts.clone()
    starts[:, 0] = True
    first = starts.flatten().nonzero().squeeze(1)
    last = torch.cat([first[1:], first.new_tensor([count * steps])]) - 1
    batch = Ragged._build(input.flatten(0, 1), (last - first + 1).cpu())
    hx = tuple(
        [
            state.flatten(0, 1).index_select(0, first).transpose(0, 1).contiguous()
            for state in states
        ]
    )
    output, final = layer(batch, one_or_tuple(hx))
    results = [output.values]
    for state in final if len(states) > 1 else (final,):
        zeros = state.new_zeros(count * steps, state.shape[0], state.shape[2])
        results.append(zeros.index_copy(0, last, state.transpose(0, 1)))
    return tuple([values.unflatten(0, (count, steps)) for values in results])


_METHODS = {
    "_process_sequence": ("sb3_contrib", ResettingPolicy),
    "_lstm_scan_with_resets": ("torchrl", ResettingModule),
    "_gru_scan_with_resets": ("torchrl", ResettingModule),
}


def base_of_model(kind: type[Any]) -> Any:
    """Return the base of the converted class, or None for other packages and own methods."""
    for method, (package, base) in _METHODS.items():
        owner = next((parent for parent in kind.__mro__ if method in vars(parent)), None)
        if owner is not None and owner.__module__.partition(".")[0] == package:
            return base
    return None
