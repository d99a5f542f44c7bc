"""Faults in how a step in plain torch becomes a program."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

_REFUSED = "programs/test_user_cells.py::test_what_no_program_can_be_is_refused_with_the_reason"
_LIBRARY = "programs/test_library_cells.py::test_a_cell_gives_what_the_reference_does"
_SPECIAL = "programs/test_special_values.py"
_CHANGES = "programs/test_changes.py::test_whatever_changes_is_seen"
_RECORDED = "kernels/test_program_recorded.py::test_what_is_recorded"
_KNOWN = "programs/test_known.py::test_what_is_known_beside_the_loop"

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
        "kernels/test_program_verified.py::test_a_wrong_gradient_is_refused",
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
    "gradients-are-not-verified-in-a-graph": Fault(
        "src/raglane/kernels/program/verify.py",
        "with torch.inference_mode(False), torch.enable_grad()",
        "with torch.enable_grad()",
        "kernels/test_program.py::test_the_first_call_within_an_operator_verifies_gradients",
    ),
    "gradients-are-not-compared": Fault(
        "src/raglane/kernels/program/verify.py",
        'enumerate(("values", "gradients"))',
        'enumerate(("values",))',
        "kernels/test_program_verified.py::test_a_wrong_gradient_is_refused",
    ),
    "a-module-is-verified-as-a-stand-in": Fault(
        "src/raglane/kernels/program/verify.py",
        "is_own = isinstance(self.loop.step.given, nn.Module)",
        "is_own = False",
        "kernels/test_program_verified.py::test_a_step_that_looks_at_its_parameters",
    ),
    "a-stand-in-is-no-parameter": Fault(
        "src/raglane/programs/weights.py",
        "if isinstance(original, kind) and not isinstance(made, kind):",
        "if made is original:",
        "kernels/test_program_verified.py::test_a_step_that_looks_at_its_parameters",
    ),
    "a-number-of-rows-is-any-number": Fault(
        "src/raglane/programs/reads.py",
        "return Rows(found) if found and is_count else found",
        "return found",
        "kernels/test_program_verified.py::test_what_depends_on_the_number_of_rows_is_refused",
    ),
    "a-program-is-compared-once": Fault(
        "src/raglane/kernels/program/backend.py",
        "if entry.calls % _CALLS == 0 and",
        "if entry.calls == 0 and",
        "kernels/test_program_verified.py::test_a_program_that_no_longer_holds_ends",
    ),
    "a-call-is-compared-on-other-rows": Fault(
        "src/raglane/kernels/program/verify.py",
        "[ends > starts]",
        "[ends > starts][:1]",
        "kernels/test_program_verified.py::test_the_first_call_is_compared_on_its_own_rows",
    ),
    "a-program-on-the-disk-is-believed": Fault(
        "src/raglane/kernels/program/backend.py",
        "if entry.compiled is not None:\n        entry.reason",
        "if not entry.is_read:\n        entry.reason",
        "programs/test_stored.py::test_another_step_under_the_same_key_is_not_believed",
    ),
    "a-spoilt-file-is-read": Fault(
        "src/raglane/programs/stored.py",
        "hashlib.sha256(body.encode()).hexdigest() != digest",
        "not body",
        "programs/test_stored.py::test_a_file_that_was_spoilt_is_written_anew",
    ),
    "shapes-are-not-worked-out-first": Fault(
        "src/raglane/programs/stored_calls.py",
        "all(part.numel() <= MOST_MADE for part in known[before:])",
        "True",
        "programs/test_stored.py::test_what_asks_for_all_memory_is_not_computed",
    ),
    "a-closure-is-no-part-of-a-key": Fault(
        "src/raglane/programs/keys.py",
        "held = tuple([self._cell(name, cell) for name, cell in cells])",
        "held = len(list(cells))",
        "programs/test_keys.py::test_whatever_changes_a_step_changes_its_key",
    ),
    "what-torch-calls-is-no-part-of-a-key": Fault(
        "src/raglane/programs/keys.py",
        "return any(hasattr(base, name) for base in holder.bases)",
        "return False",
        "programs/test_keys.py::test_whatever_changes_a_step_changes_its_key",
    ),
    "whatever-torch-has-written-in-c-has-a-key": Fault(
        "src/raglane/programs/keys.py",
        "is_of_torch = home is None and part.__qualname__ ==",
        "is_of_torch = home or part.__qualname__ ==",
        "programs/test_keys.py::test_what_is_not_known_has_no_key",
    ),
    "files-of-others-are-read": Fault(
        "src/raglane/_utils/caches.py",
        " and not found.st_mode & 0o022",
        "",
        "test_caches.py::test_what_is_no_file_of_ours",
    ),
    "what-was-detached-changes-in-place": Fault(
        "src/raglane/programs/trace.py",
        "if _memory(target.marks) in self._detached:",
        "if target.marks is self._detached:",
        _REFUSED,
    ),
    "no-grad-is-forgotten": Fault(
        "src/raglane/programs/trace.py",
        "if not torch.is_grad_enabled() and not function._schema.is_mutable:",
        "if function is None:",
        _REFUSED,
    ),
    "no-slope-at-a-state-of-zeros": Fault(
        "src/raglane/programs/row_formulas.py",
        'g.each("sqrt", g.each("where", is_zero, 1.0, a))',
        'g.each("sqrt", a)',
        _SPECIAL,
    ),
    "a-quotient-is-one-too-many": Fault(
        "src/raglane/programs/formulas.py",
        'is_over = g.each("and", has_sign, left)',
        'is_over = g.each("and", has_sign, 0.0)',
        _SPECIAL,
    ),
    "slopes-of-ties-are-shared": Fault(
        "src/raglane/programs/rules.py",
        "row_formulas.first_of(formula), keepdim)",
        "formula, keepdim)",
        _SPECIAL,
    ),
    "a-bound-in-place-without-gradients-has-a-slope": Fault(
        "src/raglane/programs/trace.py",
        "if not torch.is_grad_enabled() and found.dtype.is_floating_point:",
        "if found.dtype is None:",
        _SPECIAL,
    ),
    "joined-parts-lie-on-each-other": Fault(
        "src/raglane/programs/lower.py",
        "            start += width\n",
        "            start += width - 1\n",
        _SPECIAL,
    ),
    "a-program-of-another-layout": Fault(
        "src/raglane/programs/weights.py",
        "tuple(part.shape), part.stride(), part.dtype",
        "tuple(part.shape), part.dtype",
        "kernels/test_program.py::test_what_a_step_reads_of_its_class_and_of_memory",
    ),
    "a-class-never-changes": Fault(
        "src/raglane/programs/weights.py",
        "self.classes += [(name, self.value(item)) for name, item in held]",
        "self.classes += []",
        "kernels/test_program.py::test_what_a_step_reads_of_its_class_and_of_memory",
    ),
    "classes-behind-others-never-change": Fault(
        "src/raglane/programs/weights.py",
        "for base in (*cls.__mro__[1:], type(cls)):",
        "for base in cls.__mro__[1:2]:",
        _CHANGES,
    ),
    "defaults-of-a-step-never-change": Fault(
        "src/raglane/programs/weights.py",
        "own = part.__defaults__, part.__kwdefaults__, vars(part)",
        "own = (vars(part),)",
        _CHANGES,
    ),
    "code-of-a-step-never-changes": Fault(
        "src/raglane/programs/weights.py",
        "return part, part.__code__, tuple(",
        "return part, tuple(",
        _CHANGES,
    ),
    "numbers-of-any-class-are-constants": Fault(
        "src/raglane/programs/weights.py",
        "return same and not kind.__itemsize__",
        "return True",
        "programs/test_changes.py::test_what_may_change_unseen_is_no_program",
    ),
    "a-flag-is-no-part-of-a-key": Fault(
        "src/raglane/programs/weights.py",
        "(ModuleCell, cell.output_size, cell.is_tuple, cell.state_sizes(0))",
        "(ModuleCell, cell.output_size, cell.state_sizes(0))",
        "programs/test_known.py::test_every_fact_of_a_step_is_a_part_of_its_key",
    ),
    "training-is-no-part-of-a-key": Fault(
        "src/raglane/programs/weights.py",
        'frozenset(nn.Module().__dict__) - {"training"}',
        "frozenset(nn.Module().__dict__)",
        "programs/test_known.py::test_every_fact_of_a_step_is_a_part_of_its_key",
    ),
    "flags-of-code-are-no-part-of-a-key": Fault(
        "src/raglane/programs/keys.py",
        "counts = code.co_flags, code.co_argcount",
        "counts = 0, code.co_argcount",
        "programs/test_keys.py::test_whatever_changes_a_step_changes_its_key",
    ),
    "what-a-call-needs-is-no-part-of-a-key": Fault(
        "src/raglane/programs/compiled.py",
        "key = need_output, need_states, wanted",
        "key = need_output, True, wanted",
        "programs/test_known.py::test_programs_are_made_for_what_a_call_needs",
    ),
    "a-class-that-a-step-makes-has-a-key": Fault(
        "src/raglane/programs/keys.py",
        "if isinstance(part, type) and not (",
        "if part is None and not (",
        "programs/test_keys.py::test_what_is_not_known_has_no_key",
    ),
    "every-result-of-a-program-has-a-gradient": Fault(
        "src/raglane/kernels/program/loop.py",
        "zip(found, has, strict=True) if not flag]",
        "zip(found, has, strict=True) if flag is None]",
        _RECORDED,
    ),
    "truths-have-a-gradient": Fault(
        "src/raglane/programs/gradients.py",
        '"and", "or", "not", "stop"), slice(0))',
        '"and", "or", "not", "stop"), slice(None))',
        _RECORDED,
    ),
    "a-state-keeps-its-gradient-for-ever": Fault(
        "src/raglane/kernels/program/loop.py",
        "finals = [now or (before and has_empty)",
        "finals = [now or before",
        _RECORDED,
    ),
    "a-schedule-that-changes-numbers-is-not-named": Fault(
        "src/raglane/programs/trace.py",
        'depends = "" if all(self.is_known(part) for part in tensors)',
        'depends = "" if tensors',
        "programs/test_table_of_steps.py",
    ),
    "sums-take-no-factor": Fault(
        "src/raglane/programs/known.py",
        "or call.kwargs or len(call.args) != 2:",
        "or len(call.args) != 2:",
        _KNOWN,
    ),
    "sums-of-different-shapes-are-sums-of-pieces": Fault(
        "src/raglane/programs/known.py",
        "if one is None or other is None or one.shape != other.shape:",
        "if one is None or other is None:",
        _KNOWN,
    ),
    "what-is-beside-a-parameter-is-left-out-of-a-sum": Fault(
        "src/raglane/programs/known.py",
        "    if one is None or other is None or one.shape != other.shape:\n        return None\n",
        "    if one is None or other is None or one.shape != other.shape:\n        return one\n",
        _KNOWN,
    ),
    "pieces-of-any-strides-lie-side-by-side": Fault(
        "src/raglane/programs/known.py",
        "if index not in roots or not value.is_contiguous() or not value.numel():",
        "if index not in roots or not value.numel():",
        _KNOWN,
    ),
    "weights-of-a-program-are-contiguous": Fault(
        "src/raglane/kernels/cpu/programs.py",
        "strides = part.stride() if part.dim() == 3 else",
        "strides = part.contiguous().stride() if part.dim() == 3 else",
        "programs/test_known.py::test_weights_of_any_strides",
    ),
    "a-step-asks-nothing-of-gradients": Fault(
        "src/raglane/kernels/program/verify.py",
        "if not self.is_same_without_gradients(want[0]):",
        "if not want[0]:",
        "kernels/test_program.py::test_a_step_that_asks_whether_gradients_are_recorded_is_refused",
    ),
    "a-step-writes-over-its-callers-state": Fault(
        "src/raglane/cells/module.py",
        "own = tuple([part.clone() for part in state])",
        "own = state",
        "nn/test_any_cell.py::test_a_step_may_write_over_what_it_is_given",
    ),
    "a-compiled-module-is-any-of-its-kind": Fault(
        "src/raglane/kernels/program/modules.py",
        "if own.module() is module and own.names == names",
        "if own.names == names",
        "nn/test_any_cell_compiled.py",
    ),
    "a-tensor-beside-the-parameters-has-no-gradient": Fault(
        "src/raglane/kernels/program/modules.py",
        "if any(part.requires_grad and id(part) not in given for part in found.leaves):",
        "if not found:",
        "nn/test_any_cell_compiled.py",
    ),
}
