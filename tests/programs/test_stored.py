"""Programs on the disk: found by a new process, and verified before use."""

from __future__ import annotations

import copy
import hashlib
import json
import random
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import raglane as rl
from every_layer import KINDS, H, a_batch, build
from raglane.kernels.program import backend
from raglane.programs import stored
from raglane.programs.compiled import CompiledStep
from raglane.programs.graph import Unkept
from raglane.programs.step import Step
from scripts import Script

pytestmark = pytest.mark.skipif(
    bool(rl.native.missing_kernels()), reason="programs run on the cpu kernels"
)


class Leaky(nn.Module):
    """A cell that reads a sigmoid of a parameter, a buffer, a constant and a number."""

    def __init__(self, input_size: int = 3, hidden_size: int = H) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.low = input_size, hidden_size, -0.5
        self.linear = nn.Linear(input_size + hidden_size, hidden_size)
        self.decay = nn.Parameter(torch.ones(hidden_size))
        self.register_buffer("order", torch.arange(hidden_size - 1, -1, -1))

    def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        new = self.linear(torch.cat([x_t, state], 1))[:, self.order].clamp(min=self.low)
        state = torch.lerp(new, state, self.decay.sigmoid() * torch.tensor([0.5, 1.0, 1.0, 1.0]))
        return state.tanh(), state


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAGLANE_CACHE", str(tmp_path))
    backend._steps.clear()
    return tmp_path / "programs"


def answers(layer: Any, batch: rl.Ragged) -> list[Tensor]:
    """Return the outputs of a layer and all gradients."""
    torch.manual_seed(1)
    layer.zero_grad()
    out = layer(batch)[0].values
    out.sin().sum().backward()
    return [
        out.detach(),
        *[part.grad.clone() for part in layer.parameters() if part.grad is not None],
    ]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def compiled() -> list[CompiledStep]:
    """All programs of this process."""
    found = list(backend._steps.values())
    assert all(isinstance(part, CompiledStep) for part in found)
    return found  # type: ignore[return-value]


def leaky() -> tuple[Any, rl.Ragged, list[Tensor]]:
    """Return a layer whose program is on the disk, a batch, and the layer's answers."""
    torch.manual_seed(0)
    layer, batch = (
        rl.nn.Recurrent(Leaky, 3, H),
        rl.Ragged([torch.randn(length, 3) for length in (3, 0, 5)]),
    )
    expected = answers(layer, batch)
    backend._steps.clear()
    return layer, batch, expected


def signed(body: str) -> str:
    """The content of a file with its digest."""
    return f"{hashlib.sha256(body.encode()).hexdigest()}\n{body}\n"


def test_every_cell_of_the_library_comes_back_with_its_bits(folder: Path) -> None:
    cases = [
        *[build(kind, backend="program") for kind in KINDS],
        rl.nn.LSTM(3, 6, proj_size=2, backend="program", dtype=torch.float64),
        rl.nn.LSTM(3, H, zoneout=0.5, dtype=torch.float64),
        rl.nn.GRU(3, H, state_dropout=0.5, dtype=torch.float64),
        rl.nn.Recurrent(lambda *sizes: Leaky(*sizes).double(), 3, H),
    ]
    batch = a_batch()
    for layer in cases:
        backend._steps.clear()
        expected = answers(layer, batch)
        # A regularised cell is traced as the cell inside of it, too, which may be there already.
        assert {part.not_kept for part in compiled()} == {""}, layer
        assert not compiled()[-1].is_read
        backend._steps.clear()
        assert same(answers(layer, batch), expected)
        assert compiled()
        assert all(part.is_read for part in compiled()), layer
        assert "read from the disk and verified in" in rl.explain(layer, batch).reason
    assert len(list(folder.iterdir())) >= len(cases)


def _step(layer: Any) -> Step:
    sizes = layer.cell.state_sizes(layer.hidden_size)
    return backend.step_of(
        layer.cell, layer.cells[0], layer.input_size, sizes, next(layer.parameters()).dtype
    )


def test_a_fresh_process_finds_it_without_a_compiler(script: Script, folder: Path) -> None:
    code = dedent("""
        import sys, torch, raglane as rl
        class Cell(torch.nn.Linear):
            input_size, hidden_size = 3, 5
            def step(self, x_t, state):
                state = self(torch.cat([x_t, state], 1)).tanh() * self.bias.neg().exp()
                return state, state
        torch.default_generator.manual_seed(0)  # torch.manual_seed imports torch._dynamo
        batch, layer = rl.Ragged([torch.randn(length, 3) for length in (3, 0, 5)]), rl.nn.Recurrent(Cell(8, 5))
        out = layer(batch)[0].values
        print([part.tolist() for part in (out, *torch.autograd.grad(out.sum(), [*layer.parameters()]))])
        print("torch._dynamo" in sys.modules, "read from the disk" in rl.explain(layer, batch).reason)
    """)
    first, second = (script(code, RAGLANE_CACHE=str(folder.parent)) for _ in range(2))
    assert first.stdout.endswith("False False\n"), first.stderr
    assert second.stdout == first.stdout.replace("False\n", "True\n"), second.stderr


def test_a_file_that_was_spoilt_is_written_anew(folder: Path) -> None:
    layer, batch, expected = leaky()
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    drawn = random.Random(0)
    spoilt = [
        whole[:length]
        for length in (0, 1, 63, 64, 65, 66, len(whole) // 2, len(whole) - 2, len(whole) - 1)
    ]
    spoilt += [
        whole[:place] + bytes([whole[place] ^ (1 << drawn.randrange(7))]) + whole[place + 1 :]
        for place in (*range(0, 70, 20), *range(70, len(whole), len(whole) // 10))
    ]
    spoilt += [
        whole + b" ",
        b"\n" + whole,
        whole.replace(b'"key"', b'"Key"'),
        b"[" * 100_000,
        b"\xff" * 9,
    ]
    for content in spoilt:
        assert content != whole
        file.write_bytes(content)
        backend._steps.clear()
        assert not backend.ready(_step(layer)).is_read
        assert file.read_bytes() == whole
    assert same(answers(layer, batch), expected)


def test_another_step_under_the_same_key_is_not_believed(folder: Path) -> None:
    """A changed file with a right digest differs from torch, so the step is traced again."""
    layer, batch, expected = leaky()
    (file,) = folder.iterdir()
    whole = file.read_text()
    body = whole.split("\n")[1].replace("-0.5", "0.25")
    assert body != whole.split("\n")[1]
    file.write_text(signed(body))
    assert same(answers(layer, batch), expected)
    assert [part.is_read for part in compiled()] == [False]
    assert file.read_text() == whole


def test_any_file_gives_the_right_numbers_or_none(folder: Path) -> None:
    layer, batch, expected = leaky()
    (file,) = folder.iterdir()
    content = json.loads(file.read_text().split("\n")[1])
    drawn, refused, read = random.Random(0), 0, 0
    for _ in range(60):
        changed = copy.deepcopy(content)
        for _ in range(drawn.choice((1, 1, 2))):
            _spoil(changed, drawn)
        file.write_text(signed(json.dumps(changed)))
        backend._steps.clear()
        is_read = backend.ready(_step(layer)).is_read
        refused += not is_read
        read += is_read
        if is_read:  # another spelling of the same, or a number that rounding hides
            torch.testing.assert_close(answers(layer, batch), expected, rtol=1e-3, atol=1e-3)
    assert refused > 36
    assert read > 0


ODD = [
    0,
    1,
    -1,
    2,
    5,
    1 << 40,
    1 << 70,
    -(1 << 63),
    0.5,
    -0.0,
    float("nan"),
    float("inf"),
    "",
    "tanh",
    "add",
    "matmul",
]
ODD += [
    None,
    True,
    [],
    {},
    [0, 1, 4],
    {"$known": 0},
    {"$known": 99},
    {"$named": "x"},
    {"$named": "cpu"},
    "element",
]


def _spoil(place: Any, drawn: random.Random) -> None:
    """Change something at some depth."""
    key = drawn.choice(list(place) if isinstance(place, dict) else range(len(place)))
    inner = place[key]
    if isinstance(inner, list | dict) and inner and drawn.random() >= 0.1:
        _spoil(inner, drawn)
        return
    how = drawn.random()
    if how < 0.15 and isinstance(place, list):
        del place[key]
    elif how < 0.3 and isinstance(place, list):
        place.insert(key, copy.deepcopy(drawn.choice(place)))
    elif how < 0.5 and type(inner) in (int, float):
        place[key] = inner + drawn.choice((1, -1))
    else:
        place[key] = drawn.choice(ODD)


def test_an_operation_that_needs_all_memory_is_not_computed(folder: Path) -> None:
    layer, _, _ = leaky()
    (file,) = folder.iterdir()
    content = json.loads(file.read_text().split("\n")[1])
    huge = ["expand", "default", [{"$known": 0}, [1 << 20, 1 << 20, 4]], {}, 1]
    step = _step(layer)
    in_place = ["add_", "Tensor", [{"$known": 0}, {"$known": 0}], {}, 1]
    out = ["sigmoid", "out", [{"$known": 0}], {"out": {"$known": 0}}, 1]
    for call in (huge, ["from_file", "default", ["/dev/null"], {}, 1], in_place, out):
        with pytest.raises(Unkept):
            stored.read(
                signed(json.dumps(content | {"calls": [*content["calls"], call]})),
                content["key"],
                step,
            )
    stored.read(signed(json.dumps(content)), content["key"], step)


def test_a_program_that_cannot_be_stored_has_a_reason(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = SimpleNamespace(scale=0.5)

    class Around(Leaky):
        def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return state, state * around.scale + x_t[:, :1]

    class Computed(Leaky):
        def step(self, x_t: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            return state, state + torch.linalg.inv(self.linear.weight[:, :4])[0] * x_t[:, :1]

    batch = rl.Ragged([torch.randn(length, 3) for length in (3, 0, 5)])
    unknown = "reads a SimpleNamespace, whose value in another process is unknown"
    for kind, reason in ((Around, unknown), (Computed, "computes linalg_inv")):
        choice = rl.explain(rl.nn.Recurrent(kind, 3, H), batch)
        assert choice.backend == "program", choice.reason
        assert "traced and verified in" in choice.reason
        assert f"not kept on the disk: it {reason}" in choice.reason
    assert not folder.exists()
    (folder.parent / "file").write_text("")
    monkeypatch.setenv("RAGLANE_CACHE", str(folder.parent / "file"))
    layer = rl.nn.Recurrent(Leaky, 3, H)
    layer(batch)
    backend._steps.clear()
    reason = rl.explain(layer, batch).reason
    assert "; traced and verified in" in reason
    assert "not kept on the disk: the cache folder is not writable: " in reason
