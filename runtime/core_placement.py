"""The event loop keeps off the core on which the step loop runs.

Each report of a step wakes the event loop, and the kernel likes to wake it where the step loop is: who writes to a
socket is taken to be about to sleep, and a busy machine is not searched for an idle core. The step loop then waits
until all of the report is served, while the cores of its workers, who sleep between two steps, are idle.
"""

import ctypes
import sys

from castline.engines.affinity import keep_off

_sched_getcpu = ctypes.CDLL(None).sched_getcpu if sys.platform == "linux" else None


def running_core() -> int | None:
    """The core on which the caller runs; None where the system does not tell."""
    core = -1 if _sched_getcpu is None else int(_sched_getcpu())
    return core if core >= 0 else None


class LoopCores:
    """Of one engine, in the thread of its event loop, which may serve several."""

    def keep_off(self, core: int | None) -> None:
        """Runs on any other core from now on; with None, or where there is no other, on any."""
        keep_off(self, core)
