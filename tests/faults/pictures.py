"""Faults in the pictures: what is drawn, where, and what is said of it."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    "padding-drawn-as-elements": Fault(
        "src/raglane/plot/cells.py",
        "if step < run.real:",
        "if step <= run.real:",
        "plot/test_layouts.py::test_every_element_stands_where_the_schedule_computes_it",
    ),
    "data-drawn-in-the-order-of-rows": Fault(
        "src/raglane/plot/layouts.py",
        "order = list(zip(table.sequence.tolist(), table.step.tolist(), strict=True))",
        "order = sorted(zip(table.sequence.tolist(), table.step.tolist(), strict=True))",
        "plot/test_layouts.py::test_data_and_batch_sizes_are_those_of_torch",
    ),
    "a-sample-without-a-word": Fault(
        "src/raglane/plot/sample.py",
        "if count > MOST_SEQUENCES else",
        "if count < 0 else",
        "plot/test_layouts.py::test_of_more_than_200_a_sample_is_drawn_and_the_picture_says_so",
    ),
    "random-batches-are-bucketed": Fault(
        "src/raglane/plot/distributions.py",
        '"random": Order.random()',
        '"random": Order.grouped()',
        "plot/test_distributions.py::test_waste_is_what_cost_counts_for_the_batches_of_the_loader",
    ),
    "colours-of-the-next-sequence": Fault(
        "src/raglane/plot/elements.py",
        "starts = offsets_from_lengths(sample.all)[sample.index]",
        "starts = offsets_from_lengths(sample.all)[sample.index].roll(-1)",
        "plot/test_elements.py::test_weights_of_each_head_stand_at_their_elements",
    ),
    "a-theme-without-an-end": Fault(
        "src/raglane/plot/picture.py",
        "_look.reset(token)",
        "pass",
        "plot/test_picture.py::test_a_theme_holds_for_its_block",
    ),
    "texts-over-each-other": Fault(
        "src/raglane/plot/rows.py",
        "shown = spaced(len(names), pitch(axes)[1], LINE)",
        "shown = range(len(names))",
        "plot/test_texts.py::test_of_lengths",
    ),
}
