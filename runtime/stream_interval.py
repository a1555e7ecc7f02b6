"""How many tokens of a stream go into one message.

Each costs the reader the wait for the others, and each message costs the serving process CPU time that the engine
misses: so one token a message, unless a number is given or serving takes more than its share of the machine. Only what
messages cost counts (`castline.runtime.serving_time`).
"""

from collections.abc import Callable
from time import monotonic
from typing import Final

from castline.engines.resources import usable_cores
from castline.runtime.serving_time import serving_time

MAX_SHARE: Final = 0.04
"""Of the CPU time of all cores, that serving may take before messages become longer."""
EASY_SHARE: Final = 0.03
"""Messages become shorter only where serving then takes less than this at most."""
CALM_WINDOWS: Final = 2
"""In a row, before messages become shorter."""
FEW_REQUESTS: Final = 4
"""So few never wait. Their messages cost several times what those of many do, for the code is cold whenever one is
sent, and longer ones would be as cold."""
INTERVALS: Final = (1, 2, 4, 8)
WINDOW_S: Final = 1.0


class StreamInterval:
    """A number that was given. ``tokens`` is read for every output, so a change is for the streams in flight too."""

    def __init__(self, tokens: int = 1) -> None:
        self.tokens = tokens

    def begin(self) -> None:
        """There are requests from now on."""

    def progressed(self, num_requests: int) -> None:
        """To be called often while there are requests."""

    def end(self) -> None:
        """There are no requests any more."""


class AdaptiveInterval(StreamInterval):
    """Follows the share of the machine that serving took in the last window; 1 when there is no request.

    From i to j tokens a message, the share changes by a factor between 1 and i / j. So any interval passed over on the
    way up would take more than MAX_SHARE, and none that is gone down to takes more than EASY_SHARE: the same load never
    swings it.
    """

    def __init__(
        self,
        num_cores: int | None = None,
        clock: Callable[[], float] = monotonic,
        cpu_clock: Callable[[], float] = serving_time,
    ) -> None:
        """*clock* tells the time, *cpu_clock* the CPU time of serving, both in seconds. None: all usable cores."""
        super().__init__()
        self._num_cores = usable_cores() if num_cores is None else num_cores
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._num_calm = 0
        self._open_window(clock())

    def begin(self) -> None:
        self._open_window(self._clock())

    def progressed(self, num_requests: int) -> None:
        now = self._clock()
        if now >= self._window_end:
            wall_s = now - self._window_end + WINDOW_S
            if num_requests <= FEW_REQUESTS:
                self.end()
            else:
                self._follow((self._cpu_clock() - self._cpu_before) / (wall_s * self._num_cores))
            self._open_window(now)

    def end(self) -> None:
        self.tokens = 1
        self._num_calm = 0

    def _open_window(self, now: float) -> None:
        self._window_end = now + WINDOW_S
        self._cpu_before = self._cpu_clock()

    def _follow(self, share: float) -> None:
        with_one = share * self.tokens
        """What one token a message would take at most."""
        fewer = _at_least(with_one / EASY_SHARE)
        if share > MAX_SHARE:
            self.tokens = _at_least(with_one / MAX_SHARE)
            self._num_calm = 0
        elif fewer >= self.tokens:
            self._num_calm = 0
        else:
            self._num_calm += 1
            if self._num_calm == CALM_WINDOWS:
                self.tokens = fewer
                self._num_calm = 0


def _at_least(tokens: float) -> int:
    """The shortest interval of so many tokens, or the longest."""
    return next((interval for interval in INTERVALS if interval >= tokens), INTERVALS[-1])
