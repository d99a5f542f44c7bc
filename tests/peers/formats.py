"""Ragged batches of other packages: the conversions of docs/from-torch/other-formats.md, and the
memory that is shared.

The functions ``check_...`` raise AssertionError, and run in an environment with the packages.
"""

from __future__ import annotations

import sys

import numpy as np
import pyarrow as pa
import torch

import raglane as rl

ROWS = [[1.0, 2.0], [], [3.0], [4.0, 5.0, 6.0], []]
PAIRS = [[[1.0, 2.0], [3.0, 4.0]], [], [[5.0, 6.0]]]


def address(column: pa.ChunkedArray) -> int:
    """Return the address of the numbers of an Arrow column of one chunk."""
    return column.chunk(0).flatten().buffers()[1].address


def check_awkward() -> None:
    """Awkward arrays: shared in both directions, and with features."""
    import awkward as ak

    array = ak.Array(ROWS)
    batch = rl.Ragged.from_arrow(ak.to_arrow(array, extensionarray=False))
    assert [row.tolist() for row in batch] == ROWS
    assert batch.values.data_ptr() == array.layout.content.data.ctypes.data
    again = ak.from_arrow(batch.to_arrow())
    assert again.to_list() == ROWS
    assert ak.to_numpy(ak.flatten(again)).ctypes.data == batch.values.data_ptr()
    chosen = rl.Ragged.from_arrow(ak.to_arrow(array[[3, 1, 0]], extensionarray=False))
    assert [row.tolist() for row in chosen] == [ROWS[3], ROWS[1], ROWS[0]]
    pairs = rl.Ragged.from_arrow(
        ak.to_arrow(ak.to_regular(ak.Array(PAIRS), axis=2), extensionarray=False)
    )
    assert pairs.feature_shape == (2,)
    assert ak.from_arrow(pairs.to_arrow()).to_list() == PAIRS


def check_datasets() -> None:
    """Columns of Hugging Face datasets, also of selected rows."""
    import datasets

    dataset = datasets.Dataset.from_dict({"x": ROWS})
    batch = rl.Ragged.from_arrow(dataset.with_format("arrow")[:]["x"])
    assert [row.tolist() for row in batch] == ROWS
    assert batch.values.data_ptr() == address(dataset.data.column("x"))
    chosen = rl.Ragged.from_arrow(dataset.select([3, 1, 0]).with_format("arrow")[:]["x"])
    assert [row.tolist() for row in chosen] == [ROWS[3], ROWS[1], ROWS[0]]
    again = datasets.Dataset.from_dict({"x": batch.to_arrow()})
    assert again[:]["x"] == ROWS
    assert address(again.data.column("x")) == batch.values.data_ptr()
    pairs = datasets.Dataset.from_dict(
        {"x": rl.Ragged([torch.tensor(row).reshape(-1, 2) for row in PAIRS]).to_arrow()}
    )
    assert rl.Ragged.from_arrow(pairs.with_format("arrow")[:]["x"]).to_arrow().to_pylist() == PAIRS


def check_torchrec() -> None:
    """Jagged tensors of TorchRec share values and offsets in both directions."""
    from torchrec import JaggedTensor

    jagged = JaggedTensor(torch.arange(6.0), lengths=torch.tensor([2, 0, 3, 1]))
    batch = rl.Ragged.from_flat(jagged.values(), offsets=jagged.offsets())
    assert batch.lengths.tolist() == [2, 0, 3, 1]
    assert batch.values.data_ptr() == jagged.values().data_ptr()
    again = JaggedTensor(batch.values, offsets=batch.offsets)
    assert [row.tolist() for row in again.to_dense()] == [row.tolist() for row in batch]
    assert again.values().data_ptr() == batch.values.data_ptr()
    assert again.offsets().data_ptr() == batch.offsets.data_ptr()


def check_transformers() -> None:
    """The arguments of padding-free models equal those of the collator of transformers."""
    from transformers import DataCollatorWithFlattening

    lengths = np.random.default_rng(0).integers(1, 20, 50)
    tokens = [
        np.random.default_rng(int(length)).integers(0, 1000, length).tolist() for length in lengths
    ]
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    expected = collate([{"input_ids": row} for row in tokens])
    del expected["labels"]
    found = rl.Ragged(tokens).to_transformers()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == expected[name].dtype
            assert torch.equal(value, expected[name])
        else:
            assert value == expected[name]


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            sys.stdout.write(f"{name[6:]} passed\n")
