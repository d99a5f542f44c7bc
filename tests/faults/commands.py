"""Faults in data and training, which the commands run."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    # ---- cells in files -------------------------------------------------------------------------------------------
    "a-changed-cell-is-run": Fault(
        "src/raglane/training/own_cell.py",
        "if given.digest != digest:",
        "if False:",
        "training/test_own_cell.py::test_a_file_that_is_not_what_it_was",
    ),
    "code-of-a-run-is-run": Fault(
        "src/raglane/training/own_cell.py",
        "if digest not in _NAMED:",
        "if name_cell(layer.partition('@')[0]) == '':",
        "training/test_own_cell.py::test_no_code_is_run_because_a_run_names_it",
    ),
    "a-config-file-brings-code": Fault(
        "src/raglane/cli/options.py",
        "named_choice if sources",
        "name_cell if sources",
        "training/test_own_cell.py::test_no_command_runs_the_cell_of_a_run",
    ),
    "code-that-ranks-are-not-handed": Fault(
        "src/raglane/training/work.py",
        'take_code(state.pop("code"))',
        'state.pop("code")',
        "training/test_own_cell.py::test_two_ranks_and_a_table_in_another_process_are_handed_the_code",
    ),
    "a-channel-seen-in-the-sequence-before": Fault(
        "src/raglane/data/missing.py",
        "before = np.maximum(np.concatenate([last[:1], last[:-1]]), starts)",
        "before = np.maximum(np.concatenate([last[:1], last[:-1]]), 0)",
        "cells/test_grud.py::test_observations_are_the_papers",
    ),
    # ---- options from a file --------------------------------------------------------------------------------------
    "what-is-to-be-ignored-holds": Fault(
        "src/raglane/cli/options.py",
        "            leave_out(context, context.params.get(IGNORE))\n",
        "",
        "cli/test_config.py::test_an_option_goes_before_the_file_and_the_file_before_the_default",
    ),
    "a-file-is-a-default": Fault(
        "src/raglane/cli/configuration.py",
        '"DEFAULT_MAP": FILE',
        '"DEFAULT_MAP": DEFAULT',
        "cli/test_config.py::test_an_option_goes_before_the_file_and_the_file_before_the_default",
    ),
    "a-card-of-other-sequences": Fault(
        "src/raglane/training/each.py",
        "own = elements if per_element else slice(place, place + 1)",
        "own = elements if per_element else slice(0, 1)",
        "runs/test_card.py::test_scores_of_sequences_are_those_of_each_alone",
    ),
    "the-easiest-sequences": Fault(
        "src/raglane/training/each.py",
        'np.argsort(-np.nan_to_num(self.loss, nan=-1.0), kind="stable")',
        'np.argsort(np.nan_to_num(self.loss, nan=-1.0), kind="stable")',
        "runs/test_card.py::test_a_card_of_every_task",
    ),
    "a-study-of-any-data": Fault(
        "src/raglane/runs/tuning.py",
        'if kept["data"] != wanted["data"]:',
        'if kept["data"] is None:',
        "runs/test_tuning.py::test_the_best_trial_becomes_a_run_and_the_study_goes_on",
    ),
    "a-dead-trial-is-forgotten": Fault(
        "src/raglane/runs/tuning.py",
        'study.enqueue_trial(dict(trial.params), user_attrs={"folder": place.name})',
        "pass",
        "runs/test_tuning.py::test_a_killed_trial_goes_on_and_time_ends_a_search",
    ),
    "data-by-its-parts": Fault(
        "src/raglane/training/identity.py",
        "total += int(",
        "total = 3 * total + int(",
        "runs/test_comparison.py::test_data_is_the_same_in_any_order_and_parts",
    ),
    "columns-beside-do-not-matter": Fault(
        "src/raglane/training/identity.py",
        "            elements = _mixed(elements) + _column(feature)",
        "            pass",
        "runs/test_comparison.py::test_data_is_the_same_in_any_order_and_parts",
    ),
    "what-was-converted-is-not-measured": Fault(
        "src/raglane/runs/card.py",
        "reversed(self.known.items()) if len(part))",
        "reversed(self.known.items()) if isinstance(part, Records))",
        "runs/test_card.py::test_the_card_of_a_converted_folder",
    ),
    "trials-of-a-lost-study-are-taken": Fault(
        "src/raglane/runs/tuning.py",
        "if not names and any((folder / TRIALS).iterdir()):",
        "if names is None:",
        "runs/test_tuning.py::test_mistakes_end_in_one_line",
    ),
    "what-is-searched-is-fixed": Fault(
        "src/raglane/cli/tune.py",
        "    for name in space:\n",
        "    for name in ():\n",
        "cli/test_config.py::test_what_a_search_would_do",
    ),
    "runs-on-other-data-side-by-side": Fault(
        "src/raglane/runs/comparison.py",
        "return self.description.settings.task, self.description.identity or self.description.fingerprint",
        'return self.description.settings.task, ""',
        "runs/test_comparison.py::test_what_differs_and_nothing_else",
    ),
    "an-optimizer-brings-a-compiler": Fault(
        "src/raglane/training/optimizers.py",
        "torch.no_grad()(inspect.unwrap(getattr(kind, name)))",
        "inspect.unwrap and getattr(kind, name)",
        "test_import.py::test_a_training_imports_nothing_that_takes_seconds",
    ),
    "a-truth-for-a-number": Fault(
        "src/raglane/training/stored.py",
        "isinstance(value, wanted) and (hint is bool or not isinstance(value, bool))",
        "isinstance(value, wanted)",
        "cli/test_config.py::test_a_mistake_in_a_file_is_one_line_that_names_it",
    ),
    # ---- data -----------------------------------------------------------------------------------------------------
    "scaling-seen-by-validation": Fault(
        "src/raglane/training/prepared.py",
        "preprocessor = fit(training, settings)",
        "preprocessor = fit(training if validation is None else validation, settings)",
        "training/test_run.py::test_scaling_is_that_of_the_training_part_alone",
    ),
    "forward-fill-from-the-neighbour": Fault(
        "src/raglane/data/missing.py",
        "np.where(last >= starts, carried, np.float32(0))",
        "np.where(last >= 0, carried, np.float32(0))",
        "data/test_preprocess.py::test_forward_fill_does_not_run_into_the_next_sequence",
    ),
    "filled-before-it-is-scaled": Fault(
        "src/raglane/data/missing.py",
        "absent = ~np.isfinite(values)\n    result",
        "absent = np.isnan(values)\n    result",
        "data/test_preprocess.py::test_missing_features_against_a_loop",
    ),
    "labels-in-the-order-of-their-text": Fault(
        "src/raglane/data/labels.py",
        "sorted(set(map(str, labels)), key=_label_key)",
        "sorted(set(map(str, labels)))",
        "data/test_preprocess.py::test_labels_that_are_numbers_are_ordered_as_numbers",
    ),
    "channels-by-their-place": Fault(
        "src/raglane/data/preprocess.py",
        "if self.channels != records.channels:",
        "if len(self.channels) != len(records.channels):",
        "data/test_preprocess.py::test_channels_are_matched_by_name",
    ),
    "scaled-in-32-bits": Fault(
        "src/raglane/data/preprocess.py",
        "((values - np.array(self.mean)) / np.array(self.std))",
        "((values - np.array(self.mean, np.float32)) / np.array(self.std, np.float32))",
        "data/test_preprocess.py::test_large_values_keep_their_differences",
    ),
    "parts-that-overlap": Fault(
        "src/raglane/data/dataset.py",
        "return records.select(~mask), records.select(mask)",
        "return records.select(~mask | (mask.cumsum() == 1)), records.select(mask)",
        "data/test_dataset.py::test_split_rules",
    ),
    "a-subsets-ids-are-the-datasets": Fault(
        "src/raglane/data/dataset.py",
        "ids=[self.ids[row] for row in rows.tolist()]",
        "ids=self.ids[: len(rows)]",
        "data/test_dataset.py::test_subset",
    ),
    # ---- training -------------------------------------------------------------------------------------------------
    "a-forecast-knows-its-target": Fault(
        "src/raglane/data/dataset.py",
        'item["target"] = self.values[start + 1 : end]',
        'item["target"] = self.values[start : max(end - 1, start)]',
        "data/test_dataset.py",
    ),
    "batches-do-not-change-with-the-epoch": Fault(
        "src/raglane/training/loop.py",
        "order.set_epoch(epoch)",
        "order.set_epoch(0)",
        "training/test_run.py::test_every_epoch_has_batches_of_its_own",
    ),
    "a-run-goes-on-at-the-start-of-its-epoch": Fault(
        "src/raglane/training/work.py",
        "order.load_state_dict(state.order or order.state_dict(state.batch))",
        "order.state_dict(state.batch)",
        "training/test_run.py::test_going_on_is_never_having_stopped",
    ),
    "confusion-matrix-transposed": Fault(
        "src/raglane/training/metrics.py",
        "targets * classes + predictions",
        "predictions * classes + targets",
        "training/test_metrics.py::test_against_counting",
    ),
    "confusion-matrix-called-transposed": Fault(
        "src/raglane/training/tasks/classify.py",
        "confusion_matrix(targets_of(batch).cpu(), output.argmax(-1).cpu(), len(self.labels))",
        "confusion_matrix(output.argmax(-1).cpu(), targets_of(batch).cpu(), len(self.labels))",
        "training/test_answers.py::test_evaluation_agrees_with_predictions",
    ),
    "accuracy-for-macro-f1": Fault(
        "src/raglane/training/tasks/classify.py",
        '"macro_f1": macro_f1(self.matrix)',
        '"macro_f1": accuracy(self.matrix)',
        "training/test_answers.py::test_macro_f1_on_unbalanced_classes",
    ),
    "macro-f1-of-absent-classes": Fault(
        "src/raglane/training/metrics.py",
        "f1_scores(matrix).nanmean()",
        "f1_scores(matrix).nan_to_num().mean()",
        "training/test_metrics.py::test_against_counting",
    ),
    "resumed-with-other-validation-data": Fault(
        "src/raglane/training/run.py",
        "fingerprint(training, validation)",
        "fingerprint(training)",
        "training/test_run.py::test_going_on_with_other_validation_data_is_refused",
    ),
    "a-fingerprint-without-labels": Fault(
        "src/raglane/training/run.py",
        "for words in (records.labels, records.tags,",
        "for words in (records.tags,",
        "training/test_run.py::test_going_on_with_other_labels_or_lengths_is_refused",
    ),
    "the-optimizer-starts-anew": Fault(
        "src/raglane/training/loop.py",
        "self._optimizer.load_state_dict(optimizer_state)",
        "self._optimizer.zero_grad()",
        "training/test_run.py::test_going_on_is_never_having_stopped",
    ),
    "random-numbers-start-anew": Fault(
        "src/raglane/training/bookkeeper.py",
        "torch.default_generator.manual_seed(seed)",
        "self.batches += 0",
        "training/test_run.py::test_going_on_is_never_having_stopped",
    ),
    "missing-targets-are-zeros": Fault(
        "src/raglane/training/tasks/forecast.py",
        "error = (forecasts - known) * real",
        "error = forecasts - known",
        "training/test_answers.py::test_a_missing_target_has_no_error",
    ),
    "a-forecast-of-the-first-step-again": Fault(
        "src/raglane/training/model.py",
        "forecast = self._next(forecast, self.head(self.encoder.dropout(output)))",
        "forecast = self._next(known[:, :size], self.head(self.encoder.dropout(output)))",
        "training/test_answers.py::test_a_longer_forecast_feeds_itself",
    ),
    "a-head-of-torchs-product": Fault(
        "src/raglane/training/model.py",
        "self.head = RowLinear(",
        "self.head = nn.Linear(",
        "training/test_bits.py",
    ),
    "attention-of-torchs-products": Fault(
        "src/raglane/nn/pooling.py",
        "self.hidden = RowLinear(",
        "self.hidden = nn.Linear(",
        "training/test_bits.py",
    ),
    "cells-without-a-kernel-answer-as-torch-does": Fault(
        "src/raglane/training/model.py",
        "nullcontext() if has_kernel else RowByRow()",
        "nullcontext()",
        "training/test_bits.py",
    ),
    "the-end-of-a-vector-rounds-otherwise": Fault(
        "src/raglane/nn/linear.py",
        "    Tensor.sigmoid: _sigmoid,\n",
        "",
        "nn/test_linear.py",
    ),
    "a-loss-may-grow-tenfold-more": Fault(
        "src/raglane/training/divergence.py",
        "if loss > max(_LOST * base, 1.0):",
        "if loss > max(_HIGH * _LOST * base, 1.0):",
        "training/test_divergence.py::test_what_counts_as_lost",
    ),
    "formulas-that-are-not-escaped": Fault(
        "src/raglane/training/predictions.py",
        "list(map(no_formula, entries))",
        "list(entries)",
        "cli/test_commands.py::test_texts_that_a_spreadsheet_executes",
    ),
    "test-data-by-its-name-alone": Fault(
        "src/raglane/runs/comparison.py",
        'os.path.normpath(test["data"])',
        'Path(test["data"]).name',
        "runs/test_comparison.py::test_test_data_of_one_name_in_two_folders_are_two",
    ),
    "a-late-trial-beside-a-whole-one": Fault(
        "src/raglane/runs/tuning.py",
        "if end.is_late and none else pruned",
        "if end.is_late else pruned",
        "runs/test_tuning.py::test_what_a_trial_that_ends_early_counts_as",
    ),
    "a-late-trial-that-is-lost": Fault(
        "src/raglane/runs/tuning.py",
        "if end.is_late and none else pruned",
        "if False else pruned",
        "runs/test_tuning.py::test_what_a_trial_that_ends_early_counts_as",
    ),
    "a-study-bound-to-its-device": Fault(
        "src/raglane/runs/tuning.py",
        '("threads", "workers", "device", "logger")',
        '("threads", "workers", "logger")',
        "runs/test_tuning.py::test_a_study_goes_on_with_other_hardware",
    ),
    "a-study-of-other-epochs": Fault(
        "src/raglane/runs/tuning.py",
        '("threads", "workers", "device", "logger")',
        '("threads", "workers", "device", "logger", "epochs")',
        "runs/test_tuning.py::test_the_best_trial_becomes_a_run_and_the_study_goes_on",
    ),
    "settings-of-no-trial": Fault(
        "src/raglane/runs/tuning.py",
        "replace(order.settings, **best.params), len(ended)",
        "order.settings, len(ended)",
        "runs/test_tuning.py::test_the_result_is_that_of_the_best_trial",
    ),
    "trials-at-work-that-do-not-count": Fault(
        "src/raglane/runs/tuning.py",
        "            others += 1",
        "            others += 0",
        "runs/test_tuning.py::test_the_result_is_that_of_the_best_trial",
    ),
    "a-study-that-draws-the-same-again": Fault(
        "src/raglane/runs/tuning.py",
        "seed += len(",
        "seed += 0 * len(",
        "runs/test_tuning.py::test_the_best_trial_becomes_a_run_and_the_study_goes_on",
    ),
    "a-trial-that-is-never-ended": Fault(
        "src/raglane/runs/tuning.py",
        "if self.trial.should_prune():",
        "if False:",
        "runs/test_tuning.py::test_what_a_trial_that_ends_early_counts_as",
    ),
    "an-unseen-label-in-a-set": Fault(
        "src/raglane/data/labels.py",
        "    _refuse_unknown(fitted, records, words, places, rows)\n    result",
        "    result",
        "data/test_preprocess.py::test_a_set_with_a_label_that_training_has_not_seen_is_refused",
    ),
}
