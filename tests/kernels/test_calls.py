"""The one way of a layer's call to C: by torch's operators, or by ctypes where they are missing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import raglane as rl
from cpu_networks import (
    ELEMENTWISE_CELLS,
    LIBRARY,
    MATRIX_CELLS,
    assert_same_bits,
    make,
    with_gradients,
)
from guarded import chosen_library
from raglane.errors import ArgumentError, ShapeError
from raglane.kernels import tensor_checks
from raglane.kernels.cpu.backend import BACKEND
from raglane.kernels.cpu.by_ctypes import CtypesCalls
from raglane.kernels.cpu.layer import Layer
from raglane.native import library

CELLS = [*MATRIX_CELLS, *ELEMENTWISE_CELLS]
needs_operators = pytest.mark.skipif(
    library.operators() is None, reason="raglane was installed without torch's operators"
)


def a_step(layer: torch.nn.Module, batch: rl.Ragged) -> list[Tensor]:
    """Return the output of a training step, and all gradients."""
    values = batch.values.detach().requires_grad_()
    out = layer(batch._like(values))[0].values
    return [out, *torch.autograd.grad(out.square().sum(), [values, *layer.parameters()])]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list of the operators, the calls by ctypes and the checks that were made."""
    made: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            made.append(name)
            return function(*arguments, **options)

        return call

    real = library.operators()
    if real is not None:
        operators = real._replace(
            forward=counted("forward", real.forward), backward=counted("backward", real.backward)
        )
        monkeypatch.setattr(library, "operators", lambda: operators)
    for name in ("forward_of", "backward_of"):
        monkeypatch.setattr(CtypesCalls, name, counted(name, getattr(CtypesCalls, name)))
    for name in ("try_validate", "normalised"):
        monkeypatch.setattr(
            tensor_checks.Gate, name, counted(name, getattr(tensor_checks.Gate, name))
        )
    return made


@needs_operators
@pytest.mark.parametrize("least_block", [LIBRARY.least_block, 1], ids=["small", "large"])
@pytest.mark.parametrize("by_products", [False, True])
@pytest.mark.parametrize("kind", [rl.nn.LSTM, rl.nn.GRU, rl.nn.SRU])
def test_a_call_of_any_size_is_checked_once(
    kind: Any,
    by_products: bool,
    least_block: int,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Layer, "_computes_all_gradients", lambda *_: not by_products)
    layer, batch = kind(3, 17), rl.Ragged([torch.randn(length, 3) for length in (5, 0, 40)])
    with chosen_library(replace(LIBRARY, least_block=least_block)):
        a_step(layer, batch)
    assert calls == ["forward", "backward"]


@needs_operators
@pytest.mark.parametrize("projected", [0, 4])
@pytest.mark.parametrize("cell", CELLS)
def test_ctypes_gives_the_bits_of_the_operators(
    cell: str, projected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if projected and cell != "lstm":
        pytest.skip("the cell has no projection")
    networks = [
        make(cell, [3, 0, 9], (5, 17, projected), directions=2),
        make(cell, [3, 0, 9], (17, 17, projected)),
    ]
    results = []
    for by_products in (False, True):
        monkeypatch.setattr(Layer, "_computes_all_gradients", lambda *_, p=by_products: not p)
        results += [with_gradients(network, BACKEND) for network in networks]
    monkeypatch.setattr(library, "operators", lambda: None)
    for by_products in (False, True):
        monkeypatch.setattr(Layer, "_computes_all_gradients", lambda *_, p=by_products: not p)
        for network in networks:
            assert_same_bits(with_gradients(network, BACKEND), results.pop(0))


@pytest.mark.parametrize("way", ["operators", "ctypes"])
def test_arguments_are_named_after_a_refusal(
    way: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "ctypes":
        monkeypatch.setattr(library, "operators", lambda: None)
    elif library.operators() is None:
        pytest.skip("raglane was installed without torch's operators")
    layer, batch = rl.nn.LSTM(3, 4), rl.Ragged([torch.randn(5, 3)])
    a_step(layer, batch)
    assert "normalised" not in calls
    calls.clear()
    layer.weight_hh_l0.data = torch.randn(16, 5)
    with pytest.raises(ShapeError, match=r"weight_hh_l0 must be .*\(16, 4\)"):
        a_step(layer, batch)
    assert calls.count("normalised") == 1
    assert not {"forward_of", "backward_of"} & set(calls)


@needs_operators
def test_what_only_a_copy_makes_readable(calls: list[str]) -> None:
    layer, values = rl.nn.GRU(3, 4), torch.randn(5, 3)
    wanted = layer(rl.Ragged([values]))[0].values
    calls.clear()
    found = layer(rl.Ragged.from_flat(torch._neg_view(-values), lengths=[5]))[0].values
    assert torch.equal(found, wanted)
    assert calls[:2] == ["forward", "normalised"]
    assert calls[-1] == "forward_of"


STATUSES = [
    (2, MemoryError, "too little. Pass a smaller batch"),
    (-1, ArgumentError, "raglane's cpu kernels: too little"),
]


@needs_operators
@pytest.mark.parametrize("operator", ["forward", "backward"])
@pytest.mark.parametrize(("status", "error", "words"), STATUSES)
def test_a_failure_is_no_refusal(
    operator: str,
    status: int,
    error: type[Exception],
    words: str,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is tried again if memory is short, or saved tensors have been overwritten."""
    real = library.operators()
    assert real is not None
    failing = real._replace(**{operator: lambda *_: ([], status, "too little")})
    monkeypatch.setattr(library, "operators", lambda: failing)
    with pytest.raises(error, match=words):
        a_step(rl.nn.GRU(3, 4), rl.Ragged([torch.randn(5, 3)]))
    assert not {"normalised", "forward_of", "backward_of"} & set(calls)


@needs_operators
def test_results_that_exceed_the_memory() -> None:
    layer = rl.nn.IndRNN(1, 1 << 24)  # the output would have 256 TiB
    batch = rl.Ragged.from_flat(torch.zeros(1 << 22, 1), lengths=[1 << 22])
    with torch.no_grad(), pytest.raises(MemoryError, match="not enough memory"):
        layer(batch)
