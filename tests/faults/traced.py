"""Faults in how a step in plain torch becomes a program."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

_REFUSED = "programs/test_user_cells.py::test_what_no_program_can_be_is_refused_with_the_reason"
_LIBRARY = "programs/test_library_cells.py::test_a_cell_gives_what_the_reference_does"

FAULTS: dict[str, Fault] = {
    "rows-of-a-batch-meet": Fault(
        "src/raglane/programs/rows.py",
        'raise RowsMeet("rows of the batch meet")',
        "pass",
        _REFUSED,
    ),
    "random-numbers-are-baked-in": Fault(
        "src/raglane/programs/trace.py",
        "if torch.Tag.nondeterministic_seeded in function.tags:",
        "if not function.tags:",
        _REFUSED,
    ),
    "a-weight-is-read-as-it-stands-in-a-gradient": Fault(
        "src/raglane/programs/gradients.py",
        "not node.is_transposed))",
        "node.is_transposed))",
        _LIBRARY,
    ),
    "a-local-ends-before-its-last-reader": Fault(
        "src/raglane/programs/allocate.py",
        "if last[place.block] == index}",
        "if last[place.block] <= index + 1}",
        _LIBRARY,
    ),
    "a-program-is-used-as-it-is": Fault(
        "src/raglane/kernels/program/backend.py",
        "entry.reason = verify(wish, entry, found)",
        'entry.reason = ""',
        "kernels/test_program.py::test_what_cannot_be_a_program_says_why",
    ),
    "what-is-still-read-is-overwritten": Fault(
        "src/raglane/programs/compiled.py",
        "node not in kept | self.fetched]",
        "node not in kept]",
        _LIBRARY,
    ),
    "a-kept-graph-of-a-program-is-overwritten": Fault(
        "src/raglane/kernels/program/loop.py",
        "if not is_last_use():",
        "if not program:",
        "kernels/test_program.py::test_backward_twice_through_a_kept_graph",
    ),
    "an-output-of-the-caller-is-overwritten": Fault(
        "src/raglane/kernels/program/loop.py",
        "if node in own}",
        "if own is not node}",
        "kernels/test_program.py::test_results_stay_what_they_are",
    ),
    "biases-that-are-added-lose-one": Fault(
        "src/raglane/programs/known.py",
        "return Moved((*one.pieces, *other.pieces), one.shape)",
        "return Moved(one.pieces, one.shape)",
        _LIBRARY,
    ),
    "a-modules-numbers-are-baked-in": Fault(
        "src/raglane/programs/weights.py",
        "held = [(name, self.value(item)) for",
        "held = [(name, None) for",
        "kernels/test_program.py::test_a_program_holds_for_what_a_module_is_now",
    ),
    "a-graph-keeps-a-modules-own-tensors": Fault(
        "src/raglane/kernels/program/modules.py",
        "lambda part: given.get(id(part), part)",
        "lambda part: part if given else part",
        "nn/test_any_cell_compiled.py::test_copies_run_by_themselves",
    ),
    "an-operator-runs-what-draws-random-numbers": Fault(
        "src/raglane/kernels/program/modules.py",
        "    if reason:\n        got, rule = f",
        "    if not there:\n        got, rule = f",
        "nn/test_any_cell_compiled.py::test_what_no_graph_can_hold_is_refused_with_the_reason",
    ),
    "hooks-are-overlooked": Fault(
        "src/raglane/programs/weights.py",
        "if is_called and not self.by_identity and any(",
        "if not own and any(",
        _REFUSED,
    ),
}
