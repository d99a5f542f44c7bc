"""A recurrent policy that acts in 1,000 environments with one engine, each with its own episodes.

The environments are carts that balance a pole, written in NumPy, with poles of different lengths.
The policy reads only positions, so that it needs earlier ones to compute velocities. It is trained
to repeat the actions of a controller that reads the whole state, in episodes of the policy itself.
An episode ends when the pole falls, or after 500 steps.

The environments do not run in step: at each tick a random half of them has an observation. Each has
a stream of the engine, which begins a new sequence at the end of an episode. A loop with one
``layer.step`` per environment is timed in the same run: it takes about 200 times as long on one
thread of an AMD EPYC.

    python examples/policy.py

Mean steps of new episodes: 500 of at most 500 (pushing to the side to which the pole leans: 46).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

import raglane as rl
from raglane.serve import Engine

Places = npt.NDArray[np.int64]

TICK, GRAVITY, FORCE, CART, POLE = 0.02, 9.8, 10.0, 1.0, 0.1  # seconds, m/s2, N, kg, kg
TRACK, FALL, MOST = 2.4, 0.21, 500  # metres, radians, steps


class Poles:
    """Carts with poles. A state is position and velocity of the cart, and angle and angular
    velocity of the pole.
    """

    def __init__(self, count: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self.states, self.half, self.steps = (
            np.zeros((count, 4)),
            np.zeros(count),
            np.zeros(count, int),
        )
        self._begin(np.arange(count))

    def _begin(self, places: Places) -> None:
        self.states[places] = self._random.uniform(-0.05, 0.05, (len(places), 4))
        self.half[places] = self._random.uniform(0.3, 0.8, len(places))
        self.steps[places] = 0

    def observe(self, places: Places) -> npt.NDArray[np.float32]:
        """Return the position and the angle, ``(n, 2)``, scaled."""
        return (self.states[places][:, [0, 2]] / (TRACK, FALL)).astype(np.float32)

    def advise(self, places: Places) -> npt.NDArray[np.bool_]:
        """Return the actions of the controller, ``(n,)``: True to push to the right."""
        found: npt.NDArray[np.bool_] = self.states[places] @ (0.3, 0.6, 6.0, 1.2) > 0
        return found

    def step(self, places: Places, right: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Apply actions, and return which episodes have ended, ``(n,)``; the next ones have
        begun.
        """
        x, speed, angle, turn = self.states[places].T
        half, sine, cosine, whole = self.half[places], np.sin(angle), np.cos(angle), CART + POLE
        pushed = (np.where(right, FORCE, -FORCE) + POLE * half * turn**2 * sine) / whole
        turning = (GRAVITY * sine - cosine * pushed) / (half * (4 / 3 - POLE * cosine**2 / whole))
        moving = pushed - POLE * half * turning * cosine / whole
        rates = np.stack([speed, moving, turn, turning], 1)
        self.states[places] += TICK * rates
        self.steps[places] += 1
        x, angle = self.states[places][:, 0], self.states[places][:, 2]
        ended: npt.NDArray[np.bool_] = (
            (abs(x) > TRACK) | (abs(angle) > FALL) | (self.steps[places] >= MOST)
        )
        self._begin(places[ended])
        return ended


class Policy(nn.Module):
    """The log-odds of a push to the right, one per element."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = rl.nn.GRU(2, 32), nn.Linear(32, 1)

    def forward(self, observations: rl.Ragged) -> rl.Ragged:
        out, _ = self.layer(observations)
        return out.map(self.head)


class Streams:
    """Acts by one engine: a stream per environment."""

    def __init__(self, policy: Policy, count: int) -> None:
        self.engine = Engine(policy, max_streams=count)
        self.streams = [self.engine.open() for _ in range(count)]

    def act(self, places: Places, observations: npt.NDArray[np.float32]) -> Tensor:
        """Return the log-odds ``(n, 1)`` of environments that have new observations ``(n, 2)``."""
        own = [self.streams[place] for place in places.tolist()]
        self.engine.push(own, observations)
        self.engine.step()
        return self.engine.pull(own)

    def end(self, places: Places) -> None:
        """Begin new sequences where episodes have ended."""
        for place in places.tolist():
            self.streams[place].reset()


class Loop:
    """Acts by one call of ``layer.step`` per environment."""

    def __init__(self, policy: Policy, count: int) -> None:
        self.layer, self.head = rl.pack_weights(policy.layer), policy.head
        self.states: list[Tensor | None] = [None] * count

    @torch.inference_mode()
    def act(self, places: Places, observations: npt.NDArray[np.float32]) -> Tensor:
        """Return the log-odds ``(n, 1)`` of environments that have new observations ``(n, 2)``."""
        found = []
        for place, observation in zip(
            places.tolist(), torch.from_numpy(observations).split(1), strict=True
        ):
            out, self.states[place] = self.layer.step(observation, self.states[place])
            found.append(self.head(out))
        return torch.cat(found)

    def end(self, places: Places) -> None:
        """Begin new sequences where episodes have ended."""
        for place in places.tolist():
            self.states[place] = None


class Played(NamedTuple):
    """Episodes, first those that have ended: observations ``(L, 2)``, log-odds and advised actions
    ``(L,)``.
    """

    observations: list[Tensor]
    outputs: list[Tensor]
    advice: list[Tensor]
    ended: int
    seconds: float  # of acting, per tick


def play(actor: Streams | Loop, world: Poles, ticks: int, share: float = 1.0) -> Played:
    """Run environments; at each tick a random share of them has an observation."""
    count = len(world.states)
    random = np.random.default_rng(1)
    running: list[list[Any]] = [[] for _ in range(count)]
    whole: list[list[Any]] = []
    seconds = []
    for _ in range(ticks):
        places = np.flatnonzero(random.random(count) < share)
        observations, advice = world.observe(places), world.advise(places)
        begun = time.perf_counter()
        outputs = actor.act(places, observations)
        seconds.append(time.perf_counter() - begun)
        ended = world.step(places, outputs[:, 0].numpy() > 0)
        for place, *row in zip(
            places.tolist(), observations, outputs.tolist(), advice, strict=True
        ):
            running[place].append(row)
        actor.end(places[ended])
        for place in places[ended].tolist():
            whole.append(running[place])
            running[place] = []
    parts = [
        [torch.as_tensor(np.array(part, np.float32)) for part in zip(*rows, strict=True)]
        for rows in (*whole, *filter(None, running))
    ]
    own = [list(part) for part in zip(*parts, strict=True)]
    return Played(
        own[0], [part[:, 0] for part in own[1]], own[2], len(whole), statistics.median(seconds)
    )


def train(policy: Policy, rounds: int, count: int = 32, ticks: int = 250) -> None:
    """Train on the advice in episodes of the policy itself (Ross et al. 2011)."""
    actor, world = Streams(policy, count), Poles(count, seed=0)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for number in range(1, rounds + 1):
        played = play(actor, world, ticks)
        batch = rl.Ragged(played.observations)
        advice: Any = rl.Ragged(played.advice)
        for _ in range(10):
            logits = policy(batch).squeeze(-1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, advice)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        actor.engine.swap(policy, restart=True)
        world = Poles(count, seed=number)
        if number % 5 == 0:
            print(
                f"round {number}: {played.ended} episodes ended in {ticks} steps, loss {loss.item():.3f}",
                flush=True,
            )


def main(arguments: Sequence[str] | None = None) -> float:
    """Train, serve the environments, and return the mean steps of their episodes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="of episodes and updates (default: 30)"
    )
    parser.add_argument(
        "--environments", type=int, default=1000, help="served at the same time (default: 1000)"
    )
    parser.add_argument(
        "--ticks", type=int, default=1200, help="of the environments (default: 1200)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the weights (default: 0)")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    policy = Policy()
    train(policy, options.rounds)

    count = options.environments
    actor = Streams(policy, count)
    played = play(actor, Poles(count, seed=1), options.ticks, share=0.5)
    whole = actor.engine.run(rl.Ragged(played.observations))
    is_equal = torch.equal(rl.Ragged(played.outputs), whole.squeeze(-1))
    print(f"{count} environments, {whole.numel()} steps; equal to whole episodes: {is_equal}")
    looped = play(Loop(policy, count), Poles(count, seed=1), 20, share=0.5)
    ratio = looped.seconds / played.seconds
    print(
        f"acting takes {1e3 * played.seconds:.2f} ms per tick, one layer.step each {ratio:.1f} times as long"
    )
    lengths = [len(one) for one in played.observations[: played.ended]]
    mean = float(np.mean(lengths or [0.0]))
    print(
        f"mean steps of {len(lengths)} episodes {mean:.1f}, from {min(lengths, default=0)} to {max(lengths, default=0)}"
    )
    return mean


if __name__ == "__main__":
    main()
