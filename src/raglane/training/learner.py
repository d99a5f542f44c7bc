"""The module that computes the loss of a batch, and the optimizer."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

from raglane.data.order import BatchSampler
from raglane.data.order.tbptt import TBPTTSampler
from raglane.ragged import Ragged
from raglane.training.batches import Batch, RareTokens
from raglane.training.model import SequenceModel
from raglane.training.ranks import Ranks
from raglane.training.settings import Settings
from raglane.training.tasks import Score, Task

_KINDS = {"adam": optim.Adam, "adamw": optim.AdamW, "rmsprop": optim.RMSprop, "sgd": optim.SGD}
# Methods with decorators that import torch._dynamo, which takes seconds, to exclude them from
# torch.compile.
_KEPT = ("add_param_group", "load_state_dict", "state_dict", "step")


class Learner(nn.Module):
    """Computes the loss of a batch; DistributedDataParallel averages its gradients over the
    ranks.
    """

    # The states after the last chunk, with truncated backpropagation.
    carried: Any = None
    # The score and the elements of the last batch, summed over the ranks.
    whole: tuple[Score, Tensor | int] | None = None
    # With gradient accumulation, the count of all batches since the last optimizer step.
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
        self.model = model
        self.task = task
        self.settings = settings
        self.ranks = ranks
        self.order = order
        self.rare = rare
        model.penalties = (settings.activation_penalty, settings.temporal_penalty)

    def forward(self, batch: Batch) -> Tensor:
        """Return the 0-d loss of a batch: the mean, or the sum with gradient accumulation."""
        if self.rare is not None:
            batch = self.rare.replaced_in(batch)
        if batch.begins is None:
            output = self.model(batch.inputs)
        else:
            output, self.carried = self._run_chunk(batch.inputs, batch.begins)
        score = self.task.score(output, batch, training=True)
        self.whole = self.ranks.total(score, batch.inputs.values.shape[0])
        whole = self.whole[0]
        loss = score.loss if self.model.penalty is None else score.loss + self.model.penalty
        self.model.penalty = None
        # DistributedDataParallel divides by the number of ranks. Multiplying by it gives all
        # elements the same weight, on any rank and in any batch.
        if self.settings.accumulate > 1:
            self.counted = self.counted + whole.count
            return loss * self.ranks.count
        count = whole.count.clamp(min=1).to(score.loss.dtype)
        return loss * self.ranks.count / count

    def _run_chunk(self, inputs: Ragged, begins: Tensor) -> tuple[Ragged, Any]:
        """Return the outputs of a chunk, and the states of all streams of all ranks, so that any
        rank can save them.
        """
        order = self.order
        ranks = self.ranks
        if ranks.count == 1 or not isinstance(order, TBPTTSampler):
            return self.model.run_chunk(inputs, self.carried, begins)
        streams = order.streams
        count = order.batch_size
        states_of_rows = _each_state(
            lambda state: state[:, streams.start :: streams.step].contiguous(), self.carried
        )
        output, state = self.model.run_chunk(inputs, states_of_rows, begins)
        return output, _each_state(lambda mine: ranks.joined(mine, streams, count), state)

    def average(self) -> None:
        """Divide accumulated gradients by the number of accumulated targets."""
        if self.settings.accumulate > 1:
            gradients = [
                weight.grad for weight in self.model.parameters() if weight.grad is not None
            ]
            torch._foreach_div_(gradients, max(float(self.counted), 1.0))
            self.counted = 0.0


def _each_state(act: Callable[[Tensor], Tensor], states: Any) -> Any:
    """Apply a function to each state of a layer; None gives None."""
    if states is None:
        return None
    return tuple(map(act, states)) if isinstance(states, tuple) else act(states)


def shared(learner: Learner, device: torch.device) -> DistributedDataParallel:
    """Wrap a learner in DistributedDataParallel, which averages gradients over the ranks."""
    # Its replacement is missing in older supported versions of torch.
    warnings.filterwarnings(
        "ignore", message=r"`broadcast_buffers` is deprecated", category=FutureWarning
    )
    # With find_unused_parameters the reducer keeps its buckets, so sums have a fixed order, and a
    # resumed run has the bits of an uninterrupted one. Buffers are equal on all ranks.
    device_ids = None if device.index is None else [device.index]
    return DistributedDataParallel(
        learner, device_ids, find_unused_parameters=True, broadcast_buffers=False
    )


def make_optimizer(model: SequenceModel, settings: Settings) -> optim.Optimizer:
    """Return the optimizer of the settings for all weights of a model."""
    kind = _KINDS[settings.optimizer]
    plain = type(
        kind.__name__,
        (kind,),
        {name: torch.no_grad()(inspect.unwrap(getattr(kind, name))) for name in _KEPT},
    )
    more = {"momentum": 0.9} if settings.optimizer == "sgd" else {}
    return plain(model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay, **more)
