"""torch.compile takes ragged batches, and compiles once for all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn

import raglane as rl


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(8, 4)

    def forward(self, tokens: Any) -> tuple[Any, Tensor, Tensor]:
        hidden: Any = torch.relu(self.head(self.embedding(tokens)))
        return hidden * 2, hidden.mean(), hidden.last()


def test_one_graph_for_batches_of_any_lengths() -> None:
    """The lengths travel as tensors: as Python numbers each batch would be compiled anew."""
    model = Tagger()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    for count in range(3, 9):
        lengths = torch.randint(0, 9, (count,)).tolist()
        batch = rl.Ragged([torch.randint(0, 50, (length,)) for length in lengths])
        for own, expected in zip(compiled(batch), model(batch), strict=True):
            if isinstance(expected, rl.Ragged):
                assert isinstance(own, rl.Ragged)
                assert own.lengths.tolist() == lengths
                own, expected = own.values, expected.values
            torch.testing.assert_close(own, expected)
    assert counter.frame_count == 1


class Reader(nn.Module):
    """A whole model: embedding, recurrent layers, a summary per sequence and an output per element."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(50, 8), nn.Linear(12, 4)
        self.recurrent = getattr(rl.nn, kind)(8, 6, num_layers=2, bidirectional=True)

    def forward(self, tokens: Any) -> tuple[Tensor, Tensor]:
        out, state = self.recurrent(self.embedding(tokens))
        return self.head(self.recurrent.summary(out, state)), self.head(out).values


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN", "LayerNormLSTM", "PeepholeLSTM"])
def test_a_recurrent_model_is_one_graph(kind: str) -> None:
    """Without a break, for any number of sequences of any lengths, forward and backward."""
    model = Reader(kind)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
    graphs = 0
    for lengths in ([3, 4, 5], [1, 9], [6] * 7, [2, 0, 3, 4, 5, 5, 6]):
        batch = rl.Ragged([torch.randint(0, 50, (length,)) for length in lengths])
        grads = []
        for network in (compiled, model):
            summary, output = network(batch)
            loss = summary.square().sum() + output.square().sum()
            grads.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
        for own, expected in zip(*grads, strict=True):
            torch.testing.assert_close(own, expected)
        # torch may start anew while it compiles the first batch; after that no batch is compiled again.
        graphs = graphs or counter.frame_count
        assert counter.frame_count == graphs


# torch's own compiler makes an instance of each autograd function that it meets.
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function:DeprecationWarning")
@pytest.mark.parametrize("operation", ["reverse", "last", "softmax"])
def test_rows_of_large_batches_are_moved_in_one_graph(operation: str) -> None:
    """Rows of many numbers are moved in another way than of few, which asks more of the tensor."""
    values = torch.randn(3000, 8, requires_grad=True)
    batch = rl.Ragged.from_flat(values, lengths=[1000, 0, 2000])

    def moved(batch: Any) -> Tensor:
        out = getattr(batch, operation)()
        return out if isinstance(out, Tensor) else out.values

    compiled = torch.compile(moved, backend="aot_eager", fullgraph=True, dynamic=True)
    torch.testing.assert_close(compiled(batch), moved(batch), rtol=0, atol=0)
    (own,) = torch.autograd.grad(compiled(batch).square().sum(), [values])
    (expected,) = torch.autograd.grad(moved(batch).square().sum(), [values])
    torch.testing.assert_close(own, expected, rtol=0, atol=0)
