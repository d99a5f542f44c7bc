"""Attacks on the kernels' reading of programs: integers that are wrong, tensors beside pages that nobody may touch.

A round draws a program and a batch. Some of the program's integers are changed, those apart that say what tensors the
caller brings: then it is refused, or runs and keeps to its memory. Where nothing is changed the numbers must be right.
To read or write past a tensor ends the process with a signal, so rounds run in a process of their own::

    python -m fuzz.programs 1000 1

A third argument is a folder whose ``lib`` holds another build of the kernels, a sanitized one say.
"""

from __future__ import annotations

import random
import sys
from array import array
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import raglane.native
from fuzz.rounds import play_rounds
from guarded import chosen_library, guarded, guarded_allocations
from raglane.errors import ArgumentError
from raglane.kernels.cpu import programs
from raglane.native.library import library
from raglane.programs.program import Program
from random_programs import Case, draw, draw_lengths, tensors_for

__all__ = ["main", "play"]

_COUNTS, _BLOCK, _WEIGHT, _INSTRUCTION, _PLACE = 6, 3, 3, 26, 4
_LOCAL = 4


def _changeable(code: array[int]) -> list[int]:
    """Which integers may be changed: none that says what tensors there are."""
    blocks, weights, instructions, outputs, states, columns = code[:_COUNTS]
    places = [_COUNTS + _BLOCK * block + 1 for block in range(blocks) if code[_COUNTS + _BLOCK * block] == _LOCAL]
    at = _COUNTS + _BLOCK * blocks + _WEIGHT * weights
    places += range(at, at + _INSTRUCTION * instructions)
    at += _INSTRUCTION * instructions
    for _ in range(outputs):
        places += range(at, at + _PLACE)
        at += _PLACE + 1
    return places + list(range(at, at + _PLACE * states + columns))


def _change(code: array[int], chance: random.Random) -> array[int]:
    """A copy in which a few integers are others."""
    changed = array("q", code)
    places = _changeable(code)
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        place = chance.choice(places)
        near = changed[place] + chance.choice([-1, 1, -16, 16])
        far = chance.choice([-1, 0, 1, 7, 2**20, 2**31, 2**62, -(2**63), 2**63 - 1])
        changed[place] = max(
            -(2**63), min(2**63 - 1, chance.choice([near, near, near, far, changed[chance.choice(places)]]))
        )
    return changed


def _no_program(chance: random.Random) -> programs.Encoded:
    """Integers that mean nothing, for a call without tensors."""
    counts = [chance.choice([0, 0, 1, 2]) for _ in range(_COUNTS - 1)]
    size = sum(
        count * each for count, each in zip(counts, (_BLOCK, _WEIGHT, _INSTRUCTION, _PLACE + 1, _PLACE), strict=True)
    )
    code = [*counts, 0, *(chance.choice([0, 1, 4, 4, chance.getrandbits(62), -1]) for _ in range(size))]
    return programs.Encoded(array("q", code), ((),) * 5, Program((), (), (), (), ()))


def _in_guarded_memory(case: Case, chance: random.Random) -> Case:
    def guard(part: Tensor) -> Tensor:
        return guarded(part, before=chance.random() < 0.3)

    given = {name: [guard(part) for part in parts] for name, parts in case.given.items()}
    return replace(case, offsets=guarded(case.offsets), given=given)


def _differ(case: Case, got: list[Tensor], tolerance: float) -> str | None:
    for index, (mine, right) in enumerate(zip(got, case.expected(), strict=True)):
        if not np.allclose(mine.numpy(), right, rtol=tolerance, atol=tolerance):
            return f"result {index} is off by {np.abs(mine.numpy() - right).max():.3g}"
    return None


def play(seed: int) -> str | None:
    """Play one round; returns what went wrong, if anything did."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    kernels = library()
    chosen = replace(
        kernels.with_isa(chance.choice(kernels.isas)), flags=chance.choice([0, 1, 1 | 4 | 8, 1 | 4 | 16, 1 | 2 | 8])
    )
    torch.set_num_threads(chance.choice([1, 2]))
    is_right = chance.random() < 0.4
    program = draw(chance, tame=is_right)
    dtype = chance.choice([torch.float64, torch.float32])
    case = tensors_for(program, draw_lengths(chance), ascending=chance.random() < 0.5).to(dtype)
    case = _in_guarded_memory(case, chance)
    encoded = programs.encode(program)
    if not is_right:
        encoded = encoded._replace(code=_change(encoded.code, chance))
    if not is_right and chance.random() < 0.2:
        encoded = _no_program(chance)
        case = tensors_for(encoded.program, [])
    original = programs.encode
    programs.encode = lambda program: encoded  # type: ignore[assignment]  # noqa: ARG005
    try:
        with chosen_library(chosen), guarded_allocations(before=chance.random() < 0.3):
            got = case.run()
    except ArgumentError as error:
        return f"refused: {error}" if is_right else None
    finally:
        programs.encode = original
    return _differ(case, got, 1e-10 if dtype is torch.float64 else 1e-3) if is_right else None


def main(rounds: int = 1000, seed: int = 1) -> int:
    """Play so many rounds from a seed on, and count those that went wrong."""
    return play_rounds("programs", play, rounds, seed)


if __name__ == "__main__":
    *numbers, kernels = sys.argv[1:] if len(sys.argv) > 3 else [*sys.argv[1:], ""]
    if kernels:
        raglane.native.__path__.insert(0, kernels)
    sys.exit(main(*map(int, numbers)) > 0)
