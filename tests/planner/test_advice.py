from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import raglane as rl
from planner.made_up import ROW, Measured, make_up, seen
from raglane._utils.words import bytes_in_words, seconds_in_words
from raglane.planner import Plan, advice, probe, texts
from raglane.planner.model import Floats, LayerWay
from raglane.planner.predicted import Ratio

LENGTHS = [3, 5, 8, 2, 13, 1, 0, 9] * 33
# For tests of how often is measured, and not of what.
_ONE_WAY: dict[str, Any] = {"threads": [1], "backends": ["cpu"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


@pytest.fixture
def machine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    """Simulate a machine, whose measurements are shared by tests; return those of this test."""
    monkeypatch.setenv("RAGLANE_CACHE", str(folder))
    monkeypatch.setattr(advice, "compare_cells", lambda *_: {"MinGRU": Ratio(0.25, 0.2, 0.3)})
    monkeypatch.setattr(advice, "is_busy", lambda _: False)
    return make_up(monkeypatch)


@pytest.fixture
def measured(
    machine: list[Measured], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[Measured]:
    """Simulate a machine that was not measured before."""
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    return machine


def _plan(
    lengths: object = LENGTHS, layer: torch.nn.Module | None = None, **options: object
) -> Plan:
    options = {
        "threads": [1, 2],
        "backends": ["cpu", "torch"],
        **options,
    }  # the reference has many schedules
    return rl.plan(lengths, layer or rl.nn.LSTM(3, 4), **options)  # type: ignore[arg-type]


def test_rows_are_every_way_with_every_batch(machine: list[Measured]) -> None:
    found = _plan(batch_sizes=[8, 32], backends=None)
    # Lanes of cpu, packed and padded of torch with one thread and two; five schedules of the
    # reference with two.
    assert len(found.rows) == (3 * 2 + 5) * (2 + 2) * 2
    assert {row.batch_size for row in found.rows} == {8, 32, None}
    assert found.rows == tuple(sorted(found.rows, key=lambda row: row.train_seconds))
    for row in found.rows:
        assert row.elements - row.waste == sum(LENGTHS)
        assert (row.waste > 0) == (row.schedule in ("padded", "masked"))
        assert 0 < row.step_p50 <= row.step_p90 <= row.step_max
        assert row.rank_spread == 1
    fastest = min(row.train_seconds for row in found.rows if row.batch_size)
    assert found.best.batch_size is not None
    assert found.best.train_seconds <= 1.03 * fastest


@pytest.mark.usefixtures("measured")
def test_each_number_of_threads_has_its_own_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    make_up(monkeypatch, lambda _way, _mode: 1e-5 * (np.arange(10) == 1))  # steps alone take time
    rows = _plan([5] * 2000, batch_sizes=[1000], backends=["cpu"]).rows
    for threads, rounds in ((1, 21), (2, 11)):
        # 1,000 sequences on 48 lanes or 96, one after the other; two such batches.
        found = next(row for row in rows if (row.threads, row.batch_size) == (threads, 1000))
        assert found.train_seconds == pytest.approx(2 * 5 * rounds * 1e-5, rel=0.05)


def test_predictions_far_beyond_all_measurements_are_marked(machine: list[Measured]) -> None:
    found = _plan([6] * 64, batch_sizes=[16])
    assert not any(row.is_rough for row in found.rows)
    assert "~" not in str(found).replace("~:", "")
    # A pack of about 500,000 elements over 10,000 steps takes a hundred times as long as the
    # longest measured one.
    found = _plan([10_000] * 300 + [7500] * 300, batch_sizes=[64])
    assert all(
        row.is_rough for row in found.rows if (row.backend, row.schedule) == ("torch", "packed")
    )
    assert texts.ROUGH in str(found)
    packed = next(texts.fields(row) for row in found.rows if row.is_rough)
    assert [text.startswith("~") for text in packed] == [False] * 2 + [True] * 3 + [False] * 6


def test_a_sample_stands_for_all(machine: list[Measured]) -> None:
    # 64 of 12,500 batches are evaluated, and about two thirds of the sequences.
    lengths = [1, 3, 5, 7] * 25_000
    row = next(
        row
        for row in _plan(lengths, batch_sizes=[8]).rows
        if row.way == LayerWay("cpu", "lanes", "float32", 1)
    )
    assert row.elements == pytest.approx(400_000, rel=0.01)
    assert row.batches == pytest.approx(12_500, rel=0.3)
    small = next(
        r
        for r in _plan(lengths[:400], batch_sizes=[8]).rows
        if (r.way, r.limit) == (row.way, row.limit)
    )
    assert row.train_seconds == pytest.approx(250 * small.train_seconds, rel=0.05)
    assert small.elements == 1600


@pytest.mark.usefixtures("measured")
def test_the_simpler_of_equally_fast_settings_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(way: LayerWay, mode: str) -> Floats:
        """The time depends only on the number of elements."""
        found = seen(way, torch.tensor([2, 1])) * 0
        places = [5, 14] if (way.backend, way.schedule) == ("torch", "packed") else 5
        found[places] = 1e-5 if way.backend == "cpu" else 1e-3
        return found

    make_up(monkeypatch, flat)
    best = _plan().best
    assert (best.backend, best.threads, best.bucketed, best.batch_size) == ("cpu", 1, False, 8)
    more = replace(ROW, threads=2)
    assert advice._best([replace(ROW, bucketed=True), more], 1e9) is more
    assert (
        advice._best([replace(more, batch_size=4), few := replace(ROW, train_seconds=1.01e-3)], 1e9)
        is few
    )


def test_memory_limits_the_batch(machine: list[Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    free = _plan().best
    assert _plan(max_memory=free.peak_bytes - 1).best.peak_bytes < free.peak_bytes
    with pytest.raises(
        rl.errors.ArgumentError,
        match=r"max_memory must be .* which the smallest of batch_sizes needs, got 1 bytes",
    ):
        _plan(max_memory=1)
    monkeypatch.setattr(advice, "available_memory", lambda: 1e9)
    one, four = (_plan(processes=ranks, threads=[1], backends=["cpu"]) for ranks in (1, 4))
    assert one.most_elements == pytest.approx(4 * four.most_elements, rel=0.01)
    assert one.memory_limit.elements == pytest.approx(four.memory_limit.elements, rel=0.01)
    # 8 batches: one process has at most 32 of the 264 sequences in a batch, each of four has 8.
    assert {row.batch_size for row in one.rows} - {None} == {8, 16, 32}
    assert {row.batch_size for row in four.rows} - {None} == {8}
    monkeypatch.setattr(advice, "processors", lambda: 9)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert advice._threads(None) == [1, 2, 4]


def test_a_limit_by_elements_is_of_sequences_of_mean_length(machine: list[Measured]) -> None:
    rows = _plan([2, 4, 6, 8] * 100, batch_sizes=[8, 32], backends=["cpu"]).rows
    assert {row.batch_elements for row in rows} - {None} == {40, 160}
    assert all((row.batch_size is None) != (row.batch_elements is None) for row in rows)
    assert {row.limit.too_long for row in rows} == {"alone"}
    uneven = _plan([2] * 500 + [100] * 12, processes=8, batch_sizes=[8])
    assert all(1 < row.rank_spread <= 8 for row in uneven.rows if row.batch_size == 8)
    assert all(
        row.rank_spread == pytest.approx(1)
        for row in _plan([5] * 512, processes=8, batch_sizes=[8]).rows
    )


def test_a_second_plan_measures_nothing(measured: list[Measured]) -> None:
    first = _plan(**_ONE_WAY)
    count = len(measured)
    assert count > 0
    second = _plan([1, 2, 3] * 100, **_ONE_WAY)
    assert len(measured) == count
    assert second.best.elements == 600
    assert _plan(**_ONE_WAY).best == first.best
    _plan(fresh=True, **_ONE_WAY)
    assert len(measured) == 2 * count


def test_a_busy_machine_is_said(measured: list[Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "is_busy", lambda _: True)
    found = _plan(**_ONE_WAY)
    assert found.busy
    assert "other programs kept this machine busy" in str(found)
    monkeypatch.setattr(advice, "is_busy", lambda _: False)
    assert not _plan(**_ONE_WAY).busy


def test_a_saved_measurement_is_scaled_or_made_again(
    measured: list[Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = _plan(**_ONE_WAY).best.train_seconds
    count = len(measured)
    for factor, seconds in ((1.05, 1.0), (1.3, 1.3), (3.0, 3.0), (0.8, 0.8)):
        monkeypatch.setattr(probe.Yardstick, "look", lambda _, by=factor: by * 0.5e-3)
        best = _plan(**_ONE_WAY).best
        assert best.train_seconds == pytest.approx(seconds * first)
        assert best.train_range[1] > best.train_seconds * 0.99
    assert len(measured) == count
    # Other programs had disturbed it.
    monkeypatch.setattr(probe.Yardstick, "look", lambda _: 0.6 * 0.5e-3)
    _plan(**_ONE_WAY)
    assert len(measured) == 2 * count
    _plan(**_ONE_WAY)
    assert len(measured) == 2 * count


def test_print_shows_what_matters(machine: list[Measured]) -> None:
    found = _plan(layer=rl.nn.GRU(3, 4, bidirectional=True), processes=2, backends=None)
    text = str(found)
    assert "GRU(3, 4, bidirectional=True)" in text
    assert f"best: {found.best}" in text
    assert found.most_bytes is None
    assert found.why in text
    assert "MinGRU 0.25" in text
    assert f"which wait for the slowest: {found.best.rank_spread:.2f} times\n" in text
    marked = [line for line in text.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert f"{found.best.batch_size} sequences" in marked[0]
    assert all(f" {way} " in text for way in ("lanes", "packed", "padded", "masked", "each"))
    assert repr(found) == f"<Plan of {len(found.rows)} rows: {found.why}>"


@pytest.mark.parametrize(
    ("size", "dtype"), [(32, "float32"), (None, "float32"), (32, "bfloat16"), (None, "bfloat16")]
)
def test_why_compares_with_the_fastest_of_torch_in_the_table(
    machine: list[Measured], size: int | None, dtype: str
) -> None:
    found = _plan(batch_sizes=[8, 32], dtypes=[torch.bfloat16], threads=[1])
    # One row of torch is near. Both recommendations are compared with it, whatever limits its
    # batches.
    near = next(
        row
        for row in found.rows
        if (row.backend, row.dtype, row.batch_size) == ("torch", dtype, size)
    )
    rows = [
        replace(row, train_seconds=9 if row.backend == "torch" else 1)
        for row in found.rows
        if row is not near
    ]
    rows.append(replace(near, train_seconds=3.5))
    for best in (found.best, found.best_by_elements):
        why = texts.why(replace(best, train_seconds=1), rows, 1)
        order, other = (
            "bucketed" if near.bucketed else "random",
            ", bfloat16" * (dtype == "bfloat16"),
        )
        assert (
            f", 3.5 times as fast as the fastest of torch ({near.schedule}, {order}, {near.limit}{other})"
            in why
        )
    assert {(row.batch_size, row.way) for row in texts.shown(found.rows, found.best)} >= {
        (8, best.way),
        (32, best.way),
    }
    rival = min(row.train_seconds for row in found.rows if row.backend == "torch")
    assert (
        f"{rival / found.best.train_seconds:.1f} times as fast as the fastest of torch" in found.why
    )
    assert rival == min(
        row.train_seconds for row in texts.shown(found.rows, found.best) if row.backend == "torch"
    )


def test_a_long_tail_is_named(machine: list[Measured]) -> None:
    found = _plan([5] * 990 + [400] * 10, batch_sizes=[32])
    assert str(found.tail).startswith("10 of 1,000 sequences are longer than ")
    shares = [float(word.rstrip("%.")) for word in str(found.tail).split() if "%" in word]
    # The long sequences have 4,000 of 8,950 elements, and a larger share of a padded batch.
    assert shares[0] > shares[1] > 10
    assert _plan([5] * 1000).tail is None
    # The border is a quantile: the mean is 20.
    found = _plan([5] * 960 + [400] * 40, batch_sizes=[32])
    assert str(found.tail).startswith("40 of 1,000 sequences are longer than 6 steps")
    # No tail: the longest length is less than twice the quantile.
    assert _plan([5, 10, 15] * 300 + [20]).tail is None
    # It is that of the whole list.
    found = _plan([5] * 99_000 + [400] * 1000, batch_sizes=[512], backends=["cpu"], threads=[1])
    count, of = re.findall(r"[\d,]+", str(found.tail))[:2]
    assert int(count.replace(",", "")) == pytest.approx(1000, rel=0.15)
    assert of == "100,000"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": []}, "lengths must be .*got 0 sequences"),
        ({"lengths": [0, 0]}, "lengths must be .*got 2 sequences, all of length 0"),
        ({"batch_sizes": iter([])}, "batch_sizes must be "),
        ({"fresh": "yes"}, "fresh must be "),
        *(
            ({name: number}, f"{name} must be .*got {number}")
            for name, number in (("processes", 0), ("max_memory", 0))
        ),
        *(
            ({"threads": x}, f"threads must be .*got {got}")
            for x, got in ((2, 2), ([0], 0), ([10**6], 10**6))
        ),
        *(
            ({"dtypes": given}, "dtypes must be .*got .*torch.")
            for given in (torch.bfloat16, [torch.int64])
        ),
        ({"batch_sizes": [0]}, r"batch_sizes must be .*got 0"),
    ],
)
def test_bad_arguments(measured: list[Measured], options: dict[str, object], words: str) -> None:
    with pytest.raises((rl.errors.ArgumentError, rl.errors.ArgumentTypeError)) as caught:
        _plan(**options)  # type: ignore[arg-type]
    assert re.match(words, str(caught.value))
    assert not measured


def test_a_plan_takes_no_random_numbers(
    machine: list[Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        advice, "compare_cells", lambda *_: {"MinGRU": Ratio(*torch.rand(3).tolist())}
    )
    layer = rl.nn.LSTM(3, 4)
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    _plan(layer=layer)
    assert torch.equal(torch.rand(3), wanted)


def test_options_are_lists_that_may_be_read_once(measured: list[Measured]) -> None:
    found = _plan(
        batch_sizes=iter([8, 32]),
        threads=iter([1]),
        dtypes=iter([torch.bfloat16]),
        backends=iter(["torch"]),
    )
    assert {(row.batch_size, row.dtype) for row in found.rows} > {(8, "float32"), (32, "bfloat16")}
    assert {(row.backend, row.threads) for row in found.rows} == {("torch", 1)}
    assert all(call.way.backend == "torch" for call in measured)
    assert found.best.dtype == "float32"
    with pytest.raises(
        rl.errors.DispatchError, match=r"backends must be .*program, reference, got .*torch"
    ):
        _plan(layer=rl.nn.PeepholeLSTM(3, 4), backends=["torch"])
    with pytest.raises(rl.errors.DispatchError, match=r"backends must be .*got \['cuda'\]"):
        _plan(backends=["cuda"])
    with pytest.raises(rl.errors.ArgumentTypeError, match=r"progress must be a function .*got 5"):
        _plan(progress=5)


def test_a_picture_has_a_line_for_each_pair(machine: list[Measured]) -> None:
    found = _plan(batch_sizes=[8, 16, 32])
    axes = found.plot().axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    pairs = {f"{row.backend} {row.schedule}" for row in found.rows}
    assert set(lines) == pairs | {f"{pair}, bucketed" for pair in pairs}
    drawn = dict(np.asarray(lines["cpu lanes"].get_xydata()).tolist())
    mine = [
        row for row in found.rows if row.backend == "cpu" and row.threads == 2 and not row.bucketed
    ]
    assert drawn == {row.batch_size: row.rank_seconds for row in mine if row.batch_size}
    assert np.asarray(axes.collections[0].get_offsets()).tolist() == [
        [found.best.batch_size, found.best.rank_seconds]
    ]
    assert f"{len(LENGTHS)} sequences, LSTM(3, 4)" in axes.get_title(loc="left")


def test_a_row_in_words() -> None:
    row = replace(ROW, backend="torch", schedule="padded", bucketed=True, threads=2, waste=250)
    row = replace(
        row, train_range=(1.41, 1.52), infer_range=(0.2469, 0.25), step_p90=2e-2, peak_bytes=5 << 20
    )
    told = ("1.4 to 1.6 s", "240 to 250 ms", "20.0 ms", "8 sequences, bucketed", "5.0 MB")
    assert texts.fields(row) == ("torch", "padded", *told, "float32", "2", "1,000", "25%")
    assert texts.fields(replace(row, elements=0, waste=0))[-1] == "0%"
    times = [seconds_in_words(seconds) for seconds in (7200.0, 90.0, 1.234, 9.99e-3)]
    sizes = [bytes_in_words(count) for count in (3 << 29, 10)]
    assert (times, sizes) == (["2.0 h", "1.5 min", "1.23 s", "9.99 ms"], ["1.5 GB", "1 KB"])


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ((0.991, 1.04), "0.99 to 1.1 s"),
        ((0.123, 0.123), "120 to 130 ms"),
        ((1.2e-5, 9.91e-4), "0.012 to 1 ms"),
        ((100.0, 7200.0), "0.027 to 2 h"),
        ((36e5, 4e6), "1,000 to 1,200 h"),
        ((0.0, 1.1), "1e-07 to 1.1 s"),
    ],
)
def test_an_interval_is_rounded_outwards(ends: tuple[float, float], told: str) -> None:
    assert texts.range_in_words(ends) == told


def test_why_looks_at_larger_batches_of_the_same_way(machine: list[Measured]) -> None:
    row = replace(ROW, train_seconds=1.0, train_range=(0.91, 1.1))
    larger = [
        replace(row, batch_size=16, train_seconds=1.25),
        replace(row, batch_size=32, train_seconds=1.5),
    ]
    others = [
        replace(row, threads=2, batch_size=16, train_seconds=1.1),
        replace(row, backend="reference"),
    ]
    others += [replace(row, batch_size=None, batch_elements=80, train_seconds=1.05)]
    why = texts.why(row, [row, *larger, *others, replace(row, bucketed=True, train_seconds=2.0)], 1)
    told = "An epoch of training takes 0.91 to 1.1 s, bucketing would take 2.00 of that, larger batches 1.25."
    assert why == told
    spread = replace(row, rank_spread=1.5, train_seconds=7)
    assert texts.why(spread, [spread], 3).endswith(
        "the slowest of 3 processes takes 1.50 times the mean."
    )
