"""The two ways to load a server.

Closed loop: so many workers, each starting its next request as soon as its last one ended; it measures what the server
can do, and slows down with it. Open loop: requests start when they are due, whatever became of the earlier ones, and
latency counts from when they were due; it measures what users see at a given demand, with no coordinated omission.

Time is the event loop's clock, so that a test may run these on a loop of its own time.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from castline.server.bench.client import RequestRecord

Send = Callable[[int, float], Awaitable[RequestRecord]]
"""Sends the request of that index, due at that time of the loop's clock. Never raises but when cancelled."""


@dataclass(slots=True)
class Trace:
    """What has happened so far at one point; valid at any moment, so that an interrupted point has its figures."""

    begun: float = 0.0
    """When the load began, on the loop's clock."""
    started: int = 0
    peak_in_flight: int = 0
    records: list[RequestRecord] = field(default_factory=list)

    @property
    def in_flight(self) -> int:
        return self.started - len(self.records)


async def closed_loop(
    send: Send,
    trace: Trace,
    concurrency: int,
    *,
    num_requests: int | None = None,
    duration_s: float | None = None,
    failure_pause_s: float = 0.25,
) -> None:
    """*concurrency* workers, until *num_requests* were started or *duration_s* is over; waits for those under way.

    A worker whose request failed pauses, so that a server that refuses everything is not stormed.
    """
    clock = asyncio.get_running_loop().time
    trace.begun = clock()

    def exhausted() -> bool:
        if num_requests is not None:
            return trace.started >= num_requests
        return duration_s is not None and clock() >= trace.begun + duration_s

    async def work() -> None:
        while not exhausted():
            record = await _run(send, trace, clock())
            if record.failure is not None and not exhausted():
                await asyncio.sleep(failure_pause_s)

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())


async def open_loop(send: Send, trace: Trace, arrivals: Sequence[float]) -> None:
    """Starts a request at each of *arrivals* (seconds from now, never decreasing); waits for all of them."""
    clock = asyncio.get_running_loop().time
    trace.begun = clock()
    async with asyncio.TaskGroup() as group:
        for arrival in arrivals:
            due = trace.begun + arrival
            if (wait := due - clock()) > 0:
                await asyncio.sleep(wait)
            group.create_task(_run(send, trace, due))


async def _run(send: Send, trace: Trace, due: float) -> RequestRecord:
    index = trace.started
    trace.started += 1
    trace.peak_in_flight = max(trace.peak_in_flight, trace.in_flight)
    record = await send(index, due)
    trace.records.append(record)
    return record
