"""Memory for KV blocks ahead of their first use."""

import logging
import threading
from time import monotonic

import pytest

from castline.runtime.client import EffectiveLimits
from castline.runtime.pool_growth import GROWTH_BYTES, GrowthPolicy, PoolGrowth

POLICY = GrowthPolicy(margin=3, growth=8)


class Provider:
    """Notes what it is asked for, in `events`; waits before that while `gate` is shut."""

    def __init__(self, *, succeeds: bool = True, is_open: bool = True) -> None:
        self.events: list[object] = []
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.reached = threading.Event()
        self.succeeds = succeeds
        if is_open:
            self.gate.set()

    def __call__(self, begin: int, end: int) -> bool:
        self.entered.set()
        assert self.gate.wait(30)
        if begin == end:
            self.reached.set()
            return True
        self.events.append((begin, end))
        return self.succeeds

    def finish(self, growth: PoolGrowth) -> list[object]:
        """Closes *growth* when it has provided all that was asked for; gives that."""
        growth._ranges.put((0, 0))
        assert self.reached.wait(30)
        growth.close()
        return self.events


def use(growth: PoolGrowth, blocks: range) -> None:
    for block in blocks:
        growth.on_first_use(block)


def test_memory_stays_ahead_and_ends_with_the_pool() -> None:
    """Blocks with less than the margin ahead of them, a range given twice or never, or one past the pool."""
    for used, expected in (
        (5, []),
        (6, [(8, 16)]),  # block 5: only 6 and 7 ahead of it
        (13, [(8, 16)]),
        (14, [(8, 16), (16, 20)]),
        (20, [(8, 16), (16, 20)]),
    ):
        provider = Provider()
        growth = PoolGrowth(provider, 20, POLICY)
        use(growth, range(used))
        assert provider.finish(growth) == expected, used


def test_a_burst_waits_for_nothing() -> None:
    """A step that waits for memory which it could get itself; and what outran the thread must still be provided."""
    provider = Provider(is_open=False)
    growth = PoolGrowth(provider, 100, POLICY)
    use(growth, range(60))  # the gate is shut: returns all the same
    provider.gate.set()
    assert provider.finish(growth) == [(begin, begin + 8) for begin in range(8, 64, 8)]


def test_closing_waits_for_what_is_under_way_and_drops_the_rest() -> None:
    """The pool is gone after it: memory must not be asked for where it was."""
    provider = Provider(is_open=False)
    growth = PoolGrowth(provider, 100, POLICY)
    use(growth, range(60))
    assert provider.entered.wait(30)

    def close() -> None:
        growth.close()
        provider.events.append("closed")

    closing = threading.Thread(target=close)
    closing.start()
    deadline = monotonic() + 30
    while not growth._closing:  # the gate opens only then, whichever thread is faster
        assert monotonic() < deadline
    provider.gate.set()
    closing.join(30)
    assert provider.events == [(8, 16), "closed"]


def test_a_system_without_memory_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """A pool that grows into memory which is not there, in silence; or a thread that ends at the first refusal."""
    provider = Provider(succeeds=False)
    growth = PoolGrowth(provider, 100, POLICY)
    with caplog.at_level(logging.WARNING):
        use(growth, range(14))
        provider.finish(growth)
    assert [record.getMessage() for record in caplog.records] == [
        "no memory ahead of use for KV blocks 8 to 16: steps get it as they go",
        "no memory ahead of use for KV blocks 16 to 24: steps get it as they go",
    ]


def test_the_policy_follows_the_largest_step() -> None:
    """With large blocks a fixed number of bytes would hold less than one step writes."""
    limits = EffectiveLimits(8192, 64, 512, 32, 760, 1.0)
    assert GrowthPolicy.of(limits, GROWTH_BYTES // 64) == GrowthPolicy(margin=16, growth=64)
    assert GrowthPolicy.of(limits, GROWTH_BYTES // 64 - 1).growth == 65
    assert GrowthPolicy.of(limits, GROWTH_BYTES) == GrowthPolicy(margin=16, growth=32)
