"""The expressions of the tests of ``rl.Ragged``, of a Ragged and of a nested tensor of torch.

    python benchmarks/face.py > benchmarks/results/face.md

Each expression of ``tests/support/face_cases.py`` is evaluated with a Ragged, and with a nested
tensor of the layout ``torch.jagged``, and compared with torch for each sequence alone: values, and
gradients. An expression is right, wrong (another result, without an error) or refused.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import raglane as rl

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS / "support"), str(TESTS / "face")]

import test_face as face  # type: ignore[import-not-found]  # noqa: E402

import face_cases as cases  # noqa: E402

BATCH = "features"
TABLES = ("EACH", "REDUCTIONS", "WHOLE", "ALONG", "INDEX", "JOINS", "LOSSES")


def nested(values: Tensor, lengths: list[int]) -> Tensor:
    """Return a jagged tensor of the same sequences."""
    return torch.nested.as_nested_tensor([*values.split(lengths)], layout=torch.jagged)


def as_ragged(result: Any) -> Any:
    """Return a result with nested tensors as Ragged."""
    if isinstance(result, tuple | list):
        return [as_ragged(part) for part in result]
    if isinstance(result, Tensor) and result.is_nested:
        jagged: Any = result
        return rl.Ragged.from_flat(jagged.values(), offsets=jagged.offsets())
    return result


def outcome(expression: str, kind: str, is_nested: bool) -> str:
    """Return ``"right"``, ``"wrong"`` or ``"refused"``."""
    lengths, _ = face.BATCHES[BATCH]
    flat, others = face.numbers_of(BATCH), face.others_of(BATCH)
    ours, theirs = (flat["x"].clone().requires_grad_() for _ in range(2))
    batches = {
        name: nested(ours if name == "x" else values, lengths)
        if is_nested
        else rl.Ragged.from_flat(ours if name == "x" else values, lengths=lengths)
        for name, values in flat.items()
    }
    result = face.evaluate(expression, **batches, **others)
    if isinstance(result, Exception):
        return "refused"
    try:
        found = face.parts_of(as_ragged(result))
        rows = {**flat, "x": theirs}
        if kind in ("WHOLE", "LOSSES"):
            plain = expression.replace("x, 2)", "x, 1)") if kind == "LOSSES" else expression
            whole = rows if kind == "LOSSES" else {name: part[None] for name, part in rows.items()}
            expected = face.parts_of(face.evaluate(plain, **whole, **others))
        else:
            expected = per_sequence(expression, rows, others, lengths, found)
        face.compare(found, expected, ours, theirs)
    except Exception:
        return "wrong"
    return "right"


def per_sequence(
    expression: str,
    rows: dict[str, Tensor],
    others: dict[str, Any],
    lengths: list[int],
    like: list[Any],
) -> list[Any]:
    """Return the results of torch for each sequence alone, joined like those of the batch, or one
    by one for ``[None]``.
    """
    singles, start = [], 0
    for b, length in enumerate(lengths):
        alone = {name: values[None, start : start + length] for name, values in rows.items()}
        rest = {
            name: value[b : b + 1] if name in ("h", "g", "lens") else value
            for name, value in others.items()
        }
        singles.append(face.parts_of(face.evaluate(expression, **alone, **rest)))
        start += length
    if like == [None]:
        return [single[0] for single in singles]
    return [
        face.joined([single[place] for single in singles], part, len(lengths))
        for place, part in enumerate(like)
    ]


def valid(expression: str, kind: str) -> bool:
    """Return True if torch accepts the expression for each sequence."""
    if kind in ("WHOLE", "LOSSES"):
        return True
    lengths, _ = face.BATCHES[BATCH]
    flat, others = face.numbers_of(BATCH), face.others_of(BATCH)
    results = per_sequence(expression, flat, others, lengths, [None])
    return not any(isinstance(each, Exception) for each in results)


def main() -> None:
    """Print the table, and the expressions that a Ragged refuses or computes wrong."""
    columns = ("right", "wrong", "refused")
    print(f"# The face\n\n`python benchmarks/face.py`: torch {torch.__version__}.\n")
    print(
        "| kind | expressions | Ragged: right | wrong | refused | torch.nested: right | wrong | refused |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    totals = [Counter[str](), Counter[str]()]
    notes = []
    for kind in TABLES:
        listed = [each for each in cases.expressions(getattr(cases, kind)) if valid(each, kind)]
        counts = [Counter(outcome(each, kind, way) for each in listed) for way in (False, True)]
        notes += [each for each in listed if outcome(each, kind, False) != "right"]
        totals = [total + count for total, count in zip(totals, counts, strict=True)]
        cells = " | ".join(str(count[name]) for count in counts for name in columns)
        print(f"| {kind.lower()} | {len(listed)} | {cells} |")
    cells = " | ".join(str(total[name]) for total in totals for name in columns)
    print(f"| all | {totals[0].total()} | {cells} |")
    print("\nNot right for a Ragged: " + ("; ".join(f"`{each}`" for each in notes) or "none") + ".")


if __name__ == "__main__":
    main()
