"""Faults in what models are trained for."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

_TASKS = "src/raglane/training/tasks/"

FAULTS: dict[str, Fault] = {
    "a-quantile-from-above": Fault(
        f"{_TASKS}regress.py",
        "torch.maximum((1 - quantile) * errors, -quantile * errors)",
        "torch.maximum(quantile * errors, (quantile - 1) * errors)",
        "training/test_tasks.py::test_losses_of_errors_by_hand",
    ),
    "numbers-told-scaled": Fault(
        f"{_TASKS}regress.py",
        "rows = output.double() * self.std + self.mean",
        "rows = output.double() * self.std",
        "training/test_tasks.py::test_numbers_are_learned_and_told_in_their_units",
    ),
    "thresholds-of-a-half": Fault(
        f"{_TASKS}multilabel.py",
        "model.thresholds.copy_(best_thresholds(torch.cat(answers).sigmoid(), targets))",
        "model.thresholds.copy_(torch.full_like(model.thresholds, 0.5) + 0 * targets.sum())",
        "training/test_tasks.py::test_sets_of_labels",
    ),
    "thresholds-between-equals": Fault(
        f"{_TASKS}multilabel.py",
        "scores = torch.where(below < ranked, scores, -1.0)",
        "scores = torch.where(below <= ranked, scores, -1.0)",
        "training/test_tasks.py::test_thresholds_against_every_cut",
    ),
}
