"""Memory of a KV pool: reserved whole, provided in parts.

Reserving takes address space. A page of memory comes when its blocks are provided, or else when a step first writes it,
which costs that step a page fault: slower, and right. All of it is zero until written.

A block holds every layer: [blocks, layers, block_bytes]. So the blocks that were ever used are one range of memory, and
what is resident grows with them, one huge page (2 MiB on x86) at a time.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.engines.pages import HUGE_PAGE, PROVIDE, USE_HUGE_PAGES, advise


class KvMemory:
    """The pool, and the calls that give it memory. Raises EngineError where the address space has no room."""

    def __init__(self, num_blocks: int, num_layers: int, block_bytes: int) -> None:
        size = num_blocks * num_layers * block_bytes
        try:
            reserved = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError):
            raise EngineError(
                f"no memory for a KV pool of {size:,} bytes ({num_blocks} blocks); ask for fewer blocks"
            ) from None
        whole = np.frombuffer(reserved, np.uint8)
        start = -whole.ctypes.data % HUGE_PAGE
        self.pool: NDArray[np.uint8] = whole[start : start + size].reshape(num_blocks, num_layers, block_bytes)
        """[num_blocks, num_layers, block_bytes]. It alone keeps the memory: a KvMemory holds no other reference."""
        # Small pages: 0.5 s for 256 MiB instead of 0.04, and slower attention.
        advise(self.pool.ctypes.data, self.pool.nbytes, USE_HUGE_PAGES)

    def provide(self, begin: int, end: int) -> bool:
        """Gives memory to blocks [begin, end); what they hold stays. False where the system cannot, or has none left.

        Any thread may call it while others step: the interpreter is free meanwhile, and so is the pool.
        """
        blocks = self.pool[begin:end]
        return advise(blocks.ctypes.data, blocks.nbytes, PROVIDE)
