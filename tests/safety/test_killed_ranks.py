"""A few rounds of ``fuzz.killed_ranks``: a killed training ends with the bits of an undisturbed one."""

from __future__ import annotations

import pytest

from fuzz.killed_ranks import Track


@pytest.fixture(scope="module")
def track(tmp_path_factory: pytest.TempPathFactory) -> Track:
    return Track(tmp_path_factory.mktemp("track").resolve())


def test_kills_of_one_process_and_of_two(track: Track) -> None:
    """Of the command, and of the second of two ranks; test_kill_points also kills a command of one process."""
    for ranks, share, victim in ((1, 0.7, 0), (2, 0.5, 0), (2, 0.8, 2)):
        track.attack(ranks, share * track.seconds[ranks], victim, saves_always=victim == 2)


def test_what_is_lost_is_noticed(track: Track, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(track.whole, 1, track.whole[1] | {"best/weights.safetensors": b"others"})
    with pytest.raises(AssertionError, match=r"not the run of 1 ranks: best/weights.safetensors"):
        track.attack(1, 0.0, 0, saves_always=False)


def test_a_round(track: Track) -> None:
    track.play(1)
