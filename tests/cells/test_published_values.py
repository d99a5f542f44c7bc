"""Cells against published numbers: results of ONNX Runtime for the operators, and an SRU by
hand.
"""

from __future__ import annotations

from math import log
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import raglane as rl

LENGTHS = [4, 1, 2]
D = H = 2


class Case(NamedTuple):
    """Results of ONNX Runtime 1.31 in float32 for an operator of opset 22, with the layer that must
    agree.

    Its inputs are those of :func:`_inputs`: ``initial_h`` and, of an LSTM, ``initial_c`` were
    always given, and ``sequence_lens`` 4, 1 and 2. (A sequence of length 0 ends with zeros in ONNX
    Runtime, with its initial state here.)
    """

    layer: str
    options: dict[str, Any]
    output: str
    """``Y`` of the elements that exist, sequence after sequence."""
    final_h: str
    """``Y_h``."""
    final_c: str | None = None
    """``Y_c``."""


# By operator and attributes.
CASES = {
    "LSTM: P, clip 0.75": Case(
        "PeepholeLSTM",
        {"clip": 0.75},
        "-0.141175 0.018290 0.072074 0.062676 0.167394 0.135049 0.201612 0.228658 0.136512 -0.257026 "
        "0.027198 0.164612 0.092380 0.257027",
        "0.201612 0.228658 0.136512 -0.257026 0.092380 0.257027",
        "0.738807 0.350330 0.203769 -1.101814 0.296327 0.398235",
    ),
    "LSTM: input_forget 1, clip 0.75": Case(
        "CoupledLSTM",
        {"clip": 0.75},
        "-0.180137 0.139245 0.103148 0.165394 0.156206 0.198444 0.171884 0.277397 0.136512 -0.319720 "
        "-0.000890 0.138225 0.069291 0.271322",
        "0.171884 0.277397 0.136512 -0.319720 0.069291 0.271322",
        "0.598194 0.433725 0.203769 -0.757224 0.219435 0.423037",
    ),
    "GRU: linear_before_reset 0, bidirectional": Case(
        "GRU",
        {"reset_after": False, "bidirectional": True},
        "-0.254645 0.448882 0.122581 0.748281 -0.254126 0.064236 0.104111 0.894314 -0.242624 -0.195329 "
        "0.467148 0.844238 -0.223759 -0.177422 0.770977 0.655247 0.346593 0.489530 0.368799 -0.525387 "
        "-0.995733 -0.196059 0.712854 0.863021 -0.943938 -0.047404 0.980704 0.745086",
        "-0.223759 -0.177422 0.346593 0.489530 -0.943938 -0.047404 0.122581 0.748281 0.368799 -0.525387 "
        "0.712854 0.863021",
    ),
    "GRU: linear_before_reset 0, clip 0.75": Case(
        "GRU",
        {"reset_after": False, "clip": 0.75},
        "-0.178749 0.190764 -0.088670 -0.074207 -0.037766 -0.248983 -0.037064 -0.207976 0.429913 0.327495 "
        "-0.869268 -0.171693 -0.641135 -0.152203",
        "-0.037064 -0.207976 0.429913 0.327495 -0.641135 -0.152203",
    ),
}

# The blocks of ONNX's rows that make up ours, with the factor that they need. ONNX orders gates
# iofc, zrh and iof.
BLOCKS: dict[str, list[tuple[int, float]]] = {
    "PeepholeLSTM": [(0, 1.0), (2, 1.0), (3, 1.0), (1, 1.0)],
    # ONNX computes i and takes 1 - i for f, we compute f: sigmoid(-a) is 1 - sigmoid(a).
    "CoupledLSTM": [(0, -1.0), (3, 1.0), (1, 1.0)],
    "GRU": [(1, 1.0), (0, 1.0), (2, 1.0)],
}


def _numbers(start: int, *shape: int) -> Tensor:
    """Quarters from -1.25 to 1.25, exact in every dtype."""
    return ((((torch.arange(torch.Size(shape).numel()) + start) * 7) % 11 - 5).double() / 4).view(
        shape
    )


def _inputs(case: Case) -> dict[str, Tensor]:
    """The operator's inputs, shaped as it has them."""
    gates = 3 if case.layer == "GRU" else 4
    directions = 2 if case.options.get("bidirectional") else 1
    return {
        "X": _numbers(0, max(LENGTHS), len(LENGTHS), D),
        "W": _numbers(1, directions, gates * H, D),
        "R": _numbers(2, directions, gates * H, H),
        "B": _numbers(3, directions, 2 * gates * H),
        "initial_h": _numbers(4, directions, len(LENGTHS), H),
        "initial_c": _numbers(5, directions, len(LENGTHS), H),
        "P": _numbers(6, directions, 3 * H),
    }


def _ours(rows: Tensor, blocks: list[tuple[int, float]]) -> Tensor:
    return torch.cat([factor * rows[block * H : (block + 1) * H] for block, factor in blocks])


def _layer(case: Case, inputs: dict[str, Tensor], backend: str) -> Any:
    layer = getattr(rl.nn, case.layer)(D, H, dtype=torch.float64, backend=backend, **case.options)
    blocks = BLOCKS[case.layer]
    weights: dict[str, Tensor] = {}
    for direction, suffix in enumerate(["_l0", "_l0_reverse"][: len(inputs["W"])]):
        input_bias, hidden_bias = inputs["B"][direction].chunk(2)
        given = {
            "weight_ih": inputs["W"][direction],
            "weight_hh": inputs["R"][direction],
            "bias_ih": input_bias,
            "bias_hh": hidden_bias,
        }
        weights |= {name + suffix: _ours(rows, blocks) for name, rows in given.items()}
        if case.layer == "PeepholeLSTM":
            weights["weight_ch" + suffix] = _ours(
                inputs["P"][direction], [(0, 1.0), (2, 1.0), (1, 1.0)]
            )
    layer.load_state_dict(weights)
    return layer


def _approximately(numbers: str) -> Any:
    """ONNX Runtime computes in float32."""
    return pytest.approx([float(number) for number in numbers.split()], abs=1e-6)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_onnx_operators(case: Case, backend: str) -> None:
    inputs = _inputs(case)
    layer = _layer(case, inputs, backend)
    batch = rl.Ragged.from_padded(inputs["X"], torch.tensor(LENGTHS), batch_first=False)
    initial = (inputs["initial_h"], inputs["initial_c"]) if case.final_c else inputs["initial_h"]
    with torch.no_grad():
        out, state = layer(batch, initial)
    h, *memory = state if case.final_c else (state,)
    assert out.values.flatten().tolist() == _approximately(case.output)
    assert h.flatten().tolist() == _approximately(case.final_h)
    if case.final_c:
        assert memory[0].flatten().tolist() == _approximately(case.final_c)


def test_sru_by_hand() -> None:
    # W_n = 2, W_f = W_r = 0, v_f = log 3, v_r = -log 3, no bias. sigmoid(log 3) = 3 / 4. x = 1: n =
    # 2, f = r = 1/2. c = 0 + 1/2 * 2 = 1,           h = 1/2 * 1 + 1/2 * 1 = 1. x = 3: n = 6, f =
    # 3/4, r = 1/4. c = 3/4 * 1 + 1/4 * 6 = 2.25, h = 1/4 * 2.25 + 3/4 * 3 = 2.8125.
    layer: Any = rl.nn.SRU(1, 1, dtype=torch.float64, backend="reference")
    with torch.no_grad():
        layer.weight_ih_l0.copy_(torch.tensor([[2.0], [0.0], [0.0]]))
        layer.weight_hh_l0.copy_(torch.tensor([log(3), -log(3)], dtype=torch.float64))
        layer.bias_ih_l0.zero_()
        _, _, states = layer.with_states(rl.Ragged([torch.tensor([[1.0], [3.0]]).double()]))
    h, c = states[0]
    assert h.values.flatten().tolist() == pytest.approx([1.0, 2.8125], abs=1e-14)
    assert c.values.flatten().tolist() == pytest.approx([1.0, 2.25], abs=1e-14)
