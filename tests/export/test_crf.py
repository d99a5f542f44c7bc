"""A conditional random field in an exported file: tags, their scores and marginals, as the model gives them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from exported import FEW, D, largest_error, run_file, truth

pytest.importorskip("onnxscript", reason="needs raglane[export]")
pytest.importorskip("onnxruntime", reason="needs raglane[export]")


class Tagger(nn.Module):
    """Scores that are whole numbers, so that paths are often equally good, and some that are forbidden."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.crf = nn.Linear(D, 4), rl.nn.CRF(4)
        for part in self.parameters():
            nn.init.uniform_(part, -2, 2)
            part.data.round_()
        self.crf.transitions.data[1, 2] = self.crf.start.data[3] = self.crf.end.data[0] = -torch.inf

    def forward(self, batch: rl.Ragged) -> dict[str, rl.Ragged | Tensor]:
        emissions = batch.map(self.head)
        tags, score = self.crf.decode(emissions)
        likelihood = score - self.crf.log_partition(emissions)
        return {"tags": tags, "likelihood": likelihood, "marginals": self.crf.marginals(emissions)}


def a_batch(lengths: list[int]) -> rl.Ragged:
    """Whole numbers."""
    return rl.Ragged.from_flat(torch.randint(-1, 2, (sum(lengths), D)).float(), lengths=lengths)


def test_a_chain_is_decoded_in_the_runtime(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, path = Tagger(), tmp_path / "model.onnx"
    exported = rl.export.onnx(model, path, example=a_batch([3, 5]))
    assert exported.outputs == ["output_tags", "output_likelihood", "output_marginals"]
    for lengths in [*FEW, [2] * 50]:
        batch = a_batch(lengths)
        found, wanted = run_file(path, "padded", batch), truth(model, "padded", batch)
        assert found[0].tolist() == wanted[0].tolist(), lengths
        assert largest_error(found[1:], wanted[1:]) < 1e-5, lengths
