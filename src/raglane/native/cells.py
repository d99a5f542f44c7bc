"""The cells of the CPU kernels, as the library tells them: the lines of ``csrc/cells/table.h``."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from raglane._utils.tracing import constant_when_traced
from raglane.errors import MissingExtraError
from raglane.native.library import library


class CellFacts(NamedTuple):
    """What the kernels know of a cell besides its arithmetic, see ``raglane_cell_facts`` in ``csrc/abi/raglane.h``.

    Attributes:
        number: the cell's in calls of the kernels.
        is_elementwise: whether a unit's past is its own alone; else weights meet the state as a matrix.
        gates: input products per unit.
        slots: blocks of ``H`` per element that backward gives.
        saved: blocks of ``H`` per element that forward keeps for backward.
        has_c: whether there is a second state, ``c``.
        projects: whether ``h`` may be a projection.
        skips: whether the output takes up the input: as it is, or by weights of its own, with which there is one more
            slot, and one more saved.
        factors: recurrent factors per unit.
        biases: blocks of ``H`` in a bias.
    """

    number: int
    is_elementwise: bool
    gates: int
    slots: int
    saved: int
    has_c: bool
    projects: bool
    skips: bool
    factors: int
    biases: int


@cache
def cell_facts() -> Mapping[str, CellFacts]:
    """The facts of all cells, by the cells' names.

    Example:
        >>> facts = cell_facts()["gru"]
        >>> facts.gates, facts.slots, facts.has_c
        (3, 4, False)
    """
    kernels = library()
    unpack = struct.Struct("=" + "".join(kernels.structs["raglane_cell_facts"].formats.values())).unpack
    found: dict[str, CellFacts] = {}
    while (fields := kernels.describe_cell(len(found))) is not None:
        name, is_elementwise, gates, slots, saved, has_c, projects, skips, factors, biases = unpack(fields)
        found[name.rstrip(b"\0").decode()] = CellFacts(
            len(found),
            bool(is_elementwise),
            gates,
            slots,
            saved,
            bool(has_c),
            bool(projects),
            bool(skips),
            factors,
            biases,
        )
    return found


@constant_when_traced
def has_cell(name: str) -> bool:
    """Whether the kernels are built and know a cell, for every call of a layer.

    Example:
        >>> has_cell("gru"), has_cell("peephole_lstm")
        (True, False)
    """
    try:
        return name in cell_facts()
    except MissingExtraError:
        return False
