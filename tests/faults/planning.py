"""Faults in the planner: what it measures, predicts and recommends."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    "an-epoch-is-its-sample": Fault(
        "src/raglane/planner/rows.py",
        "train_seconds=float(train @ epoch.weights)",
        "train_seconds=float(train.sum())",
        "planner/test_advice.py::test_a_sample_stands_for_all",
    ),
    "a-long-list-is-its-part": Fault(
        "src/raglane/planner/rows.py",
        "elements=round(computed * factor)",
        "elements=computed",
        "planner/test_advice.py::test_a_sample_stands_for_all",
    ),
    "the-first-time-counts": Fault(
        "src/raglane/planner/calibration.py",
        "self.times[key] = min(self.times.get(key, taken), taken)",
        "self.times.setdefault(key, taken)",
        "planner/test_calibration.py::test_the_shortest_of_two_times_counts",
    ),
    "the-yardstick-runs-what-is-measured": Fault(
        "src/raglane/planner/probe.py",
        "        with using(schedule=self._way.schedule, backend=self._way.backend):\n            self._step()\n",
        "        self._step()\n",
        "planner/test_calibration.py::test_the_yardstick_is_one_step_whatever_is_measured",
    ),
    "a-thread-fewer-is-never-looked-at-again": Fault(
        "src/raglane/planner/calibration.py",
        "return [one for one in measured if one.kind in near]",
        "return [one for one in measured if any(is_near(one, group) for group in PROBES)]",
        "planner/test_calibration.py::test_what_can_win_is_measured_twice",
    ),
    "groups-after-one-that-was-cut": Fault(
        "src/raglane/planner/calibration.py",
        "        if len(times) < len(group):\n            break\n",
        "",
        "planner/test_calibration.py::test_what_takes_long_is_left_out",
    ),
    "the-smallest-batches-are-cut-too": Fault(
        "src/raglane/planner/calibration.py",
        "math.inf if group is groups[0] else look.longest",
        "look.longest",
        "planner/test_calibration.py::test_no_way_costs_nothing_on_a_machine_without_time",
    ),
    "batches-in-the-wrong-order": Fault(
        "src/raglane/planner/batches.py",
        "Order.grouped() if grouped else Order.random()",
        "Order.grouped(pool=1) if grouped else Order.random()",
        "planner/test_batches.py::test_batches_are_those_of_the_loader",
    ),
    "the-longest-left-to-chance": Fault(
        "src/raglane/planner/batches.py",
        "extreme = np.unique([longest.argmax(), real.argmax()])",
        "extreme = np.unique([longest.argmin(), real.argmin()])",
        "planner/test_batches.py::test_the_longest_is_in_a_sample",
    ),
    "grouped-rather-than-random": Fault(
        "src/raglane/planner/advice.py",
        "key=lambda row: (row.grouped, row.threads",
        "key=lambda row: (not row.grouped, row.threads",
        "planner/test_advice.py::test_what_is_as_fast_gives_way_to_what_is_simpler",
    ),
    "ranks-do-not-wait": Fault(
        "src/raglane/planner/rows.py",
        "drawn.max(1).mean() / drawn.mean()",
        "drawn.mean(1).mean() / drawn.mean()",
        "planner/test_advice.py::test_ranks_wait_for_the_slowest",
    ),
    "what-was-disturbed-is-kept": Fault(
        "src/raglane/planner/advice.py",
        "    if not busy:\n        store.save",
        "    if True:\n        store.save",
        "planner/test_advice.py::test_a_busy_machine_is_said_and_not_kept",
    ),
    "a-kept-plan-of-another-layer": Fault(
        "src/raglane/planner/store.py",
        'f"{type(layer).__qualname__}: {layer!r}",',
        "type(layer).__qualname__,",
        "planner/test_store.py::test_a_key_tells_layers_apart",
    ),
    "packs-of-equal-lengths-are-like-others": Fault(
        "src/raglane/planner/model.py",
        "if profile.is_even else",
        "if False else",
        "planner/test_model.py::test_packs_have_other_coefficients_where_lengths_differ",
    ),
    "planning-draws-numbers": Fault(
        "src/raglane/planner/advice.py",
        "    with torch.random.fork_rng():\n        others",
        "    if True:\n        others",
        "planner/test_advice.py::test_a_plan_takes_no_random_numbers",
    ),
    "the-longest-stands-for-many": Fault(
        "src/raglane/planner/batches.py",
        "np.repeat([1.0, each], [len(extreme), len(drawn)])",
        "np.repeat([each, each], [len(extreme), len(drawn)])",
        "planner/test_batches.py::test_the_longest_is_in_a_sample",
    ),
    "what-is-far-beyond-all-measurements-is-not-marked": Fault(
        "src/raglane/planner/calibration.py",
        "times[seconds <= _REACH * self.longest[way, mode]]",
        "times[seconds >= 0]",
        "planner/test_advice.py::test_what_lies_far_beyond_all_measurements_is_marked",
    ),
    "the-gain-over-batches-of-one-kind": Fault(
        "src/raglane/planner/words.py",
        'rivals = [row for row in rows if row.backend == "torch"]',
        'rivals = [row for row in rows if row.backend == "torch" and bool(row.batch_size) == bool(best.batch_size)]',
        "planner/test_advice.py::test_why_compares_with_the_fastest_of_torch_in_the_table",
    ),
    "the-gain-over-the-slowest-of-torch": Fault(
        "src/raglane/planner/words.py",
        "other = min(rivals, key",
        "other = max(rivals, key",
        "inspection/test_found.py::test_the_gain_that_is_told_is_the_gain_of_the_table",
    ),
}
