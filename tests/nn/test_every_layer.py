"""Every schedule on every layer: the same outputs, states and gradients, and no output that nobody asked for."""

from __future__ import annotations

from typing import Any

import pytest

import raglane as rl
from every_layer import KINDS, LAYERS, a_batch, a_state, assert_same, build, gradients, parts, results_of
from raglane.cells import CELLS
from raglane.kernels.dispatch import BACKENDS
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.schedules import SCHEDULES


def test_every_layer_is_here() -> None:
    made = [getattr(rl.nn, name) for name in rl.nn.__all__]
    layers = {each.__name__ for each in made if isinstance(each, type) and issubclass(each, RecurrentLayer)}
    assert {kind.layer for kind in KINDS} == layers - {"Recurrent"}
    assert {kind.cell for kind in KINDS} == set(CELLS)
    assert all(build(kind).cell.name == kind.cell for kind in KINDS)


@pytest.mark.parametrize("name", LAYERS)
def test_every_schedule_on_every_layer(name: str) -> None:
    """Outputs, every state, final states and all gradients, with hx: all alike."""
    layer = build(name, 2, bidirectional=True)
    batch = a_batch()
    hx = a_state(layer, len(batch))
    wanted = [batch.values, *parts(hx), *layer.parameters()]
    seen = []
    for schedule in SCHEDULES:
        for return_states in (True, False):
            with rl.use_backend(schedule=schedule):
                assert rl.explain(layer, batch, return_states=return_states).schedule == schedule
                results = results_of(layer(batch, hx, return_states=return_states))
            kept = results[: 1 + len(parts(hx))]
            seen.append([*kept, *gradients(kept, wanted)])
            if return_states:
                seen[-1] += gradients(results, wanted)
    for other in seen[2:]:
        reference = seen[0] if len(other) == len(seen[0]) else seen[1]
        assert_same(other, reference, 1e-10)
    assert_same(seen[1], seen[0][: len(seen[1])], 1e-10)


@pytest.mark.parametrize("name", LAYERS)
def test_no_output_asks_for_no_output(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the last layer, whoever runs it; what is returned is the same state."""
    layer = build(name, 2, bidirectional=True)
    batch, seen = a_batch(), []
    for backend in BACKENDS.values():
        run = backend.run

        def watched(request: Any, schedule: str, run: Any = run) -> Any:
            result = run(request, schedule)
            seen.append((request.need_output, result.output))
            return result

        monkeypatch.setattr(backend, "run", watched)
    for schedule in SCHEDULES:
        with rl.use_backend(schedule=schedule):
            _, expected = layer(batch)
            seen.clear()
            nothing, state = layer(batch, return_output=False)
        assert nothing is None
        assert seen == [(False, seen[0][1])]
        assert_same(parts(state), parts(expected))
        if rl.explain(layer, batch).backend == "reference":
            assert seen[0][1] is None
