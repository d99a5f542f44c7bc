"""RecurrentPPO of sb3-contrib with torch's LSTM, with rl.accelerate, and with resets passed to the layer.

Requires sb3-contrib. In turns, each agent collects a rollout and is updated with it:

    python benchmarks/recurrent_ppo.py --updates 40
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

import raglane as rl

sys.path.append(str(Path(__file__).parents[1] / "tests/peers"))

WAYS = ("torch", "rl.accelerate", "resets")


def make(way: str, seed: int) -> Any:
    """Return an agent for CartPole without velocities, 16 environments of which run in parallel."""
    import gymnasium
    from reinforcement import policy_with_resets
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env

    def hidden(env: Any) -> Any:
        space = gymnasium.spaces.Box(-5, 5, (2,))
        return gymnasium.wrappers.TransformObservation(env, lambda observation: observation[[0, 2]], space)

    worlds = make_vec_env("CartPole-v1", n_envs=16, seed=seed, wrapper_class=hidden)
    policy = policy_with_resets() if way == "resets" else "MlpLstmPolicy"
    agent = RecurrentPPO(
        policy,
        worlds,
        n_steps=128,
        batch_size=256,
        n_epochs=5,
        learning_rate=1e-3,
        ent_coef=0.0,
        gae_lambda=0.95,
        seed=seed,
        policy_kwargs={"lstm_hidden_size": 64, "net_arch": [64]},
        device="cpu",
    )
    if way != "torch":
        rl.accelerate(agent.policy)
    return agent


def main() -> None:
    """Print a table of the ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=40, help="rollouts, each with an update (default: 40)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default: 2)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    agents = {way: make(way, 0) for way in WAYS}
    times: dict[str, dict[str, list[float]]] = {way: {"rollout": [], "update": []} for way in WAYS}
    for _ in range(options.updates):
        for way, agent in agents.items():
            trains, taken = agent.train, times[way]

            def timed(trains: Any = trains, taken: Any = taken) -> None:
                start = time.perf_counter()
                trains()
                taken["update"].append(time.perf_counter() - start)

            agent.train = timed
            start = time.perf_counter()
            agent.learn(16 * agent.n_steps, reset_num_timesteps=False)
            taken["rollout"].append(time.perf_counter() - start - taken["update"][-1])
            agent.train = trains
    print("| way | frames per second | rollout, s | update, s | mean return |\n| --- | --- | --- | --- | --- |")
    for way, agent in agents.items():
        rollout, update = (statistics.median(part) for part in times[way].values())
        frames = 16 * agent.n_steps / (rollout + update)
        returns = statistics.mean(episode["r"] for episode in agent.ep_info_buffer)
        print(f"| {way} | {frames:,.0f} | {rollout:.2f} | {update:.2f} | {returns:.0f} |")


if __name__ == "__main__":
    main()
