"""Convolutions and poolings over steps equal torch's on each sequence without others."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raglane as rl
from raglane.errors import ArgumentError, ArgumentTypeError, RaglaneError, ShapeError
from raglane.nn import row_convolution
from raglane.ragged import Ragged

LENGTHS = [7, 0, 1, 13, 2, 0]
BATCHES = [LENGTHS, [], [5], [0], [1, 1, 1], [0, 0], [2, 3]]


def batch_of(lengths: list[int], *features: int, dtype: torch.dtype = torch.float64) -> Ragged:
    """Return a batch whose values are a leaf that requires gradients."""
    values = torch.randn(sum(lengths), *features, dtype=dtype, requires_grad=True)
    return Ragged.from_flat(values.detach(), lengths=lengths).with_values(values)


def convolved(layer: nn.Conv1d, sequence: Tensor) -> Tensor:
    """Return torch's convolution of one sequence, which may be shorter than the kernel."""
    (size,), (dilation,) = layer.kernel_size, layer.dilation
    left, right = layer._reversed_padding_repeated_twice
    row = F.pad(sequence.t(), (left, right)).unsqueeze(0)
    if row.shape[2] < dilation * (size - 1) + 1:
        return sequence.new_zeros(0, layer.out_channels)
    options: dict[str, Any] = {"stride": layer.stride, "dilation": dilation}
    return F.conv1d(row, layer.weight, layer.bias, groups=layer.groups, **options).squeeze(0).t()


def assert_equal_with_gradients(
    out: Ragged, parts: list[Tensor], leaves: list[Tensor], atol: float = 1e-12
) -> None:
    """Compare a result and its gradients with those of single sequences."""
    assert out.lengths.tolist() == [part.shape[0] for part in parts]
    assert out.lengths_cpu.tolist() == out.lengths.tolist()
    assert out.values.is_contiguous()
    expected = torch.cat([out.values.new_zeros(0, *out.feature_shape), *parts])
    torch.testing.assert_close(out.values, expected, rtol=0, atol=atol)
    if expected.numel() == 0:
        assert not any(g.any() for g in torch.autograd.grad(out.values.sum(), leaves))
        return
    factors = torch.randn_like(expected)
    ours = torch.autograd.grad((out.values * factors).sum(), leaves)
    theirs = torch.autograd.grad((expected * factors).sum(), leaves)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=10 * atol)


@pytest.fixture(params=["gaps", "in place"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolve a row with gaps, or the values where they are with copies of the windows at ends."""
    monkeypatch.setattr(row_convolution, "_LONG", 0 if request.param == "in place" else 1000)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("lengths", BATCHES)
@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3},
        {"kernel_size": 1, "bias": False},
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": 4, "padding": "same"},
        {"kernel_size": 3, "padding": "same", "dilation": 3, "groups": 2},
        {"kernel_size": 3, "padding": "same", "dilation": 2},
        {"kernel_size": 7, "padding": 3, "bias": False},
        {"kernel_size": 2, "padding": "valid", "dilation": 2},
        {"kernel_size": 5, "padding": 2, "stride": 2},
        {"kernel_size": 2, "padding": 5},
        {"kernel_size": 3, "padding": 4, "stride": 3, "dilation": 2, "groups": 4},
        {"kernel_size": 2, "stride": 5},
        {"kernel_size": 1, "padding": 2, "stride": 3},
    ],
    ids=str,
)
def test_convolutions(lengths: list[int], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer = rl.nn.Conv1d(4, 8, **options, dtype=torch.float64)
    batch = batch_of(lengths, 4)
    parts = [convolved(layer, part) for part in batch]
    out = layer(batch)
    assert_equal_with_gradients(out, parts, [batch.values, *layer.parameters()])
    assert out.feature_shape == (8,)


def test_lengths_are_those_of_torch() -> None:
    layer = rl.nn.Conv1d(1, 1, 5, stride=2, padding=2)
    twin = nn.Conv1d(1, 1, 5, stride=2, padding=2)
    lengths = list(range(1, 20))
    expected = [twin(torch.zeros(1, 1, length)).shape[2] for length in lengths]
    assert layer(batch_of(lengths, 1, dtype=torch.float32)).lengths.tolist() == expected


def test_the_same_lengths_are_the_same_offsets() -> None:
    batch = batch_of(LENGTHS, 4)
    out = rl.nn.Conv1d(4, 4, 3, padding=1, dtype=torch.float64)(batch)
    assert (out + batch).lengths.tolist() == LENGTHS
    assert out._offsets is batch._offsets


def test_a_convolution_has_the_weights_of_torch() -> None:
    torch.manual_seed(3)
    theirs = nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2)
    torch.manual_seed(3)
    ours = rl.nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2)
    assert isinstance(ours, nn.Conv1d)
    assert repr(ours) == repr(theirs)
    for (name, one), (other_name, other) in zip(
        ours.state_dict().items(), theirs.state_dict().items(), strict=True
    ):
        assert name == other_name
        assert torch.equal(one, other)
    ours.load_state_dict(nn.Conv1d(4, 6, 3, groups=2).state_dict())


@pytest.mark.usefixtures("way")
def test_a_nan_stays_in_its_sequence() -> None:
    layer = rl.nn.Conv1d(2, 3, 5, padding=2)
    values = torch.randn(12, 2)
    values[4] = torch.nan
    out = layer(Ragged.from_flat(values, lengths=[4, 3, 5]))
    assert not out[0].isnan().any()
    assert out[1].isnan().all()
    assert not out[2].isnan().any()


@pytest.mark.parametrize("layer", [rl.nn.Conv1d(2, 3, 3, 2, 1), rl.nn.Conv1d(2, 3, 3, 1, "same")])
def test_bfloat16_and_autocast(layer: rl.nn.Conv1d) -> None:
    batch = batch_of(LENGTHS, 2, dtype=torch.float32)
    expected = layer(batch).values
    with torch.autocast("cpu", torch.bfloat16):
        cast = layer(batch).values
    low = copy.deepcopy(layer).bfloat16()(batch.to(torch.bfloat16)).values
    assert cast.dtype is low.dtype is torch.bfloat16
    torch.testing.assert_close(cast.float(), expected, rtol=0.05, atol=0.05)
    torch.testing.assert_close(low.float(), expected, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", ["max", "avg"])
@pytest.mark.parametrize("features", [(), (3,), (2, 2)])
@pytest.mark.parametrize(
    "sizes", [(2,), (3, 1, 1), (3, 2, 1), (2, 5), (1, 2), (4, 1, 2), (5, 3, 0)]
)
@pytest.mark.parametrize("lengths", BATCHES)
def test_poolings(
    lengths: list[int], sizes: tuple[int, ...], features: tuple[int, ...], kind: str
) -> None:
    torch.manual_seed(0)
    layer = {"max": rl.nn.MaxPool1d, "avg": rl.nn.AvgPool1d}[kind](*sizes)
    twin = {"max": nn.MaxPool1d, "avg": nn.AvgPool1d}[kind](*sizes)
    batch = batch_of(lengths, *features)
    parts = []
    for sequence in batch:
        rows = sequence.reshape(sequence.shape[0], -1) if len(sequence) else sequence
        is_short = len(sequence) == 0 or len(sequence) + 2 * layer.padding < layer.kernel_size
        parts.append(
            sequence.new_zeros(0, *features)
            if is_short
            else twin(rows.t().unsqueeze(0)).squeeze(0).t().reshape(-1, *features)
        )
    assert_equal_with_gradients(layer(batch), parts, [batch.values])


def test_ties_of_maxima_have_the_gradients_of_torch() -> None:
    batch = batch_of([5, 2], 1)
    equal = batch.with_values(torch.ones(7, 1, dtype=torch.float64, requires_grad=True))
    (grad,) = torch.autograd.grad(rl.nn.MaxPool1d(3, 1, 1)(equal).values.sum(), equal.values)
    theirs = []
    for length in (5, 2):
        row = torch.ones(1, 1, length, dtype=torch.float64, requires_grad=True)
        theirs.append(torch.autograd.grad(F.max_pool1d(row, 3, 1, 1).sum(), row)[0].flatten())
    assert torch.equal(grad.flatten(), torch.cat(theirs))


STATIC = [
    rl.nn.Conv1d(2, 3, 3, padding=1),
    rl.nn.Conv1d(2, 3, 4, padding="same", dilation=2),
    rl.nn.Conv1d(2, 3, 3, padding=3),
    rl.nn.MaxPool1d(3, 1, 1),
    rl.nn.AvgPool1d(3, 1, 1),
]
COUNTED = [rl.nn.Conv1d(2, 3, 3), rl.nn.Conv1d(2, 3, 3, 2, 1), rl.nn.AvgPool1d(2)]


@pytest.mark.parametrize("layer", STATIC, ids=str)
def test_in_one_graph(layer: nn.Module) -> None:
    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    for lengths in ([3, 0, 5], [4, 4], [9, 2, 1, 1]):
        batch = batch_of(lengths, 2, dtype=torch.float32)
        out, expected = compiled(batch), layer(batch)
        torch.testing.assert_close(out.values, expected.values)
        assert out.lengths.tolist() == expected.lengths.tolist()
        torch.testing.assert_close(
            torch.autograd.grad(out.values.sum(), batch.values),
            torch.autograd.grad(expected.values.sum(), batch.values),
        )


@pytest.mark.parametrize("layer", STATIC, ids=str)
def test_exported(layer: nn.Module) -> None:
    dim = torch.export.Dim
    batch = batch_of([3, 0, 5], 2, dtype=torch.float32).detach()
    (name,) = (name for name in ("input", "batch") if name in layer.forward.__code__.co_varnames)
    shapes: dict[str, Any] = {name: [{0: dim("elements")}, {0: dim("sequences") + 1}]}
    program = torch.export.export(layer, (batch,), dynamic_shapes=shapes)
    run = program.module(check_guards=False)
    for lengths in ([3, 0, 5], [4, 4], [9, 2, 1, 1]):
        other = batch_of(lengths, 2, dtype=torch.float32).detach()
        out, expected = run(other), layer(other)
        torch.testing.assert_close(out.values, expected.values)
        assert out.lengths.tolist() == expected.lengths.tolist()


@pytest.mark.parametrize("layer", COUNTED, ids=str)
def test_other_lengths_break_graphs_and_are_refused_by_exports(layer: nn.Module) -> None:
    batch = batch_of(LENGTHS, 2, dtype=torch.float32).detach()
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(batch).values, layer(batch).values)
    with pytest.raises(ArgumentError, match="windows must be as many steps"):
        torch.export.export(layer, (batch,))


@pytest.mark.parametrize("layer", [*STATIC, *COUNTED], ids=str)
def test_transformations(layer: nn.Module) -> None:
    batch = batch_of([3, 0, 5], 2, dtype=torch.float32)

    def run(values: Tensor) -> Tensor:
        return layer(batch.with_values(values)).values.pow(2).sum()

    values = batch.values.detach()
    (expected,) = torch.autograd.grad(run(batch.values), batch.values)
    torch.testing.assert_close(torch.func.grad(run)(values), expected)
    tangent = torch.randn_like(values)
    slope = torch.func.jvp(run, (values,), (tangent,))[1]
    torch.testing.assert_close(slope, (expected * tangent).sum())
    both = torch.stack([values, 2 * values])
    torch.testing.assert_close(torch.vmap(run)(both), torch.stack([run(both[0]), run(both[1])]))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("stride", [1, 2])
def test_second_derivatives(stride: int) -> None:
    layer = rl.nn.Conv1d(2, 3, 3, stride, 1, dtype=torch.float64)
    batch = batch_of([3, 0, 5], 2)

    def run(values: Tensor) -> Tensor:
        return layer(batch.with_values(values)).values.tanh()

    assert torch.autograd.gradgradcheck(run, (batch.values,))


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"in_channels": 0}, ArgumentError, "in_channels must be"),
        ({"out_channels": 2.5}, RaglaneError, "out_channels must be"),
        ({"kernel_size": 0}, ArgumentError, "kernel_size must be"),
        ({"stride": 0}, ArgumentError, "stride must be"),
        ({"dilation": 0}, ArgumentError, "dilation must be"),
        ({"groups": 3}, ArgumentError, "groups must be a divisor of in_channels = 4"),
        ({"padding": -1}, ArgumentError, "padding must be at least 0"),
        ({"padding": "full"}, ArgumentError, "padding must be one of same, valid"),
        ({"padding": "same", "stride": 2}, ArgumentError, "padding must be a number with a stride"),
        ({"padding_mode": "reflect"}, ArgumentError, "padding_mode must be one of zeros"),
        ({"bias": 1}, ArgumentTypeError, "bias must be True or False"),
        ({"dtype": torch.int64}, ShapeError, "dtype must be"),
    ],
)
def test_wrong_settings(options: dict[str, Any], error: type[RaglaneError], text: str) -> None:
    settings: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "kernel_size": 3}
    with pytest.raises(error, match=text):
        rl.nn.Conv1d(**settings | options)


@pytest.mark.parametrize("sizes", [(0,), (2, 0), (3, 1, 2), (2, 1, -1)])
@pytest.mark.parametrize("pool", [rl.nn.MaxPool1d, rl.nn.AvgPool1d])
def test_wrong_windows(pool: Any, sizes: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match="must be"):
        pool(*sizes)
    with pytest.raises(TypeError, match="ceil_mode"):
        pool(2, ceil_mode=True)


def test_wrong_batches() -> None:
    layer = rl.nn.Conv1d(2, 3, 3)
    with pytest.raises(ArgumentTypeError, match="input must be a Ragged"):
        layer(torch.zeros(1, 2, 5))  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="in_channels = 2 features"):
        layer(Ragged([torch.zeros(4, 3)]))
    with pytest.raises(ShapeError, match=r"of dtype torch\.float32"):
        layer(Ragged([torch.zeros(4, 2).double()]))
    for pool in (rl.nn.MaxPool1d(2), rl.nn.AvgPool1d(2)):
        with pytest.raises(ArgumentTypeError, match="batch must be a Ragged"):
            pool(torch.zeros(1, 2, 5))  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match="floating"):
            pool(Ragged([[1, 2, 3]]))


def test_layers_are_stored() -> None:
    batch = batch_of(LENGTHS, 2, dtype=torch.float32)
    for layer in (*STATIC, *COUNTED):
        for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert torch.equal(other(batch).values, layer(batch).values)
            assert repr(other) == repr(layer)
        file = io.BytesIO()
        torch.save(layer.state_dict(), file)
        file.seek(0)
        layer.load_state_dict(torch.load(file, weights_only=True))
