"""Faults in what is exported: files that run elsewhere, and the loop of a graph."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    "a-length-of-0-for-the-runtime": Fault(
        "src/raglane/export/operators.py",
        "is_empty = (table.lengths == 0).view(1, -1, 1)",
        "is_empty = (table.lengths < 0).view(1, -1, 1)",
        "export/test_onnx.py::test_a_model_is_the_same_in_the_runtime",
    ),
    "a-batch-of-no-rows-for-the-runtime": Fault(
        "src/raglane/export/operators.py",
        "torch.ones_like(table.lengths).sum().clamp(min=1).item()",
        "torch.ones_like(table.lengths).sum().item()",
        "export/test_onnx.py::test_no_lengths_end_the_runtime",
    ),
    "offsets-on-trust": Fault(
        "src/raglane/export/signature.py",
        "held = values, offsets_within(second, values.shape[0])",
        "held = values, second",
        "export/test_onnx.py::test_no_lengths_end_the_runtime",
    ),
    "offsets-that-fall": Fault(
        "src/raglane/export/decompositions.py",
        "held.diff().clamp(min=0)",
        "held.diff()",
        "export/test_onnx.py::test_no_lengths_end_the_runtime",
    ),
    "lengths-below-0-for-the-runtime": Fault(
        "src/raglane/export/decompositions.py",
        "lengths.to(torch.int64).clamp(0, padded.shape[1])",
        "lengths.to(torch.int64).clamp(max=padded.shape[1])",
        "export/test_onnx.py::test_no_lengths_end_the_runtime",
    ),
    "a-forecast-in-c-of-the-change-alone": Fault(
        "examples/c/predict.c",
        "*to = last[b * given.width + j] + *to;",
        "*to = 0 * last[b * given.width + j] + *to;",
        "export/test_c.py::test_a_program_in_c_tells_what_python_predicts[forecast]",
    ),
    "what-c-does-not-have-is-left-out": Fault(
        "examples/c/predict.c",
        "if (strtod(text, &end) != 0 ||",
        "if (strtod(text, &end) < 0 ||",
        "export/test_c.py::test_what_the_program_does_not_have_is_refused_by_name",
    ),
    "a-shape-in-c-on-trust": Fault(
        "examples/c/tensors.h",
        "if (!fits || *json_space(shape) != ']')",
        "if ((!fits && rows < 0) || *json_space(shape) != ']')",
        "export/test_c.py::test_spoilt_files_never_end_the_program_but_by_a_line",
    ),
    "a-place-in-c-on-trust": Fault(
        "examples/c/tensors.h",
        "end > all->data_size || end - begin",
        "end - begin",
        "export/test_c.py::test_spoilt_files_never_end_the_program_but_by_a_line",
    ),
    "a-file-that-differs-is-written": Fault(
        "src/raglane/export/verify.py",
        "if not share <= limit:",
        "if share != share:",
        "export/test_onnx.py::test_a_file_that_differs_from_its_model_is_not_written",
    ),
    "half-of-what-belongs-together-is-left": Fault(
        "src/raglane/_utils/files.py",
        "for path in [*partials.values(), *new.intersection(placed)]:",
        "for path in partials.values():",
        "test_files.py::test_files_that_belong_together_survive_a_full_disk",
    ),
    "a-file-without-its-description": Fault(
        "src/raglane/runs/exported.py",
        'write_files({exported.path: content, beside: f"{text}\\n".encode()})',
        'write_files({exported.path: content}), write_files({beside: f"{text}\\n".encode()})',
        "export/test_runs.py::test_a_full_disk_leaves_neither_file",
    ),
    "a-file-knows-no-scale": Fault(
        "src/raglane/runs/exported.py",
        "(values.double() * self.std + self.mean).to(values.dtype)",
        "(values.double() * self.std).to(values.dtype)",
        "export/test_runs.py::test_a_regression_answers_in_the_units_of_the_data",
    ),
    "a-model-stays-in-evaluation": Fault(
        "src/raglane/export/tracing.py",
        "module.training = True",
        "module.training = False",
        "export/test_onnx.py::test_a_model_is_the_same_in_the_runtime",
    ),
    "a-chain-that-ends-anywhere": Fault(
        "src/raglane/nn/crf/loops.py",
        "chain = _Chain(scores.transitions.t(), scores.end)",
        "chain = _Chain(scores.transitions.t(), scores.start)",
        "export/test_crf.py::test_a_chain_is_decoded_in_the_runtime",
    ),
    "an-operator-that-takes-any-shape": Fault(
        "src/raglane/export/operators.cpp",
        "same = sizes[place] == shape[place];",
        "same = true;",
        "export/test_torch.py::test_the_operator_of_the_kernels_needs_no_python",
    ),
    "numbers-of-python-in-float32": Fault(
        "src/raglane/export/to_onnx.py",
        "custom_translation_table=exact_translations() if is_wide else None",
        "custom_translation_table=None",
        "export/test_onnx.py::test_a_file_that_differs_from_its_model_is_not_written",
    ),
    "what-was-carried-is-of-another-sequence": Fault(
        "src/raglane/runs/exported.py",
        "before = torch.maximum(segments.shift(last, offsets, 1, fill=-1), starts)",
        "before = segments.shift(last, offsets, 1, fill=0)",
        "export/test_runs.py::test_a_missing_feature_is_filled_as_the_preprocessing_fills_it",
    ),
    "a-gap-that-is-no-number": Fault(
        "src/raglane/runs/exported.py",
        "torch.where(gaps.isfinite(), gaps, 0.0) / self.usual_gap",
        "gaps / self.usual_gap",
        "export/test_runs.py::test_a_missing_feature_is_filled_as_the_preprocessing_fills_it",
    ),
    "the-states-of-a-package-are-left-out": Fault(
        "src/raglane/export/aot.py",
        "if not self._has_kernels or layer.need_states or not has_cell",
        "if not self._has_kernels or not has_cell",
        "export/test_torch.py",
    ),
}
