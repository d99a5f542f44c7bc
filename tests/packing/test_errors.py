"""Mistakes with the packing functions raise the error types of torch, with a rule and a fix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import rnn

from raglane import packing
from raglane.packing import PackedSequence

BATCH = torch.zeros(3, 4)  # T = 3, B = 4
PACK = rnn.pack_padded_sequence(BATCH, [3, 2, 1, 1])
ONES = [torch.ones(2), torch.ones(1)]
UNSORTED = {"enforce_sorted": False}


def pack(data: Tensor, *sizes: int, dtype: torch.dtype = torch.int64) -> PackedSequence:
    return PackedSequence(data, torch.tensor(sizes, dtype=dtype))


CHANGED = PackedSequence(torch.zeros(3), torch.tensor([2, 1]), torch.tensor([0, 0]), torch.tensor([0, 1]))
MISTAKES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]]] = {
    "pack_padded_sequence": [
        ((torch.zeros(9, 1, 2), [9, 8, 6]), {}, ValueError, "3 len"),
        ((torch.zeros(1, 9, 2), [6, 9, 8], True, False), {}, ValueError, "1 as in the first dimension"),
        ((BATCH, [4, 3, 2, 1]), {}, ValueError, "length of 4"),
        ((BATCH, [3, 2, 1, -1]), {}, ValueError, "length of -1"),
        ((BATCH, [3, 2, -1, 1], False, False), {}, ValueError, "length of -1"),
        ((BATCH, [1, 2, 3, 3]), {}, ValueError, "enforce_sorted=False"),
        (([[1, 2], [3]], [2, 1]), {}, TypeError, "input must be .*got type list"),
        ((ONES, [2, 1]), UNSORTED, TypeError, "type list"),
        ((PACK, [3, 2, 1, 1]), {}, TypeError, "PackedSequence"),
        ((torch.zeros(3), [3]), {}, ValueError, r"shape \(3,\)"),
        ((torch.zeros(()), [3]), {}, ValueError, r"shape \(\)"),
        ((BATCH, [3.0, 2.0, 1.0, 1.0]), {}, ValueError, "float32"),
        ((BATCH, torch.ones(4) > 0), {}, ValueError, "torch.bool"),
        ((BATCH, [[3, 2, 1, 1]]), {}, ValueError, r"\(1, 4\)"),
        ((BATCH, torch.tensor([[3, 2, 1, 1]]), False, False), {}, ValueError, r"\(1, 4\)"),
        ((BATCH, 3), {}, ValueError, "one dimension"),
        ((BATCH, None), {}, TypeError, "lengths must be .*got None"),
        ((BATCH, ["a"] * 4), {}, ValueError, "one integer per sequence"),
        ((BATCH, [[1], [2, 3]]), {}, ValueError, "one integer per sequence"),
    ],
    "pad_packed_sequence": [
        ((PACK,), {"total_length": 2}, ValueError, "longest length, 3"),
        ((PACK,), {"total_length": 5.0}, TypeError, "type float"),
        ((BATCH,), {}, TypeError, "sequence must be .*got type Tensor"),
        (((BATCH, BATCH),), {}, TypeError, "got type tuple"),
        ((PACK,), {"padding_value": "a"}, TypeError, "padding_value: got"),
        ((pack(torch.ones(3), 2, 2),), {}, ValueError, r"batch_sizes must be .*got \[2, 2\]"),
        ((pack(torch.ones(3), 1, 2),), {}, ValueError, r"batch_sizes must be .*got \[1, 2\]"),
        ((pack(torch.ones(3), 2, 1, dtype=torch.int32),), {}, ValueError, "int32"),
        ((pack(torch.ones(()), 1),), {}, ValueError, r"shape \(\)"),
    ],
    "unpack_sequence": [
        ((ONES,), {}, TypeError, "packed_sequences must be .*got type list"),
        ((CHANGED,), {}, ValueError, r"sorted_indices must be .*got \[0, 0\]"),
    ],
    "pad_sequence": [
        ((5,), {}, TypeError, "sequences must be .*got type int"),
        (([[1, 2], [3]],), {}, TypeError, r"sequences\[0\] must be .*got type list"),
        (([np.ones(2), np.ones(1)],), {}, TypeError, r"sequences\[0\] must be .*got type nda"),
        ((PACK,), {}, TypeError, "type PackedSequence"),
        (([],), {}, ValueError, "sequences must be .*got none"),
        (([torch.ones(())],), {}, ValueError, "first dimension counts steps"),
        (([torch.ones(2, 3), torch.ones(1, 4)],), {}, ValueError, r"\(4,\).*\(3,\)"),
        (([torch.ones(2, 3), torch.ones(0)],), {}, ValueError, r"sequences\[1\]"),
        (([torch.ones(2).long(), torch.ones(1)],), {}, ValueError, "float32.*int64"),
        (([torch.ones(2), torch.ones(1, device="meta")],), {}, ValueError, "device meta"),
        ((ONES,), {"padding_side": "top"}, ValueError, "'top'"),
        ((ONES,), {"padding_side": None}, TypeError, "padding_side must be .*got None"),
        ((ONES,), {"padding_value": "a"}, TypeError, "type str"),
    ],
    "pack_sequence": [
        (([],), {}, ValueError, "sequences must be .*got none"),
        (([[1], [2]],), {}, TypeError, r"sequences\[0\]"),
        (([np.ones(2), np.ones(1)],), {}, TypeError, r"sequences\[0\] must be .*got type"),
        ((5,), {}, TypeError, "type int"),
        ((ONES[::-1],), {}, ValueError, r"got \[1, 2\]"),
    ],
    "unpad_sequence": [
        (([1, 2], torch.tensor([1, 2])), {}, TypeError, "padded_sequences: got"),
        ((BATCH, torch.tensor([1] * 5)), {}, ValueError, "5 lengths"),
        ((BATCH, torch.tensor([4, 1, 1, 1])), {}, ValueError, "length of 4"),
        ((BATCH, torch.tensor([1, -2, 1, 1])), {}, ValueError, "length of -2"),
        ((torch.ones(3), torch.tensor([1])), {}, ValueError, r"\(3,\)"),
    ],
    "invert_permutation": [
        (([1, 0],), {}, TypeError, "type list"),
        ((torch.tensor([1.0, 0.0]),), {}, ValueError, "float32"),
        ((torch.tensor([[1, 0]]),), {}, ValueError, r"\(1, 2\)"),
        *(((torch.tensor([0, n]),), {}, ValueError, "each of 0 to 1 once") for n in (0, 2, 1 << 40, -1)),
    ],
}


def error_of_torch(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    copies = [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
    try:
        getattr(rnn, name)(*copies, **options)
    except Exception as error:
        return type(error)
    return None


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
    theirs = error_of_torch(name, arguments, options)
    # torch cannot copy from the meta device, which is another mistake.
    assert theirs in (None, NotImplementedError) or isinstance(ours.value, theirs)
