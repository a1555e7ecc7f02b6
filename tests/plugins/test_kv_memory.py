"""The KV pool's memory: what is resident, and when."""

import ctypes
import mmap
import sys

import numpy as np
import pytest

from castline.engines.errors import EngineError
from castline.plugins.cpu.kv_memory import KvMemory

MIB = 1 << 20
BLOCKS, LAYERS, BYTES = 8, 2, 2 * MIB
linux = pytest.mark.skipif(sys.platform != "linux", reason="asks Linux which pages are resident")


def resident(blocks: np.ndarray) -> list[bool]:
    """For each page of *blocks*."""
    pages = blocks.nbytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * pages)()
    address = ctypes.c_void_p(blocks.ctypes.data)
    assert ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(blocks.nbytes), found) == 0
    return [bool(page & 1) for page in found]


@linux
def test_memory_comes_block_by_block() -> None:
    """A pool that is resident as a whole, or layer by layer, from the first block on."""
    memory = KvMemory(BLOCKS, LAYERS, BYTES)
    assert memory.pool.shape == (BLOCKS, LAYERS, BYTES)
    assert not any(resident(memory.pool))
    assert memory.provide(1, 3)
    assert [all(resident(block)) for block in memory.pool] == [False, True, True, *[False] * 5]
    assert not any(resident(memory.pool[3:]))


def test_providing_keeps_what_blocks_hold() -> None:
    """A step may be ahead of the thread that provides: what it has written must stay, and all else be zero."""
    memory = KvMemory(BLOCKS, LAYERS, BYTES)
    memory.pool[2, 1, ::4096] = 7
    memory.provide(0, BLOCKS)
    assert (memory.pool[2, 1, ::4096] == 7).all()
    memory.pool[2, 1, ::4096] = 0
    assert not memory.pool.any()


def test_parts_of_pages_are_provided() -> None:
    """Blocks begin and end anywhere in a page, and the system takes whole ones: none may be left out, or refused."""
    memory = KvMemory(3, 1, 640)
    assert memory.provide(1, 2) is (sys.platform == "linux")
    assert not memory.provide(3, 3)
    assert not memory.pool.any()


def test_an_impossible_pool_is_refused() -> None:
    """More blocks than the address space holds: the size and the cure, not a bare MemoryError."""
    for blocks in (1 << 45, 1 << 61):
        with pytest.raises(EngineError, match=r"no memory for a KV pool of .* bytes .* fewer blocks"):
            KvMemory(blocks, LAYERS, BYTES)
