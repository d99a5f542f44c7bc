"""Programs on the cpu kernels against an interpreter in NumPy, on every supported instruction set,
and their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from cpu_networks import DIVISIONS, LIBRARY, NO_TEAM, POISON, Use
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.kernels.cpu import programs
from raglane.kernels.cpu.programs import outer_products, run, times
from raglane.native import library
from raglane.programs.program import OPERATIONS, Block, Instruction, Operand, Program, Weight
from random_programs import Case, draw, draw_lengths, draw_matrices, tensors_for

# The others are AVX-512 by another name: they multiply bfloat16, which no program does.
ISAS = [isa for isa in LIBRARY.isas if isa in ("portable", "avx2", "avx512")]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
LENGTHS = [3, 0, 1, 9, 2, 1, 1, 4]


def assert_agrees(case: Case, tolerance: float) -> None:
    for got, expected in zip(case.run(), case.expected(), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=tolerance, atol=tolerance)


def of_operation(name: str, width: int, *, number: bool = False) -> Program:
    """A program of one operation, on an element, a state and a vector, of which some are spread, or
    a number.
    """
    segments = (
        4
        if width % 4 == 0 and name in ("row_sum", "row_max", "row_cumsum", "norm", "norm_backward")
        else 1
    )
    reads = [width + 3] * 3
    blocks = [Block("element", reads[0]), Block("state", reads[1]), Block("vector", reads[2])]
    operands = (Operand(0, 1), Operand(1, 3), Operand(2, 0, spread=name in ("where", "fma")))
    if number:
        operands = (Operand(0, 2), Operand(-1, number=0.75), Operand(1, 1, spread=True))
    blocks.append(Block("local", segments if name in ("row_sum", "row_max") else width))
    results = [Operand(3)]
    if name == "norm":
        blocks.append(Block("local", segments))
        results.append(Operand(4))
    columns = tuple(reversed(range(width))) if name == "gather" else ()
    epsilon = 0.01 if name == "norm" else 0.0
    made = Instruction(
        name,
        tuple(results),
        operands[: OPERATIONS[name]],
        width,
        segments,
        epsilon,
        columns=columns,
    )
    outputs = tuple((Operand(place.block), blocks[place.block].width) for place in results)
    return Program(tuple(blocks), (), (made,), outputs, (Operand(1),))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("two_threads")
def test_every_operation(dtype: torch.dtype, isa: str, use: Use) -> None:
    use(isa, NO_TEAM | POISON)
    for name in OPERATIONS:
        if name in ("product", "row_dot", "column_dot"):
            continue
        for width in (1, 5, 33, 128):
            for number in (False, True):
                case = tensors_for(
                    of_operation(name, width, number=number), LENGTHS, ascending=not number
                )
                if name in ("log", "sqrt", "rsqrt"):
                    case.given["elements"][0].abs_()
                if name == "log1p":
                    case.given["elements"][0].abs_().sub_(0.5)
                assert_agrees(
                    case.to(dtype),
                    TOLERANCE[dtype] * (5 if name in ("norm_backward", "rsqrt") else 1),
                )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.usefixtures("two_threads")
def test_products_of_any_strides(isa: str, use: Use) -> None:
    use(isa, NO_TEAM | POISON)
    for groups, rows, depth in ((1, 1, 1), (1, 64, 16), (1, 100, 33), (3, 5, 4), (4, 70, 2)):
        width = groups * rows
        blocks = (
            Block("element", groups * depth + 2),
            Block("state", width),
            Block("local", width + 2),
        )
        for start in (Operand(1), Operand(-1, number=0.5), Operand(0, 1, spread=True)):
            for a in (Operand(0, 2), Operand(0, 1, spread=True), Operand(-1, number=1.5)):
                made = Instruction("product", (Operand(2, 1),), (start, a), width, weight=0)
                program = Program(
                    blocks,
                    (Weight(groups, rows, depth),),
                    (made,),
                    ((Operand(2, 1), width),),
                    (Operand(1),),
                )
                case = tensors_for(program, LENGTHS, ascending=False)
                weight = case.given["weights"][0]
                apart = torch.stack([weight, weight], -1)[..., 0]
                turned = weight.mT.contiguous().mT
                for dtype, tolerance in TOLERANCE.items():
                    for same in (weight, apart, turned):
                        assert_agrees(
                            replace(case, given={**case.given, "weights": [same]}).to(dtype),
                            tolerance,
                        )


def draw_products(chance: Random) -> Program:
    """Draw adjacent products with one weight, of which some read or overwrite results of others."""
    depth, width = chance.choice([(5, 3), (8, 8), (20, 37)])
    blocks = [
        Block("element", 3 * depth),
        Block("state", 3 * depth),
        Block("local", 4 * width + depth),
    ]
    widths, instructions = (3 * depth, 3 * depth, 4 * width + depth), list[Instruction]()
    instructions.append(Instruction("copy", (Operand(2),), (Operand(-1, number=0.5),), widths[2]))
    for _ in range(chance.randint(2, 8)):
        to = Operand(2, chance.choice([0, width, 2 * width, 3 * width, depth]))
        block = chance.choice([0, 1, 2, 2])
        from_ = Operand(block, chance.randint(0, widths[block] - depth))
        start = chance.choice([Operand(-1), Operand(2, chance.randint(0, widths[2] - width))])
        apart = [
            abs(to.start - place.start) >= width + depth or place.block != 2
            for place in (from_, start)
        ]
        if all(apart):  # C refuses a result that overlaps an operand
            instructions.append(Instruction("product", (to,), (start, from_), width, weight=0))
    outputs = ((Operand(2), widths[2]), (Operand(1), depth))
    state = Block("local", 3 * depth)
    source = Operand(2) if widths[2] >= 3 * depth else Operand(0)
    instructions.append(Instruction("tanh", (Operand(3),), (source,), 3 * depth))
    return Program(
        (*blocks, state), (Weight(1, width, depth),), tuple(instructions), outputs, (Operand(3),)
    )


@pytest.mark.parametrize(
    ("drawn", "seeds"), [(draw, 40), (draw_products, 120), (draw_matrices, 200)]
)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.usefixtures("two_threads")
def test_random_programs(
    isa: str, drawn: Callable[[Random], Program], seeds: int, use: Use
) -> None:
    for seed in range(seeds):
        chance = Random(seed)
        use(isa, chance.choice([*[flags | POISON for flags in DIVISIONS.values()], 0]))
        case = tensors_for(drawn(chance), draw_lengths(chance), ascending=chance.random() < 0.5)
        for dtype, tolerance in TOLERANCE.items():
            assert_agrees(case.to(dtype), 10 * tolerance)


@pytest.mark.skipif(
    library.operators() is None, reason="raglane was installed without torch's operators"
)
@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.bfloat16])
def test_the_operator_and_python_have_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(40):
        chance = Random(seed)
        case = tensors_for(draw(chance), draw_lengths(chance), ascending=chance.random() < 0.5)
        case = case.to(torch.float64 if dtype is torch.float64 else torch.float32)
        case.given["elements"] = [part.to(dtype) for part in case.given["elements"]]
        inputs = [
            case.given[name] for name in ("elements", "sequences", "states", "vectors", "weights")
        ]
        encoded = programs.encode(case.program)
        assert (
            programs._run_by_operator(encoded, case.offsets, case.ascending, inputs, {}) is not None
        )
        by_operator = case.run()
        with monkeypatch.context() as patch:
            patch.setattr(library, "operators", lambda: None)
            assert all(map(torch.equal, by_operator, case.run()))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("two_threads")
def test_a_sequence_has_the_same_bits_alone(dtype: torch.dtype, isa: str, use: Use) -> None:
    for seed in range(30):
        chance = Random(seed)
        lengths = [chance.choice([0, 1, 2, 7, 11]) for _ in range(chance.choice([1, 5, 130]))]
        program = draw_matrices(chance) if seed % 3 == 0 else draw(chance, tame=False)
        case = tensors_for(program, lengths, ascending=chance.random() < 0.5).to(dtype)
        use(isa, chance.choice(list(DIVISIONS.values())) | POISON)
        together = case.run()
        torch.set_num_threads(1)
        count = len(case.program.outputs)
        for number in chance.sample(range(len(lengths)), min(3, len(lengths))):
            begin, end = case.offsets[number : number + 2].tolist()
            for place, alone in enumerate(case.sequence(number).run()):
                rows = (
                    together[place][begin:end]
                    if place < count
                    else together[place][number : number + 1]
                )
                assert torch.equal(rows.view(torch.uint8), alone.view(torch.uint8))
        torch.set_num_threads(2)


@pytest.mark.parametrize("has_operators", [True, False])
def test_columns_of_a_wider_tensor_are_read_where_they_are(
    use: Use, has_operators: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_operators:
        monkeypatch.setattr(library, "operators", lambda: None)
    use(flags=NO_TEAM | POISON)
    case = tensors_for(of_operation("add", 33), LENGTHS)
    (x,) = case.given["elements"]
    wide = torch.cat([torch.full((len(x), 2), torch.nan), x, torch.full((len(x), 1), torch.nan)], 1)
    for element in (
        wide[:, 2:-1],
        x.t().contiguous().t(),
        torch._neg_view(-x),
        x[:1].expand(x.shape),
    ):
        assert_agrees(replace(case, given={**case.given, "elements": [element]}), 1e-12)


def test_an_output_in_the_memory_of_what_it_was_computed_from(use: Use) -> None:
    """What is still to be read is not overwritten, whether a local is read, written or both before
    it is an output.
    """
    early = Instruction("tanh", (Operand(2),), (Operand(0),), 21)
    blocks = (Block("element", 21), Block("state", 21), Block("local", 21), Block("local", 21))
    for second in (
        Instruction("fma", (Operand(3),), (Operand(2), Operand(0), Operand(1)), 21),
        Instruction("gather", (Operand(3),), (Operand(0),), 21, columns=(*range(1, 21), 0)),
        Instruction("sub", (Operand(3),), (Operand(2), Operand(0, 4, spread=True)), 21),
        Instruction("add", (Operand(3),), (Operand(2), Operand(1)), 21),
    ):
        for output, state in ((2, 3), (3, 2)):
            program = Program(
                blocks, (), (early, second), ((Operand(output), 21),), (Operand(state),)
            )
            case = tensors_for(program, LENGTHS)
            for flags in DIVISIONS.values():
                use(flags=flags | POISON)
                given: dict[str, Any] = {
                    **case.given,
                    "elements": [case.given["elements"][0].clone()],
                }
                own = given["elements"][0]
                outputs, finals = run(
                    program, offsets=case.offsets, ascending=case.ascending, over={0: own}, **given
                )
                assert outputs[0] is own
                for got, expected in zip((*outputs, *finals), case.expected(), strict=True):
                    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("isa", ISAS)
def test_bfloat16_at_the_ends_alone(isa: str, use: Use) -> None:
    """Elements are widened, outputs rounded; states stay float32 from step to step."""
    use(isa, NO_TEAM | POISON)
    for seed in range(20):
        chance = Random(seed)
        case = tensors_for(draw(chance), draw_lengths(chance)).to(torch.float32)
        narrow = [part.bfloat16() for part in case.given["elements"]]
        wide = replace(
            case, given={**case.given, "elements": [part.float() for part in narrow]}
        ).run()
        kinds = [chance.choice([torch.bfloat16, torch.float32]) for _ in case.program.outputs]
        given: dict[str, Any] = {**case.given, "elements": narrow}
        outputs, finals = run(
            case.program,
            offsets=case.offsets,
            ascending=case.ascending,
            **given,
            output_dtypes=kinds,
        )
        for got, expected in zip(outputs + finals, wide, strict=True):
            assert torch.equal(got, expected.to(got.dtype))
        assert [part.dtype for part in outputs] == kinds


def test_tensors_that_do_not_fit() -> None:
    case = tensors_for(of_operation("fma", 5), LENGTHS)
    count, batch = sum(LENGTHS), len(LENGTHS)
    shrunk = torch.zeros(count, 8, dtype=torch.float64)
    shrunk.untyped_storage().resize_(8)
    wrong: list[tuple[str, Any, type[RaglaneError], str]] = [
        (
            "elements",
            [],
            ShapeError,
            "elements must be the 1 tensors of the program.*, got 0 tensors",
        ),
        (
            "elements",
            [torch.zeros(count, 7).double()],
            ShapeError,
            rf"elements\[0\] must be .* \({count}, 7\)",
        ),
        ("elements", [torch.zeros(count, 8).half()], ShapeError, "the cpu kernels compute in"),
        ("elements", [torch.zeros(count, 8, device="meta").double()], ShapeError, "on meta"),
        ("elements", [shrunk], ShapeError, r"elements\[0\] must be .*got a storage of 8 bytes"),
        (
            "states",
            [torch.zeros(batch + 1, 8).double()],
            ShapeError,
            r"states\[0\] must be .*got shape",
        ),
        ("vectors", [None], ArgumentTypeError, r"vectors\[0\] must be .*got a NoneType"),
        ("offsets", case.offsets + 1, ArgumentError, r"offsets\[0\] must be .*got 1"),
        ("offsets", case.offsets.flip(0), ArgumentError, "offsets"),
        ("output_dtypes", [torch.bfloat16], ArgumentError, "output_dtypes must be "),
    ]
    for name, value, error, words in wrong:
        with pytest.raises(error, match=words):
            run(case.program, **{"offsets": case.offsets, **case.given, name: value})


def test_each_kind_of_tensors_is_counted() -> None:
    blocks = Block("element", 1), Block("sequence", 1), Block("state", 1), Block("local", 1)
    add = Instruction("add", (Operand(3),), (Operand(1), Operand(2)), width=1)
    sums = Program(blocks, (), (add,), ((Operand(3), 1),), (Operand(3),))
    one = torch.ones(1, 1)
    given: dict[str, Any] = {"offsets": torch.tensor([0, 3]), "elements": [torch.zeros(3, 1)]}
    assert run(sums, **given, sequences=[one], states=[one])[1][0].item() == 4
    with pytest.raises(ShapeError, match="sequences must be the 1 tensors of the program"):
        run(sums, **given, states=[one, one])


def test_programs_that_are_wrong() -> None:
    good = of_operation("add", 5)
    (add,) = good.instructions
    product = replace(add, operation="product", weight=0)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"instructions": (replace(add, operation="conv"),)}, "program must be "),
        (
            {"instructions": (replace(add, operands=add.operands[:1]),)},
            "1 results and 1 operands of add",
        ),
        (
            {"instructions": (replace(add, operands=(Operand(9), Operand(1))),)},
            "block of a place must be below .*got 9",
        ),
        (
            {"instructions": (replace(add, operands=(Operand(0, 4), Operand(1))),)},
            "start of a place must be .*got 4",
        ),
        (
            {"instructions": (replace(add, operands=(Operand(3), Operand(1))),)},
            "must be a column that was written before",
        ),
        (
            {"instructions": (replace(add, results=(Operand(0),)),)},
            "result must be a local, got block 0",
        ),
        ({"instructions": (replace(add, width=0),)}, "width of an instruction must be .*got 0"),
        ({"instructions": (replace(add, segments=2),)}, "segments must be .*got 2"),
        ({"instructions": (replace(add, columns=(1,)),)}, "columns of an instruction"),
        ({"instructions": (product,)}, "weight of an instruction must be .*got 0"),
        (
            {"instructions": (product,), "weights": (Weight(1, 4, 2),)},
            "groups . rows of its weight, 4",
        ),
        ({"outputs": ((Operand(3, 1), 5),)}, "start of a place"),
        ({"next_states": ()}, "next states must be .*got 0"),
        ({"blocks": (*good.blocks[:3], Block("local", 2**40))}, "width of a block"),
        (
            {"blocks": (Block("element", 8, 1), *good.blocks[1:])},
            "index of a block must be .*got 1",
        ),
    ]
    for changes, words in wrong:
        program = replace(good, **changes)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=words):
            tensors_for(program, LENGTHS).run()
    inplace = Instruction("add", (Operand(3),), (Operand(3), Operand(3)), 5)
    beside = replace(
        inplace, results=(Operand(3, 0),), operands=(Operand(3, 1), Operand(3, 1)), width=4
    )
    reduces = replace(inplace, operation="row_sum", operands=(Operand(3),))
    copies = replace(inplace, operation="gather", operands=(Operand(3),), columns=(4, 3, 2, 1, 0))
    assert_agrees(tensors_for(replace(good, instructions=(add, inplace)), LENGTHS), 1e-12)
    for instruction in (beside, reduces, copies):
        with pytest.raises(ArgumentError, match="result must not overlap an operand"):
            tensors_for(replace(good, instructions=(add, instruction)), LENGTHS).run()


@pytest.mark.parametrize("isa", LIBRARY.isas)
@pytest.mark.usefixtures("two_threads")
def test_outer_products_and_sums(isa: str, use: Use) -> None:
    use(isa, POISON)
    for count in (0, 1, 7, 700):
        for groups, columns, wide in (
            (1, 1, 1),
            (1, 33, 5),
            (3, 16, 64),
            (2, 70, 17),
            (1, 50, 150),
        ):
            left, right = (
                torch.randn(count, groups * columns + 3),
                torch.randn(count, groups * wide + 1),
            )
            for dtype, tolerance in {**TOLERANCE, torch.bfloat16: 1e-2}.items():
                # Columns of wider tensors, whose other columns are NaN.
                parts = [torch.full_like(part, torch.nan).to(dtype) for part in (left, right)]
                inner = parts[0][:, 2:-1], parts[1][:, 1:]
                inner[0].copy_(left[:, 2:-1]), inner[1].copy_(right[:, 1:])
                got, total = cast(
                    "tuple[Tensor, Tensor]", outer_products(*inner, groups=groups, sums=True)
                )
                scale = max(1, count) ** 0.5
                wanted = torch.einsum(
                    "ngi,ngj->gij", *(part.double().unflatten(1, (groups, -1)) for part in inner)
                )
                torch.testing.assert_close(
                    got.double(), wanted, rtol=tolerance, atol=tolerance * scale
                )
                torch.testing.assert_close(
                    total.double(), inner[0].double().sum(0), rtol=tolerance, atol=tolerance * scale
                )
                products, sums = outer_products(inner[0], None, sums=True)
                assert products is None
                assert sums is not None
                assert torch.equal(sums, total)


def test_threads_change_no_bit(any_threads: Callable[[int], None]) -> None:
    left, right = torch.randn(2000, 130), torch.randn(2000, 70)
    found: list[Any] = []
    for threads in (1, 2, 5):
        any_threads(threads)
        found.append(outer_products(left, right, sums=True))
    assert all(map(torch.equal, found[0] * 2, found[1] + found[2]))


def test_sums_that_do_not_fit() -> None:
    good = torch.zeros(4, 6)
    wrong: list[tuple[Any, Any, int, str]] = [
        ([1.0], good, 1, "left must be .*got a list"),
        (good, torch.zeros(5, 6), 1, r"right must be .*got shape \(5, 6\)"),
        (good, good.double(), 1, "right must be .*float32.*, got .*float64"),
        (good.to("meta"), good, 1, "left must be .*got .* on meta"),
        (good, good, 4, "groups must be .*got 4 for 6 and 6 columns"),
        (good[:, :0], good[:, :0], 1, "groups must be .*got 1 for 0"),
    ]
    for left, right, groups, words in wrong:
        with pytest.raises(RaglaneError, match=words):
            outer_products(left, right, groups=groups)


def test_products_of_rows_by_themselves() -> None:
    for groups, width, depth in ((1, 70, 17), (3, 5, 16), (1, 1, 1)):
        rows, weight = torch.randn(300, groups * depth), torch.randn(groups, width, depth)
        wanted = torch.einsum(
            "ngk,gwk->ngw", rows.double().unflatten(1, (groups, -1)), weight.double()
        ).flatten(1)
        for given in (weight, weight.mT.contiguous().mT):
            together = times(rows, given)
            torch.testing.assert_close(together.double(), wanted, rtol=1e-5, atol=1e-5)
            for number in (0, 7, 299):
                assert torch.equal(
                    times(rows[number : number + 1], given), together[number : number + 1]
                )
    assert times(torch.zeros(0, 2), torch.ones(1, 3, 2)).shape == (0, 3)
    with pytest.raises(RaglaneError, match=r"weight must be .*got shape"):
        times(torch.zeros(2, 2), torch.zeros(3, 2))
    with pytest.raises(RaglaneError, match=r"rows must be rows of 2 numbers.*got shape"):
        times(torch.zeros(2, 3), torch.zeros(1, 3, 2))


def test_blocks_out_of_order_are_refused() -> None:
    """Inputs would be exchanged."""
    operators, kernels = library.operators(), library.library()
    if operators is None:
        pytest.skip("the operators are missing")
    blocks = (Block("element", 3, 0), Block("element", 3, 1), Block("local", 3))
    operands = (Operand(0), Operand(1))
    step = Instruction("sub", (Operand(2),), operands, 3)
    code = programs.encode(Program(blocks, (), (step,), ((Operand(2), 3),), ())).code
    settings = kernels.numbers[kernels.isa], kernels.flags, 1, True
    tensors = [torch.ones(4, 3), torch.zeros(4, 3)]

    def call(*indices: int) -> Any:
        changed = code.clone()
        changed[[8, 11]] = torch.tensor(indices)
        return operators.run_program(changed, torch.tensor([0, 4]), tensors, [None], *settings)

    assert torch.equal(call(0, 1)[0][0], tensors[0])
    for indices in ((1, 0), (0, 0), (1, 1), (0, 2)):
        reason = "the blocks of a program are not in order"
        assert call(*indices) == ([], library.BAD_ARGUMENT, reason)
