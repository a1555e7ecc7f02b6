"""What a step of so many tokens costs, learned from the steps themselves."""

from bisect import bisect_left

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128)
"""Steps of up to so many tokens are averaged together; longer ones by powers of two."""
_WEIGHT = 0.1
"""Of the latest step in the moving average."""
_MAX_RISE = 2.0
"""A step counts as at most this multiple of the average: one that was kept from running says nothing of its size."""
_FIXED_TOKENS = 8
"""Until more is known: the cost of reading the weights, in tokens. A CPU has about this ratio; a GPU a larger one."""


class StepCosts:
    """A moving average of the seconds of steps by their number of tokens, interpolated between sizes seen."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """By size class."""
        self._curve: list[tuple[int, float]] | None = None
        """(tokens, seconds), ascending in both; None after an observation."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step of *num_tokens* took *seconds*."""
        if seconds <= 0:
            return
        size = _size_class(num_tokens)
        seconds *= size / num_tokens if num_tokens > _SIZES[-1] else 1
        known = self._seconds.get(size)
        if known is None:
            self._seconds[size] = seconds
        else:
            self._seconds[size] = known + _WEIGHT * (min(seconds, _MAX_RISE * known) - known)
        self._curve = None

    def relative_slope(self, num_tokens: int, more: int) -> float:
        """Cost of each of *more* tokens beside *num_tokens*, as a share of the step without them."""
        before = self._cost(num_tokens)
        return (self._cost(num_tokens + more) - before) / (more * before)

    def _cost(self, num_tokens: int) -> float:
        """Seconds, or any unit while nothing is known."""
        curve = self._curve = self._curve or self._ascending()
        at = bisect_left(curve, (num_tokens, 0.0))
        if at == len(curve):
            last, seconds = curve[-1] if curve else (1, 1.0)
            return seconds * (num_tokens + _FIXED_TOKENS) / (last + _FIXED_TOKENS)
        size, seconds = curve[at]
        if at == 0:
            return seconds * (num_tokens + _FIXED_TOKENS) / (size + _FIXED_TOKENS)
        smaller, less = curve[at - 1]
        return less + (seconds - less) * (num_tokens - smaller) / (size - smaller)

    def _ascending(self) -> list[tuple[int, float]]:
        """A longer step is never cheaper: what says so was measured at another time."""
        curve: list[tuple[int, float]] = []
        highest = 0.0
        for size in sorted(self._seconds):
            highest = max(highest, self._seconds[size])
            curve.append((size, highest))
        return curve


def _size_class(num_tokens: int) -> int:
    if num_tokens > _SIZES[-1]:
        return 1 << (num_tokens - 1).bit_length()
    return _SIZES[bisect_left(_SIZES, num_tokens)]
