"""RecurrentPPO of sb3-contrib, unchanged and after rl.accelerate, and the agent of
examples/recurrent_ppo.py.

Requires sb3-contrib. In turns, each agent of a task collects a rollout and is updated with it:

    python benchmarks/recurrent_ppo.py recall --updates 40
    python benchmarks/recurrent_ppo.py cartpole --updates 12
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import sb3_contrib
import torch
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecEnv, VecMonitor

import raglane as rl

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import recurrent_ppo as example  # that in examples, now the first of the path

Turn = Callable[[], tuple[float, float, float]]
"""A rollout and an update; returns the seconds of both, and the mean return of the last
episodes."""


class RecallEnv(VecEnv):
    """The task of the example for sb3: a cue at the first step of an episode is to be recalled at
    the last.
    """

    def __init__(self, count: int) -> None:
        observations = gymnasium.spaces.Box(0, 1, (example.CUES + 1,))
        super().__init__(count, observations, gymnasium.spaces.Discrete(example.CUES))
        self.reset()

    def reset(self) -> Any:
        self.world = example.Recall(self.num_envs)
        return self.world.observe().numpy()

    def step_async(self, actions: Any) -> None:
        self.actions = torch.from_numpy(actions)

    def step_wait(self) -> Any:
        rewards, ends = self.world.step(self.actions).numpy(), self.world.starts.numpy()
        # The observation after the last step has no effect: an episode always ends, and is never
        # cut.
        last = np.zeros(self.observation_space.shape, np.float32)
        infos: list[dict[str, Any]] = [
            {"terminal_observation": last} if end else {} for end in ends
        ]
        return self.world.observe().numpy(), rewards, ends, infos

    def close(self) -> None:
        pass

    def get_attr(self, *_: Any) -> list[Any]:
        return [None] * self.num_envs

    def env_is_wrapped(self, *_: Any) -> list[bool]:
        return [False] * self.num_envs

    set_attr = env_method = get_attr


def recall(seed: int) -> Any:
    """Return an agent with the settings of the example; its LSTM also serves the value."""
    return RecurrentPPO(
        "MlpLstmPolicy",
        VecMonitor(RecallEnv(example.ENVIRONMENTS)),
        n_steps=example.STEPS,
        batch_size=example.ENVIRONMENTS * example.STEPS // 4,
        n_epochs=4,
        learning_rate=0.005,
        ent_coef=0.01,
        seed=seed,
        policy_kwargs={
            "lstm_hidden_size": 32,
            "net_arch": [],
            "shared_lstm": True,
            "enable_critic_lstm": False,
        },
        device="cpu",
    )


def cartpole(seed: int) -> Any:
    """Return an agent for CartPole without velocities, 16 environments of which run in parallel."""

    def hidden(env: Any) -> Any:
        space = gymnasium.spaces.Box(-5, 5, (2,))
        return gymnasium.wrappers.TransformObservation(
            env, lambda observation: observation[[0, 2]], space
        )

    return RecurrentPPO(
        "MlpLstmPolicy",
        make_vec_env("CartPole-v1", n_envs=16, seed=seed, wrapper_class=hidden),
        n_steps=128,
        batch_size=256,
        n_epochs=5,
        learning_rate=1e-3,
        seed=seed,
        policy_kwargs={"lstm_hidden_size": 64, "net_arch": [64]},
        device="cpu",
    )


def turn_of(agent: Any) -> Turn:
    """Return a turn of an agent of sb3."""
    train = agent.train

    def turn() -> tuple[float, float, float]:
        taken: list[float] = []

        def timed() -> None:
            start = time.perf_counter()
            train()
            taken.append(time.perf_counter() - start)

        agent.train = timed
        start = time.perf_counter()
        agent.learn(agent.n_envs * agent.n_steps, reset_num_timesteps=False)
        rollout = time.perf_counter() - start - taken[0]
        return rollout, taken[0], statistics.mean(episode["r"] for episode in agent.ep_info_buffer)

    return turn


def turn_of_example(seed: int) -> Turn:
    """Return a turn of the example."""
    torch.manual_seed(seed)
    agent, world = example.Agent(), example.Recall(example.ENVIRONMENTS)
    optimizer = torch.optim.Adam(agent.parameters(), lr=0.005)
    state = torch.zeros(1, example.ENVIRONMENTS, agent.gru.hidden_size)

    def turn() -> tuple[float, float, float]:
        nonlocal state
        start = time.perf_counter()
        before = state
        rollout, state, mean_return = example.collect(agent, world, before)
        middle = time.perf_counter()
        example.update(agent, optimizer, rollout, before)
        return middle - start, time.perf_counter() - middle, mean_return

    return turn


def main() -> None:
    """Print a table of the agents."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("task", choices=("recall", "cartpole"))
    parser.add_argument(
        "--updates", type=int, default=20, help="rollouts, each with an update (default: 20)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of agents and environments (default: 0)"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    make = recall if options.task == "recall" else cartpole
    plain, fast = make(options.seed), make(options.seed)
    rl.accelerate(fast.policy)
    turns = {
        f"sb3-contrib {sb3_contrib.__version__}": turn_of(plain),
        "with rl.accelerate": turn_of(fast),
    }
    if options.task == "recall":
        turns["examples/recurrent_ppo.py"] = turn_of_example(options.seed)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in turns}
    for _ in range(options.updates):
        for name, turn in turns.items():
            found[name].append(turn())
    frames = plain.n_envs * plain.n_steps
    print(
        "| agent | rollout, s | update, s | frames per second | mean return |\n| --- | --- | --- | --- | --- |"
    )
    for name, rows in found.items():
        rollout, update, _ = (statistics.median(column) for column in zip(*rows, strict=True))
        print(
            f"| {name} | {rollout:.3f} | {update:.3f} | {frames / (rollout + update):,.0f} | {rows[-1][2]:.2f} |"
        )


if __name__ == "__main__":
    main()
