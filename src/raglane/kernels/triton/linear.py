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
from raglane.kernels.triton.spans import PlacedInstruction, ProgramColumns, Span
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


def roles_of(columns: ProgramColumns) -> tuple[str, ...]:
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
    steps = {step.results[0]: step for step in columns.steps}
    roles = []
    for index, spans in enumerate(columns.following):
        state = columns.inputs["state", index]
        begins = itertools.accumulate((span.width for span in spans), initial=0)
        is_summed = reads[state] == len(spans) and all(
            reads[span.definition] == 1 and _adds(steps.get(span.definition), state, begin, span)
            for begin, span in zip(begins, spans, strict=False)
        )
        if is_summed:
            roles.append("summed")
        elif not reads[state] or all(_is_zero(span, steps) for span in spans):
            roles.append("plain")
        else:
            roles.append("carried")
    return tuple(roles)


def _adds(step: PlacedInstruction | None, state: int, begin: int, result: Span) -> bool:
    """Return True if a step adds to columns of a state, from ``begin`` on."""
    if step is None or step.instruction.operation not in ("add", "fma"):
        return False
    addends = step.operands if step.instruction.operation == "add" else step.operands[2:]
    whole = (Span(state, begin, begin + result.width),)
    return whole in addends and result[1:3] == (0, step.instruction.width)


def _is_zero(span: Span, steps: Mapping[int, PlacedInstruction]) -> bool:
    step = steps.get(span.definition)
    if step is not None and step.instruction.operation == "copy":
        return all(_is_zero(source, {}) for source in step.operands[0])
    return span.definition < 0 and span.number == 0


class Tangents:
    """The lines that compute tangents: derivatives of values by the same column of the state before
    a chunk.
    """

    def __init__(self, instructions: Instructions, carried: Sequence[int]) -> None:
        self.instructions = instructions
        self.carried = carried
        self.head: list[str] = []  # before the loop
        # For each variable that depends on a state, the variable of the state; empty if it is not
        # linear in it.
        self._origins: dict[str, str] = {}
        for index in carried:
            for low, high in instructions.definitions[index].bounds():
                state = variable(index, low)
                tangent = variable(index, low, "t")
                size = min(padded(high - low), instructions.widest)
                self._origins[state] = state
                instructions.sizes[tangent] = size
                self.head.append(
                    f"{tangent} = tl.full(({instructions.rows}, {size}), 1.0, tl.float32)"
                )

    def emit(self, step: PlacedInstruction) -> None:
        """Append the lines of an instruction whose own lines were appended before."""
        instructions = self.instructions
        formulas = TANGENTS.get(step.instruction.operation, ())
        for result in step.results:
            for low, high in instructions.definitions[result].bounds():
                name = variable(result, low)
                texts = [instructions.operand(spans, low, high)[0] for spans in step.operands]
                depends = [index for index, text in enumerate(texts) if text in self._origins]
                if not depends:
                    continue
                origins = {self._origins[texts[index]] for index in depends}
                terms = [
                    self._term(formulas[index], texts, index) if formulas else ""
                    for index in depends
                ]
                is_linear = len(origins) == 1 and "" not in {*origins, *terms}
                self._origins[name] = origins.pop() if is_linear else ""
                if is_linear:
                    instructions.sizes[_tangent(name)] = instructions.sizes[name]
                    instructions.lines.append(f"{_tangent(name)} = {' + '.join(terms)}")

    def _term(self, formula: str, texts: Sequence[str], index: int) -> str:
        """Return the term of one operand in a tangent; empty if a factor depends on a state."""
        factors = {texts[int(other)] for other in re.findall(r"{(\d)}", formula)}
        if factors & self._origins.keys():
            return ""
        return formula.format(*texts, d=_tangent(texts[index]))

    def following(self, state: int, low: int, value: str) -> dict[str, str]:
        """Return the next tangent of a part of a state by its variable; raises Refused if the loop
        is not linear.
        """
        if state not in self.carried:
            return {}
        origin = self._origins.get(value)
        if origin not in (None, variable(state, low)):
            raise Refused("it is not linear in its states")
        return {variable(state, low, "t"): "0.0" if origin is None else _tangent(value)}


def _tangent(name: str) -> str:
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
    for name, *operands in (("fma", a, state, b), ("eq", state, -1), ("where", 4, b, 3)):
        blocks.append(Block("local", width))
        read = tuple([Operand(block) for block in operands])
        instructions.append(Instruction(name, (Operand(len(blocks) - 1),), read, width))
    outputs = ((Operand(state), width),)
    return Program(tuple(blocks), (), tuple(instructions), outputs, (Operand(5),))
