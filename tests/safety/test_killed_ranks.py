"""A little of the attack by ``fuzz.killed_ranks``: what is killed ends with the bits of what nobody disturbed."""

from __future__ import annotations

import pytest

from fuzz.killed_ranks import Track, main


@pytest.fixture(scope="module")
def track(tmp_path_factory: pytest.TempPathFactory) -> Track:
    return Track(tmp_path_factory.mktemp("track").resolve())


def test_kills_of_one_process_and_of_two(track: Track) -> None:
    """Of the command, and of the second of two ranks; kills of one process are those of test_kill_points as well."""
    for ranks, share, victim in ((1, 0.7, 0), (2, 0.5, 0), (2, 0.8, 2)):
        track.attack(ranks, share * track.seconds[ranks], victim, saves_always=victim == 2)


def test_the_attack_notices_what_is_lost(track: Track) -> None:
    track.whole[1] = track.whole[1] | {"best/weights.safetensors": b"others"}
    with pytest.raises(AssertionError, match=r"not the run of 1 ranks: best/weights.safetensors"):
        track.attack(1, 0.0, 0, saves_always=False)


def test_rounds_are_drawn(track: Track, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fuzz.killed_ranks.Track", lambda _: track)
    monkeypatch.setattr(track, "attack", lambda *_: None)
    assert main(2, 1) == 0
    assert capsys.readouterr().out == "killed_ranks: 2 rounds of seed 1, nothing lost\n"
