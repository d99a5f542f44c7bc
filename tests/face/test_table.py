"""Each torch function is in the table or refused by name, and elements of the table are right."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import get_overridable_functions, resolve_name

import raglane as rl
from raglane.errors import RaglaneError
from raglane.ragged.face import refusals, table

LENGTHS, SIZE = (3, 1, 2), 4
REFUSED = Path(__file__).with_name("refused.txt")

# Arguments after the input, of functions for which the general ones are no valid call.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "addcdiv": (..., ...),
    "addcmul": (..., ...),
    "alpha_dropout": (0.5, True),
    "bucketize": (torch.tensor([0.3, 0.5]),),
    "celu": (),
    "dropout": (0.5, True),
    "feature_alpha_dropout": (0.5, True),
    "full_like": (1.5,),
    "hardtanh": (),
    "isin": (torch.tensor([0.3, 0.5]),),
    "lerp": (..., 0.3),
    "masked_fill": (torch.arange(SIZE) > 1, 0.0),
    "prelu": (torch.ones(1),),
    "randint_like": (9,),
    "threshold": (0.5, 0.1),
}
GENERAL: tuple[tuple[Any, ...], ...] = ((), (...,), (1,), (0.1, 0.9))
RANDOM = re.compile(r"dropout|rand|empty|bernoulli|rrelu|poisson")


def _inputs() -> list[Tensor]:
    """Return flat values of each kind of numbers."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(sum(LENGTHS), SIZE, generator=generator) * 0.8 + 0.1
    return [numbers, (numbers * 9).long(), numbers > 0.5, torch.complex(numbers, numbers)]


def _call(function: Callable[..., Any], name: str, batch: Any, rest: tuple[Any, ...]) -> Any:
    rest = tuple(batch if part is ... else part for part in rest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            if name == "polygamma":
                return function(1, batch)
            if name == "where":
                return function(batch > 0.5, batch, 0.0)
            return function(batch, *rest)
        except Exception as error:  # any kind shows that the call is not supported
            return error


@pytest.mark.parametrize(
    "name", [name for name, row in table.ROWS.items() if row.kind == "each element"]
)
def test_functions_of_each_element(name: str) -> None:
    homes = (torch, F, torch.special) if name[:2] != "__" else (Tensor,)
    functions = [getattr(home, name) for home in homes if hasattr(home, name)]
    if name in ("expand_as", "frexp", "searchsorted") or name[:2] == "__":
        return  # operators and expand_as are in test_face.py
    for values, rest in itertools.product(
        _inputs(), [ARGUMENTS[name]] if name in ARGUMENTS else GENERAL
    ):
        expected = _call(functions[0], name, values, rest)
        if not isinstance(expected, Tensor):
            continue
        result = _call(functions[0], name, rl.Ragged.from_flat(values, lengths=LENGTHS), rest)
        assert isinstance(result, rl.Ragged), result
        assert (result.values.shape, result.dtype) == (expected.shape, expected.dtype)
        if not RANDOM.search(name):
            torch.testing.assert_close(result.values, expected, equal_nan=True)
        return
    raise AssertionError(f"no valid call of {name}")


def _names() -> set[str]:
    """Return the names of all functions of torch that can be overridden."""
    functions = itertools.chain.from_iterable(get_overridable_functions().values())
    return {
        (resolve_name(function) or str(function)).removeprefix("torch.")
        for function in functions
        if function not in table.TABLE
    }


def test_each_function_of_torch_is_in_the_table_or_refused() -> None:
    """A function of a new version of torch is in neither, and fails this test."""
    listed = set(REFUSED.read_text(encoding="utf-8").split())
    patterns = re.compile("|".join(f"(?:{pattern})" for pattern, _, _ in refusals.REFUSALS))
    others = {
        name
        for name in _names() - listed
        if not patterns.fullmatch(name.rpartition(".")[2].removesuffix(".__get__"))
    }
    if torch.__version__.startswith("2.13."):
        assert not others


@pytest.mark.parametrize("name", ["cdist", "tril", "trapezoid", "bmm"])
def test_refusals_name_the_function(name: str) -> None:
    batch = rl.Ragged([torch.ones(2, 4), torch.ones(1, 4)])
    arguments = [batch, batch] if name in ("cdist", "bmm") else [batch]
    with pytest.raises(RaglaneError, match=name):
        getattr(torch, name)(*arguments)


@pytest.mark.parametrize(
    "call",
    [
        lambda r: nn.BatchNorm1d(4)(r),
        lambda r: nn.Conv1d(4, 4, 1)(r),
        lambda r: nn.MaxPool1d(2)(r),
        lambda r: nn.AdaptiveAvgPool1d(1)(r),
        lambda r: nn.InstanceNorm1d(4)(r),
        lambda r: nn.GroupNorm(2, 4)(r),
        lambda r: nn.LSTM(4, 2)(r),
        lambda r: nn.GRU(4, 2, batch_first=True)(r),
        lambda r: nn.MultiheadAttention(4, 2, batch_first=True)(r, r, r),
        lambda r: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)(r),
        lambda r: nn.Upsample(scale_factor=2)(r),
    ],
)
def test_modules_that_read_other_dimensions_are_refused_in_one_line(call: Any) -> None:
    with pytest.raises(Exception, match=r"^[^\n]+$") as raised:
        call(rl.Ragged([torch.ones(2, 4), torch.ones(1, 4)]))
    assert isinstance(raised.value, RaglaneError | AttributeError), raised.value


def test_shape_and_its_kin() -> None:
    batch: Any = rl.Ragged([torch.ones(2, 4), torch.ones(0, 4), torch.ones(1, 4)])
    assert batch.shape == batch.size() == (3, None, 4)
    assert (batch.ndim, batch.dim(), batch.numel(), batch.size(0), batch.size(-1)) == (
        3,
        3,
        12,
        3,
        4,
    )
    assert rl.Ragged([[1, 2], [3], []]).tolist() == [[1, 2], [3], []]
    assert (batch.is_cuda, batch.is_cpu, batch.is_pinned()) == (False, True, False)
    assert (batch.double().dtype, batch.half().dtype) == (torch.float64, torch.float16)
    assert batch.requires_grad_().requires_grad
    assert torch.equal(batch, batch.cpu())
    assert not torch.equal(batch, batch[:2])
    assert batch.type_as(torch.ones(1, dtype=torch.float64)).dtype is torch.float64


def test_indices_of_several_sequences() -> None:
    batch: Any = rl.Ragged([torch.randn(n, 2) for n in (3, 4, 2)])
    rows = batch.to_list()
    assert torch.equal(batch[1:3, :2].values, torch.cat([rows[1][:2], rows[2][:2]]))
    assert torch.equal(batch[[2, 0], 1:].values, torch.cat([rows[2][1:], rows[0][1:]]))
    assert torch.equal(batch[torch.tensor([2, 0]), [1, -1]], torch.stack([rows[2][1], rows[0][-1]]))
    assert torch.equal(batch[1, 1:, 0], rows[1][1:, 0])
    assert torch.equal(
        batch[torch.tensor([True, False, True]), -1], torch.stack([rows[0][-1], rows[2][-1]])
    )
    mask = batch[..., 0] > 0
    kept = batch[mask]
    assert kept.lengths.tolist() == mask.sum(1).tolist()
    assert torch.equal(kept.values, batch.values[batch.values[:, 0] > 0])
    joined: Any = torch.cat([batch, batch[:1]])
    assert joined.lengths.tolist() == [3, 4, 2, 3]
    assert [len(part) for part in torch.split(batch, 2)] == [2, 1]
    assert [part.lengths.tolist() for part in batch.split(2, 1)] == [[2, 2, 2], [1, 2, 0]]
    assert all(torch.equal(a, b) for a, b in zip(torch.unbind(batch), rows, strict=True))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda r, _t: F.cross_entropy(r, _t), "a Ragged of the same lengths"),
        (lambda r, _t: nn.MSELoss()(r, torch.ones(3, 3)), "a Ragged of the same lengths"),
        (lambda r, _t: F.mse_loss(r, r[:2]), "3 sequences.*2 sequences"),
        (
            lambda r, _t: F.mse_loss(r, torch.cat([r[:2], r[:1].concat(r[:1])])),
            "here 1, got length 2 for sequence 2",
        ),
        (lambda r, _t: F.mse_loss(r, r.sum(-1)), "feature dimension"),
        (lambda r, _t: F.cross_entropy(r[..., 0], r[..., 0].long()), "classes"),
        (lambda r, _t: r[..., 0] + _t, "broadcasts to"),
    ],
)
def test_one_row_per_sequence_is_no_row_per_step(call: Any, says: str) -> None:
    """Also where all lengths are 1, so that sizes agree."""
    batch: Any = rl.Ragged([torch.randn(1, 3) for _ in range(3)])
    with pytest.raises(RaglaneError, match=says):
        call(batch, torch.zeros(3, dtype=torch.int64))


def test_the_mean_of_kl_div_over_sequences() -> None:
    draw: Any = lambda: rl.Ragged([torch.rand(n, 3) for n in (2, 3)])  # noqa: E731
    inputs, target = draw(), draw()
    total = F.kl_div(inputs.values, target.values, reduction="sum")
    torch.testing.assert_close(F.kl_div(inputs, target, reduction="batchmean"), total / 2)
    assert F.mse_loss(inputs[:0], target[:0]).isnan()


GRAPHS: list[Any] = [
    lambda x, _y: x.mean(1),
    lambda x, _y: (x - x.mean(1, keepdim=True)).std(1),
    lambda x, y: torch.cat([torch.relu(x) * 2 + y, y], -1)[:, 1:].sum(1),
    lambda x, y: F.mse_loss(x, y) + F.l1_loss(x, y, reduction="none").amax(1).sum(),
    lambda x, _y: x.logsumexp(1) + x.max(-1).values.sum(1)[:, None],
    lambda x, y: (x[:, 1:] - y[:, :-1]).softmax(1).sum(1),
]


@pytest.mark.parametrize("function", GRAPHS)
def test_in_graphs(function: Any) -> None:
    compiled: Any = torch.compile(function, fullgraph=True, backend="aot_eager")

    class Model(nn.Module):
        def forward(self, x: Any, y: Any) -> Any:
            return function(x, y)

    def draw(lengths: list[int]) -> list[rl.Ragged]:
        return [rl.Ragged([torch.randn(n, 3) for n in lengths]) for _ in range(2)]

    sizes = [{0: torch.export.Dim.DYNAMIC}] * 2
    exported = torch.export.export(Model(), (*draw([3, 2, 4]),), dynamic_shapes=(sizes, sizes))
    for lengths in ([3, 2, 4], [2, 5], [6, 2, 2, 2]):
        batches = draw(lengths)
        expected = function(*batches)
        torch.testing.assert_close(compiled(*batches), expected)
        torch.testing.assert_close(exported.module()(*batches), expected)


@pytest.mark.parametrize("name", ["multi_margin_loss", "multilabel_margin_loss"])
def test_a_loss_of_no_element_is_no_memory(name: str) -> None:
    """Torch's own result for no element is what the memory held before."""
    values = torch.zeros(0, 5, requires_grad=True)
    batch = rl.Ragged.from_flat(values, lengths=[0, 0])
    shape = (0,) if name == "multi_margin_loss" else (0, 5)
    target = rl.Ragged.from_flat(torch.zeros(shape, dtype=torch.int64), lengths=[0, 0])
    loss: Any = getattr(F, name)
    for _ in range(3):
        torch.full((1,), 7.5)
        assert loss(batch, target).isnan()
        total = loss(batch, target, reduction="sum")
        assert total == 0
        total.backward()
    assert loss(batch, target, reduction="none").shape == (2, None)
    assert values.grad is not None
