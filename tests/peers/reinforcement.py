"""Reinforcement learning packages."""

from __future__ import annotations

from typing import Any

import torch
from comparison import Example

import raglane as rl


def policy_with_resets() -> Any:
    """Return a policy for RecurrentPPO that passes the starts of episodes to the layer, without a loop over steps."""
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy

    class Policy(RecurrentActorCriticPolicy):
        @staticmethod
        def _process_sequence(features: Any, states: Any, starts: Any, lstm: Any) -> Any:
            if not isinstance(lstm, rl.nn.LSTM):
                return RecurrentActorCriticPolicy._process_sequence(features, states, starts, lstm)
            count = states[0].shape[1]
            sequences = features.view(count, -1, lstm.input_size).transpose(0, 1)
            output, states = lstm(sequences, states, resets=starts.view(count, -1).transpose(0, 1) > 0)
            return output.transpose(0, 1).flatten(0, 1), states

    return Policy


def sb3_contrib(resets: bool = False) -> Example:
    """The policy of sb3-contrib's RecurrentPPO for CartPole, with episodes that start within the sequences."""
    from sb3_contrib import RecurrentPPO
    from sb3_contrib.common.recurrent.type_aliases import RNNStates

    kind = policy_with_resets() if resets else "MlpLstmPolicy"
    policy = RecurrentPPO(kind, "CartPole-v1", seed=0, policy_kwargs={"lstm_hidden_size": 64}).policy
    sequences, steps = 8, 32
    starts = torch.zeros(sequences, steps)
    starts[:, 0] = starts[::2, 11] = starts[3, 25] = 1
    batches = [(torch.randn(sequences * steps, 4), torch.randint(2, (sequences * steps,))) for _ in range(2)]

    def loss(model: Any, batch: Any) -> Any:
        observations, actions = batch
        zeros = observations.new_zeros(1, sequences, 64)
        state = RNNStates((zeros, zeros), (zeros, zeros))
        values, likelihoods, entropy = model.evaluate_actions(observations, actions, state, starts.flatten())
        return (values.square() - likelihoods.unsqueeze(1) - 0.01 * entropy.unsqueeze(1)).mean(), [values, likelihoods]

    # Observations are converted to float32.
    return Example(policy, batches, loss, dtypes=(torch.float32,))


def sb3_resets() -> Example:
    """The same with a policy that passes the starts of episodes to the layer as resets."""
    return sb3_contrib(resets=True)


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
