"""The cpu kernels against the reference in float64, on every supported instruction set, and their
bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from cell_requests import squares
from cpu_networks import (
    DIVISIONS,
    KERNEL_CELLS,
    LENGTHS,
    LIBRARY,
    MANY,
    MATRIX_CELLS,
    NO_TEAM,
    POISON,
    SIZES,
    TOLERANCE,
    Network,
    Use,
    assert_close,
    assert_same_bits,
    make,
    sums_between_bfloat16,
    truth,
    with_gradients,
)
from raglane.kernels import reference
from raglane.kernels.cpu.backend import BACKEND
from raglane.kernels.cpu.layer import Layer
from raglane.segments import offsets_from_lengths

# Rounding to bfloat16 turns units of relu on and off, and with them their gradients.
TYPED = [
    (cell, dtype)
    for cell in MATRIX_CELLS
    for dtype in TOLERANCE
    if (cell, dtype) != ("rnn_relu", torch.bfloat16)
]


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize(("cell", "dtype"), TYPED)
@pytest.mark.usefixtures("two_threads")
def test_agrees_with_the_reference(
    cell: str, isa: str, division: str, dtype: torch.dtype, use: Use
) -> None:
    use(isa, DIVISIONS[division] | POISON)
    for sizes in SIZES:
        if sizes[2] and cell != "lstm":
            continue
        for directions in (1, 2):
            # Each pair of a size and a direction meets one of the lists of lengths on each
            # division.
            for name in list(LENGTHS)[
                (sizes[1] + directions + list(DIVISIONS).index(division)) % 3 :: 3
            ][:1]:
                has_states = directions == 2
                network, wanted = truth(
                    cell, name, sizes, directions, dtype is torch.bfloat16, has_states
                )
                got = with_gradients(network.map(lambda t: t.to(dtype)), BACKEND, has_states)
                assert {part.dtype for part in got} == {dtype}
                assert_close(got, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("lengths", ["mixed", "one long", "all empty"])
@pytest.mark.parametrize("cell", KERNEL_CELLS)
def test_gradients_by_torchs_products(
    cell: str, lengths: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The products for many elements of bfloat16 on processors with bfloat16 instructions."""
    monkeypatch.setattr(Layer, "_computes_all_gradients", lambda *_: False)
    for sizes in ((7, 100, 0), (9, 9, 0), (5, 17, 6)):
        if sizes[2] and cell != "lstm":
            continue
        for directions in (1, 2):
            for dtype, tolerance in TOLERANCE.items():
                if dtype is torch.bfloat16 and cell.endswith("_relu"):
                    continue  # rounding turns units on and off
                network, wanted = truth(cell, lengths, sizes, directions, dtype is torch.bfloat16)
                assert_close(
                    with_gradients(network.map(partial(Tensor.to, dtype=dtype)), BACKEND),
                    wanted,
                    tolerance,
                )


# Not bfloat16: a thousand steps of its rounding say little about the products.
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("cell", KERNEL_CELLS)
@pytest.mark.usefixtures("two_threads")
def test_gradients_of_many_elements(cell: str, isa: str, dtype: torch.dtype, use: Use) -> None:
    use(isa, POISON)
    for sizes in ((5, 7, 0), (6, 6, 0), (3, 9, 4)):
        if sizes[2] and cell != "lstm":
            continue
        network, wanted = truth(cell, "many", sizes, 2, False)
        assert_close(
            with_gradients(network.map(lambda t: t.to(dtype)), BACKEND),
            wanted,
            10 * TOLERANCE[dtype],
        )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_weights_larger_than_a_cache(cell: str, isa: str, dtype: torch.dtype, use: Use) -> None:
    """They are read in parts by all rows, while those that follow are fetched."""
    use(isa, POISON)
    network, wanted = truth(cell, "one long", (5, 530, 0), 1, dtype is torch.bfloat16)
    assert_close(
        with_gradients(network.map(lambda t: t.to(dtype)), BACKEND), wanted, 10 * TOLERANCE[dtype]
    )


@pytest.mark.parametrize("cell", MATRIX_CELLS)
def test_thousands_of_steps(cell: str, use: Use) -> None:
    network = make(cell, [2000, 3], (2, 5, 0))
    wanted = with_gradients(network, reference.BACKEND)
    for isa in LIBRARY.isas:
        use(isa)
        assert_close(with_gradients(network, BACKEND), wanted, 1e-9)


@pytest.mark.parametrize("by_torch", [False, True])
@pytest.mark.parametrize("cell", KERNEL_CELLS)
@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_nan_stays_in_its_sequence(
    cell: str, isa: str, by_torch: bool, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In values, outputs and states, and in all gradients of one sequence, those of bfloat16 by
    torch's products.
    """
    use(isa, POISON)
    clean = make(cell, [4, 3, 5, 1, 6], (19, 19, 0), directions=2)
    if by_torch:
        monkeypatch.setattr(Layer, "_computes_all_gradients", lambda *_: False)
        clean = make(cell, [40, 43, 51, 1, 66], (19, 19, 0), directions=2).map(
            lambda t: t.to(torch.bfloat16)
        )
    bounds = offsets_from_lengths(clean.lengths).tolist()
    values = clean.values.clone()
    for sequence in (0, 2, 4):
        values[bounds[sequence] : bounds[sequence + 1]] = torch.nan
    found = [with_gradients(network, BACKEND) for network in (replace(clean, values=values), clean)]
    count = 2 * (1 + len(clean.state))  # results, then the gradients of values and states
    for a, b in zip(*(parts[:count] for parts in found), strict=True):
        for sequence in (1, 3):
            rows = slice(bounds[sequence], bounds[sequence + 1])
            assert_same_bits(
                *([part[rows] if a.dim() == 2 else part[:, sequence]] for part in (a, b))
            )
    assert bool(found[0][0][bounds[2] : bounds[3]].isnan().all())


@pytest.mark.parametrize(
    ("cell", "dtype"),
    [
        (cell, dtype)
        for place, cell in enumerate(KERNEL_CELLS)
        for dtype in (torch.float32, (torch.bfloat16, torch.float64)[place % 2])
    ],
)
@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_batch_invariance(
    cell: str, isa: str, dtype: torch.dtype, use: Use, any_threads: Callable[[int], None]
) -> None:
    """A sequence's outputs and states are bit-identical in any batch and at any number of
    threads.
    """
    lengths = [9, 1, 30, 0, 5, 5, 14, 2, 2, 130, 21]
    network = make(cell, lengths, (9, 37, 0), directions=2).map(lambda t: t.to(dtype))
    bounds = offsets_from_lengths(network.lengths).tolist()
    use(isa, POISON | NO_TEAM)
    with torch.no_grad():
        together = network.run(BACKEND, need_states=True)
        for threads, flags in (
            (1, "fold"),
            (2, "team"),
            (3, "team-fold"),
            (4, "prepare"),
            (4, "team"),
        ):
            any_threads(threads)
            use(isa, POISON | DIVISIONS[flags])
            assert_same_bits(network.run(BACKEND, need_states=True), together)
        for sequence in range(len(lengths)):
            rows = slice(bounds[sequence], bounds[sequence + 1])
            wanted = [
                part[rows] if part.dim() == 2 else part[:, sequence : sequence + 1]
                for part in together
            ]
            assert_same_bits(network.only(sequence).run(BACKEND, need_states=True), wanted)
    # What is kept for a backward pass changes nothing either.
    assert_same_bits(with_gradients(network, BACKEND, need_states=True)[: len(together)], together)


# Torch computes large products in bfloat16 on processors with its instructions.
@pytest.mark.parametrize(
    ("many", "dtype"),
    [
        (True, torch.float32),
        (False, torch.float32),
        (False, torch.float64),
        (False, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("cell", KERNEL_CELLS)
def test_gradients_are_the_same_bits_at_any_number_of_threads(
    cell: str,
    isa: str,
    many: bool,
    dtype: torch.dtype,
    use: Use,
    any_threads: Callable[[int], None],
) -> None:
    lengths = MANY if many else [9, 1, 30, 0, 5, 5, 14, 2, 2, 2, 21]
    network = make(cell, lengths, (9, 37, 0), directions=2).map(lambda t: t.to(dtype))
    use(isa, NO_TEAM)
    any_threads(1)
    alone = with_gradients(network, BACKEND)
    for threads in (2, 3, 4):
        any_threads(threads)
        assert_same_bits(with_gradients(network, BACKEND), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("cell", KERNEL_CELLS)
def test_gradients_of_values_and_states_are_the_same_bits_in_any_batch(
    cell: str, isa: str, dtype: torch.dtype, use: Use
) -> None:
    network = make(cell, MANY, (9, 37, 0), directions=2).map(lambda t: t.to(dtype))
    bounds = offsets_from_lengths(network.lengths).tolist()
    use(isa)

    def gradients(network: Network) -> list[Tensor]:
        leaves = network.map(lambda t: t.clone().requires_grad_())
        return list(
            torch.autograd.grad(squares(leaves.run(BACKEND)), [leaves.values, *leaves.state])
        )

    values, *states = gradients(network)
    for b in (0, 1, 2, 4, 9):
        found = gradients(network.only(b))
        assert torch.equal(found[0], values[bounds[b] : bounds[b + 1]])
        assert_same_bits(found[1:], [part[:, b : b + 1] for part in states])


TRUTH = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "erf": torch.erf,
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("function", TRUTH)
def test_within_four_ulp(function: str, isa: str) -> None:
    """Of some floats; ``make ulps`` tests all of them."""
    kernels = LIBRARY.with_isa(isa)
    all_bits = torch.from_numpy(
        np.arange(0, 1 << 32, 9973, dtype=np.int64).astype(np.uint32).view(np.float32)
    )
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 3e38, -3e38, 88.72, -103.9]
    )
    x = torch.cat([all_bits, special, torch.linspace(-110, 110, 500_001)])
    got, truth = kernels.apply(function, x), TRUTH[function](x.double())
    rounded = truth.float()
    assert torch.equal(got.isnan(), truth.isnan())
    finite = rounded.isfinite() & got.isfinite()
    # Where one of the two overflows, the other must be within a few ulp of it.
    assert bool((truth[~finite & ~truth.isnan() & (got != rounded)] > 3.4028e38).all())
    spacing = np.abs(np.spacing(rounded[finite].numpy())).astype(np.float64)
    assert ((got[finite].double() - truth[finite]).abs().numpy() / spacing).max() <= 4
    wide = torch.linspace(-800, 800, 100_001, dtype=torch.float64)
    for numbers in (wide, wide / 400):
        truth = TRUTH[function](numbers)
        normal = ~(truth.abs() <= 1e-300)
        got = kernels.apply(function, numbers)[normal]
        assert torch.allclose(got, truth[normal], rtol=2e-15, atol=0, equal_nan=True)


@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_bfloat16_is_rounded_as_torch_rounds(isa: str, use: Use) -> None:
    """To nearest, ties to even: of sums that float32 holds exactly, each of which is stored
    once.
    """
    use(isa)
    sums, values = sums_between_bfloat16()
    ones, nothing = torch.ones(17, 2).bfloat16(), torch.zeros(17, 17).bfloat16()
    network = make("rnn_relu", [1] * len(values), (2, 17, 0), bias=False).map(Tensor.bfloat16)
    network.state[0].zero_()
    weights = (network.weights[0]._replace(input=ones, hidden=nothing),)
    output, h = replace(network, values=values, weights=weights).run(BACKEND)
    wanted = sums.relu().bfloat16().unsqueeze(1).expand(-1, 17)
    assert_same_bits([output, h[0]], [wanted, wanted])
    # Some instruction sets read in the next step what was rounded in this one; the rounding of
    # either is the same.
    values = torch.stack([values, torch.zeros_like(values)], 1).flatten(0, 1)
    weights = (weights[0]._replace(hidden=torch.eye(17).bfloat16()),)
    network = replace(network, values=values, lengths=torch.full((len(sums),), 2), weights=weights)
    output, h = network.run(BACKEND)
    assert_same_bits([output[1::2], h[0]], [wanted, wanted])
