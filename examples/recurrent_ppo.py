"""Proximal policy optimisation (PPO) with a recurrent network and resets, on a task that requires
memory.

At the first step of an episode one of four cues is shown. After 2 to 16 steps without a cue, the
reward of the last step is 1 if the action is the cue, else 0. Without memory the mean return is
0.25.

32 environments run in parallel. A rollout is 64 steps of each, in which episodes end and start. For
the update, the rollout is a ragged batch, one sequence per environment, with resets where an
episode starts: a single call of the GRU, from the states at the start of the rollout, computes the
same as acting step by step.

    python examples/recurrent_ppo.py

Mean return of new episodes, which is the share of cues recalled: 0.99 after 60 rollouts.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Categorical
from torch.nn.functional import mse_loss

import raglane as rl

CUES, ENVIRONMENTS, STEPS = 4, 32, 64

Rollout = dict[str, rl.Ragged]  # T steps of E environments: (N,) or (N, features), N = E * T


class Recall:
    """Parallel environments; when an episode ends, another starts at the next step.

    ``starts``, one bool per environment, marks the first step of episodes.
    """

    def __init__(self, count: int) -> None:
        self.cue, self.left = torch.zeros(2, count, dtype=torch.int64)
        self.starts = torch.ones(count, dtype=torch.bool)
        self.go_on()

    def go_on(self) -> None:
        """Start the next step: a new cue and a new number of steps if an episode starts."""
        self.cue = torch.where(self.starts, torch.randint(CUES, self.cue.shape), self.cue)
        self.left = torch.where(self.starts, torch.randint(3, 18, self.cue.shape), self.left - 1)

    def observe(self) -> Tensor:
        """Return the observation, ``(E, CUES + 1)``: the cue at the first step, and a flag at the
        last.
        """
        shown = torch.nn.functional.one_hot(self.cue, CUES) * self.starts.unsqueeze(1)
        return torch.cat([shown, (self.left == 0).unsqueeze(1)], 1).float()

    def step(self, action: Tensor) -> Tensor:
        """Apply actions, ``(E,)``, and return the rewards, ``(E,)``."""
        self.starts = self.left == 0
        reward: Tensor = (self.starts & (action == self.cue)).float()
        self.go_on()
        return reward


class Agent(torch.nn.Module):
    """A GRU with heads for the policy and the value."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = rl.nn.GRU(CUES + 1, 32)
        self.policy, self.value = torch.nn.Linear(32, CUES), torch.nn.Linear(32, 1)

    def forward(self, observations: rl.Ragged, state: Tensor, starts: rl.Ragged) -> tuple[Any, Any]:
        """Return logits ``(N, CUES)`` and values ``(N,)`` of whole rollouts, from their initial
        states.
        """
        out, _ = self.gru(observations, state, resets=starts)
        return self.policy(out), self.value(out).squeeze(-1)

    def act(
        self, observation: Tensor, state: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits and values of one step, and the new state; starts of episodes reset the old
        state.
        """
        out, after = self.gru.step(observation, state, resets=starts)
        return self.policy(out), self.value(out).squeeze(-1), after


@torch.no_grad()
def collect(agent: Agent, world: Recall, state: Tensor) -> tuple[Rollout, Tensor, float]:
    """Act for some steps; return the rollout, the state after it, and the mean return of finished
    episodes.
    """
    rows = []
    for _ in range(STEPS):
        observation, starts = world.observe(), world.starts
        logits, value, state = agent.act(observation, state, starts)
        policy = Categorical(logits=logits)
        action = policy.sample()
        rows.append(
            (
                observation,
                starts,
                action,
                policy.log_prob(action),
                value,
                world.step(action),
                world.starts,
            )
        )
    observations, starts, actions, log_probs, values, rewards, ends = (
        torch.stack(column, 1) for column in zip(*rows, strict=True)
    )
    _, next_value, _ = agent.act(world.observe(), state, world.starts)
    advantages = estimate_advantages(
        rewards, torch.cat([values, next_value.unsqueeze(1)], 1), ~ends
    )
    parts = {
        "observations": observations,
        "starts": starts,
        "actions": actions,
        "log_probs": log_probs,
        "advantages": advantages,
        "returns": advantages + values,
    }
    rollout = {
        name: rl.Ragged.from_padded(part, [STEPS] * len(part)) for name, part in parts.items()
    }
    return rollout, state, float(rewards.sum() / ends.sum())


def estimate_advantages(rewards: Tensor, values: Tensor, goes_on: Tensor) -> Tensor:
    """Return generalised advantages (Schulman et al. 2016): ``(E, T)`` from values ``(E, T +
    1)``.
    """
    discount, decay = 0.99, 0.95
    surprises = rewards + discount * goes_on * values[:, 1:] - values[:, :-1]
    advantages = torch.zeros_like(values)
    for step in reversed(range(rewards.shape[1])):
        advantages[:, step] = (
            surprises[:, step] + discount * decay * goes_on[:, step] * advantages[:, step + 1]
        )
    return advantages[:, :-1]


def update(agent: Agent, optimizer: torch.optim.Optimizer, rollout: Rollout, state: Tensor) -> None:
    """Update the agent (Schulman et al. 2017): four passes over the rollout, in four batches of
    environments each.
    """
    for rows in (rows for _ in range(4) for rows in torch.randperm(ENVIRONMENTS).chunk(4)):
        batch: dict[str, Any] = {name: part[rows] for name, part in rollout.items()}
        logits, values = agent(batch["observations"], state[:, rows], batch["starts"])
        policy = rl.distributions.Categorical(logits=logits)
        ratio = (policy.log_prob(batch["actions"]) - batch["log_probs"]).exp()
        advantages = batch["advantages"]
        gain = (advantages - advantages.mean()) / advantages.std()
        policy_loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
        value_loss = mse_loss(values, batch["returns"])
        optimizer.zero_grad()
        (policy_loss + 0.5 * value_loss - 0.01 * policy.entropy().mean()).backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, print the mean return of episodes, and return that of new episodes at the end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rollouts", type=int, default=60, help="how many, each with an update (default: 60)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of environments and agent (default: 0)"
    )
    options = parser.parse_args(arguments)

    torch.manual_seed(options.seed)
    agent, world = Agent(), Recall(ENVIRONMENTS)
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.005)
    zeros = state = torch.zeros(1, ENVIRONMENTS, agent.gru.hidden_size)
    for number in range(1, options.rollouts + 1):
        before = state
        rollout, state, mean_return = collect(agent, world, before)
        update(agent, optimizer, rollout, before)
        if number % 5 == 0:
            print(f"rollout {number}: mean return {mean_return:.3f}")

    rollout, _, mean_return = collect(agent, Recall(ENVIRONMENTS), zeros)
    with torch.no_grad():
        logits, _ = agent(rollout["observations"], zeros, rollout["starts"])
    log_probs = rl.distributions.Categorical(logits=logits).log_prob(rollout["actions"])
    gap = float((log_probs - rollout["log_probs"]).abs().max())
    print(
        f"one call of the GRU against {STEPS} steps of acting: log-probabilities differ by at most {gap:.1g}"
    )
    print(f"mean return of new episodes {mean_return:.4f}")
    return mean_return


if __name__ == "__main__":
    main()
