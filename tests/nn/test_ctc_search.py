"""Beam search and alignment by CTC compared with all alignments, and the two searches with each
other.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.nn.transduction import ctc
from raglane.nn.transduction.hypotheses import Hypotheses
from raglane.transduction import CTCBeamSearch, NGram, ctc_align, ctc_loss

Tokens = tuple[int, ...]
needs_kernels = pytest.mark.skipif(
    bool(rl.native.missing_kernels()), reason="it compares the kernels with Python"
)


@pytest.fixture(params=["kernels", "python"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with the kernels, and without them."""
    if request.param == "python":
        monkeypatch.setattr(ctc, "missing_kernels", lambda: "not built")


def without_kernels(call: Callable[[], Any]) -> Any:
    with mock.patch.object(ctc, "missing_kernels", return_value="not built"):
        return call()


def draw(lengths: list[int], classes: int = 3, dtype: torch.dtype = torch.float64) -> rl.Ragged:
    logits = torch.randn(sum(lengths), classes, dtype=torch.float64) * 2
    return rl.Ragged.from_flat(logits.log_softmax(-1).to(dtype), lengths=lengths)


def spans_of(alignment: Tokens, blank: int) -> list[list[int]]:
    spans, step = [], 0
    for label, run in itertools.groupby(alignment):
        length = len(list(run))
        if label != blank:
            spans.append([step, step + length])
        step += length
    return spans


def enumerated(
    rows: Tensor, blank: int
) -> tuple[dict[Tokens, float], dict[Tokens, tuple[float, Tokens]]]:
    """The log-probability of each sequence, and its best alignment with its log-probability."""
    total: dict[Tokens, float] = defaultdict(float)
    best: dict[Tokens, tuple[float, Tokens]] = {}
    for alignment in itertools.product(range(rows.shape[1]), repeat=rows.shape[0]):
        chance = math.exp(sum(float(rows[step, label]) for step, label in enumerate(alignment)))
        tokens = tuple(label for label, _ in itertools.groupby(alignment) if label != blank)
        total[tokens] += chance
        if chance > best.get(tokens, (-1.0, ()))[0]:
            best[tokens] = chance, alignment
    return {tokens: math.log(chance) for tokens, chance in total.items() if chance}, best


def listed(found: Hypotheses) -> list[list[tuple[Tokens, float]]]:
    """Tokens and scores of each item."""
    flat = list(
        zip((tuple(one.tolist()) for one in found.tokens), found.scores.tolist(), strict=True)
    )
    return [flat[begin:end] for begin, end in itertools.pairwise(found.offsets.tolist())]


def assert_same(own: Hypotheses, other: Hypotheses, rtol: float, atol: float) -> None:
    for name in ("tokens", "times", "confidences"):
        first, second = getattr(own, name), getattr(other, name)
        assert first.lengths.equal(second.lengths)
        torch.testing.assert_close(first.values, second.values, rtol=rtol, atol=atol)
    assert own.offsets.equal(other.offsets)
    torch.testing.assert_close(own.scores, other.scores, rtol=rtol, atol=atol)


@pytest.mark.parametrize("blank", [0, 2])
@pytest.mark.usefixtures("path")
def test_a_large_beam_finds_all_sequences(blank: int) -> None:
    """Every sequence with its exact score, best first, and the times of its best alignment."""
    log_probs = draw([0, 1, 4, 5])
    found = CTCBeamSearch(beam_size=400, n_best=400, blank=blank)(log_probs)
    assert found.times is not None
    assert found.confidences is not None
    hypotheses = listed(found)
    for item, rows in enumerate(log_probs):
        total, best = enumerated(rows, blank)
        expected = sorted(total.items(), key=lambda one: -one[1])
        assert [tokens for tokens, _ in hypotheses[item]] == [tokens for tokens, _ in expected]
        scores = [score for _, score in hypotheses[item]]
        assert scores == pytest.approx([score for _, score in expected], rel=1e-12, abs=1e-12)
        for number, (tokens, _) in enumerate(hypotheses[item]):
            place = int(found.offsets[item]) + number
            spans = spans_of(best[tokens][1], blank)
            assert found.times[place].tolist() == spans
            chances = [
                float(rows[first:end, token].exp().mean())
                for token, (first, end) in zip(tokens, spans, strict=True)
            ]
            assert found.confidences[place].tolist() == pytest.approx(chances, rel=1e-12)


SEARCHES: list[dict[str, Any]] = [
    {"beam_size": 1},
    {"beam_size": 2, "n_best": 2},
    {"beam_size": 5, "n_best": 3, "tokens_per_step": 2},
    {"beam_size": 4, "n_best": 4, "token_bonus": 0.7},
    {"beam_size": 30, "n_best": 30, "token_bonus": -0.3},
]


@needs_kernels
@pytest.mark.parametrize("options", SEARCHES)
@pytest.mark.parametrize("with_grams", [False, True])
@given(
    lengths=st.lists(st.integers(0, 12), max_size=4),
    classes=st.integers(1, 5),
    seed=st.integers(0, 2**20),
    never=st.booleans(),
)
def test_the_kernels_equal_python(
    with_grams: bool,
    lengths: list[int],
    classes: int,
    seed: int,
    never: bool,
    options: dict[str, Any],
) -> None:
    """Also with log-probabilities of -inf, and equal ones."""
    torch.manual_seed(seed)
    log_probs = draw(lengths, classes)
    if never:
        log_probs = log_probs.map(
            lambda values: values.masked_fill(torch.rand_like(values) < 0.3, -math.inf).floor()
        )
    blank = seed % classes
    ngram = (
        NGram([torch.randint(0, classes, (9,)).tolist()], classes, n=1 + seed % 4)
        if with_grams
        else None
    )
    search = CTCBeamSearch(**options, blank=blank, scorer=ngram, scorer_weight=0.6)
    found = search(log_probs)
    other = without_kernels(lambda: search(log_probs))
    state, its_state = found.state, other.state
    assert_same(found, other, rtol=1e-12, atol=1e-12)
    assert state.lengths.equal(its_state.lengths)


@pytest.mark.parametrize("with_grams", [False, True])
@pytest.mark.parametrize("cuts", [[13], [0, 1, 12], [1] * 13, [7, 0, 6]])
@pytest.mark.usefixtures("path")
def test_pieces_give_the_same_bits(cuts: list[int], with_grams: bool) -> None:
    log_probs = draw([13, 0, 9, 2], classes=4)
    ngram = NGram([[1, 2, 3, 1, 2], [3, 3, 1]], 4, n=3) if with_grams else None
    search = CTCBeamSearch(beam_size=6, n_best=3, scorer=ngram)
    whole = search(log_probs)
    state, begin = None, 0
    for size in cuts:
        found = search(rl.Ragged([rows[begin : begin + size] for rows in log_probs]), state)
        state = found.state
        begin += size
    assert_same(found, whole, rtol=0, atol=0)
    assert state is not None
    assert state.values.equal(whole.state.values)


def test_a_long_sequence_forgets_unused_prefixes() -> None:
    """The trie is rebuilt after a million nodes, without a change of the result."""
    log_probs = draw([40_000], classes=8, dtype=torch.float32)
    search = CTCBeamSearch(beam_size=16)
    found = search(log_probs)
    state = search(rl.Ragged([log_probs[0][:20_001]])).state
    rest = search(rl.Ragged([log_probs[0][20_001:]]), state)
    assert_same(found, rest, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_depend_on_the_sequence_only(
    dtype: torch.dtype, any_threads: Callable[[int], None]
) -> None:
    log_probs = draw([30, 2, 17, 25, 0, 40], classes=20, dtype=dtype)
    search = CTCBeamSearch(beam_size=8, n_best=4)
    any_threads(3)
    together = search(log_probs).state
    any_threads(1)
    for item in range(len(log_probs)):
        assert search(log_probs[item : item + 1]).state.values.equal(together[item])


@pytest.mark.usefixtures("path")
def test_equal_scores_have_the_lowest_token_first() -> None:
    found = CTCBeamSearch(beam_size=3, n_best=3)(rl.Ragged([torch.full((1, 4), 0.25).log()]))
    assert listed(found)[0] == [
        ((), float(found.scores[0])),
        ((1,), float(found.scores[0])),
        ((2,), float(found.scores[0])),
    ]
    found = CTCBeamSearch(n_best=4, tokens_per_step=2)(
        rl.Ragged([torch.tensor([[0.4, 0.1, 0.2, 0.3]]).log()])
    )
    assert [tokens for tokens, _ in listed(found)[0]] == [(), (3,), (2,)]


@pytest.mark.usefixtures("path")
def test_items_without_a_possible_sequence_have_no_hypothesis() -> None:
    values = torch.full((2, 3), -math.inf)
    found = CTCBeamSearch(n_best=2)(rl.Ragged([values, values[:0]]))
    state = found.state
    assert listed(found) == [[], [((), 0.0)]]
    assert found.best().lengths.tolist() == [0, 0]
    again = CTCBeamSearch()(draw([3, 3]).to(torch.float32), state)
    assert again.offsets.tolist() == [0, 0, 1]


def test_bfloat16_is_searched_in_float32() -> None:
    log_probs = draw([6, 9], classes=5).to(torch.bfloat16)
    own = CTCBeamSearch(beam_size=4)(log_probs)
    assert own.scores.dtype is torch.float32
    assert_same(own, CTCBeamSearch(beam_size=4)(log_probs.to(torch.float32)), rtol=0, atol=0)


def test_states_are_selected_and_joined() -> None:
    log_probs = draw([5, 7, 3], classes=4)
    search = CTCBeamSearch(beam_size=3)
    more = draw([4, 4], classes=4)
    state = search(log_probs).state
    both = search(more, state[[2, 0]])
    for item, old in enumerate([2, 0]):
        alone = search(rl.Ragged([torch.cat([log_probs[old], more[item]])]))
        assert both.tokens[item].equal(alone.tokens[0])
        assert both.scores[item] == alone.scores[0]


def test_a_function_scores_like_the_model_that_it_calls() -> None:
    """The n-grams in C++, and the same model called once per step."""
    log_probs = draw([0, 9, 6], classes=5)
    ngram = NGram([[1, 2, 3, 4, 1, 2], [2, 2, 4], [4, 1]], 5, n=3)
    options: dict[str, Any] = {
        "beam_size": 7,
        "n_best": 7,
        "scorer_weight": 1.3,
        "token_bonus": 0.5,
    }
    calls = []

    def scorer(prefixes: rl.Ragged, tokens: Tensor) -> Tensor:
        calls.append(len(tokens))
        return ngram(prefixes, tokens)

    own = CTCBeamSearch(**options, scorer=ngram)(log_probs)
    called = CTCBeamSearch(**options, scorer=scorer)(log_probs)
    assert_same(own, called, rtol=1e-12, atol=1e-12)
    assert len(calls) == 9


def test_scores_are_added_to_exact_log_probabilities() -> None:
    (rows,) = log_probs = draw([4])
    ngram = NGram([[1, 2, 1]], 3, n=2)
    found = CTCBeamSearch(
        beam_size=400, n_best=400, scorer=ngram, scorer_weight=0.5, token_bonus=0.1
    )(log_probs)
    total, _ = enumerated(rows, 0)
    for tokens, score in listed(found)[0]:
        expected = total[tokens]
        for place, token in enumerate(tokens):
            before = rl.Ragged([torch.tensor(tokens[:place], dtype=torch.int64)])
            expected += 0.5 * float(ngram(before, torch.tensor([token]))) + 0.1
        assert score == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_probabilities_of_n_grams_sum_to_one(order: int) -> None:
    ngram = NGram([[1, 2, 3, 1, 2], [3, 3, 1], []], 6, n=order)
    for prefix in ([], [1], [5, 5], [1, 2], [3, 1, 2], [0, 3, 1, 2, 3]):
        repeated = rl.Ragged.from_flat(
            torch.tensor(prefix * 7, dtype=torch.int64), lengths=[len(prefix)] * 7
        )
        assert float(ngram(repeated, torch.arange(7)).exp().sum()) == pytest.approx(1, rel=1e-12)


def test_n_grams_by_hand() -> None:
    """Bigrams <1, 12, 21, 12, 2>, <1, 1>: two occur twice, three once; D = 3 / (3 + 2 * 2)."""
    ngram = NGram([[1, 2, 1, 2], [1]], 3, n=2)
    # Of the lower order, the tokens before: 1 after begin and 2; 2 after 1; the end after 2 and 1.
    # D = 1 / (1 + 2 * 2).
    lower = {
        1: (2 - 0.2) / 5 + 0.2 * 3 / 5 / 4,
        2: (1 - 0.2) / 5 + 0.2 * 3 / 5 / 4,
        0: 0.2 * 3 / 5 / 4,
    }
    # After 1: 2 twice, the end once.
    found = ngram(rl.Ragged([[2, 1], [1], [1]]), torch.tensor([2, 1, 0])).exp().tolist()
    spread = 3 / 7 * 2 / 3
    assert found == pytest.approx(
        [(2 - 3 / 7) / 3 + spread * lower[2], spread * lower[1], spread * lower[0]]
    )
    twice = NGram([[1], [1]], 3, n=1)  # nothing occurs once: D = 1 / 2
    assert twice(rl.Ragged([[2], [2]]), torch.tensor([1, 0])).exp().tolist() == pytest.approx(
        [7 / 16, 1 / 16]
    )


@pytest.mark.parametrize("labels", [[], [1], [1, 1], [1, 2], [2, 1, 2], [2, 2, 1]])
@pytest.mark.parametrize("steps", [0, 1, 2, 4, 6])
@pytest.mark.usefixtures("path")
def test_the_best_of_all_alignments(steps: int, labels: list[int]) -> None:
    (rows,) = log_probs = draw([steps])
    targets = rl.Ragged.from_flat(torch.tensor(labels, dtype=torch.int64), lengths=[len(labels)])
    _, best = enumerated(rows, 0)
    if tuple(labels) not in best:
        with pytest.raises(
            ArgumentError, match=rf"log_probs must be at least as long.*got {steps} steps"
        ):
            ctc_align(log_probs, targets)
        return
    chance, alignment = best[tuple(labels)]
    found: Any = ctc_align(log_probs, targets)
    assert found.confidences is not None
    assert found.scores.item() == pytest.approx(math.log(chance), rel=1e-12, abs=1e-12)
    assert found.times.values.tolist() == spans_of(alignment, 0)
    means = [
        float(rows[first:end, label].exp().mean())
        for label, (first, end) in zip(labels, spans_of(alignment, 0), strict=True)
    ]
    assert found.confidences.values.tolist() == pytest.approx(means, rel=1e-12)


@needs_kernels
@given(
    pairs=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=5),
    blank=st.sampled_from([0, 3]),
    rounded=st.booleans(),
)
def test_alignments_of_the_kernels_equal_those_of_torch(
    pairs: list[tuple[int, int]], blank: int, rounded: bool
) -> None:
    """Also among equal alignments, and with log-probabilities of -inf."""
    labels = [count for count, _ in pairs]
    log_probs = draw([2 * count + more for count, more in pairs], classes=4)
    if rounded:
        log_probs = log_probs.map(lambda values: values.floor().masked_fill(values < -5, -math.inf))
    tokens = torch.randint(0, 3, (sum(labels),))
    targets = rl.Ragged.from_flat(tokens + (tokens >= blank), lengths=labels)
    own = ctc_align(log_probs, targets, blank)
    assert_same(
        own, without_kernels(lambda: ctc_align(log_probs, targets, blank)), rtol=1e-12, atol=1e-12
    )
    assert bool(
        (own.scores <= -ctc_loss(log_probs, targets, blank, reduction="none") + 1e-12).all()
    )


@pytest.mark.usefixtures("path")
def test_an_impossible_alignment_has_no_times() -> None:
    values = torch.tensor([[0.5, 0.5, 0.0]] * 3).log()
    found: Any = ctc_align(rl.Ragged([values, values]), rl.Ragged([[2, 1], [1]]))
    assert found.scores.isinf().tolist() == [True, False]
    assert found.times[0].tolist() == [[0, 0], [0, 0]]
    assert found.confidences[0].tolist() == [0, 0]


LOG_PROBS = rl.Ragged.from_flat(torch.full((5, 4), 0.25, device="cpu").log(), lengths=[3, 2])
LOGITS = rl.Ragged.from_flat(torch.full((5, 4), -0.5, device="cpu"), lengths=[3, 2])
NAN = rl.Ragged.from_flat(torch.tensor([[0.0, math.nan]], device="cpu"), lengths=[1])
STATE = rl.Ragged.from_flat(torch.tensor([3, 9, 0, 0], device="cpu"), lengths=[2, 2])


@pytest.mark.usefixtures("path")
def test_hypotheses_are_indexed_by_item() -> None:
    found = CTCBeamSearch(beam_size=4, n_best=3)(draw([6, 0, 4]))
    assert [len(item) for item in found] == found.offsets.diff().tolist()
    first, second = found[0][:2]
    assert first[0].tolist() == found.best()[0].tolist()
    assert first[1] > second[1]
    assert torch.equal(found[-1][0][0], found.best()[2])
    with pytest.raises(IndexError, match="from -3 to 2, for 3 items"):
        found[3]


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: CTCBeamSearch(0), ArgumentError, "beam_size must be .*at least 1, got 0"),
        (
            lambda: CTCBeamSearch(2, n_best=3),
            ArgumentError,
            "n_best must be at most beam_size=2, got 3",
        ),
        (lambda: CTCBeamSearch(tokens_per_step=0), ArgumentError, "tokens_per_step must be"),
        (lambda: CTCBeamSearch(scorer=3), ArgumentTypeError, "scorer must be an NGram"),  # type: ignore[arg-type]
        (
            lambda: CTCBeamSearch(scorer_weight=-1),
            ArgumentError,
            "scorer_weight must be .*at least 0, got -1",
        ),
        (
            lambda: CTCBeamSearch(token_bonus=math.inf),
            ArgumentError,
            "token_bonus must be finite, got inf",
        ),
        (lambda: CTCBeamSearch(blank=4)(LOG_PROBS), ArgumentError, "a blank of the C labels"),
        (lambda: CTCBeamSearch()(LOG_PROBS.values), ArgumentTypeError, "log_probs must be"),  # type: ignore[arg-type]
        (
            lambda: CTCBeamSearch()(NAN),
            ArgumentError,
            "log_probs must be numbers below inf, got nan",
        ),
        (
            lambda: CTCBeamSearch(scorer=NGram([[1]], 3))(LOG_PROBS),
            ArgumentError,
            "scorer must be an NGram of 4",
        ),
        (
            lambda: CTCBeamSearch()(LOG_PROBS, LOG_PROBS),
            ShapeError,
            "state must be a state of 2 sequences",
        ),
        (lambda: CTCBeamSearch()(LOG_PROBS, STATE[:1]), ShapeError, "state must be"),
        (lambda: CTCBeamSearch()(LOG_PROBS, STATE), ArgumentError, "state must be"),
        (lambda: CTCBeamSearch(scorer=lambda p, t: t[:1])(LOG_PROBS), ShapeError, "scorer must be"),  # noqa: ARG005
        (
            lambda: CTCBeamSearch(scorer=lambda p, t: t * math.nan)(LOG_PROBS),  # noqa: ARG005
            ArgumentError,
            "scorer must",
        ),
        (lambda: NGram([], 3), ArgumentError, "sequences must be at least one"),
        (
            lambda: NGram([[3]], 3),
            ArgumentError,
            "sequences must be tokens from 0 to 2, got token 3",
        ),
        (lambda: NGram([[0.5]], 3), ArgumentTypeError, "sequences must be"),  # type: ignore[list-item]
        (lambda: NGram([[1]], 3, n=0), ArgumentError, "n must be at least 1"),
        (
            lambda: ctc_align(LOG_PROBS, rl.Ragged([[1], [0]])),
            ArgumentError,
            "from 0 to 3, except the blank",
        ),
        (
            lambda: ctc_align(LOG_PROBS, rl.Ragged([[1], [4]])),
            ArgumentError,
            "from 0 to 3.*got label 4",
        ),
        (
            lambda: ctc_align(LOG_PROBS, rl.Ragged([[1], [2, 2]])),
            ArgumentError,
            "requires 3 in sequence 1",
        ),
        (
            lambda: CTCBeamSearch()(LOGITS),
            ArgumentError,
            "sum to at most 1 in each step, got a sum of 2.426 in step 0 of sequence 0, and 4 more",
        ),
        (
            lambda: ctc_align(LOGITS, rl.Ragged([[1], [2]])),
            ArgumentError,
            "log_probs must be log-probabilities.* Pass logits through torch.log_softmax",
        ),
        (
            lambda: ctc_align(NAN, rl.Ragged([[1]])),
            ArgumentError,
            "log_probs must be numbers below inf, got nan",
        ),
    ],
)
def test_refuses(call: Callable[[], Any], error: type[Exception], says: str) -> None:
    with torch.device("cpu"), pytest.raises(error, match=says):
        call()


def test_a_state_of_other_numbers_is_an_error_or_a_result() -> None:
    """Memory is safe whatever the numbers of a state are."""
    search = CTCBeamSearch(beam_size=4)
    log_probs = draw([6, 9], classes=4)
    state = search(log_probs).state
    errors = set()
    for _ in range(300):
        values = state.values.clone()
        place = torch.randint(0, len(values), (1,))
        values[place] = int(
            torch.tensor([-1, 0, 1, 2, 7, 2**40, 2**62, 0x7FF8000000000000])[
                torch.randint(0, 8, (1,))
            ]
        )
        try:
            search(log_probs, state.with_values(values))
        except RaglaneError as error:
            errors.add(str(error))
    assert errors
    assert all("state must" in error for error in errors)
