"""The backend ``program``: user-defined cells on the kernels, or in plain torch with the reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import raglane as rl
from every_layer import parts
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError
from raglane.kernels.program import backend, program_operator
from raglane.programs import gradients
from raglane.programs.graph import Refused
from raglane.programs.rules import trace

pytestmark = pytest.mark.skipif(
    bool(rl.native.missing_kernels()), reason="programs run on the cpu kernels"
)


class Scaled(nn.Module):
    """A unit with a plain attribute, a norm, and a state that decays."""

    def __init__(self, input_size: int = 5, hidden_size: int = 4) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.scale = input_size, hidden_size, 0.5
        self.linear, self.norm = (
            nn.Linear(input_size + hidden_size, hidden_size),
            nn.LayerNorm(hidden_size),
        )

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.scale * state + self.norm(self.linear(torch.cat([x_t, state], 1))).tanh()
        return (state if self.training else -state), state


class Arc(Scaled):
    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return state.atan(), 0.5 * state + x_t[:, :4]


class Hooked(Scaled):
    """A hook changes the gradient of its state, which a trace does not show."""

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = (state + x_t[:, :4]).tanh()
        if state.requires_grad:
            state.register_hook(lambda grad: 2 * grad)
        return state, state


def a_batch(
    dtype: torch.dtype = torch.float32, lengths: tuple[int, ...] = (3, 0, 1, 7)
) -> rl.Ragged:
    return rl.Ragged([torch.randn(length, 5, dtype=dtype) for length in lengths])


def reference(layer: Any, batch: rl.Ragged) -> Any:
    with rl.use_backend(backend="reference"):
        return layer(batch)


LAYERS = [
    lambda **options: rl.nn.LayerNormLSTM(5, 4, num_layers=2, bidirectional=True, **options),
    lambda **options: rl.nn.GRU(5, 4, reset_after=False, initial_state="learned", **options),
    lambda **options: rl.nn.LSTM(5, 4, backend="program", proj_size=3, **options),
    lambda **options: rl.nn.Recurrent(
        lambda *sizes: Scaled(*sizes).to(**options), 5, 4, bidirectional=True
    ),
]


@pytest.mark.parametrize("make", LAYERS)
def test_a_program_runs_with_gradients_of_both_orders(make: Any) -> None:
    layer, batch = make(dtype=torch.float64), a_batch(torch.float64, (2, 0, 1))
    assert rl.explain(layer, batch).backend == "program"
    wished = [batch.values.requires_grad_(), *layer.parameters()]

    def run(*_: Tensor) -> tuple[Tensor, ...]:
        out, state = layer(batch)
        return (out.values, *parts(state))

    assert torch.autograd.gradcheck(run, wished, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, wished, fast_mode=True)


@pytest.mark.parametrize("make", LAYERS)
def test_bits_are_those_of_a_sequence_alone(make: Any, any_threads: Callable[[int], None]) -> None:
    layer, batch = make(), a_batch(lengths=(30, 0, 1, 70, 9, 33, 64, 2, *[3] * 20))
    for training in (True, False):
        any_threads(2)
        layer.train(training)
        out, state = layer(batch)
        for index in range(9):
            alone, last = layer(batch[index : index + 1])
            assert torch.equal(alone.values, out[index])
            for one, other in zip(parts(last), parts(state), strict=True):
                assert torch.equal(one[:, 0], other[:, index])
        any_threads(1)
        assert torch.equal(layer(batch)[0].values, out.values)


def test_backward_twice_through_a_kept_graph() -> None:
    """Only the last backward pass overwrites saved tensors; another one after it raises."""
    layer, batch = rl.nn.LayerNormLSTM(5, 4, dtype=torch.float64), a_batch(torch.float64)
    total = layer(batch)[0].values.square().sum()
    first, second = (
        torch.autograd.grad(total, list(layer.parameters()), retain_graph=keep)
        for keep in (True, False)
    )
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(total, list(layer.parameters()))


class Raw(Scaled):
    """Its output is a product, of which the backward pass reads the activation, its state."""

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output = self.linear(torch.cat([x_t, state], 1))
        return output, output.tanh()


@pytest.mark.parametrize("ascending", [True, False])
def test_a_kernel_that_is_refused_in_a_call(
    ascending: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU may have a kernel for one pass and not for the other."""
    layer = rl.nn.SLSTM(3, 4, dtype=torch.float64)
    values = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def results() -> list[Tensor]:
        out, state = layer(rl.Ragged.from_flat(values, lengths=[2, 0, 4]))
        found = [out.values, *state]
        return [
            *found,
            *torch.autograd.grad(
                [part.cos().sum() for part in found], [values, *layer.parameters()]
            ),
        ]

    before = results()
    cpu = backend.MACHINES["cpu"]

    def refuse(lowered: Any, offsets: Any, direction: bool, *rest: Any) -> Any:
        if direction is ascending:
            raise Refused("its step holds too many numbers")
        return cpu.run_lowered(lowered, offsets, direction, *rest)

    monkeypatch.setitem(backend.MACHINES, "cpu", cpu._replace(run_lowered=refuse))
    torch.testing.assert_close(results(), before, rtol=1e-12, atol=1e-12)


class TwoBiases(Scaled):
    """Its biases are added in two places, and have the same gradient."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__(input_size, hidden_size)
        self.one, self.other = (nn.Parameter(torch.zeros(1, hidden_size)) for _ in range(2))

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        new = ((self.linear(torch.cat([x_t, state], 1)) + self.one) + (state + self.other)).tanh()
        return new, new


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (rl.nn.LSTM(3, 4, backend="program"), ("bias_ih_l0", "bias_hh_l0")),
        (rl.nn.Recurrent(TwoBiases, 3, 4, backend="program"), ("one", "other")),
    ],
)
def test_gradients_of_biases_are_separate(layer: nn.Module, names: tuple[str, str]) -> None:
    layer(rl.Ragged([torch.randn(2, 3)]))[0].values.sum().backward()
    found = [part for name, part in layer.named_parameters() if name.split(".")[-1] in names]
    one, other = (cast(Tensor, part.grad) for part in found)
    assert one.equal(other)
    one.zero_()
    assert other.any()


def test_results_stay_what_they_are() -> None:
    """A backward pass writes over nothing that the caller has."""
    for layer in (
        rl.nn.Recurrent(Raw, 5, 4),
        rl.nn.LayerNormLSTM(5, 4),
        rl.nn.RNN(5, 4, backend="program"),
    ):
        assert (
            rl.explain(layer, a_batch()).backend == "program"
        )  # what is overwritten is refused, too
        found: Any = layer.with_states(a_batch())
        results = [
            part.values if isinstance(part, rl.Ragged) else part for part in tree_leaves(found)
        ]
        kept = [part.detach().clone() for part in results]
        results[0].square().sum().backward()
        assert all(torch.equal(one, other) for one, other in zip(kept, results, strict=True))


class Single(Raw):
    """A step that forgets its state."""

    def step(self, x_t: Tensor, state: Tensor) -> Any:
        return super().step(x_t, state)[0]


def test_the_error_of_a_step_ends_with_one_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_warned", set())
    with (
        pytest.warns(UserWarning, match=r"Return output, state\.$"),
        pytest.raises(ArgumentTypeError),
    ):
        rl.nn.Recurrent(Single, 5, 4)(a_batch())


def test_a_step_that_cannot_be_a_program_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_warned", set())
    batch = a_batch()
    for kind, reason in (
        (Arc, "no program has the operation atan"),
        (Hooked, "it reads requires_grad of a tensor"),
    ):
        layer = rl.nn.Recurrent(kind, 5, 4)
        with pytest.warns(
            UserWarning, match=f"The cell 'module {kind.__name__}' runs in plain torch.*{reason}"
        ):
            out, _ = layer(batch)
        torch.testing.assert_close(out.values, reference(layer, batch)[0].values)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # once for each kind
            rl.nn.Recurrent(kind, 5, 4)(batch)
        choice = rl.explain(layer, batch)
        assert choice.backend == "reference"
        assert reason in choice.reason
        with pytest.raises(DispatchError, match=reason):
            rl.nn.Recurrent(kind, 5, 4, backend="program")(batch)


def test_a_warning_names_the_line_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = a_batch()
    monkeypatch.setattr(backend, "verify_call", lambda *_: "its values differ")
    backend._steps.clear()
    layers: list[Any] = [rl.nn.Recurrent(kind, 5, 4) for kind in (Arc, Arc, Scaled)]
    for model in (layers[0], nn.Sequential(layers[1]), layers[2]):
        monkeypatch.setattr(backend, "_warned", set())
        with pytest.warns(UserWarning, match="runs in plain torch") as caught:
            model(batch)
        line = Path(caught[0].filename).read_text().splitlines()[caught[0].lineno - 1]
        assert line.strip() == "model(batch)"
    backend._steps.clear()


def test_the_explanation_holds_the_program() -> None:
    layer, batch = rl.nn.Recurrent(Scaled, 5, 4), a_batch()
    choice = rl.explain(layer, batch, program=True)
    assert "traced and verified in" in choice.reason
    assert "given W1: weight, 4 x 4" in choice.program
    assert "norm(" in choice.program
    assert "next state0" in str(choice)
    assert not rl.explain(layer, batch).program


def test_a_program_holds_for_what_a_module_is_now() -> None:
    layer, batch = rl.nn.Recurrent(Scaled, 5, 4), a_batch()

    def agrees() -> None:
        torch.testing.assert_close(layer(batch)[0].values, reference(layer, batch)[0].values)

    agrees()
    cell: Any = layer.cells[0]
    before = layer(batch)[0].values
    cell.scale = -0.25
    agrees()
    assert not torch.equal(layer(batch)[0].values, before)
    layer.eval()
    agrees()
    with torch.no_grad():
        cell.linear.weight.mul_(0.5)
    agrees()
    cell.linear = nn.Sequential(nn.Linear(9, 6), nn.Linear(6, 4))
    agrees()
    handle = cell.linear[0].register_forward_hook(lambda *given: 2 * given[2])
    agrees()
    handle.remove()
    agrees()
    cell.norm.eps = 0.5
    agrees()


def test_values_that_a_step_reads_from_its_class_and_from_memory() -> None:
    class Own(nn.Module):
        input_size = hidden_size = 4
        factor = 0.9

        def __init__(self, weight: Tensor) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def gate(self, state: Tensor) -> Tensor:
            return state * self.factor

        def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            weight = self.weight if self.weight.is_contiguous() else 2 * self.weight
            state = (self.gate(state) + x_t) @ weight
            return state, state

    batch, weight = rl.Ragged([torch.randn(3, 4)]), torch.randn(4, 4)

    def agrees(cell: nn.Module) -> None:
        found, wanted = (
            rl.nn.Recurrent(cell, backend=name)(batch)[0].values
            for name in ("program", "reference")
        )
        torch.testing.assert_close(found, wanted)

    agrees(Own(weight))
    agrees(Own(weight.t()))
    Own.factor = 0.1
    agrees(Own(weight))
    Own.gate = lambda _, state: 2 * state  # type: ignore[assignment, method-assign]
    agrees(Own(weight))


def test_one_trace_for_all_layers_of_a_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    backend._steps.clear()
    traces: list[Any] = []

    def counted(step: Any) -> Any:
        traces.append(step)
        return trace(step)

    monkeypatch.setattr(backend, "trace", counted)
    cases: list[tuple[dict[str, Any], int]] = [({"num_layers": 4}, 1), ({"bidirectional": True}, 1)]
    for options, count in (*cases, ({"dtype": torch.float64}, 2)):
        layer = rl.nn.LayerNormLSTM(5, 5, **options)
        for lengths in ((3, 0, 1, 7), (2,)):
            layer(a_batch(options.get("dtype", torch.float32), lengths))
        assert len(traces) == count


def test_rounding_is_no_reason_to_refuse() -> None:
    """An sLSTM divides by a state that is nearly 0 for some random numbers."""
    for _ in range(20):
        layer = rl.nn.SLSTM(3, 13)
        for weight in layer.parameters():
            nn.init.normal_(weight, std=0.5)
        backend._steps.clear()
        assert rl.explain(layer, rl.Ragged([torch.randn(2, 3)])).backend == "program"


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = rl.nn.LayerNormGRU(5, 4, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.layer(x, lengths=lengths)[0]


def test_a_graph_holds_cells_of_the_library_and_leaves_others_out() -> None:
    x, lengths, model = torch.randn(3, 6, 5), torch.tensor([6, 2, 0]), Padded()
    exported: Any = torch.export.export(model, (x, lengths))
    assert "raglane.program" in exported.graph_module.code
    torch.testing.assert_close(exported.module()(x, lengths), model(x, lengths))
    layer, batch = rl.nn.Recurrent(Scaled, 5, 4), a_batch()
    compiled = torch.compile(layer, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(batch)[0].values, layer(batch)[0].values)
    with pytest.raises(ArgumentError, match=r"cell must be .*got 'none'"):
        torch.ops.raglane.program(
            "none", [], batch.values, batch.offsets, [batch.values], [], False, True, False
        )


def test_a_step_that_asks_whether_gradients_are_recorded_is_refused() -> None:
    class Asking(nn.Module):
        input_size = hidden_size = 4

        def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            state = state + x_t if torch.is_grad_enabled() else state - x_t
            return state, state

    choice = rl.explain(rl.nn.Recurrent(Asking()), rl.Ragged([torch.randn(3, 4)]))
    assert choice.backend == "reference"
    assert "something else where no gradients are recorded" in choice.reason


def test_the_first_call_within_an_operator_verifies_gradients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    monkeypatch.setattr(backend, "_warned", set())
    layer, batch = rl.nn.LayerNormGRU(5, 3), a_batch()
    weights, state = [*layer.parameters()], torch.zeros(4, 3)
    present = [part is not None for part in layer._weights()[0]]

    def call() -> None:
        backend._steps.clear()
        values, offsets = batch.values, batch.offsets
        with torch.no_grad():
            program_operator.program(
                "layernorm_gru", present, values, offsets, [state], weights, False, True, False
            )

    right = gradients._RULES["tanh"]

    def wrong(gradient: Any, *operands: Any) -> Any:
        return right(gradient * 2.0, *operands)

    with monkeypatch.context() as patch:
        patch.setitem(gradients._RULES, "tanh", wrong)
        with pytest.warns(UserWarning, match="the gradients of its program differ"):
            call()
    assert not list(tmp_path.iterdir())
    fail: Any = pytest.fail
    with torch.autograd.graph.saved_tensors_hooks(fail, fail):  # such as those of a checkpoint
        call()  # a warning would be an error
    assert [file.parent.name for file in tmp_path.rglob("*.json")] == ["programs"]
    backend._steps.clear()
