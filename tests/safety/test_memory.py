"""After any change to a tensor, a call gives the right numbers or an error, the same one on every
backend.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import KINDS, Kind
from fuzz.memory import WRONG
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.kernels.cpu import layer_operator
from raglane.kernels.cpu.layer import Layer
from raglane.native import library as library_module
from raglane.native import missing_kernels
from raglane.native.library import call
from raglane.packing import PackedSequence

pytestmark = pytest.mark.skipif(missing_kernels() is not None, reason=str(missing_kernels()))

BACKENDS = ("cpu", "torch", "reference")
LENGTHS = [4, 0, 3]


def lstm(backend: Any, **options: Any) -> rl.nn.LSTM:
    torch.manual_seed(0)
    return rl.nn.LSTM(5, 7, 2, bidirectional=True, backend=backend, **options)


def batch(dtype: torch.dtype = torch.float32) -> rl.Ragged:
    return rl.Ragged.from_flat(torch.randn(sum(LENGTHS), 5, dtype=dtype), lengths=LENGTHS)


def refusal(run: Callable[[], Any]) -> tuple[type[Exception], str]:
    """Return the class and message of the error that a call raises."""
    with pytest.raises(RaglaneError) as caught:
        run()
    return type(caught.value), str(caught.value)


def same_refusals(run: Callable[[str], Any]) -> tuple[type[Exception], str]:
    """Return the class and message of the error, which must be the same on every backend."""
    found = [refusal(lambda backend=backend: run(backend)) for backend in BACKENDS]  # type: ignore[misc]
    assert found[0] == found[1] == found[2], found
    return found[0]


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_parameter_gets_the_same_words_from_every_backend(change: str) -> None:
    for name in ("weight_ih_l0", "weight_hh_l1_reverse", "bias_hh_l0_reverse"):
        for direct in (False, True):  # torch's own kernels take a tensor without lengths unchanged

            def run(backend: str, name: str = name, direct: bool = direct) -> Any:
                layer = lstm(backend)
                new = WRONG[change](layer.get_parameter(name).detach())
                setattr(layer, name, nn.Parameter(new, requires_grad=False))
                return layer(torch.randn(3, 2, 5) if direct else batch())

            kind, words = same_refusals(run)
            assert issubclass(kind, ArgumentError | ArgumentTypeError)
            # The input is compared with the first weight.
            assert words.startswith(
                (f"{name} must be ", *["input must be "] * (name == "weight_ih_l0"))
            )


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_weight_is_refused_before_it_is_clamped(change: str) -> None:
    found = []
    for length in (None, 9):
        layer = rl.nn.IndRNN(5, 7, backend="cpu", max_length=length)
        new = WRONG[change](layer.get_parameter("weight_hh_l0").detach())
        layer.weight_hh_l0 = nn.Parameter(new, requires_grad=False)
        found.append(refusal(lambda layer=layer: layer(batch())))  # type: ignore[misc]
    assert found[0] == found[1]


def test_a_parameter_that_is_none_or_no_tensor() -> None:
    for new in (None, [1.0], np.zeros((28, 7))):

        def run(backend: str, new: Any = new) -> Any:
            layer = lstm(backend)
            del layer.weight_hh_l1
            layer.weight_hh_l1 = new
            return layer(batch())

        kind, words = same_refusals(run)
        assert kind is ArgumentTypeError
        assert words.startswith(
            f"weight_hh_l1 must be a tensor (28, 7), got a {type(new).__name__}."
        )


def test_changed_attributes() -> None:
    for name, value in (
        ("hidden_size", 8),
        ("hidden_size", 6),
        ("hidden_size", 7.0),
        ("hidden_size", "7"),
        ("input_size", 4),
        ("proj_size", 3),
        ("num_layers", 3),
        ("num_layers", 1),
        ("bidirectional", False),
        ("mode", "GRU"),
        ("mode", "?"),
    ):

        def run(backend: str, calls: int, name: str = name, value: Any = value) -> Any:
            layer = lstm(backend)
            for _ in range(calls):  # the cached plan must notice the new attribute
                layer(batch())
            setattr(layer, name, value)
            return layer(batch())

        new, used = (same_refusals(partial(run, calls=calls)) for calls in (0, 1))
        assert issubclass(new[0], ArgumentError)
        assert used == new, name
    without = lstm("cpu", bias=False)
    without.bias = True
    with pytest.raises(
        ArgumentError, match=r"bias must be False, since .* without biases.*, got True"
    ):
        without(batch())
    cells = rl.nn.SRU(5, 7, 2)
    cells.num_layers = 3
    with pytest.raises(ArgumentError, match=r"num_layers, bidirectional must be .*got 3, False"):
        cells(batch())


def test_offsets_that_were_written_to() -> None:
    """On a CPU only the offsets define the sequences, so backends cannot disagree."""
    for place, number, words in (
        (0, 1, r"offsets\[0\] must be .*got 1"),
        (1, 5, r"offsets\[2\] must be .*got 4 after 5"),
        (2, -1, r"offsets\[2\] must be .*got -1 after 4"),
        (3, 6, r"offsets\[-1\] must be the number of elements, 7, got 6"),
        (3, 1 << 40, r"offsets\[-1\] must be .*got 1099511627776"),
    ):

        def run(backend: str, place: int = place, number: int = number) -> Any:
            given = batch()
            given.offsets[place] = number
            return lstm(backend)(given)

        assert re.match(words, same_refusals(run)[1])
    for change in (Tensor.float, Tensor.int, lambda t: t[:0], lambda t: t.unsqueeze(0)):

        def reshaped(backend: str, change: Callable[[Tensor], Tensor] = change) -> Any:
            given = batch()
            given._offsets = change(given.offsets)
            return lstm(backend)(given)

        assert same_refusals(reshaped)[1].startswith("offsets must be ")


def test_lengths_that_were_written_to() -> None:
    given, layer = batch(), lstm("cpu")
    wanted = layer(given)[0].values
    given.lengths_cpu.fill_(1)
    given.lengths.fill_(1)
    given.offsets[1:3] = 2  # another batch with the same number of elements
    moved = [lstm(backend)(given)[0].values for backend in BACKENDS]
    torch.testing.assert_close(moved[0], moved[1])
    torch.testing.assert_close(moved[0], moved[2])
    assert given.lengths_cpu.tolist() == [2, 0, 5]
    assert not moved[0].equal(wanted)


def test_the_operators() -> None:
    """Direct calls of the operators raise the same errors."""
    layer = rl.nn.LSTM(5, 7)
    h = torch.zeros(1, 3, 7)
    given = batch()
    weights: list[Any] = [*layer._weights()[0], *[None] * 5]

    def run(**changes: Any) -> Any:
        parts = {
            "cell": "lstm",
            "values": given.values,
            "offsets": given.offsets,
            "h": h,
            "c": h.clone(),
        }
        parts |= {f"w{index}": weight for index, weight in enumerate(weights)}
        parts |= {
            "need_output": True,
            "save": True,
            "need_c": False,
            "checkpoint_every": 0,
        } | changes
        return torch.ops.raglane.recurrence(*parts.values())

    output, _, _, gates, cells = run()
    for changes, words in (
        ({"cell": "?"}, r"cell must be .*got '\?'"),
        ({"h": torch.zeros(7)}, r"h must be .*got shape \(7,\)"),
        ({"h": torch.zeros(5, 3, 7)}, "weights must be .*got 10 weights for 5 directions"),
        ({"h": torch.zeros(1, 4, 7)}, r"hx \(h\) must be .*got shape \(1, 4, 7\)"),
        ({"c": None}, "hx must be .*got 1"),
        ({"c": h.double()}, r"hx \(c\) must be .*got torch.float64"),
        ({"values": torch.zeros(7)}, r"input must be .*got shape \(7,\)"),
        ({"values": torch.zeros(7, 5).half()}, "input must be .*got torch.float16"),
        ({"offsets": torch.tensor([0, 7, 7])}, r"hx \(h\) must be .*got shape \(1, 3, 7\)"),
        ({"offsets": torch.tensor([0, 9, 9, 7])}, r"offsets\[3\] must be .*got 7 after 9"),
        ({"offsets": torch.tensor([0.0])}, r"offsets must be .*got shape \(1,\), torch.float32"),
        ({"w1": torch.zeros(1, 1)}, r"weight_hh_l0 must be .*got shape \(1, 1\)"),
        ({"w1": None}, "weight_hh_l0 must be .*got a NoneType"),
        ({"w4": torch.zeros(1, 1)}, "weight_hr_l0 must be .*got a Tensor"),
        # The same number of tensors as in the run before, with the same shapes.
        ({"w3": None, "w4": weights[3]}, "weight_hr_l0 must be .*got a Parameter"),
        ({"w5": torch.zeros(1, 1)}, "weights must be .*got 1 directions, and weights for more"),
        ({"checkpoint_every": -1}, "checkpoint_every must be .*got -1"),
    ):
        assert re.match(words, refusal(lambda changes=changes: run(**changes))[1]), changes  # type: ignore[misc]
    grads = [torch.ones_like(output), None, None, None]
    common = ["lstm", given.values, given.offsets, h, h, *weights]
    wanted = [True] * 7 + [False] * 6

    def back(*parts: Any, every: int = 0) -> Any:
        return torch.ops.raglane.recurrence_backward(*common, *parts, every)

    back(output, gates, cells, *grads, wanted)
    for parts, words in (
        ((output[1:], gates, cells, *grads, wanted), r"saved output must be .*got shape \(6, 7\)"),
        ((output, gates[..., 1:], cells, *grads, wanted), "saved gates must be .*got shape"),
        ((output, gates, cells.double(), *grads, wanted), "saved c must be .*got torch.float64"),
        (
            (output, gates, cells, torch.ones(1, 7), *grads[1:], wanted),
            r"gradient of the output must be .*got shape \(1, 7\)",
        ),
        (
            (output, gates, cells, *grads[:2], h[0], None, wanted),
            r"gradient of the final h must be .*got shape \(3, 7\)",
        ),
        ((output, gates, cells, *grads, wanted[1:]), "needed must be .*got 12 bools"),
    ):
        assert re.match(words, refusal(lambda parts=parts: back(*parts))[1]), words  # type: ignore[misc]
    for every, words in ((3, "saved gates must be "), (-3, "checkpoint_every must be ")):
        assert refusal(partial(back, output, gates, cells, *grads, wanted, every=every))[
            1
        ].startswith(words)
    assert layer_operator.recurrence is not None


def test_hooks_on_saved_tensors() -> None:
    """Hooks may store saved tensors elsewhere, and return others for backward."""
    layer, given = lstm("cpu"), batch()

    def grads(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> tuple[Tensor, ...]:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            out, _ = layer(given)
        return torch.autograd.grad(out.values.square().sum(), list(layer.parameters()))

    plain = grads(lambda t: t, lambda t: t)
    stored = grads(lambda t: t.detach().numpy().copy(), torch.from_numpy)
    assert all(a.equal(b) for a, b in zip(plain, stored, strict=True))
    for unpack in (
        Tensor.double,
        Tensor.half,
        lambda t: t[:-1],
        lambda t: t.to("meta"),
        lambda t: t.unsqueeze(0),
    ):
        with pytest.raises(RaglaneError, match="got"):
            grads(lambda t: t, unpack)


@pytest.mark.parametrize("kind", ["padded", "packed", "ragged"])
def test_hooks_that_unpack_fewer_rows(kind: str) -> None:
    """The rows of a gradient are those that forward saved, and so many that they reach beyond the
    memory of fewer.
    """
    given = rl.Ragged.from_flat(torch.randn(7000, 5), lengths=[4000, 0, 3000])
    padded, lengths = given.to_padded(batch_first=False)
    inputs: dict[str, Any] = {"padded": padded, "packed": given.to_packed(), "ragged": given}
    options: dict[str, Any] = {"lengths": lengths} if kind == "padded" else {}
    for layer in (rl.nn.GRU(5, 7), rl.nn.LSTM(5, 7), rl.nn.SRU(5, 7)):
        for place in range(20):
            saved: list[Tensor] = []

            def pack(tensor: Tensor, saved: list[Tensor] = saved) -> int:
                saved.append(tensor)
                return len(saved) - 1

            def unpack(index: int, saved: list[Tensor] = saved, place: int = place) -> Tensor:
                return saved[index][: len(saved[index]) // 2] if index == place else saved[index]

            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = layer(inputs[kind], **options)[0]
            if place == len(saved):
                break
            loss = {"padded": out, "packed": out[0], "ragged": getattr(out, "values", out)}[kind]
            with pytest.raises(RaglaneError, match="got"):
                loss.sum().backward()
        assert place > 5


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_strided_batch_without_steps(kind: Kind) -> None:
    """Torch makes no contiguous copy of a tensor without numbers, whatever its strides are."""
    layer = getattr(rl.nn, kind.layer)(3, 4, **kind.options)
    lengths = torch.zeros(5, dtype=torch.int64)
    runs: list[Callable[[Tensor], Any]] = [layer, partial(layer, lengths=lengths)]
    if hasattr(nn, kind.layer):
        runs.append(rl.accelerate(getattr(nn, kind.layer)(3, 4)))
    for given in (torch.randn(0, 5, 6)[..., ::2], torch.randn(0, 6, 5).mT[..., :3]):
        for run in runs:
            with torch.no_grad():
                assert run(given)[0].shape == (0, 5, 4)
            leaf = given.detach().requires_grad_()
            run(leaf)[0].backward(torch.randn(0, 5, 8)[..., ::2])
            assert leaf.grad is not None
            assert leaf.grad.shape == given.shape


def test_backward_does_not_write_to_what_hooks_unpack() -> None:
    """A hook may return one tensor to two graphs, or keep it."""
    given = batch()
    for layer in (lstm("cpu"), rl.nn.MinGRU(5, 7), rl.nn.LayerNormLSTM(5, 7)):
        stored: dict[bytes, Tensor] = {}

        def pack(tensor: Tensor, stored: dict[bytes, Tensor] = stored) -> bytes:
            key = tensor.detach().numpy().tobytes() + bytes(tensor.shape)
            stored.setdefault(key, tensor.detach().clone())
            return key

        with torch.autograd.graph.saved_tensors_hooks(pack, stored.__getitem__):
            losses = [layer(given)[0].values.square().sum() for _ in range(2)]
        first, second = (torch.autograd.grad(loss, list(layer.parameters())) for loss in losses)
        assert all(a.equal(b) for a, b in zip(first, second, strict=True))
        assert all(
            part.detach().numpy().tobytes() + bytes(part.shape) == key
            for key, part in stored.items()
        )


def test_a_backward_that_failed_half_way_is_not_walked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The saved tensors are then overwritten; autograd frees them only if backward succeeds."""
    given = rl.Ragged.from_flat(torch.randn(900, 5), lengths=[450, 450])
    monkeypatch.setattr(Layer, "_computes_all_gradients", lambda *_: False)
    for layer, kind in ((rl.nn.LSTM(5, 7), "matrix"), (rl.nn.MinGRU(5, 7), "elementwise")):
        out, _ = layer(given)
        loss = out.values.sum()
        with monkeypatch.context() as patch:

            def fail(*_: Any, **__: Any) -> Any:
                raise MemoryError("no memory for products")

            patch.setattr(f"raglane.kernels.cpu.{kind}.outer", fail)
            with pytest.raises(MemoryError):
                loss.backward()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_call_that_fails_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    class Handle:
        def raglane_forward(self, fields: bytes, message: Any, size: int) -> int:
            made.append("call")
            message.value = b"the reason"
            assert (len(fields), size) == (1, 256)
            return 2

    monkeypatch.setattr(
        library_module, "library", lambda: type("Kernels", (), {"handle": Handle()})
    )
    with pytest.raises(MemoryError, match="the reason"):
        call("raglane_forward", b"?")
    assert made == ["call"]


@pytest.mark.parametrize("rows", [0, 1])
def test_one_row_or_none_says_nothing_about_more(rows: int) -> None:
    """One row is contiguous at any stride; several rows at that stride are not."""
    for number, wide in enumerate((torch.randn(6, 11), torch.randn(11, 6).t())):
        values = wide[:, :4]
        given, layer = (
            rl.Ragged.from_flat(values, lengths=[4, 0, 2]),
            rl.nn.GRU(4, 13 + 2 * number + rows),
        )
        layer(rl.Ragged.from_flat(values[:rows], lengths=[rows]))
        with rl.use_backend(backend="reference"):
            wanted = layer(given)[0].values
        torch.testing.assert_close(layer(given)[0].values, wanted)
    # The offsets of an empty batch are one number.
    offsets = torch.tensor([0, 9, 2, 9, 6])[::2]
    given = rl.Ragged._make(wide[:, :4].contiguous(), offsets, None)
    layer = rl.nn.GRU(4, 17 + rows)
    layer(rl.Ragged._make(given.values[:0], offsets[:1], None))
    with rl.use_backend(backend="reference"):
        wanted = layer(given)[0].values
    torch.testing.assert_close(layer(given)[0].values, wanted)


@pytest.mark.parametrize("kind", [rl.nn.LSTM, rl.nn.QRNN, rl.nn.SRU])
def test_backward_overwrites_nothing_that_a_call_returned(kind: Any) -> None:
    given, layer = batch(), kind(5, 7)
    out, _, states = layer.with_states(given)
    c = states[0][1].values.detach()
    weight, before = torch.ones(7, requires_grad=True), c.clone()
    product = (c * weight).sum()
    out.values.sum().backward()
    assert c.equal(before)
    product.backward()
    torch.testing.assert_close(weight.grad, before.sum(0))


def test_a_weight_of_other_strides_that_lost_its_memory() -> None:
    layer = rl.nn.GRU(5, 16)
    layer.weight_ih_l0 = nn.Parameter(torch.randn(5, 48).t())
    layer.weight_ih_l0.untyped_storage().resize_(100)
    with pytest.raises(
        ShapeError, match=r"weight_ih_l0 must be a tensor whose storage has 960 bytes"
    ):
        layer(batch())


def test_negative_views() -> None:
    """Memory with the opposite sign of the numbers."""
    layer, given = lstm("cpu"), batch()
    wanted, final = layer(given)
    mirrored = torch._neg_view(-given.values)
    assert mirrored.is_neg()
    for other in (
        rl.Ragged.from_flat(mirrored, lengths=LENGTHS),
        rl.Ragged.from_flat(given.values, offsets=torch._neg_view(-given.offsets)),
        rl.Ragged.from_flat(given.values, lengths=torch._neg_view(-given.lengths)),
    ):
        assert layer(other)[0].values.equal(wanted.values)
    states = torch.randn_like(final[0]), torch.randn_like(final[1])
    mirrored_states = torch._neg_view(-states[0]), torch._neg_view(-states[1])
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            assert layer(given, mirrored_states)[0].values.equal(layer(given, states)[0].values)
    packed, padded = given.to_packed(), given.to_padded(batch_first=False)[0]
    for part in ("data", "batch_sizes", "sorted_indices"):
        turned = PackedSequence(*packed)._replace(**{part: torch._neg_view(-getattr(packed, part))})
        assert layer(turned)[0].data.equal(layer(packed)[0].data)
        assert rl.Ragged.from_packed(turned).values.equal(given.values)
    negative = torch._neg_view(-padded)
    assert layer(negative, lengths=given.lengths)[1][0].equal(final[0])
    assert layer(padded, lengths=torch._neg_view(-given.lengths))[1][0].equal(final[0])
    assert rl.Ragged.from_padded(negative, given.lengths, batch_first=False).values.equal(
        given.values
    )
    assert (
        rl.Ragged.from_flat(mirrored, lengths=LENGTHS).to_numpy()[0].tolist()
        == given.values.tolist()
    )


@pytest.mark.parametrize("name", ["weight_ih_l0", "weight_hh_l1_reverse", "bias_hh_l0"])
def test_a_parameter_that_loses_memory_after_a_call_is_refused(name: str) -> None:
    """Only its storage differs from the call before."""
    layer, given = lstm("cpu"), batch()
    layer(given)
    storage = layer.get_parameter(name).untyped_storage()
    storage.resize_(storage.nbytes() - 1)
    with pytest.raises(ArgumentError, match=f"{name} must be "):
        layer(given)
