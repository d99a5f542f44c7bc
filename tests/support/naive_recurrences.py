"""The recurrences of today in plain torch, one sequence and one step at a time, from their papers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

Lengths = list[int]


def scan(
    tensors: dict[str, Any],
    lengths: Lengths,
    resets: Tensor | None = None,
    softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the outputs ``(N, E)`` and the final states ``(B, E, S)``, differentiable."""
    x, dt, A, B, C = (tensors[name] for name in ("x", "dt", "A", "B", "C"))
    channels, states = A.shape
    each = channels // B.shape[1]
    outputs, finals = [], []
    element = 0
    for index, length in enumerate(lengths):
        initial = tensors.get("initial_state")
        h = torch.zeros(channels, states, dtype=A.dtype) if initial is None else initial[index]
        for _ in range(length):
            h = torch.zeros_like(h) if resets is not None and resets[element] else h
            d = dt[element]
            d = d + tensors["dt_bias"] if tensors.get("dt_bias") is not None else d
            d = torch.log1p(torch.exp(d)) if softplus else d
            d = d.clamp(*dt_limit) if dt_limit else d
            rows = []
            for channel in range(channels):
                group = channel // each
                decay = torch.exp(d[channel] * A[channel])
                rows.append(
                    decay * h[channel] + d[channel] * x[element, channel] * B[element, group]
                )
            h = torch.stack(rows)
            y = torch.stack([h[c] @ C[element, c // each] for c in range(channels)])
            outputs.append(y + tensors["D"] * x[element] if tensors.get("D") is not None else y)
            element += 1
        finals.append(h)
    return torch.stack(outputs) if outputs else x * 0, torch.stack(finals)


def attention(
    tensors: dict[str, Any],
    lengths: Lengths,
    resets: Tensor | None = None,
    delta: bool = False,
    scale: float = 1.0,
    eps: float = 1e-6,
) -> tuple[Tensor, ...]:
    """Return the outputs ``(N, H, V)`` and the final states: one, or three with log_gain."""
    q, k, v = (tensors[name] for name in ("q", "k", "v"))
    decays, gains, inputs = (tensors.get(name) for name in ("log_decay", "gain", "log_gain"))
    heads, width = v.shape[1:]
    size = q.shape[2]
    each = heads // q.shape[1]
    outputs, finals = [], []
    for head in range(heads):
        element = 0
        rows, ends = [], []
        for index, length in enumerate(lengths):
            S, n, m = v.new_zeros(size, width), v.new_zeros(size), v.new_zeros(())
            if tensors.get("initial_state") is not None:
                S = tensors["initial_state"][index, head]
            if tensors.get("normaliser") is not None:
                n, m = tensors["normaliser"][index, head], tensors["stabiliser"][index, head]
            for _ in range(length):
                if resets is not None and resets[element]:
                    S, n, m = torch.zeros_like(S), torch.zeros_like(n), torch.zeros_like(m)
                q_t, k_t, v_t = q[element, head // each], k[element, head // each], v[element, head]
                log_decay = v.new_zeros(()) if decays is None else decays[element, head]
                gain = 1.0 if gains is None else gains[element, head]
                if inputs is not None:
                    before = log_decay + m
                    m = torch.maximum(before, inputs[element, head])
                    log_decay, gain = before - m, torch.exp(inputs[element, head] - m)
                decay = torch.exp(log_decay)
                S = (decay.unsqueeze(-1) if decay.dim() else decay) * S
                error = v_t - S.T @ k_t if delta else v_t
                S = S + gain * torch.outer(k_t, error)
                o = scale * (S.T @ q_t)
                if inputs is not None:
                    n = decay * n + gain * k_t
                    o = o / (torch.maximum((scale * (n @ q_t)).abs(), torch.exp(-m)) + eps)
                rows.append(o)
                element += 1
            ends.append((S, n, m))
        outputs.append(torch.stack(rows) if rows else v[:, head] * 0)
        finals.append([torch.stack(part) for part in zip(*ends, strict=True)])
    states = [torch.stack(part, 1) for part in zip(*finals, strict=True)]
    return torch.stack(outputs, 1), *(states[: 1 if inputs is None else 3])
