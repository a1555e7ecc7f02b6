"""Readiness and liveness of the process, decided in one place for every transport.

Live: the process is worth keeping; only an engine that has failed for good is not. Ready: a request sent now would be
answered. A server is not ready while it starts, while it drains, or when requests wait and no step completes.
"""

from collections.abc import Callable
from time import monotonic

from castline.runtime.client import Health, Phase
from castline.server.metered import MeteredEngine

STALL_TIMEOUT_S = 30.0
"""No completed step for this long while requests wait, and the server is not ready."""


class HealthMonitor:
    """Follows one engine. ``check`` is called now and then, and on every question; its answers cost microseconds."""

    def __init__(self, stall_timeout_s: float = STALL_TIMEOUT_S, clock: Callable[[], float] = monotonic) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._engine: MeteredEngine | None = None
        self._draining = False
        self._steps = -1
        self._last_progress = clock()

    def attach(self, engine: MeteredEngine) -> None:
        """The engine has loaded."""
        self._engine = engine

    def begin_drain(self) -> None:
        self._draining = True

    def live(self) -> Health:
        if self._engine is None:
            return Health(Phase.STARTING, "the engine is loading")
        return self._engine.health()

    def ready(self) -> Health:
        if self._draining:
            return Health(Phase.DRAINING, "draining: running requests finish, new ones are refused")
        if self._engine is None:
            return Health(Phase.STARTING, "starting: the engine is loading")
        health = self._engine.health()
        stalled_s = self._stalled_s(self._engine)
        if health.ready and stalled_s > self._stall_timeout_s:
            waiting = self._engine.num_awaiting
            return Health(
                Phase.FAILED, f"stalled: no step has completed for {stalled_s:.0f} s with {waiting} requests waiting"
            )
        return health

    def _stalled_s(self, engine: MeteredEngine) -> float:
        """Seconds since the last sign of progress: a completed step, or nobody waiting for one."""
        steps = engine.stats().steps
        if steps != self._steps or engine.num_awaiting == 0:
            self._steps = steps
            self._last_progress = self._clock()
        return self._clock() - self._last_progress
