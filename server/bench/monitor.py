"""What the client itself cost while a point ran: its CPU time, and how late its event loop was.

A late event loop stamps frames late. On a machine shared with the server the figures then describe the client too.
"""

import asyncio
import time
from dataclasses import dataclass
from types import TracebackType

PROBE_INTERVAL_S = 0.02


@dataclass(frozen=True, slots=True)
class ClientLoad:
    wall_s: float
    cpu_s: float
    """Of this process, all threads."""
    lags_s: tuple[float, ...]
    """How late the event loop woke for each of its probes, one every PROBE_INTERVAL_S."""


class Monitor:
    """``with Monitor() as monitor: …``; ``load()`` holds at any moment within it and after."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> "Monitor":
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._began_cpu = time.process_time()
        self._probe_at(self._began + PROBE_INTERVAL_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def load(self) -> ClientLoad:
        wall = self._loop.time() - self._began
        return ClientLoad(wall, time.process_time() - self._began_cpu, tuple(self._lags))

    def _probe_at(self, due: float) -> None:
        self._timer = self._loop.call_at(due, self._probe, due)

    def _probe(self, due: float) -> None:
        now = self._loop.time()
        self._lags.append(now - due)
        self._probe_at(now + PROBE_INTERVAL_S)
