"""Faults in how batches are held and moved: segments, layouts, packing, interop, ragged, and rows in the kernels."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

FAULTS: dict[str, Fault] = {
    # ---- segments and indices -------------------------------------------------------------------------------------
    "last-is-the-one-before": Fault(
        "src/raglane/segments/reductions.py",
        "offsets[1:] - 1, empty",
        "(offsets[1:] - 2).clamp(min=0), empty",
        "segments/test_segments.py::test_against_a_loop",
    ),
    "largest-is-not-subtracted": Fault(
        "src/raglane/segments/reductions.py",
        "largest = torch.where(largest.isfinite(), largest, ",
        "largest = torch.where(largest.isnan(), largest, ",
        "segments/test_segments.py::test_softmax_of_large_numbers",
    ),
    "half-precision-sums": Fault(
        "src/raglane/segments/reductions.py",
        "values.is_floating_point() and values.element_size() < 4",
        "values.is_floating_point() and values.element_size() < 2",
        "segments/test_segments.py::test_half_precision_is_added_up_in_float32",
    ),
    "shift-from-the-neighbour": Fault(
        "src/raglane/segments/order.py",
        "remaining >= abs(steps)",
        "remaining >= abs(steps) - 1",
        "segments/test_segments.py::test_against_a_loop",
    ),
    "cumsum-backward-runs-forward": Fault(
        "src/raglane/segments/order.py",
        "ctx.longest, not ctx.backwards",
        "ctx.longest, ctx.backwards",
        "segments/test_segments.py::test_gradients_of_gradients",
    ),
    "repeated-rows-are-copied": Fault(
        "src/raglane/ragged/operations.py",
        "if repeats else take_rows(self.values, index)",
        "if False else take_rows(self.values, index)",
        "segments/test_segments.py::test_elements_of_a_large_batch_that_are_in_several_slices",
    ),
    "windows-never-repeat": Fault(
        "src/raglane/ragged/operations.py",
        "repeats=step < size",
        "repeats=step < size - 1",
        "segments/test_segments.py::test_windows_of_a_large_batch_add_gradients_where_they_overlap",
    ),
    "an-index-never-repeats": Fault(
        "src/raglane/ragged/operations.py",
        "repeats=not is_mask",
        "repeats=is_mask",
        "segments/test_segments.py::test_sequences_of_a_large_batch_that_are_chosen_twice_add_gradients",
    ),
    "windows-lose-the-rest": Fault(
        "src/raglane/ragged/operations.py",
        "((lengths - size).clamp(min=0) + step - 1) // step + 1",
        "(lengths - size).clamp(min=0) // step + 1",
        "segments/test_segments.py::test_windows",
    ),
    "rows-placed-at-an-odd-start": Fault(
        "src/raglane/segments/indexing.py",
        "row_bytes % dtype.itemsize == start % dtype.itemsize == 0",
        "row_bytes % dtype.itemsize == 0",
        "test_indexing.py::test_memory_that_starts_between_wide_numbers",
    ),
    "tangent-lost-where-rows-are-wide": Fault(
        "src/raglane/segments/indexing.py",
        "return forward_ad.unpack_dual(values).tangent is not None",
        "return False",
        "test_indexing.py::test_forward_mode_keeps_the_tangent",
    ),
    # ---- layouts and packing --------------------------------------------------------------------------------------
    "ties-in-reverse": Fault(
        "src/raglane/segments/layouts.py",
        'order: IntArray = (-host).argsort(kind="stable")',
        'order: IntArray = host.argsort(kind="stable")[::-1].copy()',
        "ragged/test_travelling.py::test_sequences_of_one_length_keep_their_order_in_a_pack",
    ),
    "ties-of-a-pack-in-reverse": Fault(
        "src/raglane/packing/functions.py",
        'order = (-lengths).argsort(kind="stable")',
        'order = lengths.argsort(kind="stable")[::-1].copy()',
        "packing/test_packing.py::test_equal_to_torch",
    ),
    "left-padding-counted-from-the-right": Fault(
        "src/raglane/segments/layouts.py",
        "elements -= left_steps",
        "elements -= left_steps - 1",
        "ragged/test_ragged.py::test_from_padded_with_a_mask",
    ),
    "batch-sizes-count-one-too-far": Fault(
        "src/raglane/segments/layouts.py",
        "np.bincount(counts, minlength=size)[:size].cumsum()",
        "np.bincount(counts, minlength=size + 1)[1 : size + 1].cumsum()",
        "test_layouts.py",
    ),
    "padded-lengths-are-the-callers-memory": Fault(
        "src/raglane/packing/index.py",
        "_on(host.copy(), padded.device)",
        "_on(host, padded.device)",
        "ragged/test_travelling.py::test_lengths_that_their_owner_changes_are_not_the_batchs",
    ),
    "padding-is-zero-where-gradients-flow": Fault(
        "src/raglane/segments/indexing.py",
        "_PlaceRows.apply(values, index, size, fill)",
        "_PlaceRows.apply(values, index, size, 0.0)",
        "test_indexing.py",
    ),
    "lengths-may-rise": Fault(
        "src/raglane/packing/functions.py",
        "if np.count_nonzero(lengths[1:] > lengths[:-1]):",
        "if np.count_nonzero(lengths[1:] > lengths[:-1] + 1):",
        "packing/test_errors.py::test_mistakes_are_explained",
    ),
    # ---- interop and Ragged ---------------------------------------------------------------------------------------
    "offsets-of-a-nested-tensor-shared": Fault(
        "src/raglane/ragged/sequences.py",
        "to(torch.int64, copy=True)",
        "to(torch.int64)",
        "ragged/test_travelling.py::test_lengths_that_their_owner_changes_are_not_the_batchs",
    ),
    "holes-are-values": Fault(
        "src/raglane/ragged/sequences.py",
        "return values.index_select(0, index), offsets_from_lengths(lengths)",
        "return values[:total], offsets_from_lengths(lengths)",
        "ragged/test_ragged.py::test_nested_strided_and_with_holes",
    ),
}
