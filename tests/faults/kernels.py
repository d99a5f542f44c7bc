"""Faults in cells, schedules and backends, as far as they are Python."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

_COMPILED = "kernels/test_cpu_torch.py::test_a_compiled_layer_goes_backward_twice_through_a_kept_graph"
_FORWARD = "kernels/test_cpu_torch.py::test_derivatives_forward_in_any_tensor"

FAULTS: dict[str, Fault] = {
    # ---- cells ----------------------------------------------------------------------------------------------------
    "gru-turned-around": Fault(
        "src/raglane/cells/gru.py",
        "h = n + z * (h - n)",
        "h = h + z * (n - h)",
        "cells/test_cells.py::test_step_is_torchs",
    ),
    "peephole-of-the-old-memory": Fault(
        "src/raglane/cells/peephole_lstm.py",
        "        c = f * c + i * torch.tanh(bounded(g, self._clip))\n"
        "        h = torch.sigmoid(bounded(o + peep_o * c, self._clip)) * torch.tanh(c)\n",
        "        o = o + peep_o * c\n"
        "        c = f * c + i * torch.tanh(bounded(g, self._clip))\n"
        "        h = torch.sigmoid(bounded(o, self._clip)) * torch.tanh(c)\n",
        "cells/test_cells.py::test_step_is_the_papers",
    ),
    "sru-highway-reversed": Fault(
        "src/raglane/cells/sru.py",
        "h = skip + r * (c - skip)",
        "h = c + r * (skip - c)",
        "cells/test_published_values.py::test_sru_by_hand",
    ),
    "a-peephole-unclipped": Fault(
        "src/raglane/cells/peephole_lstm.py",
        "torch.tanh(bounded(g, self._clip))",
        "torch.tanh(g)",
        "cells/test_cells.py::test_clip",
    ),
    "a-mask-forgotten": Fault(
        "src/raglane/cells/coupled_lstm.py",
        "masked(h, mask)",
        "h",
        "cells/test_cells.py::test_a_mask_acts_where_weights_read_the_state",
    ),
    "minlstm-by-division": Fault(
        "src/raglane/cells/minlstm.py",
        "torch.sigmoid(F.logsigmoid(f) - F.logsigmoid(i))",
        "f.sigmoid() / (f.sigmoid() + i.sigmoid())",
        "cells/test_minlstm.py::test_minlstm_with_extreme_gates",
    ),
    "an-slstm-that-never-begins": Fault(
        "src/raglane/cells/slstm.py",
        "torch.where(n == 0, i, torch.maximum(kept, i))",
        "torch.maximum(kept, i)",
        "cells/test_slstm.py::test_a_sequence_begins_with_any_input_gate",
    ),
    "heads-that-meet": Fault(
        "src/raglane/cells/slstm.py",
        "hidden.view(4, self.heads, size, size).permute(1, 3, 0, 2)",
        "hidden.view(4, self.heads, size, size).permute(1, 2, 0, 3)",
        "cells/test_slstm.py::test_heads_read_their_own_units",
    ),
    "a-present-value-that-decays": Fault(
        "src/raglane/cells/grud.py",
        "torch.where(absent > 0, x * torch.exp(-slope.relu()), x)",
        "x * torch.exp(-slope.relu())",
        "cells/test_grud.py::test_a_state_and_a_value_are_trusted_less_with_time",
    ),
    "a-time-gap-above": Fault(
        "src/raglane/cells/cfc.py",
        "if place is None or values.shape[1] == weights.input.shape[1]:",
        "if place is None:",
        "cells/test_cfc.py::test_layers_above_take_one_for_each_step",
    ),
    # ---- schedules ------------------------------------------------------------------------------------------------
    "the-highest-free-lane": Fault(
        "src/raglane/schedules/lanes.py",
        "return slots, max(free) // rows",
        "return slots, min(free) // rows",
        "schedules/test_schedules.py::test_count_is_the_tables",
    ),
    "lanes-wait-shortest-first": Fault(
        "src/raglane/schedules/lanes.py",
        "order = longest_first(lengths)[: int(lengths.count_nonzero())]",
        "order = longest_first(lengths)[: int(lengths.count_nonzero())].flip(0)",
        "schedules/test_schedules.py::test_table_is_the_obvious_one",
    ),
    # ---- the reference --------------------------------------------------------------------------------------------
    "padding-runs-on": Fault(
        "src/raglane/kernels/reference.py",
        "torch.where(is_real, a, b) for a, b in zip(new, past, strict=True)",
        "a for a, _ in zip(new, past, strict=True)",
        "kernels/test_reference.py::test_padding_cannot_overflow",
    ),
    "dropout-between-layers-in-evaluation": Fault(
        "src/raglane/kernels/layers.py",
        "values = F.dropout(values, request.dropout, request.training)",
        "values = F.dropout(values, request.dropout, True)",
        "kernels/test_reference.py::test_dropout_acts_between_layers_in_training_only",
    ),
    "layers-and-directions-swapped": Fault(
        "src/raglane/kernels/contract.py",
        "rows = slice(index * self.directions, (index + 1) * self.directions)",
        "rows = slice(index, None, self.layers)",
        "nn/test_torch_layers.py::test_every_schedule_and_backend",
    ),
    "float64-follows-autocast": Fault(
        "src/raglane/kernels/contract.py",
        "return part if part.dtype is torch.float64 else part.to(dtype)",
        "return part.to(dtype)",
        "kernels/test_reference_rules.py::test_autocast_leaves_float64_alone",
    ),
    # ---- torch's own kernels --------------------------------------------------------------------------------------
    "torch-reverses-into-padding": Fault(
        "src/raglane/kernels/torch.py",
        "        values = segments.reverse(values, offsets)\n",
        "        values = values.flip(0)\n",
        "nn/test_torch_layers.py::test_every_schedule_and_backend",
    ),
    "an-empty-sequence-ends-with-zeros": Fault(
        "src/raglane/kernels/torch.py",
        "before.to(after.dtype).index_copy(1, running, after)",
        "torch.zeros_like(before, dtype=after.dtype).index_copy(1, running, after)",
        "nn/test_torch_layers.py::test_a_pack_on_every_backend",
    ),
    "torch-takes-a-pack-with-empty-sequences": Fault(
        "src/raglane/nn/recurrent/request.py",
        "there.shape[0] != inputs.count)",
        "there.shape[0] < inputs.count)",
        "nn/test_torch_layers.py::test_a_pack_on_every_backend",
    ),
    # ---- the choice -----------------------------------------------------------------------------------------------
    "using-is-not-taken-back": Fault(
        "src/raglane/kernels/dispatch.py",
        "    try:\n        yield\n    finally:\n        _override.reset(token)",
        "    yield\n    _override.reset(token)",
        "kernels/test_dispatch.py::test_the_override_ends_with_its_block_where_that_fails",
    ),
    "an-inner-using-ends-the-outer": Fault(
        "src/raglane/kernels/dispatch.py",
        "        _override.reset(token)",
        "        _override.set((AUTO, AUTO))",
        "kernels/test_dispatch.py::test_the_override_ends_with_its_block_and_stays_in_its_thread",
    ),
    # ---- the cpu kernels ------------------------------------------------------------------------------------------
    "the-kept-graph-is-overwritten": Fault(
        "src/raglane/kernels/cpu/gradients.py",
        "return _keeps_graph is not None and not _keeps_graph()",
        "return True",
        "kernels/test_cpu_torch.py::test_backward_twice_through_a_kept_graph",
    ),
    "the-compiled-kept-graph-is-overwritten": Fault(
        "src/raglane/kernels/cpu/operators.py",
        "given, kept, overwrite=False)",
        "given, kept, overwrite=True)",
        _COMPILED,
    ),
    "forward-derivatives-of-the-input-alone": Fault(
        "src/raglane/kernels/cpu/backend.py",
        "if has_tangent(request.tensors()):",
        "if has_tangent((request.values,)):",
        _FORWARD,
    ),
    "torchs-forward-derivatives-of-the-input-alone": Fault(
        "src/raglane/kernels/torch.py",
        "has_tangent(request.tensors())",
        "has_tangent((request.values,))",
        "kernels/test_cpu_torch.py::test_derivatives_forward_where_torch_has_no_rule",
    ),
    "hidden-bias-of-a-gru": Fault(
        "src/raglane/kernels/cpu/matrix.py",
        "torch.cat([sums[: rows - hidden_size], sums[rows:]]) if split else sums.clone()",
        "sums[:rows].clone() if split else sums.clone()",
        "kernels/test_cpu_matrix.py::test_gradients_by_torchs_products[gru]",
    ),
    "the-reverse-weights-gradient": Fault(
        "src/raglane/kernels/cpu/matrix.py",
        "gates = walked.gates[direction, :, : ",
        "gates = walked.gates[0, :, : ",
        "kernels/test_cpu_matrix.py::test_gradients_by_torchs_products[lstm]",
    ),
    "the-reverse-input-gradient-alone": Fault(
        "src/raglane/kernels/cpu/matrix.py",
        "return torch.mm(gates, weight) if total is None else total.addmm_(gates, weight)",
        "return torch.mm(gates, weight)",
        "kernels/test_cpu_matrix.py::test_gradients_by_torchs_products[lstm]",
    ),
    "an-sru-without-the-gradient-of-its-skip": Fault(
        "src/raglane/kernels/cpu/elementwise.py",
        "                grad_values += part\n",
        "                grad_values += 0 * part\n",
        "kernels/test_cpu_matrix.py::test_gradients_by_torchs_products[sru]",
    ),
    "a-saved-tensor-overwritten-in-silence": Fault(
        "src/raglane/kernels/cpu/gradients.py",
        "    torch.autograd.graph.increment_version(tensors)",
        "    del tensors",
        "safety/test_memory.py::test_a_backward_that_failed_half_way_is_not_walked_again",
    ),
    "second-derivatives-cut-off": Fault(
        "src/raglane/kernels/cpu/gradients.py",
        "create_graph=keep, allow_unused=True",
        "create_graph=False, allow_unused=True",
        "kernels/test_cpu_torch.py::test_second_derivatives",
    ),
    "storage-not-looked-at": Fault(
        "src/raglane/kernels/cpu/memory.py",
        "or storage.nbytes() < room + part.storage_offset() * size:",
        "or storage.nbytes() < part.storage_offset() * size:",
        "safety/test_memory.py::test_a_parameter_that_loses_memory_after_a_call_is_refused",
    ),
    "a-weight-that-must-not-be-there": Fault(
        "src/raglane/kernels/cpu/memory.py",
        "if shape is None or storage.nbytes()",
        "if storage.nbytes()",
        "safety/test_memory.py::test_the_operators",
    ),
}
