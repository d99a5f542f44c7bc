"""Advice on a trained model: worse than a simple rule, overfitting, underfitting, or none."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from raglane._utils.messages import argument, metric_words
from raglane.data.dataset import Dataset
from raglane.training.results import SCORES, BetterRule, Evaluation
from raglane.training.run import TrainingResult
from raglane.training.settings import Settings

# The fewest epochs that are proposed to a training that was too short.
_FEWEST_EPOCHS = 20
# Overfitting: the validation loss rose by this share after the best epoch.
_RISE = 0.1
# A category is one of few words: a column with more values than this share of its rows has times or
# IDs.
_DISTINCT = 0.5


def advise(
    settings: Settings,
    result: TrainingResult,
    evaluation: Evaluation | None,
    on: str,
    training: Dataset,
) -> str | None:
    """Return a line on a model that is worse than a simple rule, overfits or underfits, and what to
    try; None if it does not, or has no errors.

    Nothing is proposed that the settings already have.
    """
    rule = None if evaluation is None else evaluation.rule_not_beaten()
    if rule is not None:
        return _on_a_rule(settings, result, rule, on, training)
    if _has_no_errors(result, evaluation):
        return None
    if _overfits(result):
        best = result.state.best_epoch
        symptom = f"the validation loss rose after epoch {best} while the training loss fell"
        return f"{symptom} (overfitting): {_tries(_regularised(settings))}"
    if _was_cut_short(settings, result):
        return f"the last epoch was the best: {_tries(_longer(settings, result))}"
    return None


def _on_a_rule(
    settings: Settings, result: TrainingResult, rule: BetterRule, on: str, training: Dataset
) -> str:
    """Return the line on a model that is not better than a simple rule."""
    symptom = f"the model is not better than a simple rule on the {on} part ({rule})"
    season = re.search(r"season_(\d+)_", rule.name)
    if season is not None and settings.season != int(season[1]):
        return f"{symptom}: {_tries([argument('season', int(season[1]))])}"
    if column := _column_of_ids(training):
        fix = "name it as the time or ID column, or leave it out of the features"
        return f"{symptom}: first, column {column}, as times and IDs have; {fix}"
    look = "see how the columns were read: raglane inspect DATA"
    reached = _best(result).get(f"train_{rule.metric}")
    if reached is None:
        fixes = [*_longer(settings, result)[:1], argument("lr", _lower(settings.lr))]
        return f"{symptom}: {_tries(fixes)}; {look}"
    score = f"{metric_words(rule.metric)} {reached:.3f}"
    if rule.is_beaten_by(reached):
        fixes = _regularised(settings)
        return f"{symptom}, although on the training part it is ({score}): {_tries(fixes)}; {look}"
    fixes = _longer(settings, result)
    return f"{symptom}, nor on the training part ({score}): {_tries(fixes)}; {look}"


def _best(result: TrainingResult) -> Mapping[str, Any]:
    return result.state.history[result.state.best_epoch - 1]


def _has_no_errors(result: TrainingResult, evaluation: Evaluation | None) -> bool:
    """Return True if the metric cannot be better."""
    measured = _best(result) if evaluation is None else evaluation.numbers
    key = result.metric
    if evaluation is None:
        key = f"validation_{key}" if f"validation_{key}" in measured else f"train_{key}"
    perfect = 1.0 if result.metric in SCORES else 0.0
    return measured.get(key) == perfect


def _overfits(result: TrainingResult) -> bool:
    """Return True if the validation loss rose after the best epoch while the training loss fell."""
    best = _best(result)
    last = result.state.history[-1]
    if "validation_loss" not in last:
        return False
    # The loss of an exact model is 0, or below it if it is a density.
    rise = last["validation_loss"] - best["validation_loss"]
    return rise > _RISE * abs(best["validation_loss"]) and last["train_loss"] < best["train_loss"]


def _was_cut_short(settings: Settings, result: TrainingResult) -> bool:
    """Return True if the last epoch was the best, under a rate that does not fall to 0."""
    state = result.state
    return (
        "validation_loss" in state.history[-1]
        and settings.lr_schedule != "cosine"
        and 1 < state.epoch == state.best_epoch == settings.epochs
    )


def _longer(settings: Settings, result: TrainingResult) -> list[str]:
    epochs = max(2 * result.state.epoch, _FEWEST_EPOCHS)
    return [argument("epochs", epochs), argument("hidden_size", 2 * settings.hidden_size)]


def _regularised(settings: Settings) -> list[str]:
    """Return the two first ways of regularisation that the settings do not have."""
    fixes = []
    if settings.dropout < 0.3:
        fixes.append(argument("dropout", 0.3))
    if settings.weight_decay == 0:
        fixes.append(argument("weight_decay", 0.01))
    if settings.hidden_size > 8:
        fixes.append(argument("hidden_size", settings.hidden_size // 2))
    fixes.append(argument("lr", _lower(settings.lr)))
    return fixes[:2]


def _lower(lr: float) -> float:
    return float(f"{lr / 3:.1g}")


def _tries(fixes: list[str]) -> str:
    return f"try {' or '.join(fixes)}"


def _column_of_ids(training: Dataset) -> str | None:
    """Return the first column of categories with a value for nearly each row, in words."""
    if not training.is_in_memory:
        return None
    for feature in training.features:
        rows = len(feature.values)
        if feature.is_numbers or feature.per_sequence or rows < 2:
            continue
        distinct = len(set(feature.values.tolist()))
        if distinct > _DISTINCT * rows:
            return f"{feature.name} has {distinct:,} values in {rows:,} elements"
    return None
