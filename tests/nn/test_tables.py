"""Padded tensors and packs that a call of C++ reads in place of flat values."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import raglane as rl
from cpu_networks import FOLD, POISON, PREPARE, Use
from raglane.kernels.cpu import backend
from raglane.native import library
from raglane.nn.recurrent import call
from raglane.packing.flat_values import Layout

pytestmark = [
    pytest.mark.host,
    pytest.mark.skipif(
        library.operators() is None, reason="raglane was installed without torch's operators"
    ),
]

LENGTHS = [3, 1, 6, 4, 6]
KINDS = "time first", "batch first", "pack", "sorted pack", "dense"
CELLS = "LSTM", "GRU", "RNN", "IndRNN", "SRU", "MinLSTM"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return a list to which each call with a table appends True if C++ ran it."""
    ran = []

    def run_table(*arguments: Any) -> Any:
        found = backend.run_table(*arguments)
        ran.append(found is not None)
        return found

    infer = backend.infer

    def counted(*arguments: Any) -> Any:
        found = infer(*arguments)
        if arguments[-1] > 0:  # a layout other than flat values
            ran.append(bool(found))
        return found

    monkeypatch.setattr(call, "run_table", run_table)
    monkeypatch.setattr(backend, "infer", counted)
    return ran


def converted(kind: str, batch: rl.Ragged) -> tuple[Any, Tensor | None]:
    """Return a batch in another layout with NaN in its padding, and the tensor with its
    elements.
    """
    if kind == "dense":
        return (padded := batch.to_padded(batch_first=False)[0]), padded
    padded, lengths = batch.to_padded(batch_first=kind == "batch first", padding_value=float("nan"))
    if "pack" in kind:
        return (
            pack := pack_padded_sequence(padded, lengths, enforce_sorted=kind == "sorted pack")
        ), pack.data
    return padded, padded


def values_of(out: Any, like: rl.Ragged, kind: str) -> Tensor:
    if isinstance(out, PackedSequence):
        return rl.Ragged.from_packed(out).values
    return rl.Ragged.from_padded(out, like.lengths, batch_first=kind == "batch first").values


def case(
    cell: str, kind: str, dtype: torch.dtype = torch.float64, **options: Any
) -> tuple[Any, rl.Ragged, Any, Any]:
    """Return a layer, a batch, the batch in another layout, and the arguments of a call with it."""
    layer = getattr(rl.nn, cell)(3, 4, dtype=dtype, batch_first=kind == "batch first", **options)
    own = {"dense": [5] * 4, "sorted pack": sorted(LENGTHS, reverse=True), "pack": LENGTHS}
    batch = rl.Ragged(
        [torch.randn(length, 3, dtype=dtype) for length in own.get(kind, [0, *LENGTHS, 0])]
    )
    given, _ = converted(kind, batch)
    return layer, batch, given, {"lengths": batch.lengths} if "first" in kind else {}


def leaf_of(given: Any) -> Tensor:
    return given.data if isinstance(given, PackedSequence) else given


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_a_call_gives_the_bits_of_a_ragged(
    cell: str, kind: str, bidirectional: bool, calls: list[bool]
) -> None:
    layer, batch, given, options = case(cell, kind, bidirectional=bidirectional)
    batch.values.requires_grad_()
    leaf_of(given).requires_grad_()
    out, final = layer(batch)
    moved, moved_final = layer(given, **options)
    assert values_of(moved, batch, kind).equal(out.values)
    pairs = (
        [(final, moved_final)]
        if isinstance(final, Tensor)
        else list(zip(final, moved_final, strict=True))
    )
    assert all(one.equal(other) for one, other in pairs)
    weights = tuple(layer.parameters())
    grad = torch.randn_like(out.values)
    wanted = torch.autograd.grad(
        [out.values, pairs[0][0]], [batch.values, *weights], [grad, pairs[0][0].detach()]
    )
    table = converted(kind, batch._like(grad))[1]
    assert table is not None
    found = torch.autograd.grad(
        [leaf_of(moved), pairs[0][1]], [leaf_of(given), *weights], [table, pairs[0][1].detach()]
    )
    assert all(one.equal(other) for one, other in zip(found[1:], wanted[1:], strict=True))
    to = given._replace(data=found[0]) if isinstance(given, PackedSequence) else found[0]
    assert values_of(to, batch, kind).equal(wanted[0])
    # Padding is not read, and its gradient is 0.
    assert torch.count_nonzero(found[0]) <= wanted[0].numel()
    assert calls == [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("flags", [FOLD, PREPARE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8])
@pytest.mark.parametrize(
    ("cell", "sizes"), [("LSTM", {"proj_size": 3}), ("GRU", {}), ("RNN", {}), ("SRU", {})]
)
def test_inference_reads_and_writes_the_rows_of_a_table(
    cell: str,
    sizes: dict[str, int],
    dtype: torch.dtype,
    flags: int,
    kind: str,
    calls: list[bool],
    use: Use,
) -> None:
    """NaN in the padding of the input, and numbers of an earlier call in the memory of the
    output.
    """
    is_narrow = dtype is torch.int8
    layer, batch, given, options = case(
        cell, kind, torch.float32 if is_narrow else dtype, bidirectional=True, **sizes
    )
    if is_narrow:
        if cell == "SRU":
            pytest.skip("the cell has no int8 weights")
        layer = rl.quantize(layer.eval())
    use(flags=flags | POISON)
    with torch.inference_mode():
        (out, final), (moved, moved_final) = layer(batch), layer(given, **options)
    assert values_of(moved, batch, kind).equal(out.values)
    assert torch.count_nonzero(leaf_of(moved)) <= out.values.numel()
    pairs = (
        [(final, moved_final)]
        if isinstance(final, Tensor)
        else zip(final, moved_final, strict=True)
    )
    assert all(one.equal(other) for one, other in pairs)
    assert calls == [True]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("grad", [True, False])
def test_the_output_can_be_left_out(kind: str, grad: bool, calls: list[bool]) -> None:
    layer, batch, given, options = case("LSTM", kind)
    with torch.set_grad_enabled(grad):
        (_, (h, c)), (nothing, (moved_h, moved_c)) = (
            layer(batch),
            layer(given, return_output=False, **options),
        )
    assert nothing is None
    assert moved_h.equal(h)
    assert moved_c.equal(c)
    if grad:
        weights = tuple(layer.parameters())
        pairs = zip(
            torch.autograd.grad(h.sum(), weights),
            torch.autograd.grad(moved_h.sum(), weights),
            strict=True,
        )
        assert all(one.equal(other) for one, other in pairs)
    assert calls == [True]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_any_strides(kind: str, calls: list[bool]) -> None:
    """Those of a sum are one number with strides of 0."""
    layer, batch, given, options = case("GRU", kind)
    weights = tuple(layer.parameters())
    wanted = torch.autograd.grad(layer(batch)[0].values.sum(), weights)
    for axis in (0, 1):
        total = leaf_of(layer(given, **options)[0]).transpose(0, axis).contiguous().sum()
        torch.testing.assert_close(torch.autograd.grad(total, weights), wanted)
    assert calls == [True, True]


@pytest.mark.parametrize("kind", KINDS)
def test_derivatives_of_gradients(kind: str) -> None:
    layer, _, given, options = case("LSTM", kind)
    leaf = leaf_of(given).nan_to_num().requires_grad_()

    def run(leaf: Tensor, weight: Tensor) -> Tensor:
        moved = given._replace(data=leaf) if isinstance(given, PackedSequence) else leaf
        named = {**dict(layer.named_parameters()), "weight_hh_l0": weight}
        return leaf_of(torch.func.functional_call(layer, named, (moved,), options)[0])

    weight = layer.weight_hh_l0.detach().requires_grad_()
    assert torch.autograd.gradcheck(run, (leaf, weight))
    assert torch.autograd.gradgradcheck(run, (leaf, weight), fast_mode=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_a_call_that_cpp_refuses(kind: str, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python moves the rows of one that C++ refuses, with equal bits."""
    layer, _, given, options = case("LSTM", kind)
    leaf_of(given).requires_grad_()

    def gradients() -> tuple[Tensor, ...]:
        out = leaf_of(layer(given, **options)[0])
        return torch.autograd.grad(out, [leaf_of(given), *layer.parameters()], torch.ones_like(out))

    wanted = gradients()
    operators = library.operators()
    assert operators is not None
    real, refused = getattr(operators, step), list[bool]()

    def refuse(*arguments: Any) -> Any:
        is_table = bool(arguments[-1 if step == "forward" else -2])
        refused.append(is_table)
        return ([], library.BAD_ARGUMENT, "a table") if is_table else real(*arguments)

    changed = operators._replace(**{step: refuse})
    monkeypatch.setattr(library, "operators", lambda: changed)
    assert all(one.equal(other) for one, other in zip(gradients(), wanted, strict=True))
    assert refused[0]


def test_writes_of_the_caller_after_the_call() -> None:
    """Lengths, values that need no gradient and the order of a pack are copied."""
    for kind in ("time first", "pack"):
        layer, batch, given, options = case("GRU", kind)
        wanted = torch.autograd.grad(layer(batch)[0].values.square().sum(), layer.weight_ih_l0)
        out = leaf_of(layer(given, **options)[0])
        leaf_of(given).fill_(7.0)
        if kind == "pack":
            given.sorted_indices.fill_(0)
            given.batch_sizes.fill_(1)
        else:
            options["lengths"].fill_(2)
        torch.testing.assert_close(
            torch.autograd.grad(out.square().sum(), layer.weight_ih_l0), wanted
        )


TABLE, SIZES, ORDER = torch.randn(6, 5, 3), torch.tensor([3, 0, 6, 2, 5]), torch.arange(5)
PACK, ALL = TABLE[0], torch.tensor([5])
WRONG: dict[str, tuple[Tensor, Tensor, Tensor | None, int]] = {
    "a layout that does not exist": (TABLE, SIZES, None, 4),
    "a negative layout": (TABLE.transpose(0, 1), SIZES, None, -1),
    "a negative length": (TABLE, SIZES - 9, None, 2),
    "a length above the steps": (TABLE, SIZES + 9, None, 2),
    "lengths whose sum overflows": (TABLE, SIZES + 2**62, None, 2),
    "lengths of another batch": (TABLE, SIZES[1:], None, 2),
    "lengths of another dtype": (TABLE, SIZES.int(), None, 2),
    "lengths in two dimensions": (TABLE, SIZES[None], None, 2),
    "no lengths": (TABLE, SIZES[:0], None, 2),
    "two dimensions": (PACK, SIZES, None, 2),
    "integers": (TABLE.long(), SIZES, None, 2),
    "a pack's sizes that grow": (PACK, torch.tensor([1, 4]), ORDER, 3),
    "a pack's order with repetition": (PACK, ALL, ORDER * 0, 3),
    "a pack's order beyond the batch": (PACK, ALL, ORDER + 1, 3),
    "a pack of more sequences than rows": (PACK, torch.tensor([9]), None, 3),
    "a pack without steps": (PACK, SIZES[:0], None, 3),
    "a pack of sizes below 0": (PACK, -ALL, None, 3),
}


def a_kernel() -> tuple[Any, tuple[Any, ...]]:
    layer = rl.nn.GRU(3, 4)
    return call.plan_of(layer, layer._weights(), TABLE[0]).kernel, layer._weights()[0]


@pytest.mark.parametrize("change", WRONG)
def test_wrong_rows_are_refused(change: str) -> None:
    kernel, weights = a_kernel()
    table, sizes, order, layout = WRONG[change]
    operators = library.operators()
    assert operators is not None
    head = kernel._head(torch.float32)[1]
    results, status, _ = operators.forward(
        head, sizes, table, weights, None, True, True, False, order, layout
    )
    assert not results
    assert status == library.BAD_ARGUMENT


def test_random_places_are_refused_or_inside() -> None:
    """The places of a backward pass are numbers in memory, which another thread may change."""
    kernel, weights = a_kernel()
    operators = library.operators()
    assert operators is not None
    head = kernel._head(torch.float32)[1]
    results, *_ = operators.forward(head, SIZES, TABLE, weights, None, True, True, False, None, 2)
    *_, gates, c_states, values, output, places = results
    layout = Layout.of_saved_plan(places)
    assert (layout.shape, layout.batch_dim, layout.count, layout.steps) == ((6, 5), 1, 5, 6)
    draw, refused = random.Random(3), 0
    for _ in range(300):
        changed = places.clone()
        number = draw.choice([-(2**63), 2**63 - 1, 2**40, -1, 0, 1, 3, 7])
        changed[draw.randrange(len(places))] = number
        changed = changed[: draw.choice([len(places), draw.randrange(len(places))])]
        saved = output, gates, c_states, torch.ones(6, 5, 4), None, None, None
        needed = [True] * (1 + len(weights))
        options = (False, False, True, False)
        found, *_ = operators.backward(head, changed, values, weights, saved, needed, *options)
        refused += not found
        lengths = changed[2:].diff()
        assert not found or (
            len(lengths) == 5 and lengths.min() >= 0 and lengths.max() <= 6 and changed[-1] == 16
        )
    assert 0 < refused < 300


@pytest.mark.parametrize("lengths", [[5, 2], torch.tensor([5, 2], dtype=torch.int32)])
def test_lengths_of_any_kind_of_a_transposed_batch(lengths: Any) -> None:
    layer, padded = rl.nn.GRU(3, 4), torch.randn(2, 5, 3).transpose(0, 1)
    assert torch.equal(
        layer(padded, lengths=lengths)[0], layer(padded.contiguous(), lengths=lengths)[0]
    )
