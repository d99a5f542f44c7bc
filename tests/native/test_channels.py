"""Wrong arguments of the entries of the C interface for channels and heads that read only themselves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from raglane.errors import ArgumentError
from raglane.native import library, missing_kernels

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason="needs the kernels")

NUMBERS = torch.zeros(64)
OFFSETS = torch.tensor([0, 3])
ADDRESS = NUMBERS.data_ptr()
IN_ALL = {"offsets": OFFSETS.data_ptr(), "sequences": 1, "elements": 3}
# The entry and its struct, arguments that it takes, and wrong ones with the words of their errors.
CALLS: dict[str, tuple[str, dict[str, Any], list[tuple[dict[str, Any], str]]]] = {
    "convolve": (
        "raglane_convolution",
        {"channels": 2, "taps": 2, "kept": 1, "x": ADDRESS, "weight": ADDRESS}
        | {"output": ADDRESS, "final": ADDRESS},
        [
            ({"taps": 0}, "taps must be at least 1"),
            ({"kept": 0}, "kept must be at least 1"),
            ({"weight": 0}, "weight must be an address"),
            ({"final": 0}, "final must be an address"),
            ({"grad_initial": ADDRESS}, "initial must be there with grad_initial"),
        ],
    ),
    "accumulate": (
        "raglane_rglru",
        {"channels": 2, "output": ADDRESS, "final": ADDRESS}
        | dict.fromkeys(("x", "entry", "recurrent"), ADDRESS)
        | dict.fromkeys(("entry_bias", "recurrent_bias", "rates"), ADDRESS),
        [
            ({"channels": 0}, "channels must be at least 1"),
            ({"rates": 0}, "rates must be an address"),
            ({"elements": 4}, r"offsets\[-1\] must be the number of elements"),
        ],
    ),
    "gate_norm": (
        "raglane_gated_norm",
        {"heads": 1, "size": 2, "eps": 1e-6}
        | dict.fromkeys(("y", "gate", "weight", "output"), ADDRESS),
        [
            ({"dtype": 2}, "dtype must be RAGLANE_FLOAT32 or RAGLANE_FLOAT64"),
            ({"threads": 0}, "threads must be at least 1"),
            ({"size": 1 << 21}, "size must be at most"),
            ({"output": 0}, "output must be an address"),
            ({"grad": ADDRESS}, "grad_weight must be an address"),
        ],
    ),
}


@pytest.mark.parametrize("entry", list(CALLS))
def test_c_refuses_wrong_arguments(entry: str) -> None:
    struct, right, wrong = CALLS[entry]
    names = list(library.library().structs[struct].formats)
    preamble = library.program_preamble(torch.float32)
    head = dict(zip(("abi", "isa", "dtype", "flags", "threads"), preamble, strict=True))
    pack = library.packer(struct)
    fields = dict.fromkeys(names, 0) | head
    fields |= {name: number for name, number in (IN_ALL | right).items() if name in fields}
    library.call(f"raglane_{entry}", pack(*fields.values()))
    for changes, words in wrong:
        with pytest.raises(ArgumentError, match=words):
            library.call(f"raglane_{entry}", pack(*(fields | changes).values()))
