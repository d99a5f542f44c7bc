"""The Kneser-Ney model of benchmarks/: a distribution in every context, and its numbers by hand."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from scripts import load

_PATH = Path(__file__).parents[2] / "benchmarks" / "kneser_ney.py"


def test_probabilities_sum_to_one_in_every_context() -> None:
    """In contexts that occur, that occur in part, and that do not; with one discount, and with
    three.
    """
    script, numbers = load(_PATH), random.Random(0)
    texts = ["".join(numbers.choices("aaabbcde", k=numbers.randint(0, 9))) for _ in range(200)]
    for order in (1, 2, 3, 5):
        for modified in (False, True):
            model = script.KneserNey(texts, order, modified=modified)
            for context in [
                (),
                ("a",),
                ("z", "a"),
                ("z",) * 4,
                ("<begin>",) * 4,
                tuple("abca"),
                tuple("eeed"),
            ]:
                shares = [model.probability(token, context) for token in model.tokens]
                assert sum(shares) == pytest.approx(1.0, abs=1e-12), (order, modified, context)
                assert min(shares) > 0


def test_a_bigram_by_hand() -> None:
    model = load(_PATH).KneserNey(["ab", "ab", "a"], order=2)
    # (begin, a) comes 3 times, (a, b) and (b, end) twice, (a, end) once: the discount is 1 / (1 + 2
    # * 2).
    assert model.discounts[1] == (0.2, 0.2, 0.2)
    # Of contexts: a and b follow one token each, the end two: one of them twice as often, so 2 / (2
    # + 2 * 1).
    assert model.discounts[0] == (0.5, 0.5, 0.5)
    lower = (1 - 0.5) / 4 + 3 * 0.5 / 4 / 3
    assert model.probability("b", ("a",)) == pytest.approx((2 - 0.2) / 3 + 2 * 0.2 / 3 * lower)
    assert model.bits(["ab"])[1] == 3


def test_the_command_tells_its_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(["abab", "aba", "baba"] * 10) + "\n")
    assert 0 < load(_PATH).main([str(path), "--order", "3"]) < 2
    assert "3-grams of 27 texts; 3 held out: " in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        load(_PATH).main([str(tmp_path / "absent.txt")])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
