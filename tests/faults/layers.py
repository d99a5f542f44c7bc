"""Faults in layers and what stands on them: inputs, states, regularisation, resets, poolings, losses, the CRF."""

from __future__ import annotations

from faults.fault import Fault

__all__ = ["FAULTS"]

_ENCODER_DROPOUT = "nn/test_encoder.py::test_dropout_of_every_pooling_is_for_training_only"

FAULTS: dict[str, Fault] = {
    # ---- the encoder and its poolings -----------------------------------------------------------------------------
    "dropout-after-a-pooling-in-evaluation": Fault(
        "src/raglane/nn/encoder.py",
        "else self.dropout(self.pool(out))",
        "else nn.functional.dropout(self.pool(out), self.dropout.p)",
        _ENCODER_DROPOUT,
    ),
    "dropout-of-the-last-state-in-evaluation": Fault(
        "src/raglane/nn/encoder.py",
        "self.dropout(self.recurrent.summary(out, state))",
        "nn.functional.dropout(self.recurrent.summary(out, state), self.dropout.p)",
        _ENCODER_DROPOUT,
    ),
    "dropout-without-pooling-in-evaluation": Fault(
        "src/raglane/nn/encoder.py",
        "out.map(self.dropout) if self.pool is None",
        "out.map(lambda values: nn.functional.dropout(values, self.dropout.p)) if self.pool is None",
        _ENCODER_DROPOUT,
    ),
    "attention-without-tanh": Fault(
        "src/raglane/nn/pooling.py",
        "self.query(torch.tanh(self.hidden(values)))",
        "self.query(self.hidden(values))",
        "nn/test_pooling.py::test_against_a_loop",
    ),
    # ---- states, inputs, options ----------------------------------------------------------------------------------
    "a-carried-state-keeps-its-graph": Fault(
        "src/raglane/nn/recurrent/carry.py",
        "torch.where(is_fresh, new, old.detach())",
        "torch.where(is_fresh, new, old)",
        "data/test_carried_state.py::test_carrying_detaches",
    ),
    "no-state-is-a-state-of-zeros": Fault(
        "src/raglane/nn/recurrent/request.py",
        "not isinstance(state, tuple) or not state or",
        "not isinstance(state, tuple) or",
        "nn/test_plans.py::test_a_state_that_is_none_is_refused_where_no_request_is_made",
    ),
    "frozen-whatever-order-weights-are-read-in": Fault(
        "src/raglane/nn/recurrent/kept.py",
        "                    or part.stride() != strides\n",
        "",
        "nn/test_freeze.py::test_a_change_that_is_seen_ends_it",
    ),
    "a-state-in-the-packs-order": Fault(
        "src/raglane/kernels/torch.py",
        "part.index_select(1, back) for part in final",
        "part.index_select(1, there) for part in final",
        "nn/test_torch_layers.py::test_a_pack_on_every_backend",
    ),
    "a-lone-sequences-batch-is-a-choice": Fault(
        "src/raglane/nn/recurrent/request.py",
        "    known: Result | None = None\n",
        "    known: Result | None = None\n    if len(inputs.batch) == 1:\n"
        "        reference = __import__('raglane.kernels.dispatch').kernels.dispatch.BACKENDS['reference']\n"
        "        plan = __import__('dataclasses').replace(plan, backend=reference, known=None)\n",
        "kernels/test_dispatch.py::test_auto_chooses_alike_for_every_batch",
    ),
    "a-state-not-in-the-packs-order": Fault(
        "src/raglane/kernels/torch.py",
        "part.index_select(1, there) for part in state",
        "part for part in state",
        "nn/test_torch_layers.py::test_a_pack_on_every_backend",
    ),
    "regularised-in-evaluation": Fault(
        "src/raglane/nn/recurrent/request.py",
        "layer.training,\n        need_output,\n        need_states",
        "True,\n        need_output,\n        need_states",
        "nn/test_regularisation.py::test_evaluation_takes_the_mean_of_zoneout",
    ),
    "a-plan-that-outlives-a-projection": Fault(
        "src/raglane/nn/recurrent/plan.py",
        'getattr(layer, "proj_size", 0),',
        "0,",
        "safety/test_memory.py::test_changed_attributes",
    ),
    "a-plan-that-outlives-the-number-of-weights": Fault(
        "src/raglane/nn/recurrent/plan.py",
        "        len(weights),\n        getattr",
        "        getattr",
        "nn/test_plans.py",
    ),
    "a-plan-that-outlives-an-override": Fault(
        "src/raglane/nn/recurrent/plan.py",
        "dispatch.override(),",
        "None,",
        "nn/test_plans.py",
    ),
    "a-plan-that-outlives-where-a-cell-begins": Fault(
        "src/raglane/nn/recurrent/plan.py",
        "layer._has_own_initial(),\n        data.dtype",
        "layer.initial_state,\n        data.dtype",
        "nn/test_plans.py",
    ),
    "what-is-known-forgets-what-is-drawn": Fault(
        "src/raglane/nn/recurrent/plan.py",
        " or layer.regularisation.acts(layer.training):\n        return None",
        ":\n        return None",
        "nn/test_plans.py",
    ),
    "what-is-known-is-not-looked-at": Fault(
        "src/raglane/kernels/cpu/recurrence.py",
        "    if not storages:\n        return None\n",
        "",
        "safety/test_memory.py::test_offsets_that_were_written_to safety/test_memory.py::test_changed_attributes "
        "nn/test_plans.py::test_what_is_known_needs_no_request",
    ),
    "sizes-that-are-no-ints": Fault(
        "src/raglane/nn/recurrent/plan.py",
        " or not (type(width) is type(size) is type(layers) is int)",
        "",
        "safety/test_memory.py::test_changed_attributes",
    ),
    "the-state-of-a-bidirectional-reset": Fault(
        "src/raglane/nn/recurrent/resets.py",
        "final[1::2].index_select(1, self.first)",
        "final[1::2].index_select(1, self.last)",
        "nn/test_resets.py::test_any_marks",
    ),
    "an-empty-sequence-resets-its-neighbour": Fault(
        "src/raglane/nn/recurrent/resets.py",
        "torch.isin(starts, marked) & (lengths > 0)",
        "torch.isin(starts, marked)",
        "nn/test_resets.py::test_any_marks",
    ),
    "lengths-state-of-length": Fault(
        "src/raglane/nn/recurrent/initial_state.py",
        ".log1p()",
        ".clamp(min=1).log()",
        "nn/test_initial_state.py::test_as_if_it_were_given",
    ),
    "the-same-mask-for-all-sequences": Fault(
        "src/raglane/kernels/layers.py",
        "F.dropout(values.new_ones(request.count, values.shape[1]), request.input_dropout)",
        "F.dropout(values.new_ones(1, values.shape[1]), request.input_dropout).expand(request.count, -1)",
        "nn/test_regularisation_by_hand.py::test_a_naive_loop_under_the_same_masks",
    ),
    "dropout-on-the-first-layers-input": Fault(
        "src/raglane/kernels/layers.py",
        "if index and request.dropout > 0:",
        "if request.dropout > 0:",
        "nn/test_regularisation_by_hand.py::test_a_naive_loop_under_the_same_masks",
    ),
    "zoneout-of-the-other-state": Fault(
        "src/raglane/nn/recurrent/regularisation.py",
        "zip(request.initial(), shares, strict=True)",
        "zip(request.initial(), shares[::-1], strict=True)",
        "nn/test_regularisation_masks.py::test_the_share_of_units_held",
    ),
    "chrono-closes-the-forget-gate": Fault(
        "src/raglane/nn/init.py",
        "block.copy_(-forget)",
        "block.copy_(forget)",
        "nn/test_init.py::test_chrono",
    ),
    "a-forget-bias-twice": Fault(
        "src/raglane/nn/init.py",
        "nn.init.zeros_(second.detach()[rows])",
        "nn.init.ones_(second.detach()[rows])",
        "nn/test_init.py::test_forget_bias",
    ),
    # ---- losses and the CRF ---------------------------------------------------------------------------------------
    "what-is-ignored-is-counted": Fault(
        "src/raglane/nn/losses/classes.py",
        "counted = classes != ignore_index",
        "counted = classes != ignore_index + 1",
        "nn/test_losses.py::test_reductions_by_hand nn/test_losses.py::test_all_ignored_is_zero",
    ),
    "an-ignored-sequence-is-a-sequence": Fault(
        "src/raglane/nn/losses/comparison.py",
        "shares = (elements != 0).to(summed.dtype)",
        "shares = torch.ones_like(elements).to(summed.dtype)",
        "nn/test_losses.py::test_a_sequence_that_is_ignored_does_not_count_as_one",
    ),
    "weights-of-sequences-forgotten": Fault(
        "src/raglane/nn/losses/comparison.py",
        "shares = shares * self.sequence_weights",
        "shares = shares * (self.sequence_weights != 0)",
        "nn/test_losses.py::test_reductions_by_hand",
    ),
    "ctc-skips-equal-labels": Fault(
        "src/raglane/nn/losses/ctc.py",
        "is_label & (position > 2) & (label != label.roll(2))",
        "is_label & (position > 2)",
        "nn/test_losses_ctc.py::test_against_every_path",
    ),
    "frozen-whatever-the-weights-became": Fault(
        "src/raglane/nn/recurrent/kept.py",
        "                    part._version != version\n                    or part.data_ptr()",
        "                    part.data_ptr()",
        "nn/test_freeze.py::test_a_change_that_is_seen_ends_it",
    ),
    "frozen-wherever-the-weights-went": Fault(
        "src/raglane/nn/recurrent/kept.py",
        "                    or part.data_ptr() != address\n",
        "",
        "nn/test_freeze.py::test_a_change_that_is_seen_ends_it",
    ),
    "frozen-under-autocast": Fault(
        "src/raglane/kernels/contract.py",
        "weights=convert(self.weights), packed=()",
        "weights=convert(self.weights)",
        "nn/test_freeze.py::test_what_casts_or_compiles_reads_the_weights_themselves",
    ),
    "int8-while-training": Fault(
        "src/raglane/nn/recurrent/plan.py",
        "kept.of_int8 and layer.training else kept",
        "kept.ended else kept",
        "nn/test_freeze_int8.py::test_other_calls_read_the_float32_weights",
    ),
    "nothing-is-frozen": Fault(
        "src/raglane/nn/recurrent/kept.py",
        "return packed if place == len(all_known) else ()",
        "return ()",
        "nn/test_freeze.py::test_a_frozen_layer_gives_the_same_bits_without_its_weights",
    ),
    "crf-without-its-end": Fault(
        "src/raglane/nn/crf/recursions.py",
        "return taken.index_add_(0, steps.sequence, _log_sum_exp(final).to(SUMS))",
        "return taken.index_add_(0, steps.sequence, _log_sum_exp(final - scores.end).to(SUMS))",
        "nn/test_crf.py::test_equals_the_sum_over_all_paths",
    ),
    "crf-transitions-turned-around": Fault(
        "src/raglane/nn/crf/recursions.py",
        "pairs.t().contiguous()",
        "pairs.contiguous()",
        "nn/test_crf.py::test_gradients_and_second_gradients",
    ),
    "frozen-past-a-fused-optimizer": Fault(
        "src/raglane/nn/recurrent/kept.py",
        "    _hear_of_steps()\n    _kept[layer] = kept",
        "    _kept[layer] = kept",
        "nn/test_freeze.py::test_a_change_that_is_seen_ends_it",
    ),
    "frozen-where-other-weights-lie": Fault(
        "src/raglane/nn/recurrent/kept.py",
        "part.is_neg(), part.detach()) for part in weights",
        "part.is_neg(), None) for part in weights",
        "nn/test_freeze.py::test_no_other_weights_come_to_lie_where_packed_ones_were",
    ),
    "steps-first-are-a-view": Fault(
        "src/raglane/nn/recurrent/inputs.py",
        "padded if batch_first else padded.transpose(0, 1).contiguous()",
        "padded if batch_first else padded.transpose(0, 1)",
        "nn/test_torch_layers.py::test_a_tensor_without_lengths_is_torchs",
    ),
    "a-bound-rounded-to-the-nearest": Fault(
        "src/raglane/nn/recurrent/elementwise_layers.py",
        "bound = bound // step * step",
        "bound = round(bound / step) * step",
        "nn/test_cell_layers.py::test_a_bound_is_rounded_inwards",
    ),
    "a-bound-forgets-autocast": Fault(
        "src/raglane/nn/recurrent/elementwise_layers.py",
        "casts = numbers.dtype is not torch.float64 and",
        "casts = False and",
        "nn/test_cell_layers.py::test_a_bound_is_rounded_inwards",
    ),
}
