"""One step of a layer with packed weights: the fast path has the bits, the errors and the hooks of a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import raglane as rl
from every_layer import parts
from raglane.errors import ArgumentTypeError, ShapeError
from raglane.native.library import operators
from raglane.nn.recurrent import at_once, call

pytestmark = pytest.mark.host

LAYERS: dict[str, Callable[..., torch.nn.Module]] = {
    "rnn": rl.nn.RNN,
    "lstm": rl.nn.LSTM,
    "projected": partial(rl.nn.LSTM, proj_size=3),
    "no bias": partial(rl.nn.LSTM, bias=False),
    "gru": rl.nn.GRU,
    "mingru": rl.nn.MinGRU,
    "minlstm": rl.nn.MinLSTM,
    "indrnn": rl.nn.IndRNN,
    "qrnn": rl.nn.QRNN,
    "sru": rl.nn.SRU,
}


@pytest.fixture(name="fast")
def count_fast_steps(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each step has used the fast path."""
    if operators() is None:
        pytest.skip("raglane was installed without torch's operators")
    original, used = at_once.step, list[bool]()

    def counted(*args: Any) -> Any:
        result = original(*args)
        used.append(result is not None)
        return result

    monkeypatch.setattr("raglane.nn.recurrent.layer.step", counted)
    return used


def steps(layer: Any, inputs: Tensor, state: Any = None) -> list[Tensor]:
    outputs = []
    for x_t in inputs:
        out, state = layer.step(x_t, state)
        outputs += [out, *parts(state)]
    return outputs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (7, 5)])
@pytest.mark.parametrize("name", LAYERS)
def test_has_the_bits_of_a_call(
    name: str, shape: tuple[int, ...], batch_first: bool, dtype: torch.dtype, fast: list[bool]
) -> None:
    is_int8 = dtype is torch.int8
    if is_int8 and name not in ("rnn", "lstm", "projected", "no bias", "gru"):
        pytest.skip("the cell has no int8 weights")
    layer: Any = (
        LAYERS[name](5, 17, batch_first=batch_first).to(torch.float32 if is_int8 else dtype).eval()
    )
    inputs = torch.randn(4, *shape).to(torch.float32 if is_int8 else dtype)
    with torch.no_grad():
        unpacked = steps(layer, inputs)
        assert fast == [True] * 3  # the first step has no state
        (rl.quantize if is_int8 else rl.pack_weights)(layer)
        with torch.nn.modules.module.register_module_forward_hook(lambda *_: None):
            wanted = steps(layer, inputs)  # a hook prevents the fast path
        fast.clear()
        got = steps(layer, inputs)
    assert fast == [True] * 3
    for results in (got,) if is_int8 else (got, unpacked):
        pairs = zip(results, wanted, strict=True)
        assert all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


def prepared() -> tuple[Any, Tensor, Any]:
    layer = rl.pack_weights(rl.nn.LSTM(5, 17).eval())
    with torch.no_grad():
        return layer, torch.randn(3, 5), layer.step(torch.randn(3, 5))[1]


def test_runs_hooks() -> None:
    layer, x_t, state = prepared()
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    with torch.no_grad():
        layer.step(x_t, state)
    assert calls == [1]


def test_gradients_use_the_call(fast: list[bool]) -> None:
    layer, x_t, state = prepared()
    layer.step(x_t, state)[0].sum().backward()
    assert fast == [False]
    assert layer.weight_ih_l0.grad is not None


def test_changed_weights(fast: list[bool]) -> None:
    layer, x_t, state = prepared()
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)
        got = layer.step(x_t, state)[0]
        other = rl.nn.LSTM(5, 17)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(got, other.step(x_t, state)[0])
    assert fast == [True, True]


@pytest.mark.parametrize(
    "change", [lambda x: x.t().contiguous().t(), torch._neg_view, lambda x: x.repeat(1, 2)[:, :5]]
)
def test_inputs_of_any_layout(fast: list[bool], change: Callable[[Tensor], Tensor]) -> None:
    layer, x_t, state = prepared()
    x_t = change(x_t)
    with torch.no_grad():
        assert torch.equal(
            layer.step(x_t, state)[0], layer.step(x_t.resolve_neg().contiguous(), state)[0]
        )
    assert fast[1]


@pytest.mark.parametrize(
    ("x_t", "state", "words"),
    [
        (torch.zeros(3, 4), None, r"input_size = 5 features, got elements of shape \(4,\)"),
        (torch.zeros(3, 5).double(), None, r"input must be of dtype torch\.float32"),
        (torch.zeros(3, 5), (), r"hx must be a tuple \(h, c\)"),
        (torch.zeros(3, 5), (torch.zeros(1, 3, 17),), r"hx must be a tuple \(h, c\)"),
        (
            torch.zeros(3, 5),
            (torch.zeros(1, 2, 17), torch.zeros(1, 3, 17)),
            r"hx \(h\) .* got shape \(1, 2, 17\)",
        ),
        (
            torch.zeros(3, 5),
            (torch.zeros(1, 3, 17), torch.zeros(1, 3, 16)),
            r"hx \(c\) .* got shape \(1, 3, 16\)",
        ),
        (
            torch.zeros(3, 5),
            (torch.zeros(1, 4, 17), torch.zeros(1, 4, 17)),
            r"hx \(h\) .* got shape \(1, 4, 17\)",
        ),
        (
            torch.zeros(5),
            (torch.zeros(1, 1, 17), torch.zeros(1, 1, 17)),
            r"hx \(h\) must be of shape \(1, 17\)",
        ),
        (torch.zeros(1, 3, 5), None, r"x_t must be a tensor \(B, input_size\)"),
    ],
)
def test_wrong_tensors(fast: list[bool], x_t: Tensor, state: Any, words: str) -> None:
    layer, right, own = prepared()
    with torch.no_grad():
        layer.step(right, own)
        assert fast == [True]
        with pytest.raises((ShapeError, ArgumentTypeError), match=words):
            layer.step(x_t, own if state is None else state)


def test_results_do_not_share_memory(fast: list[bool]) -> None:
    layer, x_t, state = prepared()
    with torch.no_grad():
        out, (h, c) = layer.step(x_t, state)
    assert fast == [True]
    assert len({part.data_ptr() for part in (out, h, c, x_t, *state)}) == 6


def test_a_function_mode_sees_the_whole_call(fast: list[bool]) -> None:
    layer, x_t, state = prepared()

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with torch.no_grad():
        wanted = layer.step(x_t, state)[0]
        with Mode():
            assert layer.step(x_t, state)[0].equal(wanted)
    assert fast == [True, False]


def test_two_directions_have_no_step(fast: list[bool]) -> None:
    layer = rl.pack_weights(rl.nn.GRU(5, 17, bidirectional=True).eval())
    with torch.no_grad():
        layer(torch.zeros(1, 3, 5))
        with pytest.raises(ArgumentTypeError, match="a layer of one direction"):
            layer.step(torch.zeros(3, 5), torch.zeros(2, 3, 17))
    assert fast == [False]


def test_a_changed_bias_ends_it(fast: list[bool]) -> None:
    layer, x_t, state = prepared()
    layer.bias = False
    with torch.no_grad():
        layer.step(x_t, state)  # makes the plan of the next
        found = layer.step(x_t, state)[0]
    other = rl.nn.LSTM(5, 17, bias=False)
    other.load_state_dict({name: layer.state_dict()[name] for name in other.state_dict()})
    with torch.no_grad():
        assert found.equal(other.step(x_t, state)[0])
    assert fast == [True, True, True]


def test_episodes_in_two_layouts_do_not_mix(fast: list[bool]) -> None:
    """A step whose state is no tensor with a row for each stream is refused, not run without resets."""
    layer, x_t, state = prepared()
    with torch.no_grad(), pytest.raises((ShapeError, ArgumentTypeError)):
        layer.step(x_t, (state[0][:, :2], state[1]), resets=torch.tensor([True, False, True]))
    assert not fast


def test_wrong_tensors_of_the_operator() -> None:
    """The operator can be called by anyone."""
    loaded = operators()
    if loaded is None:
        pytest.skip("raglane was installed without torch's operators")
    layer, x_t, (h, c) = prepared()
    plan: Any = call.plan_of(layer, layer._weights(), x_t)
    packed = plan.stored.packed_for(layer._weights())[0]
    head = plan.kernel.head(packed)

    def runs(head: Tensor, packed: Tensor, x_t: Tensor, *others: Any) -> bool:
        return bool(loaded.infer_packed(head, packed, None, x_t, *others))

    assert runs(head, packed, x_t, h, c, True, 6)
    wrong: list[tuple[Any, ...]] = [
        (head[:-1], packed, x_t, h, c, True, 6),
        (head.int(), packed, x_t, h, c, True, 6),
        (torch.cat([head, head]), packed, x_t, h, c, True, 6),
        (head, packed[:-1], x_t, h, c, True, 6),
        (head, packed.float(), x_t, h, c, True, 6),
        (head, torch.zeros_like(packed), x_t, h, c, True, 6),
        (head, packed, x_t[:, :4], h, c, True, 6),
        (head, packed, x_t.double(), h, c, True, 6),
        (head, packed, x_t[None], h, c, True, 6),
        (head, packed, x_t, h, None, True, 6),
        (head, packed, x_t, None, c, True, 6),
        (head, packed, x_t, h[:, :2], c, True, 6),
        (head, packed, x_t, h, c[..., :16], True, 6),
        (head, packed, x_t, h, c.double(), True, 6),
        (head, packed, x_t, h, c, True, 7),
        (head, packed, x_t, h, c, True, 4),
        *[(head, packed, x_t, h, c, True, layout) for layout in (-1, 0, 1, 3, 8)],
    ]
    for arguments in wrong:
        assert not runs(*arguments)
    short = x_t.clone()
    short.untyped_storage().resize_(8)
    assert not runs(head, packed, short, h, c, True, 6)
