"""Loops that are linear in their states: a run of steps maps a state ``s`` to ``a * s + b``, by
element.

So the chunks of a long sequence can run side by side: a kernel computes a and b of each chunk, and
from these follow the states before all chunks. b is the result for a state of zeros. a is the
product of the derivatives of the steps, which the kernel computes as the tangent of the state.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache

from raglane.kernels.triton.instructions import Instructions, padded, variable
from raglane.kernels.triton.spans import Columns, Span
from raglane.kernels.triton.spans import Step as Placed
from raglane.programs.graph import Refused
from raglane.programs.program import Block, Instruction, Operand, Program

TANGENTS = {
    "copy": ("{d}",),
    "neg": ("-{d}",),
    "add": ("{d}", "{d}"),
    "sub": ("{d}", "-{d}"),
    "mul": ("{d} * {1}", "{d} * {0}"),
    "div": ("div({d}, {1})", ""),
    "fma": ("{d} * {1}", "{d} * {0}", "{d}"),
    "where": ("", "tl.where({0} != 0, {d}, 0.0)", "tl.where({0} != 0, 0.0, {d})"),
    "sigmoid_backward": ("{d} * {1} * (1.0 - {1})", ""),
    "tanh_backward": ("{d} * (1.0 - {1} * {1})", ""),
}
"""By operation, for each operand, the tangent of the result where that operand has the tangent d;
empty if the result is not linear in it. The other operands in such a formula must not depend on
states."""


def roles_of(columns: Columns) -> tuple[str, ...]:
    """Return the role of each state between the chunks of a sequence.

    ``summed``: steps only add to it, and nothing else reads it, so the chunks begin at 0 and their
    sums are added. ``plain``: no step reads it, or the next one is 0, so a chunk may begin at 0.
    ``carried``: others.
    """
    reads = Counter(
        span.definition for step in columns.steps for spans in step.operands for span in spans
    )
    reads.update(
        span.definition for spans in (*columns.outputs, *columns.following) for span in spans
    )
    made = {step.results[0]: step for step in columns.steps}
    roles = []
    for index, spans in enumerate(columns.following):
        own = columns.inputs["state", index]
        if reads[own] == len(spans) and all(
            reads[span.definition] == 1 and _adds(made.get(span.definition), own, begin, span)
            for begin, span in zip(
                itertools.accumulate((part.width for part in spans), initial=0), spans, strict=False
            )
        ):
            roles.append("summed")
        elif not reads[own] or all(_is_zero(span, made) for span in spans):
            roles.append("plain")
        else:
            roles.append("carried")
    return tuple(roles)


def _adds(step: Placed | None, own: int, begin: int, result: Span) -> bool:
    """Return True if a step adds to columns of a state ``own``, from ``begin`` on."""
    if step is None or step.instruction.operation not in ("add", "fma"):
        return False
    addends = step.operands if step.instruction.operation == "add" else step.operands[2:]
    whole = (Span(own, begin, begin + result.width),)
    return whole in addends and result[1:3] == (0, step.instruction.width)


def _is_zero(span: Span, made: Mapping[int, Placed]) -> bool:
    step = made.get(span.definition)
    if step is not None and step.instruction.operation == "copy":
        return all(_is_zero(part, {}) for part in step.operands[0])
    return span.definition < 0 and span.number == 0


class Tangents:
    """The lines that compute tangents: derivatives of values by the same column of the state before
    a chunk.
    """

    def __init__(self, made: Instructions, carried: Sequence[int]) -> None:
        self.made = made
        self.carried = carried
        self.head: list[str] = []  # before the loop
        # For each variable that depends on a state, the variable of the state; empty if it is not
        # linear in it.
        self._origins: dict[str, str] = {}
        for place in carried:
            for low, high in made.definitions[place].parts():
                state = variable(place, low)
                own = variable(place, low, "t")
                self._origins[state] = state
                made.sizes[own] = size = min(padded(high - low), made.widest)
                self.head.append(f"{own} = tl.full(({made.rows}, {size}), 1.0, tl.float32)")

    def emit(self, step: Placed) -> None:
        """Append the lines of an instruction whose own lines were appended before."""
        made = self.made
        formulas = TANGENTS.get(step.instruction.operation, ())
        for result in step.results:
            for low, high in made.definitions[result].parts():
                name = variable(result, low)
                texts = [made.one(spans, low, high)[0] for spans in step.operands]
                depends = [place for place, text in enumerate(texts) if text in self._origins]
                if not depends:
                    continue
                origins = {self._origins[texts[place]] for place in depends}
                terms = []
                for place in depends:
                    formula = formulas[place] if formulas else ""
                    factors = {texts[int(other)] for other in re.findall(r"{(\d)}", formula)}
                    terms.append(
                        ""
                        if factors & self._origins.keys()
                        else formula.format(*texts, d=_own(texts[place]))
                    )
                is_linear = len(origins) == 1 and "" not in {*origins, *terms}
                self._origins[name] = origins.pop() if is_linear else ""
                if is_linear:
                    made.sizes[_own(name)] = made.sizes[name]
                    made.lines.append(f"{_own(name)} = {' + '.join(terms)}")

    def following(self, place: int, low: int, value: str) -> dict[str, str]:
        """Return the next tangent of a part of a state by its variable; raises Refused if the loop
        is not linear.
        """
        if place not in self.carried:
            return {}
        origin = self._origins.get(value)
        if origin not in (None, variable(place, low)):
            raise Refused("it is not linear in its states")
        return {variable(place, low, "t"): "0.0" if origin is None else _own(value)}


def _own(name: str) -> str:
    """Return the variable of the tangent of a variable."""
    return f"t{name[1:]}"


# ---- the states between chunks -------------------------------------------------------------------


@lru_cache(maxsize=256)
def carry(width: int) -> Program:
    """Return a program whose elements are chunks, with b and a, and whose outputs are the states
    before them.

    Its final state is the one after all chunks; for an a of 1 it is the sum of b.
    """
    state = 0
    b = 1
    a = 2
    blocks = [Block("state", width), Block("element", width), Block("element", width, 1)]
    instructions = []
    # A factor may be infinite or NaN where the state is zero.
    for operands in (("fma", a, state, b), ("eq", state, -1), ("where", 4, b, 3)):
        blocks.append(Block("local", width))
        places = tuple([Operand(place) for place in operands[1:]])
        instructions.append(Instruction(operands[0], (Operand(len(blocks) - 1),), places, width))
    return Program(
        tuple(blocks), (), tuple(instructions), ((Operand(state), width),), (Operand(5),)
    )
