"""Faults in what programs call: runs from Python, data that is not in a file, estimators."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    "any-number-of-channels-without-names": Fault(
        "src/raglane/runs/run.py",
        "if records.channels and self.channels and len(records.values)",
        "if not self.channels and len(records.values)",
        "runs/test_run.py::test_mistakes",
    ),
    "the-test-part-is-forgotten": Fault(
        "src/raglane/runs/run.py",
        "if self._test is not None:",
        "if self._test is self:",
        "runs/test_fit.py::test_given_parts_are_used",
    ),
    "a-fit-draws-from-the-callers-numbers": Fault(
        "src/raglane/runs/fit.py",
        "with torch.random.fork_rng(devices):",
        "with nullcontext(devices):",
        "runs/test_fit.py::test_it_leaves_no_trace",
    ),
    "a-fit-keeps-its-threads": Fault(
        "src/raglane/runs/fit.py",
        "if torch.get_num_threads() != threads:",
        "if not threads:",
        "runs/test_fit.py::test_it_leaves_no_trace",
    ),
    "ctrl-c-is-swallowed": Fault(
        "src/raglane/runs/fit.py",
        "signal.raise_signal(result.stopped_by)",
        "pass",
        "runs/test_fit.py::test_ctrl_c_stops_and_saves",
    ),
    "rows-of-a-panel-as-they-stand": Fault(
        "src/raglane/data/objects.py",
        'order = np.argsort(codes, kind="stable")',
        "order = np.arange(len(codes))",
        "data/test_objects.py::test_panels",
    ),
    "ids-that-repeat-are-rows": Fault(
        "src/raglane/data/formats/csv.py",
        "len(set(entries[name])) < len(entries[name])",
        "len(set(entries[name])) == len(entries[name])",
        "data/test_objects.py::test_tables_are_read_as_their_files",
    ),
    "channels-last-for-first": Fault(
        "src/raglane/sklearn/inputs.py",
        'array = array.T if channels == "first" else array',
        "array = array.T",
        "estimators/test_estimators.py::test_each_panel_is_taken_as_it_is",
    ),
    "an-estimator-takes-any-channels": Fault(
        "src/raglane/sklearn/inputs.py",
        "elif len(records.values) and found != estimator._channels:",
        "elif found is estimator:",
        "estimators/test_estimators.py::test_texts",
    ),
    "integers-beyond-64-bits-in-a-list": Fault(
        "src/raglane/data/collate.py",
        "or len(widths) > 1 or is_large:",
        "or len(widths) > 1:",
        "data/test_collate.py::test_samples_that_do_not_fit",
    ),
}
