"""Prepared layers and programs: pieces of sequences have the bits of whole ones, and slots are
independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from torch import Tensor

from cpu_networks import DIVISIONS, KERNEL_CELLS, LIBRARY, MATRIX_CELLS, POISON, Network, Use, make
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels.cpu.backend import BACKEND
from raglane.kernels.cpu.layer import layer_of
from raglane.kernels.cpu.prepared import Kernel, PreparedLayer, PreparedProgram, Rows, Runner
from raglane.programs.program import Program
from raglane.segments import offsets_from_lengths
from random_programs import Case, draw, tensors_for

LENGTHS = [9, 0, 1, 24, 5, 5, 13]
SLOTS = 19
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int8]
SIZES = {"narrow": (5, 17, 0), "wide": (16, 64, 0), "projected": (5, 17, 6)}


class Columns(Kernel):
    """Takes columns of the rows in torch."""

    def __init__(self, begin: int, width: int, dtype: torch.dtype) -> None:
        super().__init__(width, dtype)
        self._begin = begin

    def run(self, rows: Rows) -> None:
        rows.output.copy_(rows.inputs[0][:, self._begin : self._begin + self.width])


def run_on(
    kernel: Kernel, inputs: Sequence[Tensor], offsets: Tensor, slots: Tensor, pools: list[Tensor]
) -> Tensor:
    """Run one kernel on a batch."""
    joined, begin = torch.cat(list(inputs), 1), 0
    elements, sequences = joined.shape[0], len(offsets) - 1
    stages: list[tuple[Kernel, Sequence[int]]] = []
    for part in inputs:
        stages.append((Columns(begin, part.shape[1], part.dtype), [0]))
        begin += part.shape[1]
    stages.append((kernel, range(1, len(inputs) + 1)))
    runner = Runner(stages, joined.shape[1], joined.dtype, [*[[] for _ in inputs], pools])
    runner.reserve(elements, sequences)
    runner.rows[0][:elements] = joined
    runner.offsets[: sequences + 1], runner.slots[:sequences] = offsets.numpy(), slots.numpy()
    runner.run(elements, sequences)
    return runner.rows[-1][:elements].clone()


def prepared(network: Network, dtype: torch.dtype) -> tuple[PreparedLayer, Network]:
    """A layer, and its network in the dtype of its tensors."""
    own = network.map(lambda part: part.to(torch.float32 if dtype is torch.int8 else dtype))
    sizes = tuple(part.shape[2] for part in network.state)
    return PreparedLayer(
        own.cell.name, own.weights[0], sizes, torch.int8 if dtype is torch.int8 else None
    ), own


def in_pieces(
    kernel: Kernel,
    inputs: Sequence[Tensor],
    pools: list[Tensor],
    slots: Tensor,
    divide: Callable[[int], None],
) -> list[Tensor]:
    """Run sequences in random pieces, in random batches, divided among threads in random ways."""
    chance, parts = Random(7), [part.split(LENGTHS) for part in inputs]
    done, outputs = [0] * len(LENGTHS), [list[Tensor]() for _ in LENGTHS]
    while done != LENGTHS:
        ready = [index for index in range(len(LENGTHS)) if chance.random() < 0.7]
        chance.shuffle(ready)
        counts = [
            min(chance.choice([0, 1, 1, 2, 7]), LENGTHS[index] - done[index]) for index in ready
        ]
        pairs = list(zip(ready, counts, strict=True))
        rows = [
            torch.cat(
                [
                    part.new_empty(0, part.shape[1]),
                    *[own[i][done[i] : done[i] + n] for i, n in pairs],
                ]
            )
            for own, part in zip(parts, inputs, strict=True)
        ]
        torch.set_num_threads(chance.choice([1, 2]))
        divide(chance.choice([0, *[POISON | flags for flags in DIVISIONS.values()]]))
        offsets = offsets_from_lengths(torch.tensor(counts, dtype=torch.int64))
        for index, piece in zip(
            ready, run_on(kernel, rows, offsets, slots[ready], pools).split(counts), strict=True
        ):
            outputs[index].append(piece)
            done[index] += piece.shape[0]
    return [torch.cat(own) if own else inputs[0].new_empty(0, kernel.width) for own in outputs]


def fresh_pools(kernel: Kernel, slots: Tensor) -> list[Tensor]:
    """Pools with zeros in these slots, and NaN in all others."""
    pools = [torch.full_like(pool, torch.nan) for pool in kernel.pools(SLOTS)]
    for pool in pools:
        pool[slots] = 0
    return pools


def assert_untouched(pools: Sequence[Tensor], slots: Tensor) -> None:
    others = torch.ones(SLOTS, dtype=torch.bool)
    others[slots] = False
    assert all(pool[others].isnan().all() and not pool[slots].isnan().any() for pool in pools)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.parametrize("cell", KERNEL_CELLS)
@pytest.mark.usefixtures("two_threads")
def test_pieces_have_the_bits_of_a_layer(
    cell: str, isa: str, dtype: torch.dtype, sizes: str, use: Use
) -> None:
    if (dtype is torch.int8 and cell not in MATRIX_CELLS) or (
        sizes == "projected" and cell != "lstm"
    ):
        pytest.skip("the cell has no such layer")
    use(isa, 0)
    layer, network = prepared(make(cell, LENGTHS, SIZES[sizes]), dtype)
    offsets = offsets_from_lengths(network.lengths)
    tensors = (network.values, *network.weights[0])
    plain = layer_of(cell, offsets, tensors, len(network.weights[0]), layer.sizes, 1)
    packed = plain.packed(tensors[1:], dtype=torch.int8) if dtype is torch.int8 else None
    wanted = plain.forward(
        offsets, tensors, need_output=True, save=False, need_c=False, packed=packed
    )
    assert wanted.output is not None
    slots = torch.randperm(SLOTS)[: len(LENGTHS)]
    pools = fresh_pools(layer, slots)
    got = in_pieces(layer, [network.values], pools, slots, partial(use, isa))
    assert all(map(torch.equal, got, wanted.output.split(LENGTHS)))
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
    output = run_on(layer, [network.values], offsets_from_lengths(network.lengths), slots, pools)
    assert torch.equal(output, wanted[0])
    assert all(
        torch.equal(pool[slots], final[0]) for pool, final in zip(pools, wanted[1:], strict=True)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cell", KERNEL_CELLS)
@pytest.mark.usefixtures("two_threads")
def test_nan_stays_in_its_slot(cell: str, dtype: torch.dtype) -> None:
    if dtype is torch.int8 and cell not in MATRIX_CELLS:
        pytest.skip("the cell has no such layer")
    layer, network = prepared(make(cell, LENGTHS), dtype)
    offsets, slots = offsets_from_lengths(network.lengths), torch.arange(len(LENGTHS))
    pools, others = fresh_pools(layer, torch.arange(SLOTS)), fresh_pools(layer, torch.arange(SLOTS))
    wanted = run_on(layer, [network.values], offsets, slots, pools)
    begin, end = offsets[3:5].tolist()
    values = network.values.clone()
    values[begin] = torch.nan
    got = run_on(layer, [values], offsets, slots, others)
    assert got[begin:end].isnan().any()
    got[begin:end] = wanted[begin:end]
    assert torch.equal(got, wanted)
    for pool, other in zip(pools, others, strict=True):
        other[3] = pool[3]
        assert torch.equal(pool, other)


def test_later_changes_of_weights_have_no_effect() -> None:
    layer, network = prepared(make("lstm", LENGTHS), torch.float32)
    offsets, slots = offsets_from_lengths(network.lengths), torch.arange(len(LENGTHS))
    before = run_on(layer, [network.values], offsets, slots, fresh_pools(layer, slots))
    for part in network.weights[0]:
        if part is not None:
            part.zero_()
            part.untyped_storage().resize_(0)
    assert torch.equal(
        run_on(layer, [network.values], offsets, slots, fresh_pools(layer, slots)), before
    )


def drawn_programs() -> list[Program]:
    """Programs that can be prepared."""
    drawn = (draw(Random(seed)) for seed in range(200))
    fitting = [program for program in drawn if program.outputs and not program.widths("sequence")]
    return [replace(program, outputs=program.outputs[:1]) for program in fitting][:12]


def prepared_program(case: Case, dtype: torch.dtype) -> PreparedProgram:
    given = case.to(dtype).given
    return PreparedProgram(
        case.program, vectors=given["vectors"], weights=given["weights"], dtype=dtype
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("number", range(12))
@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.usefixtures("two_threads")
def test_pieces_have_the_bits_of_a_program(
    number: int, isa: str, dtype: torch.dtype, use: Use
) -> None:
    if isa in ("avx512bf16", "amx"):
        pytest.skip("the same loops as avx512")
    use(isa, 0)
    case = tensors_for(drawn_programs()[number], LENGTHS)
    for state in case.given["states"]:
        state.zero_()
    program, case = prepared_program(case, dtype), case.to(dtype)
    wanted, *finals = case.run()
    slots = torch.randperm(SLOTS)[: len(LENGTHS)]
    pools = fresh_pools(program, slots)
    got = in_pieces(program, case.given["elements"], pools, slots, partial(use, isa))
    assert all(map(torch.equal, got, wanted.split(LENGTHS)))
    assert_untouched(pools, slots)
    assert all(torch.equal(pool[slots], final) for pool, final in zip(pools, finals, strict=True))


WRONG = {
    "slots below 0": ("slots", [4, -1], "slot"),
    "slots above": ("slots", [5, 0], "slot"),
    "slots twice": ("slots", [3, 3], "slot"),
    "offsets that fall": ("offsets", [0, 4, 3], "offset"),
    "offsets of another total": ("offsets", [0, 1, 2], "offset"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_batches_change_no_slot(name: str) -> None:
    argument, numbers, words = WRONG[name]
    layer, network = prepared(make("lstm", [2, 1]), torch.float32)
    pools = [pool.zero_() for pool in layer.pools(5)]
    batch = {"offsets": torch.tensor([0, 2, 3]), "slots": torch.tensor([4, 2])}
    with pytest.raises(ArgumentError, match=words):
        run_on(layer, [network.values], **batch | {argument: torch.tensor(numbers)}, pools=pools)
    assert not any(pool.any() for pool in pools)


@pytest.mark.parametrize(
    "change",
    [
        lambda pools: [pools[0], pools[1][:4]],
        lambda pools: [pools[0], pools[0]],
        lambda pools: [pools[0].double(), pools[1]],
        lambda pools: [pools[0].t().contiguous().t(), pools[1]],
        lambda pools: (pools[1].untyped_storage().resize_(0), pools)[1],
    ],
)
def test_pools_that_c_cannot_write(change: Callable[[list[Tensor]], list[Tensor]]) -> None:
    layer, network = prepared(make("lstm", [2, 1]), torch.float32)
    with pytest.raises(ShapeError, match="pools must be contiguous"):
        run_on(
            layer,
            [network.values],
            torch.tensor([0, 2, 3]),
            torch.tensor([4, 2]),
            change(layer.pools(5)),
        )


@pytest.mark.parametrize("rows", [torch.zeros(3, 4), torch.zeros(3, 5).double()])
def test_rows_of_another_stage(rows: Tensor) -> None:
    layer, _ = prepared(make("lstm", [2, 1]), torch.float32)
    with pytest.raises(ShapeError, match="rows must be"):
        run_on(layer, [rows], torch.tensor([0, 2, 3]), torch.tensor([4, 2]), layer.pools(5))


def test_a_batch_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner([], 3, torch.float32, [])
    runner.reserve(2, 1)
    runner.run(2, 1)
    with monkeypatch.context() as during:
        during.delattr(torch, "empty")
        with pytest.raises(AttributeError):
            runner.reserve(5, 1)
    with pytest.raises(ArgumentError, match="Call reserve first"):
        runner.run(3, 1)


def test_programs_that_cannot_be_prepared() -> None:
    program = next(
        own for own in (draw(Random(seed)) for seed in range(200)) if own.widths("sequence")
    )
    case = tensors_for(program, LENGTHS)
    with pytest.raises(ArgumentError, match="one output"):
        prepared_program(case, torch.float32)
