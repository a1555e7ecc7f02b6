"""Memory of a KV pool: reserved whole, provided in parts.

Reserving takes address space. A page of memory comes when its blocks are provided, or else when a step first writes it,
which costs that step a page fault: slower, and right. All of it is zero until written.

A block holds every layer: [blocks, layers, block_bytes]. So the blocks that were ever used are one range of memory, and
what is resident grows with them, one huge page (2 MiB on x86) at a time.
"""

import ctypes
import mmap
import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError

_HUGE_PAGE: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14 and later."""


class KvMemory:
    """The pool, and the calls that give it memory. Raises EngineError where the address space has no room."""

    def __init__(self, num_blocks: int, num_layers: int, block_bytes: int) -> None:
        size = num_blocks * num_layers * block_bytes
        try:
            reserved = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise EngineError(
                f"no memory for a KV pool of {size:,} bytes ({num_blocks} blocks); ask for fewer blocks"
            ) from None
        whole = np.frombuffer(reserved, np.uint8)
        start = -whole.ctypes.data % _HUGE_PAGE
        self.pool: NDArray[np.uint8] = whole[start : start + size].reshape(num_blocks, num_layers, block_bytes)
        """[num_blocks, num_layers, block_bytes]. It alone keeps the memory: a KvMemory holds no other reference."""
        _advise(self.pool, _MADV_HUGEPAGE)  # small pages: 0.5 s for 256 MiB instead of 0.04, and slower attention

    def provide(self, begin: int, end: int) -> bool:
        """Gives memory to blocks [begin, end); what they hold stays. False where the system cannot, or has none left.

        Any thread may call it while others step: the interpreter is free meanwhile, and so is the pool.
        """
        return _advise(self.pool[begin:end], _MADV_POPULATE_WRITE)


def _advise(blocks: NDArray[np.uint8], advice: int) -> bool:
    """Tells the system what to do with every page that *blocks*, a contiguous array, touch."""
    if sys.platform != "linux" or blocks.size == 0:
        return False
    start = blocks.ctypes.data
    first = start - start % mmap.PAGESIZE
    return bool(_madvise(first, start + blocks.nbytes - first, advice) == 0)


if sys.platform == "linux":
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
