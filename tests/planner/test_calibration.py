"""Measurements of a layer, the coefficients that they give, and files of lengths."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from own_cells import Leaky
from planner.made_up import costs, held, ignore_progress, make_up, seen
from raglane.errors import DataError
from raglane.kernels.dispatch import override
from raglane.planner import calibration, predicted, probe
from raglane.planner.calibration import Calibration, calibrate
from raglane.planner.model import LayerWay, Profile, at, ways_of
from raglane.planner.probe import MODES, PROBES, draw, lengths_of_file, peak_bytes

FAST, SLOW = LayerWay("torch", "padded", "float32", 1), LayerWay("reference", "each", "float32", 1)


def test_predictions_are_what_the_machine_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rl.nn.LSTM(3, 4)
    ways = [
        way
        for way in ways_of(layer, [torch.float32], [1, 2])
        if way.threads == 2 or way.backend == "cpu"
    ]
    measured, shares = make_up(monkeypatch), list[float]()
    monkeypatch.setattr(probe.Yardstick, "look", lambda _: 0.5e-3 / torch.get_num_threads())
    found = calibrate(layer, ways, shares.append)
    assert found.yardstick == 0.25e-3
    lengths = torch.tensor([30, 2, 2, 17, *range(40)])
    for way in ways:
        profile = Profile.of(way, lengths)
        for mode in MODES:
            wanted = seen(way, lengths) @ costs(way, mode)
            # The reference is measured only on the smallest batches.
            near = 0.3 if way.backend == "reference" else 0.05
            assert found.features(way, profile) @ found.seconds[way, mode] == pytest.approx(
                wanted, rel=near
            )
            taken = [
                seen(way, call.lengths) @ costs(way, mode)
                for call in measured
                if call[:2] == (way, mode)
            ]
            assert found.longest[way, mode] == pytest.approx(max(taken))
        assert found.bytes_of(way, profile) == pytest.approx(held(profile), rel=0.02)
    assert shares == sorted(shares)
    assert shares[-1] == 1


@pytest.mark.parametrize("factor", [3, 1 / 3])
@pytest.mark.parametrize("disturbed", [0, 1, 2])
def test_the_median_of_three_times_counts(
    monkeypatch: pytest.MonkeyPatch, disturbed: int, factor: float
) -> None:
    make_up(monkeypatch)
    undisturbed = probe.time_in_turns
    known: Counter[Any] = Counter()

    def time_in_turns(calls: Any, *how: Any) -> list[float]:
        keys = [(call.mode, tuple(call.lengths.tolist())) for call in calls]
        times = [
            s * (factor if known[key] == disturbed else 1)
            for key, s in zip(keys, undisturbed(calls, *how), strict=False)
        ]
        known.update(keys[: len(times)])
        return times

    monkeypatch.setattr(probe, "time_in_turns", time_in_turns)
    found = calibrate(rl.nn.GRU(3, 4), [FAST], ignore_progress)
    one = seen(FAST, torch.tensor(PROBES[1][2]))
    assert one @ found.seconds[FAST, "train"] == pytest.approx(one @ costs(FAST, "train"), rel=0.1)


def test_an_interval_contains_nine_of_ten_calls_of_a_noisy_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The noise of the timings decides the width; it is lognormal, and the intervals are checked on
    other batches.
    """
    rng, inside, widths = np.random.default_rng(0), [], []
    for noise in (0.02, 0.2):
        with monkeypatch.context() as patch:
            make_up(patch)
            exact = probe.time_in_turns
            patch.setattr(
                probe,
                "time_in_turns",
                lambda *how, s=noise, f=exact: [t * rng.lognormal(0, s) for t in f(*how)],
            )
            for _ in range(6):
                found = calibrate(rl.nn.GRU(3, 4), [FAST], ignore_progress)
                for lengths in map(
                    torch.tensor, ([40, 3, 8] * 9, [7] * 30, [90, 80, *range(1, 30)], [30] * 200)
                ):
                    features = seen(FAST, lengths)
                    low, high = predicted._range(found.spread[FAST, "train"] @ features)
                    taken = features @ costs(FAST, "train") * rng.lognormal(0, noise, 50)
                    inside.append(np.mean((low <= taken) & (taken <= high)))
                    widths.append(high / low)
    assert 0.87 < np.mean(inside) < 0.99
    # Nine of ten lognormal numbers differ by a factor of exp(2 * 1.645 * noise): 1.07 and 1.9.
    assert np.median(widths[:24]) < 1.2 < 1.7 < np.median(widths[24:]) < 3


def test_a_machine_that_slows_down_is_told_by_the_yardstick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_up(monkeypatch)
    steady, measure, speeds, now = (
        probe.time_in_turns,
        calibration._measure,
        iter([1.0, 1.0, 1.7] * 1000),
        [1.0],
    )

    def slowing(*args: Any) -> list[float]:
        # The speed is the same from before a group to after it.
        now[0] = next(speeds)
        return measure(*args)

    monkeypatch.setattr(probe.Yardstick, "look", lambda _: 0.5e-3 * now[0])
    monkeypatch.setattr(
        probe, "time_in_turns", lambda *args: [now[0] * seconds for seconds in steady(*args)]
    )
    monkeypatch.setattr(calibration, "_measure", slowing)
    found = calibrate(rl.nn.GRU(3, 4), [FAST], ignore_progress)
    lengths = torch.tensor(PROBES[2][1])
    taken = found.features(FAST, Profile.of(FAST, lengths)) @ found.seconds[FAST, "train"]
    assert taken == pytest.approx(seen(FAST, lengths) @ costs(FAST, "train"), rel=0.02)
    assert found.yardstick == pytest.approx(0.5e-3)


def test_slow_measurements_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = make_up(monkeypatch, lambda way, mode: costs(way, mode) * 20)
    calibrate(rl.nn.GRU(3, 4), [SLOW, FAST], ignore_progress)
    largest = max(int(call.lengths.sum()) for call in measured if call.way == SLOW)
    assert largest < 1000 < max(int(call.lengths.sum()) for call in measured if call.way == FAST)
    # The smallest are all measured; after one that took too long, nothing larger is tried.
    long = {
        tuple(call.lengths.tolist())
        for call in measured
        if call.way == SLOW and call.mode == "train"
    }
    assert {tuple(lengths) for lengths in PROBES[0]} <= long
    assert len(long) < len(PROBES[0]) + len(PROBES[1])
    layer = rl.nn.GRU(3, 4)
    ways = ways_of(layer, [torch.float32], [1])
    make_up(monkeypatch, lambda way, mode: costs(way, mode) * 1e4)
    found = calibrate(layer, ways, ignore_progress)
    for way in ways:
        for lengths in ([2, 3, 1], [4, 4]):
            seconds = (
                found.features(way, Profile.of(way, torch.tensor(lengths)))
                @ found.seconds[way, "train"]
            )
            assert seconds > 0, (way, lengths)


def test_candidates_are_measured_on_longer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    near, idle, far = (
        LayerWay("cpu", "lanes", "float32", 2),
        LayerWay("cpu", "lanes", "float32", 1),
        FAST,
    )
    # With one thread fewer, a backend that can win is measured longer; an equally slow backend is
    # not.
    speed = {near: 1.0, idle: 3.0, far: 3.0, SLOW: 0.1}
    as_cpu = 10 * costs(near, "train")
    sizes = {way: seen(way, torch.tensor([3])).size for way in speed}
    measured = make_up(monkeypatch, lambda way, _: np.resize(as_cpu, sizes[way]) * speed[way])
    calibrate(rl.nn.GRU(3, 4), [near, idle, far, SLOW], ignore_progress)
    counts = Counter(
        call.way for call in measured if tuple(call.lengths.tolist()) == tuple(PROBES[0][2])
    )
    # Three times for training and for inference. If there are others, the reference is measured
    # once, however fast.
    assert counts == {near: 6, idle: 6, far: 6, SLOW: 2}
    longest = {
        way: max(int(call.lengths.sum()) for call in measured if call.way == way)
        for way in (near, idle, far)
    }
    # A call of 20,000 elements takes longer than a brief look.
    assert longest[near] > longest[idle] > 20_000 > longest[far]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["flat", "packed", "padded"])
def test_calls_take_turns_on_copies(monkeypatch: pytest.MonkeyPatch, kind: str, mode: str) -> None:
    layer, batch = rl.nn.LSTM(3, 4), probe.make_batch(rl.nn.LSTM(3, 4), [2, 2])
    given: Any = {"flat": batch, "packed": batch.to_packed(), "padded": batch.to_padded()[0]}[kind]
    read: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda _, given: read.append(probe._values_of(given[0])))
    for caches, copies in ((1e6, 3), (50, 2), (0, 1)):
        monkeypatch.setattr(probe, "_CACHES", caches)
        read.clear()
        step = probe.step_of(layer, given, mode, 3)
        for _ in range(6):
            step()
        addresses = [values.data_ptr() for values in read]
        assert len(set(addresses)) == copies
        assert addresses == addresses[:copies] * (6 // copies)
        assert all(torch.equal(values, read[0]) for values in read)
        assert all(values.grad is None for values in read)


def test_a_step_makes_all_gradients_or_none_and_leaves_no_trace() -> None:
    layer, seen = rl.nn.LSTM(3, 4), set()
    for name, weight in layer.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: seen.add(name))
    before = {name: weight.clone() for name, weight in layer.state_dict().items()}
    batch = probe.make_batch(layer, [3, 1, 2])
    assert not probe.step_of(layer, batch, "infer")()[0].values.requires_grad  # type: ignore[index]
    assert probe.time_in_turns([probe.step_of(layer, batch, "train")], torch.device("cpu"))[0] > 0
    assert seen == {name for name, _ in layer.named_parameters()}
    assert all(weight.grad is None for weight in layer.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in layer.state_dict().items())


def test_peak_is_what_is_held_at_once(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def call() -> None:
        first = torch.ones(1 << 20)
        del first
        second = torch.ones(2 << 20)
        third = second * 2
        del second, third

    monkeypatch.delenv("KINETO_LOG_LEVEL", raising=False)
    assert 16 <= peak_bytes(call, torch.device("cpu")) / (1 << 20) < 17
    assert "KINETO_LOG_LEVEL" not in os.environ
    assert capfd.readouterr() == ("", "")
    # A profiler may list the events of each thread separately.
    happened = [(2, 1), (4, 7), (1, 5), (3, -5), (5, -8)]
    events = [
        SimpleNamespace(name=lambda: "[memory]", start_ns=lambda t=t: t, nbytes=lambda n=n: n)
        for t, n in happened
    ]
    record = SimpleNamespace(
        profiler=SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    )
    monkeypatch.setattr(probe, "profile", lambda **_: nullcontext(record))
    # Held after each moment: 5, 6, 1, 8 and 0.
    assert peak_bytes(lambda: None, torch.device("cpu")) == 8


def test_a_time_is_the_median_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two calls take turns; the first round warms up, and other programs disturb some of the
    others.
    """
    taken = iter([9.0, 9.0, 0.01, 0.02, 0.5, 0.02, 0.01, 0.8, 0.01, 0.02, 0.01, 0.02])
    monkeypatch.setattr(probe, "_clock", lambda *_: next(taken))
    monkeypatch.setattr(probe, "_SECONDS", 100.0)
    assert probe.time_in_turns([lambda: None] * 2, torch.device("cpu"), 5) == [0.01, 0.02]
    # The first round ends when its time is over.
    monkeypatch.setattr(probe, "_clock", lambda *_: 0.02)
    assert len(probe.time_in_turns([lambda: None] * 5, torch.device("cpu"), 1, 0.03)) == 2
    stick = probe.Yardstick(rl.nn.GRU(3, 4), FAST)
    taken = iter([1.0, 1.0, 8.0, 1.0, 1.0, 9.0, 9.0])
    monkeypatch.setattr(probe, "_clock", lambda *_: next(taken))
    assert stick.look() == 1.0


def test_the_yardstick_is_one_step_whatever_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str | None, str | None]] = []
    sizes: list[list[int]] = []

    def step_of(_: object, batch: rl.Ragged, mode: str) -> Any:
        sizes.append(batch.lengths_cpu.tolist())
        assert mode == "train"
        return lambda: ran.append(override())

    monkeypatch.setattr(probe, "step_of", step_of)
    for layer in (rl.nn.GRU(3, 4), rl.nn.GRU(3, 4), rl.nn.GRU(64, 1024)):
        stick = probe.Yardstick(layer, FAST)
        ran.clear()
        with at(SLOW):
            stick.look()
        assert set(ran) == {("padded", "torch")}
        assert len(ran) >= 5
    # Equal layers have equal yardsticks, and large layers smaller batches.
    assert sizes[0] == sizes[1]
    assert len(sizes[2]) == 4 < len(sizes[0])


def test_a_file_of_lengths(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_text("9\n\n 1 \n4\n")
    assert lengths_of_file(path) == [9, 1, 4]
    assert draw([9, 1, 4], 3) == [9, 1, 4]
    many = draw([9, 1, 4], 300)
    assert set(many) == {1, 4, 9}
    assert draw([9, 1, 4], 300) == many


@pytest.mark.parametrize(
    ("content", "piece"),
    [
        ("\n\n", "no length"),
        ("3\n0\n", "'0' in line 2"),
        ("１\n", "in line 1"),
        ("9" * 5000, "in line 1"),
        (b"\xff\xfe\x00", "cannot be read"),
    ],
)
def test_a_file_that_is_no_list_of_lengths_is_refused(
    tmp_path: Path, content: str | bytes, piece: str
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=piece):
        lengths_of_file(path)


WAYS = [LayerWay("cpu", "lanes", "float32", 2), LayerWay("torch", "packed", "float32", 1)]
FOUND = Calibration(
    {(way, mode): np.array([0.1, 2.5e-7, float(len(mode))]) for way in WAYS for mode in MODES},
    {(way, mode): np.arange(6.0).reshape(2, 3) / len(mode) for way in WAYS for mode in MODES},
    {way: np.array([1.0, 64.0, 8.0]) for way in WAYS},
    {(way, mode): 0.25 * len(mode) for way in WAYS for mode in MODES},
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    return tmp_path / "plans"


def test_saved_values_come_back(folder: Path) -> None:
    assert calibration.load("key", WAYS) is None
    calibration.save("key", FOUND)
    assert calibration.load("key", [*WAYS, LayerWay("cpu", "lanes", "float32", 4)]) is None
    np.testing.assert_equal(calibration.load("key", WAYS), FOUND)
    assert [file.name for file in folder.iterdir()] == ["key.json"]


def test_a_broken_file_or_one_without_finite_numbers_is_measured_again(folder: Path) -> None:
    calibration.save("key", FOUND)
    content = (folder / "key.json").read_text()
    broken = ["", "{", "[]", "{}", '{"seconds": 3, "memory": {}}', "\x00", "[" * 100_000]
    for before in ("64.0", "1.25", '1.0, "memory"'):  # of memory, the longest call, the yardstick
        assert before in content
        rest = before.lstrip("0123456789.")
        broken += [
            content.replace(before, number + rest) for number in ("NaN", "Infinity", '"x"', "null")
        ]
    for text in broken:
        (folder / "key.json").write_text(text)
        assert calibration.load("key", WAYS) is None, text


def test_a_key_tells_layers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [
        rl.nn.LSTM(3, 4),
        rl.nn.LSTM(3, 5),
        rl.nn.LSTM(3, 4, bidirectional=True),
        rl.nn.LSTM(3, 4, num_layers=2),
        rl.nn.LSTM(3, 4, dropout=0.0).eval(),
        rl.nn.LSTM(3, 4, zoneout=0.1),
        rl.nn.LSTM(3, 4).double(),
        rl.nn.GRU(3, 4),
        rl.nn.Recurrent(Leaky, 3, 4),
    ]
    keys = [calibration.key_of(layer, WAYS) for layer in layers]
    assert len(set(keys)) == len(keys)
    assert calibration.key_of(rl.nn.LSTM(3, 4), WAYS) == keys[0]
    assert calibration.key_of(rl.nn.LSTM(3, 4), WAYS[:1]) != keys[0]
    known: dict[str, Any] = {
        "facts": lambda _: {},
        "location": lambda: Path(__file__),
        "PROBES": (),
        "_FORMAT": 0,
    }
    for name, value in (known | {"RAGLANE_ISA": "portable", "RAGLANE_THREADS": "1"}).items():
        with monkeypatch.context() as patch:
            patch.setenv(name, str(value))
            patch.setattr(calibration, name, value, raising=False)
            assert calibration.key_of(rl.nn.LSTM(3, 4), WAYS) != keys[0], name
    monkeypatch.setattr("inspect.getsource", lambda _: "class Leaky: another")
    assert calibration.key_of(layers[-1], WAYS) != keys[-1]
