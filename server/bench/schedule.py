"""Arrival times of an open loop."""

from collections.abc import Iterator
from itertools import takewhile
from random import Random


def arrivals(rate: float, burstiness: float, rng: Random) -> Iterator[float]:
    """Endless arrival times in seconds from the start of the point, never decreasing.

    Gaps are gamma-distributed with mean 1 / *rate* and shape *burstiness*: 1 is a Poisson process, below 1 is burstier,
    above 1 more even.
    """
    now = 0.0
    while True:
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield now


def schedule(
    rate: float, burstiness: float, rng: Random, *, num_requests: int | None, duration_s: float | None
) -> list[float]:
    """The arrivals of one point: the first *num_requests*, or those before *duration_s*, and the first at least."""
    times = arrivals(rate, burstiness, rng)
    if num_requests is not None:
        return [next(times) for _ in range(num_requests)]
    assert duration_s is not None
    first = next(times)
    return [first, *takewhile(lambda at: at < duration_s, times)]
