"""Wrong arguments raise the library's errors, each with the argument, its value, the rule and the
fix.

Public functions are called with one argument replaced by objects of many kinds. An object may be
accepted (``None`` is often a default), but no other error may be raised.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from made_datasets import dataset
from raglane import Ragged, plot, segments
from raglane.data import (
    BatchLimit,
    BatchSampler,
    Columns,
    EpochOrder,
    Preprocessor,
    TBPTTSampler,
    read,
    split,
)
from raglane.data.records import offsets_of
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError

pa = pytest.importorskip("pyarrow")

Call = partial[Any]


class _Odd:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def things() -> list[Any]:
    """Return objects of many kinds that few arguments accept."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
        strided = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)])
        quantized = torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8)
    return [
        *(
            None,
            True,
            -1,
            1.5,
            math.nan,
            math.inf,
            2**62,
            10**30,
            10**5000,
            "",
            "x",
            b"x",
            object(),
            _Odd(),
            int,
        ),
        *(
            [],
            {},
            (),
            set(),
            [1.5],
            ["a"],
            [None],
            [[1], [1, 2]],
            [2**70],
            [-1],
            [math.nan],
            torch.float32,
        ),
        *(
            np.array([1, "a", None], dtype=object),
            np.array(["a"]),
            np.array([1.5]),
            np.array(3),
            np.zeros((2, 2)),
        ),
        *(
            np.array([2**63], np.uint64),
            np.array([2**64 - 1], np.uint64),
            np.array(["2020"], "M8[D]"),
        ),
        *(
            torch.tensor(3),
            torch.tensor([1.5]),
            torch.tensor([math.nan]),
            torch.tensor([-1]),
            torch.tensor([99]),
        ),
        *(
            torch.tensor([2**62, 2**62]),
            torch.tensor([0, 2**62]),
            torch.tensor([True]),
            torch.zeros(2, 2),
        ),
        *(
            torch.zeros(0),
            torch.zeros(3, dtype=torch.complex64),
            torch.tensor([0, 5, 3]),
            torch.tensor([1, 3]),
        ),
        *(torch.tensor([0, 2, 1, 3]), torch.zeros(3, 2).to_sparse(), torch.zeros(3, device="meta")),
        *(
            nested,
            strided,
            quantized,
            pa.array([1, 2]),
            pa.array([[1], None]),
            Ragged([[1, 2], [3]]),
        ),
    ]


VALUES, OFFSETS, LENGTHS = (
    torch.tensor([1.0, 2.0, 3.0]),
    torch.tensor([0, 2, 2, 3]),
    torch.tensor([2, 0, 1]),
)
ONES = torch.ones(3)


def batch_of(*features: int) -> Ragged:
    return Ragged.from_flat(torch.randn(3, *features), lengths=LENGTHS)


def calls_of_ragged() -> list[Call]:
    batch, whole = batch_of(), Ragged.from_flat(torch.tensor([1, 2, 3]), lengths=LENGTHS)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    padded, mask = torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.bool)
    names = ("mean", "amax", "amin", "logsumexp", "std")
    return [
        partial(Ragged, sequences=[VALUES]),
        partial(Ragged.from_flat, values=VALUES, offsets=OFFSETS),
        partial(Ragged.from_flat, values=VALUES, lengths=LENGTHS),
        partial(
            Ragged.from_padded,
            padded=padded,
            lengths=LENGTHS,
            batch_first=True,
            padding_side="right",
        ),
        partial(Ragged.from_padded, padded=padded, mask=mask, batch_first=True),
        partial(
            Ragged.from_packed, packed=rl.packing.pack_sequence([torch.ones(2), torch.ones(1)])
        ),
        partial(Ragged.from_nested, nested=nested),
        partial(Ragged.from_arrow, array=pa.array([[1]])),
        partial(batch.order_by_length, descending=False),
        partial(batch.shift, steps=1, fill_value=0.0),
        partial(batch.broadcast, per_sequence=ONES),
        partial(batch.truncate, length=1),
        partial(batch.windows, size=2, stride=1),
        partial(lambda other: batch.concat(other), other=batch),
        partial(batch.select, index=torch.tensor([0])),
        partial(lambda index: batch[index], index=0),
        partial(lambda start, stop, step: batch[start:stop:step], start=0, stop=2, step=1),
        partial(lambda what: batch.to(what), what=torch.float64),
        partial(batch.to_padded, batch_first=True, padding_value=0.0, total_length=3),
        partial(whole.to_padded, padding_value=0),
        partial(whole.first, empty=0),
        partial(batch.first, empty=0.0),
        partial(batch.last, empty=0.0),
        *(partial(getattr(batch, name), 1, empty=0.0) for name in names),
    ]


def calls_of_packing() -> list[Call]:
    packing, rows = rl.packing, torch.zeros(2, 3)
    packed = packing.pack_sequence([torch.ones(2), torch.ones(1)])
    padded: dict[str, Any] = {"lengths": [2, 1, 1], "batch_first": False}
    padding: dict[str, Any] = {"batch_first": False, "padding_value": 0.0}
    return [
        partial(packing.invert_permutation, permutation=torch.tensor([1, 0])),
        partial(packing.pack_padded_sequence, input=rows, **padded, enforce_sorted=True),
        partial(packing.pack_sequence, sequences=[VALUES], enforce_sorted=True),
        partial(packing.pad_packed_sequence, sequence=packed, **padding, total_length=3),
        partial(packing.pad_sequence, sequences=[VALUES], **padding, padding_side="right"),
        partial(packing.unpad_sequence, padded_sequences=rows, **padded),
        partial(packing.unpack_sequence, packed_sequences=packed),
    ]


def calls_of_data() -> list[Call]:
    data = dataset(
        np.zeros((3, 1), np.float32),
        offsets_of([2, 0, 1]),
        labels=("a", "b", "a"),
        channels=("x0",),
    )
    fitted = Preprocessor.fit(data, task="classify")
    scaling: dict[str, Any] = {
        "task": "classify",
        "channels": ("a",),
        "mean": (0.0,),
        "std": (1.0,),
    }
    learned: dict[str, Any] = {"task": "classify", "missing": "raise", "standardize": True}
    return [
        partial(rl.collate, samples=[VALUES]),
        partial(lambda sample: rl.collate([sample, sample]), sample=VALUES),
        partial(lambda sample: rl.collate([VALUES, sample]), sample=VALUES),
        partial(
            Columns,
            task="tag",
            need_labels=True,
            sequence="x",
            label="y",
            id="i",
            time="t",
            features=(),
        ),
        partial(offsets_of, lengths=[1]),
        partial(lambda index: data[index], index=0),
        partial(data.subset, index=[0]),
        partial(split, data=data, fraction=0.5, seed=0, stratify=True),
        partial(data.chunk, max_length=1),
        partial(read, source=__file__, columns=None, format="csv"),
        partial(Preprocessor, **scaling, vocabulary=None, labels=("a",), missing="raise"),
        partial(Preprocessor.fit, data=data, **learned, max_vocabulary=3, min_count=1),
        partial(fitted.apply, data=data, require_targets=True),
        partial(Preprocessor.from_config, config=fitted.to_config()),
    ]


def calls_of_batches() -> list[Call]:
    limit = BatchLimit(sequences=1)
    batches = BatchSampler([1, 2], limit)
    sampler: dict[str, Any] = {
        "lengths": [1, 2],
        "batch_size": 1,
        "order": EpochOrder.random(),
        "max_elements": 2,
        "max_padded": 3,
        "too_long": "drop",
        "bucket": False,
        "num_replicas": 2,
        "rank": 1,
    }
    return [
        partial(BatchLimit, sequences=1, elements=2, padded=3, too_long="drop"),
        partial(EpochOrder.bucketed, pool=2, noise=0.1),
        partial(EpochOrder.windows, sequences=2, by_length=True, noise=0.1),
        partial(
            lambda **given: list(BatchSampler(**given)), **sampler, seed=0, largest_first=False
        ),
        partial(batches.set_epoch, epoch=0),
        partial(batches.state_dict, done=1),
        partial(batches.load_state_dict, state=batches.state_dict()),
        partial(
            lambda **state: batches.load_state_dict(batches.state_dict() | state),
            done=0,
            epoch=0,
            pool=0,
            before=0,
        ),
        partial(
            TBPTTSampler, data=batch_of(), batch_size=1, steps=1, targets=ONES, shuffle=True, seed=0
        ),
    ]


def calls_of_nn() -> list[Call]:
    one, four = batch_of(), batch_of(4)
    log_probs = four.map(lambda values: values.log_softmax(-1))
    tags = Ragged.from_flat(torch.tensor([0, 1, 3]), lengths=LENGTHS)
    labels = Ragged.from_flat(torch.tensor([1, 2]), lengths=[1, 0, 1])
    weighed: dict[str, Any] = {"sample_weight": ONES, "reduction": "mean"}
    crf = rl.nn.CRF(4)
    fits, search = (
        Ragged.from_flat(torch.tensor([1, 2]), lengths=[1, 0, 1]),
        rl.transduction.CTCBeamSearch(),
    )
    limits: dict[str, Any] = {"beam_size": 2, "blank": 0, "n_best": 1, "tokens_per_step": 2}
    return [
        partial(
            rl.transduction.ctc_loss,
            log_probs=log_probs,
            targets=labels,
            blank=0,
            zero_infinity=False,
            **weighed,
        ),
        partial(rl.nn.Pooling, name="mean"),
        partial(rl.nn.Pooling("mean"), batch=one),
        partial(rl.nn.AttentionPooling, embed_dim=4, num_heads=2, bias=True),
        partial(rl.nn.AttentionPooling(4), batch=four),
        partial(rl.nn.Attention, embed_dim=4, num_heads=2, kdim=3, dropout=0.1),
        partial(rl.nn.Attention(4), query=four, memory=four),
        partial(rl.nn.CRF, num_tags=4),
        partial(crf, emissions=four, tags=tags, reduction="mean"),
        partial(crf.loss, emissions=four, tags=tags, reduction="mean"),
        partial(crf.score, emissions=four, tags=tags),
        partial(crf.decode, emissions=four),
        partial(crf.marginals, emissions=four),
        partial(crf.log_partition, emissions=four),
        partial(crf.log_likelihood, emissions=four, tags=tags),
        partial(
            rl.transduction.CTCBeamSearch, **limits, scorer=None, scorer_weight=1.0, token_bonus=0.0
        ),
        partial(search, log_probs=log_probs, state=search(log_probs).state),
        partial(rl.transduction.ctc_greedy_search, log_probs=log_probs, blank=0),
        partial(rl.transduction.ctc_align, log_probs=log_probs, targets=fits, blank=0),
        partial(rl.transduction.NGram, sequences=labels, num_tokens=4, n=2),
        partial(rl.transduction.NGram([[1]], 4), prefixes=labels, tokens=torch.tensor([1, 2, 3])),
        partial(rl.transduction.soft_dtw, a=four, b=four, gamma=1.0),
        partial(rl.transduction.edit_distance, hypotheses=labels, references=tags),
    ]


def calls_of_plot() -> list[Call]:
    half, labels = Ragged.from_flat(ONES / 2, lengths=LENGTHS), ["ab", "", "c"]
    return [
        partial(plot.padded, lengths=LENGTHS, labels=labels, axes=None),
        partial(plot.packed, lengths=LENGTHS, labels=labels, axes=None),
        partial(plot.lanes, lengths=LENGTHS, lanes=2, threads=1, axes=None),
        partial(plot.schedules, lengths=LENGTHS, lanes=2, axes=None),
        partial(plot.histogram, lengths=LENGTHS, batch_size=1, axes=None),
        partial(plot.waste, lengths=LENGTHS, batch_sizes=[1], seed=0, axes=None),
        partial(plot.attention, weights=half, labels=labels, axes=None),
        partial(plot.gates, activity={"forget": half}, labels=labels, axes=None),
        partial(plot.norms, states={"h": half}, labels=labels, axes=None),
        partial(lambda name: plot.theme(name).__enter__(), name="light"),
    ]


def _faults(call: Call) -> Iterator[str]:
    """Yield the errors that are neither the library's nor an IndexError with a fix."""
    for name in call.keywords:
        for thing in things():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of other libraries, about the objects
                    call(**{name: thing})
            except RaglaneError as error:
                message = str(error)
                if not re.fullmatch(r".+ must be .+, got .+\. .+\.", message):
                    yield f"{name}: a message that does not teach: {message}"
            except IndexError as error:
                if " must be " not in str(error):
                    yield f"{name}: an IndexError that does not teach: {error}"
            except Exception as error:
                kind = type(thing).__name__
                yield f"{name}: a {kind} gives {type(error).__name__}: {str(error)[:100]}"


@pytest.mark.parametrize(
    "calls",
    [
        calls_of_ragged,
        calls_of_packing,
        calls_of_data,
        calls_of_batches,
        calls_of_nn,
        calls_of_plot,
    ],
)
def test_bad_arguments_are_refused_by_the_librarys_own_errors(
    calls: Callable[[], list[Call]],
) -> None:
    for call in calls():
        if call.func is not read:
            call()  # the original arguments are valid
        faults = list(_faults(call))
        assert not faults, (call.func, faults[:5])


def test_offsets_that_do_not_describe_the_values_never_reach_torch() -> None:
    """Torch writes beyond its memory if repeats do not add up to the given size."""
    for wrong in (
        [0, 2, 2, 4],  # beyond the values
        [0, 2, 2, 2],  # short of them
        [1, 2, 2, 3],
        [-1, 2, 2, 3],
        [0, 3, 2, 3],  # falling
        [0, 5, -2, 3],
        [0, 2**62, 2**62, 3],
        [0, 2**63 - 1, -(2**63), 3],
        [0],
        [],
    ):
        with pytest.raises(ShapeError, match=r"offsets must be .*, got .*"):
            Ragged.from_flat(VALUES, offsets=torch.tensor(wrong, dtype=torch.int64))
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(ArgumentTypeError, match=r"offsets must be .*got torch"):
            Ragged.from_flat(VALUES, offsets=OFFSETS.to(dtype))
    with pytest.raises(ShapeError, match=r"offsets must be .*got shape \(1, 4\)"):
        Ragged.from_flat(VALUES, offsets=OFFSETS[None])
    with pytest.raises(ShapeError, match=r"offsets must be .*got a tensor without data, on meta"):
        Ragged.from_flat(VALUES, offsets=OFFSETS.to("meta"))


def test_negative_and_huge_lengths() -> None:
    for lengths in ([-1, 4], [2**62, 1], [2**62, 2**62], [2**63 - 1, 2**63 - 1, 2]):
        given = torch.tensor(lengths)
        for function in (
            offsets_of,
            lambda wrong: Ragged.from_flat(torch.ones(3), lengths=wrong),
            lambda wrong: BatchSampler(wrong, BatchLimit(sequences=1)),
            lambda wrong: Ragged.from_padded(torch.ones(len(wrong), 3), wrong),
            lambda wrong: rl.packing.pack_padded_sequence(
                torch.ones(len(wrong), 3), wrong, True, False
            ),
        ):
            with pytest.raises(ArgumentError, match="length"):
                function(given)


def test_numbers_that_a_dtype_cannot_hold() -> None:
    """They would be truncated or wrap around."""
    whole, yes = Ragged([[1], []]).to(torch.int8), Ragged([[True], []])
    numbers: list[Any] = [0.5, 128, -129, math.nan, math.inf, 2**70, 1j]
    for wrong in numbers:
        for function in (
            lambda empty: whole.first(empty=empty),
            lambda empty: whole.amax(1, empty=empty),
            partial(whole.shift, 1),
            partial(whole.to_padded, True),
        ):
            with pytest.raises(ArgumentTypeError, match=r"must be a value of torch\.int8, got"):
                function(wrong)
    with pytest.raises(ArgumentTypeError, match=r"empty must be a value of torch\.bool.*, got 2"):
        yes.last(empty=2)
    with pytest.raises(
        ArgumentTypeError, match=r"empty must be a value of torch\.float32.*, got 1j"
    ):
        batch_of().first(empty=1j)  # type: ignore[arg-type]
    assert whole.first(empty=-128).tolist() == [1, -128]
    assert yes.last(empty=True).tolist() == [True, True]


def test_dtypes_in_which_an_operation_means_nothing() -> None:
    whole, many = torch.tensor([1, 2, 3]), torch.ones(3, dtype=torch.complex64)
    for name, values in (
        *((name, whole) for name in ("mean", "softmax", "std")),
        *((name, many) for name in ("max", "amin", "softmax", "argmax")),
    ):
        with pytest.raises(ArgumentTypeError, match=f"{name} must be .*, got {values.dtype}"):
            getattr(Ragged.from_flat(values, offsets=OFFSETS), name)(1)


def test_an_index_chooses_among_the_sequences() -> None:
    batch = batch_of()
    data = dataset(np.zeros((3, 1), np.float32), offsets_of([2, 0, 1]), channels=("x0",))
    functions: list[Callable[[Any], Any]] = [
        batch.select,
        data.records.select,
        data.subset,
        data.take,
    ]
    for choose in functions:
        for right in (
            [2, -3],
            np.array([2, 0]),
            torch.tensor([-1, 0], dtype=torch.int8),
            [True, False, True],
        ):
            assert sorted(choose(right).lengths.tolist()) == [1, 2]
        for wrong in (
            [3],
            [-4],
            torch.tensor([9]),
            np.array([2**64 - 1], np.uint64),
            np.array([2**63], np.uint64),
        ):
            with pytest.raises(
                IndexError, match="index must be from -3 to 2, for 3 sequences, got "
            ) as caught:
                choose(wrong)
            assert isinstance(caught.value, ShapeError)
        for kind in ([1.5], [math.nan], ["a"], [None], np.array([1.5]), torch.tensor([0.0])):
            with pytest.raises(ArgumentTypeError, match=r"index must be integers or bools, got "):
                choose(kind)
        for shape in ([[0]], [True], np.array([True, False]), torch.tensor(0)):
            with pytest.raises(
                ShapeError,
                match="one-dimensional, and a mask must have one entry for each of the 3",
            ):
                choose(shape)


def test_a_nested_tensor_whose_offsets_were_changed() -> None:
    for wrong in ([1, 2, 3], [0, 3, 2], [0, 2, 4], [0, -1, 3], [0, 2, 2]):
        nested: Any = torch.nested.nested_tensor(
            [torch.ones(2), torch.ones(1)], layout=torch.jagged
        )
        nested.offsets().copy_(torch.tensor(wrong))
        with pytest.raises(ShapeError, match=r"nested must be .* elements of values.*, got .*"):
            Ragged.from_nested(nested)
    for starts, lengths in (([0, 2], [2, 2]), ([0, -1], [1, 1]), ([0, 2], [-1, 1])):
        values = torch.ones(3)
        nested = torch.nested.nested_tensor_from_jagged(
            values, torch.tensor([0, 2, 3]), torch.tensor([1, 1])
        )
        nested.offsets()[:2] = torch.tensor(starts)
        nested.lengths().copy_(torch.tensor(lengths))
        with pytest.raises(
            ShapeError, match=r"nested must be .*got offsets and lengths beyond its values"
        ):
            Ragged.from_nested(nested)


def test_a_nested_tensor_that_is_changed_later_changes_no_batch() -> None:
    nested: Any = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    batch = Ragged.from_nested(nested)
    nested.offsets().copy_(torch.tensor([0, 9, 9]))
    assert batch.lengths.tolist() == [2, 1]


def test_nothing_on_a_device_is_read_to_check_it() -> None:
    """A tensor on meta has no data, so reading it fails."""
    values, offsets = torch.ones(3, device="meta"), torch.tensor([0, 2, 2, 3]).to("meta")
    assert segments.sum(values, offsets).shape == (3,)
    assert segments.last(values, offsets).shape == (3,)
    assert segments.cumsum(values, offsets, 2).shape == (3,)
    assert segments.spread(torch.ones(3, device="meta"), offsets, 3).shape == (3,)
    assert Ragged.from_flat(values, offsets=offsets).sum(1).shape == (3,)
    batch = Ragged.from_flat(torch.ones(3, 4, device="meta"), offsets=offsets)
    classes: Any = Ragged.from_flat(
        torch.ones(3, dtype=torch.int64, device="meta"), offsets=offsets
    )
    assert torch.nn.functional.cross_entropy(batch, classes).shape == ()


def test_a_huge_number_of_streams_takes_no_room_before_the_first_chunk() -> None:
    assert len(TBPTTSampler(batch_of(), 2**31 - 1, 1)) == 2
    with pytest.raises(ArgumentError, match=r"batch_size must be .*at most 2147483647.*, got "):
        TBPTTSampler(batch_of(), 2**31, 1)


def test_a_pack_whose_order_was_changed_is_not_padded() -> None:
    packed: Any = rl.packing.pack_sequence([torch.ones(1), torch.ones(2)], enforce_sorted=False)
    for wrong in ([0, 0], [1, 2], [-1, 0]):
        packed.sorted_indices.copy_(torch.tensor(wrong))
        for function in (
            rl.packing.pad_packed_sequence,
            rl.packing.unpack_sequence,
            Ragged.from_packed,
        ):
            with pytest.raises(ShapeError, match="a permutation of 0 to 1"):
                function(packed)


def test_batches_of_another_dtype_are_not_joined() -> None:
    words = r"others must be torch\.float32 on cpu, like this batch, got torch\.int64 on cpu"
    with pytest.raises(ShapeError, match=words):
        batch_of().concat(Ragged.from_flat(torch.tensor([1, 2, 3]), lengths=LENGTHS))
