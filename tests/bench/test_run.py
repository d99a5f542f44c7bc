"""The benchmark: its competitors, its check, its clock and its arithmetic. No time is ever asserted."""

from __future__ import annotations

import gc
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from harness import memory, run, timing
from harness.batch import Batch
from harness.cases import CELLS, DTYPES, MODES, Case, Size
from harness.check import find_fault
from harness.competitors import COMPETITORS, TORCH, ours
from harness.competitors.base import Answer, Competitor, Runner
from harness.lengths import LENGTHS, Lengths
from harness.results import CaseResult, Row, efficiencies, rows_of, summarize
from harness.timing import YARDSTICKS, interleave

from raglane.errors import RaglaneError
from raglane.planner import machine
from yardsticks import short_samples  # noqa: F401

_SHORT = pytest.mark.usefixtures("short_samples")
_MIXED = Lengths("mixed", "unsorted, with ties and a one", lambda count: [3, 1, 5, 3, 7, 1, 5][:count])


def _case(cell: str = "gru", mode: str = "train", dtype: str = "float32", **other: object) -> Case:
    case = Case("grid", cell, Size(7, 6, 4), _MIXED, mode, dtype, 1)
    return replace(case, **other)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- competitors and their check --------------------------------------------------------------------------------------


def _prepare(name: str, case: Case) -> tuple[Runner, Answer, torch.dtype]:
    competitor = COMPETITORS[name]
    for module in competitor.modules:
        pytest.importorskip(module)
    batch = competitor.view(Batch.of(case))
    return competitor.prepare(batch, case.mode, 1), ours.reference(batch, case.mode), batch.dtype


@pytest.mark.parametrize("name", COMPETITORS)
def test_every_competitor_is_right_and_right_again_after_a_call(name: str) -> None:
    cases = [_case(*each) for each in itertools.product(CELLS, MODES, DTYPES)]
    cases = [case for case in cases if COMPETITORS[name].runs(case)]
    if name.startswith("exported"):
        # Seconds each; tests/export has the others.
        cases = [case for case in cases if case.cell in ("lstm", "mingru")]
    assert cases
    for case in cases:
        runner, truth, kind = _prepare(name, case)
        assert find_fault(runner.answer(), truth, kind) is None, case
        runner.call()
        runner.call()
        assert find_fault(runner.answer(), truth, kind) is None, case


def test_the_reference_is_what_torch_finds_in_float64_sequence_by_sequence() -> None:
    batch = Batch.of(_case("lstm")).to(torch.float64)
    layer = torch.nn.LSTM(4, 6, dtype=torch.float64)
    layer.load_state_dict(batch.weights)
    outputs, cells = [], []
    for sequence in batch.values.split(batch.lengths.tolist()):
        output, (_, c) = layer(sequence)
        outputs.append(output)
        cells.append(c[0])
    torch.cat(outputs).backward(batch.gradient)
    truth = ours.reference(Batch.of(_case("lstm")), "train")
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    # The batch of the case is in float32, which float64 holds.
    torch.testing.assert_close(truth.output, torch.cat(outputs).detach(), rtol=1e-12, atol=1e-12)
    assert truth.state is not None
    torch.testing.assert_close(truth.state[1], torch.stack(cells).detach(), rtol=1e-12, atol=1e-12)
    for name, gradient in gradients.items():
        torch.testing.assert_close(truth.gradients[name], gradient, rtol=1e-12, atol=1e-12)
    assert truth.gradients["input"].shape == (25, 4)


def test_torchs_padded_states_are_compared_only_where_nothing_is_padded() -> None:
    ragged, _, _ = _prepare("torch-padded", _case())
    equal, _, _ = _prepare("torch-padded", _case(lengths=LENGTHS["tens"]))
    assert ragged.answer().state is None
    assert equal.answer().state is not None


def _wrong_answers() -> Iterator[tuple[str, Callable[[Answer], Answer]]]:
    def at(tensor: torch.Tensor, value: float) -> torch.Tensor:
        changed = tensor.clone()
        changed.view(-1)[-1] = value
        return changed

    yield "wrong output", lambda answer: replace(answer, output=at(answer.output, 9.0))
    yield "wrong output: off by nan", lambda answer: replace(answer, output=at(answer.output, math.nan))
    yield "wrong output: shape", lambda answer: replace(answer, output=answer.output[:-1])
    yield (
        "wrong final state c",
        lambda answer: replace(answer, state=((answer.state or ())[0], at((answer.state or ())[1], 7.0))),
    )
    yield "wrong: no final state c", lambda answer: replace(answer, state=(answer.state or ())[:1])
    for name in ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0", "input"):

        def change(answer: Answer, name: str = name) -> Answer:
            return replace(answer, gradients={**answer.gradients, name: answer.gradients[name] * 1.01})

        def drop(answer: Answer, name: str = name) -> Answer:
            return replace(answer, gradients={key: one for key, one in answer.gradients.items() if key != name})

        yield f"wrong gradient of {name}: off by", change
        yield f"wrong: no gradient of {name}", drop


@pytest.mark.parametrize(("fault", "change"), list(_wrong_answers()))
def test_the_check_finds_each_part_that_is_wrong(fault: str, change: Callable[[Answer], Answer]) -> None:
    truth = ours.reference(Batch.of(_case("lstm")), "train")
    assert find_fault(truth, truth, torch.float32) is None
    found = find_fault(change(truth), truth, torch.float32)
    assert found is not None
    assert found.startswith(fault)


# -- the clock --------------------------------------------------------------------------------------------------------


class _Clock:
    """A clock that calls move on by as many seconds as they take."""

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
    samples = interleave({"short": clock.call("short", 0.001), "slow": clock.call("slow", 2.0)}, 3, clock=clock)
    assert samples["short"] == pytest.approx([0.001] * 3)
    # To estimate it; then in each round 15 ms to get warm, one call more where they round up, and a sample of 10 ms.
    assert 3 + 3 * (15 + 10) <= clock.calls.count("short") <= 3 + 3 * (16 + 10)
    assert clock.calls.count("slow") == 1 + 3


def test_rounds_end_when_time_is_up_but_not_before_the_third() -> None:
    clock = _Clock()
    assert len(interleave({"a": clock.call("a", 1.0)}, 50, most_seconds=10.0, clock=clock)["a"]) == 11
    assert len(interleave({"a": clock.call("a", 60.0)}, 50, most_seconds=10.0, clock=clock)["a"]) == 3
    assert gc.isenabled()


def test_a_yardstick_does_the_work_that_it_is_said_to() -> None:
    result = {name: yardstick.prepare(torch.float32)() for name, yardstick in YARDSTICKS.items()}
    product, copy = result["gemm"], result["copy"]
    assert isinstance(product, torch.Tensor)
    assert isinstance(copy, torch.Tensor)
    assert YARDSTICKS["gemm"].rate(1.0) == 2 * 256 * product.numel()
    assert YARDSTICKS["copy"].rate(1.0) == 2 * 4 * copy.numel()


def test_the_peak_counts_the_operations_of_all_threads() -> None:
    single, double = timing.peak(torch.float32), timing.peak(torch.float64)
    assert single is not None
    assert double is not None
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = single()
        assert 2 * double() == alone  # a vector has half as many numbers
        torch.set_num_threads(3)
        assert single() == 3 * alone
    finally:
        torch.set_num_threads(threads)


# -- results ----------------------------------------------------------------------------------------------------------


def test_ratios_are_those_of_each_round() -> None:
    samples = {"ours": [1.0, 2.0, 4.0], "torch-packed": [3.0, 4.0, 4.0], "torch-padded": [9.0, 9.0, 2.0]}
    rows = {row.competitor: row for row in rows_of(samples, dict.fromkeys(samples, 100), rate=5.0)}
    assert rows["ours"].milliseconds == 2000.0
    # torch-packed is the faster of the two by its median: 3/1, 4/2, 4/4.
    assert rows["ours"].ratio == 2.0
    assert rows["torch-packed"].ratio == 1.0
    assert rows["torch-padded"].ratio == pytest.approx(4 / 9)
    assert rows["torch-padded"].of_ours == pytest.approx(2 / 9)
    assert rows["ours"].share == pytest.approx(100 / 2.0 / 5.0)


def _result(case: Case, ratio: float | None, *others: Row, milliseconds: float = 1.0) -> CaseResult:
    mine = Row("ours", fault="wrong") if ratio is None else Row("ours", milliseconds, ratio, 1.0, 0.5)
    return CaseResult(case, 25, 7, 0.5, (mine, *others), rate=1e9, rounds=3, load=0.5)


def test_who_is_ahead_of_ours() -> None:
    slow, fast = Row("torch-packed", 2.0, 1.0, 0.5), Row("jax", 0.5, 4.0, 2.0)
    variant = Row("ours-kernel", 0.1, 20.0, 10.0)
    assert _result(_case(), 2.0, slow, variant).ahead is None
    assert _result(_case(), 2.0, slow, fast, Row("onnxruntime", fault="wrong")).ahead == "jax"
    assert _result(_case(), None, slow).ahead is None
    packed = Row("torch-packed", memory=6.0, of_ours=7 / 6)
    held = CaseResult(_case(suite="memory"), 1, 1, 1.0, (Row("ours", memory=7.0, of_ours=1.0), packed))
    assert held.ahead == "torch-packed"


def test_means_and_worst_cases() -> None:
    wide = _case("lstm", size=Size(7, 256, 4))
    slower = Row("torch-packed", 0.5, 1.0, 2.0)
    results = [_result(_case(), 2.0), _result(_case("lstm"), 8.0), _result(wide, 0.5, slower)]
    results += [_result(_case("lstm", dtype="bfloat16"), None), _result(_case(suite="memory"), 3.0)]
    found = {(one.dtype, one.group): one for one in summarize(results)}
    assert set(found) == {
        ("float32", "gru"),
        ("float32", "lstm"),
        ("float32", "all"),
        ("float32", "all, H <= 128"),
        ("bfloat16", "lstm"),
    }
    everything = found["float32", "all"]
    assert (everything.count, everything.behind, everything.worst_case) == (3, 1, wide.name)
    assert everything.mean == pytest.approx(2.0)
    assert everything.worst == 0.5
    assert found["float32", "all, H <= 128"].mean == pytest.approx(4.0)
    assert (found["bfloat16", "lstm"].count, found["bfloat16", "lstm"].missing) == (0, 1)


def test_how_ours_scales() -> None:
    results = [_result(_case(threads=count), 2.0, milliseconds=time) for count, time in ((2, 10.0), (8, 5.0))]
    results.append(_result(_case(mode="infer"), 2.0))
    (found,) = efficiencies(results)
    assert found.shares == {2: 1.0, 8: 0.5}


# -- a run ------------------------------------------------------------------------------------------------------------


@_SHORT
def test_a_case_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "load", lambda: 1e9)
    rivals = [name for name in TORCH if COMPETITORS[name].runs(_case())]
    result = run.measure_case(_case(), rivals, rounds=2)
    assert [row.competitor for row in result.rows] == ["ours", *rivals]
    assert all(row.milliseconds and row.ratio and row.share and not row.fault for row in result.rows)
    assert (result.rounds, result.elements, result.is_busy) == (2, 25, True)
    assert result.rate is not None
    assert min(row.milliseconds or 0.0 for row in result.rows) > 0


def _fail_if_timed() -> None:
    raise AssertionError("a competitor that is wrong was timed")


def _wrong(batch: Batch, mode: str, threads: int) -> Runner:
    truth = ours.reference(batch, mode)
    return Runner(_fail_if_timed, lambda: replace(truth, output=truth.output + 0.01))


def _broken(batch: Batch, mode: str, threads: int) -> Runner:
    raise RuntimeError("no such\noperator")


@_SHORT
@pytest.mark.parametrize(
    ("prepare", "fault"), [(_wrong, "wrong output: off by"), (_broken, "failed: RuntimeError: no such operator")]
)
@pytest.mark.parametrize("name", ["torch-packed", "ours"])
def test_who_is_wrong_or_fails_is_named_and_not_timed(
    monkeypatch: pytest.MonkeyPatch, name: str, prepare: Callable[[Batch, str, int], Runner], fault: str
) -> None:
    monkeypatch.setitem(COMPETITORS, name, Competitor(name, "a test", prepare, COMPETITORS[name].family))
    report = run.measure([_case()], TORCH, rounds=1)
    rows = {row.competitor: row for row in report.results[0].rows}
    assert rows[name].fault.startswith(fault)
    assert rows[name].milliseconds is None
    assert all(row.milliseconds is not None for other, row in rows.items() if other != name)
    assert len(report.faults) == (1 if name == "ours" else 0)


@_SHORT
def test_who_is_slow_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_SLOW_SECONDS", 0.0)
    result = run.measure_case(_case(), TORCH, rounds=3)
    assert all(row.is_once and row.milliseconds is not None for row in result.rows)


@_SHORT
def test_variants_run_where_their_suite_asks_for_them() -> None:
    result = run.measure_case(_case(suite="grid", dtype="bfloat16"), [], rounds=1)
    assert [row.competitor for row in result.rows] == ["ours", "ours-float32"]
    result = run.measure_case(_case(suite="drop-in"), ["torch-packed"], rounds=1)
    assert [row.competitor for row in result.rows] == ["ours", "ours-packed", "ours-padded", "torch-packed"]
    assert all(row.of_ours is not None for row in result.rows)


@_SHORT
def test_inference_is_checked_with_what_training_found(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    reference = ours.reference

    def counted(batch: Batch, mode: str) -> Answer:
        asked.append(mode)
        return reference(batch, mode)

    monkeypatch.setattr(ours, "reference", counted)
    run.measure([_case(), _case(mode="infer"), _case("lstm", "infer")], [], rounds=1)
    assert asked == ["train", "infer"]


@_SHORT
def test_a_run_leaves_threads_as_they_were_and_says_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMPETITORS, "jax", replace(COMPETITORS["jax"], modules=("no_such_module",)))
    seen: list[int] = []
    report = run.measure(
        [_case(threads=2)], ["jax", "torch-packed"], rounds=1, watch=lambda _: seen.append(torch.get_num_threads())
    )
    assert (seen, torch.get_num_threads()) == ([2], 1)
    assert report.competitors == ("torch-packed",)
    assert "jax takes no part: no_such_module not installed" in report.notes[0]
    assert any(note.startswith("ours in float32: backend") for note in report.notes)


def test_facts_name_what_a_time_depends_on() -> None:
    found = machine.facts(["numpy", "no-such-package"])
    assert found["torch"].startswith(torch.__version__.split("+")[0])
    assert found["no-such-package"] == "not installed as a package"
    assert all(found.values())


# -- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not memory.is_measurable(), reason="needs Linux")
def test_memory_is_measured_in_a_process_of_its_own() -> None:
    case = _case("lstm", suite="memory", lengths=LENGTHS["equal"], size=Size(256, 64, 64))
    result = run.measure_case(case, ["torch-packed"], rounds=1)
    rows = {row.competitor: row for row in result.rows}
    assert set(rows) == {"ours", "torch-packed"}
    for row in rows.values():
        # Outputs and the gradients of input and output are alive at one time, and no step holds thousands.
        assert row.memory is not None, row.fault
        assert 2 < row.memory < 2000
    assert result.rate is None


def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(RaglaneError, match="KeyError"):
        memory.peak_floats(_case(suite="memory", lengths=LENGTHS["equal"]), "nobody")
