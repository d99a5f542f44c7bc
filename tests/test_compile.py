"""torch.compile takes ragged batches, and compiles once for all of them."""

from __future__ import annotations

from typing import Any

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
