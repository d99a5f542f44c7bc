"""Faults in what models are trained for."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

_TASKS = "src/raglane/training/tasks/"

FAULTS: dict[str, Fault] = {
    "a-sequence-s-feature-of-its-neighbour": Fault(
        "src/raglane/data/encoders.py",
        "np.repeat(column, lengths) if feature.per_sequence else column",
        "np.repeat(np.roll(column, 1), lengths) if feature.per_sequence else column",
        "data/test_features.py::test_features_become_columns_of_the_inputs_by_hand",
    ),
    "a-forecast-forgets-what-a-sequence-has": Fault(
        "src/raglane/training/model.py",
        "same = known[:, known.shape[1] - kept :]",
        "same = torch.zeros_like(known[:, known.shape[1] - kept :])",
        "training/test_feature_models.py::test_a_forecast_keeps_what_a_sequence_has",
    ),
    "changes-between-texts-cost": Fault(
        "src/raglane/training/activity.py",
        "changes = values.diff(dim=0).square().mean(1) * (owners[1:] == owners[:-1])",
        "changes = values.diff(dim=0).square().mean(1) * (owners[1:] == owners[1:])",
        "documents/test_doctests.py",
    ),
    "penalties-are-not-learned": Fault(
        "src/raglane/training/loop.py",
        "score.loss if self.model.penalty is None else score.loss + self.model.penalty",
        "score.loss",
        "training/test_language.py::test_what_large_outputs_and_changes_cost",
    ),
    "a-loss-says-nothing-of-the-task": Fault(
        "src/raglane/runs/guessing.py",
        'if loss is None or loss in LOSSES["classify"]:',
        "if True:",
        "cli/test_tasks.py::test_a_loss_says_what_the_task_is",
    ),
    "features-in-the-order-of-the-file": Fault(
        "src/raglane/data/features.py",
        "values=self.values[rows if self.per_sequence else elements])",
        "values=self.values[np.sort(rows) if self.per_sequence else elements])",
        "data/test_features.py::test_every_form_gives_the_same_features",
    ),
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
    "persistence-from-the-end": Fault(
        f"{_TASKS}forecast.py",
        "last = self.parts(heads.last())[0].cpu().unsqueeze(1)",
        "last = self.parts(heads.first())[0].cpu().unsqueeze(1)",
        "training/test_tasks.py::test_steps_ahead_by_hand",
    ),
    "persistence-without-what-was-before": Fault(
        f"{_TASKS}forecast.py",
        "(_entropy(self.counts[0]) + _entropy(self.counts[1])) / frames",
        "_entropy(self.counts.sum(0)) / frames",
        "training/test_tasks.py::test_binary_channels_are_told_as_such",
    ),
    "an-end-is-no-token": Fault(
        "src/raglane/data/vocabulary.py",
        "torch.repeat_interleave(torch.arange(len(lengths)), offsets.diff()) * more + 1",
        "torch.repeat_interleave(torch.arange(len(lengths)), offsets.diff()) * more",
        "training/test_language.py::test_a_text_stands_between_ends",
    ),
    "chunks-without-the-states-before": Fault(
        "src/raglane/training/model.py",
        "carry(recurrent, embedded, state, begins)",
        "carry(recurrent, embedded, state, begins | True)",
        "training/test_language.py::test_chunks_give_what_whole_sequences_give",
    ),
    "states-of-chunks-start-anew": Fault(
        "src/raglane/training/bookkeeper.py",
        "tuple(state.to(device) for",
        "tuple(0 * state.to(device) for",
        "training/test_run.py::test_going_on_is_never_having_stopped",
    ),
    "a-line-without-its-break": Fault(
        "src/raglane/data/splitting.py",
        "return len(tokens) + texts",
        "return len(tokens)",
        "training/test_language.py::test_an_evaluation_by_hand",
    ),
    "warm-for-ever": Fault(
        "src/raglane/training/schedule.py",
        "if done < settings.warmup:",
        "if settings.warmup:",
        "training/test_tasks.py::test_rates_by_hand",
    ),
    "the-rate-of-the-last-batch-kept": Fault(
        "src/raglane/training/bookkeeper.py",
        "self._set_rate(self.settings.lr)",
        "self._set_rate(rate_of(self.settings, self.state, self.batches))",
        "training/test_run.py::test_going_on_is_never_having_stopped",
    ),
    "validation-weighed-too": Fault(
        f"{_TASKS}classify.py",
        "        if training:\n",
        "        if True:\n",
        "training/test_tasks.py::test_weights_and_smoothing_change_the_loss_of_training_alone",
    ),
    "frequent-tokens-hidden": Fault(
        "src/raglane/training/unknown.py",
        "minlength=size) == 1",
        "minlength=size) >= 1",
        "training/test_tasks.py::test_rare_tokens_are_read_as_unknown",
    ),
    "the-unknown-word-is-rare": Fault(
        "src/raglane/training/unknown.py",
        "            words[0] = False\n",
        "            pass\n",
        "training/test_feature_models.py::test_nothing_is_rare_where_only_the_unknown_word_comes_once",
    ),
    "a-town-per-element": Fault(
        "src/raglane/training/unknown.py",
        "columns[place][first] if encoder.per_sequence else columns[place]",
        "columns[place]",
        "training/test_feature_models.py::test_the_same_categories_are_rare_in_a_converted_folder",
    ),
    "thresholds-between-equals": Fault(
        f"{_TASKS}multilabel.py",
        "scores = torch.where(below < ranked, scores, -1.0)",
        "scores = torch.where(below <= ranked, scores, -1.0)",
        "training/test_tasks.py::test_thresholds_against_every_cut",
    ),
    "a-search-counts-no-trial-that-runs": Fault(
        "src/raglane/runs/tuning.py",
        "states=(state.COMPLETE, state.PRUNED, state.RUNNING)))",
        "states=(state.COMPLETE, state.PRUNED)))",
        "runs/test_tuning.py::test_trials_of_other_processes_count",
    ),
}
