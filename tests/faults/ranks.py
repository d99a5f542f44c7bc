"""Faults in what several processes train, and in tables that come in parts."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

_RANKS = "training/test_ranks.py::"

FAULTS: dict[str, Fault] = {
    "a-mean-of-the-means-of-ranks": Fault(
        "src/raglane/training/loop.py",
        "count = whole.count.clamp(min=1)",
        "count = score.count.clamp(min=1) * ranks.count",
        f"{_RANKS}test_a_gradient_is_that_of_one_process",
    ),
    "batches-of-a-step-count-the-same": Fault(
        "src/raglane/training/loop.py",
        "max(float(self.counted), 1.0)",
        "float(self.book.settings.accumulate)",
        f"{_RANKS}test_a_gradient_is_that_of_one_process",
    ),
    "the-validation-of-one-rank": Fault(
        "src/raglane/training/bookkeeper.py",
        "self.running.validation = Totals(loss, metric, baseline, count)",
        "self.running.validation = totals",
        f"{_RANKS}test_weights_and_sums_are_those_of_one_process",
    ),
    "a-rank-stops-for-itself": Fault(
        "src/raglane/training/ranks/launch.py",
        'rank.tell("stop", self._stops.asked)',
        "rank.tell('go on')",
        f"{_RANKS}test_a_stop_is_agreed_upon_and_the_run_goes_on_to_the_same_bits",
    ),
    "nothing-is-saved-when-a-rank-dies": Fault(
        "src/raglane/training/ranks/launch.py",
        'keeper.tell("save")',
        "return",
        f"{_RANKS}test_a_rank_that_dies_ends_the_run_in_one_line_and_it_goes_on_with_any_number",
    ),
    "a-rank-goes-on-from-the-states-of-others": Fault(
        "src/raglane/training/loop.py",
        "state[:, streams.start :: streams.step]",
        "state[:, : len(streams)]",
        "training/test_ranks.py::test_weights_and_sums_are_those_of_one_process",
    ),
    "a-table-without-its-index": Fault(
        "src/raglane/runs/tables.py",
        "answers.to_pandas().set_index(given.index)",
        "answers.to_pandas()",
        "runs/test_tables.py::test_tables_of_all_kinds_and_in_any_parts",
    ),
    "the-last-step-of-an-epoch-is-left-out": Fault(
        "src/raglane/training/loop.py",
        "is_step = done % every == 0 or done == count",
        "is_step = done % every == 0",
        "training/test_ranks.py::test_steps_of_several_batches_are_those_of_large_ones",
    ),
    "a-gradient-of-several-batches-is-a-sum": Fault(
        "src/raglane/training/loop.py",
        "torch._foreach_div_(gradients, max(float(self.counted), 1.0))",
        "pass",
        "training/test_ranks.py::test_a_gradient_is_that_of_one_process",
    ),
    "what-was-counted-is-counted-again": Fault(
        "src/raglane/training/loop.py",
        "max(float(self.counted), 1.0))\n            self.counted = 0.0",
        "max(float(self.counted), 1.0))",
        "training/test_ranks.py::test_steps_of_several_batches_are_those_of_large_ones",
    ),
    "a-rank-tells-where-its-tensors-lie": Fault(
        "src/raglane/training/ranks/child.py",
        "pipe.send_bytes(pickle.dumps(words, protocol=pickle.HIGHEST_PROTOCOL))",
        "pipe.send(words)",
        "training/test_ranks.py::test_what_a_rank_tells_needs_nothing_of_it",
    ),
    "an-error-keeps-where-ranks-meet": Fault(
        "src/raglane/training/ranks/launch.py",
        "        del store",
        "        pass",
        "training/test_ranks.py::test_what_an_error_keeps_can_be_collected_in_a_process_that_is_forked_later",
    ),
    "an-idle-rank-without-a-batch": Fault(
        "src/raglane/data/collate.py",
        "if isinstance(samples, Samples):",
        "if isinstance(samples, Samples) and len(samples):",
        "data/test_dataset.py::test_items_taken_out_of_a_batch_are_those_of_the_dataset",
    ),
    "a-folder-that-a-machine-does-not-see": Fault(
        "src/raglane/training/ranks/on_ray.py",
        "        if not sees:",
        "        if False:",
        "training/test_ray_machines.py::test_what_a_machine_lacks",
    ),
}
