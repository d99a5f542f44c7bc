"""Printed kernels on a GPU: every layer against the float64 reference on the CPU, with the sizes of
real models.

Without a GPU, tests/kernels/test_triton.py runs them on Triton's interpreter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

import raglane as rl
from every_layer import D, a_state, gradients, parts, results_of
from on_triton import NAMES, layer_of
from raglane.kernels import program
from raglane.nn.recurrent import call

_HOST = torch.device("cpu")
_LENGTHS = [5, 0, 1, 40, 17, 16, 3, 2, 33, 1, 0, 64, 7, 9, 21, 30, 2, 4, 6]


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("runs with --device cuda")


@pytest.mark.parametrize("with_resets", [False, True])
@pytest.mark.parametrize("units", [0, 128])
@pytest.mark.parametrize("name", NAMES)
def test_values_gradients_and_bits(
    name: str, units: int, with_resets: bool, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(
        call, "_resets_in_steps", lambda plan, *_: with_resets and plan.backend is program.GPU
    )
    with _HOST:
        whole = layer_of(name, units, bidirectional=True)
        narrow = layer_of(name, units, bidirectional=True).float()
        narrow.load_state_dict(whole.state_dict())
        values, state = (
            torch.randn(sum(_LENGTHS), D, dtype=torch.float64),
            parts(a_state(whole, len(_LENGTHS))),
        )
        resets = torch.arange(sum(_LENGTHS)) % 4 != 1

    def run(layer: Any, place: torch.device, backend: str) -> list[torch.Tensor]:
        like = next(layer.parameters())
        own = [part.detach().to(like).requires_grad_() for part in (values, *state)]
        flags = rl.Ragged.from_flat(resets.to(place), lengths=_LENGTHS) if with_resets else None
        with rl.use_backend(backend=backend):
            hx = tuple(own[1:]) if len(own) > 2 else own[1]
            results = results_of(
                layer(
                    rl.Ragged.from_flat(own[0], lengths=_LENGTHS),
                    hx,
                    _with_states=True,
                    resets=flags,
                )
            )
        return [
            part.detach().to(_HOST)
            for part in (*results, *gradients(results, [*own, *layer.parameters()]))
        ]

    right = run(whole, _HOST, "reference")
    narrow.to(device)
    mine, again = (run(narrow, device, "triton") for _ in range(2))
    # Layer norms of a few features amplify the rounding of their inputs: torch's own float32
    # differs as much.
    allowed = 5e-4 if "layernorm" in name else 2e-5
    for found, wanted in zip(mine, right, strict=True):
        assert float((found - wanted).abs().max() / (1 + wanted.abs().max())) < allowed
    assert all(map(torch.equal, mine, again))


@pytest.mark.parametrize("name", ["mingru", "minlstm", "qrnn", "indrnn_tanh", "sru"])
def test_long_sequences_in_chunks(name: str, device: torch.device) -> None:
    """Values and gradients are those of float64, and the bits of a sequence those of its batch."""
    lengths = [1030, 7, 1025, 0, 3000, 1024]
    with _HOST:
        whole = layer_of(name, 128)
        narrow = layer_of(name, 128).float()
        narrow.load_state_dict(whole.state_dict())
        values = torch.randn(sum(lengths), D, dtype=torch.float64, requires_grad=True)
        right, _ = whole(rl.Ragged.from_flat(values, lengths=lengths))
        expected = [
            right.values,
            *torch.autograd.grad(right.values.sum(), [values, *whole.parameters()]),
        ]
    narrow.to(device)
    own = values.detach().to(device, torch.float32).requires_grad_()
    batch = rl.Ragged.from_flat(own, lengths=lengths)
    with rl.use_backend(backend="triton"):
        output, _ = narrow(batch)
        found = [
            output.values,
            *torch.autograd.grad(output.values.sum(), [own, *narrow.parameters()]),
        ]
        with torch.no_grad():
            alone = [narrow(rl.Ragged([part]))[0].values for part in batch.to_list()]
    for one, wanted in zip(found, expected, strict=True):
        assert (
            float((one.detach().to(_HOST) - wanted).abs().max() / (1 + wanted.abs().max())) < 2e-5
        )
    assert all(map(torch.equal, alone, output.to_list()))


@pytest.mark.parametrize("name", NAMES)
def test_bits_do_not_depend_on_the_batch(name: str, device: torch.device) -> None:
    layer = layer_of(name).float().to(device)
    batch = rl.Ragged([torch.randn(length, D, device=device) for length in _LENGTHS])
    with rl.use_backend(backend="triton"), torch.no_grad():
        together = layer(batch)[0].to_list()
        alone = [layer(rl.Ragged([part]))[0].values for part in batch.to_list()]
    assert all(map(torch.equal, alone, together))


@pytest.mark.parametrize("name", ["gru", "sru"])
def test_a_package_contains_the_kernels(name: str, device: torch.device, tmp_path: Path) -> None:
    layer = layer_of(name, num_layers=2, bidirectional=True).float().to(device)
    batch = rl.Ragged([torch.randn(length, D, device=device) for length in (3, 5)])
    made = rl.export.aot_inductor(layer, tmp_path / "model.pt2", example=batch, layout="flat")
    assert (made.layers, made.loops) == (2, 0)
    assert cast(Any, made.verified).largest_difference < 1e-5
