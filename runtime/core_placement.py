"""The event loop keeps off the core on which the step loop runs.

Each report of a step wakes the event loop, and the kernel likes to wake it where the step loop is: who writes to a
socket is taken to be about to sleep, and a busy machine is not searched for an idle core. The step loop then waits
until all of the report is served, while the cores of its workers, who sleep between two steps, are idle.
"""

import ctypes
import os
import sys
from typing import Final

_IS_LINUX: Final = sys.platform == "linux"
_sched_getcpu = ctypes.CDLL(None).sched_getcpu if _IS_LINUX else None


def running_core() -> int | None:
    """The core on which the caller runs; None where the system does not tell."""
    core = -1 if _sched_getcpu is None else int(_sched_getcpu())
    return core if core >= 0 else None


def allowed_cores() -> set[int]:
    """Those on which the calling thread may run; empty where threads cannot be told."""
    return os.sched_getaffinity(0) if _IS_LINUX else set()


def use_cores(cores: set[int]) -> None:
    """The calling thread runs on none but these. Without effect where it may not."""
    if cores and _IS_LINUX:
        try:
            os.sched_setaffinity(0, cores)
        except OSError:  # none of them is granted any more
            return


class LoopCores:
    """Of one event loop. Called from its thread, whose threads take over what it may use: see `SideThreads`."""

    def __init__(self) -> None:
        self._granted = allowed_cores()
        """What the thread may use, but for what is done here."""
        self._chosen = self._granted
        self._avoided: int | None = None

    def keep_off(self, core: int | None) -> None:
        """Runs on any other core from now on; with None, or where there is no other, on any."""
        if core == self._avoided:
            return
        self._avoided = core
        if (now := allowed_cores()) != self._chosen:  # somebody else has changed it
            self._granted = now
        self._chosen = self._granted - {core} or self._granted
        if self._chosen != now:
            use_cores(self._chosen)
