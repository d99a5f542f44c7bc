"""Packages that train models of their users: a bidirectional LSTM on packed sequences."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from comparison import STEPS, Example
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import raglane as rl

LENGTHS = torch.tensor([12, 30, 7, 18, 25, 3, 9, 21])


class Tagger(nn.Module):
    """Packs, runs an LSTM, and classifies by the last states."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 3)

    def forward(self, sequences: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        """Return the loss and logits, as models of transformers do, or logits without labels."""
        packed = pack_padded_sequence(sequences, LENGTHS, batch_first=True, enforce_sorted=False)
        _, (h, _) = self.lstm(packed)
        logits = self.head(torch.cat([h[-2], h[-1]], 1))
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


Batches = list[tuple[torch.Tensor, torch.Tensor]]


def _example(fit: Callable[[nn.Module, Batches], list[float]]) -> Example:
    model = Tagger()
    batches = [(torch.randn(8, 30, 8), torch.randint(3, (8,))) for _ in range(2)]

    def loss(module: nn.Module, batch: Any) -> Any:
        found = module(*batch)
        return found["loss"], found["logits"]

    return Example(model, batches, loss, fit=lambda model: fit(model, batches))


def skorch() -> Example:
    """Trained by skorch."""
    from skorch import NeuralNetClassifier

    def fit(model: nn.Module, batches: Batches) -> list[float]:
        sequences, labels = (torch.cat(part) for part in zip(*batches, strict=True))
        net = NeuralNetClassifier(
            model,
            criterion=nn.CrossEntropyLoss,
            max_epochs=5,
            batch_size=8,
            train_split=None,
            iterator_train__shuffle=False,
            verbose=0,
        )
        net.fit(sequences.to(model.head.weight.dtype), labels)
        return [
            *net.history[:, "train_loss"],
            *net.predict_proba(sequences.to(model.head.weight.dtype)).ravel(),
        ]

    return _example(fit)


def lightning() -> Example:
    """Trained by Lightning, with its checkpoint files."""
    import lightning as package

    class Module(package.LightningModule):
        def __init__(self, model: nn.Module, losses: list[float]) -> None:
            super().__init__()
            self.model, self.losses = model, losses

        def training_step(self, batch: Any) -> torch.Tensor:
            loss: torch.Tensor = self.model(*batch)["loss"]
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def fit(model: nn.Module, batches: Batches) -> list[float]:
        losses: list[float] = []
        module = Module(model, losses)
        with tempfile.TemporaryDirectory() as folder:
            trainer = package.Trainer(
                max_epochs=3, logger=False, default_root_dir=folder, enable_progress_bar=False
            )
            rows = [
                (sequences.to(model.head.weight.dtype), labels) for sequences, labels in batches
            ]
            trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=None))
            trainer.save_checkpoint(f"{folder}/last.ckpt")
            stored = torch.load(f"{folder}/last.ckpt", weights_only=False)["state_dict"]
            plain = Module(Tagger().to(model.head.weight.dtype), [])
            plain.load_state_dict(stored)
            rl.accelerate(plain)
            plain.load_state_dict(stored)
        return losses

    return _example(fit)


def accelerate() -> Example:
    """Trained by Hugging Face accelerate, with its stored state."""
    from accelerate import Accelerator

    def fit(model: nn.Module, batches: Batches) -> list[float]:
        tool = Accelerator(cpu=True)
        prepared, optimizer = tool.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
        losses = []
        for step in range(STEPS):
            sequences, labels = batches[step % 2]
            loss = prepared(sequences.to(model.head.weight.dtype), labels)["loss"]
            optimizer.zero_grad()
            tool.backward(loss)
            optimizer.step()
            losses.append(float(loss))
        with tempfile.TemporaryDirectory() as folder:
            tool.save_state(folder)
            tool.load_state(folder)
        return losses

    return _example(fit)


def transformers() -> Example:
    """Trained by the Trainer of transformers."""
    import transformers as package

    def fit(model: nn.Module, batches: Batches) -> list[float]:
        dtype = model.head.weight.dtype
        rows = [
            {"sequences": sequence.to(dtype), "labels": label}
            for batch in batches
            for sequence, label in zip(*batch, strict=True)
        ]
        with tempfile.TemporaryDirectory() as folder:
            arguments = package.TrainingArguments(
                folder,
                per_device_train_batch_size=8,
                num_train_epochs=3,
                optim="sgd",
                learning_rate=0.01,
                logging_steps=1,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                seed=0,
            )
            trainer = package.Trainer(model, arguments, train_dataset=rows)
            trainer.train()
            trainer.save_model(f"{folder}/model")
        weights = [float(part.double().sum()) for part in model.parameters()]
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry] + weights

    return _example(fit)


def optuna() -> Example:
    """A study of optuna over the learning rate."""
    import optuna as package

    def fit(model: nn.Module, batches: Batches) -> list[float]:
        start = copy.deepcopy(model.state_dict())

        def objective(trial: Any) -> float:
            model.load_state_dict(start)
            optimizer = torch.optim.SGD(
                model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True)
            )
            for sequences, labels in batches:
                loss = model(sequences.to(model.head.weight.dtype), labels)["loss"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            return float(loss)

        package.logging.set_verbosity(package.logging.ERROR)
        study = package.create_study(sampler=package.samplers.TPESampler(seed=0))
        study.optimize(objective, n_trials=4)
        return [trial.value for trial in study.trials]

    return _example(fit)
