"""Stacks of layers that one call of C runs in inference, and dense tensors that it reads in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

import raglane as rl
from every_layer import parts
from raglane.errors import ArgumentTypeError, RaglaneError, ShapeError
from raglane.kernels.cpu import backend
from raglane.kernels.cpu.layer import heads_of
from raglane.native import library
from raglane.nn.recurrent import call, inputs

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(
        library.operators() is None, reason="raglane was installed without torch's operators"
    ),
]

LAYERS: dict[str, Callable[..., Any]] = {
    "lstm": rl.nn.LSTM,
    "projected": partial(rl.nn.LSTM, proj_size=3),
    "no bias": partial(rl.nn.GRU, bias=False),
    "rnn": rl.nn.RNN,
    "indrnn": rl.nn.IndRNN,
    "minlstm": rl.nn.MinLSTM,
    "sru": rl.nn.SRU,
    "qrnn": rl.nn.QRNN,
}
LENGTHS = [3, 1, 6, 4]
KINDS = "ragged", "dense", "padded", "pack", "one", "one step", "strided"


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each call in inference appends True if C ran it at once."""
    ran: list[bool] = []

    infer = backend.infer

    def counted(*arguments: Any) -> Any:
        result = infer(*arguments)
        ran.append(bool(result))
        return result

    monkeypatch.setattr(backend, "infer", counted)
    return ran


def an_input(kind: str, batch_first: bool, dtype: torch.dtype) -> tuple[Any, dict[str, Any], int]:
    """Return an input, further arguments of the call, and the number of sequences; 0 for no batch."""
    batch = rl.Ragged([torch.randn(length, 5).to(dtype) for length in LENGTHS])
    if kind == "ragged":
        return batch, {}, 4
    if kind == "pack":
        return batch.to_packed(), {}, 4
    if kind == "one":
        return torch.randn(6, 5).to(dtype), {}, 0
    if kind == "padded":
        return batch.to_padded(batch_first=batch_first)[0], {"lengths": batch.lengths}, 4
    shape = (4, 6, 5) if batch_first else (6, 4, 5)
    if kind == "one step":
        shape = (4, 1, 5) if batch_first else (1, 4, 5)
    given = torch.randn(*shape).to(dtype)
    return given.mT.contiguous().mT if kind == "strided" else given, {}, 4


def tensors_of(result: Any) -> list[Tensor]:
    out, state = result
    if isinstance(out, rl.Ragged):
        out = out.values
    if isinstance(out, PackedSequence):
        out = out.data
    return [*([] if out is None else [out]), *parts(state)]


def assert_equal(found: Any, wanted: Any) -> None:
    pairs = list(zip(tensors_of(found), tensors_of(wanted), strict=True))
    assert all(one.shape == other.shape and one.equal(other) for one, other in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_inference_has_the_bits_of_a_recorded_call(
    name: str, bidirectional: bool, layers: int, kind: str, stacks: list[bool]
) -> None:
    for batch_first in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            options = {"bidirectional": bidirectional, "batch_first": batch_first, "dtype": dtype}
            layer = LAYERS[name](5, 7, layers, **options)
            given, arguments, count = an_input(kind, batch_first, dtype)
            wanted = layer(given, **arguments)
            directions = layers * (2 if bidirectional else 1)
            states = tuple(
                torch.randn(directions, *[count] * (count > 0), size).to(dtype)
                for size in layer.state_sizes
            )
            state = states if len(states) > 1 else states[0]
            stacks.clear()
            with torch.no_grad():
                assert_equal(layer(given, **arguments), wanted)
                nothing, final = layer(given, return_output=False, **arguments)
                assert nothing is None
                assert_equal((None, final), (None, wanted[1]))
                found = layer(given, state, **arguments)
            assert_equal(found, layer(given, state, **arguments))
            assert stacks == [True] * 3


@pytest.mark.parametrize("is_int8", [False, True])
@pytest.mark.parametrize("shape", [(5,), (1, 5), (7, 5)])
@pytest.mark.parametrize("name", ["lstm", "projected", "no bias", "rnn"])
def test_frozen_stacks_and_their_steps(
    name: str, shape: tuple[int, ...], is_int8: bool, stacks: list[bool], monkeypatch: Any
) -> None:
    layer = LAYERS[name](5, 7, 2).eval()
    (rl.quantize if is_int8 else rl.pack_weights)(layer)
    steps = torch.randn(4, *shape)

    def run() -> list[Tensor]:
        results, state = [], None
        for x_t in steps:
            out, state = layer.step(x_t, state)
            results += [out, *parts(state)]
        return [*results, *tensors_of(layer(rl.Ragged([torch.randn(3, 5)])))]

    with torch.no_grad():
        torch.manual_seed(1)
        found = run()
        assert stacks
        assert all(stacks)
        monkeypatch.setattr(backend, "infer", lambda *_: [])
        torch.manual_seed(1)
        wanted = run()
    assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))


def test_dense_tensors_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients Python makes no offsets."""
    monkeypatch.setattr(inputs, "_even", None)
    for batch_first, shape in ((True, (3, 4, 5)), (False, (1, 4, 5)), (False, (4, 1, 5))):
        layer = rl.nn.LSTM(5, 7, batch_first=batch_first)
        with torch.no_grad():
            assert layer(torch.randn(shape))[0].shape == (*shape[:2], 7)


WRONG: list[tuple[Any, Any, type[RaglaneError], str]] = [
    (torch.zeros(6, 4, 3), None, ShapeError, r"input_size = 5 features"),
    (torch.zeros(6, 4, 5).double(), None, ShapeError, "input must be of dtype"),
    (torch.zeros(6, 4, 5), (), ArgumentTypeError, r"hx must be a tuple \(h, c\)"),
    (torch.zeros(6, 4, 5), torch.zeros(2, 4, 7), ArgumentTypeError, "hx must be a tuple"),
    (torch.zeros(6, 4, 5), ("h", "c"), ArgumentTypeError, "hx must be a tuple"),
    (torch.zeros(6, 4, 5), (1, 2), ArgumentTypeError, "hx must be the initial state"),
    (
        torch.zeros(6, 4, 5),
        (torch.zeros(2, 4, 7), torch.zeros(2, 4, 6)),
        ShapeError,
        r"hx \(c\) must be of shape \(2, 4, 7\)",
    ),
    (
        torch.zeros(6, 4, 5),
        (torch.zeros(4, 4, 7), torch.zeros(4, 4, 7)),
        ShapeError,
        r"hx \(h\) must be of shape \(2, 4, 7\)",
    ),
    (
        torch.zeros(6, 4, 5),
        (torch.zeros(2, 4, 7).double(), torch.zeros(2, 4, 7)),
        ShapeError,
        r"hx \(h\) must be of dtype",
    ),
    (torch.zeros(6, 4, 5).to_sparse(), None, ShapeError, "input must be a dense tensor"),
]


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(("given", "hx", "error", "words"), WRONG)
def test_wrong_arguments(
    given: Tensor, hx: Any, error: type[RaglaneError], words: str, layers: int
) -> None:
    if layers == 1 and isinstance(hx, tuple) and hx and isinstance(hx[0], Tensor):
        hx = tuple(state[: state.shape[0] // 2] for state in hx)
        words = words.replace("(2, 4, 7)", "(1, 4, 7)").replace(r"\(2, 4", r"\(1, 4")
    layer = rl.nn.LSTM(5, 7, layers).eval()
    with torch.no_grad(), pytest.raises(error, match=words):
        layer(given, hx)


def test_a_wrong_weight_of_an_upper_layer_is_named() -> None:
    layer = rl.nn.LSTM(5, 7, 2).eval()
    layer.weight_hh_l1.data = torch.zeros(28, 6)
    with torch.no_grad(), pytest.raises(ShapeError, match="weight_hh_l1"):
        layer(torch.zeros(6, 4, 5))


def test_changed_weights_and_negative_views(stacks: list[bool]) -> None:
    layer = rl.pack_weights(rl.nn.GRU(5, 7, 2).eval())
    given = torch.randn(6, 4, 5)
    with torch.no_grad():
        layer(given)
        layer.get_parameter("weight_hh_l1").mul_(2)
        other = rl.nn.GRU(5, 7, 2).eval()
        other.load_state_dict(layer.state_dict())
        assert_equal(layer(given), other(given))
        stacks.clear()
        assert_equal(layer(torch._neg_view(-given)), layer(given))
    assert stacks == [False, True]


def in_autocast(call: Callable[[], Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return call()


def in_a_transformation(call: Callable[[], Tensor]) -> Tensor:
    return torch.func.vmap(lambda share: call() * share)(torch.ones(2))[1]


def in_a_dispatch_mode(call: Callable[[], Tensor]) -> Tensor:
    with Dispatched() as mode:
        result = call()
    assert mode.names
    return result


class Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the names of torch's operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [in_autocast, in_a_transformation, in_a_dispatch_mode])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_mode_of_torch_sees_a_whole_call(
    mode: Callable[[Callable[[], Tensor]], Tensor],
    is_packed: bool,
    layers: int,
    stacks: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = rl.nn.LSTM(5, 7, layers).eval()
    if is_packed:
        rl.pack_weights(layer)
    given, state = torch.randn(6, 1, 5), (torch.randn(layers, 1, 7), torch.randn(layers, 1, 7))
    calls: list[Callable[[], Tensor]] = [
        lambda: layer(given, state)[0].float(),
        lambda: layer(rl.Ragged([given[:, 0]]), state)[0].values.float(),
        lambda: layer.step(given[0], state)[0].float(),
    ]
    with torch.no_grad():
        for one in calls:
            one()
        assert stacks == [True] * 3
        stacks.clear()
        found = [mode(one) for one in calls]
        assert not any(stacks)
        monkeypatch.setattr(backend, "infer", lambda *_: [])
        wanted = [mode(one) for one in calls]
    assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))


def test_dropout_between_layers_acts_in_training_without_gradients() -> None:
    layer = rl.nn.LSTM(5, 7, 2, dropout=0.5)
    given = torch.randn(6, 4, 5)
    with torch.no_grad():
        assert not torch.equal(layer(given)[0], layer(given)[0])
        assert torch.equal(layer.eval()(given)[0], layer(given)[0])


def test_random_sizes_of_a_stack_are_refused_or_inside() -> None:
    """The operator can be called by anyone."""
    operators = library.operators()
    assert operators is not None
    layer = rl.nn.GRU(5, 4, 2)
    weights = layer._weights()
    plan = call.plan_of(layer, weights, torch.zeros(1, 5))
    heads = heads_of(plan.kernels, ())
    flat = [weight for direction in weights for weight in direction]
    values, offsets = torch.randn(6, 5), torch.tensor([0, 2, 6])
    state = torch.zeros(2, 2, 4)

    def runs(heads: Tensor, sizes: Any, values: Tensor, states: Any, *others: Any) -> bool:
        h, c = (*states, None)[:2]
        return bool(operators.infer(heads, sizes, values, h, c, *others))

    assert runs(heads, offsets, values, [state], flat, False, True, None, 0)
    wrong: list[tuple[Any, ...]] = [
        (heads[:0], offsets, values, [state], flat, False, True, None, 0),
        (heads[:-1], offsets, values, [state], flat, False, True, None, 0),
        (heads.int(), offsets, values, [state], flat, False, True, None, 0),
        (heads, None, values, [state], flat, False, True, None, 0),
        (heads, offsets, values, [state], [], False, True, None, 0),
        (heads, offsets, values, [state, state], flat, False, True, None, 0),
        (heads, offsets, values, [state[:1]], flat, False, True, None, 0),
        (heads, offsets, values, [state[:, :1]], flat, False, True, None, 0),
        (heads, offsets, values, [state[0]], flat, False, True, None, 0),
        (heads, offsets, values, [torch.zeros(())], flat, False, True, None, 0),
        (heads, offsets, values, [state], flat[1:], False, True, None, 0),
        (heads, offsets, values, [state], [*flat[5:], *flat[:5]], False, True, None, 0),
        (heads, offsets, values, [state], [torch.zeros(64)], True, True, None, 0),
        (heads, offsets, values, [state], [None, None], True, True, None, 0),
        (heads, offsets, values, [state], [torch.zeros(64)] * 2, True, True, None, 0),
        (heads.view(2, -1).flip(0).flatten(), offsets, values, [state], flat, False, True, None, 0),
        (heads, offsets + 1, values, [state], flat, False, True, None, 0),
        (heads, offsets, values, [state], flat, False, True, None, 4),
        (heads, None, values, [state], flat, False, True, None, 6),
        (heads, None, values, [state], flat, False, True, None, 7),
        (heads, None, values, [state], flat, False, True, None, 8),
        (heads, None, values, [state[:, 0]], flat, False, True, None, 4),
        (heads, offsets, values[None].expand(2, 6, 5), [state], flat, False, True, None, 5),
    ]
    for arguments in wrong:
        assert not runs(*arguments)
