from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from itertools import count, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from planner.made_up import costs, held, make_up, say_nothing, seen
from raglane.kernels.dispatch import override
from raglane.planner import calibration, probe
from raglane.planner.calibration import calibrate
from raglane.planner.model import Profile, Way, at, ways_of
from raglane.planner.probe import MODES, PROBES, peak_bytes

FAST, SLOW = Way("torch", "padded", "float32", 1), Way("reference", "each", "float32", 1)


def test_predictions_are_what_the_machine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rl.nn.LSTM(3, 4)
    ways = ways_of(layer, [torch.float32], [1, 2])
    make_up(monkeypatch)
    shares: list[float] = []
    found = calibrate(layer, ways, shares.append)
    lengths = torch.tensor([30, 2, 2, 17, *range(40)])
    for way in ways:
        profile = Profile.of(way, lengths)
        for mode in MODES:
            wanted = seen(way, lengths) @ costs(way, mode)
            # The reference, of which nobody expects speed, is measured on the smallest batches.
            near = 0.3 if way.backend == "reference" else 0.05
            assert found.features(way, profile) @ found.seconds[way, mode] == pytest.approx(wanted, rel=near)
        assert found.bytes_of(way, profile) == pytest.approx(held(profile), rel=0.02)
    assert shares == sorted(shares)
    assert shares[-1] == 1


def test_a_look_that_something_else_made_longer_makes_no_call_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    looks = count()
    monkeypatch.setattr(probe.Yardstick, "look", lambda _: 20.0 if next(looks) % 3 == 1 else 1.0)
    found = calibrate(rl.nn.GRU(3, 4), [FAST], say_nothing)
    for lengths in PROBES[1]:
        one = seen(FAST, torch.tensor(lengths))
        assert one @ found.seconds[FAST, "train"] == pytest.approx(one @ costs(FAST, "train"), rel=0.05)


def test_the_shortest_of_two_times_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    undisturbed = probe.time_in_turns
    known: set[Any] = set()

    def time_in_turns(calls: Any, *how: Any) -> list[float]:
        keys = [(call.mode, tuple(call.lengths.tolist())) for call in calls]
        times = dict(zip(keys, undisturbed(calls, *how), strict=False))
        disturbed = [seconds * (1 if key in known else 3) for key, seconds in times.items()]
        known.update(times)
        return disturbed

    monkeypatch.setattr(probe, "time_in_turns", time_in_turns)
    found = calibrate(rl.nn.GRU(3, 4), [FAST], say_nothing)
    one = seen(FAST, torch.tensor(PROBES[1][2]))
    assert one @ found.seconds[FAST, "train"] == pytest.approx(one @ costs(FAST, "train"), rel=0.05)


def test_batches_of_like_size_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    timed, groups = probe.time_in_turns, []

    def time_in_turns(calls: Any, *how: Any) -> list[float]:
        groups.append([Profile.of(call.way, call.lengths).computed for call in calls])
        return timed(calls, *how)

    monkeypatch.setattr(probe, "time_in_turns", time_in_turns)
    calibrate(rl.nn.GRU(3, 4), [FAST], say_nothing)
    # After the smallest, which hold next to nothing: padding makes some batches of each size far larger than others.
    one_look = groups[1 : groups.index(groups[0], 1)]
    assert len(one_look) >= 3
    for group, larger in pairwise(one_look):
        assert max(group) <= min(larger)


def test_a_machine_that_slows_down_is_told_by_the_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch)
    steady, speed = probe.time_in_turns, iter([1.0, 1.0, 1.7] * 1000)
    now = [1.0]

    def look(_: object) -> float:
        return 0.5e-3 * now[0]

    def time_in_turns(calls: Any, *how: Any) -> list[float]:
        # Slow from before the group to after it, so that both looks see it.
        return [now[0] * seconds for seconds in steady(calls, *how)]

    measure = calibration._measure

    def slowing(*args: Any) -> list[float]:
        now[0] = next(speed)
        return measure(*args)

    monkeypatch.setattr(probe.Yardstick, "look", look)
    monkeypatch.setattr(probe, "time_in_turns", time_in_turns)
    monkeypatch.setattr(calibration, "_measure", slowing)
    found = calibrate(rl.nn.GRU(3, 4), [FAST], say_nothing)
    lengths = torch.tensor(PROBES[2][1])
    wanted = seen(FAST, lengths) @ costs(FAST, "train")
    assert found.features(FAST, Profile.of(FAST, lengths)) @ found.seconds[FAST, "train"] == pytest.approx(
        wanted, rel=0.02
    )
    assert found.yardstick == pytest.approx(0.5e-3)


def test_what_takes_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = make_up(monkeypatch, lambda way, mode: costs(way, mode) * 20)
    calibrate(rl.nn.GRU(3, 4), [SLOW, FAST], say_nothing)
    largest = max(int(call.lengths.sum()) for call in measured if call.way == SLOW)
    assert largest < 1000 < max(int(call.lengths.sum()) for call in measured if call.way == FAST)
    # The smallest are all measured; where one after them had to be left out, nothing larger is tried.
    long = {tuple(call.lengths.tolist()) for call in measured if call.way == SLOW and call.mode == "train"}
    assert {tuple(lengths) for lengths in PROBES[0]} <= long
    assert len(long) < len(PROBES[0]) + len(PROBES[1])


def test_no_way_costs_nothing_on_a_machine_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rl.nn.GRU(3, 4)
    ways = ways_of(layer, [torch.float32], [1])
    make_up(monkeypatch, lambda way, mode: costs(way, mode) * 1e4)
    found = calibrate(layer, ways, say_nothing)
    for way in ways:
        for lengths in ([2, 3, 1], [4, 4]):
            seconds = found.features(way, Profile.of(way, torch.tensor(lengths))) @ found.seconds[way, "train"]
            assert seconds > 0, (way, lengths)


def test_what_can_win_is_measured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    near, idle, far = (Way("cpu", "lanes", "float32", 2), Way("cpu", "lanes", "float32", 1), FAST)
    # A thread fewer takes long, and is looked at again with its kind; another backend that takes as long is not.
    speed = {near: 1.0, idle: 3.0, far: 3.0, SLOW: 0.1}
    as_cpu = costs(near, "train")
    sizes = {way: seen(way, torch.tensor([3])).size for way in speed}
    measured = make_up(monkeypatch, lambda way, _: np.resize(as_cpu, sizes[way]) * speed[way])
    calibrate(rl.nn.GRU(3, 4), [near, idle, far, SLOW], say_nothing)
    first = tuple(PROBES[0][2])
    counts = Counter(call.way for call in measured if tuple(call.lengths.tolist()) == first)
    # Each look is at training and at inference. However fast the reference is, once is enough beside others.
    assert counts == {near: 4, idle: 4, far: 2, SLOW: 2}


def test_the_reference_alone_is_measured_as_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = make_up(monkeypatch, lambda way, mode: costs(way, mode) / 1000)
    calibrate(rl.nn.GRU(3, 4), [SLOW], say_nothing)
    counts = Counter(tuple(call.lengths.tolist()) for call in measured)
    assert {counts[tuple(lengths)] for group in PROBES for lengths in group} == {4}


def test_the_first_round_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_clock", lambda *_: 0.02)
    calls = [lambda: None] * 5
    assert len(probe.time_in_turns(calls, torch.device("cpu"), 1, 0.03)) == 2
    assert len(probe.time_in_turns(calls[:2], torch.device("cpu"), 1)) == 2


def test_measuring_leaves_no_trace() -> None:
    layer = rl.nn.GRU(3, 4)
    before = {name: weight.clone() for name, weight in layer.state_dict().items()}
    threads = torch.get_num_threads()
    call = probe.step_of(layer, probe.make_batch(layer, [3, 1, 2]), "train")
    assert probe.time_in_turns([call], torch.device("cpu"))[0] > 0
    assert all(weight.grad is None for weight in layer.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in layer.state_dict().items())
    assert torch.get_num_threads() == threads


def test_a_step_of_training_makes_every_gradient() -> None:
    layer, seen = rl.nn.LSTM(3, 4), set()
    for name, weight in layer.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: seen.add(name))
    probe.step_of(layer, probe.make_batch(layer, [3, 1]), "train")()
    assert seen == {name for name, _ in layer.named_parameters()}


def test_inference_needs_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rl.nn.LSTM(3, 4)
    assert not probe.step_of(layer, probe.make_batch(layer, [3, 1]), "infer")()[0].values.requires_grad  # type: ignore[index]


def test_peak_is_what_is_held_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    def call() -> None:
        first = torch.ones(1 << 20)
        del first
        second = torch.ones(2 << 20)
        third = second * 2
        del second, third

    mebibyte = 1 << 20
    assert 16 * mebibyte <= peak_bytes(call, torch.device("cpu")) < 17 * mebibyte
    assert capfd.readouterr() == ("", "")


def test_a_peak_does_not_depend_on_the_order_of_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler may list what threads did one after the other: it is put in the order of time."""
    happened = [(2, 1), (4, 7), (1, 5), (3, -5), (5, -8)]
    events = [
        SimpleNamespace(name=lambda: "[memory]", start_ns=lambda t=t: t, nbytes=lambda n=n: n) for t, n in happened
    ]
    record = SimpleNamespace(profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events)))
    monkeypatch.setattr(probe, "profile", lambda **_: nullcontext(record))
    # Held after each moment: 5, 6, 1, 8 and 0.
    assert peak_bytes(lambda: None, torch.device("cpu")) == 8


def test_a_time_is_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two calls in turns, after a round to get warm; something else ran during some of the rounds."""
    taken = iter([9.0, 9.0, 0.01, 0.02, 0.5, 0.02, 0.01, 0.8, 0.01, 0.02, 0.01, 0.02])
    monkeypatch.setattr(probe, "_clock", lambda *_: next(taken))
    monkeypatch.setattr(probe, "_SECONDS", 100.0)
    assert probe.time_in_turns([lambda: None] * 2, torch.device("cpu"), 5) == [0.01, 0.02]


def test_a_look_at_the_yardstick_is_a_median(monkeypatch: pytest.MonkeyPatch) -> None:
    stick = probe.Yardstick(rl.nn.GRU(3, 4), FAST)
    taken = iter([1.0, 1.0, 8.0, 1.0, 1.0, 9.0, 9.0])
    monkeypatch.setattr(probe, "_clock", lambda *_: next(taken))
    assert stick.look() == 1.0


def test_no_memory_is_held_for_padding_that_is_not_there() -> None:
    layer = rl.nn.LSTM(16, 16)
    ragged = probe.step_of(layer, probe.make_batch(layer, [100, *[1] * 20]), "train")
    with rl.use_backend(backend="torch", schedule="padded"):
        ragged()
        padded = peak_bytes(ragged, torch.device("cpu"))
    with rl.use_backend(backend="reference", schedule="packed"):
        ragged()
        packed = peak_bytes(ragged, torch.device("cpu"))
    assert packed * 3 < padded


def test_the_yardstick_is_one_step_whatever_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str | None, str | None]] = []
    sizes: list[list[int]] = []

    def step_of(_: object, batch: rl.Ragged, mode: str) -> Any:
        sizes.append(batch.host_lengths.tolist())
        assert mode == "train"
        return lambda: ran.append(override())

    monkeypatch.setattr(probe, "step_of", step_of)
    layers = [rl.nn.GRU(3, 4), rl.nn.GRU(3, 4), rl.nn.GRU(64, 512)]
    for layer in layers:
        stick = probe.Yardstick(layer, FAST)
        ran.clear()
        with at(SLOW):
            stick.look()
        assert set(ran) == {("padded", "torch")}
        assert len(ran) >= 5
    # Two of them have to agree: one is in a benchmark, another in the calibration that it checks.
    assert sizes[0] == sizes[1]
    assert sum(sizes[2]) < sum(sizes[0])
