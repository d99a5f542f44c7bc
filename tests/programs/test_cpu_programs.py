"""Programs on the cpu kernels against NumPy's interpreter, on every instruction set here, and their bits."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from cpu_networks import DIVISIONS, LIBRARY, NO_TEAM, POISON, Use
from looped import looped
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.kernels.cpu.programs import run
from raglane.programs.program import OPERATIONS, Block, Instruction, Operand, Program, Weight
from random_programs import Case, draw, draw_lengths, tensors_for

# The others are AVX-512 by another name: they multiply bfloat16, which no program does.
ISAS = [isa for isa in LIBRARY.isas if isa in ("portable", "avx2", "avx512")]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
WIDTHS = (1, 5, 16, 33, 128)
LENGTHS = [3, 0, 1, 9, 2, 1, 1, 4]


def assert_agrees(case: Case, tolerance: float) -> None:
    for got, expected in zip(case.run(), case.expected(), strict=True):
        np.testing.assert_allclose(got.numpy(), expected, rtol=tolerance, atol=tolerance)


def of_operation(name: str, width: int, *, number: bool = False) -> Program:
    """A program of one operation, on an element, a state and a vector, of which some are spread, or a number."""
    segments = 4 if width % 4 == 0 and name in ("row_sum", "row_max", "row_cumsum", "norm", "norm_backward") else 1
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
    used = operands[: OPERATIONS[name]]
    made = Instruction(name, tuple(results), used, width, segments, epsilon, columns=columns)
    outputs = tuple((Operand(place.block), blocks[place.block].width) for place in results)
    return Program(tuple(blocks), (), (made,), outputs, (Operand(1),))


@looped("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("two_threads")
def test_every_operation(dtype: torch.dtype, isa: str, use: Use) -> None:
    use(isa, NO_TEAM | POISON)
    for name in OPERATIONS:
        if name == "product":
            continue
        for width in WIDTHS:
            for number in (False, True):
                case = tensors_for(of_operation(name, width, number=number), LENGTHS, ascending=not number)
                if name in ("log", "sqrt", "rsqrt"):
                    case.given["elements"][0].abs_()
                if name == "log1p":
                    case.given["elements"][0].abs_().sub_(0.5)
                assert_agrees(case.to(dtype), TOLERANCE[dtype] * (5 if name in ("norm_backward", "rsqrt") else 1))


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.5, torch.inf, -torch.inf, torch.nan, 1e-310, -88.0, 300.0])


@pytest.mark.parametrize("isa", ISAS)
def test_what_is_no_number(isa: str, use: Use) -> None:
    """NaN spreads as in NumPy, through the tail of a row as through its whole vectors; so do zeros and infinities."""
    use(isa, NO_TEAM | POISON)
    first, second = (part.reshape(-1) for part in torch.meshgrid(SPECIAL.double(), SPECIAL.double(), indexing="ij"))
    blocks = (*[Block("element", len(first), index) for index in range(3)], Block("local", len(first)))
    for name, count in OPERATIONS.items():
        if name in ("product", "gather", "norm", "norm_backward", "row_sum"):
            continue
        operands = tuple(Operand(index) for index in range(count))
        reduces = name == "row_max"
        made = Instruction(name, (Operand(3),), operands, len(first), len(SPECIAL) if reduces else 1)
        program = Program(blocks, (), (made,), ((Operand(3), len(SPECIAL) if reduces else len(first)),), ())
        case = tensors_for(program, [1])
        case.given["elements"] = [first[None], second[None], first.flip(0)[None]]
        assert_agrees(case, 1e-13)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.usefixtures("two_threads")
def test_products_of_any_strides(isa: str, use: Use) -> None:
    use(isa, NO_TEAM | POISON)
    for groups, rows, depth in ((1, 1, 1), (1, 5, 3), (1, 64, 16), (1, 100, 33), (3, 5, 4), (2, 16, 7), (4, 70, 2)):
        width = groups * rows
        blocks = (Block("element", groups * depth + 2), Block("state", width), Block("local", width + 2))
        for start in (Operand(1), Operand(-1, number=0.5), Operand(0, 1, spread=True)):
            for a in (Operand(0, 2), Operand(0, 1, spread=True), Operand(-1, number=1.5)):
                made = Instruction("product", (Operand(2, 1),), (start, a), width, weight=0)
                program = Program(
                    blocks, (Weight(groups, rows, depth),), (made,), ((Operand(2, 1), width),), (Operand(1),)
                )
                case = tensors_for(program, LENGTHS, ascending=False)
                weight = case.given["weights"][0]
                apart = torch.stack([weight, weight], -1)[..., 0]
                turned = weight.mT.contiguous().mT
                for dtype, tolerance in TOLERANCE.items():
                    for same in (weight, apart, turned):
                        assert_agrees(replace(case, given={**case.given, "weights": [same]}).to(dtype), tolerance)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.usefixtures("two_threads")
def test_random_programs(isa: str, use: Use) -> None:
    for seed in range(80):
        chance = Random(seed)
        use(isa, chance.choice([*[flags | POISON for flags in DIVISIONS.values()], 0]))
        case = tensors_for(draw(chance), draw_lengths(chance), ascending=chance.random() < 0.5)
        for dtype, tolerance in TOLERANCE.items():
            assert_agrees(case.to(dtype), 10 * tolerance)


@looped("isa", ISAS)
@looped("dtype", TOLERANCE)
@pytest.mark.usefixtures("two_threads")
def test_a_sequence_has_the_same_bits_alone(dtype: torch.dtype, isa: str, use: Use) -> None:
    for seed in range(30):
        chance = Random(seed)
        lengths = [chance.choice([0, 1, 2, 7, 11]) for _ in range(chance.choice([1, 5, 130]))]
        case = tensors_for(draw(chance, tame=False), lengths, ascending=chance.random() < 0.5).to(dtype)
        use(isa, chance.choice(list(DIVISIONS.values())) | POISON)
        together = case.run()
        torch.set_num_threads(1)
        count = len(case.program.outputs)
        for number in chance.sample(range(len(lengths)), min(3, len(lengths))):
            begin, end = case.offsets[number : number + 2].tolist()
            for place, alone in enumerate(case.sequence(number).run()):
                rows = together[place][begin:end] if place < count else together[place][number : number + 1]
                assert torch.equal(rows.view(torch.uint8), alone.view(torch.uint8))
        torch.set_num_threads(2)


def test_columns_of_a_wider_tensor_are_read_where_they_are(use: Use) -> None:
    use(flags=NO_TEAM | POISON)
    case = tensors_for(of_operation("add", 33), LENGTHS)
    (x,) = case.given["elements"]
    wide = torch.cat([torch.full((len(x), 2), torch.nan), x, torch.full((len(x), 1), torch.nan)], 1)
    for element in (wide[:, 2:-1], x.t().contiguous().t(), torch._neg_view(-x), x[:1].expand(x.shape)):
        assert_agrees(replace(case, given={**case.given, "elements": [element]}), 1e-12)


def test_an_output_in_the_memory_of_what_it_was_computed_from(use: Use) -> None:
    """What is still to be read is not overwritten, whether a local is read, written or both before it is an output."""
    early = Instruction("tanh", (Operand(2),), (Operand(0),), 21)
    blocks = (Block("element", 21), Block("state", 21), Block("local", 21), Block("local", 21))
    for second in (
        Instruction("fma", (Operand(3),), (Operand(2), Operand(0), Operand(1)), 21),
        Instruction("gather", (Operand(3),), (Operand(0),), 21, columns=(*range(1, 21), 0)),
        Instruction("sub", (Operand(3),), (Operand(2), Operand(0, 4, spread=True)), 21),
        Instruction("add", (Operand(3),), (Operand(2), Operand(1)), 21),
    ):
        for output, state in ((2, 3), (3, 2)):
            program = Program(blocks, (), (early, second), ((Operand(output), 21),), (Operand(state),))
            case = tensors_for(program, LENGTHS)
            for flags in DIVISIONS.values():
                use(flags=flags | POISON)
                given: dict[str, Any] = {**case.given, "elements": [case.given["elements"][0].clone()]}
                own = given["elements"][0]
                outputs, finals = run(program, offsets=case.offsets, ascending=case.ascending, over={0: own}, **given)
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
        wide = replace(case, given={**case.given, "elements": [part.float() for part in narrow]}).run()
        kinds = [chance.choice([torch.bfloat16, torch.float32]) for _ in case.program.outputs]
        given: dict[str, Any] = {**case.given, "elements": narrow}
        outputs, finals = run(
            case.program, offsets=case.offsets, ascending=case.ascending, **given, output_dtypes=kinds
        )
        for got, expected in zip(outputs + finals, wide, strict=True):
            assert torch.equal(got, expected.to(got.dtype))
        assert [part.dtype for part in outputs] == kinds


# ---- what is refused ----------------------------------------------------------------------------------------------


def test_tensors_that_do_not_fit() -> None:
    case = tensors_for(of_operation("fma", 5), LENGTHS)
    count, batch = sum(LENGTHS), len(LENGTHS)
    shrunk = torch.zeros(count, 8, dtype=torch.float64)
    shrunk.untyped_storage().resize_(8)
    wrong: list[tuple[str, Any, type[RaglaneError], str]] = [
        ("elements", [], ShapeError, "elements must be 1, from the program.*, got 0 tensors"),
        (
            "elements",
            [torch.zeros(count, 7).double()],
            ShapeError,
            rf"elements\[0\] must be .*got shape \({count}, 7\)",
        ),
        ("elements", [torch.zeros(count).double()], ShapeError, rf"elements\[0\] must be .*got shape \({count},\)"),
        ("elements", [torch.zeros(count, 8).half()], ShapeError, "the cpu kernels compute in"),
        ("elements", [torch.zeros(count, 8).bfloat16()], ShapeError, r"states\[0\] must be .*got .* torch.float64"),
        ("elements", [torch.zeros(count, 8, device="meta").double()], ShapeError, "on meta"),
        ("elements", [shrunk], ShapeError, r"elements\[0\] must be .*got a storage of 8 bytes"),
        ("states", [torch.zeros(batch + 1, 8).double()], ShapeError, r"states\[0\] must be .*got shape"),
        ("vectors", [None], ArgumentTypeError, r"vectors\[0\] must be .*got a NoneType"),
        ("vectors", [torch.zeros(8)], ShapeError, r"vectors\[0\] must be .*got .*torch.float32"),
        ("weights", [torch.zeros(1, 1, 1).double()], ShapeError, "weights must be 0.*, got 1 tensors"),
        ("offsets", case.offsets + 1, ArgumentError, r"offsets\[0\] must be .*got 1"),
        ("offsets", case.offsets.flip(0), ArgumentError, "offsets"),
        ("offsets", torch.tensor([0.0, count]), ShapeError, "offsets"),
        ("output_dtypes", [torch.bfloat16], ArgumentError, "output_dtypes must be "),
    ]
    for name, value, error, words in wrong:
        with pytest.raises(error, match=words):
            run(case.program, **{"offsets": case.offsets, **case.given, name: value})


def test_programs_that_are_wrong() -> None:
    good = of_operation("add", 5)
    (add,), output = good.instructions, good.outputs[0]
    product = replace(add, operation="product", weight=0)
    wrong: list[tuple[dict[str, object], str]] = [
        ({"instructions": (replace(add, operation="conv"),)}, "program must be "),
        ({"instructions": (replace(add, operands=add.operands[:1]),)}, "1 results and 1 operands of add"),
        ({"instructions": (replace(add, operands=(Operand(9), Operand(1))),)}, "block of a place: got 9"),
        ({"instructions": (replace(add, operands=(Operand(-2), Operand(1))),)}, "block of a place: got -2"),
        ({"instructions": (replace(add, operands=(Operand(0, 4), Operand(1))),)}, "start of a place: got 4"),
        ({"instructions": (replace(add, operands=(Operand(0, -1), Operand(1))),)}, "start of a place: got -1"),
        ({"instructions": (replace(add, operands=(Operand(3), Operand(1))),)}, "written before it is read"),
        ({"instructions": (replace(add, results=(Operand(0),)),)}, "result: got block 0"),
        ({"instructions": (replace(add, results=(Operand(-1),)),)}, "result: got a number"),
        ({"instructions": (replace(add, width=6),)}, "start of a place"),
        ({"instructions": (replace(add, width=0),)}, "width of an instruction must be .*got 0"),
        ({"instructions": (replace(add, width=2**62),)}, "width of an instruction"),
        ({"instructions": (replace(add, segments=2),)}, "segments: got 2"),
        ({"instructions": (replace(add, columns=(1,)),)}, "columns of an instruction"),
        ({"instructions": (product,)}, "weight of an instruction: got 0"),
        ({"instructions": (product,), "weights": (Weight(1, 4, 2),)}, "groups . rows of its weight, 4"),
        ({"outputs": ((Operand(3, 1), 5),)}, "start of a place"),
        ({"outputs": ((output[0], 0),)}, "width of an output must be .*got 0"),
        ({"next_states": ()}, "states: got 0 next ones"),
        ({"next_states": (Operand(3),)}, "start of a place"),
        ({"blocks": (*good.blocks[:3], Block("local", 2**40))}, "width of a block"),
        ({"blocks": (Block("element", 8, 1), *good.blocks[1:])}, "index of a block: got 1"),
    ]
    for changes, words in wrong:
        program = replace(good, **changes)  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=words):
            tensors_for(program, LENGTHS).run()
    inplace = Instruction("add", (Operand(3),), (Operand(3), Operand(3)), 5)
    beside = replace(inplace, results=(Operand(3, 0),), operands=(Operand(3, 1), Operand(3, 1)), width=4)
    reduces = replace(inplace, operation="row_sum", operands=(Operand(3),))
    copies = replace(inplace, operation="gather", operands=(Operand(3),), columns=(4, 3, 2, 1, 0))
    assert_agrees(tensors_for(replace(good, instructions=(add, inplace)), LENGTHS), 1e-12)
    for instruction in (beside, reduces, copies):
        with pytest.raises(ArgumentError, match="result: got columns of an operand"):
            tensors_for(replace(good, instructions=(add, instruction)), LENGTHS).run()
