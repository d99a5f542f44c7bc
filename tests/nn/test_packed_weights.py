"""``rl.pack_weights``: the same bits from packed weights, until a weight changes; and int8 weights."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import KINDS, D, H, a_batch, build, results_of
from own_cells import Fixed
from raglane.errors import ArgumentError, ArgumentTypeError, DispatchError
from raglane.kernels.cpu.layer import layer_of
from raglane.native import missing_kernels
from raglane.native.library import has_cell

pytestmark = pytest.mark.host

if missing := missing_kernels():
    pytest.skip(missing, allow_module_level=True)

FAST = [kind for kind in KINDS if has_cell(kind.cell)]
NAMES = [kind.cell for kind in FAST] + ["lstm projected"]


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(results_of(one), results_of(other), strict=True))


@torch.no_grad()
def forget(layer: Any) -> None:
    """Change all weights without a record of PyTorch, so that only the packed weights have the old
    values.
    """
    for weight in layer.parameters():
        weight.data.fill_(7.0)


@pytest.mark.parametrize("name", NAMES)
def test_a_packed_layer_gives_the_same_bits_without_its_weights(name: str) -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for options in ({}, {"num_layers": 2, "bidirectional": True}, {"bias": False}):
            layer = build(name, units=21, **options).to(dtype).eval()
            batch = a_batch([4, 0, 1, 7], dtype)
            with torch.no_grad():
                wanted = layer(batch)
                rl.pack_weights(layer)
                forget(layer)
                assert same(layer(batch), wanted)


def in_place(layer: Any) -> None:
    with torch.no_grad():
        layer.weight_hh_l0[0, 0] += 1


def optimise(layer: Any, make: Callable[..., Any], **options: Any) -> None:
    layer(a_batch())[0].values.sum().backward()
    make(layer.parameters(), 0.1, **options).step()


def fused_group(weights: Any, rate: float) -> torch.optim.Optimizer:
    other = nn.Parameter(torch.ones(1))
    return torch.optim.Adam(
        [{"params": weights, "fused": True}, {"params": [other], "fused": False}], rate
    )


@pytest.mark.parametrize(
    "change",
    [
        in_place,
        lambda layer: optimise(layer, torch.optim.SGD),
        lambda layer: optimise(layer, torch.optim.Adam, fused=True),
        lambda layer: optimise(layer, fused_group),
        lambda layer: layer.load_state_dict(build("lstm", 2).state_dict()),
        lambda layer: setattr(layer.weight_ih_l1, "data", torch.ones_like(layer.weight_ih_l1)),
        lambda layer: setattr(layer, "bias_hh_l0", nn.Parameter(torch.ones_like(layer.bias_hh_l0))),
        lambda layer: layer.float().double(),
        # The same memory and shape with other strides.
        lambda layer: setattr(
            layer.weight_hh_l0, "data", layer.weight_hh_l0.data.as_strided((4 * H, H), (1, 4 * H))
        ),
        lambda layer: setattr(layer.weight_hh_l0, "data", torch._neg_view(layer.weight_hh_l0.data)),
        lambda layer: nn.utils.parametrizations.weight_norm(layer, "weight_hh_l0"),
    ],
)
def test_a_change_that_is_seen_ends_it(change: Callable[[Any], Any]) -> None:
    layer = rl.pack_weights(build("lstm", 2).eval())
    batch = a_batch()
    with torch.no_grad():
        layer(batch)
    change(layer)
    with torch.no_grad():
        assert same(copy.deepcopy(layer)(batch), layer(batch))


def test_packed_weights_keep_the_memory_of_their_sources() -> None:
    class Memory(bytearray):
        """A bytearray that supports weak references."""

    layer, memory = build("gru").eval(), Memory(8 * 3 * H)
    watched = weakref.ref(memory)
    layer.bias_hh_l0.data = torch.frombuffer(memory, dtype=torch.float64)
    del memory
    rl.pack_weights(layer)
    layer.bias_hh_l0.data = torch.ones(3 * H, dtype=torch.float64)
    assert watched() is not None
    batch = a_batch()
    with torch.no_grad():
        assert same(layer(batch), copy.deepcopy(layer)(batch))
    assert watched() is None  # the packed weights were discarded


def test_explain() -> None:
    layer, batch = build("gru").eval(), a_batch()
    plain = rl.explain(layer, batch).reason
    assert "packed" not in plain
    rl.pack_weights(layer)
    assert rl.explain(layer, batch).reason == f"{plain}; its weights are packed"
    in_place(layer)
    assert rl.explain(layer, batch).reason == f"{plain}; no longer packed: its weights have changed"


def test_weights_of_one_call_do_not_unpack_it() -> None:
    layer = rl.pack_weights(build("gru").eval())
    batch, other = a_batch(), build("gru").eval()
    with torch.no_grad():
        wanted = layer(batch)
        assert same(
            torch.func.functional_call(layer, dict(other.named_parameters()), (batch,)),
            other(batch),
        )
        forget(layer)
        assert same(layer(batch), wanted)
        layer.bias = False  # fewer weights than are packed
        assert same(layer(batch), copy.deepcopy(layer)(batch))


def test_autocast_and_compiled_calls_ignore_packed_weights() -> None:
    layer = rl.nn.LSTM(D, H).eval()
    batch = a_batch(dtype=torch.float32).detach()
    rl.pack_weights(layer)
    forget(layer)
    new = rl.nn.LSTM(D, H).eval()
    forget(new)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert same(layer(batch), new(batch))
    with torch.no_grad():
        assert same(torch.compile(layer, backend="eager")(batch), new(batch))


def test_copies_are_not_packed() -> None:
    layer, batch = rl.pack_weights(build("sru").eval()), a_batch()
    with torch.no_grad():
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            forget(twin)
            assert not same(twin(batch), layer(batch))
            assert "packed" not in rl.explain(twin, batch).reason


def test_models_that_cannot_be_packed() -> None:
    with torch.inference_mode():
        made = build("gru")
    for wrong, error, says in (
        (cast("Any", []), ArgumentTypeError, r"model must be .*got list"),
        (nn.Linear(2, 2), DispatchError, r"no recurrent layer of rl\.nn"),
        (build("layernorm_gru"), DispatchError, r"backend (program|reference) runs it"),
        (
            nn.utils.parametrizations.weight_norm(build("gru"), "weight_hh_l0"),
            DispatchError,
            "computed in each call",
        ),
        (made, DispatchError, "inference_mode"),
        (rl.nn.GRU(D, H, backend="reference"), DispatchError, "backend reference runs it"),
        (rl.nn.GRU(D, H, schedule="each"), DispatchError, "backend reference runs it"),
        (rl.nn.Recurrent(lambda *_: Fixed(), D, D), DispatchError, "its cell has no weights"),
    ):
        with pytest.raises(error, match=says):
            rl.pack_weights(wrong)
    # One such layer is enough.
    model = rl.pack_weights(nn.Sequential(build("gru"), build("layernorm_gru")))
    assert "packed" in rl.explain(model[0], a_batch()).reason
    assert "packed" not in rl.explain(model[1], a_batch()).reason


def test_packed_weights_of_another_layer_are_refused() -> None:
    def of(name: str, **options: Any) -> tuple[Any, tuple[Any, ...]]:
        layer = build(name, **options)
        weights = tuple(part for own in layer._weights() for part in own)
        tensors = (a_batch().values.detach(), *weights)
        directions = 2 if layer.bidirectional else 1
        return layer_of(
            name, a_batch().offsets, tensors, len(weights), layer.state_sizes, directions
        ), tensors

    mine, tensors = of("lstm")
    packed = mine.packed(tensors[1:])
    for name, options in (("lstm", {"units": 5}), ("lstm", {"bidirectional": True}), ("gru", {})):
        other, others = of(name, **options)
        batch = a_batch().offsets
        with pytest.raises(ArgumentError, match="packed must be the weights of this layer"):
            other.forward(batch, others, need_output=True, save=False, need_c=False, packed=packed)
    moved = torch.empty(packed.numel() + 64, dtype=torch.uint8)[8:][: packed.numel()].copy_(packed)
    batch = a_batch().offsets
    with pytest.raises(ArgumentError, match="64-byte aligned"):
        mine.forward(batch, tensors, need_output=True, save=False, need_c=False, packed=moved)


def test_threads_share_packed_weights() -> None:
    layer, batch = rl.pack_weights(build("lstm", 2).eval()), a_batch()
    with torch.no_grad():
        wanted = layer(batch)

    @torch.no_grad()
    def call(_: int) -> Any:
        return layer(batch)

    with ThreadPoolExecutor(4) as pool:
        assert all(same(result, wanted) for result in pool.map(call, range(80)))


INT8_LAYERS: dict[str, dict[str, Any]] = {
    "LSTM": {"num_layers": 2, "bidirectional": True},
    "GRU": {"num_layers": 2},
    "RNN": {"nonlinearity": "relu"},
}
WIDE_BATCH = rl.Ragged([torch.randn(length, 20) for length in (7, 0, 1, 12)])


def build_wide(name: str, **options: Any) -> Any:
    return getattr(rl.nn, name)(20, 48, **(INT8_LAYERS[name] | options)).eval()


def to_int8(layer: Any) -> Any:
    return rl.quantize(layer)


@torch.no_grad()
def output(layer: Any, batch: Any = WIDE_BATCH) -> Tensor:
    return layer(batch)[0].values


def is_int8(layer: Any) -> bool:
    return "int8 in calls" in rl.explain(layer, WIDE_BATCH).reason


@pytest.mark.parametrize("name", INT8_LAYERS)
def test_close_to_float32_and_the_same_in_any_batch(name: str) -> None:
    layer = build_wide(name)
    wanted = output(layer)
    stored = copy.deepcopy(layer.state_dict())
    assert to_int8(layer) is layer
    assert is_int8(layer)
    found = output(layer)
    assert not torch.equal(found, wanted)
    assert (found - wanted).abs().max() < 0.02 * (1 + wanted.abs().max())
    for index, rows in enumerate(WIDE_BATCH._like(found)):
        assert torch.equal(output(layer, WIDE_BATCH[index : index + 1]), rows)
    for key, part in layer.state_dict().items():
        assert torch.equal(part, stored[key])


@pytest.mark.parametrize("name", ["GRU", "LSTM"])
def test_steps_have_the_bits_of_a_call(name: str) -> None:
    layer, sequence = to_int8(build_wide(name, bidirectional=False)), WIDE_BATCH[3]
    state: Any = None
    with torch.inference_mode():
        whole, final = layer(sequence)
        for x_t, wanted in zip(sequence, whole, strict=True):
            out, state = layer.step(x_t, state)
            assert torch.equal(out, wanted)
    for one, other in zip(
        *([part] if name == "GRU" else part for part in (state, final)), strict=True
    ):
        assert torch.equal(one, other)


def test_other_calls_read_the_float32_weights() -> None:
    plain = build_wide("LSTM")
    layer: Any = to_int8(copy.deepcopy(plain))
    wanted = output(plain)
    assert torch.equal(layer(WIDE_BATCH)[0].values.detach(), wanted)  # gradients are recorded
    with torch.no_grad():
        compiled: Any = torch.compile(layer, backend="eager")
        assert torch.equal(compiled(WIDE_BATCH)[0].values, wanted)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(output(layer), output(plain))
    assert torch.equal(output(copy.deepcopy(layer)), wanted)
    assert torch.equal(output(layer.train()), output(copy.deepcopy(plain).train()))
    assert "in training mode" in rl.explain(layer, WIDE_BATCH).reason
    assert is_int8(layer.eval())
    with torch.no_grad():
        layer.weight_hh_l0.mul_(2)
        plain.weight_hh_l0.mul_(2)
    assert torch.equal(output(layer), output(plain))
    assert not is_int8(layer)


def test_packing_again_in_another_way() -> None:
    layer = to_int8(build_wide("RNN"))
    assert is_int8(layer)
    assert torch.equal(output(copy.deepcopy(layer)), output(rl.pack_weights(layer)))
    assert not is_int8(layer)
    assert is_int8(to_int8(layer))


def test_refusals() -> None:
    layer = build_wide("GRU")
    with pytest.raises(ArgumentTypeError, match=r"model must be .*got list"):
        rl.quantize(cast("Any", []))
    with pytest.raises(ArgumentError, match=r"training mode.*Call model\.eval\(\) first"):
        to_int8(nn.Sequential(build_wide("GRU")).eval().append(layer.train()))
    for other, reason in (
        (build_wide("GRU").double(), r"its weights are torch\.float64"),
        (
            rl.nn.SRU(3, 4).eval(),
            "its cell sru has no kernels for int8 weights; only RNN, LSTM and GRU have",
        ),
        (rl.nn.LSTM(65_537, 1).eval(), "its largest size is 65537"),
        (rl.nn.GRU(3, 4, device="meta").eval(), "backend torch"),
        (
            nn.Linear(2, 2).eval(),
            r"an RNN, LSTM or GRU in float32, got .*no recurrent layer of rl\.nn",
        ),
    ):
        with pytest.raises(DispatchError, match=reason):
            to_int8(other)
    mixed = nn.Sequential(build_wide("GRU"), rl.nn.MinGRU(3, 4)).eval()
    with pytest.warns(UserWarning, match=r"did not convert a layer\. 1: its cell mingru") as caught:
        to_int8(mixed)
    assert caught[0].filename == __file__
    assert is_int8(mixed[0])
    assert "int8" not in rl.explain(mixed[1], rl.Ragged([torch.randn(2, 3)])).reason


def test_rows_that_are_too_long_for_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raglane.nn.recurrent.packed_weights._LONGEST_INT8_ROW", 20)
    for layer in (rl.nn.LSTM(20, 20, proj_size=3), rl.nn.LSTM(20, 11, bidirectional=True)):
        assert is_int8(to_int8(layer.eval()))
    for layer, size in (
        (rl.nn.LSTM(2, 21, proj_size=3), 21),
        (rl.nn.LSTM(2, 11, 2, bidirectional=True), 22),
    ):
        with pytest.raises(DispatchError, match=f"its largest size is {size};"):
            to_int8(layer.eval())
