"""CPU time of this process that serving takes: all but that of threads which stand apart.

What those do (texts encoded, pages moved) costs the same however many messages there are.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, get_ident

_lock = Lock()
_clocks: set[int] = set()
"""Of the threads that stand apart."""
_past_s = 0.0
"""Of those that have ended."""


@contextmanager
def standing_apart() -> Iterator[None]:
    """All that a thread does, from its start to its end. Where no thread can read another's clock, it counts."""
    global _past_s
    if not hasattr(time, "pthread_getcpuclockid"):
        yield
        return
    clock = time.pthread_getcpuclockid(get_ident())
    with _lock:
        _clocks.add(clock)
    try:
        yield
    finally:
        with _lock:
            _clocks.discard(clock)
            _past_s += time.thread_time()


def serving_time() -> float:
    """In seconds; only differences mean something."""
    with _lock:
        return time.process_time() - _past_s - sum(map(time.clock_gettime, _clocks))
