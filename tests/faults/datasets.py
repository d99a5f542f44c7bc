"""Faults in datasets that need not fit in memory, and in conversions."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    "a-conversion-forgets-where-it-is": Fault(
        "src/raglane/data/conversion.py",
        '"position": position,',
        '"position": None,',
        "data/test_conversion.py::test_a_full_disk_keeps_what_is_done_and_the_next_call_goes_on",
    ),
    "what-is-left-out-is-not-listed": Fault(
        "src/raglane/data/conversion.py",
        "map(asdict, bad or ())",
        "map(asdict, ())",
        "data/test_conversion.py::test_bad_rows_are_left_out_and_listed",
    ),
    "what-is-half-done-goes-on-with-other-data": Fault(
        "src/raglane/data/jobs.py",
        "if key not in (None, job.key()) and not overwrite:",
        "if key is not None and key[0] == '.':",
        "data/test_conversion.py::test_what_is_half_done_goes_on_only_with_the_same",
    ),
    "good-rows-go-with-the-bad": Fault(
        "src/raglane/data/formats/pieces.py",
        "runs += [(middle, end), (start, middle)]",
        "runs += [(start, middle)]",
        "data/test_pieces.py::test_every_bad_row_is_left_out_and_no_other",
    ),
    "rows-are-counted-anew-where-one-is-left-out": Fault(
        "src/raglane/data/skipping.py",
        "ids=tuple(range(before + low, before + high))",
        "ids=tuple(range(low, high))",
        "data/test_bad_rows.py::test_a_bad_row_is_left_out_in_every_format",
    ),
    "a-model-leaves-rows-out-unasked": Fault(
        "src/raglane/runs/sources.py",
        'kept["on_bad_row"] = "fail"',
        'kept["on_bad_row"] = self.columns.on_bad_row',
        "cli/test_bad_rows.py::test_bad_rows_are_left_out_counted_and_listed",
    ),
    "a-folder-serves-every-task": Fault(
        "src/raglane/data/opening.py",
        "if columns.wants_labels and not shards.layout.serves(columns.task):",
        "if columns.wants_labels and not shards.layout.serves(task):",
        "cli/test_convert.py::test_a_folder_is_trained_for_the_task_that_it_was_made_for",
    ),
    "targets-stay-in-the-order-of-the-parts": Fault(
        "src/raglane/data/gathering.py",
        "self.sets_or_numbers = self.sets_or_numbers.select(back, elements)",
        "self.sets_or_numbers = self.sets_or_numbers",
        "data/test_stored_dataset.py::test_what_was_converted_teaches_and_gives_what_memory_does",
    ),
    "tokens-are-forgotten-in-a-conversion": Fault(
        "src/raglane/data/conversion.py",
        '(*LISTS, "split", "tokens", "time_gaps")',
        '(*LISTS, "split", "time_gaps")',
        "cli/test_convert.py::test_converted_data_of_every_task_trains_what_the_data_does",
    ),
    "halves-are-binary": Fault(
        "src/raglane/data/statistics.py",
        " and abs(excess) < _ROUNDING",
        "",
        "cli/test_convert.py::test_converted_data_is_seen_to_be_binary",
    ),
    "how-texts-were-cut-is-forgotten": Fault(
        "src/raglane/data/conversion.py",
        '(*LISTS, "split", "tokens", "time_gaps")',
        '(*LISTS, "tokens", "time_gaps")',
        "cli/test_convert.py::test_texts_that_were_cut_are_cut_again_in_the_same_way",
    ),
    "deviations-within-parts-alone": Fault(
        "src/raglane/data/statistics.py",
        " + step * step * self.count * share",
        "",
        "data/test_conversion.py::test_statistics_of_large_numbers_keep_their_differences",
    ),
    "rows-of-the-first-part": Fault(
        "src/raglane/data/gathering.py",
        "local[low:high] -= parts.start(number)",
        "local[low:high] %= len(parts.get(number).offsets) - 1",
        "data/test_stored_dataset.py::test_every_source_gives_what_memory_gives",
    ),
    "labels-in-the-order-of-the-files": Fault(
        "src/raglane/data/gathering.py",
        "self.targets = self.targets[elements if self.has_tags else back]",
        "self.targets = self.targets[elements if self.has_tags else order]",
        "data/test_stored_dataset.py::test_every_source_gives_what_memory_gives",
    ),
    "offsets-of-a-damaged-file-believed": Fault(
        "src/raglane/data/stores.py",
        " or (np.diff(offsets) < 0).any()",
        "",
        "data/test_stored_mistakes.py::test_a_damaged_folder_is_refused_before_anything_is_cut_out_of_it",
    ),
    "a-block-that-is-not-compared": Fault(
        "src/raglane/data/formats/integrity.py",
        "blocks[self._pending[blocks]]",
        "blocks[self._pending[blocks]][1:]",
        "data/test_stored_mistakes.py::test_zeroed_bytes_of_a_shard_are_noticed_by_whatever_reads_them",
    ),
    "a-description-without-its-seal": Fault(
        "src/raglane/data/formats/ipc.py",
        "    if not is_whole:",
        "    if False:",
        "data/test_stored_mistakes.py::test_any_changed_byte_of_a_folder_is_noticed",
    ),
    "a-relative-path-in-another-process": Fault(
        "src/raglane/data/stores.py",
        '"folder": self.folder.absolute()',
        '"folder": self.folder',
        "data/test_stored_mistakes.py::test_a_dataset_of_a_relative_path_is_read_from_another_folder",
    ),
    "labels-of-other-types-merge": Fault(
        "src/raglane/data/layout.py",
        "if kinds and before and not set(kinds) & set(before):",
        "if kinds and not before:",
        "data/test_label_kinds.py::test_labels_of_other_types_are_refused",
    ),
    "labels-of-a-table-go-by-their-words": Fault(
        "src/raglane/data/formats/table.py",
        "kinds = column_kinds(table.column(chosen.label).type, columns.task)",
        "kinds = None",
        "data/test_label_kinds.py::test_labels_of_other_types_are_refused",
    ),
    "labels-in-memory-are-not-compared": Fault(
        "src/raglane/data/opening.py",
        "if found.wants_labels and len(stores) > 1:",
        "if found.wants_labels and len(stores) > 9:",
        "data/test_label_kinds.py::test_labels_of_csv_files_are_what_they_look_like",
    ),
    "lengths-of-another-column": Fault(
        "src/raglane/data/conversion.py",
        'state.names["sequence"])).astype(kind)',
        'state.names.get("label", state.names["sequence"]))).astype(kind)',
        "data/test_conversion.py::test_lengths_are_those_of_the_sequences_not_of_other_lists",
    ),
    "channels-in-the-order-of-the-file": Fault(
        "src/raglane/data/gathering.py",
        "[layout.channels.index(name) for name in preprocessor.channels]",
        "[place for place, name in enumerate(layout.channels) if name in preprocessor.channels]",
        "data/test_stored_dataset.py::test_channels_are_gathered_in_the_order_of_training",
    ),
    "characters-for-bytes": Fault(
        "src/raglane/data/splitting.py",
        'list(text.encode().decode("latin-1"))',
        "list(text)",
        "data/test_splitting.py",
    ),
    "bytes-that-stay-bytes": Fault(
        "src/raglane/data/splitting.py",
        '"".join(tokens).encode("latin-1", errors="replace").decode(errors="replace")',
        '"".join(tokens)',
        "data/test_splitting.py::test_texts_are_cut_into_what_was_named",
    ),
    "bytes-counted-as-characters": Fault(
        "src/raglane/data/splitting.py",
        "sum(ord(token) & 0xC0 != 0x80 for token in tokens) + texts",
        "len(tokens) + texts",
        "data/test_splitting.py::test_texts_are_cut_into_what_was_named",
    ),
    "observations-of-the-sequence-before": Fault(
        "src/raglane/data/missing.py",
        "np.concatenate([last[:1], last[:-1]]), starts)",
        "np.concatenate([last[:1], last[:-1]]), 0)",
        "data/test_preprocess.py::test_observations_are_cut_where_sequences_begin",
    ),
    "an-observation-seen-before-it-is-made": Fault(
        "src/raglane/data/missing.py",
        "np.concatenate([last[:1], last[:-1]])",
        "np.concatenate([last[1:], last[-1:]])",
        "data/test_preprocess.py::test_observations_are_cut_where_sequences_begin",
    ),
    "rows-without-ids-are-numbered-in-their-file": Fault(
        "src/raglane/data/gathering.py",
        "return row if found is None else found",
        "return row - self.start(number) if found is None else found",
        "data/test_stored_dataset.py::test_rows_of_several_files_keep_their_number_and_their_label",
    ),
    "classes-of-all-rows-for-some": Fault(
        "src/raglane/data/gathering.py",
        "return np.concatenate(found)[rows] if found else None",
        "return np.concatenate(found)[: len(rows)] if found else None",
        "data/test_stored_dataset.py::test_rows_of_several_files_keep_their_number_and_their_label",
    ),
    "rows-left-out-at-the-end-are-not-listed": Fault(
        "src/raglane/data/conversion.py",
        "        state.skipped += self._skipped\n",
        "        pass\n",
        "data/test_conversion.py::test_bad_rows_at_the_end_of_all_are_listed",
    ),
    "missing-values-of-the-first-piece-alone": Fault(
        "src/raglane/data/statistics.py",
        "self.missing + other.missing",
        "self.missing",
        "data/test_conversion.py::test_missing_values_of_all_pieces_are_counted",
    ),
    "targets-of-a-later-piece-in-another-order": Fault(
        "src/raglane/data/skipping.py",
        "values = np.repeat(targets.values, records.lengths, axis=0)",
        "values = np.repeat(targets.values[::-1], records.lengths, axis=0)",
        "data/test_conversion.py::test_pieces_that_could_be_read_either_way_are_read_as_those_before",
    ),
    "times-in-their-own-units": Fault(
        "src/raglane/data/preprocess.py",
        "return gaps / usual if usual > 0 else gaps",
        "return gaps",
        "data/test_preprocess.py::test_times_are_in_means_of_the_training_part",
    ),
    "sets-of-labels-in-other-rows": Fault(
        "src/raglane/data/labels.py",
        "np.repeat(np.arange(len(counts)), counts)",
        "np.repeat(np.arange(len(counts))[::-1], counts)",
        "data/test_preprocess.py::test_numbers_to_learn_are_scaled_and_sets_are_marked_by_hand",
    ),
    "numbers-to-learn-are-not-divided": Fault(
        "src/raglane/data/labels.py",
        "(targets.values - np.array(fitted.target_mean)) / np.array(fitted.target_std)",
        "targets.values - np.array(fitted.target_mean)",
        "data/test_preprocess.py::test_numbers_to_learn_are_scaled_and_sets_are_marked_by_hand",
    ),
    "a-label-twice-in-a-set": Fault(
        "src/raglane/data/formats/labels.py",
        "tuple(dict.fromkeys(everything[start:end]))",
        "tuple(everything[start:end])",
        "data/test_label_kinds.py::test_a_label_is_in_a_set_once",
    ),
}
