"""A few rounds of ``fuzz.kill_points``: a command that dies or fails ends with the bits of an
undisturbed one.
"""

from __future__ import annotations

import pytest

from fuzz.crashes import contents
from fuzz.kill_points import Workshop


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("shop").resolve())


# Shares of the calls of a command: 0 is the first call, 1 the last one.
@pytest.mark.parametrize(
    ("name", "way", "moment", "again"),
    [
        ("train", "die", 0.0, 0.0),
        ("train", "die twice", 0.5, 0.5),
        ("train", "fail", 1.0, 0.0),
        ("overwrite", "die", 0.5, 0.0),
        ("overwrite", "die twice", 1.0, 0.5),
        ("overwrite", "fail", 0.0, 0.0),
        ("resume", "die", 1.0, 0.0),
        ("resume", "die twice", 0.5, 0.0),
        ("resume", "fail", 0.5, 0.0),
        ("evaluate", "die twice", 1.0, 0.5),
        ("evaluate", "fail", 0.5, 0.0),
        ("predict", "die twice", 0.5, 0.5),
        ("predict", "fail", 1.0, 0.0),
    ],
)
def test_nothing_is_lost_wherever_a_command_ends(
    shop: Workshop, name: str, way: str, moment: float, again: float
) -> None:
    last = shop.calls[name] - 1
    assert last > 2
    shop.attack(name, way, 1 + int(moment * last), 1 + int(again * last))


def test_a_process_that_is_killed(shop: Workshop) -> None:
    shop.attack("overwrite", "kill", 0.3)


def test_lost_writes_are_noticed(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that cannot be repaired, a file that differs, and a folder that is left."""
    shop.put("new")
    wanted = contents(shop.run)
    (shop.run / ".best.previous").mkdir()
    assert contents(shop.run) != wanted
    shop.put("new")
    weights = shop.run / "best" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    assert contents(shop.run) != wanted
    # If the old run is taken for the new one, the old checkpoint is removed before there is a new
    # one.
    monkeypatch.setattr("raglane.training.folder._has_checkpoint", lambda _: True)
    with pytest.raises(AssertionError, match=r"not the run 'old': .*weights.safetensors"):
        shop.attack("overwrite", "die", 30)


def test_a_round(shop: Workshop) -> None:
    shop.play(1)
