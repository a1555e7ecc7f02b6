"""Huge pages (2 MiB on x86) under what a process touches all the time.

A decode step reads all weights once. In pages of 4 KiB that takes many times the address translations that a core
keeps, and evicts those of everything else: a walk of the page tables at every turn, long where the machine is virtual.
In huge pages the weights, the KV pool and the heap of a small model fit into a core's tables together.
"""

import ctypes
import logging
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Final

HUGE_PAGE: Final = 2 << 20
ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_COLLAPSE: Final = 25
"""Linux 6.1 and later."""
_MOST_EMPTY: Final = 0.25
"""Share of a huge page whose pages may be unused: making it whole takes memory for them."""
_WEIGHTS_AT_ONCE: Final = 16 << 20
START_DELAY_S: Final = 0.5
"""A server that has just started has a core to itself for its first answers."""
_NICE: Final = 10
"""A step goes first: a thread of the engine has nine times the weight."""

_TUNABLES: Final = "GLIBC_TUNABLES"
_MALLOC: Final = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=67108864"
"""glibc 2.35 and later; others pay it no attention."""

_log = logging.getLogger(__name__)


def available(enabled: Path = ENABLED) -> bool:
    """Whether the system gives huge pages to those who ask for them."""
    try:
        return "[never]" not in enabled.read_text()
    except OSError:
        return False


def environment(outer: Mapping[str, str]) -> dict[str, str]:
    """*outer*, for a process whose heap is to lie in huge pages; what *outer* sets itself prevails.

    All of it is one stretch: large allocations join the others instead of having pages of their own, whose ends no huge
    page covers, and so do Python's objects.
    """
    others = outer.get(_TUNABLES)
    ours = _MALLOC if others is None else f"{_MALLOC}:{others}"
    return {"PYTHONMALLOC": "malloc", **outer, _TUNABLES: ours}


class Settling:
    """Puts huge pages under a process that is ready, in a thread that gives way to others. It ends by itself."""

    def __init__(self, move_weights: Callable[[int], int] | None = None, *, delay_s: float = START_DELAY_S) -> None:
        """``move_weights(enough)`` moves so many bytes of weights or a little more; 0: there are none left."""
        self._move_weights = move_weights
        self._delay_s = delay_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="huge-pages", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """What is not moved yet stays where it is. Returns at once."""
        self._stopped.set()

    def join(self) -> None:
        """Waits for the end: of everything, or of what is being moved when it is told to stop."""
        self._thread.join()

    def _run(self) -> None:
        if sys.platform == "linux":
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._stopped.wait(self._delay_s)
        moved = 0
        while self._move_weights is not None and not self._stopped.is_set():
            if (part := self._move_weights(_WEIGHTS_AT_ONCE)) == 0:
                break
            moved += part
        collapsed = collapse_heap(self._stopped.is_set)
        _log.debug("moved %d bytes of weights into huge pages, and put %d under the heap", moved, collapsed)


def collapse_heap(stop: Callable[[], bool] = lambda: False) -> int:
    """Makes huge pages of the private memory that this process has written; how many. Asks *stop* often.

    Other threads may go on: one that touches a page in that moment waits for its copy. 0 where the system does not show
    a process its memory.
    """
    if sys.platform != "linux":
        return 0
    collapsed = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for address in _heap():
                if stop():
                    break
                if _unused(pages.fileno(), address) <= _MOST_EMPTY:
                    collapsed += _madvise(address, HUGE_PAGE, _MADV_COLLAPSE) == 0
    except (OSError, struct.error) as error:
        _log.info("no huge pages for the heap: %s", error)
    return collapsed


def _heap() -> Iterator[int]:
    """Addresses where a huge page of private, writable memory of no file could begin.

    Not those of a KV pool, however large: a mapping of which every page is huge has nothing to gain.
    """
    addresses: tuple[int, int] | None = None
    resident = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *others = line.split(maxsplit=5)
        if not first.endswith(":"):
            access, _, _, inode, *name = others
            wanted = access == "rw-p" and inode == "0" and name != ["[stack]"]
            begin, end = (int(address, 16) for address in first.split("-"))
            addresses = (begin, end) if wanted else None
        elif first == "Rss:":
            resident = int(others[0])
        elif first == "AnonHugePages:" and addresses is not None and resident > int(others[0]):
            begin, end = addresses
            yield from range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE)


def _unused(pagemap: int, address: int) -> float:
    """Share of the pages in the huge page at *address* that were never written."""
    count = HUGE_PAGE // mmap.PAGESIZE
    entries = struct.unpack(f"={count}Q", os.pread(pagemap, 8 * count, address // mmap.PAGESIZE * 8))
    empty: int = sum(entry >> 63 == 0 for entry in entries)  # the highest bit: it is in memory
    return empty / count


if sys.platform == "linux":
    _madvise = ctypes.CDLL(None).madvise
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
