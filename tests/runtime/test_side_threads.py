"""Threads beside the event loop: whom they serve first, and what they survive."""

import asyncio
import threading

import pytest

from castline.engines.errors import EngineError
from castline.runtime.side_threads import SideThreads


class Panic(BaseException):
    """As a library's Rust raises it."""


def test_a_panic_ends_its_job_and_no_thread() -> None:
    """Prevents a text that breaks a library from taking the only thread: every later one would wait for ever."""

    def panic() -> None:
        raise Panic("at the disco")

    async def scenario() -> None:
        threads = SideThreads("test", 1)
        with pytest.raises(EngineError, match="at the disco"):
            await threads.begin(panic, 0)
        assert await threads.begin(threading.get_ident, 0) != threading.get_ident()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_the_smallest_waits_for_one_job_at_most() -> None:
    """Prevents a prompt of pages from waiting for all of megabytes that came before."""
    begun, go_on, order = threading.Event(), threading.Event(), list[int]()

    def hold() -> None:
        begun.set()
        assert go_on.wait(60)

    async def scenario() -> None:
        threads = SideThreads("test", 1)
        first = threads.begin(hold, 9)
        assert await asyncio.to_thread(begun.wait, 60)
        sizes = [5, 7, 5, 1]
        others = [threads.begin(lambda i=i: order.append(i), size) for i, size in enumerate(sizes)]  # type: ignore[misc]
        go_on.set()
        await asyncio.gather(first, *others)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert order == [3, 0, 2, 1]
