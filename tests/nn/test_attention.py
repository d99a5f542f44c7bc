"""Attention over ragged batches equals torch's attention on each sequence without others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.nn import attention


def batch_of(lengths: list[int], features: int, dtype: torch.dtype = torch.float64) -> rl.Ragged:
    return rl.Ragged([torch.randn(length, features, dtype=dtype) for length in lengths])


def twins(
    features: int, heads: int, width: int, **options: Any
) -> tuple[rl.nn.Attention, torch.nn.MultiheadAttention]:
    layer = rl.nn.Attention(features, heads, kdim=width, dtype=torch.float64, **options)
    options.pop("causal", None)
    sizes = {} if width == features else {"kdim": width, "vdim": width}
    other = torch.nn.MultiheadAttention(
        features, heads, batch_first=True, dtype=torch.float64, **options, **sizes
    )
    for part in other.parameters():
        torch.nn.init.normal_(part, std=0.5)
    layer.load_state_dict(other.state_dict())
    return layer, other


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    ("features", "heads", "width", "options"),
    [
        (6, 3, 6, {}),
        (8, 2, 8, {"causal": True}),
        (5, 1, 5, {"bias": False}),
        (8, 4, 3, {}),
        (4, 2, 7, {"bias": False}),
    ],
)
def test_values_and_gradients(
    features: int, heads: int, width: int, options: dict[str, Any], is_training: bool
) -> None:
    torch.manual_seed(0)
    layer, other = twins(features, heads, width, **options)
    layer.train(is_training)
    lengths = [7, 0, 1, 40, 2, 3]
    query = batch_of(lengths, features)
    memories = [query] * (width == features) + [batch_of(lengths, width)]
    if not layer.causal:
        memories.append(batch_of([2, 3, 0, 9, 1, 70], width))
    for memory in memories:
        leaves = [
            part.values.requires_grad_()
            for part in ([query] if memory is query else [query, memory])
        ]
        out = layer(query) if memory is query else layer(query, memory)
        expected = []
        for own, theirs in zip(query.to_list(), memory.to_list(), strict=True):
            mask = (
                torch.ones(len(own), len(theirs), dtype=torch.bool).triu(1)
                if layer.causal
                else None
            )
            if len(own):
                expected.append(
                    other(
                        own[None], theirs[None], theirs[None], attn_mask=mask, need_weights=False
                    )[0][0]
                )
        torch.testing.assert_close(out.values, torch.cat(expected), rtol=1e-10, atol=1e-10)
        assert torch.equal(out.lengths, query.lengths)
        weights, names = torch.randn_like(out.values), dict(other.named_parameters())
        leaves_of_both = [
            [*leaves, *(part.get_parameter(name) for name in names)] for part in (layer, other)
        ]
        found, wanted = (
            torch.autograd.grad((part * weights).sum(), own)
            for part, own in zip((out.values, torch.cat(expected)), leaves_of_both, strict=True)
        )
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def test_a_memory_without_elements_gives_the_bias() -> None:
    layer, _ = twins(4, 2, 4)
    query = batch_of([2, 0], 4)
    out = layer(query, batch_of([0, 3], 4)).values
    assert torch.equal(out, layer.out_proj.bias.expand(2, 4))
    out.sum().backward()
    assert layer.in_proj_weight.grad is not None
    assert not layer.in_proj_weight.grad.any()
    assert layer(query[:0]).values.shape == (0, 4)
    assert layer(batch_of([0], 4)).lengths.tolist() == [0]


@pytest.mark.host  # on a GPU cuBLAS computes the products
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("features", "heads"), [(8, 2), (15, 3), (64, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_bits_do_not_depend_on_the_batch(
    features: int, heads: int, causal: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    layer = rl.nn.Attention(features, heads, causal=causal, dtype=dtype).eval()
    batch = batch_of([17, 0, 1, 31, 5, 31, 17, 193, 33, 1], features, dtype)
    with torch.no_grad():
        out = layer(batch).to_list()
        for index, sequence in enumerate(batch.to_list()):
            assert torch.equal(layer(rl.Ragged([sequence])).values, out[index])
        order = torch.randperm(len(batch)).tolist()
        shuffled = layer(rl.Ragged([batch.to_list()[index] for index in order])).to_list()
        assert all(
            torch.equal(part, out[index]) for part, index in zip(shuffled, order, strict=True)
        )


def test_sequences_do_not_read_each_other() -> None:
    layer = rl.nn.Attention(4, 2)
    sequences: Any = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    out = layer(rl.Ragged([sequences[0], sequences[1] * float("nan")])).to_list()
    assert out[0].isfinite().all()
    assert out[1].isnan().all()
    out[0].sum().backward()
    assert sequences[0].grad.isfinite().all()


def test_dropout_acts_only_in_training() -> None:
    torch.manual_seed(0)
    layer, batch = rl.nn.Attention(4, 2, dropout=0.5), batch_of([30, 2], 4, torch.float32)
    assert not torch.equal(layer(batch).values, layer(batch).values)
    layer.eval()
    assert torch.equal(layer(batch).values, layer(batch).values)
    mean, layer.dropout = layer(batch).values, 1.0
    assert torch.equal(layer.train()(batch).values, layer.out_proj.bias.expand_as(mean))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("is_cross", [True, False])
def test_causal_attention_never_reads_the_future(
    is_cross: bool, trains: bool, dropout: float
) -> None:
    torch.manual_seed(0)
    layer = rl.nn.Attention(4, 2, causal=True, dropout=dropout).train(trains)
    values = torch.randn(8, 4, requires_grad=True)
    query = rl.Ragged.from_flat(torch.randn(8, 4), lengths=[5, 3])
    memory = query.with_values(values)
    out = layer(query, memory) if is_cross else layer(memory)
    for row in (0, 2, 5, 6):
        (gradient,) = torch.autograd.grad(out.values[row].sum(), values, retain_graph=True)
        assert torch.count_nonzero(gradient[row + 1 :]) == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("is_cross", [True, False])
def test_compiled(is_cross: bool) -> None:
    layer = rl.nn.Attention(4, 2, dtype=torch.float64)
    compiled = torch.compile(layer, backend="eager")
    for lengths in ([3, 1], [2, 0, 5], [4]):
        inputs = [batch_of(lengths, 4), batch_of(lengths[::-1], 4)][: 1 + is_cross]
        torch.testing.assert_close(
            compiled(*inputs).values, layer(*inputs).values, rtol=1e-12, atol=1e-12
        )


def test_second_derivatives_of_the_plain_kernel() -> None:
    torch.manual_seed(0)
    layer, batch = rl.nn.Attention(4, 2, dtype=torch.float64), batch_of([3, 0, 2], 4)
    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(
            lambda values: layer(batch.with_values(values)).values, batch.values.requires_grad_()
        )
    first = torch.autograd.grad(
        layer(batch).values.square().sum(), batch.values, create_graph=True
    )[0]
    with pytest.raises(RuntimeError, match="not implemented"):
        first.sum().backward()


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernel_of_a_gpu(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def varlen_attn(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        ends: Tensor,
        other: Tensor,
        *longest: int,
        window_size: Any,
    ) -> Tensor:
        calls.append((ends.dtype, ends.tolist(), other.tolist(), longest, window_size))
        parts = []
        for index in range(len(ends) - 1):
            own = query[ends[index] : ends[index + 1]].transpose(0, 1)
            keys, values = (
                part[other[index] : other[index + 1]].transpose(0, 1) for part in (key, value)
            )
            part = torch.nn.functional.scaled_dot_product_attention(
                own, keys, values, is_causal=causal
            )
            parts.append(part.transpose(0, 1))
        return torch.cat(parts)

    torch.manual_seed(0)
    layer = rl.nn.Attention(8, 2, causal=causal, dtype=torch.float64)
    query = batch_of([3, 1, 2], 8)
    memory = batch_of([3, 1, 2] if causal else [1, 4, 2], 8)
    expected = layer(query), layer(query, memory)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    monkeypatch.setattr(attention, "_has_varlen", lambda *_: True)
    torch.testing.assert_close(layer(query).values, expected[0].values)
    torch.testing.assert_close(layer(query, memory).values, expected[1].values)
    window = (-1, 0 if causal else -1)
    ends = memory.offsets.tolist()
    assert calls[0] == (torch.int32, [0, 3, 4, 6], [0, 3, 4, 6], (3, 3), window)
    assert calls[1] == (torch.int32, [0, 3, 4, 6], ends, (3, memory.max_length), window)


def test_wrong_arguments() -> None:
    with pytest.raises(ArgumentError, match="divisor of embed_dim, 5"):
        rl.nn.Attention(5, 2)
    layer = rl.nn.Attention(4, 2, kdim=3)
    query, memory = batch_of([2, 1], 4, torch.float32), batch_of([1, 5], 3, torch.float32)
    for own, given, error, says in (
        (layer, (query.values,), ArgumentTypeError, "query must be a Ragged"),
        (layer, (query,), ShapeError, "memory must be elements of 3 features"),
        (layer, (query, memory[:1]), ShapeError, "memory must be a batch of 2 sequences"),
        (layer, (query, memory.map(torch.Tensor.double)), ShapeError, "dtype"),
        (
            rl.nn.Attention(4, 2, kdim=3, causal=True),
            (query, memory),
            ShapeError,
            "memory",
        ),
    ):
        with pytest.raises(error, match=says):
            own(*given)
    with pytest.raises(ArgumentError, match="must be called outside of torch"):
        torch.export.export(rl.nn.Attention(4, 2), (query,))


@pytest.mark.host
def test_torch_gets_the_same_layout_for_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some processors the bits of its attention depend on strides."""
    plain: Any = torch.nn.functional.scaled_dot_product_attention
    calls = []

    def checked(*tensors: Tensor, **options: Any) -> Tensor:
        calls.append(all(tensor.is_contiguous() for tensor in tensors))
        return plain(*tensors, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", checked)
    rl.nn.Attention(4, 2).eval()(rl.Ragged([torch.randn(length, 4) for length in (3, 1, 5)]))
    assert calls == [True] * 3
