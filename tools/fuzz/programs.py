"""Programs with wrong integers, and tensors next to guard pages.

A round draws a program and a batch. In most rounds some integers of the encoded program are
changed, except those that describe the caller's tensors: then the program must be refused, or run
within its memory. An unchanged program must give the right numbers. An access beyond a tensor ends
the process with a signal.
"""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from fuzz.networks import drawn_kernels
from guarded import guarded, guarded_allocations
from raglane.errors import ArgumentError
from raglane.kernels.cpu import programs
from raglane.programs.program import Program
from random_programs import Case, draw, draw_lengths, tensors_for

# Integers of the counts at the start, of a block, a weight, an instruction and a place; the number
# of local blocks.
_COUNTS, _BLOCK, _WEIGHT, _INSTRUCTION, _PLACE = 6, 3, 3, 26, 4
_LOCAL = 4


def _changeable(code: list[int]) -> list[int]:
    """Return the places of the integers that describe no tensor of the caller."""
    blocks, weights, instructions, outputs, states, columns = code[:_COUNTS]
    places = [
        _COUNTS + _BLOCK * block + 1
        for block in range(blocks)
        if code[_COUNTS + _BLOCK * block] == _LOCAL
    ]
    at = _COUNTS + _BLOCK * blocks + _WEIGHT * weights
    places += range(at, at + _INSTRUCTION * instructions)
    at += _INSTRUCTION * instructions
    for _ in range(outputs):
        places += range(at, at + _PLACE)
        at += _PLACE + 1
    return places + list(range(at, at + _PLACE * states + columns))


def _changed(code: Tensor, chance: random.Random) -> Tensor:
    """Return a copy with a few other integers."""
    changed = code.tolist()
    places = _changeable(changed)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        place = chance.choice(places)
        near = changed[place] + chance.choice([-1, 1, -16, 16])
        far = chance.choice([-1, 0, 1, 7, 2**20, 2**31, 2**62, -(2**63), 2**63 - 1])
        number = chance.choice([near, near, near, far, changed[chance.choice(places)]])
        changed[place] = max(-(2**63), min(2**63 - 1, number))
    return torch.tensor(changed)


def _no_program(chance: random.Random) -> programs.Encoded:
    """Return integers without a meaning, for a call without tensors."""
    counts = [chance.choice([0, 0, 1, 2]) for _ in range(_COUNTS - 1)]
    sizes = (_BLOCK, _WEIGHT, _INSTRUCTION, _PLACE + 1, _PLACE)
    size = sum(count * each for count, each in zip(counts, sizes, strict=True))
    code = [
        *counts,
        0,
        *(chance.choice([0, 1, 4, 4, chance.getrandbits(62), -1]) for _ in range(size)),
    ]
    return programs.Encoded(torch.tensor(code), ((),) * 5, Program((), (), (), (), ()))


def _in_guarded_memory(case: Case, chance: random.Random) -> Case:
    def guard(part: Tensor) -> Tensor:
        return guarded(part, before=chance.random() < 0.3)

    given = {name: [guard(part) for part in parts] for name, parts in case.given.items()}
    return replace(case, offsets=guarded(case.offsets), given=given)


def play(number: int) -> None:
    chance = random.Random(number)
    torch.manual_seed(number)
    is_right = chance.random() < 0.4
    program = draw(chance, tame=is_right)
    dtype, tolerance = chance.choice([(torch.float64, 1e-10), (torch.float32, 1e-3)])
    case = tensors_for(program, draw_lengths(chance), ascending=chance.random() < 0.5).to(dtype)
    case = _in_guarded_memory(case, chance)
    encoded = programs.encode(program)
    if not is_right:
        encoded = encoded._replace(code=_changed(encoded.code, chance))
        if chance.random() < 0.2:
            encoded = _no_program(chance)
            case = tensors_for(encoded.program, [])
    try:
        with (
            drawn_kernels(chance),
            guarded_allocations(before=chance.random() < 0.3),
            mock.patch.object(programs, "encode", return_value=encoded),
        ):
            found = case.run()
    except ArgumentError:
        if is_right:
            raise
        return
    expected = case.expected() if is_right else []
    # Squares of a state may grow beyond the dtype within a few steps; rounding decides in which.
    if is_right and all(np.isfinite(part).all() for part in expected):
        for index, (mine, right) in enumerate(zip(found, expected, strict=True)):
            name = f"result {index}"
            np.testing.assert_allclose(
                mine.numpy(), right, tolerance, tolerance, equal_nan=False, err_msg=name
            )
