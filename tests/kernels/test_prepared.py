"""Prepared layers and programs: pieces of sequences have the bits of whole ones, and slots are independent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from cpu_networks import DIVISIONS, KERNEL_CELLS, LIBRARY, MATRIX_CELLS, POISON, Network, Use, make
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.cpu.backend import BACKEND
from raglane.kernels.cpu.layer import layer_of
from raglane.kernels.cpu.prepared import PreparedLayer, PreparedProgram
from raglane.programs.program import Program
from raglane.segments import offsets_from_lengths
from random_programs import Case, draw, tensors_for

LENGTHS = [9, 0, 1, 24, 5, 5, 13]
SLOTS = 19
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8]
SIZES = {"narrow": (5, 17, 0), "wide": (16, 64, 0), "projected": (5, 17, 6)}


def prepared(network: Network, dtype: torch.dtype) -> tuple[PreparedLayer, Network]:
    """A layer, and its network in the dtype of its tensors."""
    own = network.map(lambda part: part.to(torch.float32 if dtype is torch.int8 else dtype))
    sizes = tuple(part.shape[2] for part in network.state)
    return PreparedLayer(own.cell.name, own.weights[0], sizes, torch.int8 if dtype is torch.int8 else None), own


def in_pieces(
    run: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    pools: Sequence[Tensor],
    slots: Tensor,
    divide: Callable[[int], None],
) -> list[Tensor]:
    """Run sequences in random pieces, in random batches, divided among threads in random ways."""
    chance, parts = Random(7), [part.split(LENGTHS) for part in inputs]
    done, outputs = [0] * len(LENGTHS), [list[Sequence[Tensor]]() for _ in LENGTHS]
    while done != LENGTHS:
        ready = [index for index in range(len(LENGTHS)) if chance.random() < 0.7]
        chance.shuffle(ready)
        counts = [min(chance.choice([0, 1, 1, 2, 7]), LENGTHS[index] - done[index]) for index in ready]
        pairs = list(zip(ready, counts, strict=True))
        rows = [
            torch.cat([part.new_empty(0, part.shape[1]), *[own[i][done[i] : done[i] + n] for i, n in pairs]])
            for own, part in zip(parts, inputs, strict=True)
        ]
        torch.set_num_threads(chance.choice([1, 2]))
        divide(chance.choice([0, *[POISON | flags for flags in DIVISIONS.values()]]))
        results = run(rows, offsets_from_lengths(torch.tensor(counts, dtype=torch.int64)), slots[ready], pools)
        for index, piece in zip(ready, zip(*[result.split(counts) for result in results], strict=True), strict=True):
            outputs[index].append(piece)
            done[index] += piece[0].shape[0]
    return [torch.cat(pieces) for own in outputs if own for pieces in zip(*own, strict=True)]


def by_sequence(results: Sequence[Tensor]) -> list[Tensor]:
    return [piece for pieces in zip(*[result.split(LENGTHS) for result in results], strict=True) for piece in pieces]


def fresh_pools(prepared: PreparedLayer | PreparedProgram, slots: Tensor) -> tuple[Tensor, ...]:
    """Pools with zeros in these slots, and NaN in all others."""
    pools = tuple(torch.full_like(pool, torch.nan) for pool in prepared.pools(SLOTS))
    for pool in pools:
        pool[slots] = 0
    return pools


def assert_untouched(pools: Sequence[Tensor], slots: Tensor) -> None:
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[slots] = False
    assert all(pool[others].isnan().all() and not pool[slots].isnan().any() for pool in pools)


# ---- layers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("cell", KERNEL_CELLS)
@pytest.mark.usefixtures("two_threads")
def test_pieces_have_the_bits_of_a_layer(cell: str, isa: str, dtype: torch.dtype, sizes: str, use: Use) -> None:
    if (dtype is torch.int8 and cell not in MATRIX_CELLS) or (sizes == "projected" and cell != "lstm"):
        pytest.skip("the cell has no such layer")
    use(isa, 0)
    layer, network = prepared(make(cell, LENGTHS, SIZES[sizes]), dtype)
    offsets = offsets_from_lengths(network.lengths)
    tensors = (network.values, *network.weights[0])
    plain = layer_of(cell, offsets, tensors, len(network.weights[0]), layer.state_sizes, 1)
    packed = plain.packed(tensors[1:], dtype=torch.int8) if dtype is torch.int8 else None
    wanted = plain.forward(plain.admit(offsets, tensors), need_output=True, save=False, need_c=False, packed=packed)
    whole = layer.run(network.values, offsets)
    assert torch.equal(whole, wanted.output)  # type: ignore[arg-type]
    slots = torch.randperm(SLOTS)[: len(LENGTHS)]
    pools = fresh_pools(layer, slots)
    got = in_pieces(lambda rows, *rest: [layer.run(*rows, *rest)], [network.values], pools, slots, partial(use, isa))
    assert all(map(torch.equal, got, by_sequence([whole])))
    assert_untouched(pools, slots)
    for pool, final in zip(pools, wanted.final, strict=True):
        assert torch.equal(pool[slots].to(final.dtype), final[0])


@pytest.mark.parametrize("cell", KERNEL_CELLS)
def test_states_begin_in_the_pool(cell: str) -> None:
    layer, network = prepared(make(cell, LENGTHS), torch.float32)
    wanted = network.run(BACKEND)
    pools, slots = layer.pools(SLOTS), torch.randperm(SLOTS)[: len(LENGTHS)]
    for pool, state in zip(pools, network.state, strict=True):
        pool[slots] = state[0]
    output = layer.run(network.values, offsets_from_lengths(network.lengths), slots, pools)
    assert torch.equal(output, wanted[0])
    assert all(torch.equal(pool[slots], final[0]) for pool, final in zip(pools, wanted[1:], strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", KERNEL_CELLS)
@pytest.mark.usefixtures("two_threads")
def test_nan_stays_in_its_slot(cell: str, dtype: torch.dtype) -> None:
    if dtype is torch.int8 and cell not in MATRIX_CELLS:
        pytest.skip("the cell has no such layer")
    layer, network = prepared(make(cell, LENGTHS), dtype)
    offsets, slots = offsets_from_lengths(network.lengths), torch.arange(len(LENGTHS))
    pools, others = layer.pools(SLOTS), layer.pools(SLOTS)
    wanted = layer.run(network.values, offsets, slots, pools)
    begin, end = offsets[3:5].tolist()
    values = network.values.clone()
    values[begin] = torch.nan
    got = layer.run(values, offsets, slots, others)
    assert got[begin:end].isnan().any()
    got[begin:end] = wanted[begin:end]
    assert torch.equal(got, wanted)
    for pool, other in zip(pools, others, strict=True):
        other[3] = pool[3]
        assert torch.equal(pool, other)


def test_later_changes_of_weights_have_no_effect() -> None:
    layer, network = prepared(make("lstm", LENGTHS), torch.float32)
    offsets = offsets_from_lengths(network.lengths)
    before = layer.run(network.values, offsets)
    for part in network.weights[0]:
        if part is not None:
            part.zero_()
            part.untyped_storage().resize_(0)
    assert torch.equal(layer.run(network.values, offsets), before)


# ---- programs -----------------------------------------------------------------------------------------------------


def drawn_programs() -> list[Program]:
    """Programs that can be prepared."""
    drawn = (draw(Random(seed)) for seed in range(200))
    return [program for program in drawn if program.outputs and not program.given("sequence")][:12]


def prepared_program(case: Case, dtype: torch.dtype) -> PreparedProgram:
    given = case.to(dtype).given
    return PreparedProgram(case.program, vectors=given["vectors"], weights=given["weights"], dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.usefixtures("two_threads")
def test_pieces_have_the_bits_of_a_program(number: int, isa: str, dtype: torch.dtype, use: Use) -> None:
    if isa in ("avx512bf16", "amx"):
        pytest.skip("the same loops as avx512")
    use(isa, 0)
    case = tensors_for(drawn_programs()[number], LENGTHS)
    for state in case.given["states"]:
        state.zero_()
    program, case = prepared_program(case, dtype), case.to(dtype)
    results = case.run()
    wanted, finals = results[: len(case.program.outputs)], results[len(case.program.outputs) :]
    elements = case.given["elements"]
    assert all(map(torch.equal, program.run(elements, case.offsets), wanted))
    slots = torch.randperm(SLOTS)[: len(LENGTHS)]
    pools = fresh_pools(program, slots)
    got = in_pieces(program.run, elements, pools, slots, partial(use, isa))
    assert all(map(torch.equal, got, by_sequence(wanted)))
    assert_untouched(pools, slots)
    assert all(torch.equal(pool[slots], final) for pool, final in zip(pools, finals, strict=True))


# ---- arguments ----------------------------------------------------------------------------------------------------


def _call() -> tuple[PreparedLayer, dict[str, Any]]:
    layer, network = prepared(make("lstm", [2, 1]), torch.float32)
    arguments = {"rows": network.values, "offsets": torch.tensor([0, 2, 3]), "slots": torch.tensor([4, 2])}
    return layer, {**arguments, "pools": [pool + 1 for pool in layer.pools(5)]}


def _short(part: Tensor) -> Tensor:
    """The tensor after its storage was freed."""
    part = part.clone()
    part.untyped_storage().resize_(0)
    return part


WRONG: dict[str, tuple[str, Callable[[Any], Any], type[Exception], str]] = {
    "slots below 0": ("slots", lambda _: torch.tensor([4, -1]), ArgumentError, "from 0 to 4"),
    "slots above": ("slots", lambda _: torch.tensor([5, 0]), ArgumentError, "from 0 to 4"),
    "slots twice": ("slots", lambda _: torch.tensor([3, 3]), ArgumentError, "3 twice"),
    "slots of int32": ("slots", Tensor.int, ShapeError, "int64"),
    "slots of another number": ("slots", lambda _: torch.tensor([1]), ShapeError, r"\(2,\)"),
    "slots in two dimensions": ("slots", lambda part: part[None], ShapeError, r"\(2,\)"),
    "slots as a list": ("slots", Tensor.tolist, ArgumentTypeError, "slots must be a tensor"),
    "slots without storage": ("slots", _short, ShapeError, "slots must be a tensor whose storage"),
    "offsets that fall": ("offsets", lambda _: torch.tensor([0, 4, 3]), ArgumentError, "offset"),
    "offsets of another total": ("offsets", lambda _: torch.tensor([0, 1, 2]), ArgumentError, "number of elements"),
    "rows of another size": ("rows", lambda part: part[:, 1:], ShapeError, r"\(3, 5\)"),
    "rows of another dtype": ("rows", Tensor.double, ShapeError, "float32"),
    "rows without storage": ("rows", _short, ShapeError, "rows must be a tensor whose storage"),
    "one pool": ("pools", lambda parts: parts[:1], ShapeError, "2 tensors"),
    "pools of two sizes": ("pools", lambda parts: [parts[0], parts[1][:4]], ShapeError, r"pools\[1\]"),
    "too few slots": ("pools", lambda parts: [part[:4] for part in parts], ArgumentError, "from 0 to 3"),
    "a pool twice": ("pools", lambda parts: [parts[0], parts[0]], ShapeError, "common memory"),
    "a pool of float64": ("pools", lambda parts: [parts[0].double(), parts[1]], ShapeError, "float32"),
    "a pool of columns": ("pools", lambda parts: [parts[0].t().contiguous().t(), parts[1]], ShapeError, "contiguous"),
    "a pool without storage": ("pools", lambda parts: [parts[0], _short(parts[1])], ShapeError, "storage"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("is_first", [True, False])
def test_wrong_arguments_change_no_slot(name: str, is_first: bool) -> None:
    argument, change, error, words = WRONG[name]
    layer, arguments = _call()
    if not is_first:  # a guard of these tensors exists
        layer.run(**arguments)
    before = [pool.clone() for pool in arguments["pools"]]
    with pytest.raises(error, match=words):
        layer.run(**arguments | {argument: change(arguments[argument])})
    assert all(map(torch.equal, arguments["pools"], before))


@pytest.mark.parametrize("change", [Tensor.t, lambda part: part.repeat(1, 2)[:, :5], torch._neg_view])
def test_rows_of_any_layout(change: Callable[[Tensor], Tensor]) -> None:
    layer, network = prepared(make("gru", [5]), torch.float32)
    rows, offsets = change(network.values), torch.tensor([0, 5, 5])[::2]
    assert torch.equal(layer.run(rows, offsets), layer.run(rows.resolve_neg().contiguous(), torch.tensor([0, 5])))


def test_programs_that_cannot_be_prepared() -> None:
    program = next(own for own in (draw(Random(seed)) for seed in range(200)) if own.given("sequence"))
    case = tensors_for(program, LENGTHS)
    with pytest.raises(ArgumentError, match="inputs per element"):
        prepared_program(case, torch.float32)
