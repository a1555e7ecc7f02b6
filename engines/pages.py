"""What a process tells Linux about its own pages."""

import ctypes
import mmap
import sys
from typing import Final

HUGE_PAGE: Final = 2 << 20
"""Bytes, on x86 and where small pages are of 4 KiB."""
USE_HUGE_PAGES: Final = 14
"""MADV_HUGEPAGE: pages that come from now on are huge."""
PROVIDE: Final = 23
"""MADV_POPULATE_WRITE, Linux 5.14: pages come now; what they hold stays."""
MAKE_HUGE: Final = 25
"""MADV_COLLAPSE, Linux 6.1: pages that are there become huge ones."""


def advise(address: int, size: int, advice: int) -> bool:
    """Says *advice* of every page that the *size* bytes from *address* touch. False where the system does not take it.

    The interpreter is free meanwhile.
    """
    if sys.platform != "linux" or size == 0:
        return False
    first = address - address % mmap.PAGESIZE
    return bool(_madvise(first, address + size - first, advice) == 0)


if sys.platform == "linux":
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
