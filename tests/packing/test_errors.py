"""Mistakes with the packing functions raise the error types of torch, with a rule and a fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import rnn

from raglane import packing
from raglane.packing import PackedSequence

BATCH = torch.zeros(3, 4)  # T = 3, B = 4
PACK = rnn.pack_padded_sequence(BATCH, [3, 2, 1, 1])
ONES = [torch.ones(2), torch.ones(1)]


def pack(data: Tensor, *sizes: int, dtype: torch.dtype = torch.int64) -> PackedSequence:
    return PackedSequence(data, torch.tensor(sizes, dtype=dtype))


CHANGED = PackedSequence(torch.zeros(3), torch.tensor([2, 1]), torch.tensor([0, 0]), torch.tensor([0, 1]))
MISTAKES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]]] = {
    "pack_padded_sequence": [
        ((torch.zeros(9, 1, 2), [9, 8, 6]), {}, ValueError, "3 len"),
        ((BATCH, [4, 3, 2, 1]), {}, ValueError, "length of 4"),
        ((BATCH, [3, 2, 1, -1]), {}, ValueError, "length of -1"),
        ((BATCH, [3, 1, 2, 1]), {}, ValueError, "enforce_sorted=False"),
        (([[1, 2], [3]], [2, 1]), {}, TypeError, "input must be .*got type list"),
        ((PACK, [3, 2, 1, 1]), {}, TypeError, "PackedSequence"),
        ((torch.zeros(3), [3]), {}, ValueError, r"shape \(3,\)"),
        ((BATCH, [3.0, 2.0, 1.0, 1.0]), {}, ValueError, "float32"),
        ((BATCH, [[3, 2, 1, 1]]), {}, ValueError, r"\(1, 4\)"),
        ((BATCH, 3), {}, ValueError, "one dimension"),
        ((BATCH, None), {}, TypeError, "lengths must be .*got None"),
        ((BATCH, ["a"] * 4), {}, ValueError, "one integer per sequence"),
    ],
    "pad_packed_sequence": [
        ((PACK,), {"total_length": 2}, ValueError, "longest length, 3"),
        ((PACK,), {"total_length": 2**61}, ValueError, r"fewer than 2\*\*62 elements"),
        ((PACK,), {"total_length": 5.0}, TypeError, "type float"),
        ((BATCH,), {}, TypeError, "sequence must be .*got type Tensor"),
        ((PACK,), {"padding_value": "a"}, TypeError, "padding_value must be one number, got type str"),
        ((pack(torch.ones(3), 1, 2),), {}, ValueError, r"batch_sizes must be .*got \[1, 2\]"),
        ((pack(torch.ones(2), 2, 0),), {}, ValueError, r"batch_sizes must be .*got \[2, 0\]"),
        ((pack(torch.ones(3), 2, 1, dtype=torch.int32),), {}, ValueError, "int32"),
        ((pack(torch.ones(()), 1),), {}, ValueError, r"shape \(\)"),
    ],
    "unpack_sequence": [
        ((pack(torch.ones(()), 1),), {}, ValueError, r"shape \(\)"),
        ((ONES,), {}, TypeError, "packed_sequences must be .*got type list"),
        ((CHANGED,), {}, ValueError, r"sorted_indices must be .*got \[0, 0\]"),
    ],
    "pad_sequence": [
        ((5,), {}, TypeError, "sequences must be .*got type int"),
        (([[1, 2], [3]],), {}, TypeError, r"sequences\[0\] must be .*got type list"),
        (([],), {}, ValueError, "sequences must be .*got none"),
        (([torch.ones(())],), {}, ValueError, "first dimension counts steps"),
        (([torch.ones(2, 3), torch.ones(1, 4)],), {}, ValueError, r"\(3,\).*\(4,\)"),
        (([torch.ones(2).long(), torch.ones(1)],), {}, ValueError, "float32.*int64"),
        (([torch.ones(2), torch.ones(1, device="meta")],), {}, ValueError, "device meta"),
        ((ONES,), {"padding_side": "top"}, ValueError, "'top'"),
        ((ONES,), {"batch_first": "no"}, TypeError, "batch_first must be"),
        ((ONES,), {"padding_value": 2**63}, TypeError, "64 bits"),
    ],
    "pack_sequence": [
        (([],), {}, ValueError, "sequences must be .*got none"),
        (([[1], [2]],), {}, TypeError, r"sequences\[0\]"),
        ((5,), {}, TypeError, "type int"),
        ((ONES[::-1],), {}, ValueError, r"got \[1, 2\]"),
    ],
    "unpad_sequence": [
        (([1, 2], torch.tensor([1, 2])), {}, TypeError, "padded_sequences must be one padded tensor"),
        ((BATCH, torch.tensor([1, 1, 1, 1, 0])), {}, ValueError, "5 lengths"),
        ((BATCH, torch.tensor([4, 1, 1, 1])), {}, ValueError, "length of 4"),
        ((BATCH, torch.tensor([-1] * 4)), {}, ValueError, "length of -1"),
        ((BATCH, torch.tensor([1 << 60] * 4)), {}, ValueError, f"length of {1 << 60}"),
        ((BATCH, [1] * 4, "no"), {}, TypeError, "batch_first must be"),
    ],
    "invert_permutation": [
        (([1, 0],), {}, TypeError, "type list"),
        *(((torch.eye(2)[1].to(dtype),), {}, ValueError, str(dtype)) for dtype in (torch.float32, torch.bool)),
        ((torch.tensor([[1, 0]]),), {}, ValueError, r"\(1, 2\)"),
        *(((torch.tensor([0, n]),), {}, ValueError, "a permutation of 0 to 1") for n in (0, 2, 1 << 40, -1)),
    ],
}


@pytest.mark.parametrize(
    ("name", "arguments", "options", "kind", "words"),
    [(name, *mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_mistakes_are_explained(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as ours:
        getattr(packing, name)(*arguments, **options)
    assert " must be " in str(ours.value)
    assert ", got " in str(ours.value)
    theirs: Any = None
    try:
        getattr(rnn, name)(*[part.clone() if isinstance(part, Tensor) else part for part in arguments], **options)
    except Exception as error:
        theirs = type(error)
    # torch cannot copy from the meta device, which is another mistake.
    assert theirs in (None, NotImplementedError) or isinstance(ours.value, theirs)
