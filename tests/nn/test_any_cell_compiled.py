"""``torch.compile(fullgraph=True)`` of ``rl.nn.Recurrent`` with a user's own module."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import raglane as rl
from every_layer import D, H
from own_cells import Whole
from raglane.errors import DispatchError
from raglane.kernels.program import modules, program_operator

# torch.compile reads every tensor's .grad and suppresses the warning, unless it is an error.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Decaying(nn.Module):
    """Two states and outputs of three sizes, with parameters, buffers and constants."""

    decay = 0.9

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.output_size = (
            input_size,
            hidden_size,
            hidden_size + 2,
        )
        self.linear = weight_norm(
            nn.Linear(input_size + hidden_size, hidden_size, dtype=torch.float64)
        )
        self.twin = nn.Linear(2, 2, dtype=torch.float64)
        self.twin.weight = self.again = nn.Parameter(torch.randn(2, 2, dtype=torch.float64))
        self.register_buffer("scale", torch.full((hidden_size,), 0.7, dtype=torch.float64))
        self.begin = nn.Parameter(torch.randn(hidden_size, dtype=torch.float64))

    def initial_state(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return self.begin.expand(batch_size, -1), torch.ones(batch_size, 2, dtype=torch.float64)

    def step(self, x_t: Tensor, state: tuple[Tensor, Tensor]) -> Any:
        wide, narrow = state
        wide = self.decay * wide + (self.scale * self.linear(torch.cat([x_t, wide], 1))).tanh()
        narrow = self.twin(narrow @ self.again).sin()
        return torch.cat([wide.sin(), narrow], 1), (wide, narrow)


class Noisy(Decaying):
    """Draws random numbers in training."""

    def step(self, x_t: Tensor, state: Any) -> Any:
        return super().step(nn.functional.dropout(x_t, 0.5, self.training), state)


def a_model(cell: Any = Decaying, **options: Any) -> Any:
    torch._dynamo.reset()
    return rl.nn.Recurrent(cell, D, H, batch_first=True, **options)


def compiled(layer: Any, backend: str = "eager") -> tuple[Any, Any]:
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    return torch.compile(layer, backend=counter, fullgraph=True), counter


def results(layer: Any, kind: str, seed: int) -> list[Tensor]:
    """Outputs, states and gradients for a random batch."""
    torch.manual_seed(seed)
    count, steps = (int(size) for size in torch.randint(2, 9, (2,)))
    lengths, padded = (
        torch.randint(0, steps + 1, (count,)),
        torch.randn(count, steps, D, dtype=torch.float64),
    )
    lengths[0] = steps
    padded.requires_grad_()
    given = rl.Ragged.from_padded(padded, lengths) if kind == "Ragged" else padded
    out, state = layer(given, **({"lengths": lengths} if kind == "padded" else {}))
    found = [out.values if isinstance(out, rl.Ragged) else out, *state]
    if torch.is_grad_enabled():
        loss = sum(part.cos().sum() for part in found)
        parameters = [part for part in layer.parameters() if part.requires_grad]
        found += torch.autograd.grad(loss, [padded, *parameters])
    return [part.detach() for part in found]


def assert_alike(one: Any, other: Any, kind: str = "Ragged", seed: int = 0) -> None:
    torch.testing.assert_close(
        results(one, kind, seed), results(other, kind, seed), rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("kind", ["Ragged", "padded"])
def test_one_graph_in_inference_and_in_training(kind: str) -> None:
    layer = a_model(bidirectional=kind == "padded")
    twin, counter = compiled(layer, "aot_eager" if kind == "Ragged" else "eager")
    for is_training in (True, False):
        before = counter.frame_count
        with torch.set_grad_enabled(is_training):
            for seed in range(3):
                assert_alike(twin, layer, kind, seed)
        # One for the first sizes, one for most others, and those for sizes that torch handles
        # separately.
        assert 1 <= counter.frame_count - before <= 4


def test_results_have_the_strides_of_graphs() -> None:
    torch.manual_seed(0)
    layer = a_model()
    results(compiled(layer)[0], "Ragged", 0)
    (name,) = (name for name, own in modules._registered.items() if own.module() is layer.cells[0])
    states = [torch.randn(size, 3, dtype=torch.float64).t() for size in (H, 2)]
    grads = [
        torch.randn(rows, size, dtype=torch.float64) for rows, size in ((7, H + 2), (3, H), (3, 2))
    ]
    weights = [*layer.cells[0].parameters(), *layer.cells[0].buffers()]
    values, offsets = torch.randn(7, D, dtype=torch.float64), torch.tensor([0, 4, 4, 7])
    given = name, [True] * len(weights), values, offsets, states, weights, False, True, False
    wanted = [part is not states[0] for part in (values, *states, *weights)]
    for operator, own in (
        (program_operator.program, given),
        (program_operator._backward, (*given, grads, wanted)),
    ):
        torch.library.opcheck(operator, own, test_utils="test_faketensor")


def test_a_graph_uses_the_current_module() -> None:
    layer = a_model()
    twin, _ = compiled(layer)
    assert_alike(twin, layer)
    before = results(layer, "Ragged", 0)
    layer.cells[0].decay = 0.5
    assert_alike(twin, layer)
    other = a_model()  # a module with equal names, while the first is alive
    assert_alike(compiled(other)[0], other)
    assert not torch.equal(results(twin, "Ragged", 0)[0], before[0])
    layer.load_state_dict({name: 0.5 * part for name, part in layer.state_dict().items()})
    assert_alike(twin, layer)
    layer.cells[0].twin.weight.requires_grad_(False)
    assert_alike(twin, layer)
    layer.cells[0].add_module("more", nn.Linear(2, 2, dtype=torch.float64).requires_grad_(False))
    assert_alike(twin, layer)
    (optimizer := torch.optim.SGD(layer.parameters(), 0.1)).zero_grad()
    twin(rl.Ragged([torch.randn(3, D, dtype=torch.float64)]))[0].values.sum().backward()
    optimizer.step()
    assert_alike(twin, layer)


def test_copies_run_by_themselves() -> None:
    layer = a_model()
    twin, _ = compiled(layer)
    assert_alike(twin, layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        next(other.cells.parameters()).add_(1.0)
    other.cells[0].decay = 0.5
    del layer, twin
    gc.collect()
    assert_alike(compiled(other)[0], other)


def test_a_deleted_module() -> None:
    graphs: list[Any] = []

    def keep(graph: Any, inputs: Any) -> Any:
        graphs.append(
            (graph, [part.clone() if isinstance(part, Tensor) else part for part in inputs])
        )
        return graph.forward

    layer = a_model()
    results(torch.compile(layer, backend=keep, fullgraph=True, dynamic=False), "dense", 0)
    graph, inputs = graphs[-1]
    graph(*inputs)
    del layer
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(
        DispatchError, match=r"cell must be .* is alive, in the process.*, got 'module Decaying "
    ):
        graph(*inputs)


def test_cells_that_cannot_be_part_of_a_graph() -> None:
    """Without fullgraph the graph breaks; a module that changed after compilation is refused by the
    operator.
    """

    class Held(Decaying):
        def __init__(self, input_size: int, hidden_size: int) -> None:
            super().__init__(input_size, hidden_size)
            self.register_buffer("scale", None)
            del self._buffers["scale"]
            vars(self)["scale"] = 0.5 * self.begin

    for cell, reason in (
        (Noisy, "draws random numbers"),
        (Whole, "its prepare cannot"),
        (Held, "neither a parameter"),
    ):
        layer = a_model(cell)
        with pytest.raises(
            torch._dynamo.exc.Unsupported, match=f"cannot be part of a graph: .*{reason}"
        ):
            results(compiled(layer)[0], "Ragged", 0)
    torch._dynamo.reset()
    with torch.no_grad():
        assert_alike(torch.compile(layer, backend="eager"), layer, "dense")
    layer = a_model()
    layer.cells[0] = Decaying(D, H)
    with pytest.raises(
        torch._dynamo.exc.Unsupported, match="none of the modules that its layer was built with"
    ):
        results(compiled(layer)[0], "Ragged", 0)
    layer = a_model(Noisy).eval()
    twin, _ = compiled(layer)
    assert_alike(twin, layer)
    layer.cells[0].train()
    with pytest.raises(
        (DispatchError, torch._dynamo.exc.Unsupported), match="draws random numbers"
    ):
        results(twin, "Ragged", 0)
