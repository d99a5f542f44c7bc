"""The module whose output is the loss of a batch, with gradients that ranks share; and its optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from raglane.data.order import BatchSampler
from raglane.data.tbptt import TBPTTSampler
from raglane.ragged import Ragged
from raglane.training.batches import Batch, RareTokens
from raglane.training.model import SequenceModel
from raglane.training.ranks import Ranks
from raglane.training.settings import Settings
from raglane.training.tasks import Score, Task

_KINDS = {"adam": optim.Adam, "adamw": optim.AdamW, "rmsprop": optim.RMSprop, "sgd": optim.SGD}
# Methods that PyTorch keeps from torch.compile, which nobody calls here: to do so it imports all of torch._dynamo.
_KEPT = ("add_param_group", "load_state_dict", "state_dict", "step")


class Learner(nn.Module):
    """A model that answers a batch with its loss, whose gradient the ranks average."""

    # The layer's states after the last chunk, where sequences are cut into such.
    carried: Any = None
    # Of the last batch, on all ranks: its score and its elements.
    whole: tuple[Score, Tensor | int] | None = None
    # How many were counted since the last step of the optimizer, where it waits for several batches.
    counted: Tensor | float = 0.0

    def __init__(
        self,
        model: SequenceModel,
        task: Task,
        settings: Settings,
        ranks: Ranks,
        order: BatchSampler | TBPTTSampler,
        rare: RareTokens | None,
    ) -> None:
        super().__init__()
        self.model, self.task, self.settings, self.ranks = model, task, settings, ranks
        self.order, self.rare = order, rare
        model.penalties = (settings.activation_penalty, settings.temporal_penalty)

    def forward(self, batch: Batch) -> Tensor:
        """The loss of a batch, 0-d: its mean, or its sum where several batches make a step."""
        if self.rare is not None:
            batch = self.rare.hidden_in(batch)
        if batch.begins is None:
            output = self.model(batch.inputs)
        else:
            output, self.carried = self._go_on(batch.inputs, batch.begins)
        score = self.task.score(output, batch, training=True)
        self.whole = self.ranks.whole(score, batch.inputs.values.shape[0])
        whole = self.whole[0]
        loss, self.model.penalty = score.loss if self.model.penalty is None else score.loss + self.model.penalty, None
        # The ranks' gradients are averaged: this is undone, so that each element counts the same on whatever rank, in
        # whatever batch it is.
        if self.settings.accumulate > 1:
            self.counted = self.counted + whole.count
            return loss * self.ranks.count
        count = whole.count.clamp(min=1).to(score.loss.dtype)
        return loss * self.ranks.count / count

    def _go_on(self, inputs: Ragged, begins: Tensor) -> tuple[Ragged, Any]:
        """Answers to a chunk, and the states of all streams: each rank has them all, so that any can save the run."""
        order, ranks = self.order, self.ranks
        if ranks.count == 1 or not isinstance(order, TBPTTSampler):
            return self.model.go_on(inputs, self.carried, begins)
        streams, count = order.streams, order.batch_size
        own = _each_state(lambda state: state[:, streams.start :: streams.step].contiguous(), self.carried)
        output, state = self.model.go_on(inputs, own, begins)
        return output, _each_state(lambda mine: ranks.joined(mine, streams, count), state)

    def average(self) -> None:
        """Make a mean of the gradient, where several batches make a step."""
        if self.settings.accumulate > 1:
            gradients = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
            torch._foreach_div_(gradients, max(float(self.counted), 1.0))
            self.counted = 0.0


def _each_state(act: Callable[[Tensor], Tensor], states: Any) -> Any:
    """Apply a function to each state of a layer, which has one or several; None gives None."""
    if states is None:
        return None
    return tuple(map(act, states)) if isinstance(states, tuple) else act(states)


def shared(learner: Learner, device: torch.device) -> DistributedDataParallel:
    """A learner whose gradients are averaged over the ranks, which have met, while the backward pass still runs."""
    # Its new name is not in every version of PyTorch that will do.
    warnings.filterwarnings("ignore", message=r"`broadcast_buffers` is deprecated", category=FutureWarning)
    # Where weights may go unused, the reducer keeps its buckets: sums have one order, and a run that goes on has the
    # bits of one that was never stopped. What a task keeps in buffers is the same everywhere.
    places = None if device.index is None else [device.index]
    return DistributedDataParallel(learner, places, find_unused_parameters=True, broadcast_buffers=False)


def make_optimizer(model: SequenceModel, settings: Settings) -> optim.Optimizer:
    """The optimizer that the settings name, for all weights of a model."""
    kind = _KINDS[settings.optimizer]
    plain = type(kind.__name__, (kind,), {name: torch.no_grad()(inspect.unwrap(getattr(kind, name))) for name in _KEPT})
    more = {"momentum": 0.9} if settings.optimizer == "sgd" else {}
    optimizer: optim.Optimizer = plain(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, **more)
    return optimizer
