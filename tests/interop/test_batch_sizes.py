"""Packages that look for the size of a batch find the number of sequences, or nothing."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Sequence, Sized
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl

_LENGTHS = [38, 2, 5, 1]


def _batch(lengths: list[int] = _LENGTHS) -> rl.Ragged:
    return rl.Ragged([torch.randn(length, 2) for length in lengths])


def test_a_ragged_is_iterated_but_no_iterable() -> None:
    class Own(rl.Ragged):
        __slots__ = ()

    batch: Any
    for batch in (_batch(), Own([torch.randn(2, 2)])):
        kinds = [isinstance(batch, kind) for kind in (Iterable, Sequence, Sized)]
        assert kinds == [False, False, True]
        assert [len(part) for part in batch] == batch.lengths.tolist()
        assert len([*batch]) == len(list(zip(batch, batch, strict=True))) == len(batch)
        assert torch.equal(rl.Ragged(batch).values, batch.values)
        assert torch.equal(next(iter(batch)), batch[0])
    assert not issubclass(rl.Ragged, Iterable)
    # Only the search of Iterable does not find the class.
    assert rl.Ragged.__mro__[0] is rl.Ragged
    assert pickle.loads(pickle.dumps(_batch())).lengths.tolist() == _LENGTHS
    with pytest.raises(rl.errors.ArgumentTypeError, match="sequences"):
        rl.Ragged(5)  # type: ignore[arg-type]


def test_the_backward_pass_of_a_loop_is_one_split() -> None:
    batch = _batch()
    values = batch.values.clone().requires_grad_()
    total = sum(part.sum() for part in batch.with_values(values))
    assert isinstance(total, Tensor)
    names: list[str] = []

    def visit(node: Any) -> None:
        if node is not None and node.name() not in names:
            names.append(node.name())
            for below, _ in node.next_functions:
                visit(below)

    visit(total.grad_fn)
    assert [name for name in names if "Split" in name or "Slice" in name] == [
        "SplitWithSizesBackward0"
    ]


def test_compiled_loops() -> None:
    batch = _batch()
    loop = torch.compile(
        lambda given: sum(part.sum() for part in given), fullgraph=True, backend="eager"
    )
    assert torch.allclose(loop(batch), batch.values.sum(), rtol=1e-4, atol=1e-4)


# Of Lightning's own code.
@pytest.mark.filterwarnings("ignore")
def test_lightning_weights_means_by_the_number_of_sequences() -> None:
    lightning = pytest.importorskip(
        "lightning.pytorch", reason="Lightning is not installed: pip install lightning"
    )
    from lightning.pytorch.utilities.data import extract_batch_size

    targets = torch.zeros(len(_LENGTHS))
    for batch in (
        (_batch(), targets),
        [_batch(), targets],
        {"inputs": _batch(), "target": targets},
    ):
        assert extract_batch_size(batch) == len(_LENGTHS)
    with pytest.raises(Exception, match="could not infer the batch_size"):
        extract_batch_size((_batch(), _batch()))

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(2, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            r, y = batch
            self.log("guessed", float(index), on_epoch=True, on_step=False)
            self.log("named", float(index), on_epoch=True, on_step=False, batch_size=len(r))
            return (self.head(r).mean(1).squeeze(1) - y).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    batches: Any = [(_batch(), targets), (_batch([9]), torch.zeros(1))]
    loader: Any = torch.utils.data.DataLoader(batches, batch_size=None)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader)
    # The second of the two batches, with the value 1, has one of five sequences.
    assert float(trainer.callback_metrics["named"]) == pytest.approx(0.2)
    assert float(trainer.callback_metrics["guessed"]) == pytest.approx(0.2)
