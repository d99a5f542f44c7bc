"""A little of the attack by ``fuzz.kill_points``: what dies or fails ends with the bits of what did neither."""

from __future__ import annotations

import pytest

from commands import undrawn_pictures  # noqa: F401
from fuzz.kill_points import STORIES, Workshop, attack, count_calls, main
from fuzz.runs import contents


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop").resolve())


@pytest.mark.parametrize("name", STORIES)
def test_nothing_is_lost_wherever_a_command_ends(shop: Workshop, name: str) -> None:
    story = STORIES[name]
    calls = count_calls(shop, story)
    assert calls > 3
    few = min(calls, 3)
    # From the first call to the last, so that beginning, middle and end are among them.
    moments = [1 + place * (calls - 1) // (few - 1) for place in range(few)]
    for moment in moments:
        attack(shop, story, "die", moment)
    for moment, again in zip(moments[1:], moments, strict=False):
        attack(shop, story, "die twice", moment, again)
    for moment in moments:
        attack(shop, story, "fail", moment)


def test_a_process_that_is_killed(shop: Workshop) -> None:
    attack(shop, STORIES["overwrite"], "kill", 0.3)


def test_the_attack_notices_what_is_lost(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot be repaired, a file that is other, and something that stays behind."""
    shop.clear()
    shop.put("new")
    wanted = contents(shop.run)
    (shop.run / ".best.previous").mkdir()
    assert contents(shop.run) != wanted
    shop.clear()
    shop.put("new")
    weights = shop.run / "best" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert contents(shop.run) != wanted
    # Who takes the old run for the new one removes what can still come back.
    monkeypatch.setattr("raglane.training.folder._has_checkpoint", lambda _: True)
    for moment in (10, 30):
        with pytest.raises(AssertionError, match=r"not the run 'old': .*weights.safetensors"):
            attack(shop, STORIES["overwrite"], "die", moment)


def test_rounds_are_drawn(shop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fuzz.kill_points.Workshop", lambda _: shop)
    assert main(3, 1) == 0
    assert "kill_points: 3 rounds of seed 1, " in capsys.readouterr().out
