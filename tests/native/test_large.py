"""The allocator for large tensors: ownership, reuse and freeing of blocks."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import raglane as rl
from cpu_networks import (
    ELEMENTWISE_CELLS,
    LIBRARY,
    MATRIX_CELLS,
    POISON,
    TOLERANCE,
    assert_close,
    truth,
    with_gradients,
)
from guarded import chosen_library
from raglane.kernels.cpu.backend import BACKEND
from raglane.native import library
from raglane.planner.probe import peak_bytes

LIKE = torch.zeros(1)
# Numbers of the smallest block here.
LEAST = 1 << 15


@pytest.fixture(autouse=True)
def small_blocks() -> Iterator[None]:
    """Allocate small tensors from blocks, too."""
    with chosen_library(replace(LIBRARY, least_block=4 * LEAST)):
        yield


def test_memory_is_given_again_and_only_when_nothing_refers_to_it() -> None:
    draw = random.Random(3)
    seen: set[int] = set()
    held: list[tuple[Any, int]] = []
    again = 0
    for number in range(60):
        part = library.empty(LIKE, draw.randrange(LEAST, 3 * LEAST)).fill_(number)
        again += part.data_ptr() in seen
        seen.add(part.data_ptr())
        views = [
            part,
            part[5:],
            part.detach(),
            part.view(1, -1),
            part.untyped_storage(),
            part.numpy(),
        ]
        held.append((draw.choice(views), number))
        del part, views
        if len(held) > 3:
            one, its = held.pop(draw.randrange(len(held)))
            numbers = (
                torch.empty(0).set_(one)
                if isinstance(one, torch.UntypedStorage)
                else torch.as_tensor(one)
            )
            assert (numbers.view(-1)[: LEAST - 5] == its).all(), its
    assert again > 30


def test_an_unused_block_is_replaced() -> None:
    if sys.platform != "linux":
        pytest.skip("mincore is Linux's")
    libc = ctypes.CDLL(None)

    def is_mapped(address: int) -> bool:
        return bool(
            libc.mincore(
                ctypes.c_void_p(address),
                ctypes.c_size_t(mmap.PAGESIZE),
                ctypes.create_string_buffer(1),
            )
            == 0
        )

    # At most 64 blocks are free; those that other tests left are in use meanwhile.
    others = [library.empty(LIKE, LEAST) for _ in range(64)]
    first, second = [library.empty(LIKE, LEAST).data_ptr() for _ in range(2)]
    assert first == second
    assert is_mapped(first)
    size = 5 * LEAST * LIKE.element_size()
    kept = [library.empty(LIKE, 5 * LEAST) for _ in range(16)]
    assert len({part.data_ptr() for part in [*others, *kept]}) == 80
    in_a_new_block = any(0 <= first - part.data_ptr() < size for part in kept)
    assert in_a_new_block or not is_mapped(first)


def test_blocks_have_large_pages() -> None:
    """Writing a kept block again costs as much as its small pages."""
    if not os.path.exists("/sys/kernel/mm/transparent_hugepage"):
        pytest.skip("the system has no large pages")
    block = library.empty(LIKE, 1 << 23)
    address = block.data_ptr()
    flags: list[str] = []
    is_of_block = False
    with open("/proc/self/smaps", encoding="utf-8") as file:
        for line in file:
            first, _, rest = line.partition(" ")
            if "-" in first and not first.endswith(":"):
                low, high = (int(end, 16) for end in first.split("-"))
                is_of_block = low <= address < high
            elif is_of_block and first == "VmFlags:":
                flags = rest.split()
    assert "hg" in flags


def test_threads_share_nothing_at_a_time() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for _ in range(30):
            parts = [library.empty(LIKE, LEAST + number).fill_(sign * number) for sign in (1, -1)]
            if not all(
                (part == sign * number).all() for part, sign in zip(parts, (1, -1), strict=True)
            ):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_forked_process_has_memory_of_its_own() -> None:
    library.empty(LIKE, LEAST)  # which waits
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, f"{library.empty(LIKE, LEAST).fill_(1).data_ptr()}".encode())
        os._exit(0)
    mine = library.empty(LIKE, LEAST).fill_(2)
    assert os.waitpid(child, 0)[1] == 0
    assert int(os.read(read, 100)) == mine.data_ptr()
    assert (mine == 2).all()


def test_without_memory_torch_says_so() -> None:
    with pytest.raises(RuntimeError, match=r"can.t allocate memory|not enough memory"):
        library.empty(LIKE, 1 << 60)
    assert library.empty(LIKE, LEAST).numel() == LEAST


@pytest.mark.skipif(
    library.operators() is None, reason="raglane was installed without torch's operators"
)
def test_what_the_operators_save_is_in_blocks() -> None:
    """Gates and ``c`` begin at pages, and the output, which the caller may keep, is torch's."""
    layer = rl.nn.LSTM(8, 64)
    count = LEAST // 64

    def saved() -> list[list[int]]:
        """Return the places in their pages of several outputs, gates and ``c``."""
        batch = rl.Ragged([torch.randn(count, 8)])
        outs = [layer(batch)[0].values for _ in range(8)]
        nodes: list[Any] = [out.grad_fn for out in outs]
        places = [
            [part.data_ptr() % mmap.PAGESIZE for part in node.saved_tensors[1:4]] for node in nodes
        ]
        return [list(of_part) for of_part in zip(*places, strict=True)]

    # One tensor of torch may begin at a page by chance.
    outputs, gates, c_states = saved()
    assert any(outputs)
    assert not any(gates + c_states)
    with library.from_torch():
        assert all(map(any, saved()))


class _Torn:
    """The kernels' library with blocks that are full of NaN."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def raglane_take_block(self, wanted: int, size: Any) -> int:
        address: int = self.handle.raglane_take_block(wanted, size)
        ctypes.memset(address, 0xFF, wanted)
        return address


@pytest.mark.parametrize("way", ["operators", "ctypes"])
@pytest.mark.parametrize("cell", [*MATRIX_CELLS, *ELEMENTWISE_CELLS])
def test_layers_agree_with_the_reference_on_memory_that_was_used_before(
    cell: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "ctypes":
        monkeypatch.setattr(library, "operators", lambda: None)
    elif library.operators() is None:
        pytest.skip("raglane was installed without torch's operators")
    network, wanted = truth(cell, "mixed", (5, 17, 0), 2, False)
    torn: Any = _Torn(LIBRARY.handle)
    with chosen_library(replace(LIBRARY, least_block=1, handle=torn, flags=POISON)):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            own = network.map(lambda part, dtype=dtype: part.to(dtype))  # type: ignore[misc]
            assert_close(with_gradients(own, BACKEND), wanted, TOLERANCE[dtype])


def test_memory_of_a_step_is_counted_with_blocks_too() -> None:
    layer = rl.nn.PeepholeLSTM(8, 16)
    batch = rl.Ragged([torch.randn(50, 8)])

    def step() -> None:
        layer(batch)[0].values.sum().backward()

    with chosen_library(replace(LIBRARY, least_block=1)):
        step()
        # Of each of the 50 elements: the output, four gates and c.
        assert peak_bytes(step, torch.device("cpu")) >= 4 * 50 * 16 * 6
