"""Mistakes with the packing functions raise the error types of torch, with a rule and a fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import rnn

import raglane as rl
from raglane import packing
from raglane.packing import PackedSequence

BATCH = torch.zeros(3, 4)  # T = 3, B = 4
PACK = rnn.pack_padded_sequence(BATCH, [3, 2, 1, 1])
ONES = [torch.ones(2), torch.ones(1)]
EMPTY, SPARSE = PackedSequence(BATCH[0, :0], torch.tensor([]).long()), torch.ones(2).to_sparse()


def pack(data: Tensor, *sizes: int, dtype: torch.dtype = torch.int64) -> PackedSequence:
    return PackedSequence(data, torch.tensor(sizes, dtype=dtype))


WRONG = [pack(torch.ones(3), *sizes) for sizes in ((1, 2), (3, 0), (1, 1), (2, 1))]
WRONG[3] = WRONG[3]._replace(sorted_indices=torch.tensor([0]))  # of fewer sequences
CHANGED = PackedSequence(
    torch.zeros(3), torch.tensor([2, 1]), torch.tensor([0, 0]), torch.tensor([0, 1])
)
MISTAKES: dict[str, list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]]] = {
    "pack_padded_sequence": [
        (
            (torch.zeros(1, 9, 2), [9, 8, 6], True),
            {},
            ValueError,
            "1 as in the first .*3 len.*batch_first=False",
        ),
        *(
            ((BATCH, n), {}, ValueError, f"length of {n[0] or n[3]}")
            for n in ([4, 3, 2, 1], [0, 0, 0, -1])
        ),
        (
            (BATCH.to_sparse(), [3, 2, 1, 1]),
            {},
            TypeError,
            "a dense tensor, got a tensor that is torch.sparse_coo",
        ),
        ((BATCH, [3, 1, 2, 1]), {}, ValueError, "enforce_sorted=False"),
        (([[1, 2], [3]], [2, 1]), {}, TypeError, "input must be .*got type list"),
        ((PACK, [3, 2, 1, 1]), {}, TypeError, "PackedSequence"),
        ((torch.zeros(3), [3]), {}, ValueError, r"shape \(3,\)"),
        *(
            ((BATCH, x), {}, ValueError, words)
            for x, words in (([3.0, 2, 1, 1], "float32"), (3, "one dimension"))
        ),
        *(
            ((BATCH, x), {}, ValueError, w)
            for x, w in (([[3] * 4], r"\(1, 4\)"), (["a"] * 4, "one integer per"))
        ),
        ((BATCH, None), {}, TypeError, "lengths must be .*got None"),
    ],
    "pad_packed_sequence": [
        ((PACK,), {"total_length": 2}, ValueError, "longest length, 3"),
        *(
            ((x,), {"total_length": n}, ValueError, r"than 2\*\*62 elem")
            for x, n in ((PACK, 2**61), (EMPTY, 2**62))
        ),
        ((PACK,), {"total_length": 5.0}, TypeError, "type float"),
        ((BATCH,), {}, TypeError, "sequence must be .*got type Tensor"),
        (
            (PACK,),
            {"padding_value": "a"},
            TypeError,
            "padding_value must be one number, got type str",
        ),
        (
            (PACK._replace(batch_sizes=torch.tensor([[4, 2, 1]])),),
            {},
            ValueError,
            r"of shape \(1, 3\)",
        ),
        *(
            ((p,), {}, ValueError, rf"batch_sizes must be .*got \{p.batch_sizes.tolist()}")
            for p in WRONG
        ),
        ((pack(torch.ones(3), 2, 1, dtype=torch.int32),), {}, ValueError, "int32"),
        ((pack(torch.ones(()), 1),), {}, ValueError, r"shape \(\)"),
    ],
    "unpack_sequence": [
        ((pack(torch.ones(()), 1),), {}, ValueError, r"shape \(\)"),
        ((ONES,), {}, TypeError, "packed_sequences must be .*got type list"),
        ((CHANGED,), {}, ValueError, r"sorted_indices must be .*got \[0, 0\]"),
    ],
    "pad_sequence": [
        *(
            ((x,), {}, TypeError, f"sequences must be .*got type {type(x).__name__}")
            for x in (5, PACK)
        ),
        (([[1, 2], [3]],), {}, TypeError, r"sequences\[0\] must be .*got type list"),
        *(
            ((x,), {}, TypeError, "dense tensor, got .*sparse_coo")
            for x in ([SPARSE], [ONES[1], SPARSE])
        ),
        (([],), {}, ValueError, "sequences must be .*got none"),
        (([torch.ones(())],), {}, ValueError, "first dimension counts steps"),
        *(
            (([torch.ones(2, 3), x],), {}, ValueError, r"\(3,\).*\(.*\)")
            for x in (torch.ones(1, 4), torch.ones(0))
        ),
        (([torch.ones(2).long(), torch.ones(1)],), {}, ValueError, "float32.*int64"),
        (([torch.ones(2), torch.ones(1, device="meta")],), {}, ValueError, "device meta"),
        *(
            ((ONES,), {"padding_side": x}, e, f"got {x!r}")
            for x, e in (("top", ValueError), (3, TypeError))
        ),
        *(((ONES,), {"batch_first": x}, TypeError, "batch_first must be") for x in ("no", 2)),
        *(((ONES,), {"padding_value": x}, TypeError, "64 bits") for x in (2**63, -(2**63) - 1)),
    ],
    "pack_sequence": [
        (([],), {}, ValueError, "sequences must be .*got none"),
        *(
            ((x,), {}, TypeError, words)
            for x, words in (([[1], [2]], r"sequences\[0\]"), (5, "type int"))
        ),
        ((ONES[::-1],), {}, ValueError, r"got \[1, 2\]"),
    ],
    "unpad_sequence": [
        (
            ([1, 2], torch.tensor([1, 2])),
            {},
            TypeError,
            "padded_sequences must be one padded tensor",
        ),
        (
            (BATCH, torch.tensor([1, 1, 1, 1, 0])),
            {},
            ValueError,
            "as in the second .*5 lengths.*batch_first=True",
        ),
        *(
            ((BATCH, torch.tensor([n, *[1] * 3])), {}, ValueError, f"length of {n}")
            for n in (4, -1, 1 << 60)
        ),
        ((BATCH, [1] * 4, "no"), {}, TypeError, "batch_first must be"),
    ],
    "invert_permutation": [
        *(
            ((x,), {}, TypeError, words)
            for x, words in (([1, 0], "type list"), (SPARSE, "dense tensor .*sparse_coo"))
        ),
        *(
            ((torch.eye(2)[1].to(dtype),), {}, ValueError, str(dtype))
            for dtype in (torch.float32, torch.bool)
        ),
        ((torch.tensor([[1, 0]]),), {}, ValueError, r"\(1, 2\)"),
        *(
            ((torch.tensor([0, n]),), {}, ValueError, "a permutation of 0 to 1")
            for n in (0, 2, 1 << 40, -1)
        ),
    ],
}


@pytest.mark.parametrize(
    ("name", "arguments", "options", "kind", "words"),
    [(name, *mistake) for name, mistakes in MISTAKES.items() for mistake in mistakes],
)
def test_mistakes_are_explained(
    name: str,
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    kind: type[Exception],
    words: str,
) -> None:
    with pytest.raises(kind, match=words) as ours:
        getattr(packing, name)(*arguments, **options)
    assert " must be " in str(ours.value)
    assert ", got " in str(ours.value)
    theirs: Any = None
    try:
        getattr(rnn, name)(
            *[part.clone() if isinstance(part, Tensor) else part for part in arguments], **options
        )
    except Exception as error:
        theirs = type(error)
    # torch cannot copy from the meta device, which is another mistake.
    assert theirs in (None, NotImplementedError, OverflowError) or isinstance(ours.value, theirs)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", list(MISTAKES)[:-1])
def test_quantized_numbers_are_refused(name: str) -> None:
    scales = [torch.quantize_per_tensor(BATCH, scale, 0, torch.qint8) for scale in (0.1, 0.2)]
    given: Any = scales if name in ("pad_sequence", "pack_sequence") else scales[0]
    given = pack(scales[0], 2, 1) if name in ("pad_packed_sequence", "unpack_sequence") else given
    with pytest.raises(TypeError, match=r"a tensor that is quantized\..*\.dequantize\(\)"):
        getattr(packing, name)(given, *[[3, 2, 1, 1]] * ("padded" in name or "unpad" in name))


@pytest.mark.parametrize(
    "name", ["pad_packed_sequence", "unpack_sequence", "pack_padded_sequence", "unpad_sequence"]
)
def test_a_ragged_batch_has_methods_of_its_own(name: str) -> None:
    batch = rl.Ragged([torch.ones(3), torch.ones(2)])
    lengths = () if "pack" in name and "padded" not in name else ([3, 2],)
    with pytest.raises(TypeError, match="Call its method to_padded, to_packed or to_list"):
        getattr(rl.packing, name)(batch, *lengths)
