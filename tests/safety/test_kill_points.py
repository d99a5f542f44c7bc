"""A few rounds of ``fuzz.kill_points``: a command that dies or fails ends with the bits of an undisturbed one."""

from __future__ import annotations

import pytest

from commands import undrawn_pictures  # noqa: F401
from fuzz.crashes import contents
from fuzz.kill_points import STORIES, Workshop


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop").resolve())


@pytest.mark.parametrize("name", STORIES)
def test_nothing_is_lost_wherever_a_command_ends(shop: Workshop, name: str) -> None:
    calls = shop.calls[name]
    assert calls > 3
    moments = [1, (calls + 1) // 2, calls]
    for moment in moments:
        shop.attack(name, "die", moment)
    for moment, again in zip(moments[1:], moments, strict=False):
        shop.attack(name, "die twice", moment, again)
    for moment in moments:
        shop.attack(name, "fail", moment)


def test_a_process_that_is_killed(shop: Workshop) -> None:
    shop.attack("overwrite", "kill", 0.3)


def test_what_is_lost_is_noticed(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot be repaired, a file that differs, and a folder that is left."""
    shop.put("new")
    wanted = contents(shop.run)
    (shop.run / ".best.previous").mkdir()
    assert contents(shop.run) != wanted
    shop.put("new")
    weights = shop.run / "best" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert contents(shop.run) != wanted
    # If the old run is taken for the new one, the old checkpoint is removed before there is a new one.
    monkeypatch.setattr("raglane.training.folder._has_checkpoint", lambda _: True)
    for moment in (10, 30):
        with pytest.raises(AssertionError, match=r"not the run 'old': .*weights.safetensors"):
            shop.attack("overwrite", "die", moment)


def test_rounds(shop: Workshop) -> None:
    for number in range(3):
        shop.play(number)
