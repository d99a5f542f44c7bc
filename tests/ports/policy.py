"""Recurrent PPO: rollouts cut into episodes, a clipped loss, and the entropy of the policy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

import raglane as rl


def sample() -> tuple[Any, ...]:
    lengths = (7, 4, 9)
    seen = [torch.randn(length, 3).double() for length in lengths]
    ends = [torch.rand(length) < 0.3 for length in lengths]
    actions = [torch.randint(0, 4, (length,)) for length in lengths]
    numbers = [torch.randn(length, 3).double() for length in lengths]
    return seen, ends, actions, numbers


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.actor = nn.Linear(5, 4)
        self.critic = nn.Linear(5, 1)

    def forward(self, *rollouts: list[Tensor]) -> Any:
        episodes: list[list[Tensor]] = [[], [], []]
        seen, ends, *others = rollouts
        for row, done in enumerate(ends):
            cuts = (done[:-1].nonzero().view(-1) + 1).tolist()
            for pieces, part in zip(episodes, (seen, *others), strict=True):
                pieces.extend(torch.tensor_split(part[row], cuts))
        observed, actions, numbers = (pad_sequence(part, batch_first=True) for part in episodes)
        lengths = torch.tensor([len(episode) for episode in episodes[0]])
        mask = torch.arange(observed.shape[1]) < lengths[:, None]
        out, _ = self.lstm(observed)
        policy = torch.distributions.Categorical(logits=self.actor(out))
        before, advantage, returns = numbers.unbind(-1)
        real = advantage[mask]
        advantage = (advantage - real.mean()) / real.std()
        ratio = (policy.log_prob(actions) - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        value = F.mse_loss(self.critic(out).squeeze(-1)[mask], returns[mask])
        entropy = policy.entropy()[mask].mean()
        return value / 2 - gain[mask].mean() - 0.01 * entropy, entropy


class Ragged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = rl.nn.LSTM(3, 5)
        self.actor = nn.Linear(5, 4)
        self.critic = nn.Linear(5, 1)

    def forward(self, *rollouts: list[Tensor]) -> Any:
        seen, ends, *others = map(rl.Ragged, rollouts)
        starts = ends.shift(1)
        observed, actions, numbers = (part.split_at(starts) for part in (seen, *others))
        out, _ = self.lstm(observed)
        policy = rl.distributions.Categorical(logits=self.actor(out))
        before, advantage, returns = numbers.unbind(-1)
        advantage = (advantage - advantage.mean()) / advantage.std()
        ratio = (policy.log_prob(actions) - before).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        value = F.mse_loss(self.critic(out).squeeze(-1), returns)
        entropy = policy.entropy().mean()
        return value / 2 - gain.mean() - 0.01 * entropy, entropy
