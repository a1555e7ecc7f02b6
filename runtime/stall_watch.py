"""Notices that an engine completes no step although it has work, with no timer while it has none."""

import asyncio
from collections.abc import Callable


class StallWatch:
    """Used inside one event loop. It calls *changed* when the work has stalled, and when it has not any more."""

    def __init__(self, after_s: float, clock: Callable[[], float], changed: Callable[[], None]) -> None:
        self._after_s = after_s
        self._clock = clock
        self._changed = changed
        self._last_progress = clock()
        self._working = False
        self._timer: asyncio.TimerHandle | None = None
        """Set while there is work, until it stalls."""

    @property
    def idle_s(self) -> float:
        """Since the last step, or since there has been work."""
        return self._clock() - self._last_progress

    @property
    def stalled(self) -> bool:
        return self._working and self.idle_s >= self._after_s

    def begin(self) -> None:
        """There is work from now on."""
        self._working = True
        self._last_progress = self._clock()
        self._look()

    def progressed(self) -> None:
        """A step has completed."""
        self._last_progress = self._clock()
        if self._working and self._timer is None:
            self._look()
            self._changed()

    def end(self) -> None:
        """There is no work any more."""
        self._working = False
        if self._timer is None:
            self._changed()
        else:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """Looks again when the work will have stalled, if no step completes before."""
        left_s = self._after_s - self.idle_s
        if left_s > 0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
        else:
            self._timer = None
            self._changed()
