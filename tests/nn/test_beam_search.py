"""Beam search against enumerations of all outputs, and against a search of one item at a time that
keeps everything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.ragged import Ragged
from raglane.transduction import beam_search

ITEMS, STATES, TOKENS = 5, 23, 4
Result = list[tuple[float, tuple[int, ...]]]


class Model:
    """A model whose log-probabilities depend on the item and on all tokens so far."""

    def __init__(self, seed: int, tokens: int = TOKENS, items: int = ITEMS) -> None:
        generator = torch.Generator(torch.get_default_device()).manual_seed(seed)
        logits = torch.randn(items, STATES, tokens, generator=generator, dtype=torch.float64)
        self.table = logits.mul(2).log_softmax(-1)
        self.starts = torch.randint(tokens, (items,), generator=generator)
        self.state: Any = {
            "item": torch.arange(items),
            "code": (torch.zeros(items, 1, dtype=torch.int64),),
        }
        self.rows: list[int] = []

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        self.rows.append(len(tokens))
        code = (state["code"][0] * 5 + tokens.unsqueeze(1) + 1) % STATES
        return self.table[state["item"], code.squeeze(1)], {**state, "code": (code,)}

    def log_probs(self, item: int, tokens: tuple[int, ...]) -> list[float]:
        code = 0
        for token in (int(self.starts[item]), *tokens):
            code = (code * 5 + token + 1) % STATES
        return self.table[item, code].tolist()


class Transducer(Model):
    """A model whose log-probabilities depend on the item, the frame and the output; token 0 is
    silent.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed, tokens=3)
        self.frames = torch.tensor([3, 1, 4, 0, 2])
        self.starts = torch.zeros(ITEMS, dtype=torch.int64)
        self.state = (
            torch.arange(ITEMS),
            torch.full((ITEMS,), -1),
            torch.zeros(ITEMS, dtype=torch.int64),
        )

    def step(self, tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        item, frame, code = state
        frame = frame + (tokens == 0)
        code = torch.where(tokens == 0, code, (code * 5 + tokens) % STATES)
        return self.table[item, (code * 3 + frame) % STATES], (item, frame, code)

    def at(self, item: int, frame: int, output: tuple[int, ...]) -> list[float]:
        code = 0
        for token in output:
            code = (code * 5 + token) % STATES
        return self.table[item, (code * 3 + frame) % STATES].tolist()


def _divisor(length: int, alpha: float) -> float:
    return float(((5 + length) / 6) ** alpha)


def _enumerated(model: Model, item: int, most: int, alpha: float) -> Result:
    """All outputs of up to ``most`` tokens, the best first; 0 is the end."""
    found = []
    for length in range(most + 1):
        for output in itertools.product(range(1, TOKENS), repeat=length):
            score = sum(
                model.log_probs(item, output[:place])[token] for place, token in enumerate(output)
            )
            if length < most:
                score += model.log_probs(item, output)[0]
            found.append((score / _divisor(length, alpha), output))
    return sorted(found, reverse=True)


def _kept(model: Model, item: int, beam: int, most: int, alpha: float) -> Result:
    """The search of one item that runs to the last step and keeps all finished outputs."""
    running: Result = [(0.0, ())]
    finished: Result = []
    for length in range(1, most + 1):
        ways = [
            (score + more, output, token)
            for score, output in running
            for token, more in enumerate(model.log_probs(item, output))
        ]
        ways.sort(key=lambda way: -way[0])
        finished += [
            (s / _divisor(length - 1, alpha), output)
            for s, output, token in ways[:beam]
            if token == 0
        ]
        if length == most:
            finished += [
                (s / _divisor(most, alpha), (*output, token))
                for s, output, token in ways[:beam]
                if token
            ]
        running = [(score, (*output, token)) for score, output, token in ways if token != 0][:beam]
    return sorted(finished if most else [(0.0, ())], key=lambda found: -found[0])


def _assert_found(found: Hypotheses, item: int, expected: Result) -> None:
    begin, end = found.offsets[item : item + 2].tolist()
    assert [tuple(found.tokens[place].tolist()) for place in range(begin, end)] == [
        output for _, output in expected
    ]
    torch.testing.assert_close(
        found.scores[begin:end].tolist(), [score for score, _ in expected], rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("alpha", [0.0, 0.8, -0.5])
@pytest.mark.parametrize("n_best", [1, 7])
def test_a_wide_beam_finds_the_best_of_all_outputs(alpha: float, n_best: int) -> None:
    model = Model(1)
    most = torch.tensor([4, 0, 1, 2, 3])
    options: dict[str, Any] = {
        "beam_size": 300,
        "max_length": most,
        "length_penalty": alpha,
        "n_best": n_best,
    }
    found = beam_search(model.step, model.starts, model.state, end=0, **options)
    for item in range(ITEMS):
        _assert_found(found, item, _enumerated(model, item, int(most[item]), alpha)[:n_best])


@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5])
@pytest.mark.parametrize("seed", range(4))
def test_rows_that_leave_do_not_change_the_results(beam: int, alpha: float, seed: int) -> None:
    model = Model(seed)
    most = torch.tensor([9, 0, 1, 6, 7])
    for rows in (None, beam, 3 * beam):
        options: dict[str, Any] = {
            "beam_size": beam,
            "max_length": most,
            "length_penalty": alpha,
            "n_best": beam,
        }
        model.rows.clear()
        found = beam_search(model.step, model.starts, model.state, end=0, max_rows=rows, **options)
        assert max(model.rows) <= (rows or beam * ITEMS)
        for item in range(ITEMS):
            _assert_found(found, item, _kept(model, item, beam, int(most[item]), alpha)[:beam])


def test_a_beam_of_1_is_greedy() -> None:
    model = Model(3)
    found = beam_search(model.step, model.starts, model.state, beam_size=1, max_length=12, end=0)
    for item in range(ITEMS):
        output: tuple[int, ...] = ()
        while len(output) < 12:
            chances = model.log_probs(item, output)
            token = chances.index(max(chances))
            if token == 0:
                break
            output += (token,)
        assert tuple(found.best()[item].tolist()) == output


def test_an_item_ends_as_soon_as_nothing_can_be_better() -> None:
    steps = 0

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        nonlocal steps
        steps += 1
        return torch.tensor([[0.6, 0.3, 0.1]]).log().expand(len(tokens), -1), state

    found = beam_search(
        step, torch.zeros(3, dtype=torch.int64), (), beam_size=2, max_length=50, end=0
    )
    assert found.tokens.lengths.tolist() == [0, 0, 0]
    assert steps == 1


def test_without_an_end_all_outputs_have_the_maximal_length() -> None:
    model = Model(5)
    found = beam_search(
        model.step, model.starts, model.state, beam_size=4**3, max_length=3, n_best=2
    )
    for item in range(ITEMS):
        every = [
            (
                sum(
                    model.log_probs(item, output[:place])[token]
                    for place, token in enumerate(output)
                ),
                output,
            )
            for output in itertools.product(range(TOKENS), repeat=3)
        ]
        _assert_found(found, item, sorted(every, reverse=True)[:2])


def _outputs(model: Transducer, item: int, most: int) -> Result:
    """All outputs of up to ``most`` labels with the sum of the probabilities of their
    alignments.
    """
    frames = int(model.frames[item])
    total: dict[tuple[int, ...], float] = {}

    def walk(frame: int, output: tuple[int, ...], probability: float) -> None:
        if frame == frames:
            total[output] = total.get(output, 0.0) + probability
            return
        chances = model.at(item, frame, output)
        walk(frame + 1, output, probability * math.exp(chances[0]))
        if len(output) < most:
            for token in (1, 2):
                walk(frame, (*output, token), probability * math.exp(chances[token]))

    walk(0, (), 1.0)
    return sorted(
        ((math.log(probability), output) for output, probability in total.items()), reverse=True
    )


def _synchronous(model: Transducer, item: int, beam: int, most: int) -> Result:
    """Alignment-length synchronous decoding of one item, with dictionaries of outputs."""
    frames = int(model.frames[item])
    running: dict[tuple[int, ...], tuple[int, float]] = {(): (0, 0.0)}
    finished: Result = [((0.0), ())] if frames == 0 else []
    while running and frames:
        ways: dict[tuple[int, ...], tuple[int, float]] = {}

        def add(output: tuple[int, ...], frame: int, score: float, ways: Any = ways) -> None:
            before = ways.get(output, (frame, -math.inf))[1]
            ways[output] = (
                frame,
                float(torch.tensor([before, score], dtype=torch.float64).logsumexp(0)),
            )

        for output, (frame, score) in running.items():
            chances = model.at(item, frame, output)
            add(output, frame + 1, score + chances[0])
            if len(output) < most:
                for token in (1, 2):
                    add((*output, token), frame, score + chances[token])
        order = sorted(ways.items(), key=lambda way: -way[1][1])
        finished += [(score, output) for output, (frame, score) in order[:beam] if frame == frames]
        running = dict([way for way in order if way[1][0] < frames][:beam])
    return sorted(finished, reverse=True)


@pytest.mark.parametrize("silent", [0, 2])
@pytest.mark.parametrize(("alpha", "n_best"), [(0.0, 6), (0.8, 1), (-10.0, 3)])
@pytest.mark.parametrize("seed", range(3))
def test_silent_tokens_merge_all_alignments(
    seed: int, alpha: float, n_best: int, silent: int
) -> None:
    model, shift = Transducer(seed), -silent % 3

    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        log_probs, state = model.step((tokens + shift) % 3, state)
        return log_probs.roll(-shift, 1), state

    options: dict[str, Any] = {
        "silent": silent,
        "frames": model.frames,
        "beam_size": 500,
        "n_best": n_best,
    }
    found = beam_search(
        step, model.starts + silent, model.state, max_length=4, length_penalty=alpha, **options
    )
    found = replace(found, tokens=found.tokens.map(lambda tokens: (tokens + shift) % 3))
    for item in range(ITEMS):
        outputs = [
            (score / _divisor(len(output), alpha), output)
            for score, output in _outputs(model, item, 4)
        ]
        _assert_found(found, item, sorted(outputs, reverse=True)[:n_best])


def test_outputs_that_merge_later_can_still_be_the_best() -> None:
    # The empty output ends with 0.4, when two hypotheses with 0.3 run, which then both become [1,
    # 1].
    table = torch.tensor([[0.4, 1, 1], [0.5, 1, 0], [1, 1, 1]])  # of silence, by label and frame

    def step(tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.where(
            tokens.unsqueeze(1) == 0, state + torch.tensor([1, 0]), state + torch.tensor([0, 1])
        )
        return torch.stack(
            [(silence := table[state[:, 1], state[:, 0]]), 1 - silence], 1
        ).log(), state

    options: dict[str, Any] = {
        "silent": 0,
        "frames": torch.tensor([3]),
        "beam_size": 4,
        "max_length": 2,
    }
    found = beam_search(step, torch.tensor([0]), torch.tensor([[-1, 0]]), **options)
    assert (found.tokens[0].tolist(), found.scores.exp().tolist()) == ([1, 1], [pytest.approx(0.6)])


@pytest.mark.parametrize("beam", [1, 2, 4])
@pytest.mark.parametrize("seed", range(6))
def test_silent_search_equals_one_of_dictionaries(beam: int, seed: int) -> None:
    model = Transducer(seed)
    for rows in (None, beam, 2 * beam + 1):
        options: dict[str, Any] = {
            "silent": 0,
            "frames": model.frames,
            "beam_size": beam,
            "n_best": beam,
            "max_rows": rows,
        }
        found: Any = beam_search(model.step, model.starts, model.state, max_length=5, **options)
        for item in range(ITEMS):
            _assert_found(found, item, _synchronous(model, item, beam, 5)[:beam])
        assert all(
            sorted(begin) == begin for begin in [times[:, 0].tolist() for times in found.times]
        )
        assert torch.equal(
            found.times.values.diff(dim=1).flatten(), torch.ones(len(found.tokens.values)).long()
        )


def test_times_are_those_of_the_likeliest_alignment() -> None:
    # The label 1 is likely only in frame 1, and blanks in the others.
    table = torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.9, 0.1]]).log()

    def step(tokens: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.where(
            tokens.unsqueeze(1) == 0, state + torch.tensor([1, 0]), state + torch.tensor([0, 1])
        )
        return torch.where(
            state[:, 1:] > 0, torch.tensor([1.0, 0.0]).log(), table[state[:, 0]]
        ), state

    start = torch.tensor([[-1, 0]])
    options: dict[str, Any] = {
        "silent": 0,
        "frames": torch.tensor([3]),
        "beam_size": 4,
        "max_length": 2,
    }
    found: Any = beam_search(step, torch.tensor([0]), start, **options)
    assert (found.tokens.to_list(), found.times.values.tolist()) == ([torch.tensor([1])], [[1, 2]])
    assert found.scores.exp().tolist() == pytest.approx([0.1 + 0.9 * 0.8 + 0.9 * 0.2 * 0.1])


@pytest.mark.parametrize("vocabulary", [3, 40])
def test_equal_scores_take_the_lowest_token(vocabulary: int) -> None:
    def step(tokens: Tensor, state: Any) -> tuple[Tensor, Any]:
        return torch.zeros(len(tokens), vocabulary), state

    found = beam_search(step, torch.tensor([0]), (), beam_size=3, max_length=2, n_best=3)
    assert [tokens.tolist() for tokens in found.tokens] == [[0, 0], [0, 1], [0, 2]]


def test_a_constraint_sees_prefixes_and_items() -> None:
    model = Model(7)

    def constraint(prefixes: Ragged, items: Tensor, log_probs: Tensor) -> Tensor:
        # Item 2 may only count down from 3; no other item may use 3.
        allowed = torch.ones_like(log_probs, dtype=torch.bool)
        allowed[:, 3] = False
        for row, (prefix, item) in enumerate(zip(prefixes, items.tolist(), strict=True)):
            if item == 2:
                allowed[row] = False
                allowed[row, 3 - len(prefix)] = True
        return torch.where(allowed, log_probs, -math.inf)

    options: dict[str, Any] = {"beam_size": 3, "max_length": 8, "n_best": 3, "max_rows": 6}
    found = beam_search(
        model.step, model.starts, model.state, end=0, constraint=constraint, **options
    )
    assert found.best()[2].tolist() == [3, 2, 1]
    assert int(found.offsets[3] - found.offsets[2]) == 1
    assert not (Ragged([found.best()[item] for item in (0, 1, 3, 4)]).values == 3).any()


def test_a_penalty_is_added_to_the_scores_of_finished_outputs() -> None:
    model = Model(11)

    def penalty(state: Any) -> Tensor:
        remainder: Tensor = state["code"][0].squeeze(1) % 3
        return -remainder.double()

    options: dict[str, Any] = {
        "beam_size": 100,
        "max_length": 3,
        "n_best": 4,
        "length_penalty": 0.5,
    }
    found = beam_search(model.step, model.starts, model.state, end=0, penalty=penalty, **options)
    for item in range(ITEMS):
        expected = []
        for score, output in _enumerated(model, item, 3, 0.5):
            # An output of the maximal length ends with the step before its last token.
            code = 0
            for token in (int(model.starts[item]), *output[:2]):
                code = (code * 5 + token + 1) % STATES
            expected.append((score - code % 3, output))
        _assert_found(found, item, sorted(expected, reverse=True)[:4])


def test_impossible_outputs_are_not_found() -> None:
    chances = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 0.0, 0.0]]).log()
    found = beam_search(
        lambda tokens, state: (chances[tokens], state),
        torch.tensor([0, 2]),
        (),
        beam_size=2,
        max_length=9,
    )
    assert (len(found), len(found.tokens), found.best().lengths.tolist()) == (2, 0, [0, 0])


@pytest.mark.parametrize("count", [0, 1])
def test_few_items(count: int) -> None:
    model = Model(2, items=count)
    found = beam_search(model.step, model.starts, model.state, beam_size=2, max_length=3, end=0)
    assert (len(found), len(found.tokens), found.scores.shape) == (count, count, (count,))


def test_scores_have_the_dtype_of_the_model_and_no_gradient() -> None:
    weight = torch.zeros(3, 3, requires_grad=True)
    found = beam_search(
        lambda tokens, state: (weight[tokens].log_softmax(1), state),
        torch.tensor([0]),
        (),
        beam_size=2,
        max_length=2,
    )
    assert (found.scores.dtype, found.scores.requires_grad) == (torch.float32, False)


_GOOD: dict[str, Any] = {"step": lambda tokens, state: (torch.zeros(len(tokens), 3), state)}
_GOOD |= {"starts": torch.tensor([0, 1]), "state": torch.zeros(2, 1), "beam_size": 2}


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        ({"beam_size": 0}, ArgumentError, "beam_size must be"),
        ({"n_best": 3}, ArgumentError, "n_best must be at most beam_size, 2"),
        ({"max_rows": 1}, ArgumentError, "max_rows must be at least beam_size"),
        ({"end": 3}, ArgumentError, "end must be below 3"),
        ({"end": 0, "silent": 1}, ArgumentError, "end must be None with silent"),
        ({"silent": 1}, ArgumentError, "frames must be"),
        ({"frames": torch.tensor([1, 1])}, ArgumentError, "frames must be"),
        ({"max_length": -1}, ArgumentError, "max_length must be at least 0"),
        ({"max_length": torch.tensor([1])}, ShapeError, "max_length must be one number per item"),
        ({"max_length": torch.tensor([1, -1])}, ArgumentError, "max_length must be at least 0"),
        ({"length_penalty": math.nan}, ArgumentError, "length_penalty must be a finite number"),
        ({"starts": [0, 1]}, ArgumentTypeError, "starts must be a tensor"),
        ({"starts": torch.zeros(2)}, ArgumentTypeError, "starts must be integers"),
        ({"state": torch.zeros(3, 1)}, ShapeError, "state must be tensors with one row per item"),
        (
            {"step": lambda tokens, _: torch.zeros(len(tokens), 3)},
            ArgumentTypeError,
            "step must be",
        ),
        ({"step": lambda _, state: (torch.zeros(1, 3), state)}, ShapeError, "step must be"),
        (
            {"step": lambda tokens, state: (torch.zeros(len(tokens), 3), state[:1])},
            ShapeError,
            "step: state must be",
        ),
        (
            {"step": lambda tokens, state: (torch.full((len(tokens), 3), math.nan), state)},
            ArgumentError,
            "for item 0",
        ),
        ({"constraint": lambda *_: torch.zeros(2, 4)}, ShapeError, "constraint must be"),
        ({"end": 0, "penalty": lambda _: torch.zeros(3)}, ShapeError, "penalty must be"),
    ],
)
def test_wrong_arguments(wrong: dict[str, Any], error: type[RaglaneError], text: str) -> None:
    search: Callable[..., Hypotheses] = beam_search
    with pytest.raises(error, match=text):
        search(**{"max_length": 3} | _GOOD | wrong)


def test_what_is_printed_is_short() -> None:
    tokens = rl.Ragged([[*range(20)], [1]] * 9)
    found = Hypotheses(tokens, torch.arange(18.0), torch.arange(19))
    lines = repr(found).splitlines()
    assert len(lines) == 6
    assert lines[0] == "Hypotheses: 18 of 18 items, the best of each:"
    assert lines[2] == "  1: [1], score 1"
    assert lines[5] == "  ... 14 more"
    edits = rl.transduction.edit_distance(rl.Ragged([[1, 2], [3]]), rl.Ragged([[1], [4]]))
    assert repr(edits) == "Edits(2 items: 1 insertions, 0 deletions, 1 substitutions; rate 1)"
