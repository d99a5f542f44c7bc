"""Reinforcement learning packages."""

from __future__ import annotations

from typing import Any

import torch
from comparison import Example


def sb3_contrib() -> Example:
    """The policy of sb3-contrib's RecurrentPPO for CartPole, with episodes that start within the
    sequences.
    """
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    policy = RecurrentPPO(
        "MlpLstmPolicy", "CartPole-v1", seed=0, policy_kwargs={"lstm_hidden_size": 64}
    ).policy
    sequences, steps = 8, 32
    starts = torch.zeros(sequences, steps)
    starts[:, 0] = starts[::2, 11] = starts[3, 25] = 1
    batches = [
        (torch.randn(sequences * steps, 4), torch.randint(2, (sequences * steps,)))
        for _ in range(2)
    ]

    def loss(model: Any, batch: Any) -> Any:
        observations, actions = batch
        zeros = observations.new_zeros(1, sequences, 64)
        state = RNNStates((zeros, zeros), (zeros, zeros))
        values, likelihoods, entropy = model.evaluate_actions(
            observations, actions, state, starts.flatten()
        )
        return (values.square() - likelihoods.unsqueeze(1) - 0.01 * entropy.unsqueeze(1)).mean(), [
            values,
            likelihoods,
        ]

    # Observations are converted to float32.
    return Example(policy, batches, loss, dtypes=(torch.float32,))


def torchrl() -> Example:
    """The LSTMModule of torchrl on trajectories with resets."""
    from tensordict import TensorDict
    from torchrl.modules import LSTMModule, set_recurrent_mode

    model = LSTMModule(input_size=6, hidden_size=32, in_key="observation", out_key="features")
    batches = []
    for _ in range(2):
        is_init = torch.zeros(8, 25, 1, dtype=torch.bool)
        is_init[:, 0] = is_init[::2, 10] = True
        batches.append({"observation": torch.randn(8, 25, 6), "is_init": is_init})

    def loss(module: Any, batch: Any) -> Any:
        with set_recurrent_mode(True):
            found = module(TensorDict(dict(batch), batch_size=[8, 25]))
        return found["features"].square().mean(), found["features"]

    return Example(model, batches, loss)


def skrl() -> Example:
    """A model of skrl with an LSTM, on sequences of observations."""
    import gymnasium
    from skrl.models.torch import DeterministicMixin, Model

    class Value(DeterministicMixin, Model):
        def __init__(self) -> None:
            space = gymnasium.spaces.Box(-1, 1, (6,))
            Model.__init__(self, observation_space=space, action_space=space, device="cpu")
            DeterministicMixin.__init__(self)
            self.lstm = torch.nn.LSTM(6, 32, batch_first=True)
            self.head = torch.nn.Linear(32, 1)

        def compute(self, inputs: Any, *_: Any) -> Any:
            output, _ = self.lstm(inputs["observations"])
            return self.head(output), {}

    batches = [{"observations": torch.randn(8, 25, 6)} for _ in range(2)]

    def loss(module: Any, batch: Any) -> Any:
        values = module.act(batch, role="value")[0]
        return (values - 1).square().mean(), values

    return Example(Value(), batches, loss)
