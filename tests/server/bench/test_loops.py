"""Both loops on a clock of the test's own: what is asserted are exact times."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from castline.server.bench.client import Failure, RequestRecord
from castline.server.bench.loops import Send, Trace, closed_loop, open_loop
from castline.server.bench.monitor import Monitor

Run = Callable[[Coroutine[Any, Any, Any]], Any]


def sender(service_s: float, fails: Callable[[int], bool] = lambda index: False) -> Send:
    """A server that takes *service_s* for each request, however many there are."""

    async def send(index: int, due: float) -> RequestRecord:
        clock = asyncio.get_running_loop().time
        started = clock()
        await asyncio.sleep(service_s)
        failure = Failure("http 503", "no room") if fails(index) else None
        return RequestRecord(index, due, started, clock(), failure=failure)

    return send


def test_closed_loop_keeps_its_workers_busy(virtual_time: Run) -> None:
    """Each worker starts its next request at once: 10 requests of 1 s by 4 workers take 3 s, 4 at a time."""
    trace = Trace()
    virtual_time(closed_loop(sender(1.0), trace, 4, num_requests=10))
    assert [round(r.started) for r in trace.records] == [0] * 4 + [1] * 4 + [2] * 2
    assert (trace.started, len(trace.records), trace.peak_in_flight, trace.in_flight) == (10, 10, 4, 0)
    assert sorted(r.index for r in trace.records) == list(range(10))


def test_closed_loop_of_a_duration(virtual_time: Run) -> None:
    """Requests start until the time is over; the one under way is waited for, not cut off."""
    trace = Trace()
    virtual_time(closed_loop(sender(2.0), trace, 1, duration_s=5.0))
    assert [(round(r.started), round(r.ended)) for r in trace.records] == [(0, 2), (2, 4), (4, 6)]


def test_closed_loop_pauses_after_a_failure(virtual_time: Run) -> None:
    """A server that refuses at once would otherwise be asked thousands of times a second for the whole duration."""
    trace = Trace()
    virtual_time(closed_loop(sender(0.0, lambda index: True), trace, 2, duration_s=1.0, failure_pause_s=0.25))
    assert len(trace.records) == 2 * 4


def test_no_pause_after_the_last_failure(virtual_time: Run) -> None:
    """The point ends with its last request."""

    async def ends_at() -> float:
        await closed_loop(sender(1.0, lambda index: True), Trace(), 1, num_requests=1, failure_pause_s=9.0)
        return asyncio.get_running_loop().time()

    assert virtual_time(ends_at()) == pytest.approx(1.0, abs=1e-3)


def test_open_loop_does_not_wait_for_the_server(virtual_time: Run) -> None:
    """Coordinated omission: a slow server must not delay the arrivals. Each starts when due though none has ended."""
    trace = Trace()
    virtual_time(open_loop(sender(100.0), trace, [0.5, 1.0, 1.0, 4.0]))
    assert [r.started for r in trace.records] == pytest.approx([0.5, 1.0, 1.0, 4.0], abs=1e-3)
    assert trace.peak_in_flight == 4


def test_open_loop_counts_from_when_a_request_was_due(virtual_time: Run) -> None:
    """A client that wakes late (here 3 s) owes the lateness to the latency, not to the schedule."""
    trace = Trace()

    async def blocked() -> None:
        loop = asyncio.get_running_loop()
        # Moves the clock on with the event loop held up, as a long garbage collection does.
        loop.call_at(0.9, lambda: setattr(loop._selector, "now", 4.0))  # type: ignore[attr-defined]
        await open_loop(sender(1.0), trace, [0.5, 1.0, 2.0, 5.0])

    virtual_time(blocked())
    assert sorted(round(r.e2e, 2) for r in trace.records) == [1.0, 3.0, 3.5, 4.0]
    assert sorted(r.scheduled for r in trace.records) == [0.5, 1.0, 2.0, 5.0]


def test_cancelled_loop_leaves_its_trace(virtual_time: Run) -> None:
    """Ctrl-C: what ended before is kept, what was under way is counted as in flight."""
    trace = Trace()

    async def interrupted() -> None:
        task = asyncio.create_task(closed_loop(sender(1.0), trace, 3, num_requests=100))
        await asyncio.sleep(2.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    virtual_time(interrupted())
    assert (len(trace.records), trace.in_flight) == (6, 3)


def test_monitor_sees_a_late_loop(virtual_time: Run) -> None:
    """The client's own stall shows as lag; without one the lag is nothing."""

    async def watched() -> tuple[float, ...]:
        loop = asyncio.get_running_loop()
        with Monitor() as monitor:
            await asyncio.sleep(0.5)
            assert max(monitor.load().lags_s) == pytest.approx(0.0, abs=1e-6)
            loop.call_later(0.1, lambda: setattr(loop._selector, "now", 2.0))  # type: ignore[attr-defined]
            await asyncio.sleep(2.0)
        return monitor.load().lags_s

    assert max(virtual_time(watched())) == pytest.approx(1.4, abs=0.03)
