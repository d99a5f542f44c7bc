"""One step of a block of Mamba and of linear attention by one call, against loops in plain torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cpu_networks import LIBRARY, POISON
from guarded import chosen_library
from raglane.kernels.cpu.steps import BLOCK_WORDS, AttentionStep, MambaStep, can_step, run_block

with torch.no_grad():
    if not can_step(torch.zeros(1)):
        pytest.skip("the operators of steps are not built", allow_module_level=True)

ISAS = [isa for isa in LIBRARY.isas if isa not in ("avx512bf16", "amx")]
TOLERANCES = {torch.float32: 3e-5, torch.float64: 1e-12}
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
isas = pytest.mark.parametrize("isa", ISAS)
# Inputs, channels, states, rank and taps.
OF_MAMBA = [(1, 1, 1, 1, 1), (3, 5, 2, 3, 2), (37, 33, 16, 5, 4), (64, 128, 17, 8, 3)]
# Heads of keys and values, numbers of a key and a value, and taps.
OF_ATTENTION = [(1, 1, 1, 1, 1), (2, 4, 3, 5, 2), (3, 18, 20, 7, 4), (1, 8, 64, 33, 4)]


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def earlier_of(rows: int, channels: int, kept: int, by_channel: bool) -> Tensor:
    """The inputs before, whose memory has channels of an input or inputs of a channel together."""
    if by_channel:
        return drawn(rows, channels, kept)
    return drawn(rows, kept, channels).transpose(1, 2)


def normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight


def convolved(x: Tensor, earlier: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Silu of the convolution; the state changes in place."""
    window = torch.cat([earlier, x.unsqueeze(2)], 2)
    taps = weight.shape[2]
    total = (window[..., -taps:] * weight[:, 0]).sum(2)
    earlier.copy_(window[..., 1:])
    return F.silu(total if bias is None else total + bias)


def mamba(step: MambaStep, x: Tensor, earlier: Tensor, state: Tensor) -> Tensor:
    parts: Any = step.parts
    into, in_bias, taps, conv_bias, of_inner, of_dt, dt_bias, rates, skip, out, out_bias, *norms = (
        parts
    )
    size = rates.shape[1]
    rows = x if norms[3] is None else normed(x, norms[3], step.norm_eps)
    u: Any
    gate: Any
    u, gate = F.linear(rows, into, in_bias).chunk(2, 1)
    u = convolved(u, earlier, taps, conv_bias)
    of_steps = F.linear(u, of_inner).split([of_dt.shape[1], size, size], 1)
    if step.eps >= 0:
        of_steps = [normed(*pair, step.eps) for pair in zip(of_steps, norms[:3], strict=True)]
    dt, b, c = of_steps
    dt = F.linear(dt, of_dt, dt_bias)
    dt = torch.logaddexp(dt, torch.zeros_like(dt)).unsqueeze(2)
    rates = -rates.exp() if step.logarithms else rates
    state.copy_((dt * rates).exp() * state + dt * u.unsqueeze(2) * b.unsqueeze(1))
    y = (state * c.unsqueeze(1)).sum(2) + (0 if skip is None else skip * u)
    y = F.linear(y * F.silu(gate), out, out_bias)
    return y + x if step.residual else y


def mamba_case(sizes: tuple[int, ...], rows: int, is_full: bool) -> tuple[MambaStep, list[Tensor]]:
    """A block with all of its parts, or as few as possible, and its input and states."""
    inputs, channels, states, rank, taps = sizes
    of_parts = rank + 2 * states
    outputs = inputs if is_full else inputs + 2
    parts: list[Tensor | None] = [
        *(drawn(2 * channels, inputs) / inputs**0.5, drawn(2 * channels)),
        *(drawn(channels, 1, taps), drawn(channels)),
        drawn(of_parts, channels) / channels**0.5,
        *(drawn(channels, rank) / rank**0.5, drawn(channels)),
        *(drawn(channels, states), drawn(channels)),
        *(drawn(outputs, channels) / channels**0.5, drawn(outputs)),
        *(drawn(rank), drawn(states), drawn(states), drawn(inputs)),
    ]
    if not is_full:
        parts[7] = -drawn(channels, states).abs()
        for place in (1, 3, 6, 8, 10, 11, 12, 13, 14):
            parts[place] = None
    step = MambaStep(parts, is_full, 1e-3 if is_full else -1.0, 1e-2, is_full)
    kept = taps if is_full else taps - 1
    return step, [
        drawn(rows, inputs),
        earlier_of(rows, channels, kept, is_full),
        drawn(rows, channels, states),
    ]


def attention(step: AttentionStep, tensors: list[Any], earlier: Tensor, state: Tensor) -> Tensor:
    rows: list[Any] = [None if each is None else each[:, 0] for each in tensors]
    mixed, gate, dt, beta = rows
    parts: Any = step.parts
    taps, conv_bias, dt_bias, logarithms, skip, weight = parts
    u = convolved(mixed, earlier, taps, conv_bias)
    keys = step.key_heads * step.key_size
    values = step.heads * step.value_size
    widths = (keys, keys, values)
    heads = (step.key_heads, step.key_heads, step.heads)
    q, k, v = [
        u[:, first : first + width].unflatten(1, (count, -1))
        for first, width, count in zip(step.firsts, widths, heads, strict=True)
    ]
    if step.unit:
        q, k = [each / (each.square().sum(2, keepdim=True) + 1e-6).sqrt() for each in (q, k)]
    q, k = [each.repeat_interleave(step.heads // step.key_heads, 1) for each in (q, k)]
    dt = torch.logaddexp(dt + dt_bias, torch.zeros_like(dt)).clamp(*step.limits)
    gain = dt if beta is None else step.beta_scale * beta.sigmoid()
    memory = state.transpose(2, 3) if step.transposed else state
    decayed = (-dt * logarithms.exp()).exp()[:, :, None, None] * memory
    error = v - torch.einsum("bhkv,bhk->bhv", decayed, k) if step.delta else v
    memory.copy_(decayed + torch.einsum("bh,bhk,bhv->bhkv", gain, k, error))
    y = step.scale * torch.einsum("bhkv,bhk->bhv", memory, q)
    y = (y if skip is None else y + skip.unsqueeze(1) * v).flatten(1)
    y = y * F.silu(gate) if step.gates_first else y
    y = normed(y.unflatten(1, (step.norm_groups, -1)), None, step.norm_eps).flatten(1)
    y = y * weight.repeat(values // len(weight))
    return (y if step.gates_first else y * F.silu(gate)).unsqueeze(1)


def attention_case(
    sizes: tuple[int, ...], rows: int, is_delta: bool
) -> tuple[AttentionStep, list[Any], list[Tensor]]:
    """The options of the delta rule or of Mamba-2, with views of one projection."""
    groups, heads, size, width, taps = sizes
    keys = groups * size
    values = heads * width
    channels = 2 * keys + values
    parts: list[Tensor | None] = [drawn(channels, 1, taps), drawn(channels)]
    parts += [drawn(heads), drawn(heads), drawn(heads), drawn(values)]
    options: dict[str, Any] = {"gates_first": True, "transposed": True, "limits": (0.1, 1.5)}
    firsts = (values + keys, values, 0)
    if is_delta:
        parts[1] = parts[4] = None
        parts[5] = drawn(width)
        options = {"unit": True, "delta": True, "beta_scale": 2.0, "scale": size**-0.5}
        firsts = (0, keys, 2 * keys)
    count = heads if is_delta else groups
    step = AttentionStep(parts, groups, heads, size, width, firsts, count, 1e-3, **options)
    projected = drawn(rows, 1, values + channels + 2 * heads)
    gate, mixed, dt, beta = projected.split([values, channels, heads, heads], 2)
    shape = (size, width) if is_delta else (width, size)
    kept = taps - 1 if is_delta else taps
    return (
        step,
        [mixed, gate, dt, beta if is_delta else None],
        [earlier_of(rows, channels, kept, is_delta), drawn(rows, heads, *shape)],
    )


def converted(tensors: Any, dtype: torch.dtype) -> list[Any]:
    """Copies in a dtype, in memory of the same order."""
    return [None if each is None else each.to(dtype, copy=True) for each in tensors]


def compare(ours: Any, right: Any, dtype: torch.dtype) -> None:
    for one, other in zip(ours, right, strict=True):
        scale = max(1.0, float(other.abs().max()) if other.numel() else 0.0)
        torch.testing.assert_close(one.double(), other, rtol=0, atol=scale * TOLERANCES[dtype])


@isas
@dtypes
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("sizes", OF_MAMBA, ids=str)
def test_mamba(sizes: tuple[int, ...], is_full: bool, dtype: torch.dtype, isa: str) -> None:
    for rows in (1, 2, 5):
        step, tensors = mamba_case(sizes, rows, is_full)
        ours = converted(tensors, dtype)
        with chosen_library(replace(LIBRARY.with_isa(isa), flags=POISON)):
            output = step._replace(parts=converted(step.parts, dtype)).run(*ours)
        compare([output, *ours[1:]], [mamba(step, *tensors), *tensors[1:]], dtype)


@isas
@dtypes
@pytest.mark.parametrize("is_delta", [False, True])
@pytest.mark.parametrize("sizes", OF_ATTENTION, ids=str)
def test_attention(sizes: tuple[int, ...], is_delta: bool, dtype: torch.dtype, isa: str) -> None:
    for rows in (1, 3):
        step, tensors, states = attention_case(sizes, rows, is_delta)
        ours = converted(states, dtype)
        with chosen_library(replace(LIBRARY.with_isa(isa), flags=POISON)):
            run = step._replace(parts=converted(step.parts, dtype)).run
            output = run(*converted(tensors, dtype), *ours)
        compare([output, *ours], [attention(step, tensors, *states), *states], dtype)


def test_rows_do_not_depend_on_others() -> None:
    step, tensors = mamba_case(OF_MAMBA[2], 5, True)
    alone = [[each[row : row + 1].clone() for each in tensors] for row in range(5)]
    tensors[0][1] = torch.nan
    output = step.run(*tensors)
    assert output is not None
    assert output[1].isnan().all()
    for row in (0, 2, 3, 4):
        ours = step.run(*alone[row])
        assert ours is not None
        assert torch.equal(output[row], ours[0])
        assert torch.equal(tensors[2][row], alone[row][2][0])


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (0, lambda t: t[:, :-1]),
        (0, lambda t: t.float()),
        (1, lambda t: t[:, :, ::2]),
        (1, lambda t: t[:, :, :2]),
        (1, lambda t: t[:1].expand_as(t)),
        (2, lambda t: t[:1]),
        (2, lambda t: t.transpose(1, 2).contiguous().transpose(1, 2)),
        (2, lambda t: torch._neg_view(t)),
    ],
)
def test_tensors_that_the_kernels_cannot_read(place: int, change: Any) -> None:
    step, tensors = mamba_case(OF_MAMBA[2], 2, False)
    tensors[place] = change(tensors[place])
    before = [each.clone() for each in tensors]
    assert step.run(*tensors) is None
    assert all(map(torch.equal, tensors, before))


def test_weights_that_the_kernels_cannot_read() -> None:
    step, tensors = mamba_case(OF_MAMBA[2], 2, True)
    for place, part in enumerate(step.parts):
        assert part is not None
        changes: list[Any] = [part[..., :-1], part.float()]
        if place in (0, 4, 5, 7, 9):
            changes += [part.t().contiguous().t(), None]
        for change in changes:
            parts = [*step.parts[:place], change, *step.parts[place + 1 :]]
            assert step._replace(parts=parts).run(*tensors) is None
    attended, values, states = attention_case(OF_ATTENTION[2], 2, True)
    wrong: list[dict[str, Any]] = [
        {"firsts": (-1, 60, 120)},
        {"firsts": (0, 60, 121)},
        {"norm_groups": 7},
        {"heads": 17},
        {"transposed": True},
    ]
    for options in wrong:
        assert attended._replace(**options).run(*values, *states) is None
    assert attended.run(*values, *states) is not None


def test_operations_that_the_kernels_refuse() -> None:
    """Each number of an operation is checked, and the tensors that it reads."""
    weight = drawn(4, 3)
    state = drawn(2, 8)
    taps = drawn(4, 1, 3)
    sizes = [11, 7, 4]
    product = [0, 0, 4, 1, 3, 1, 3, 0, 0, 0, 0, 0, 0, -1, -1]
    convolved = [1, 0, 4, 1, 3, 1, 7, 3, 0, 0, 0, 0, 1, -1, 0]

    def run(code: list[int], *, sizes: list[int] = sizes, parts: Any = (weight, taps)) -> Any:
        limits = [0.0] * (len(code) // BLOCK_WORDS * 2)
        return run_block(x, [state], list(parts), code, limits, sizes)

    x = drawn(2, 3)
    output, after = run(product + convolved)
    window = torch.cat([state.view(2, 2, 4), F.linear(x, weight).unsqueeze(1)], 1)
    torch.testing.assert_close(output, (window * taps[:, 0].t()).sum(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(after, window[:, 1:].flatten(1), rtol=0, atol=1e-12)
    for place, number in [
        (0, 8),
        (0, -1),
        (2, 5),
        (3, 3),
        (4, 4),
        (6, 8),
        (7, 9),
        (12, 2),
    ]:
        assert not run([*product[:place], number, *product[place + 1 :], *convolved]), place
    for place, number in [
        (0, 9),
        (2, 5),
        (4, 4),
        (6, 8),
        (7, 8),
        (7, -1),
        (12, -1),
        (14, 1),
        (14, -1),
    ]:
        assert not run([*product, *convolved[:place], number, *convolved[place + 1 :]]), place
    for wrong in ([11, 8, 4], [10, 7, 4], [2, 0, 1], [11, -1, 4], [11, 7, 0]):
        assert not run(product + convolved, sizes=wrong)
    for parts in ((weight.float(), taps), (weight.t(), taps), (None, taps), (weight[:, :2], taps)):
        assert not run(product + convolved, parts=parts)
    assert not run([*product, 2])
    function = [2, 1, 4, 1, 1, 1, 3, 3, 0, 0, 0, 0, -1, -1, -1]
    assert run(product + function, sizes=[11, 3, 4])
    assert not run([*product, 2, 7, *function[2:]], sizes=[11, 3, 4])
