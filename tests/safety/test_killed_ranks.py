"""A few rounds of ``fuzz.killed_ranks``: a killed training ends with the bits of an undisturbed one."""

from __future__ import annotations

import pytest

from fuzz.killed_ranks import Track


@pytest.fixture(scope="module")
def track(tmp_path_factory: pytest.TempPathFactory) -> Track:
    return Track(tmp_path_factory.mktemp("track").resolve())


def test_the_second_of_two_ranks(track: Track) -> None:
    track.attack(2, 0.8 * track.seconds[2], 2, saves_always=True)


def test_a_round_with_a_command_of_two_ranks(track: Track) -> None:
    track.play(37)


def test_only_what_is_lost_is_noticed(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the kill of a command of one process."""
    monkeypatch.setitem(track.whole, 1, track.whole[1] | {"best/weights.safetensors": b"others"})
    with pytest.raises(AssertionError, match=r"not the run of 1 ranks: best/weights.safetensors$"):
        track.attack(1, 0.7 * track.seconds[1], 0, saves_always=False)
