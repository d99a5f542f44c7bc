from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import raglane as rl
from planner.made_up import Measured, costs, held, make_up, seen
from raglane.planner import Plan, advice, words
from raglane.planner.model import Floats, Profile, Way
from raglane.planner.rows import Row

LENGTHS = [3, 5, 8, 2, 13, 1, 0, 9] * 60


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    monkeypatch.setattr(advice, "compare_cells", lambda *_: {"MinGRU": 0.25})
    monkeypatch.setattr(advice, "is_busy", lambda _: False)
    return make_up(monkeypatch)


def _plan(lengths: object = LENGTHS, layer: torch.nn.Module | None = None, **options: object) -> Plan:
    return rl.plan(lengths, layer or rl.nn.LSTM(3, 4), **{"threads": [1, 2], **options})  # type: ignore[arg-type]


def test_rows_are_every_way_with_every_batch(measured: list[Measured]) -> None:
    found = _plan(batch_sizes=[8, 32])
    # cpu lanes, torch packed and padded with one thread and two, five schedules of the reference with two.
    assert len(found.rows) == (3 * 2 + 5) * (2 + 2) * 2
    assert {row.batch_size for row in found.rows} == {8, 32, None}
    assert found.rows == tuple(sorted(found.rows, key=lambda row: row.train_seconds))
    for row in found.rows:
        assert row.elements - row.waste == sum(LENGTHS)
        assert (row.waste > 0) == (row.schedule in ("padded", "masked"))
        assert 0 < row.step_p50 <= row.step_p90 <= row.step_max
        assert row.rank_spread == 1


def test_times_are_those_of_the_epoch(measured: list[Measured]) -> None:
    # Every batch is the same, so that an epoch is a multiple of one.
    found = _plan([6] * 64, batch_sizes=[16])
    row = next(r for r in found.rows if (r.schedule, r.threads, r.batch_size, r.grouped) == ("padded", 1, 16, False))
    features = np.array([1, 6, 4 * 6, 96, 96, 96, 16, 0, 0, 0, 0, 0, 0])
    way = Way("torch", "padded", "float32", 1)
    assert row.train_seconds == pytest.approx(4 * features @ costs(way, "train"), rel=0.1)
    assert row.infer_seconds == pytest.approx(4 * features @ costs(way, "infer"), rel=0.1)
    assert row.step_max == pytest.approx(row.train_seconds / 4)
    weights = sum(4 * weight.numel() for weight in rl.nn.LSTM(3, 4).parameters())
    assert row.peak_bytes == pytest.approx(weights + held(Profile.of(way, torch.tensor([6] * 16))), rel=0.02)


def test_each_number_of_threads_has_its_own_lanes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    monkeypatch.setattr(advice, "compare_cells", lambda *_: {})
    make_up(monkeypatch, lambda _way, _mode: 1e-5 * (np.arange(10) == 1))  # steps alone take time
    rows = _plan([5] * 2000, batch_sizes=[1000], backends=["cpu"]).rows
    for threads, rounds in ((1, 21), (2, 11)):
        # 1,000 sequences on 48 lanes or 96, one after the other; two such batches.
        found = next(row for row in rows if (row.threads, row.batch_size) == (threads, 1000))
        assert found.train_seconds == pytest.approx(2 * 5 * rounds * 1e-5, rel=0.05)


def test_what_lies_far_beyond_all_measurements_is_marked(measured: list[Measured]) -> None:
    found = _plan([6] * 64, batch_sizes=[16])
    assert not any(row.is_rough for row in found.rows if row.backend != "reference")
    assert "~" not in str(found).replace("~:", "")
    # A pack of some 100,000 elements over 2,000 steps takes a hundred times as long as the longest that was measured.
    found = _plan([2000] * 300 + [1500] * 300, batch_sizes=[64])
    ways = {(row.backend, row.schedule): row.is_rough for row in found.rows if not row.grouped and row.batch_size}
    assert ways["torch", "packed"]
    assert words.ROUGH in str(found)
    packed = next(words.fields(row) for row in found.rows if row.is_rough)
    assert [text.startswith("~") for text in packed] == [False] * 7 + [True] * 3 + [False]


def test_a_sample_stands_for_all(measured: list[Measured]) -> None:
    # Of 12,500 batches 64 are looked at, and of the sequences about two thirds.
    lengths = [1, 3, 5, 7] * 25_000
    row = next(row for row in _plan(lengths, batch_sizes=[8]).rows if row.way == Way("cpu", "lanes", "float32", 1))
    assert row.elements == pytest.approx(400_000, rel=0.01)
    assert row.batches == pytest.approx(12_500, rel=0.3)
    small = next(r for r in _plan(lengths[:400], batch_sizes=[8]).rows if (r.way, r.limit) == (row.way, row.limit))
    assert row.train_seconds == pytest.approx(250 * small.train_seconds, rel=0.05)
    assert small.elements == 1600


def test_best_is_the_fastest_of_what_can_be_had(measured: list[Measured]) -> None:
    found = _plan()
    assert (found.best.backend, found.best.threads) == ("cpu", 2)
    assert found.best.batch_size is not None
    fastest = min(row.train_seconds for row in found.rows if row.batch_size)
    assert found.best.train_seconds <= 1.03 * fastest


def test_what_is_as_fast_gives_way_to_what_is_simpler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flat(way: Way, mode: str) -> Floats:
        """Time follows the elements alone, whatever the threads and batches."""
        found = seen(way, torch.tensor([2, 1])) * 0
        found[[5, 14] if way.schedule == "packed" and way.backend == "torch" else 5] = (
            1e-5 if way.backend == "cpu" else 1e-3
        )
        return found

    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    monkeypatch.setattr(advice, "compare_cells", lambda *_: {})
    make_up(monkeypatch, flat)
    best = _plan().best
    assert (best.backend, best.threads, best.grouped, best.batch_size) == ("cpu", 1, False, 8)


def test_memory_limits_the_batch(measured: list[Measured]) -> None:
    free = _plan().best
    limited = _plan(memory=free.peak_bytes - 1).best
    assert limited.peak_bytes < free.peak_bytes
    with pytest.raises(rl.errors.ArgumentError, match=r"memory must be the smallest batch .* takes.*, got 1 bytes"):
        _plan(memory=1)


def test_ranks_share_what_the_machine_has(measured: list[Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "available_memory", lambda: 1e9)
    one, four = (_plan(ranks=ranks, threads=[1], backends=["cpu"]) for ranks in (1, 4))
    assert one.most_elements == pytest.approx(4 * four.most_elements, rel=0.01)
    assert one.memory_limit.elements == pytest.approx(four.memory_limit.elements, rel=0.01)
    # 480 sequences are 8 batches of at most 32 for one process, and of 8 for each of four.
    assert {row.batch_size for row in one.rows} - {None} == {8, 16, 32}
    assert {row.batch_size for row in four.rows} - {None} == {8}


def test_a_limit_by_elements_is_of_sequences_of_mean_length(measured: list[Measured]) -> None:
    rows = _plan([2, 4, 6, 8] * 100, batch_sizes=[8, 32], backends=["cpu"]).rows
    assert {row.batch_elements for row in rows} - {None} == {40, 160}
    assert all((row.batch_size is None) != (row.batch_elements is None) for row in rows)


def test_other_dtypes_are_shown_and_not_recommended(measured: list[Measured]) -> None:
    found = _plan(dtypes=[torch.bfloat16])
    assert {row.dtype for row in found.rows} == {"float32", "bfloat16"}
    assert found.best.dtype == "float32"


def test_ranks_wait_for_the_slowest(measured: list[Measured]) -> None:
    lengths = [2] * 500 + [100] * 12
    rows = {(row.way, row.limit, row.grouped): row for row in _plan(lengths, ranks=8, batch_sizes=[8]).rows}
    spread = {grouped: row.rank_spread for (way, limit, grouped), row in rows.items() if limit.sequences == 8}
    assert all(row.rank_spread > 1 for row in rows.values() if row.limit.sequences == 8)
    assert max(spread.values()) <= 8
    even = _plan([5] * 512, ranks=8, batch_sizes=[8])
    assert all(row.rank_spread == pytest.approx(1) for row in even.rows)


def test_a_second_plan_measures_nothing(measured: list[Measured]) -> None:
    first = _plan()
    count = len(measured)
    assert count > 0
    second = _plan([1, 2, 3] * 100)
    assert len(measured) == count
    assert second.best.elements == 600
    assert _plan().best == first.best
    _plan(fresh=True)
    assert len(measured) == 2 * count


def test_a_busy_machine_is_said_and_not_kept(measured: list[Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "is_busy", lambda _: True)
    found = _plan()
    assert found.busy
    assert "other programs kept this machine busy" in str(found)
    count = len(measured)
    monkeypatch.setattr(advice, "is_busy", lambda _: False)
    assert not _plan().busy
    assert len(measured) == 2 * count


def test_print_shows_what_matters(measured: list[Measured]) -> None:
    found = _plan(layer=rl.nn.GRU(3, 4, bidirectional=True), ranks=2)
    text = str(found)
    assert "GRU(3, 4, bidirectional=True)" in text
    assert f"best: {found.best}" in text
    assert found.why in text
    assert "MinGRU 0.25" in text
    marked = [line for line in text.splitlines() if line.startswith(">")]
    assert len(marked) == 1
    assert f"{found.best.batch_size} sequences" in marked[0]
    assert all(f" {way} " in text for way in ("lanes", "packed", "padded", "masked", "each"))
    assert repr(found) == f"<Plan of {len(found.rows)} rows: {found.why}>"


@pytest.mark.parametrize(("size", "dtype"), [(32, "float32"), (None, "float32"), (32, "bfloat16"), (None, "bfloat16")])
def test_why_compares_with_the_fastest_of_torch_in_the_table(
    measured: list[Measured], size: int | None, dtype: str
) -> None:
    found = _plan(batch_sizes=[8, 32], dtypes=[torch.bfloat16])
    # One row of torch alone is near, however its batches are limited: the best of either kind is compared with it.
    near = next(row for row in found.rows if (row.backend, row.dtype, row.batch_size) == ("torch", dtype, size))
    rows = [replace(row, train_seconds=9 if row.backend == "torch" else 1) for row in found.rows if row is not near]
    rows.append(replace(near, train_seconds=3.5))
    for best in (found.best, found.best_by_elements):
        why = words.why(replace(best, train_seconds=1), rows, 1)
        order, other = "grouped" if near.grouped else "random", ", bfloat16" * (dtype == "bfloat16")
        assert f", 3.5 times as fast as the fastest of torch ({near.schedule}, {order}, {near.limit}{other})" in why
    rival = min(row.train_seconds for row in found.rows if row.backend == "torch")
    assert f"{rival / found.best.train_seconds:.1f} times as fast as the fastest of torch" in found.why
    assert rival == min(row.train_seconds for row in words.shown(found.rows, found.best) if row.backend == "torch")


def test_a_long_tail_is_named(measured: list[Measured]) -> None:
    found = _plan([5] * 990 + [400] * 10, batch_sizes=[32])
    assert found.tail is not None
    assert found.tail.startswith("10 of 1,000 sequences are longer than ")
    shares = [float(word.rstrip("%.")) for word in found.tail.split() if "%" in word]
    # Padded, most of a batch is there for its longest; here the long ones are 4,000 of 8,950 elements.
    assert shares[0] > shares[1] > 10
    assert _plan([5] * 1000).tail is None
    # The border is a quantile: the mean is 20.
    found = _plan([5] * 960 + [400] * 40, batch_sizes=[32])
    assert str(found.tail).startswith("40 of 1,000 sequences are longer than 6 steps")
    # Lengths that differ have no tail where the longest is less than twice what nearly all are below.
    assert _plan([5, 10, 15] * 300 + [20]).tail is None


def test_a_tail_is_that_of_the_whole_list(measured: list[Measured]) -> None:
    found = _plan([5] * 99_000 + [400] * 1000, batch_sizes=[512], backends=["cpu"], threads=[1])
    assert found.tail is not None
    count, of = re.findall(r"[\d,]+", found.tail)[:2]
    assert int(count.replace(",", "")) == pytest.approx(1000, rel=0.15)
    assert of == "100,000"


def test_lengths_come_in_many_forms(measured: list[Measured]) -> None:
    batch = rl.Ragged.from_flat(torch.randn(sum(LENGTHS), 3), lengths=LENGTHS)
    found = [_plan(given).best for given in (LENGTHS, torch.tensor(LENGTHS), np.array(LENGTHS), batch)]
    assert all(best == found[0] for best in found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": []}, "lengths must be .*got 0 sequences"),
        ({"lengths": [0, 0]}, "lengths must be .*got 2 sequences, all of length 0"),
        ({"lengths": [-1]}, "lengths"),
        ({"lengths": [1.5]}, "lengths"),
        ({"ranks": 0}, "ranks must be .*got 0"),
        ({"ranks": 1.5}, "ranks"),
        ({"batch_sizes": []}, "batch_sizes must be "),
        ({"batch_sizes": [0]}, "batch_sizes must be .*got 0"),
        ({"batch_sizes": 32}, "batch_sizes must be .*got 32"),
        ({"batch_sizes": "32"}, "batch_sizes must be .*got '32'"),
        ({"batch_sizes": iter([])}, "batch_sizes must be "),
        ({"threads": [0]}, "threads must be .*got 0"),
        ({"threads": 2}, "threads must be .*got 2"),
        ({"memory": 0}, "memory must be .*got 0"),
        ({"fresh": "yes"}, "fresh must be "),
        ({"dtypes": ["float32"]}, "dtypes must be "),
        ({"dtypes": [torch.int64]}, "dtypes must be "),
        ({"dtypes": torch.bfloat16}, "dtypes must be .*got torch.bfloat16"),
        ({"backends": "cpu"}, "backends must be .*got 'cpu'"),
        ({"backends": 5}, "backends must be .*got 5"),
        ({"backends": []}, "backends must be "),
    ],
)
def test_bad_arguments(measured: list[Measured], options: dict[str, object], words: str) -> None:
    with pytest.raises((rl.errors.ArgumentError, rl.errors.ArgumentTypeError)) as caught:
        _plan(**options)  # type: ignore[arg-type]
    assert str(caught.value).startswith(words)
    assert not measured


def test_a_plan_takes_no_random_numbers(measured: list[Measured], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advice, "compare_cells", lambda *_: {"MinGRU": float(torch.rand(1))})
    layer = rl.nn.LSTM(3, 4)
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    _plan(layer=layer)
    assert torch.equal(torch.rand(3), wanted)


def test_lists_that_are_read_once(measured: list[Measured]) -> None:
    found = _plan(batch_sizes=iter([8, 32]), threads=iter([1]), dtypes=iter([torch.bfloat16]), backends=iter(["cpu"]))
    assert {(row.batch_size, row.dtype) for row in found.rows} > {(8, "float32"), (32, "bfloat16")}
    assert {(row.backend, row.threads) for row in found.rows} == {("cpu", 1)}


def test_backends_are_those_asked_for(measured: list[Measured]) -> None:
    assert {row.backend for row in _plan(backends=["torch"]).rows} == {"torch"}
    assert all(call.way.backend == "torch" for call in measured)
    with pytest.raises(
        rl.errors.DispatchError, match=r"backends must be .*torch.*can be run by program, reference.*, got "
    ):
        _plan(layer=rl.nn.PeepholeLSTM(3, 4), backends=["torch"])
    with pytest.raises(rl.errors.DispatchError, match=r"backend must be .*got 'cuda'"):
        _plan(backends=["cuda"])


def test_a_picture_has_a_line_for_each_pair(measured: list[Measured]) -> None:
    found = _plan(batch_sizes=[8, 16, 32])
    axes = found.plot().axes[0]
    lines = {line.get_label(): line for line in axes.lines}
    pairs = {f"{row.backend} {row.schedule}" for row in found.rows}
    assert set(lines) == pairs | {f"{pair}, grouped" for pair in pairs}
    drawn = dict(np.asarray(lines["cpu lanes"].get_xydata()).tolist())
    mine = [row for row in found.rows if row.backend == "cpu" and row.threads == 2 and not row.grouped]
    assert drawn == {row.batch_size: row.rank_seconds for row in mine if row.batch_size}
    assert np.asarray(axes.collections[0].get_offsets()).tolist() == [[found.best.batch_size, found.best.rank_seconds]]
    assert f"{len(LENGTHS)} sequences, LSTM(3, 4)" in axes.get_title(loc="left")


def test_a_row_in_words() -> None:
    row = Row(
        "torch", "padded", 8, None, True, "float32", 2, 10, 1000, 250, 1.5, 0.25, 1e-3, 2e-2, 3e-2, 5 << 20, 1.0, False
    )
    limit, told = "8 sequences, grouped", ("1.50 s", "250.0 ms", "20.0 ms", "5.0 MB")
    assert words.fields(row) == ("torch", "padded", limit, "float32", "2", "1,000", "25%", *told)
    assert words.fields(replace(row, elements=0, waste=0))[6] == "0%"


def test_why_looks_at_larger_batches_of_the_same_way(measured: list[Measured]) -> None:
    row = Row("cpu", "lanes", 8, None, False, "float32", 1, 10, 1000, 0, 1.0, 1e-4, 1e-4, 1e-4, 1e-4, 5000, 1.0, False)
    larger = [replace(row, batch_size=16, train_seconds=1.25), replace(row, batch_size=32, train_seconds=1.5)]
    others = [replace(row, threads=2, batch_size=16, train_seconds=1.1), replace(row, backend="reference")]
    others += [replace(row, batch_size=None, batch_elements=80, train_seconds=1.05)]
    why = words.why(row, [row, *larger, *others, replace(row, grouped=True, train_seconds=2.0)], 1)
    told = "An epoch of training takes 1.00 s, grouping by length would take 2.00 of that, larger batches 1.25."
    assert why == told
    spread = replace(row, rank_spread=1.5)
    assert words.why(spread, [spread], 3).endswith("the slowest of 3 processes takes 1.50 times the mean.")
