"""int8 weights against the same arithmetic in NumPy on every supported instruction set, and their
bits.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from cpu_networks import (
    DIVISIONS,
    LENGTHS,
    LIBRARY,
    MATRIX_CELLS,
    POISON,
    SIZES,
    Network,
    Use,
    make,
)
from raglane.errors import ArgumentError
from raglane.kernels.cpu.layer import Layer, LayerResult, Tensors, layer_of
from raglane.segments import offsets_from_lengths

# More numbers per row than a vector of bytes has, in the state and in the input.
MANY = [*SIZES, (130, 70, 0), (5, 130, 90)]


def parts(network: Network) -> tuple[Layer, Tensor, Tensors]:
    """A network of one layer in float32, as the kernels get it."""
    network = network.map(Tensor.float)
    weights = tuple(part for own in network.weights for part in own)
    offsets, tensors = (
        offsets_from_lengths(network.lengths),
        (network.values, *network.state, *weights),
    )
    sizes = tuple(part.shape[2] for part in network.state)
    return (
        layer_of(network.cell.name, offsets, tensors, len(weights), sizes, network.directions),
        offsets,
        tensors,
    )


def run(network: Network) -> LayerResult:
    layer, offsets, tensors = parts(network)
    packed = layer.packed(tensors[1 + len(network.state) :], dtype=torch.int8)
    return layer.forward(
        offsets, tensors, need_output=True, save=False, need_c=len(layer.sizes) > 1, packed=packed
    )


def states(network: Network) -> list[np.ndarray]:
    """Output, ``c`` after each element, and the final states."""
    ran = run(network)
    return [part.numpy() for part in (ran.output, ran.c_states, *ran.final) if part is not None]


def rounded(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers, and the scale of each row."""
    largest = np.abs(rows).max(1, keepdims=True)
    inverse = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest > 0)
    return np.rint(rows * inverse).astype(np.int64), largest / np.float32(127)


def multiplied(rows: np.ndarray, weights: Tensor) -> np.ndarray:
    """Rows times a matrix ``(columns, depth)`` of int8."""
    (x, x_scale), (w, w_scale) = rounded(rows), rounded(weights.numpy())
    return (x @ w.T).astype(np.float32) * (x_scale * w_scale.T)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))


def step(cell: str, weights: Any, x: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
    """One step of many rows: gates' arguments with the kernels' rounding, the rest in float64."""
    before, after = (np.float32(0) if part is None else part.numpy() for part in weights[2:4])
    h = multiplied(state[0], weights[1])
    if cell == "gru":
        x = multiplied(x, weights[0]) + before
        r, z, n = np.split(x.astype(float), 3, 1)
        hr, hz, hn = np.split(h.astype(float), 3, 1)
        br, bz, bn = np.split(np.broadcast_to(after, x.shape[1:]), 3)
        r, z = sigmoid(r + br + hr), sigmoid(z + bz + hz)
        n = np.tanh(n + r * (hn + bn))
        return [n + z * (state[0] - n)]
    summed = ((before + after) + multiplied(x, weights[0])) + h
    if cell == "rnn_relu":
        return [np.maximum(summed, 0)]
    if cell == "rnn_tanh":
        return [np.tanh(summed.astype(float))]
    i, f, g, o = np.split(summed.astype(float), 4, 1)
    c = sigmoid(f) * state[1] + sigmoid(i) * np.tanh(g)
    out = sigmoid(o) * np.tanh(c)
    return [out if weights[4] is None else multiplied(out.astype(np.float32), weights[4]), c]


def each_step(network: Network, found: list[np.ndarray]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return every state of every direction by the kernels, and by NumPy from the kernels' previous
    states.

    So the rounding of one step does not change the integers of the next.
    """
    network = network.map(Tensor.float)
    offsets, has_c = offsets_from_lengths(network.lengths).numpy(), len(network.state) > 1
    width = network.state[0].shape[2]
    pairs: list[tuple[np.ndarray, np.ndarray]] = []
    for d in range(network.directions):
        after = [found[0][:, d * width :][:, :width], *(found[1][d : d + 1] if has_c else ())]
        before = [np.zeros_like(part) for part in after]
        for b, (begin, end) in enumerate(pairwise(offsets)):
            for part, then, initial in zip(before, after, network.state, strict=True):
                rows, first = then[begin:end], initial[d, b].numpy()[None]
                whole = np.concatenate([first, rows] if d == 0 else [rows, first])
                part[begin:end] = whole[: end - begin] if d == 0 else whole[1:]
        wanted = step(network.cell.name, network.weights[d], network.values.numpy(), before)
        pairs += zip(after, wanted, strict=True)
    return pairs


@pytest.mark.parametrize("division", DIVISIONS)
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("cell", MATRIX_CELLS)
@pytest.mark.usefixtures("two_threads")
def test_agrees_with_integers_in_numpy(cell: str, isa: str, division: str, use: Use) -> None:
    use(isa, DIVISIONS[division] | POISON)
    for index, sizes in enumerate(MANY):
        if sizes[2] and cell != "lstm":
            continue
        lengths = list(LENGTHS.values())[index % len(LENGTHS)]
        network = make(cell, lengths, sizes, directions=1 + index % 2, bias=index % 3 > 0)
        for found, wanted in each_step(network, states(network)):
            assert np.abs(found - wanted).max(initial=0) < 1e-6
            if cell == "rnn_relu":  # where nothing but the product is rounded
                assert np.array_equal(found, wanted)


@pytest.mark.skipif("amx" not in LIBRARY.isas, reason="one int8 set for all instruction sets")
def test_an_instruction_set_has_int8_loops_of_its_own(use: Use) -> None:
    """The tiles of AMX fill up what a row multiplies, which AVX512-VNNI does not."""
    network, sizes = make("gru", [1], (5, 17, 0)), {}
    for isa in LIBRARY.isas:
        use(isa)
        layer, _, tensors = parts(network)
        sizes[isa] = layer.packed(tensors[1 + len(network.state) :], dtype=torch.int8).numel()
    assert sizes["amx"] > sizes["avx512"] == sizes["avx512bf16"]


@pytest.mark.parametrize("isa", LIBRARY.isas)
def test_the_largest_products(isa: str, use: Use) -> None:
    """Sums of two bytes times bytes here are more than 16 bits hold, of either sign."""
    use(isa)
    network = make("rnn_relu", [2, 1], (300, 40, 0)).map(torch.ones_like)
    network.weights[0].input[:, :100] = -1
    (found, wanted), *_ = each_step(network, states(network))
    assert found.min() > 100
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("cell", MATRIX_CELLS)
@pytest.mark.usefixtures("two_threads")
def test_bits_depend_on_the_sequence_alone(cell: str, use: Use) -> None:
    network = make(cell, LENGTHS["one long"], (20, 37, 0), directions=2)
    offsets = offsets_from_lengths(network.lengths)
    for isa in LIBRARY.isas:
        use(isa)
        whole = states(network)
        for flags in DIVISIONS.values():
            use(isa, flags)
            for one, other in zip(states(network), whole, strict=True):
                assert np.array_equal(one, other)
        for b in (0, 7):
            assert np.array_equal(states(network.only(b))[0], whole[0][offsets[b] : offsets[b + 1]])


@pytest.mark.parametrize("cell", MATRIX_CELLS)
def test_non_finite_numbers_stay_in_their_sequence(cell: str) -> None:
    network = make(cell, [3, 2, 4], (6, 9, 0))
    wanted = states(network)
    for bad in (float("nan"), float("inf")):
        values = network.values.clone()
        values[3, 2] = bad
        found = states(replace(network, values=values))
        assert np.isnan(found[0][3:5]).all()
        assert np.array_equal(np.delete(found[0], [3, 4], 0), np.delete(wanted[0], [3, 4], 0))


@pytest.mark.parametrize("value", [0.0, 1e-40])
def test_rows_of_zeros_have_no_scale(value: float) -> None:
    """A row of zeros, or of numbers whose inverse overflows, has zeros as its products."""
    network = make("rnn_relu", [2, 1], (6, 9, 0), bias=False)
    zeros = network.map(
        lambda part: (
            torch.full_like(part, value) if part is network.values else torch.zeros_like(part)
        )
    )
    assert not states(replace(zeros, weights=network.weights))[0].any()
    assert not states(replace(zeros, values=network.values))[0].any()


def test_refusals() -> None:
    layer, offsets, tensors = parts(make("lstm", [2], (64, 64, 0)))
    packed = layer.packed(tensors[3:], dtype=torch.int8)
    assert packed.numel() < layer.packed(tensors[3:]).numel() / 3
    with pytest.raises(
        ArgumentError, match="dtype must be that of a real if gradients are needed, got int8"
    ):
        layer.forward(offsets, tensors, need_output=True, save=True, need_c=False, packed=packed)
    wide = tuple(part if part is None else part.double() for part in tensors)
    of_double = layer_of("lstm", offsets, wide, 5, layer.sizes, 1)
    with pytest.raises(ArgumentError, match="with int8 weights"):
        of_double.packed(wide[3:], dtype=torch.int8)
    with pytest.raises(ArgumentError, match="with int8 weights"):
        of_double.forward(offsets, wide, need_output=True, save=False, need_c=False, packed=packed)
    unsigned = packed.view(torch.uint8)
    with pytest.raises(ArgumentError, match="packed must be the weights of this layer"):
        layer.forward(offsets, tensors, need_output=True, save=False, need_c=False, packed=unsigned)
    other, _, theirs = parts(make("indrnn_tanh", [2]))
    with pytest.raises(ArgumentError, match="for an element-wise cell, got int8"):
        other.packed(theirs[2:], dtype=torch.int8)
    deep = make("rnn_tanh", [1], (65_537, 1, 0))
    with pytest.raises(ArgumentError, match="at most 65536 for int8 weights"):
        run(deep)
