"""The event loop keeps off the core on which the step loop runs.

Each report of a step wakes the event loop, and the kernel likes to wake it where the step loop is: who writes to a
socket is taken to be about to sleep, and a busy machine is not searched for an idle core. The step loop then waits
until all of the report is served, while the cores of its workers, who sleep between two steps, are idle. So the engine
loop tells where it runs, and the event loop leaves that core alone (`castline.engines.affinity`) while there is work.
"""

import ctypes
import sys

_sched_getcpu = ctypes.CDLL(None).sched_getcpu if sys.platform == "linux" else None


def running_core() -> int | None:
    """The core on which the caller runs; None where the system does not tell."""
    core = -1 if _sched_getcpu is None else int(_sched_getcpu())
    return core if core >= 0 else None
