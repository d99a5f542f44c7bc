"""A little of the attack by ``fuzz.conversions``: what is killed ends with the bytes of what was not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fuzz.conversions import Yard, main


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    return Yard(tmp_path_factory.mktemp("yard").resolve())


def test_three_kills_at_the_beginning_in_the_middle_and_at_the_end(yard: Yard) -> None:
    calls = yard.calls()
    for moment in (calls // 10, calls // 2, calls - 4):
        yard.clear()
        yard.killed(moment)
        assert yard.output.exists() == (moment == calls - 4)
        yard.check()
    yard.clear()
    yard.killed(calls // 3)
    yard.killed(calls // 2)
    yard.check()


def test_the_attack_notices_what_is_lost(yard: Yard) -> None:
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


def test_rounds_are_drawn(monkeypatch: pytest.MonkeyPatch, yard: Yard, capsys: pytest.CaptureFixture[str]) -> None:
    def here(folder: Path) -> Yard:
        return yard

    monkeypatch.setattr("fuzz.conversions.Yard", here)
    assert main(1, 1) == 0
    assert "conversions: 1 rounds of seed 1, " in capsys.readouterr().out
