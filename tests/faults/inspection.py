"""Faults in what ``raglane inspect`` reads, counts and writes."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    "a-cut-line-is-two-lengths": Fault(
        "src/raglane/inspection/lengths_of_text.py",
        '(rest + chunk).rpartition(b"\\n")',
        'chunk.rpartition(b"\\n")',
        "inspection/test_reading.py::test_lengths_are_read_whatever_piece_they_come_in",
    ),
    "lines-are-counted-anew-in-each-piece": Fault(
        "src/raglane/inspection/lengths_of_text.py",
        'line += block.count(b"\\n") + 1',
        "line += 1",
        "inspection/test_reading.py::test_lines_are_counted_over_pieces",
    ),
    "infinite-is-not-missing": Fault(
        "src/raglane/inspection/lengths_of_parquet.py",
        "absent = ~np.isfinite(numbers)",
        "absent = np.isnan(numbers)",
        "inspection/test_reading.py::test_a_parquet_file_in_pieces_is_what_it_is_as_a_whole",
    ),
    "an-empty-text-has-a-word": Fault(
        "src/raglane/inspection/lengths_of_parquet.py",
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
        "src/raglane/inspection/batches.py",
        "if len(batch) == batch_size and batch.any()]",
        "if batch.any()]",
        "data/test_lengths.py::test_the_examples_are_the_worst_the_median_and_the_best",
    ),
    "the-command-forgets-the-groups": Fault(
        "src/raglane/inspection/command.py",
        "chosen = replace(chosen, bucket=best.grouped)",
        "chosen = replace(chosen, bucket=False)",
        "inspection/test_found.py::test_the_command_follows_the_recommendation",
    ),
    "a-chart-ends-its-script": Fault(
        "src/raglane/pages/html.py",
        '.replace("<", "\\\\u003c")',
        "",
        "inspection/test_found.py::test_a_chart_cannot_end_its_script",
    ),
    "pictures-share-their-names": Fault(
        "src/raglane/inspection/page.py",
        'f"{layout}{number}-"',
        'f"{layout}-"',
        "inspection/test_found.py::test_names_in_a_page_are_one_of_a_kind_and_all_tags_close",
    ),
}
