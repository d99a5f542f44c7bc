"""Faults around and in the kernels in C++. Those of ``csrc/`` take a build each, and are played with ``--kernels``."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

_ROUNDING = (
    "kernels/test_cpu_matrix.py::test_bfloat16_is_rounded_as_torch_rounds"
    " kernels/test_cpu_elementwise.py::test_bfloat16_is_rounded_as_torch_rounds"
)
_ROUNDS = "kernels/test_checkpoints.py::test_agrees_with_the_reference"

FAULTS: dict[str, Fault] = {
    "a-fork-is-not-noticed": Fault(
        "src/raglane/native/library.py",
        "return torch.get_num_threads() if threads_before() is None else 1",
        "return torch.get_num_threads()",
        "safety/test_threads_and_processes.py::test_a_forked_process_has_one_thread_for_the_kernels_whatever_torch_may_use",
    ),
    "threads-lost-in-a-fork": Fault(
        "src/raglane/native/library.py",
        "        torch.set_num_threads(1)\n",
        "        pass\n",
        "safety/test_threads_and_processes.py::test_forward_and_backward_after_a_fork",
    ),
    "rows-with-gaps-taken-as-dense": Fault(
        "src/raglane/native/memory.py",
        "            and part.is_contiguous()\n",
        "",
        "native/test_rows.py::test_tensors_with_gaps"
        " ragged/test_travelling.py::test_lengths_wherever_they_lie"
        " kernels/test_cpu_elementwise.py::test_tensors_with_gaps",
    ),
    "one-row-says-how-many-lie": Fault(
        "src/raglane/kernels/cpu/guards.py",
        "is_for_all = all(map(_has_strides_for_all_sizes, examples, shapes))",
        "is_for_all = True",
        "safety/test_memory.py::test_one_row_or_none_says_nothing_about_more",
    ),
    "a-tensor-without-memory-is-missing": Fault(
        "src/raglane/native/memory.py",
        "return not part.data_ptr() and part.numel() > 0",
        "return False",
        "safety/test_lost_memory.py::test_a_tensor_without_memory_is_refused",
    ),
    "memory-given-back-while-c-reads-it": Fault(
        "src/raglane/kernels/cpu/memory.py",
        "storages.append(storage := part.untyped_storage())",
        "storage = part.untyped_storage()",
        "safety/test_lost_memory.py::test_what_another_thread_gives_back_lives_until_the_call_ends",
    ),
    "padded-rows-and-steps-swapped": Fault(
        "src/raglane/packing/rows.py",
        "strides = stride[batch_dim] * size, stride[1 - batch_dim] * size",
        "strides = stride[1 - batch_dim] * size, stride[batch_dim] * size",
        "native/test_rows.py::test_a_padded_tensor_there_and_back",
    ),
    "int8-with-an-infinite-scale": Fault(
        "csrc/bytes.h",
        "if (most >= 0x7f800000)",
        "if (most > 0x7f800000)",
        "kernels/test_cpu_int8.py::test_what_is_not_finite_stays_in_its_sequence",
    ),
    "int8-without-its-offset": Fault(
        "csrc/bytes.h",
        "sum *= -128;",
        "sum *= -127;",
        "kernels/test_cpu_int8.py::test_the_largest_products",
    ),
    "int8-beside-any-dtype": Fault(
        "src/raglane/kernels/cpu/layer.py",
        "if self.dtype is not torch.float32:",
        "if self.dtype is torch.int8:",
        "kernels/test_cpu_int8.py::test_what_is_refused",
    ),
    "a-round-without-the-one-before": Fault(
        "csrc/backward_rounds.h",
        "mine_.grad_final_h = mine_.grad_initial_h, mine_.grad_final_c",
        "mine_.grad_final_c",
        _ROUNDS,
    ),
    "a-round-from-the-wrong-side": Fault(
        "csrc/backward_rounds.h",
        "before = d == 0 ? element - 1 : element + 1;",
        "before = element - 1;",
        _ROUNDS,
    ),
    "values-of-one-direction-in-rounds": Fault(
        "csrc/backward_rounds.h",
        "round + 1 == rounds_.count, d > 0}",
        "round + 1 == rounds_.count, false}",
        _ROUNDS,
    ),
    "sums-of-the-last-round-alone": Fault(
        "csrc/layer_gradients.h",
        "return block.begin > 0 || !part_.first;",
        "return block.begin > 0;",
        _ROUNDS,
    ),
    "gates-are-kept-and-computed-again": Fault(
        "src/raglane/kernels/cpu/matrix.py",
        "facts.saved > 0 and not self.checkpoint_every",
        "facts.saved > 0",
        "kernels/test_checkpoints.py::test_what_is_kept",
    ),
    "only-one-layer-computes-again": Fault(
        "src/raglane/kernels/contract.py",
        "            checkpoint_every=self.checkpoint_every,\n",
        "",
        "kernels/test_checkpoints.py::test_what_is_kept",
    ),
    "packed-for-any-layer": Fault(
        "csrc/raglane.cpp",
        "if (std::memcmp(l.packed, &wanted, sizeof wanted) != 0)",
        "if (false)",
        "nn/test_freeze.py::test_packed_weights_of_another_layer_are_refused",
    ),
    "bfloat16-cut-off": Fault(
        "csrc/simd.h",
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "bits >> 16",
        _ROUNDING,
    ),
    "bfloat16-ties-away-from-zero": Fault(
        "csrc/simd.h",
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "(bits + 0x8000u) >> 16",
        _ROUNDING,
    ),
    "gradients-read-past-their-row": Fault(
        "csrc/scan_backward.h",
        "if (grad_output) d_h += load(grad_output + unit, count);",
        "if (grad_output) d_h += load(grad_output + unit);",
        "safety/test_threads_and_processes.py::test_gradients_that_come_in_beside_guard_pages",
    ),
    "a-block-of-elements-in-place-of-those-before": Fault(
        "csrc/layer_gradients.h",
        "outer.rows, 1, stride(d, outer.left), 1, continues(block),",
        "outer.rows, 1, stride(d, outer.left), 1, false,",
        "kernels/test_cpu_matrix.py::test_gradients_of_many_elements[gru]",
    ),
    "an-lstm-that-forgets-its-gradient": Fault(
        "csrc/cells/lstm.h",
        "dc = d * f;",
        "dc = d;",
        "kernels/test_cpu_matrix.py::test_gradients_by_torchs_products[lstm]",
    ),
    "a-row-of-a-program-rounded-up-in-the-callers-memory": Fault(
        "csrc/program_plan.h",
        "whole &= is_padded(operation.from[o]);",
        "",
        "safety/test_threads_and_processes.py::test_attacks_on_programs",
    ),
    "a-local-forgotten-across-a-product": Fault(
        "csrc/programs.cpp",
        "block.carried |= column[i] != phase;",
        "",
        "programs/test_cpu_programs.py::test_random_programs[portable]",
    ),
    "a-state-that-another-has-overwritten": Fault(
        "csrc/program_plan.h",
        "if (meets_states(s)) add(copy, all_of(to++), at(next(s).place), next(s).width);",
        "if (meets_states(s)) to++;",
        "programs/test_cpu_programs.py::test_random_programs[portable]",
    ),
    "a-program-that-reads-what-nobody-wrote": Fault(
        "csrc/programs.cpp",
        "if (column[i] == 0)",
        "if (column[i] < 0)",
        "programs/test_cpu_programs.py::test_programs_that_are_wrong",
    ),
    "weights-of-a-program-as-they-lie": Fault(
        "csrc/program_product.h",
        "own.pack_straight(matrix, panel, strides[2]);",
        "own.pack_transposed(&matrix, panel, strides[1]);",
        "programs/test_cpu_programs.py::test_products_of_any_strides[portable]",
    ),
    "rows-of-elements-one-after-another": Fault(
        "src/raglane/kernels/cpu/programs.py",
        "(part.stride(0), 0, 0) if part.dim() == 2",
        "(part.shape[1], 0, 0) if part.dim() == 2",
        "programs/test_cpu_programs.py::test_columns_of_a_wider_tensor_are_read_where_they_are",
    ),
    "memory-is-given-again-while-it-is-in-use": Fault(
        "src/raglane/native/library.py",
        "weakref.finalize(memory, self.handle.raglane_give_block, address, size.value).atexit = False",
        "self.handle.raglane_give_block(address, size.value)",
        "native/test_large.py::test_threads_share_nothing_at_a_time",
    ),
    "kept-memory-is-not-counted": Fault(
        "src/raglane/planner/peak.py",
        "with large.from_torch(), profile(",
        "with profile(",
        "native/test_large.py::test_memory_of_a_step_is_counted_whoever_gives_it",
    ),
    "a-block-is-smaller-than-what-was-asked-for": Fault(
        "csrc/blocks.cpp",
        "waiting[i].size >= bytes",
        "waiting[i].size >= bytes / 2",
        "native/test_large.py::test_memory_is_given_again_and_only_when_nothing_refers_to_it",
    ),
    "a-library-that-cannot-be-mapped": Fault(
        "src/raglane/native/library.py",
        "    except OSError as error:\n        reason",
        "    except KeyError as error:\n        reason",
        "native/test_library.py::test_a_library_that_cannot_be_mapped_is_one_warning_and_torch_runs_the_layers",
    ),
}
