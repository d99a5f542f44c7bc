"""A few rounds of ``fuzz.killed_ranks`` and ``fuzz.conversions``: after a kill, the next call gives
the same bits.
"""

from __future__ import annotations

import pytest

from fuzz.conversions import Yard
from fuzz.killed_ranks import Track


@pytest.fixture(scope="module")
def track(tmp_path_factory: pytest.TempPathFactory) -> Track:
    return Track(tmp_path_factory.mktemp("track").resolve())


def test_the_second_of_two_ranks(track: Track) -> None:
    track.attack(2, 0.5 * track.seconds[2], 2, saves_always=True)


def test_a_round_with_a_command_of_two_ranks(track: Track) -> None:
    track.play(37)


def test_only_what_is_lost_is_noticed(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the kill of a command of one process."""
    monkeypatch.setitem(track.whole, 1, track.whole[1] | {"best/weights.safetensors": b"others"})
    with pytest.raises(AssertionError, match=r"not the run of 1 ranks: best/weights.safetensors$"):
        track.attack(1, 0.7 * track.seconds[1], 0, saves_always=False)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return Yard(tmp_path_factory.mktemp("yard").resolve())


def test_three_kills_at_the_beginning_in_the_middle_and_at_the_end(yard: Yard) -> None:
    for moment in (yard.calls // 10, yard.calls // 2, yard.calls - 4):
        yard.clear()
        yard.kill(moment)
        assert yard.output.exists() == (moment == yard.calls - 4)
        yard.check()
    yard.clear()
    yard.kill(yard.calls // 3)
    yard.kill(yard.calls // 2)
    yard.check()


def test_lost_writes_are_noticed(yard: Yard) -> None:
    yard.clear()
    yard.convert()
    shard = next(yard.output.glob("*.arrow"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + b"\0")
    with pytest.raises(AssertionError, match=f"not the same: {shard.name}"):
        yard.check()
    shard.write_bytes(content)
    (yard.folder / ".left").write_text("")
    with pytest.raises(AssertionError, match=r"\.left"):
        yard.check()
    (yard.folder / ".left").unlink()


def test_a_round(yard: Yard) -> None:
    yard.play(1)
