"""A few rounds of ``fuzz.conversions``: a killed conversion ends with the bytes of an undisturbed one."""

from __future__ import annotations

import pytest

from fuzz.conversions import Yard


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


def test_what_is_lost_is_noticed(yard: Yard) -> None:
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
