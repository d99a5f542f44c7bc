"""Poolings compared with a loop over sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from torch import Tensor, nn

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.native.library import has_cell
from raglane.nn.pooling import POOLINGS, AttentionPooling, Pooling, running
from strategies import lengths


def one_sequence(pooling: nn.Module, x: Tensor) -> Tensor:
    """Pool one sequence ``(L, F)``, which is not empty."""
    if isinstance(pooling, Pooling):
        single = {
            "last": lambda: x[-1],
            "first": lambda: x[0],
            "mean": lambda: x.mean(0),
            "max": lambda: x.amax(0),
            "logsumexp": lambda: x.exp().sum(0).log(),
        }
        return single[pooling.name]()
    assert isinstance(pooling, AttentionPooling)
    hidden, query = pooling.hidden.weight, pooling.query.weight
    bias = pooling.hidden.bias if pooling.hidden.bias is not None else torch.zeros_like(hidden[0])
    blocks = []
    for head, block in enumerate(x.chunk(pooling.num_heads, dim=1)):
        scores = torch.stack([query[head] @ torch.tanh(hidden @ element + bias) for element in x])
        blocks.append(
            sum(
                (w * e for w, e in zip(scores.softmax(0), block, strict=True)),
                torch.zeros_like(block[0]),
            )
        )
    return torch.cat(blocks)


def build(name: str) -> nn.Module:
    if name == "attention, 3 heads":
        return AttentionPooling(6, num_heads=3, bias=True, dtype=torch.float64)
    return POOLINGS[name](6).double()


NAMES = [*POOLINGS, "attention, 3 heads"]


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("name", ["last", "first", "mean", "max", "logsumexp"])
def test_infinite_elements(name: Any, trains: bool) -> None:
    """In evaluation, some poolings are computed element after element."""
    low, high = -torch.inf, torch.inf
    sequences = [[low], [low, low], [low, 2.0, low], [high], [1.0, high], [high, low], [2.0, 3.0]]
    batch = rl.Ragged([torch.tensor(sequence).view(-1, 1).double() for sequence in sequences])
    with torch.no_grad():
        result = Pooling(name).train(trains)(batch)
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "last": lambda x: x[-1],
        "first": lambda x: x[0],
        "mean": lambda x: x.mean(0),
        "max": lambda x: x.amax(0),
        "logsumexp": lambda x: x.logsumexp(0),
    }
    expected = torch.stack([functions[name](sequence) for sequence in batch])
    torch.testing.assert_close(result, expected, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
@example(lengths=[])
@example(lengths=[0, 0])
@given(lengths=lengths())
def test_against_a_loop(name: str, lengths: list[int], device: torch.device) -> None:
    pooling = build(name)
    values = torch.randn(sum(lengths), 6, dtype=torch.float64, device=device, requires_grad=True)
    batch = rl.Ragged.from_flat(values, lengths=lengths)
    result = pooling(batch)
    expected = [
        one_sequence(pooling, x) if len(x) else x.sum(0) * 0 for x in torch.split(values, lengths)
    ]
    joined = torch.stack(expected) if lengths else values.new_zeros((0, 6))
    torch.testing.assert_close(result, joined, rtol=1e-12, atol=1e-12)
    with torch.no_grad():  # in evaluation some are computed element after element
        torch.testing.assert_close(pooling.eval()(batch), joined, rtol=1e-12, atol=1e-12)
    inputs = [values, *pooling.parameters()]
    weight = torch.randn_like(joined)
    own = torch.autograd.grad(
        (result * weight).sum() + 0 * values.sum(), inputs, materialize_grads=True
    )
    theirs = torch.autograd.grad(
        (joined * weight).sum() + 0 * values.sum(), inputs, materialize_grads=True
    )
    torch.testing.assert_close(own, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_nan_stays_in_its_sequence(name: str) -> None:
    pooling = build(name)
    middle = torch.randn(3, 6, dtype=torch.float64)
    poison = torch.full((4, 6), float("nan"), dtype=torch.float64)

    def run(sequences: list[Tensor], index: int) -> tuple[Tensor, Tensor]:
        leaves = [sequence.clone().requires_grad_() for sequence in sequences]
        own = pooling(rl.Ragged(leaves))
        own.sum().backward()
        gradient = leaves[index].grad
        assert gradient is not None
        return own[index].detach(), gradient

    torch.testing.assert_close(
        run([poison, middle, poison], 1), run([middle], 0), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", POOLINGS)
def test_keeps_the_dtype(name: str, dtype: torch.dtype) -> None:
    pooling = POOLINGS[name](4).to(dtype)
    batch = rl.Ragged([torch.randn(700, 4), torch.empty(0, 4), torch.randn(2, 4)]).to(dtype)
    result = pooling(batch)
    assert result.dtype is dtype
    torch.testing.assert_close(
        result.double(), pooling.double()(batch.to(torch.float64)), rtol=0.02, atol=0.02
    )


def test_means_of_streams_have_the_bits_of_whole_sequences() -> None:
    batch = rl.Ragged([torch.rand(length, 3) for length in (1, 512, 513, 1500)])
    with torch.no_grad():
        assert torch.equal(
            running("mean", 3, torch.float32)(batch)[0].last(), batch.mean(1, empty=0.0)
        )


@pytest.mark.parametrize("name", POOLINGS)
def test_compiles_without_a_break(name: str) -> None:
    pooling = POOLINGS[name](4)
    compiled = torch.compile(pooling, backend="eager", fullgraph=True, dynamic=True)
    with torch.device(torch.get_default_device()):  # a mode, as of torch.set_default_device
        for counts in ([3, 0, 2], [1, 4, 2, 5]):
            batch = rl.Ragged([torch.randn(length, 4) for length in counts])
            torch.testing.assert_close(compiled(batch), pooling(batch))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: Pooling("median"), ArgumentError, "one of last, first"),  # type: ignore[arg-type]
        (lambda: Pooling("attention"), ArgumentError, "AttentionPooling"),  # type: ignore[arg-type]
        (lambda: AttentionPooling(6, num_heads=4), ArgumentError, "a divisor of embed_dim, 6"),
        (lambda: AttentionPooling(0), ArgumentError, "at least 1"),
        (
            lambda: AttentionPooling(6, dtype=torch.int64),
            ArgumentError,
            r"dtype must be .*got torch\.int64",
        ),
        (
            lambda: AttentionPooling(6)(rl.Ragged([torch.ones(2, 6).double()])),
            ShapeError,
            r"\.to\(torch\.float32\)",
        ),
        (
            lambda: AttentionPooling(6)(rl.Ragged([torch.ones(2, 6)]).to("meta")),
            ShapeError,
            "a tensor on meta",
        ),
        (lambda: Pooling("mean")(torch.ones(2, 3, 4)), ArgumentTypeError, "from_padded"),  # type: ignore[arg-type]
        (lambda: AttentionPooling(6)(rl.Ragged([torch.ones(2, 5)])), ShapeError, "6 features"),
    ],
)
def test_refuses(call: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()


@pytest.mark.host
@pytest.mark.skipif(not has_cell("mingru"), reason="the cpu kernels compute the products")
def test_attention_takes_no_product_of_torch_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    """On some processors the bits of torch's products depend on the number of rows."""
    batch = rl.Ragged([torch.randn(length, 6) for length in (3, 1, 4)])
    pooling = AttentionPooling(6, num_heads=2)
    expected = pooling(batch)
    monkeypatch.setattr(torch.nn.functional, "linear", None)
    torch.testing.assert_close(pooling.eval()(batch), expected)
    with pytest.raises(TypeError, match="not callable"):
        pooling.train()(batch)
