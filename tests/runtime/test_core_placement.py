"""Where the step loop runs, and who is not kept off it."""

import asyncio
import os
import threading

import pytest

from castline.engines.affinity import granted_cores, keep_off
from castline.runtime.core_placement import running_core
from castline.runtime.side_threads import SideThreads


@pytest.mark.skipif(running_core() is None, reason="the system does not tell where a thread runs")
def test_the_running_core_is_a_core() -> None:
    assert running_core() in os.sched_getaffinity(0)


@pytest.mark.skipif(len(granted_cores()) < 2, reason="there is no other core, or threads cannot choose theirs")
def test_threads_that_are_started_meanwhile_are_not_kept_off() -> None:
    """Prevents all texts of a server's life from being encoded on what the event loop was left when the first came."""
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    async def scenario() -> None:
        threads = SideThreads("test", 1)
        keep_off(threads, min(before))
        assert os.sched_getaffinity(0) == before - {min(before)}
        seen.append(await threads.begin(lambda: os.sched_getaffinity(0), 0))

    thread = threading.Thread(target=lambda: asyncio.run(scenario()))  # whose affinity ends with it
    thread.start()
    thread.join(60)
    assert seen == [before]
    assert os.sched_getaffinity(0) == before
