"""The benchmark: competitors, their check, the clock, the arithmetic, cases, lengths and
batches.
"""

from __future__ import annotations

import gc
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from harness import memory, run, timing
from harness.batch import Batch
from harness.cases import (
    CELLS,
    DTYPES,
    ELEMENTWISE,
    MODES,
    SIZES,
    SUITES,
    TORCH_CELLS,
    Case,
    Size,
    operations,
    select,
)
from harness.check import find_fault
from harness.competitors import COMPETITORS, TORCH, ours
from harness.competitors.base import Competitor, Runner
from harness.lengths import LENGTHS, QUANTILES, draw_like
from harness.results import CaseResult, Row, rows_of, summarize
from harness.timing import interleave

from raglane.errors import ArgumentError, RaglaneError
from yardsticks import a_case, short_samples  # noqa: F401

_SHORT = pytest.mark.usefixtures("short_samples")


@pytest.fixture(autouse=True)
def one_thread(any_threads: Callable[[int], None]) -> None:
    any_threads(1)


@pytest.mark.parametrize("name", COMPETITORS)
def test_every_competitor_is_right_and_right_again_after_a_call(name: str) -> None:
    cases = [a_case(*each) for each in itertools.product(CELLS, MODES, DTYPES)]
    cases = [case for case in cases if COMPETITORS[name].runs(case)]
    if name.startswith("exported"):
        # Seconds each; tests/export has the others.
        cases = [case for case in cases if case.cell in ("lstm", "mingru")]
    assert cases
    for module in COMPETITORS[name].modules:
        pytest.importorskip(module)
    for case in cases:
        batch = COMPETITORS[name].view(Batch.of(case))
        runner, truth = (
            COMPETITORS[name].prepare(batch, case.mode, 1),
            ours.reference(batch, case.mode),
        )
        assert find_fault(runner.answer(), truth, batch.dtype) is None, case
        runner.call()
        runner.call()
        assert find_fault(runner.answer(), truth, batch.dtype) is None, case


def test_the_reference_is_what_torch_finds_in_float64_sequence_by_sequence() -> None:
    batch = Batch.of(a_case("lstm")).to(torch.float64)
    layer = torch.nn.LSTM(4, 6, dtype=torch.float64)
    layer.load_state_dict(batch.weights)
    outputs, cells = [], []
    for sequence in batch.values.split(batch.lengths.tolist()):
        output, (_, c) = layer(sequence)
        outputs.append(output)
        cells.append(c[0])
    torch.cat(outputs).backward(batch.gradient)
    truth: Any = ours.reference(Batch.of(a_case("lstm")), "train")
    pairs: list[tuple[Any, Any]] = [
        (truth.output, torch.cat(outputs)),
        (truth.state[1], torch.stack(cells)),
    ]
    pairs += [(truth.gradients[name], weight.grad) for name, weight in layer.named_parameters()]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert truth.gradients["input"].shape == (25, 4)


def _changed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    return torch.cat((tensor.flatten()[:-1], tensor.new_tensor([value]))).view_as(tensor)


def test_the_check_finds_each_part_that_is_wrong() -> None:
    truth = ours.reference(Batch.of(a_case("lstm")), "train")
    assert truth.state is not None
    h, c = truth.state
    wrong = {
        "wrong output": replace(truth, output=_changed(truth.output, 9.0)),
        "wrong output: off by nan": replace(truth, output=_changed(truth.output, math.nan)),
        "wrong output: shape": replace(truth, output=truth.output[:-1]),
        "wrong final state c": replace(truth, state=(h, _changed(c, 7.0))),
        "wrong: no final state c": replace(truth, state=(h,)),
    }
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "input"):
        others = {other: gradient for other, gradient in truth.gradients.items() if other != name}
        gradients = {**others, name: truth.gradients[name] * 1.01}
        wrong[f"wrong gradient of {name}: off by"] = replace(truth, gradients=gradients)
        wrong[f"wrong: no gradient of {name}"] = replace(truth, gradients=others)
    assert find_fault(truth, truth, torch.float32) is None
    for fault, answer in wrong.items():
        assert str(find_fault(answer, truth, torch.float32)).startswith(fault)


class _Clock:
    """A clock that advances only with the calls that it makes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def call(self, name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            self.calls.append(name)
            self.now += seconds

        return run


def test_all_take_turns_and_another_one_goes_first() -> None:
    clock = _Clock()
    calls = {name: clock.call(name, 0.5) for name in "abc"}
    samples = interleave(calls, 4, clock=clock)
    assert samples == {name: [0.5] * 4 for name in "abc"}
    assert "".join(clock.calls[9:]) == "abcbcacababc"


def test_short_calls_are_repeated_and_slow_ones_are_not() -> None:
    clock = _Clock()
    samples = interleave(
        {"short": clock.call("short", 0.001), "slow": clock.call("slow", 2.0)}, 3, clock=clock
    )
    assert samples["short"] == pytest.approx([0.001] * 3)
    # An estimate; then in each round 15 ms to warm up, rounded up, and a sample of 10 ms.
    assert 3 + 3 * (15 + 10) <= clock.calls.count("short") <= 3 + 3 * (16 + 10)
    assert clock.calls.count("slow") == 1 + 3


def test_rounds_end_when_time_is_up_but_not_before_the_third() -> None:
    clock = _Clock()
    assert (
        len(interleave({"a": clock.call("a", 1.0)}, 50, most_seconds=10.0, clock=clock)["a"]) == 11
    )
    assert (
        len(interleave({"a": clock.call("a", 60.0)}, 50, most_seconds=10.0, clock=clock)["a"]) == 3
    )
    assert gc.isenabled()


def test_the_peak_counts_the_operations_of_all_threads() -> None:
    single, double = timing.peak(torch.float32), timing.peak(torch.float64)
    assert single is not None
    assert double is not None
    alone = single()
    assert 2 * double() == alone  # a vector has half as many numbers
    torch.set_num_threads(3)
    assert single() == 3 * alone


def test_ratios_are_those_of_each_round() -> None:
    samples = {
        "ours": [1.0, 2.0, 4.0],
        "torch-packed": [3.0, 4.0, 4.0],
        "torch-padded": [9.0, 9.0, 2.0],
    }
    rows = {row.competitor: row for row in rows_of(samples, dict.fromkeys(samples, 100), rate=5.0)}
    assert rows["ours"].milliseconds == 2000.0
    # torch-packed is the faster of the two by its median: 3/1, 4/2, 4/4.
    assert rows["ours"].ratio == 2.0
    assert rows["torch-packed"].ratio == 1.0
    assert rows["torch-padded"].ratio == pytest.approx(4 / 9)
    assert rows["torch-padded"].of_ours == pytest.approx(2 / 9)
    assert rows["ours"].share == pytest.approx(100 / 2.0 / 5.0)


def _result(case: Case, ratio: float | None, *others: Row, milliseconds: float = 1.0) -> CaseResult:
    mine = (
        Row("ours", fault="wrong") if ratio is None else Row("ours", milliseconds, ratio, 1.0, 0.5)
    )
    return CaseResult(case, 25, 7, 0.5, (mine, *others), rate=1e9, rounds=3, load=0.5)


def test_the_competitor_ahead_of_ours() -> None:
    slow, fast = Row("torch-packed", 2.0, 1.0, 0.5), Row("jax", 0.5, 4.0, 2.0)
    assert _result(a_case(), 2.0, slow, Row("ours-kernel", 0.1, 20.0, 10.0)).ahead is None
    assert _result(a_case(), 2.0, slow, fast, Row("onnxruntime", fault="wrong")).ahead == "jax"
    assert _result(a_case(), None, slow).ahead is None
    packed = Row("torch-packed", memory=6.0, of_ours=7 / 6)
    held = CaseResult(
        a_case(suite="memory"), 1, 1, 1.0, (Row("ours", memory=7.0, of_ours=1.0), packed)
    )
    assert held.ahead == "torch-packed"


def test_means_and_worst_cases() -> None:
    wide = a_case("lstm", size=Size(7, 256, 4))
    slower = Row("torch-packed", 0.5, 1.0, 2.0)
    results = [_result(a_case(), 2.0), _result(a_case("lstm"), 8.0), _result(wide, 0.5, slower)]
    results += [
        _result(a_case("lstm", dtype="bfloat16"), None),
        _result(a_case(suite="memory"), 3.0),
    ]
    found = {(one.dtype, one.group): one for one in summarize(results)}
    groups = {("float32", group) for group in ("gru", "lstm", "all", "all, H <= 128")}
    assert set(found) == groups | {("bfloat16", "lstm")}
    everything = found["float32", "all"]
    assert (everything.count, everything.behind, everything.worst_case) == (3, 1, wide.name)
    assert everything.mean == pytest.approx(2.0)
    assert everything.worst == 0.5
    assert found["float32", "all, H <= 128"].mean == pytest.approx(4.0)
    assert (found["bfloat16", "lstm"].count, found["bfloat16", "lstm"].missing) == (0, 1)


def _wrong(batch: Batch, mode: str, threads: int) -> Runner:
    truth = ours.reference(batch, mode)
    return Runner(
        lambda: pytest.fail("it was timed"), lambda: replace(truth, output=truth.output + 0.01)
    )


def _broken(batch: Batch, mode: str, threads: int) -> Runner:
    raise RuntimeError("no such\noperator")


@_SHORT
@pytest.mark.parametrize(
    ("prepare", "fault"),
    [(_wrong, "wrong output: off by"), (_broken, "failed: RuntimeError: no such operator")],
)
@pytest.mark.parametrize("name", ["torch-packed", "ours"])
def test_competitors_with_faults_are_named_and_not_timed(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    prepare: Callable[[Batch, str, int], Runner],
    fault: str,
) -> None:
    monkeypatch.setitem(
        COMPETITORS, name, Competitor(name, "a test", prepare, COMPETITORS[name].family)
    )
    report = run.measure([a_case()], TORCH, rounds=1)
    rows = {row.competitor: row for row in report.results[0].rows}
    assert rows[name].fault.startswith(fault)
    assert rows[name].milliseconds is None
    assert all(row.milliseconds is not None for other, row in rows.items() if other != name)
    assert len(report.faults) == (1 if name == "ours" else 0)


@_SHORT
def test_a_run_leaves_threads_as_they_were() -> None:
    seen: list[int] = []

    def watch(_: CaseResult) -> None:
        seen.append(torch.get_num_threads())

    report = run.measure([a_case(threads=2)], ["torch-packed"], rounds=1, watch=watch)
    assert (seen, torch.get_num_threads()) == ([2], 1)
    assert report.competitors == ("torch-packed",)
    assert any(note.startswith("ours in float32: backend") for note in report.notes)


@pytest.mark.skipif(not memory.is_measurable(), reason="needs Linux")
def test_memory_is_measured_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    case = a_case("lstm", suite="memory", lengths=LENGTHS["equal"], size=Size(256, 64, 64))
    result = run.measure_case(case, [], rounds=1)
    (row,) = result.rows
    # Outputs and the gradients of inputs and outputs are alive at the same time.
    assert row.memory is not None, row.fault
    assert 2 < row.memory < 2000
    assert result.rate is None
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    with pytest.raises(RaglaneError, match=r"got exit code \d+: .*harness.memory"):
        memory.peak_floats(case, "ours")


def _select(
    suites: list[str], cells: list[str], modes: Sequence[str] = MODES, **other: Any
) -> list[Case]:
    more = {
        "sizes": None,
        "lengths": [LENGTHS["equal"], LENGTHS["ewt"]],
        "threads": [1, 2],
        **other,
    }
    return select(suites, cells=cells, modes=modes, dtypes=DTYPES, **more)


def test_the_registry_is_complete_and_has_no_case_twice() -> None:
    cases = _select(list(SUITES), list(CELLS))
    assert len(set(cases)) == len(cases)
    grid = [case for case in cases if case.suite == "grid"]
    assert len(grid) == len(TORCH_CELLS) * len(SIZES) * 2 * len(MODES) * len(DTYPES) * 2
    assert {case.suite for case in cases} == set(SUITES)
    assert {case.mode for case in cases if case.suite == "memory"} == {"train"}


def test_a_batch_too_small_for_its_lengths_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"at least 32 sequences for lengths density-0\.1"):
        _select(["density"], ["gru"], sizes=[SIZES[0]])
    for suite, cell in (("own-cell", "lstm"), ("memory", "gru")):
        with pytest.raises(ArgumentError, match="at least one case"):
            _select([suite], [cell], ["infer"])


@pytest.mark.parametrize("cell", ["lstm", "gru", "rnn_tanh", "indrnn_tanh", "mingru", "minlstm"])
def test_operations_are_those_of_the_matrix_products(cell: str) -> None:
    weights = Batch.of(a_case(cell)).weights
    products = ["weight_ih_l0"] if cell in ELEMENTWISE else ["weight_ih_l0", "weight_hh_l0"]
    counted = sum(2 * weights[name].numel() for name in products)
    assert operations(cell, Size(7, 6, 4), "infer") == counted > 0
    assert operations(cell, Size(7, 6, 4), "train") == 3 * counted


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("count", [32, 33, 256])
def test_every_rule_gives_the_same_lengths_each_time(name: str, count: int) -> None:
    drawn = LENGTHS[name].draw(count)
    assert len(drawn) == count
    assert all(type(length) is int and length >= 1 for length in drawn)
    torch.manual_seed(5)
    assert LENGTHS[name].draw(count) == drawn
    if name == "density-0.1":
        assert sum(drawn) == sum(LENGTHS["equal"].draw(count)) == 30 * count
        assert sum(drawn) / (count * max(drawn)) == pytest.approx(0.1)


@pytest.mark.parametrize("name", QUANTILES)
def test_lengths_like_real_data_follow_its_quantiles(name: str) -> None:
    quantiles = QUANTILES[name]
    drawn = np.quantile(draw_like(quantiles, 20_000, seed=3), np.linspace(0, 1, 101))
    assert quantiles[0] <= drawn[0] <= drawn[100] <= quantiles[100]
    middle = [10, 25, 50, 75, 90]
    np.testing.assert_allclose(drawn[middle], np.array(quantiles)[middle], rtol=0.05, atol=0.6)
