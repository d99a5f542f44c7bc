"""Calls of the public face with the right arguments, and things that hardly any argument is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from raglane import Ragged, plot
from raglane.data import (
    BatchLimit,
    BatchSampler,
    Columns,
    EpochOrder,
    Preprocessor,
    Records,
    SequenceDataset,
    TBPTTSampler,
    read,
    split,
)
from raglane.data.records import offsets_of
from raglane.nn import losses

pa = pytest.importorskip("pyarrow")

__all__ = [
    "LENGTHS",
    "OFFSETS",
    "ONES",
    "VALUES",
    "Call",
    "batch_of",
    "calls_of_batches",
    "calls_of_data",
    "calls_of_nn",
    "calls_of_packing",
    "calls_of_plot",
    "calls_of_preprocessor",
    "calls_of_ragged",
    "things",
]

Call = tuple[Callable[..., Any], dict[str, Any]]


class _Odd:
    """Something that does not even say what it is."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


def things() -> list[Any]:
    """What hardly any argument is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
        strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])
        quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    return [
        *(None, True, -1, 1.5, math.nan, math.inf, 2**62, 10**30, 10**5000, "", "x", b"x", object(), _Odd(), int),
        *([], {}, (), set(), [1.5], ["a"], [None], [[1], [1, 2]], [2**70], [-1], [math.nan], torch.float32),
        *(np.array([1, "a", None], dtype=object), np.array(["a"]), np.array([1.5]), np.array(3), np.zeros((2, 2))),
        *(np.array([2**63], np.uint64), np.array([2**64 - 1], np.uint64), np.array(["2020"], "M8[D]")),
        *(torch.tensor(3), torch.tensor([1.5]), torch.tensor([math.nan]), torch.tensor([-1]), torch.tensor([99])),
        *(torch.tensor([2**62, 2**62]), torch.tensor([0, 2**62]), torch.tensor([True]), torch.zeros(2, 2)),
        *(torch.zeros(0), torch.zeros(3, dtype=torch.complex64), torch.tensor([0, 5, 3]), torch.tensor([1, 3])),
        *(torch.tensor([0, 2, 1, 3]), torch.zeros(3, 2).to_sparse(), torch.zeros(3, device="meta")),
        *(nested, strided, quantized, pa.array([1, 2]), pa.array([[1], None]), Ragged([[1, 2], [3]])),
    ]


VALUES, OFFSETS, LENGTHS = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 2, 2, 3]), torch.tensor([2, 0, 1])
ONES = torch.ones(3)


def batch_of(*features: int) -> Ragged:
    return Ragged.from_flat(torch.randn(3, *features), lengths=LENGTHS)


def calls_of_ragged() -> dict[str, Call]:
    batch, whole = batch_of(), Ragged.from_flat(torch.tensor([1, 2, 3]), lengths=LENGTHS)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    packed = rl.packing.pack_sequence([torch.ones(2), torch.ones(1)])
    mask = torch.ones(3, 2, dtype=torch.bool)
    calls: dict[str, Call] = {
        "Ragged": (Ragged, {"sequences": [VALUES]}),
        "from_flat": (Ragged.from_flat, {"values": VALUES, "offsets": OFFSETS}),
        "from_flat, lengths": (Ragged.from_flat, {"values": VALUES, "lengths": LENGTHS}),
        "from_padded": (
            Ragged.from_padded,
            {"padded": torch.zeros(3, 2), "lengths": LENGTHS, "batch_first": True, "padding_side": "right"},
        ),
        "from_padded, mask": (Ragged.from_padded, {"padded": torch.zeros(3, 2), "mask": mask, "batch_first": True}),
        "from_packed": (Ragged.from_packed, {"packed": packed}),
        "from_nested": (Ragged.from_nested, {"nested": nested}),
        "from_arrow": (Ragged.from_arrow, {"array": pa.array([[1]])}),
        "order_by_length": (batch.order_by_length, {"descending": False}),
        "shift": (batch.shift, {"steps": 1, "fill": 0.0}),
        "spread": (batch.spread, {"per_sequence": ONES}),
        "truncate": (batch.truncate, {"length": 1}),
        "windows": (batch.windows, {"size": 2, "step": 1}),
        "concat": (lambda other: batch.concat(other), {"other": batch}),
        "select": (batch.select, {"index": torch.tensor([0])}),
        "[]": (lambda index: batch[index], {"index": 0}),
        "[:]": (lambda start, stop, step: batch[start:stop:step], {"start": 0, "stop": 2, "step": 1}),
        "to": (lambda what: batch.to(what), {"what": torch.float64}),
        "to_padded": (batch.to_padded, {"batch_first": True, "padding_value": 0.0, "total_length": 3}),
        "to_padded, integers": (whole.to_padded, {"padding_value": 0}),
        "first, integers": (whole.first, {"empty": 0}),
    }
    for name in ("first", "last", "mean", "max", "min", "logsumexp"):
        calls[name] = getattr(batch, name), {"empty": 0.0}
    return calls


def calls_of_packing() -> dict[str, Call]:
    packing = rl.packing
    packed = packing.pack_sequence([torch.ones(2), torch.ones(1)])
    padded: dict[str, Any] = {"lengths": [2, 1, 1], "batch_first": False}
    return {
        "invert_permutation": (packing.invert_permutation, {"permutation": torch.tensor([1, 0])}),
        "pack_padded_sequence": (
            packing.pack_padded_sequence,
            {"input": torch.zeros(2, 3), **padded, "enforce_sorted": True},
        ),
        "pack_sequence": (packing.pack_sequence, {"sequences": [VALUES], "enforce_sorted": True}),
        "pad_packed_sequence": (
            packing.pad_packed_sequence,
            {"sequence": packed, "batch_first": False, "padding_value": 0.0, "total_length": 3},
        ),
        "pad_sequence": (
            packing.pad_sequence,
            {"sequences": [VALUES], "batch_first": False, "padding_value": 0.0, "padding_side": "right"},
        ),
        "unpad_sequence": (packing.unpad_sequence, {"padded_sequences": torch.zeros(2, 3), **padded}),
        "unpack_sequence": (packing.unpack_sequence, {"packed_sequences": packed}),
    }


def calls_of_data() -> dict[str, Call]:
    records = Records(np.zeros((3, 1), np.float32), offsets_of([2, 0, 1]), labels=("a", "b", "a"), channels=("x0",))
    dataset = SequenceDataset(VALUES, OFFSETS, torch.tensor([0, 1, 0]))
    return {
        "collate": (rl.collate, {"samples": [VALUES]}),
        "collate, two": (lambda sample: rl.collate([sample, sample]), {"sample": VALUES}),
        "collate, mixed": (lambda sample: rl.collate([VALUES, sample]), {"sample": VALUES}),
        "Columns": (
            Columns,
            {"task": "tag", "need_labels": True, "sequence": "x", "label": "y", "id": "i", "time": "t", "features": ()},
        ),
        "Records": (
            Records,
            {
                "values": np.zeros((3, 1), np.float32),
                "offsets": offsets_of([2, 0, 1]),
                "ids": ("a", "b", "c"),
                "labels": ("a", "b", "a"),
                "tags": np.array(["a"] * 3, dtype=object),
                "channels": ("x0",),
                "source": Path("x"),
                "notes": (),
                "columns": Columns(),
            },
        ),
        "Records.select": (records.select, {"index": [0]}),
        "offsets_of": (offsets_of, {"lengths": [1]}),
        "SequenceDataset": (
            SequenceDataset,
            {
                "values": VALUES,
                "offsets": OFFSETS,
                "targets": torch.tensor([0, 1, 0]),
                "per_element": False,
                "ids": (0, 1, 2),
            },
        ),
        "SequenceDataset[]": (lambda index: dataset[index], {"index": 0}),
        "SequenceDataset.subset": (dataset.subset, {"index": [0]}),
        "split": (split, {"records": records, "fraction": 0.5, "seed": 0, "stratify": True}),
        "SequenceDataset.cut": (dataset.cut, {"longest": 1}),
        "read": (read, {"path": __file__, "columns": None, "format": "csv"}),
    }


def calls_of_preprocessor() -> dict[str, Call]:
    records = Records(np.zeros((3, 1), np.float32), offsets_of([2, 0, 1]), labels=("a", "b", "a"), channels=("x0",))
    fitted = Preprocessor.fit(records, task="classify")
    return {
        "Preprocessor": (
            Preprocessor,
            {
                "task": "classify",
                "channels": ("a",),
                "mean": (0.0,),
                "std": (1.0,),
                "vocabulary": None,
                "labels": ("a",),
                "missing": "error",
            },
        ),
        "Preprocessor.fit": (
            Preprocessor.fit,
            {
                "records": records,
                "task": "classify",
                "missing": "error",
                "standardize": True,
                "max_vocabulary": 3,
                "minimum_count": 1,
            },
        ),
        "Preprocessor.apply": (fitted.apply, {"records": records, "require_targets": True}),
        "Preprocessor.from_config": (Preprocessor.from_config, {"config": fitted.to_config()}),
    }


def calls_of_batches() -> dict[str, Call]:
    batches = BatchSampler([1, 2], BatchLimit(sequences=1))
    return {
        "BatchLimit": (BatchLimit, {"sequences": 1, "elements": 2, "padded": 3, "too_long": "drop"}),
        "EpochOrder.grouped": (EpochOrder.grouped, {"pool": 2, "noise": 0.1}),
        "EpochOrder.windows": (EpochOrder.windows, {"sequences": 2, "by_length": True, "noise": 0.1}),
        "BatchSampler": (
            lambda **given: list(BatchSampler(**given)),
            {
                "lengths": [1, 2],
                "limit": BatchLimit(sequences=2),
                "order": EpochOrder.random(),
                "seed": 0,
                "ranks": 2,
                "rank": 1,
                "largest_first": False,
            },
        ),
        "set_epoch": (batches.set_epoch, {"epoch": 0}),
        "state_dict": (batches.state_dict, {"done": 1}),
        "load_state_dict": (batches.load_state_dict, {"state": batches.state_dict()}),
        "load_state_dict, place": (
            lambda **given: batches.load_state_dict(batches.state_dict() | given),
            {"done": 0, "epoch": 0, "pool": 0, "before": 0},
        ),
        "TBPTTSampler": (
            TBPTTSampler,
            {"data": batch_of(), "batch_size": 1, "steps": 1, "targets": ONES, "shuffle": True, "seed": 0},
        ),
    }


def calls_of_nn() -> dict[str, Call]:
    one, four = batch_of(), batch_of(4)
    tags = Ragged.from_flat(torch.tensor([0, 1, 3]), lengths=LENGTHS)
    labels = Ragged.from_flat(torch.tensor([1, 2]), lengths=[1, 0, 1])
    weighed: dict[str, Any] = {"weights": ONES, "reduction": "element"}
    numbers: dict[str, Any] = {"input": one, "target": one, **weighed}
    classes: dict[str, Any] = {"input": four, "target": tags, "weight": torch.ones(4), "ignore_index": -100, **weighed}
    pooling, attention, crf = rl.nn.Pooling("mean"), rl.nn.AttentionPooling(4), rl.nn.CRF(4)
    return {
        "cross_entropy": (losses.cross_entropy, {**classes, "label_smoothing": 0.0}),
        "nll_loss": (losses.nll_loss, classes),
        "mse_loss": (losses.mse_loss, numbers),
        "l1_loss": (losses.l1_loss, numbers),
        "huber_loss": (losses.huber_loss, {**numbers, "delta": 1.0}),
        "binary_cross_entropy_with_logits": (
            losses.binary_cross_entropy_with_logits,
            {**numbers, "target": one.map(torch.sigmoid), "pos_weight": torch.ones(1)},
        ),
        "ctc_loss": (
            losses.ctc_loss,
            {"log_probs": four, "targets": labels, "blank": 0, "zero_infinity": False, **weighed},
        ),
        "Pooling": (rl.nn.Pooling, {"name": "mean"}),
        "Pooling()": (pooling, {"batch": one}),
        "AttentionPooling": (rl.nn.AttentionPooling, {"features": 4, "heads": 2}),
        "AttentionPooling()": (attention, {"batch": four}),
        "CRF": (rl.nn.CRF, {"num_tags": 4}),
        "CRF()": (crf, {"emissions": four, "tags": tags, "reduction": "element"}),
        "CRF.decode": (crf.decode, {"emissions": four}),
        "CRF.marginals": (crf.marginals, {"emissions": four}),
        "CRF.log_partition": (crf.log_partition, {"emissions": four}),
        "CRF.log_likelihood": (crf.log_likelihood, {"emissions": four, "tags": tags}),
    }


def calls_of_plot() -> dict[str, Call]:
    half, labels = Ragged.from_flat(ONES / 2, lengths=LENGTHS), ["ab", "", "c"]
    kernel = {"name": "a", "intensity": 1.0, "rate": 1e9}
    return {
        "padded": (plot.padded, {"lengths": LENGTHS, "labels": labels, "axes": None}),
        "packed": (plot.packed, {"lengths": LENGTHS, "labels": labels, "axes": None}),
        "lanes": (plot.lanes, {"lengths": LENGTHS, "lanes": 2, "threads": 1, "axes": None}),
        "schedules": (plot.schedules, {"lengths": LENGTHS, "lanes": 2, "axes": None}),
        "histogram": (plot.histogram, {"lengths": LENGTHS, "batch_size": 1, "axes": None}),
        "waste": (plot.waste, {"lengths": LENGTHS, "batch_sizes": [1], "seed": 0, "axes": None}),
        "times": (plot.times, {"rows": [{"method": "a", "fill": 0.5, "seconds": 1e-6}], "axes": None}),
        "a row of times": (lambda **row: plot.times([row]), {"method": "a", "fill": 0.5, "seconds": 1e-6}),
        "roofline": (plot.roofline, {"kernels": [kernel], "peak": 1e11, "bandwidth": 1e10, "axes": None}),
        "attention": (plot.attention, {"weights": half, "labels": labels, "axes": None}),
        "gates": (plot.gates, {"activity": {"forget": half}, "labels": labels, "axes": None}),
        "norms": (plot.norms, {"states": {"h": half}, "labels": labels, "axes": None}),
        "theme": (lambda name: plot.theme(name).__enter__(), {"name": "light"}),
    }
