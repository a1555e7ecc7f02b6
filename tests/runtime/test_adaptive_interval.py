"""The interval that follows the load, over scripted clocks: up under load, down after it, never to and fro."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castline.runtime.stream_interval import EASY_SHARE, FEW_REQUESTS, INTERVALS, MAX_SHARE, WINDOW_S, AdaptiveInterval

CORES = 4
LOOKS = 16
"""In a window."""


class Machine:
    """Time passes, and the serving process takes a share of CORES that depends on the interval."""

    def __init__(self, share: Callable[[int], float]) -> None:
        self.share = share
        self.now = 50.0
        self.cpu = 7.0
        self.num_requests = 64
        self.interval = AdaptiveInterval(CORES, lambda: self.now, lambda: self.cpu)
        self.interval.begin()

    def run(self, num_windows: int) -> list[int]:
        """The interval after each window."""
        after = []
        for _ in range(num_windows):
            for _ in range(LOOKS):
                self.now += WINDOW_S / LOOKS
                self.cpu += self.share(self.interval.tokens) * CORES * WINDOW_S / LOOKS
                self.interval.progressed(self.num_requests)
            after.append(self.interval.tokens)
        return after


def proportional(share: float) -> Callable[[int], float]:
    """All of the cost is the messages'."""
    return lambda tokens: share / tokens


@pytest.mark.parametrize(("load", "expected"), [(0.02, 1), (0.98, 1), (1.02, 2), (1.98, 2), (2.2, 4), (6, 8), (18, 8)])
def test_it_becomes_as_long_as_the_load_asks(load: float, expected: int) -> None:
    """Prevents messages that are longer than they must be, and an interval that takes seconds to find."""
    assert Machine(proportional(load * MAX_SHARE)).run(6) == [expected] * 6


def test_a_few_streams_never_wait() -> None:
    """Prevents a lone stream, whose messages cost most, that is sent two tokens at a time."""
    machine = Machine(proportional(6 * MAX_SHARE))
    assert machine.run(1) == [8]
    for num_requests, expected in ((FEW_REQUESTS, 1), (1, 1), (FEW_REQUESTS + 1, 8)):
        machine.num_requests = num_requests
        assert machine.run(2) == [expected] * 2


def test_it_goes_on_where_half_the_messages_do_not_cost_half() -> None:
    """Prevents an interval that trusts its first guess: a step costs something whatever the number of messages."""
    machine = Machine(lambda tokens: (0.6 + 1.2 / tokens) * MAX_SHARE)
    assert machine.run(4) == [2, 4, 4, 4]


def test_it_becomes_short_again_after_the_load() -> None:
    """Prevents a server that stays slow to speak after one busy minute."""
    machine = Machine(proportional(6 * MAX_SHARE))
    assert machine.run(2) == [8, 8]
    machine.share = proportional(1.4 * MAX_SHARE)
    assert machine.run(3) == [8, 2, 2]
    machine.share = proportional(0.2 * MAX_SHARE)
    assert machine.run(3) == [2, 1, 1]


def test_one_calm_window_is_no_end_of_the_load() -> None:
    """Prevents streams that change with every pause between two bursts."""
    machine = Machine(proportional(6 * MAX_SHARE))
    machine.run(1)
    for _ in range(5):
        machine.share = proportional(0.02 * MAX_SHARE)
        assert machine.run(1) == [8]
        machine.share = proportional(6 * MAX_SHARE)
        assert machine.run(1) == [8]


@given(fixed=st.floats(0, 0.2), messages=st.floats(0, 0.5))
def test_the_same_load_never_swings_it(fixed: float, messages: float) -> None:
    """Prevents an interval that is too short at 2 and too long at 4, once a second, for ever."""
    machine = Machine(lambda tokens: fixed + messages / tokens)
    seen = machine.run(12)
    assert seen == sorted(seen), "up only"
    assert len(set(seen[4:])) == 1
    assert seen[-1] == INTERVALS[-1] or machine.share(seen[-1]) <= MAX_SHARE + 1e-9
    if seen[-1] > 1:  # no shorter one would do
        assert machine.share(seen[-1] // 2) > MAX_SHARE - 1e-9


@pytest.mark.parametrize("load", [0.9, 1.8, 2.2, 3.8, 4.2])
def test_a_noisy_load_does_not_swing_it(load: float) -> None:
    """Prevents a load near a limit from going to and fro with the noise of every window."""
    rng = random.Random(1)
    noise = EASY_SHARE / MAX_SHARE
    machine = Machine(lambda tokens: load * MAX_SHARE / tokens * rng.uniform(noise, 1 / noise))
    seen = machine.run(100)
    assert seen == sorted(seen)


def test_it_begins_anew_after_idleness() -> None:
    """Prevents the next lone stream from paying for the load before it, and idle time from hiding a load."""
    machine = Machine(proportional(6 * MAX_SHARE))
    machine.run(1)
    machine.interval.end()
    assert machine.interval.tokens == 1
    machine.now += 1000.0
    machine.cpu += 20.0
    machine.interval.begin()
    assert machine.run(1) == [8]
    machine.interval.end()
    machine.share = proportional(0.02 * MAX_SHARE)
    machine.now += 1.0
    machine.cpu += 100.0
    machine.interval.begin()
    assert machine.run(2) == [1, 1]


def test_a_late_look_is_a_longer_window() -> None:
    """Prevents a step of many seconds from passing for a window of one, with all of its CPU time."""
    machine = Machine(proportional(0.0))
    machine.now += 10 * WINDOW_S
    machine.cpu += 10 * WINDOW_S * CORES * MAX_SHARE * 0.9
    machine.interval.progressed(64)
    assert machine.interval.tokens == 1
