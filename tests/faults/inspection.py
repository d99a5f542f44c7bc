"""Faults in what ``raglane inspect`` reads, counts and writes."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    "a-cut-line-is-two-lengths": Fault(
        "src/raglane/runs/inspection/lengths_of_text.py",
        '(rest + chunk).rpartition(b"\\n")',
        'chunk.rpartition(b"\\n")',
        "inspection/test_reading.py::test_lengths_are_read_whatever_piece_they_come_in",
    ),
    "lines-are-counted-anew-in-each-piece": Fault(
        "src/raglane/runs/inspection/lengths_of_text.py",
        'line += block.count(b"\\n") + 1',
        "line += 1",
        "inspection/test_reading.py::test_lines_are_counted_over_pieces",
    ),
    "infinite-is-not-missing": Fault(
        "src/raglane/runs/inspection/lengths_of_parquet.py",
        "absent = ~np.isfinite(numbers)",
        "absent = np.isnan(numbers)",
        "inspection/test_reading.py::test_a_parquet_file_in_pieces_is_what_it_is_as_a_whole",
    ),
    "an-empty-text-has-a-word": Fault(
        "src/raglane/runs/inspection/lengths_of_parquet.py",
        'compute.list_element(column, 0), "")',
        'compute.list_element(column, 0), " ")',
        "inspection/test_reading.py::test_a_parquet_file_in_pieces_is_what_it_is_as_a_whole",
    ),
    "a-quantile-too-far": Fault(
        "src/raglane/data/lengths.py",
        "np.searchsorted(ends, rank)",
        'np.searchsorted(ends[:-1], rank, side="right")',
        "data/test_lengths.py::test_a_quantile_is_the_least_length_that_so_many_do_not_exceed",
    ),
    "a-histogram-without-its-longest": Fault(
        "src/raglane/data/lengths.py",
        "np.geomspace(max(first, 1), last + 1, most + 1)",
        "np.geomspace(max(first, 1), last, most + 1)",
        "data/test_lengths.py::test_a_long_tail_has_bars_of_growing_width",
    ),
    "the-last-batch-is-the-worst": Fault(
        "src/raglane/runs/inspection/batches.py",
        "if len(batch) == batch_size and batch.any()]",
        "if batch.any()]",
        "data/test_lengths.py::test_the_examples_are_the_worst_the_median_and_the_best",
    ),
    "the-command-forgets-the-groups": Fault(
        "src/raglane/runs/inspection/command.py",
        "chosen = replace(chosen, bucket=best.grouped)",
        "chosen = replace(chosen, bucket=False)",
        "inspection/test_found.py::test_the_command_follows_the_recommendation",
    ),
    "a-chart-ends-its-script": Fault(
        "src/raglane/report/html.py",
        '.replace("<", "\\\\u003c")',
        "",
        "inspection/test_found.py::test_a_chart_cannot_end_its_script",
    ),
    "pictures-share-their-names": Fault(
        "src/raglane/runs/inspection/page.py",
        'f"{layout}{number}-"',
        'f"{layout}-"',
        "inspection/test_found.py::test_names_in_a_page_are_one_of_a_kind_and_all_tags_close",
    ),
    "sizes-of-any-way": Fault(
        "src/raglane/runs/inspection/inspect.py",
        "if row.way == self.plan.best.way and row.batch_size is not None]",
        "if row.batch_size is not None]",
        "inspection/test_numbers.py::test_rows_of_batch_sizes_are_those_of_the_recommended_way",
    ),
    "percentiles-in-parts-of-101": Fault(
        "src/raglane/runs/inspection/inspect.py",
        "lengths.quantile(percent / 100)",
        "lengths.quantile(percent / 101)",
        "inspection/test_numbers.py::test_percentiles_are_lengths_that_so_many_do_not_exceed",
    ),
    "examples-of-random-batches": Fault(
        "src/raglane/runs/inspection/inspect.py",
        "found.best.batch_size or 1, grouped=found.best.grouped",
        "found.best.batch_size or 1, grouped=False",
        "inspection/test_numbers.py::test_examples_are_of_the_recommended_batches",
    ),
    "the-median-is-the-worst": Fault(
        "src/raglane/runs/inspection/batches.py",
        '"median": len(ranked) // 2',
        '"median": 0',
        "inspection/test_numbers.py::test_the_median_example_is_between_the_others",
    ),
    "fill-in-place-of-padding": Fault(
        "src/raglane/runs/inspection/inspect.py",
        "1 - numbers.fill:.0%} padding.",
        "numbers.fill:.0%} padding.",
        "inspection/test_numbers.py::test_the_sentence_has_the_padding_of_both",
    ),
    "one-size-for-all-fills": Fault(
        "src/raglane/runs/inspection/text.py",
        "by_size[size, order]:.0%}",
        "by_size[sizes[0], order]:.0%}",
        "inspection/test_numbers.py::test_the_text_counts_what_exists",
    ),
    "buckets-by-their-padding": Fault(
        "src/raglane/runs/inspection/document.py",
        '"fill": bucket.fill}',
        '"fill": 1 - bucket.fill}',
        "inspection/test_numbers.py::test_the_json_counts_what_exists",
    ),
    "all-sequences-were-looked-at": Fault(
        "src/raglane/runs/inspection/document.py",
        '"sequences_looked_at": inspection.looked_at',
        '"sequences_looked_at": len(inspection.contents.lengths)',
        "inspection/test_numbers.py::test_the_json_counts_what_exists",
    ),
    "missing-in-parts-of-sequences": Fault(
        "src/raglane/runs/inspection/page.py",
        "feature.missing / elements:.1%",
        "feature.missing / inspection.summary.count:.1%",
        "inspection/test_numbers.py::test_the_tables_of_the_page_are_shares_of_the_right_whole",
    ),
    "the-first-row-is-the-best": Fault(
        "src/raglane/runs/inspection/page.py",
        "rows[place] is plan.best",
        "place == 0",
        "inspection/test_numbers.py::test_the_page_marks_the_best_and_says_what_waiting_costs",
    ),
    "waiting-is-all-of-a-step": Fault(
        "src/raglane/runs/inspection/page.py",
        "best.rank_spread - 1:.0%",
        "best.rank_spread:.0%",
        "inspection/test_numbers.py::test_the_page_marks_the_best_and_says_what_waiting_costs",
    ),
    "milliseconds-that-are-seconds": Fault(
        "src/raglane/runs/inspection/charts.py",
        '"ms": 1000 * seconds',
        '"ms": seconds',
        "inspection/test_numbers.py::test_charts_have_the_numbers_of_the_rows",
    ),
    "a-chart-of-whole-steps": Fault(
        "src/raglane/runs/inspection/charts.py",
        '"more": row.rank_spread - 1',
        '"more": row.rank_spread',
        "inspection/test_numbers.py::test_charts_have_the_numbers_of_the_rows",
    ),
    "a-quantile-under-another-name": Fault(
        "src/raglane/runs/inspection/charts.py",
        '("95%", numbers.p95)',
        '("95%", numbers.p99)',
        "inspection/test_numbers.py::test_the_chart_of_lengths_has_the_quantiles",
    ),
    "what-is-missing-beside-is-forgotten": Fault(
        "src/raglane/runs/inspection/contents.py",
        "return counted + sum(",
        "return sum(",
        "inspection/test_reading.py::test_what_is_missing_beside_is_counted_where_it_is_a_number",
    ),
    "no-category-for-what-is-unknown": Fault(
        "src/raglane/runs/inspection/contents.py",
        "counts.categories + 1 for",
        "counts.categories for",
        "inspection/test_reading.py::test_what_is_missing_beside_is_counted_where_it_is_a_number",
    ),
    "bad-rows-of-parquet-are-refused": Fault(
        "src/raglane/runs/inspection/reading.py",
        ' and on_bad_row == "fail":',
        ":",
        "inspection/test_reading.py::test_rows_of_a_parquet_file_that_are_bad_are_left_out_where_that_is_asked_for",
    ),
}
