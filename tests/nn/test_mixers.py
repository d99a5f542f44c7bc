"""Mamba and its kin, against loops over the steps of each sequence that are written from the papers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import raglane as rl
from every_layer import (
    assert_nan_stays_in_its_sequence,
    assert_same,
    assert_same_for_every_input,
    gradients,
    parts,
)
from raglane.errors import ArgumentError, DispatchError
from raglane.kernels.cpu.prepared import PreparedProgram
from raglane.kernels.cpu.steps import MambaStep, can_step, run_block
from raglane.native import missing_kernels
from raglane.nn.mixers import step_table
from raglane.nn.recurrent.layer import RecurrentLayer
from raglane.serve import Engine

D, H = 3, 6
LENGTHS = [3, 0, 1, 66, 2]

needs_kernels = pytest.mark.skipif(
    missing_kernels() is not None, reason="the cpu kernels, which have these bits, are not built"
)


# ---- equations -----------------------------------------------------------------------------------


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _convolved(window: list[Tensor], layer: Any) -> Tensor:
    taps = layer.weight[:, 0]
    total = sum(element * taps[:, index] for index, element in enumerate(window))
    return total if layer.bias is None else total + layer.bias


def _mamba(p: Any, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    width, size = p.A_log.shape
    window = list(state[0].view(-1, width))
    h = state[1].view(width, size)
    outputs = []
    for x_t in x:
        u, z = (p.in_proj.weight @ x_t).chunk(2)
        window.append(u)
        u = _silu(_convolved(window, p.conv1d))
        window.pop(0)
        parts_of_u = p.x_proj.weight @ u
        rank = parts_of_u.shape[0] - 2 * size
        dt = torch.log1p(torch.exp(p.dt_proj.weight @ parts_of_u[:rank] + p.dt_proj.bias))
        of_b, of_c = parts_of_u[rank:].chunk(2)
        h = torch.exp(dt[:, None] * -torch.exp(p.A_log)) * h + dt[:, None] * of_b * u[:, None]
        y = (h * of_c).sum(1) + p.D * u
        outputs.append(p.out_proj.weight @ (y * _silu(z)))
    return _stacked(outputs, p), [torch.cat(window), h.flatten()]


def _mamba2(p: Any, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    groups, size, head, limits = 2, 5, 3, (0.01, 0.9)
    heads = p.D.shape[0]
    width = heads * head
    channels = width + 2 * groups * size
    window = list(state[0].view(-1, channels))
    h = list(state[1].view(heads, size, head))
    outputs = []
    for x_t in x:
        z, u, dt = (p.in_proj.weight @ x_t).split([width, channels, heads])
        window.append(u)
        u = _silu(_convolved(window, p.conv1d))
        window.pop(0)
        u, of_b, of_c = u.split([width, groups * size, groups * size])
        dt = torch.log1p(torch.exp(dt + p.dt_bias)).clamp(*limits)
        rows = []
        for index in range(heads):
            group = index // (heads // groups)
            b, c = (each.view(groups, size)[group] for each in (of_b, of_c))
            u_h = u.view(heads, head)[index]
            decay = torch.exp(-dt[index] * torch.exp(p.A_log[index]))
            h[index] = decay * h[index] + dt[index] * torch.outer(b, u_h)
            rows.append(h[index].t() @ c + p.D[index] * u_h)
        y = (torch.cat(rows) * _silu(z)).view(groups, -1)
        y = y * torch.rsqrt((y * y).mean(1, keepdim=True) + 1e-5)
        outputs.append(p.out_proj.weight @ (p.norm.weight * y.flatten()))
    return _stacked(outputs, p), [torch.cat(window), torch.stack(h).flatten()]


def _gated_delta_net(p: Any, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    keys, heads, key, value = 2, 4, 3, 5
    width = heads * value
    window = list(state[0].view(-1, 2 * keys * key + width))
    memory = list(state[1].view(heads, key, value))
    outputs = []
    for x_t in x:
        window.append(p.in_proj_qkv.weight @ x_t)
        u = _silu(_convolved(window, p.conv1d))
        window.pop(0)
        q, k, v = u.split([keys * key, keys * key, width])
        beta = 1 / (1 + torch.exp(-(p.in_proj_b.weight @ x_t)))
        dt = torch.log1p(torch.exp(p.in_proj_a.weight @ x_t + p.dt_bias))
        z = (p.in_proj_z.weight @ x_t).view(heads, value)
        rows = []
        for index in range(heads):
            own = [each.view(keys, key)[index * keys // heads] for each in (q, k)]
            q_h, k_h = [each * torch.rsqrt((each * each).sum() + 1e-6) for each in own]
            decayed = torch.exp(-torch.exp(p.A_log[index]) * dt[index]) * memory[index]
            error = v.view(heads, value)[index] - decayed.t() @ k_h
            memory[index] = decayed + beta[index] * torch.outer(k_h, error)
            o = memory[index].t() @ q_h * key**-0.5
            o = p.norm.weight * o * torch.rsqrt((o * o).mean() + 1e-6)
            rows.append(o * _silu(z[index]))
        outputs.append(p.out_proj.weight @ torch.cat(rows))
    return _stacked(outputs, p), [torch.cat(window), torch.stack(memory).flatten()]


def _mlstm(p: Any, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    heads, key, value = 2, 4, 3
    memory, total = list(state[0].view(heads, key, value)), list(state[1].view(heads, key))
    level = list(state[2])
    outputs = []
    for x_t in x:
        q, k, v = (layer.weight @ x_t + layer.bias for layer in (p.q, p.k, p.v))
        gates = [
            15 * torch.tanh((layer.weight @ x_t + layer.bias) / 15)
            for layer in (p.igate_preact, p.fgate_preact)
        ]
        rows = []
        for index in range(heads):
            log_i = gates[0][index]
            log_f = -torch.log1p(torch.exp(-gates[1][index]))
            new = torch.maximum(log_f + level[index], log_i)
            keep, gain = torch.exp(log_f + level[index] - new), torch.exp(log_i - new)
            q_h, k_h = (each.view(heads, key)[index] for each in (q, k))
            memory[index] = keep * memory[index] + gain * torch.outer(
                k_h, v.view(heads, value)[index]
            )
            total[index] = keep * total[index] + gain * k_h
            level[index] = new
            q_h = q_h * key**-0.5
            divisor = torch.maximum((total[index] @ q_h).abs(), torch.exp(-new)) + 1e-6
            h = memory[index].t() @ q_h / divisor
            h = h - h.mean()
            rows.append(h * torch.rsqrt((h * h).mean() + 1e-6))
        h = p.multihead_norm.weight * torch.cat(rows) + p.multihead_norm.bias
        o = 1 / (1 + torch.exp(-(p.ogate_preact.weight @ x_t + p.ogate_preact.bias)))
        outputs.append(p.out_proj.weight @ (o * h) + p.out_proj.bias)
    after = [torch.stack(memory).flatten(), torch.stack(total).flatten(), torch.stack(level)]
    return _stacked(outputs, p), after


def _rglru(p: Any, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    blocks = 2
    gates = p.rg_lru
    h, begun = state[1], state[2]
    window = list(state[0].view(-1, h.shape[0]))
    outputs = []
    for x_t in x:
        y = F.gelu(p.linear_y.weight @ x_t + p.linear_y.bias, approximate="tanh")
        window.append(p.linear_x.weight @ x_t + p.linear_x.bias)
        u = _convolved(window, p.conv_1d)
        window.pop(0)
        columns = u.view(blocks, 1, -1)
        r, i = (
            torch.sigmoid((columns @ weight).flatten() + bias.flatten())
            for weight, bias in (
                (gates.recurrent_gate_weight, gates.recurrent_gate_bias),
                (gates.input_gate_weight, gates.input_gate_bias),
            )
        )
        log_a = -8 * r * torch.log1p(torch.exp(gates.recurrent_param))
        root = torch.sqrt(1 - torch.exp(2 * log_a))
        h = torch.exp(log_a) * h + (root + (1 - begun) * (1 - root)) * i * u
        begun = torch.ones_like(begun)
        outputs.append(p.linear_out.weight @ (h * y) + p.linear_out.bias)
    return _stacked(outputs, p), [torch.cat(window), h, begun]


def _stacked(outputs: list[Tensor], p: Any) -> Tensor:
    return torch.stack(outputs) if outputs else next(p.parameters()).new_zeros(0, H)


Loop = Callable[[Any, Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]]
_DELTA: dict[str, Any] = {"num_heads": 2, "num_value_heads": 4, "key_size": 3, "value_size": 5}
LOOPS: dict[str, tuple[Loop, dict[str, Any]]] = {
    "Mamba": (_mamba, {"state_size": 4}),
    "Mamba2": (
        _mamba2,
        {"state_size": 5, "head_dim": 3, "num_groups": 2, "dt_limit": (0.01, 0.9)},
    ),
    "GatedDeltaNet": (_gated_delta_net, _DELTA),
    "MLSTM": (_mlstm, {"num_heads": 2, "key_size": 4, "bias": True}),
    "RGLRU": (_rglru, {"num_heads": 2}),
}


def _layer(name: str, *args: Any, width: int = D, size: int = H, **options: Any) -> Any:
    """Build a layer in float64, all of whose parameters are drawn."""
    layer = getattr(rl.nn, name)(
        width, size, *args, **{"dtype": torch.float64, **LOOPS[name][1], **options}
    )
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter))
    return layer


def _batch(width: int = D, dtype: torch.dtype = torch.float64) -> rl.Ragged:
    values = torch.randn(sum(LENGTHS), width, dtype=torch.float64).to(dtype)
    return rl.Ragged.from_flat(values.requires_grad_(), lengths=LENGTHS)


def _state(layer: Any, count: int) -> tuple[Tensor, ...]:
    rows = layer.num_layers * (2 if layer.bidirectional else 1)
    return tuple(
        [
            (0.5 * torch.randn(rows, count, size, dtype=torch.float64)).requires_grad_()
            for size in layer.state_sizes
        ]
    )


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_the_equations_and_their_gradients(name: str, has_state: bool) -> None:
    layer = _layer(name)
    batch = _batch()
    state = _state(layer, len(LENGTHS)) if has_state else None
    out, final = layer(batch, state)
    rows = []
    finals: list[list[Tensor]] = []
    for index, x in enumerate(batch.values.split(LENGTHS)):
        start = _start(layer) if state is None else [part[0, index] for part in state]
        y, after = LOOPS[name][0](layer, x, start)
        rows.append(y)
        finals.append(after)
    expected = [torch.cat(rows)]
    expected += [torch.stack(part).unsqueeze(0) for part in zip(*finals, strict=True)]
    wanted = [batch.values, *layer.parameters(), *(state or ())]
    results = [out.values, *final]
    assert_same(results, expected, 1e-11)
    assert_same(gradients(results, wanted), gradients(expected, wanted), 1e-9)


def _start(layer: Any) -> list[Tensor]:
    return [torch.zeros(size, dtype=torch.float64) for size in layer.state_sizes]


@pytest.mark.parametrize("name", LOOPS)
def test_steps_in_plain_torch_agree(name: str) -> None:
    layer = _layer(name, 2, bidirectional=True)
    batch = _batch()
    state = _state(layer, len(LENGTHS))
    wanted = [batch.values, *layer.parameters(), *state]
    seen = []
    for backend in ("auto", "reference"):
        with rl.use_backend(backend=backend):
            out, final = layer(batch, state)
        results = [out.values, *final]
        seen.append([*results, *gradients(results, wanted)])
    assert_same(seen[0], seen[1], 1e-10)


@pytest.mark.parametrize("name", LOOPS)
def test_blocks_above_the_first_are_residual(name: str) -> None:
    layer = _layer(name, 2)
    first = _layer(name)
    second = _layer(name, width=H)
    for index, single in enumerate((first, second)):
        own = f"cells.{index}."
        tensors = {key.removeprefix(own): t for key, t in layer.state_dict().items() if own in key}
        gains = tensors.pop("residual_norm.weight", None)
        single.load_state_dict(tensors)
    batch = _batch()
    out, _ = layer(batch)
    below, _ = first(batch)
    assert gains is not None
    read = below.map(lambda x: gains * x * torch.rsqrt((x * x).mean(1, keepdim=True) + 1e-5))
    above, _ = second(read)
    assert_same([out.values], [below.values + above.values])


# ---- bits ----------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", LOOPS)
def test_whole_pieces_steps_and_batches_have_the_same_bits(name: str, dtype: torch.dtype) -> None:
    layer = _layer(name, 2, dtype=dtype)
    batch = _batch(dtype=dtype)
    out, final = layer(batch)
    (grad,) = torch.autograd.grad(out.values.square().sum(), batch.values)
    long = batch.values[4:70].detach()
    assert torch.equal(layer(rl.Ragged([long]))[0].values, out[3])
    alone = long.clone().requires_grad_()
    (grad_alone,) = torch.autograd.grad(layer(rl.Ragged([alone]))[0].values.square().sum(), alone)
    assert torch.equal(grad_alone, grad[4:70])
    with torch.no_grad():
        for cuts in ([1, 65], [20, 46], [0, 63, 3], [64, 2], [1] * 66):
            state = None
            pieces = []
            for piece in long.split(cuts):
                y, state = layer(rl.Ragged([piece]), state)
                pieces.append(y.values)
            assert torch.equal(torch.cat(pieces), out[3])
            assert all(map(torch.equal, parts(state), [part[:, 3:4] for part in final]))
        state = None
        steps = []
        for x_t in long:
            y, state = layer.step(x_t, state)
            steps.append(y)
        assert torch.equal(torch.stack(steps), out[3])


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("width", "size"), [(D, H), (17, 48), (5, 132)])
@pytest.mark.parametrize("name", sorted(set(LOOPS) - {"Mamba"}))
def test_a_step_of_a_block_is_one_call(
    name: str, width: int, size: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of whole sequences, below another block too; not where modules have hooks."""
    if not can_step(torch.zeros(1, dtype=dtype)):
        pytest.skip("the operators of steps are not built, or torch rounds otherwise")
    layer = _layer(name, 2, width=width, size=size, dtype=dtype)
    values = torch.randn(rows, 4, width, dtype=dtype)
    state = tuple(
        [0.5 * torch.randn(2, rows, size, dtype=dtype).abs() for size in layer.state_sizes]
    )
    expected, end = layer(rl.Ragged(list(values)), state)
    used: list[int] = []
    monkeypatch.setattr(step_table, "run_block", _noting(run_block, used))
    after = state
    for step in range(4):
        kept = tuple([each.clone() for each in after])
        before = after
        y, after = layer.step(values[:, step], before)
        assert torch.equal(y, torch.stack([part[step] for part in expected]))
        assert all(map(torch.equal, before, kept))
    assert len(used) == 2 * 4
    assert all(map(torch.equal, after, end))
    linear = next(part for part in layer.cells[0].modules() if type(part) is nn.Linear)
    hook = linear.register_forward_hook(lambda *_: None)
    y, _ = layer.step(values[:, 0], state)
    hook.remove()
    assert len(used) == 9
    torch.testing.assert_close(y, torch.stack([part[0] for part in expected]))


@needs_kernels
@torch.no_grad()
def test_a_step_of_mamba_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one layer without its own checks; not where modules have hooks or torch rounds otherwise."""
    if not can_step(torch.zeros(1)):
        pytest.skip("the operators of steps are not built, or torch rounds otherwise")
    layer = _layer("Mamba", dtype=torch.float32)
    rows = torch.randn(3, 2, D)
    state = tuple([torch.randn(1, 2, size) for size in layer.state_sizes])
    expected, end = layer(rl.Ragged([rows[:, row] for row in range(2)]), state)
    used: list[int] = []
    monkeypatch.setattr(MambaStep, "run", _noting(MambaStep.run, used), raising=True)
    monkeypatch.setattr(RecurrentLayer, "step", None)
    after = tuple([each.clone() for each in state])
    for x_t, step in zip(rows, range(3), strict=True):
        before = after
        kept = tuple([each.clone() for each in before])
        y, after = layer.step(x_t, before)
        assert torch.equal(y, torch.stack([part[step] for part in expected]))
        assert all(map(torch.equal, before, kept))
    assert len(used) == 3
    assert all(map(torch.equal, after, end))
    monkeypatch.undo()
    monkeypatch.setattr(MambaStep, "run", _noting(MambaStep.run, used), raising=True)
    called: list[int] = []
    for block in (layer.in_proj, layer.dt_proj):
        hook = block.register_forward_hook(lambda *_: called.append(1))
        y, _ = layer.step(rows[0], state)
        hook.remove()
        torch.testing.assert_close(y, torch.stack([part[0] for part in expected]))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LOOPS)
def test_packed_weights_give_the_same_bits(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = _layer(name, dtype=dtype)
    other = copy.deepcopy(layer)
    x_t = torch.randn(3, D).to(dtype)
    used: list[int] = []
    monkeypatch.setattr(
        PreparedProgram, "apply", _noting(PreparedProgram.apply, used), raising=True
    )
    rl.pack_weights(other)
    with torch.no_grad():
        state = layer.step(x_t)[1]
        expected, _ = layer.step(x_t, state)
        assert not used
        assert torch.equal(other.step(x_t, state)[0], expected)
        is_one_call = dtype is torch.float32 and can_step(x_t)
        assert (len(used) >= 2) is not is_one_call
        assert "its weights are packed" in str(rl.explain(other, x_t[None]))
        assert "packed" not in str(rl.explain(layer, x_t[None]))
        used.clear()
        for parameter in (*layer.parameters(), *other.parameters()):
            parameter.mul_(1.5)
        assert torch.equal(other.step(x_t, state)[0], layer.step(x_t, state)[0])
        assert not used, "the weights have changed"


@needs_kernels
def test_packed_weights_in_training() -> None:
    layer = rl.pack_weights(_layer("Mamba"))
    out, _ = layer(rl.Ragged([torch.randn(4, D, dtype=torch.float64)]))
    out.values.sum().backward()
    assert all(parameter.grad is not None for parameter in layer.parameters())


def _noting(function: Callable[..., Any], used: list[int]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        result = function(*args)
        if result is not None and len(result):  # neither refused
            used.append(1)
        return result

    return run


@needs_kernels
@pytest.mark.parametrize("name", LOOPS)
def test_bits_of_all_gradients_do_not_depend_on_threads(name: str) -> None:
    # Torch's own sums of 36 columns have other bits at 5 threads.
    layer = _layer(name, width=7, size=18 if name == "Mamba2" else 36, dtype=torch.float32)
    values = torch.randn(3000, 7)
    batch = rl.Ragged.from_flat(values, lengths=[1, 2000, 999])
    seen = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 3, 5):
            torch.set_num_threads(threads)
            out, _ = layer(batch)
            seen.append(torch.autograd.grad(out.values.square().sum(), list(layer.parameters())))
    finally:
        torch.set_num_threads(before)
    for other in seen[1:]:
        assert all(map(torch.equal, other, seen[0]))


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", LOOPS)
def test_a_stream_has_the_bits_of_its_sequence(name: str, dtype: torch.dtype) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = _layer(name, 2, dtype=dtype)
            self.head = torch.nn.Linear(H, 2, dtype=dtype)

        def forward(self, batch: rl.Ragged) -> rl.Ragged:
            return self.layer(batch.map(torch.tanh))[0].map(self.head)

    model = Model().eval()
    engine = Engine(model, max_streams=4)
    inputs = [torch.randn(length, D).to(dtype) for length in (40, 1, 9)]
    streams = [engine.open() for _ in inputs]
    results: list[list[Tensor]] = [[] for _ in inputs]
    for begin in range(0, 40, 3):
        for stream, frames in zip(streams, inputs, strict=True):
            stream.push(frames[begin : begin + 1 + begin % 3])
            stream.push(frames[begin + 1 + begin % 3 : begin + 3])
        engine.step()
        for stream, rows in zip(streams, results, strict=True):
            rows.append(stream.pull())
    whole = engine.run(rl.Ragged(inputs))
    assert torch.equal(torch.cat([row for rows in results for row in rows]), whole.values)
    with torch.no_grad():
        expected = model(rl.Ragged(inputs)).values
    torch.testing.assert_close(whole.values, expected, rtol=3e-2, atol=3e-2)


# ---- what all layers have ------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in LOOPS if name != "MLSTM"])
def test_a_convolution_of_one_element_has_no_state(name: str) -> None:
    layer = _layer(name, kernel_size=1)
    batch = _batch()
    out, (before, *_) = layer(batch)
    assert before.shape == (1, len(LENGTHS), 0)
    with rl.use_backend(backend="reference"):
        assert_same([layer(batch)[0].values], [out.values])


@pytest.mark.parametrize("name", LOOPS)
def test_every_kind_of_input(name: str) -> None:
    for options in ({"bidirectional": True, "num_layers": 2}, {"batch_first": True}):
        assert_same_for_every_input(_layer(name, **options))


@pytest.mark.parametrize("name", LOOPS)
def test_a_nan_stays_in_its_sequence(name: str) -> None:
    assert_nan_stays_in_its_sequence(_layer(name))


@pytest.mark.parametrize("name", LOOPS)
def test_resets_begin_new_sequences(name: str) -> None:
    layer = _layer(name)
    values = torch.randn(9, D, dtype=torch.float64)
    marks = torch.zeros(9, dtype=torch.bool)
    marks[[0, 4, 5]] = True
    state = _state(layer, 1)
    out, final = layer(rl.Ragged([values]), state, resets=rl.Ragged([marks]))
    own, ends = layer(rl.Ragged(list(values.split([4, 1, 4]))))
    assert_same([out.values, *final], [own.values, *[end[:, 2:] for end in ends]])
    chunk, _ = layer(
        rl.Ragged([values[:4], values[4:]]), _state(layer, 2), begins=torch.tensor([True, True])
    )
    assert_same([chunk.values], [layer(rl.Ragged([values[:4], values[4:]]))[0].values])
    done = torch.tensor(True)
    assert_same(
        [layer.step(values[0], layer.step(values[1])[1], resets=done)[0]],
        [layer.step(values[0])[0]],
    )


@pytest.mark.parametrize("name", LOOPS)
def test_second_derivatives(name: str) -> None:
    layer = _layer(name)
    values = torch.randn(4, D, dtype=torch.float64, requires_grad=True)

    def run(values: Tensor) -> Any:
        out, final = layer(rl.Ragged.from_flat(values, lengths=[1, 3]))
        return out.values, *final

    torch.autograd.gradcheck(run, (values,))
    torch.autograd.gradgradcheck(run, (values,), atol=1e-4, fast_mode=True)


@pytest.mark.parametrize("name", LOOPS)
def test_copies_and_pickles(name: str) -> None:
    layer = _layer(name)
    batch = _batch()
    expected, _ = layer(batch)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(batch)[0].values, expected.values)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2)
        assert not torch.equal(other(batch)[0].values, expected.values)
        assert torch.equal(layer(batch)[0].values, expected.values)
        other.reset_parameters()
    assert {each.dtype for each in layer.float().cells.parameters()} == {torch.float32}
    assert str(rl.explain(layer, _batch(dtype=torch.float32))).startswith("backend cpu")


@pytest.mark.parametrize("name", LOOPS)
def test_autocast_computes_in_the_dtype_of_the_parameters(name: str) -> None:
    layer = _layer(name, dtype=torch.float32)
    batch = _batch(dtype=torch.float32)
    expected, _ = layer(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = layer(batch)
    assert torch.equal(out.values, expected.values)


@pytest.mark.parametrize("name", LOOPS)
def test_bfloat16_is_close(name: str) -> None:
    layer = _layer(name, dtype=torch.bfloat16)
    batch = _batch(dtype=torch.bfloat16)
    out, _ = layer(batch)
    exact, _ = copy.deepcopy(layer).double()(batch.map(Tensor.double))
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.values.double(), exact.values, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("has_gradients", [False, True])
@pytest.mark.parametrize("name", LOOPS)
def test_graphs(name: str, has_gradients: bool) -> None:
    # All layers have the same forward, which is compiled a few times only.
    torch._dynamo.reset()
    layer = _layer(name)
    batch = _batch()
    expected = layer(batch)[0].values
    with torch.set_grad_enabled(has_gradients):
        compiled: Any = torch.compile(layer, backend="aot_eager", fullgraph=True)
        out, _ = compiled(batch)
        assert_same([out.values], [expected])
        if has_gradients:
            wanted = list(layer.parameters())
            assert_same(gradients([out.values], wanted), gradients([expected], wanted))
        else:
            program: Any = torch.export.export(layer, (batch,)).module()
            assert_same([program(batch)[0].values], [expected])


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"head_dim must be a divisor of .* = 12, got 5\."):
        rl.nn.Mamba2(D, H, head_dim=5)
    with pytest.raises(ArgumentError, match=r"num_groups must be .* number of heads = 3, got 2\."):
        rl.nn.Mamba2(D, 9, head_dim=6, num_groups=2)
    with pytest.raises(ArgumentError, match=r"dt_limit must be .*, got \(2, 1\)\."):
        rl.nn.Mamba2(D, H, dt_limit=(2, 1))
    with pytest.raises(ArgumentError, match="zoneout must be 0 for"):
        rl.nn.Mamba(D, H, zoneout=0.5)
    if missing_kernels() is None:
        with pytest.raises(DispatchError, match="a Mamba has no kernels for int8 weights"):
            rl.quantize(rl.nn.Mamba(D, H).eval())
        with pytest.raises(DispatchError, match="a layer Mamba, which has no int8 kernel"):
            Engine(rl.nn.Mamba(D, H).eval(), max_streams=1, dtype=torch.int8)


# ---- transformers --------------------------------------------------------------------------------


def _theirs(name: str) -> tuple[Any, Any]:
    """Return a mixer of transformers, and our layer of its sizes."""
    models = pytest.importorskip("transformers.models", reason="needs transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1}
    options: dict[str, Any] = {}
    theirs: Any = None
    match name:
        case "Mamba":
            options = {"state_size": 8}
            config = models.mamba.MambaConfig(**sizes, **options)
            theirs = models.mamba.modeling_mamba.MambaMixer(config, 0)
        case "Mamba2":
            heads = {"num_heads": 8, "head_dim": 4, "n_groups": 2, "time_step_limit": (0.02, 0.5)}
            config = models.mamba2.Mamba2Config(**sizes, **heads, state_size=8, chunk_size=8)
            theirs = models.mamba2.modeling_mamba2.Mamba2Mixer(config, 0)
            options = {"head_dim": 4, "num_groups": 2, "dt_limit": (0.02, 0.5), "state_size": 8}
        case "GatedDeltaNet":
            theirs = _next_delta_net(models.qwen3_next, sizes)
            options = _DELTA
        case "MLSTM":
            factors = {"num_heads": 2, "qk_dim_factor": 0.5, "chunk_size": 8}
            config = models.xlstm.xLSTMConfig(**sizes, **factors, mode="inference")
            theirs = models.xlstm.modeling_xlstm.xLSTMLayer(config)
            options = {"num_heads": 2}
        case "RGLRU":
            heads = {"num_attention_heads": 2, "lru_width": 16, "head_dim": 8}
            config = models.recurrent_gemma.RecurrentGemmaConfig(**sizes, **heads)
            theirs = models.recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock(
                config, 0
            )
            options = {"num_heads": 2}
    return theirs, getattr(rl.nn, name)(16, 16, **options)


def _next_delta_net(qwen: Any, sizes: dict[str, int]) -> Any:
    heads = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
    }
    config = qwen.Qwen3NextConfig(**sizes, **heads, layer_types=["linear_attention"])
    return qwen.modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0)


@pytest.mark.parametrize("name", LOOPS)
def test_the_blocks_of_transformers(name: str) -> None:
    theirs, layer = _theirs(name)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    layer.load_state_dict(theirs.state_dict())
    values = torch.randn(2, 21, 16)
    arguments = {"RGLRU": (torch.arange(21).expand(2, -1), None, False)}
    expected = theirs.eval()(values, *arguments.get(name, ()))
    expected = expected[0] if isinstance(expected, tuple) else expected
    out, _ = layer(rl.Ragged(list(values)))
    torch.testing.assert_close(out.values, expected.flatten(0, 1), rtol=1e-5, atol=1e-5)


def test_interleaved_projections_of_qwen() -> None:
    """Each head of keys has its rows of queries, keys, values and gates side by side."""
    layer = rl.nn.GatedDeltaNet(7, 8, **_DELTA)
    state = {name: torch.randn_like(tensor) for name, tensor in layer.state_dict().items()}
    theirs = dict(state)
    q, k, v = theirs.pop("in_proj_qkv.weight").split([6, 6, 20])
    z, a, b = (theirs.pop(f"in_proj_{name}.weight") for name in "zab")
    heads = [each.chunk(2) for each in (q, k, v, z, b, a)]
    theirs["in_proj_qkvz.weight"] = torch.cat([each[h] for h in (0, 1) for each in heads[:4]])
    theirs["in_proj_ba.weight"] = torch.cat([each[h] for h in (0, 1) for each in heads[4:]])
    layer.load_state_dict(theirs)
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())


def test_joined_projections_of_xlstm() -> None:
    layer = rl.nn.MLSTM(3, 8, num_heads=2)
    state = {name: torch.randn_like(tensor) for name, tensor in layer.state_dict().items()}
    joined = {
        "qkv_opreact": ("q", "k", "v", "ogate_preact"),
        "ifgate_preact": ("igate_preact", "fgate_preact"),
    }
    theirs = dict(state)
    for name, parts_of_it in joined.items():
        for kind in ("weight", "bias"):
            own = [theirs.pop(f"{part}.{kind}", None) for part in parts_of_it]
            if own[0] is not None:
                theirs[f"{name}.{kind}"] = torch.cat([each for each in own if each is not None])
    torch.nn.ModuleList([layer]).load_state_dict(
        {f"0.{name}": tensor for name, tensor in theirs.items()}
    )
    assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())
