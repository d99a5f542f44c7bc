"""The check of the machines of a Ray cluster, with a fake cluster."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from raglane import __version__
from raglane.errors import ArgumentError
from raglane.training.ranks.ray_workers import check_machines


class _Cluster:
    """A fake ray module: each machine returns its answer, or raises it."""

    def __init__(self, answers: dict[str, Any]) -> None:
        self.answers = answers

    def nodes(self) -> list[dict[str, Any]]:
        gone = {"Alive": False, "NodeManagerHostname": "gone", "NodeID": "gone"}
        return [
            gone,
            *(
                {"Alive": True, "NodeManagerHostname": name, "NodeID": name}
                for name in self.answers
            ),
        ]

    def remote(self, **_: Any) -> Any:
        def asked(scheduling_strategy: Any) -> Any:
            return SimpleNamespace(remote=lambda folder: (scheduling_strategy.node, folder))

        return lambda _: SimpleNamespace(options=asked)

    def get(self, question: tuple[str, str]) -> Any:
        answer = self.answers[question[0]]
        if isinstance(answer, Exception):
            raise answer
        assert Path(question[1]).is_absolute()
        return answer


@pytest.fixture(autouse=True)
def _strategies(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("ray.util.scheduling_strategies")
    module.NodeAffinitySchedulingStrategy = lambda node, soft: SimpleNamespace(node=node, soft=soft)
    for name in ("ray", "ray.util"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


GOOD = (__version__, True)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            ("0.0.1", True),
            r"engine must be .* on every machine.*, got the machine b, with Raglane 0\.0\.1",
        ),
        (
            ModuleNotFoundError("long\nNo module named 'raglane'"),
            r"machine b, with Raglane none .*No module named",
        ),
        (RuntimeError(""), "no reason"),
        (
            (__version__, False),
            r"out must be .*machines share.*, got '.*run', which does not exist on the machine b",
        ),
    ],
)
def test_a_machine_that_lacks_a_requirement(tmp_path: Path, answer: Any, words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        check_machines(_Cluster({"a": GOOD, "b": answer}), tmp_path / "run" / ".ray", "out")
    assert "\n" not in str(caught.value)


def test_a_cluster_that_lacks_nothing(tmp_path: Path) -> None:
    check_machines(_Cluster({"a": GOOD, "b": GOOD}), tmp_path, "out")
    # A single machine is this one, and is not checked.
    check_machines(_Cluster({"a": RuntimeError()}), tmp_path, "out")
