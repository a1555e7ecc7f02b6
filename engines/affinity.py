"""The cores on which a thread may run, and those that it keeps off for a while. Imports nothing heavy.

What a thread is *granted* is what the system says, but for what is done here: a thread that keeps off a core has lost
none of them, and a process or a plan that it makes is for all.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Thread(threading.local):
    def __init__(self) -> None:
        self.granted = self.chosen = _affinity()
        self.avoided: dict[int, int] = {}
        """A core by the id of who wants it left alone."""


def granted_cores() -> set[int]:
    """Of the calling thread; empty where the system does not tell."""
    now = _affinity()
    if now != _thread.chosen:  # somebody else has changed it
        _thread.granted = _thread.chosen = now
    return _thread.granted


def keep_off(owner: object, core: int | None) -> None:
    """The calling thread leaves *core* alone from now on, for *owner*; None ends that. The last core is never left."""
    avoided = _thread.avoided
    if avoided.get(id(owner)) == core:
        return
    granted = granted_cores()
    if core is None:
        del avoided[id(owner)]
    else:
        avoided[id(owner)] = core
    _use(granted - set(avoided.values()) or granted)


def _use(cores: set[int]) -> None:
    """The calling thread runs on none but these. Without effect where the system refuses."""
    if cores == _thread.chosen:
        return
    try:
        os.sched_setaffinity(0, cores)
    except OSError:  # none of them is granted any more
        return
    _thread.chosen = cores


@contextmanager
def on_granted_cores() -> Iterator[None]:
    """For what takes over the caller's cores: a process, a thread."""
    chosen, granted = _thread.chosen, granted_cores()
    _use(granted)
    try:
        yield
    finally:
        if chosen <= granted:
            _use(chosen)


def _affinity() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


_thread = _Thread()
