"""The selective scan and linear attention compared with loops of their equations in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import naive_recurrences as naive
import raglane as rl
from cpu_networks import LIBRARY, POISON
from guarded import chosen_library
from raglane.errors import ArgumentError, ArgumentTypeError, ShapeError
from raglane.kernels.cpu.recurrences import RecurrenceCall
from raglane.nn import linear_attention, selective_scan
from raglane.nn.recurrences.recurrence_operator import scan_selectively

LENGTHS = [3, 0, 1, 70, 2, 33]
ISAS = [isa for isa in LIBRARY.isas if isa not in ("avx512bf16", "amx")]
Tensors = dict[str, Any]


def ragged(values: Tensor, lengths: list[int] = LENGTHS) -> rl.Ragged:
    return rl.Ragged.from_flat(values, lengths=lengths)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def scan_inputs(
    channels: int = 5, states: int = 3, groups: int = 1, lengths: list[int] = LENGTHS
) -> Tensors:
    """Random tensors of a scan in float64."""
    count = sum(lengths)
    return {
        "x": drawn(count, channels),
        "dt": drawn(count, channels).abs() * 0.5,
        "A": -drawn(channels, states).abs() - 0.1,
        "B": drawn(count, groups, states),
        "C": drawn(count, groups, states),
        "D": drawn(channels),
        "dt_bias": drawn(channels).abs() * 0.2,
        "initial_state": drawn(len(lengths), channels, states),
    }


def run_scan(
    tensors: Tensors, lengths: list[int] = LENGTHS, resets: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """The scan of flat tensors."""
    batches: Any = {name: ragged(tensors[name], lengths) for name in ("x", "dt", "B", "C")}
    rest: Any = {name: tensors.get(name) for name in ("D", "dt_bias", "initial_state")}
    starts = None if resets is None else ragged(resets, lengths)
    y, state = selective_scan(**batches, A=tensors["A"], **rest, resets=starts, **options)
    return y.values, state


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay per head": {"log_decay": 2},
    "decay per key": {"log_decay": 3, "gain": True},
    "mamba2": {"log_decay": 2, "gain": True},
    "delta": {"gain": True, "delta": True},
    "gated delta": {"log_decay": 2, "gain": True, "delta": True},
    "delta, decay per key": {"log_decay": 3, "gain": True, "delta": True},
    "mlstm": {"log_decay": 2, "log_gain": True},
    "mlstm without decays": {"log_gain": True},
}
SIZES = [(1, 1, 3, 5), (2, 4, 6, 2), (1, 3, 17, 35), (3, 18, 8, 16), (2, 2, 20, 70)]


def attention_inputs(
    kind: str, sizes: tuple[int, int, int, int] = SIZES[1], lengths: list[int] = LENGTHS
) -> Tensors:
    """Random tensors of linear attention in float64."""
    groups, heads, size, width = sizes
    facts, count, batch = KINDS[kind], sum(lengths), len(lengths)

    tensors = {
        "q": drawn(count, groups, size),
        "k": torch.nn.functional.normalize(drawn(count, groups, size), dim=-1),
        "v": drawn(count, heads, width),
        "initial_state": drawn(batch, heads, size, width),
    }
    if "log_decay" in facts:
        shape = (count, heads, size)[: facts["log_decay"]]
        tensors["log_decay"] = -drawn(*shape).abs() * 0.3
    if "gain" in facts:
        tensors["gain"] = torch.rand(count, heads, dtype=torch.float64) * 2
    if "log_gain" in facts:
        tensors["log_gain"] = drawn(count, heads) * 0.7
        tensors["normaliser"], tensors["stabiliser"] = (
            drawn(batch, heads, size),
            drawn(batch, heads),
        )
    return tensors


def run_attention(
    tensors: Tensors, lengths: list[int] = LENGTHS, resets: Tensor | None = None, **options: Any
) -> tuple[Tensor, ...]:
    """Linear attention of flat tensors: the outputs and all final states."""
    names = [name for name in ("q", "k", "v", "log_decay", "gain", "log_gain") if name in tensors]
    batches: Any = {name: ragged(tensors[name], lengths) for name in names}
    initial = tensors.get("initial_state")
    if "log_gain" in tensors and initial is not None:
        initial = (initial, tensors["normaliser"], tensors["stabiliser"])
    starts = None if resets is None else ragged(resets, lengths)
    o, state = linear_attention(**batches, initial_state=initial, resets=starts, **options)
    return o.values, *(state if isinstance(state, tuple) else (state,))


def leaves(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    """Copies that require gradients: elements of a dtype, others of that of sums."""
    wide = torch.promote_types(dtype, torch.float32)
    return {
        name: tensor.to(dtype if name in ("x", "dt", "B", "C", "q", "k", "v") else wide)
        .detach()
        .clone()
        .requires_grad_()
        for name, tensor in tensors.items()
    }


def differentiated(run: Any, tensors: Tensors) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The results of a function, and the gradients of weighted sums of all of them."""
    results = run(tensors)
    torch.manual_seed(3)
    weights = [torch.randn(result.shape).bfloat16().double() for result in results]
    total = sum(
        (part.double() * weight).sum() for part, weight in zip(results, weights, strict=True)
    )
    grads = torch.autograd.grad(total, list(tensors.values()), allow_unused=True)
    return [result.detach() for result in results], {
        name: torch.zeros_like(tensor) if grad is None else grad
        for (name, tensor), grad in zip(tensors.items(), grads, strict=True)
    }


def compare(found: Any, wanted: Any, tolerance: float) -> None:
    """Compare results and gradients, relative to the largest number of each tensor."""
    named = [
        *zip(map(str, range(9)), found[0], wanted[0], strict=False),
        *((name, found[1][name], grad) for name, grad in wanted[1].items()),
    ]
    for name, one, other in named:
        bound = tolerance * max(1.0, float(other.abs().max()) if other.numel() else 0.0)
        assert one.shape == other.shape, name
        assert torch.allclose(one.double(), other.double(), rtol=0, atol=bound), (
            name,
            (one.double() - other.double()).abs().max(),
            bound,
        )


TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1e-2}


def marks(lengths: list[int] = LENGTHS) -> Tensor:
    return torch.rand(sum(lengths)) < 0.2


@dataclass(frozen=True, eq=False)
class Case:
    """Tensors that every dtype holds exactly, and what is right for them."""

    tensors: Tensors
    resets: Tensor | None
    options: dict[str, Any]
    wanted: tuple[list[Tensor], dict[str, Tensor]]

    @classmethod
    def of(cls, loop: Any, tensors: Tensors, has_resets: bool, **options: Any) -> Case:
        tensors = {name: tensor.bfloat16().double() for name, tensor in tensors.items()}
        resets = marks() if has_resets else None
        wanted = differentiated(
            lambda parts: loop(parts, LENGTHS, resets, **options), leaves(tensors, torch.float64)
        )
        return cls(tensors, resets, options, wanted)

    def check(self, run: Any, dtype: torch.dtype) -> None:
        """Compare a function in a dtype."""
        found = differentiated(
            lambda parts: run(parts, resets=self.resets, **self.options),
            leaves(self.tensors, dtype),
        )
        compare(found, self.wanted, TOLERANCES[dtype])


# Cases are kept for all tests of a process, so each has a seed of its own, whichever test draws it. Of
# 150 draws for the mLSTM one has two equal numbers in a maximum, where a gradient is not unique.


@cache
def scan_case(sizes: tuple[int, int, int]) -> Case:
    torch.manual_seed(sum(sizes))
    options = {"softplus": sizes[1] != 3, "dt_limit": (0.3, 0.9) if sizes[0] == 33 else None}
    tensors = scan_inputs(*sizes)
    if options["softplus"]:
        tensors["dt"] = drawn(*tensors["dt"].shape) * 3
    return Case.of(naive.scan, tensors, sizes[0] == 5, **options)


@cache
def attention_case(kind: str) -> Case:
    torch.manual_seed([*KINDS].index(kind))
    sizes = SIZES[[*KINDS].index(kind) % len(SIZES)]
    options = {"delta": KINDS[kind].get("delta", False), "scale": 0.7}
    return Case.of(naive.attention, attention_inputs(kind, sizes), sizes[1] == 4, **options)


SCANS = [(1, 1, 1), (5, 3, 1), (40, 16, 2), (33, 9, 3), (150, 5, 1)]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("sizes", SCANS, ids=str)
def test_scan(sizes: tuple[int, int, int], dtype: torch.dtype, isa: str) -> None:
    with chosen_library(replace(LIBRARY.with_isa(isa), flags=POISON)):
        scan_case(sizes).check(run_scan, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_attention(kind: str, dtype: torch.dtype, isa: str) -> None:
    with chosen_library(replace(LIBRARY.with_isa(isa), flags=POISON)):
        attention_case(kind).check(run_attention, dtype)


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain torch, as on other devices."""
    monkeypatch.setattr(
        "raglane.nn.recurrences.recurrence_operator.missing_kernels", lambda: "none"
    )
    for dtype in (torch.float64, torch.float32):
        scan_case(SCANS[1]).check(run_scan, dtype)
        for kind in ("delta, decay per key", "mlstm"):
            attention_case(kind).check(run_attention, dtype)


def test_half_precision_runs_in_plain_torch() -> None:
    tensors = {
        name: tensor.half() if name in ("x", "dt", "B", "C") else tensor.float()
        for name, tensor in scan_case(SCANS[1]).tensors.items()
    }
    y, state = run_scan(
        tensors, **{**scan_case(SCANS[1]).options, "resets": scan_case(SCANS[1]).resets}
    )
    assert (y.dtype, state.dtype) == (torch.float16, torch.float32)
    assert torch.allclose(y.double(), scan_case(SCANS[1]).wanted[0][0], atol=2e-2)


# -- bits ------------------------------------------------------------------------------------------


Run = Callable[..., tuple[Tensor, ...]]
_STATES = {"initial_state": 1, "normaliser": 2, "stabiliser": 3}


def pieces_of(run: Run, tensors: Tensors, lengths: list[int], cuts: list[int]) -> list[Tensor]:
    """The results of a sequence that is computed in pieces, each from the states of the one before."""
    outputs = []
    results: tuple[Tensor, ...] = ()
    for begin, end in itertools.pairwise([0, *cuts, sum(lengths)]):
        part = {
            name: tensor[begin:end]
            if tensor.shape[0] == sum(lengths) and name not in _PARAMETERS
            else tensor
            for name, tensor in tensors.items()
        }
        if results:
            part |= {name: results[place] for name, place in _STATES.items() if name in tensors}
        results = run(part, [end - begin])
        outputs.append(results[0])
    return [torch.cat(outputs), *results[1:]]


_PARAMETERS = ("A", "D", "dt_bias", *_STATES)
ONE = [131]


def detached(tensors: Tensors, dtype: torch.dtype) -> Tensors:
    return {name: tensor.detach() for name, tensor in leaves(tensors, dtype).items()}


def runs(
    dtype: torch.dtype = torch.float32,
) -> Iterator[tuple[str, Run, Callable[[list[int]], Tensors]]]:
    """Each recurrence, as its name, a function and one that draws its tensors in a dtype."""

    def scan_of(lengths: list[int]) -> Tensors:
        return detached(scan_inputs(40, 9, 2, lengths), dtype)

    def attention_of(kind: str, lengths: list[int]) -> Tensors:
        return detached(attention_inputs(kind, (2, 4, 19, 70), lengths), dtype)

    yield "scan", run_scan, scan_of
    for kind, facts in KINDS.items():
        yield (
            kind,
            partial(run_attention, delta=facts.get("delta", False)),
            partial(attention_of, kind),
        )


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_pieces_and_steps_have_the_same_bits(dtype: torch.dtype) -> None:
    for name, run, draw in runs(dtype):
        tensors = draw(ONE)
        whole = run(tensors, ONE)
        for cuts in ([1], [20], [63], [64, 65], [1, 20, 63, 64, 65], [*range(1, 131)]):
            pieces = pieces_of(run, tensors, ONE, cuts)
            assert all(map(torch.equal, whole, pieces)), (name, cuts)


@pytest.mark.parametrize("cut", [1, 20, 63, 64, 65])
def test_resets_are_cuts(cut: int) -> None:
    for name, run, draw in runs():
        tensors = draw(ONE)
        resets = torch.zeros(131, dtype=torch.bool)
        resets[cut] = True
        found = run(tensors, ONE, resets=resets)
        first = {part: tensor for part, tensor in tensors.items() if part not in _STATES}
        rest = run(
            {p: t[cut:] if p not in _PARAMETERS else t for p, t in first.items()}, [131 - cut]
        )
        assert torch.equal(found[0][cut:], rest[0]), name
        assert all(map(torch.equal, found[1:], rest[1:])), name


def gradients_of(run: Run, tensors: Tensors, lengths: list[int]) -> dict[str, Tensor]:
    parts = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    results = run(parts, lengths)
    torch.manual_seed(1)
    weights = torch.randn(results[0].shape[1:], dtype=results[0].dtype)
    total = (results[0] * weights).sum() + sum(part.double().sum() for part in results[1:])
    return dict(zip(parts, torch.autograd.grad(total, list(parts.values())), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bits_do_not_depend_on_the_batch_or_the_threads(dtype: torch.dtype) -> None:
    for name, run, draw in runs(dtype):
        tensors = draw([40, 3, *ONE, 7])
        both = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            with chosen_library(replace(LIBRARY, flags=16)):  # does not choose fewer threads
                both.append(
                    [
                        *run(tensors, [40, 3, *ONE, 7]),
                        *gradients_of(run, tensors, [40, 3, *ONE, 7]).values(),
                    ]
                )
        torch.set_num_threads(1)
        assert all(map(torch.equal, *both)), name
        alone = {
            part: tensor
            if part in ("A", "D", "dt_bias")
            else tensor[2:3]
            if part in _STATES
            else tensor[43:174]
            for part, tensor in tensors.items()
        }
        results = run(alone, ONE)
        assert torch.equal(both[0][0][43:174], results[0]), name
        assert all(
            torch.equal(part[2:3], one) for part, one in zip(both[0][1:], results[1:], strict=False)
        ), name
        wanted = gradients_of(run, tensors, [40, 3, *ONE, 7])
        for part, grad in gradients_of(run, alone, ONE).items():
            if part not in ("A", "D", "dt_bias"):
                whole = wanted[part][2:3] if part in _STATES else wanted[part][43:174]
                assert torch.equal(whole, grad), (name, part)


def test_a_nan_stays_in_its_sequence() -> None:
    lengths = [5, 40, 3]
    for name, run, draw in runs():
        for at in range(5, 45, 13):
            tensors = draw(lengths)
            clean = run(tensors, lengths)
            grads = gradients_of(run, tensors, lengths)
            dirty = {part: tensor.clone() for part, tensor in tensors.items()}
            for part, tensor in dirty.items():
                if part not in _PARAMETERS:
                    tensor[at] = float("nan")
            found = run(dirty, lengths)
            assert found[0][at].isnan().all(), name
            for rows in (slice(0, 5), slice(45, 48)):
                assert torch.equal(found[0][rows], clean[0][rows]), name
            other = gradients_of(run, dirty, lengths)
            for part, grad in grads.items():
                if part not in _PARAMETERS:
                    assert torch.equal(grad[:5], other[part][:5]), (name, part)
                    assert torch.equal(grad[45:], other[part][45:]), (name, part)


# -- numbers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [-1000.0, -1e5, float("-inf")])
@pytest.mark.parametrize("kind", [kind for kind, facts in KINDS.items() if "log_decay" in facts])
def test_one_strong_decay(kind: str, decay: float) -> None:
    tensors = attention_inputs(kind, (1, 2, 8, 8), [64])
    tensors["log_decay"][40] = decay
    options = {"delta": KINDS[kind].get("delta", False)}
    found, wanted = [
        differentiated(lambda parts, run=run: run(parts, [64], **options), leaves(tensors, dtype))
        for run, dtype in ((run_attention, torch.float32), (naive.attention, torch.float64))
    ]
    compare(found, wanted, 1e-5)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("kind", ["plain", "decay per head", "mamba2", "mlstm"])
def test_gradients_of_spans(kind: str, has_state: bool) -> None:
    """Between borders and resets gradients are products of matrices."""
    lengths = [0, 131, 32, 33, 1, 3]
    tensors = attention_inputs(kind, (2, 4, 19, 40), lengths)
    if not has_state:
        tensors = {name: each for name, each in tensors.items() if name not in _STATES}
    resets = torch.zeros(sum(lengths), dtype=torch.bool)
    resets[[0, 5, 6, 31, 63, 64, 65, 90, 131, 165, 190]] = True
    found, other = [
        differentiated(
            lambda parts, run=run: run(parts, lengths, resets), leaves(tensors, torch.float64)
        )
        for run in (run_attention, naive.attention)
    ]
    compare(found, other, 1e-10)
    after = {name: each.clone() for name, each in tensors.items()}
    for name in set(after) - set(_STATES):
        after[name][90:131] = float("nan")
    wrong = differentiated(
        lambda parts: run_attention(parts, lengths, resets), leaves(after, torch.float64)
    )
    for name in set(after) - set(_STATES):
        for rows in (slice(0, 90), slice(131, None)):
            assert torch.equal(wrong[1][name][rows], found[1][name][rows]), name


def test_equal_keys() -> None:
    """Where the inverse of a chunk's matrix by powers would lose all digits."""
    key = torch.nn.functional.normalize(drawn(1, 1, 64), dim=-1)
    tensors = {"q": drawn(64, 1, 64), "k": key.expand(64, 1, 64), "v": drawn(64, 1, 32)}
    tensors["gain"] = torch.full((64, 1), 0.99, dtype=torch.float64)
    wanted = naive.attention(tensors, [64], delta=True)
    narrow = {name: tensor.float() for name, tensor in tensors.items()}
    found = run_attention(narrow, [64], delta=True)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one.double(), other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bound", [1.0, 30.0, 200.0])
def test_softplus_and_exp_of_any_argument(bound: float) -> None:
    """The state after one step from zeros is the step size; that of the next step is a decay."""
    numbers = torch.linspace(-bound, bound, 4001).unsqueeze(1)
    ones = torch.ones(4001, 1, 1)
    lengths = [1] * 4001
    constants = {"x": torch.ones(4001, 1), "A": torch.zeros(1, 1), "B": ones, "C": ones}
    _, state = run_scan({"dt": numbers, **constants}, lengths, softplus=True)
    wanted = torch.logaddexp(numbers.double(), torch.zeros((), dtype=torch.float64))
    is_normal = wanted > 1e-37
    error = (state.view(-1, 1).double() / wanted - 1)[is_normal].abs().max()
    assert error < 1e-6
    decays = run_scan(
        {
            "x": numbers * 0,
            "dt": numbers,
            "A": torch.ones(1, 1),
            "B": ones,
            "C": ones,
            "initial_state": ones,
        },
        lengths,
    )[1]
    wanted = numbers.double().exp()
    is_normal = (wanted > 1e-37) & (wanted < 3e38)
    assert (decays.view(-1, 1).double() / wanted - 1)[is_normal].abs().max() < 1e-6
    assert torch.equal(
        decays.view(-1, 1)[wanted > 4e38],
        torch.full_like(wanted, float("inf")).float()[wanted > 4e38],
    )


def test_decays_of_the_largest_steps() -> None:
    """Their exponents have no fraction in float32."""
    steps = torch.tensor([-3e38, -1e20, -3e7, -0.0, 0.0, 3e7, 1e20, 3e38]).unsqueeze(1)
    ones = torch.ones(8, 1, 1)
    parts = {"x": torch.zeros(8, 1), "dt": steps, "A": ones[0], "B": ones, "C": ones}
    parts["initial_state"] = ones
    _, state = run_scan(parts, [1] * 8)
    assert state.flatten().tolist() == [0, 0, 0, 1, 1, *[torch.inf] * 3]


@pytest.mark.parametrize("name", ["scan", "gated delta"])
def test_many_steps_stay_accurate(name: str) -> None:
    count = 100_000
    run: Run = partial(run_scan, softplus=True)
    tensors = scan_inputs(4, 2, 1, [count])
    if name != "scan":
        run = partial(run_attention, delta=True)
        tensors = attention_inputs(name, (1, 1, 4, 4), [count])
    wide = run(tensors, [count])
    found = run({part: tensor.float() for part, tensor in tensors.items()}, [count])
    for one, other in zip(found, wide, strict=True):
        assert torch.allclose(one.double(), other, atol=1e-5 * float(other.abs().max()), rtol=0)


def test_softplus_above_20_in_plain_torch() -> None:
    """There torch's softplus is the identity, which in float64 is 1e-9 too little."""
    tensors = scan_inputs(2, 2, 1, [1])
    tensors |= {"dt": torch.full((1, 2), 20.5, dtype=torch.float64), "x": torch.ones(1, 2).double()}
    tensors |= {"A": torch.zeros(2, 2).double(), "B": torch.ones(1, 1, 2).double()}
    del tensors["dt_bias"], tensors["initial_state"]
    loop = scan_selectively.by_steps(
        RecurrenceCall(
            (*(tensors[name] for name in ("x", "dt", "A", "B", "C", "D")), None, None),
            torch.tensor([0, 1]),
            None,
            (True, -math.inf, math.inf),
        )
    )
    wanted = 20.5 + math.exp(-20.5)
    for _, state in (loop, run_scan(tensors, [1], softplus=True)):
        assert torch.allclose(state, torch.full_like(state, wanted), rtol=1e-13, atol=0)


def test_eps_counts() -> None:
    tensors = attention_inputs("mlstm", (1, 2, 8, 8), [40])
    for eps in (0.0, 0.3):
        found = run_attention(tensors, [40], eps=eps)
        wanted = naive.attention(tensors, [40], eps=eps)
        assert all(map(partial(torch.allclose, atol=1e-10), found, wanted))


def test_large_states() -> None:
    """256 keys, and three heads of keys of six heads each, in odd widths."""
    for sizes in ((1, 1, 256, 33), (3, 18, 7, 5)):
        tensors = attention_inputs("gated delta", sizes, [40])
        found = run_attention(tensors, [40], delta=True)
        wanted = naive.attention(tensors, [40], delta=True)
        for one, other in zip(found, wanted, strict=True):
            assert torch.allclose(one, other, atol=1e-9)


def test_batches_without_elements() -> None:
    for lengths in ([], [0, 0]):
        for name, run, draw in runs():
            tensors = draw(lengths)
            results = run(tensors, lengths)
            assert results[0].shape[0] == 0, name
            given = [tensors[part] for part in _STATES if part in tensors]
            assert all(map(torch.equal, results[1:], given)), name
            grads = gradients_of(run, tensors, lengths)
            assert all(bool((grads[part] == 1).all()) for part in _STATES if part in grads), name


# -- derivatives and transformations ---------------------------------------------------------------


def small(name: str) -> tuple[Any, Tensors, list[int]]:
    lengths = [3, 0, 2]
    if name == "scan":
        return partial(run_scan, softplus=True), scan_inputs(2, 2, 1, lengths), lengths
    delta = KINDS[name].get("delta", False)
    return (
        partial(run_attention, delta=delta),
        attention_inputs(name, (1, 2, 2, 2), lengths),
        lengths,
    )


@pytest.mark.parametrize("name", ["scan", "delta, decay per key", "mlstm"])
def test_second_derivatives(name: str) -> None:
    run, tensors, lengths = small(name)
    names = list(tensors)
    inputs = [tensor.detach().requires_grad_() for tensor in tensors.values()]

    def function(*parts: Tensor) -> tuple[Tensor, ...]:
        results: tuple[Tensor, ...] = run(dict(zip(names, parts, strict=True)), lengths)
        return results

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("name", ["scan", "gated delta", "mlstm"])
def test_transformations(name: str) -> None:
    run, tensors, lengths = small(name)
    wanted = gradients_of(run, tensors, lengths)
    torch.manual_seed(1)
    weights = torch.randn(run(tensors, lengths)[0].shape[1:], dtype=torch.float64)

    def total(parts: Tensors) -> Tensor:
        results = run(parts, lengths)
        sums: Tensor = (results[0] * weights).sum() + sum(part.sum() for part in results[1:])
        return sums

    grads = torch.func.grad(total)(tensors)
    for part, tensor in grads.items():
        assert torch.allclose(tensor, wanted[part], atol=1e-10), part
    tangents = {part: torch.randn_like(tensor) for part, tensor in tensors.items()}
    found = torch.func.jvp(total, (tensors,), (tangents,))[1]
    along = sum((wanted[part] * tangents[part]).sum() for part in tensors)
    assert torch.allclose(found, torch.as_tensor(along))


@pytest.mark.parametrize("name", ["scan", "gated delta", "mlstm"])
def test_compiled(name: str) -> None:
    run, tensors, lengths = small(name)
    parts = {part: tensor.detach().requires_grad_() for part, tensor in tensors.items()}
    compiled = torch.compile(
        lambda **given: sum(part.sum() for part in run(given, lengths)),
        backend="aot_eager",
        fullgraph=True,
    )
    total = compiled(**parts)
    wanted = sum(part.sum() for part in run(parts, lengths))
    assert torch.allclose(total, wanted)
    for one, other in zip(
        torch.autograd.grad(total, list(parts.values())),
        torch.autograd.grad(wanted, list(parts.values())),
        strict=True,
    ):
        assert torch.allclose(one, other)


def test_autocast_mixes_dtypes() -> None:
    run, tensors, lengths = small("scan")
    narrow = {name: tensor.float() for name, tensor in tensors.items()}
    narrow["x"] = narrow["x"].bfloat16()
    with pytest.raises(ShapeError, match="like x"):
        run(narrow, lengths)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = run(narrow, lengths)
    assert (y.dtype, state.dtype) == (torch.float32, torch.float32)
    assert torch.allclose(y, run({**narrow, "x": narrow["x"].float()}, lengths)[0])


@pytest.mark.parametrize("name", ["scan", "mlstm"])
def test_vmap(name: str) -> None:
    run, tensors, lengths = small(name)
    part = "x" if name == "scan" else "v"
    both = torch.stack([tensors[part], 2 * tensors[part]])
    found = torch.func.vmap(lambda one: run({**tensors, part: one}, lengths)[0])(both)
    for index, one in enumerate(both):
        assert torch.allclose(found[index], run({**tensors, part: one}, lengths)[0])


def test_memory_of_a_training_step() -> None:
    """Above inputs, outputs and their gradients, at most 1/16 of all states."""
    lengths, channels, states = [512, 512], 256, 16
    tensors = {
        name: tensor.float() for name, tensor in scan_inputs(channels, states, 1, lengths).items()
    }
    del tensors["initial_state"]
    parts = {name: tensor.detach().requires_grad_() for name, tensor in tensors.items()}
    y, _ = run_scan(parts, lengths)
    function = y.grad_fn
    seen = set()
    saved = 0
    while function is not None and not hasattr(function, "saved_tensors"):
        function = function.next_functions[0][0]
    for tensor in function.saved_tensors:  # type: ignore[union-attr]
        is_input = any(
            tensor is not None and tensor.data_ptr() == part.data_ptr() for part in parts.values()
        )
        if tensor is not None and not is_input and tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            saved += tensor.numel()
    assert 0 < saved <= sum(lengths) * channels * states / 16


# -- mistakes --------------------------------------------------------------------------------------

MISTAKES: list[tuple[str, str, Any, type[Exception], str]] = [
    ("scan", "x", lambda t: t.int(), ArgumentTypeError, "floating-point"),
    ("scan", "x", lambda t: t[:, 0], ShapeError, "values \\(N, channels\\)"),
    ("scan", "dt", lambda t: t[:, :1], ShapeError, "elements of shape"),
    ("scan", "dt", lambda t: t.float(), ShapeError, "like x"),
    ("scan", "A", lambda t: t[:1], ShapeError, "\\(E, S\\)"),
    ("scan", "B", lambda t: t.repeat(1, 3, 1), ShapeError, "divisor of the 4 channels"),
    ("scan", "C", lambda t: t.repeat(1, 2, 1), ShapeError, "groups, like B"),
    ("scan", "C", lambda t: t[..., :1], ShapeError, "sizes of A"),
    ("scan", "D", lambda t: t[:1], ShapeError, "of shape"),
    ("scan", "initial_state", lambda t: t.float(), ShapeError, "torch.float64, that of states"),
    ("scan", "initial_state", lambda t: t[:1], ShapeError, "one state per sequence"),
    ("gated delta", "log_decay", lambda t: -t, ArgumentError, "at most 0"),
    ("gated delta", "q", lambda t: t.repeat(1, 3, 1), ShapeError, "sizes of q"),
    ("gated delta", "k", lambda t: t[..., :1], ShapeError, "sizes of q"),
    ("gated delta", "gain", lambda t: t[:, :1], ShapeError, "sizes of v and k"),
    ("gated delta", "initial_state", lambda t: t.float(), ShapeError, "that of states"),
    ("mlstm", "stabiliser", lambda t: t[:, :1], ShapeError, "initial_state \\(stabiliser\\)"),
]


@pytest.mark.parametrize(("kind", "name", "change", "error", "message"), MISTAKES)
def test_mistakes(kind: str, name: str, change: Any, error: type[Exception], message: str) -> None:
    lengths = [3, 0, 2]
    tensors = (
        scan_inputs(4, 3, 1, lengths) if kind == "scan" else attention_inputs(kind, lengths=lengths)
    )
    tensors[name] = change(tensors[name])
    with pytest.raises(error, match=message) as raised:
        (run_scan if kind == "scan" else run_attention)(tensors, lengths)
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_combinations_that_no_network_has() -> None:
    tensors = attention_inputs("mlstm", lengths=[3])
    with pytest.raises(ArgumentError, match="log_gain with delta"):
        run_attention(tensors, [3], delta=True)
    tensors["gain"] = tensors["log_gain"]
    with pytest.raises(ArgumentError, match="log_gain with gain"):
        run_attention(tensors, [3])
    other = attention_inputs("decay per key", lengths=[3]) | {"log_gain": tensors["log_gain"]}
    with pytest.raises(ArgumentError, match="log_decay per key"):
        run_attention(
            {name: tensor for name, tensor in other.items() if name != "initial_state"}, [3]
        )
    with pytest.raises(ArgumentTypeError, match="a tuple of the state"):
        linear_attention(
            *(ragged(tensors[name], [3]) for name in ("q", "k", "v")),
            log_gain=ragged(tensors["log_gain"], [3]),
            initial_state=tensors["initial_state"],
        )
    keys = {name: drawn(3, 3, 2) for name in "qk"}
    with pytest.raises(ShapeError, match="q must be a divisor of the 4 heads of v"):
        run_attention(keys | {"v": drawn(3, 4, 2)}, [3])
    inputs = scan_inputs(lengths=[3])
    with pytest.raises(ArgumentError, match="dt_limit"):
        run_scan(inputs, [3], dt_limit=(1.0, 0.5))
    with pytest.raises(ShapeError, match="lengths"):
        selective_scan(
            ragged(inputs["x"], [3]),
            ragged(inputs["dt"], [2, 1]),
            inputs["A"],
            *(ragged(inputs[name], [3]) for name in "BC"),
        )
    with pytest.raises(ArgumentTypeError, match="bools"):
        run_scan(inputs, [3], torch.zeros(3))
