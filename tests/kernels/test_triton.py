"""Programs as Triton kernels, without a GPU: under Triton's interpreter, and compiled for three
architectures.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

from on_triton import NAMES, USERS
from raglane.kernels.triton.places import Places
from raglane.kernels.triton.printer import kernel_of
from raglane.programs.graph import Refused
from raglane.programs.program import Block, Instruction, Operand, Program
from scripts import Script

pytest.importorskip("triton", reason="Triton has wheels for Linux on x86-64 only")
# Layers, with or without resets, of every run; make triton has all of them.
SAMPLE = [("lstm", False), ("layernorm_gru", True), ("a user's GRU", False)]
# Shared memory of a block on each architecture, in bytes.
SHARED = {80: 166_912, 90: 232_448, 100: 232_448}

slow = pytest.mark.slow
_one = [pytest.param(name, marks=() if name == "rnn_tanh" else slow) for name in NAMES]


@pytest.fixture(scope="module")
def script() -> Iterator[Script]:
    """Run code in a new process, forked after the imports of on_triton, which do not include
    Triton.
    """
    with Script("on_triton") as script:
        yield script


def _run(script: Script, code: str, **environment: str) -> Any:
    ended = script(f"import on_triton; on_triton.{code}", seconds=600, **environment)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


def _interpreted(script: Script, *cases: tuple[Any, ...]) -> list[Any]:
    return _run(script, f"interpret({list(cases)!r})", TRITON_INTERPRET="1")


@pytest.mark.parametrize(
    ("name", "with_resets"),
    [
        pytest.param(*case, marks=() if case in SAMPLE else slow)
        for case in product(NAMES, (False, True))
    ],
)
def test_outputs_states_and_gradients_are_those_of_the_reference(
    script: Script, name: str, with_resets: bool
) -> None:
    """Two directions, lengths 0 and 1, more sequences than a kernel's block has rows, an initial
    state.

    With resets at first and last elements, and several in a sequence.
    """
    (errors,) = _interpreted(script, ("differences", name, with_resets))
    assert len(errors) > 4
    assert max(errors) < 2e-5


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(number, marks=slow) for number in range(1, 201, 20))]
)
def test_printed_random_programs(script: Script, first: int) -> None:
    """Every operation, on operands in several pieces, repeated columns and numbers."""
    count = 20 if first else 4
    found = _interpreted(script, *[("of_a_program", seed) for seed in range(first, first + count)])
    assert sum(map(bool, found)) > count / 2
    assert max(max(errors, default=0) for errors in found) < 1e-3


def test_a_gather_from_a_block_that_is_not_full() -> None:
    blocks = Block("element", 4), Block("local", 8), Block("local", 2)
    copy = Instruction("copy", (Operand(1),), (Operand(0),), 4)
    gather = Instruction("gather", (Operand(2),), (Operand(1),), 2, columns=(3, 0))
    program = Program(blocks, (), (copy, gather), ((Operand(2), 2),), ())
    assert kernel_of(program, True).tables == ((3, 0),)


@pytest.mark.parametrize("name", [pytest.param(name, marks=slow) for name in NAMES[: -len(USERS)]])
def test_the_graph_of_a_package_launches_kernels(script: Script, name: str) -> None:
    """For lengths that it was not made for, in two layers and directions."""
    (errors,) = _interpreted(script, ("in_a_graph", name))
    assert len(errors) > 4
    assert max(errors) < 2e-5


@pytest.mark.parametrize("name", _one)
def test_bits_do_not_depend_on_the_batch(script: Script, name: str) -> None:
    (differs,) = _interpreted(script, ("alone_and_together", name))
    assert differs == [0.0] * 10


@pytest.mark.parametrize("name", _one)
def test_a_call_launches_few_kernels_and_waits_for_none(script: Script, name: str) -> None:
    """Forward: input products, if they are not part of the loop, and the loop; backward: the loop,
    and products.
    """
    ((forward, backward, waits),) = _interpreted(script, ("launches_and_waits", name))
    assert forward <= 2
    assert backward <= 3
    assert waits == 0


# The passes that are linear in their states: forward and backward.
_LINEAR = {
    "mingru": [1, 1],
    "minlstm": [1, 1],
    "qrnn": [1, 1],
    "indrnn_relu": [0, 1],
    "sru": [0, 1],
    "lstm": [0, 0],
}


@slow
@pytest.mark.parametrize(("name", "passes"), _LINEAR.items())
def test_passes_that_are_linear_in_their_states_run_chunks(
    script: Script, name: str, passes: list[int]
) -> None:
    cases = ("chunked", name), ("launches_and_waits", name, 23), ("differences", name, False)
    counts, (forward, backward, waits), errors = _interpreted(script, *cases)
    assert counts == passes
    assert forward <= 2 + counts[0]
    assert backward <= 3 + 2 * counts[1]  # of SRU and IndRNN also the sums of chunks
    assert waits == 0
    assert max(errors) < 2e-5


@pytest.mark.parametrize("mixed", [None, 0, 1])
def test_states_that_mix_run_no_chunks(mixed: int | None) -> None:
    """A chunk multiplies each state by one factor, which a sum of two states does not have."""
    states = (Operand(0), Operand(1))
    element = Operand(2)
    blocks = [Block("state", 4, 0), Block("state", 4, 1), Block("element", 4, 0)]
    instructions = []
    following = []
    for index, state in enumerate(states):
        scaled = Operand(len(blocks))
        instructions.append(Instruction("mul", (scaled,), (state, element), 4))
        moved = Operand(len(blocks) + 1)
        shift = states[1 - index] if index == mixed else element
        instructions.append(Instruction("add", (moved,), (scaled, shift), 4))
        blocks += [Block("local", 4), Block("local", 4)]
        following.append(moved)
    outputs = ((states[0], 4),)
    program = Program(tuple(blocks), (), tuple(instructions), outputs, tuple(following))
    assert kernel_of(program, True).roles == ("carried", "carried")
    if mixed is None:
        assert len(kernel_of(program, True, of_chunks=True).finals) == 4
        return
    with pytest.raises(Refused, match="it is not linear in its states"):
        kernel_of(program, True, of_chunks=True)


@pytest.mark.parametrize("lengths", [[0, 9, 8, 1, 0, 17, 3], [40], [0, 12], [9, 0, 0]])
def test_chunks_of_a_batch(lengths: list[int]) -> None:
    """Chunks of two elements of sequences of more than eight; the others are one chunk each."""
    chunks: Any = Places(torch.tensor([0, *lengths]).cumsum(0), sum(lengths), long=8).chunks
    cut = [
        [min(2, length - at) for at in range(0, length, 2)] if length > 8 else [length]
        for length in lengths
    ]
    flat = [length for parts in cut for length in parts]
    assert chunks.places.offsets.diff().tolist() == flat + [0] * (len(chunks.owner) - len(flat))
    assert chunks.sequences.offsets.diff().tolist() == [len(parts) for parts in cut]
    assert chunks.owner.tolist()[: len(flat)] == [
        index for index, parts in enumerate(cut) for _ in parts
    ]
    states = torch.arange(1.0, 1 + len(lengths)).unsqueeze(1)
    for ascending in (True, False):
        begin = chunks.begin(states, ascending)
        assert torch.equal(chunks.end(begin, not ascending), states)
        assert begin.count_nonzero() == len(lengths)


def test_chunks_of_offsets_that_were_changed_on_the_device() -> None:
    places = Places(torch.tensor([0, 9, 10]), 10, torch.tensor([9, 1]), 8)
    places.offsets.copy_(torch.tensor([-(1 << 62), (1 << 62) - 1, -3]))
    chunks: Any = places.chunks
    assert chunks.owner.max() < 2
    assert chunks.begin(torch.ones(2, 1), True).shape == (len(chunks.owner), 1)
    assert chunks.end(torch.ones(len(chunks.owner), 1), True).shape == (2, 1)


def test_batches_without_chunks() -> None:
    offsets = torch.empty(3, dtype=torch.int64, device="meta")  # which the host does not read
    assert Places(torch.tensor([0, 8, 16]), 16, long=8).chunks is None
    assert Places(torch.tensor([0]), 0, long=8).chunks is None
    assert Places(offsets, 5000).chunks is None
    assert Places(offsets, 5000, offsets.diff()).chunks is None


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(number, marks=slow) for number in range(1, 61, 20))]
)
def test_random_linear_programs_in_chunks(script: Script, first: int) -> None:
    count = 20 if first else 4
    errors = _interpreted(
        script, *[("of_a_linear_program", seed) for seed in range(first, first + count)]
    )
    assert max(map(max, errors)) < 1e-5


@pytest.mark.parametrize("ascending", [True, False])
def test_factors_of_a_chunk_that_overflow(script: Script, ascending: bool) -> None:
    """Zeros stay zeros, with their sign in the first chunk; another state becomes infinite or NaN,
    and stays it.
    """
    turn = 1 if ascending else -1
    factors = [1.0] * 5 + [1e20] * 5 + [1e20, 1e20, 0.0, 1.0, 1.0] + [1.0] * 10
    zeros, below, grown = _interpreted(
        script, *[("growing", factors[::turn], state, ascending) for state in (0.0, -0.0, 1e-30)]
    )
    assert list(map(str, [*zeros, *below[::turn][:5]])) == ["0.0"] * 25 + ["-0.0"] * 5
    assert grown[::turn][:9] == pytest.approx([1e-30] * 6 + [1e-10, 1e10, 1e30], rel=1e-5)
    assert not any(math.isfinite(state) for state in grown[::turn][9:])


@pytest.mark.parametrize("name", _one)
def test_the_comparison_before_the_first_use(script: Script, name: str) -> None:
    assert _interpreted(script, ("verified", name)) == [""]


@pytest.mark.parametrize("name", _one)
def test_a_prepared_layer_compares_and_compiles_nothing_in_a_call(
    script: Script, name: str
) -> None:
    ((compared, kernels, *later),) = _interpreted(script, ("prepared", name))
    assert compared == 2  # with and without resets
    assert kernels > 4
    assert later == [0, 0]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "indrnn_tanh" else slow) for name in NAMES]
)
def test_a_second_call_launches_the_kernels_of_the_first(script: Script, name: str) -> None:
    """Without Triton's lookup, and with the same arguments, of a driver without a GPU."""
    first, second = _run(script, f"launched({name!r})")
    assert len(first) > 2
    assert second == first


@pytest.mark.parametrize(("name", "steps"), [("indrnn_tanh", 4), ("minlstm", 2)])
def test_a_pass_of_an_elementwise_loop_loads_its_inputs_first(
    script: Script, name: str, steps: int
) -> None:
    passed, loads, late = _run(script, f"loads({name!r})")
    assert passed == steps
    assert loads >= steps
    assert late == 0


# With resets in the sample: the larger kernels.
@pytest.mark.parametrize("with_resets", [True, pytest.param(False, marks=slow)])
@pytest.mark.parametrize(
    "architecture", [90, *(pytest.param(number, marks=slow) for number in (80, 100))]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gru" else slow) for name in NAMES]
)
def test_registers_and_shared_memory_suffice(
    script: Script, name: str, architecture: int, with_resets: bool
) -> None:
    found = _run(script, f"compiled([{name!r}], [{architecture}], 128, with_resets={with_resets})")
    assert len(found) >= 2  # forward and backward, and of chunks
    for registers, spilled, shared in found.values():
        assert registers <= 168
        assert spilled == 0
        assert shared <= SHARED[architecture]


@slow
@pytest.mark.parametrize("name", ["layernorm_lstm", "layernorm_gru", "slstm", "grud"])
def test_values_wider_than_a_variable(script: Script, name: str) -> None:
    """In parts, of which the last may have fewer columns."""
    (errors,) = _interpreted(script, ("differences", name, False, 131))
    assert max(errors) < 2e-5
    for units in (160, 250):
        for registers, spilled, _ in _run(script, f"compiled([{name!r}], [90], {units})").values():
            assert registers <= 255
            assert spilled == 0
