"""Huge pages (2 MiB on x86) under what a process touches all the time.

A decode step reads all weights once. In pages of 4 KiB that takes many times the address translations that a core
keeps, and evicts those of everything else: a walk of the page tables at every turn, long where the machine is virtual.
In huge pages the weights, the KV pool and the heap of a small model fit into a core's tables together.
"""

import contextlib
import logging
import mmap
import os
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from castline.engines.pages import HUGE_PAGE, MAKE_HUGE, advise
from castline.runtime.serving_time import standing_apart

_MOST_EMPTY: Final = 0.25
"""Share of a huge page whose pages may be unused: making it whole takes memory for them."""
WEIGHTS_AT_ONCE: Final = 16 << 20
START_DELAY_S: Final = 0.5
"""A server that has just started has a core to itself for its first answers."""
_NICE: Final = 10
"""A step goes first: a thread of the engine has nine times the weight."""

_log = logging.getLogger(__name__)


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
        with standing_apart():
            self._settle()

    def _settle(self) -> None:
        _give_way()
        self._stopped.wait(self._delay_s)
        moved = 0
        while self._move_weights is not None and not self._stopped.is_set():
            if (part := self._move_weights(WEIGHTS_AT_ONCE)) == 0:
                break
            moved += part
        collapsed = collapse_heap(self._stopped.is_set)
        _log.debug("moved %d bytes of weights into huge pages, and put %d under the heap", moved, collapsed)


def _give_way() -> None:
    """This thread. One that may not, or is nicer already, stays as it is."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(_NICE, os.getpriority(os.PRIO_PROCESS, thread)))


def collapse_heap(stop: Callable[[], bool] = lambda: False) -> int:
    """Makes huge pages of the private memory that this process uses; how many are huge then, of those looked at.

    Asks *stop* often. Other threads may go on: one that touches a page in that moment waits for its copy. 0 where the
    system does not show a process its memory.
    """
    if sys.platform != "linux":
        return 0
    collapsed = 0
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pages:
            for address in heap(Path("/proc/self/smaps").read_bytes()):
                if stop():
                    break
                if _unused(pages.fileno(), address) <= _MOST_EMPTY:
                    collapsed += advise(address, HUGE_PAGE, MAKE_HUGE)
    except (OSError, ValueError, struct.error) as error:
        _log.info("no huge pages for the heap: %s", error)
    return collapsed


def heap(smaps: bytes) -> Iterator[int]:
    """Addresses where a huge page of private, writable memory of no file could begin, of a ``/proc/PID/smaps``.

    Not those of a KV pool, however large: a mapping of which every page is huge has nothing to gain.
    """
    addresses: tuple[int, int] | None = None
    resident = 0
    for line in smaps.split(b"\n"):
        first, *others = line.split(maxsplit=5) or [b":"]
        if not first.endswith(b":"):
            access, _, _, inode, *name = others
            wanted = access == b"rw-p" and inode == b"0" and name != [b"[stack]"]
            begin, end = (int(address, 16) for address in first.split(b"-"))
            addresses = (begin, end) if wanted else None
        elif first == b"Rss:":
            resident = int(others[0])
        elif first == b"AnonHugePages:" and addresses is not None and resident > int(others[0]):
            begin, end = addresses
            yield from range(-(-begin // HUGE_PAGE) * HUGE_PAGE, end - HUGE_PAGE + 1, HUGE_PAGE)


def _unused(pagemap: int, address: int) -> float:
    """Share of the pages in the huge page at *address* that are not in memory."""
    count = HUGE_PAGE // mmap.PAGESIZE
    entries = struct.unpack(f"={count}Q", os.pread(pagemap, 8 * count, address // mmap.PAGESIZE * 8))
    empty: int = sum(entry >> 63 == 0 for entry in entries)
    return empty / count
