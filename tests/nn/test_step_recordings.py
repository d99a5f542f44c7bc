"""A step of a block records its operations once, and follows every change of the block."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrize

import raglane as rl
from raglane.kernels.cpu.steps import can_step, run_block
from raglane.native import missing_kernels
from raglane.nn.mixers import step_table

WIDTH, ROWS = 6, 2
OPTIONS: dict[str, dict[str, Any]] = {
    "Mamba2": {"state_size": 5, "head_dim": 3, "num_groups": 2, "dt_limit": (0.01, 0.9)},
    "RGLRU": {"num_heads": 2},
    "MLSTM": {"num_heads": 2, "key_size": 4, "bias": True},
    "GatedDeltaNet": {"num_heads": 2, "num_value_heads": 4, "key_size": 3, "value_size": 5},
}
blocks = pytest.mark.parametrize("name", list(OPTIONS))


def _are_built() -> bool:
    with torch.no_grad():
        return missing_kernels() is None and can_step(torch.zeros(1))


pytestmark = pytest.mark.skipif(not _are_built(), reason="the operators of steps are not built")


class Steps:
    """A layer, and how often a step was recorded and run by the kernels."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch, layers: int = 1) -> None:
        torch.manual_seed(0)
        self.layer: Any = getattr(rl.nn, name)(WIDTH, WIDTH, layers, **OPTIONS[name])
        self.recorded = 0
        self.run = 0
        monkeypatch.setattr(step_table, "StepTable", self._table)
        monkeypatch.setattr(step_table, "run_block", self._run)
        self.change(lambda parameter: parameter.add_(torch.randn_like(parameter), alpha=0.3))
        self.check()

    _kind = step_table.StepTable

    def _table(self, *arguments: Any) -> Any:
        self.recorded += 1
        return self._kind(*arguments)

    def _run(self, *arguments: Any) -> list[Tensor]:
        self.run += 1
        return run_block(*arguments)

    @torch.no_grad()
    def change(self, function: Callable[[Any], Any]) -> None:
        for parameter in self.layer.parameters():
            function(parameter)

    @torch.no_grad()
    def check(self, recorded: int | None = 0, run: int = 1, layer: Any = None) -> None:
        """Compare a step with the same element as a whole sequence, which no table computes."""
        layer = self.layer if layer is None else layer
        dtype = next(layer.parameters()).dtype
        rows = torch.randn(ROWS, WIDTH, dtype=dtype)
        sizes = layer.state_sizes
        state = tuple([torch.rand(layer.num_layers, ROWS, size, dtype=dtype) for size in sizes])
        before = (self.recorded, self.run)
        y, after = layer.step(rows, state)
        if before != (0, 0):
            assert recorded is None or self.recorded - before[0] == recorded
            assert self.run - before[1] == run * layer.num_layers
        expected, end = layer(rl.Ragged([row.unsqueeze(0) for row in rows]), state)
        equal = torch.equal if run else _is_close
        assert equal(y, expected.values)
        assert all(map(equal, after, end))


def _is_close(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, atol=1e-5)


class LowRank(nn.Module):
    """A linear layer with an addition of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.calls = 0
        self.down = nn.Parameter(torch.randn(2, base.in_features))
        self.up = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, rows: Tensor) -> Tensor:
        self.calls += 1
        result: Tensor = self.base(rows) + rows @ self.down.t() @ self.up.t()
        return result


def _linears(layer: Any) -> list[str]:
    return [name for name, each in layer.named_children() if type(each) is nn.Linear]


@blocks
def test_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch)
    for _ in range(3):
        steps.check()
    assert steps.recorded == 1
    stack = Steps(name, monkeypatch, layers=2)
    stack.check()
    assert stack.recorded == 2


@blocks
def test_numbers_of_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch)
    changes: list[Callable[[Any], Any]] = [
        lambda parameter: parameter.mul_(1.1),
        lambda parameter: parameter.data.mul_(0.9),
        lambda parameter: parameter.detach().numpy().__imul__(1.1),
        lambda parameter: setattr(parameter, "data", parameter * 0.8),
    ]
    for change in changes:
        steps.change(change)
        steps.check()
    optimizer = torch.optim.SGD(steps.layer.parameters(), 0.01)
    steps.layer(torch.randn(1, 3, WIDTH))[0].sum().backward()
    optimizer.step()
    steps.check()
    other = {key: each + 0.1 for key, each in steps.layer.state_dict().items()}
    steps.layer.load_state_dict(other)
    steps.check()
    steps.layer.load_state_dict(other, assign=True)
    steps.check()


@blocks
def test_other_dtypes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch)
    steps.layer.double()
    steps.check(recorded=1)
    steps.check()
    steps.layer.float()
    steps.check(recorded=1)
    assert next(steps.layer.parameters()).dtype is torch.float32


@blocks
def test_replaced_parameters_and_modules(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch)
    for module in steps.layer.modules():
        for key, parameter in list(module._parameters.items()):
            if parameter is not None:
                setattr(module, key, nn.Parameter(parameter.detach() + 0.1))
                steps.check()
    for key in _linears(steps.layer):
        linear = getattr(steps.layer, key)
        sizes = (linear.in_features, linear.out_features)
        setattr(steps.layer, key, nn.Linear(*sizes, bias=linear.bias is not None))
        steps.check()
        # One with a bias in place of one without, and the other way round.
        setattr(steps.layer, key, nn.Linear(*sizes, bias=linear.bias is None))
        steps.check(recorded=1)
        getattr(steps.layer, key).bias = linear.bias
        steps.check(recorded=1)


@blocks
def test_low_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch)
    for key in _linears(steps.layer):
        linear = getattr(steps.layer, key)
        adapter = LowRank(linear)
        setattr(steps.layer, key, adapter)
        steps.check(recorded=1, run=0)
        assert adapter.calls == 2
        setattr(steps.layer, key, linear)
        steps.check()


@blocks
def test_hooks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch)
    called: list[Any] = []
    for key in _linears(steps.layer):
        linear = getattr(steps.layer, key)
        for register in (linear.register_forward_hook, linear.register_forward_pre_hook):
            hook = register(lambda module, *_: called.append(module))
            steps.check(run=0)
            hook.remove()
            assert called == [linear, linear]  # of the step and of the whole sequence
            called.clear()
            steps.check()
        linear.forward = MethodType(
            lambda module, rows: nn.Linear.forward(module, rows) + 1, linear
        )
        steps.check(run=0)
        del linear.forward
        steps.check()
    hook = register_module_forward_pre_hook(lambda module, _: called.append(module))
    steps.check(run=0)
    hook.remove()
    assert {*map(id, called)} >= {id(getattr(steps.layer, key)) for key in _linears(steps.layer)}
    steps.check()


@blocks
def test_attributes_and_equations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch)
    block = steps.layer.cells[0]
    for key, number in (("eps", 0.3), ("dt_limit", (0.02, 0.03))):
        if hasattr(block, key):
            setattr(block, key, number)
            steps.check(recorded=1)
    kind = type(block)
    mix = kind.mix

    def doubled(self: Any, x: Any, states: Any, way: Any) -> Any:
        output, after = mix(self, x, states, way)
        return output + output, after

    monkeypatch.setattr(kind, "mix", doubled)
    steps.check(recorded=1)
    monkeypatch.setattr(kind, "mix", mix)
    steps.check(recorded=1)
    block.mix = MethodType(doubled, block)
    steps.check(recorded=1)


@blocks
def test_the_norm_between_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch, layers=2)
    norm = steps.layer.cells[1].residual_norm
    norm.eps = 0.5
    steps.check(recorded=1)
    steps.layer.cells[1].residual_norm = None
    steps.check(recorded=1)
    steps.layer.cells[1].residual_norm = norm
    steps.check(recorded=1)


class _Doubled(nn.Module):
    def forward(self, numbers: Tensor) -> Tensor:
        return 2 * numbers


@blocks
def test_computed_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch)
    for module in list(steps.layer.cells[0].modules()):
        for key in [each for each, one in module._parameters.items() if one is not None]:
            parametrize.register_parametrization(module, key, _Doubled())
            steps.check(recorded=1, run=0)
            parametrize.remove_parametrizations(module, key)
    steps.check(recorded=None)


def test_shared_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps("MLSTM", monkeypatch)
    apart = steps.layer.k.weight
    steps.layer.k.weight = steps.layer.q.weight
    steps.check()
    steps.layer.cells[0].heads = steps.layer.cells[0].heads  # a new recording
    steps.check(recorded=1, run=0)
    steps.layer.k.weight = apart
    steps.check(recorded=1)


@blocks
def test_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(name, monkeypatch)
    for other in (copy.deepcopy(steps.layer), pickle.loads(pickle.dumps(steps.layer))):
        steps.check(recorded=1, layer=other)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(1.5)
        steps.check(layer=other)
        steps.check()
