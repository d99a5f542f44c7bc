"""Mistakes with the packing functions: explained, and of the type that torch raises for them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils import rnn

from looped import looped
from raglane import packing
from raglane.packing import PackedSequence

BATCH = torch.zeros(3, 4)  # T = 3, B = 4
PACK = rnn.pack_padded_sequence(BATCH, [3, 2, 1, 1])
ONES = [torch.ones(2), torch.ones(1)]

MISTAKES: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], type[Exception], str]] = {
    "three lengths, one sequence": ("pack_padded_sequence", (torch.zeros(9, 1, 2), [9, 8, 6]), {}, ValueError, "3 len"),
    "the same, unsorted": (
        "pack_padded_sequence",
        (torch.zeros(1, 9, 2), [6, 9, 8], True, False),
        {},
        ValueError,
        "first dimension .* holds 1",
    ),
    "a length above the padding": ("pack_padded_sequence", (BATCH, [4, 3, 2, 1]), {}, ValueError, "length of 4"),
    "a length below 0": ("pack_padded_sequence", (BATCH, [3, 2, 1, -1]), {}, ValueError, "length of -1"),
    "the same, unsorted ": (
        "pack_padded_sequence",
        (BATCH, [3, 2, -1, 1], False, False),
        {},
        ValueError,
        "length of -1",
    ),
    "lengths that rise": ("pack_padded_sequence", (BATCH, [1, 2, 3, 3]), {}, ValueError, "enforce_sorted=False"),
    "a list for the batch": (
        "pack_padded_sequence",
        ([[1, 2], [3]], [2, 1]),
        {},
        TypeError,
        "input must be .*got type list",
    ),
    "the same, unsorted  ": ("pack_padded_sequence", (ONES, [2, 1]), {"enforce_sorted": False}, TypeError, "type list"),
    "a pack for the batch": ("pack_padded_sequence", (PACK, [3, 2, 1, 1]), {}, TypeError, "PackedSequence"),
    "one dimension": ("pack_padded_sequence", (torch.zeros(3), [3]), {}, ValueError, r"shape \(3,\)"),
    "no dimension": ("pack_padded_sequence", (torch.zeros(()), [3]), {}, ValueError, r"shape \(\)"),
    "lengths of floats": ("pack_padded_sequence", (BATCH, [3.0, 2.0, 1.0, 1.0]), {}, ValueError, "float32"),
    "lengths of bools": ("pack_padded_sequence", (BATCH, torch.ones(4) > 0), {}, ValueError, "torch.bool"),
    "lengths in two dimensions": ("pack_padded_sequence", (BATCH, [[3, 2, 1, 1]]), {}, ValueError, r"\(1, 4\)"),
    "the same, unsorted    ": (
        "pack_padded_sequence",
        (BATCH, torch.tensor([[3, 2, 1, 1]]), False, False),
        {},
        ValueError,
        r"\(1, 4\)",
    ),
    "one number for lengths": ("pack_padded_sequence", (BATCH, 3), {}, ValueError, "one dimension"),
    "None for lengths": ("pack_padded_sequence", (BATCH, None), {}, TypeError, "lengths must be .*got None"),
    "words for lengths": ("pack_padded_sequence", (BATCH, ["a"] * 4), {}, ValueError, "one integer per sequence"),
    "ragged lengths": ("pack_padded_sequence", (BATCH, [[1], [2, 3]]), {}, ValueError, "one integer per sequence"),
    "total_length too small": ("pad_packed_sequence", (PACK,), {"total_length": 2}, ValueError, "longest length, 3"),
    "total_length no integer": ("pad_packed_sequence", (PACK,), {"total_length": 5.0}, TypeError, "type float"),
    "a tensor for the pack": ("pad_packed_sequence", (BATCH,), {}, TypeError, "sequence must be .*got type Tensor"),
    "a tuple for the pack": ("pad_packed_sequence", ((BATCH, BATCH),), {}, TypeError, "got type tuple"),
    "a word for padding": ("pad_packed_sequence", (PACK,), {"padding_value": "a"}, TypeError, "padding_value must be "),
    "too few elements": (
        "pad_packed_sequence",
        (PackedSequence(torch.ones(3), torch.tensor([2, 2])),),
        {},
        ValueError,
        r"batch_sizes must be .*got \[2, 2\]",
    ),
    "rising batch sizes": (
        "pad_packed_sequence",
        (PackedSequence(torch.ones(3), torch.tensor([1, 2])),),
        {},
        ValueError,
        r"batch_sizes must be .*got \[1, 2\]",
    ),
    "batch sizes of 32 bits": (
        "pad_packed_sequence",
        (PackedSequence(torch.ones(3), torch.tensor([2, 1], dtype=torch.int32)),),
        {},
        ValueError,
        "int32",
    ),
    "data without dimensions": (
        "pad_packed_sequence",
        (PackedSequence(torch.ones(()), torch.tensor([1])),),
        {},
        ValueError,
        r"shape \(\)",
    ),
    "a list to unpack": ("unpack_sequence", (ONES,), {}, TypeError, "packed_sequences must be .*got type list"),
    "a number for sequences": ("pad_sequence", (5,), {}, TypeError, "sequences must be .*got type int"),
    "lists for sequences": ("pad_sequence", ([[1, 2], [3]],), {}, TypeError, r"sequences\[0\] must be .*got type list"),
    "arrays for sequences": (
        "pad_sequence",
        ([np.ones(2), np.ones(1)],),
        {},
        TypeError,
        r"sequences\[0\] must be .*got type nda",
    ),
    "arrays to pack": (
        "pack_sequence",
        ([np.ones(2), np.ones(1)],),
        {},
        TypeError,
        r"sequences\[0\] must be .*got type",
    ),
    "a pack for sequences": ("pad_sequence", (PACK,), {}, TypeError, "type PackedSequence"),
    "no sequences": ("pad_sequence", ([],), {}, ValueError, "sequences must be .*got none"),
    "sequences without steps": ("pad_sequence", ([torch.ones(())],), {}, ValueError, "first counts steps"),
    "trailing shapes": ("pad_sequence", ([torch.ones(2, 3), torch.ones(1, 4)],), {}, ValueError, r"\(4,\).*\(3,\)"),
    "an empty one without": ("pad_sequence", ([torch.ones(2, 3), torch.ones(0)],), {}, ValueError, r"sequences\[1\]"),
    "dtypes": ("pad_sequence", ([torch.ones(2).long(), torch.ones(1)],), {}, ValueError, "float32.*int64"),
    "devices": ("pad_sequence", ([torch.ones(2), torch.ones(1, device="meta")],), {}, ValueError, "device meta"),
    "an unknown side": ("pad_sequence", (ONES,), {"padding_side": "top"}, ValueError, "'top'"),
    "no side": ("pad_sequence", (ONES,), {"padding_side": None}, TypeError, "padding_side must be .*got None"),
    "a word to pad with": ("pad_sequence", (ONES,), {"padding_value": "a"}, TypeError, "type str"),
    "none to pack": ("pack_sequence", ([],), {}, ValueError, "sequences must be .*got none"),
    "lists to pack": ("pack_sequence", ([[1], [2]],), {}, TypeError, r"sequences\[0\]"),
    "a number to pack": ("pack_sequence", (5,), {}, TypeError, "type int"),
    "rising to pack": ("pack_sequence", (ONES[::-1],), {}, ValueError, r"got \[1, 2\]"),
    "a list to unpad": ("unpad_sequence", ([1, 2], torch.tensor([1, 2])), {}, TypeError, "padded_sequences must be "),
    "too many to unpad": ("unpad_sequence", (BATCH, torch.tensor([1] * 5)), {}, ValueError, "5 lengths"),
    "too long to unpad": ("unpad_sequence", (BATCH, torch.tensor([4, 1, 1, 1])), {}, ValueError, "length of 4"),
    "below 0 to unpad": ("unpad_sequence", (BATCH, torch.tensor([1, -2, 1, 1])), {}, ValueError, "length of -2"),
    "one dimension to unpad": ("unpad_sequence", (torch.ones(3), torch.tensor([1])), {}, ValueError, r"\(3,\)"),
    "a list to invert": ("invert_permutation", ([1, 0],), {}, TypeError, "type list"),
    "floats to invert": ("invert_permutation", (torch.tensor([1.0, 0.0]),), {}, ValueError, "float32"),
    "two dimensions to invert": ("invert_permutation", (torch.tensor([[1, 0]]),), {}, ValueError, r"\(1, 2\)"),
    "a hole to invert": ("invert_permutation", (torch.tensor([0, 2]),), {}, ValueError, "each of 0 to 1 once"),
    "twice the same to invert": ("invert_permutation", (torch.tensor([1, 1]),), {}, ValueError, "each of 0 to 1 once"),
    "far above to invert": ("invert_permutation", (torch.tensor([0, 1 << 40]),), {}, ValueError, "each of 0 to 1 once"),
    "a pack whose order was changed": (
        "unpack_sequence",
        (PackedSequence(torch.zeros(3), torch.tensor([2, 1]), torch.tensor([0, 0]), torch.tensor([0, 1])),),
        {},
        ValueError,
        r"sorted_indices must be .*got \[0, 0\]",
    ),
    "below 0 to invert": ("invert_permutation", (torch.tensor([0, -1]),), {}, ValueError, "each of 0 to 1 once"),
}


def what_torch_raises(name: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    copies = [argument.clone() if isinstance(argument, Tensor) else argument for argument in arguments]
    try:
        getattr(rnn, name)(*copies, **options)
    except Exception as error:
        return type(error)
    return None


@looped("mistake", MISTAKES)
def test_mistakes_are_explained(mistake: str) -> None:
    name, arguments, options, kind, words = MISTAKES[mistake]
    with pytest.raises(kind, match=words) as ours:
        getattr(packing, name)(*arguments, **options)
    assert " must be " in str(ours.value)
    assert ", got " in str(ours.value)
    theirs = what_torch_raises(name, arguments, options)
    # Tensors on the meta device are nothing that torch has numbers to copy from: that is another mistake.
    assert theirs in (None, NotImplementedError) or isinstance(ours.value, theirs)
