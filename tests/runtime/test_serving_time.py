"""The CPU time that makes messages longer is that of serving: not of prompts being encoded, or pages being moved."""

import asyncio
import threading
import time

import pytest

from castline.runtime.huge_pages import Settling
from castline.runtime.serving_time import serving_time
from castline.runtime.side_threads import SideThreads
from castline.runtime.stream_interval import INTERVALS, WINDOW_S, AdaptiveInterval

pytestmark = pytest.mark.skipif(not hasattr(time, "pthread_getcpuclockid"), reason="no clock of another thread")

BURNT_S = 0.4


def burn() -> None:
    """Takes so much CPU time of the thread that calls."""
    end = time.thread_time() + BURNT_S
    while time.thread_time() < end:
        pass


class Burnt:
    """A thread that has taken CPU time, and goes on living until the end of the block."""

    def __init__(self) -> None:
        self._done, self._may_end = threading.Event(), threading.Event()
        self._encoding = SideThreads("test", 1)

    def __enter__(self) -> None:
        self._client = threading.Thread(target=lambda: asyncio.run(self._encode()))
        self._client.start()
        assert self._done.wait(60)

    def __exit__(self, *_: object) -> None:
        self._may_end.set()
        self._client.join()

    async def _encode(self) -> None:
        await self._encoding.begin(self._work, 0)

    def _work(self) -> list[int]:
        burn()
        self._done.set()
        assert self._may_end.wait(60)
        return []


def test_encoding_counts_neither_while_it_lasts_nor_after() -> None:
    """A megabyte takes longer than a window: told at its end only, it would count in one and be missed in another."""
    serving, process = serving_time(), time.process_time()
    with Burnt():
        assert time.process_time() - process >= BURNT_S
        assert serving_time() - serving < BURNT_S / 2
    assert serving_time() - serving < BURNT_S / 2


def test_threads_that_have_ended_do_not_count_later() -> None:
    """Their clocks are gone; their time is still in the process's."""
    serving, moved = serving_time(), iter([1, 0])

    def move(enough: int) -> int:
        burn()
        return next(moved)

    Settling(move, delay_s=0).join()
    assert serving_time() - serving < BURNT_S


def test_what_serves_counts() -> None:
    """Of any thread: gRPC has its own."""
    serving = serving_time()
    thread = threading.Thread(target=burn)
    thread.start()
    burn()
    thread.join()
    assert serving_time() - serving >= 2 * BURNT_S


@pytest.mark.parametrize("serves", [False, True])
def test_a_long_prompt_makes_no_message_longer(serves: bool) -> None:
    """One of a megabyte made every stream wait for eight tokens at a time, which saved nothing."""
    now = 50.0
    interval = AdaptiveInterval(1, lambda: now)
    interval.begin()
    if serves:
        burn()
    else:
        with Burnt():
            pass
    now += 8 * WINDOW_S
    interval.progressed(64)
    assert interval.tokens == (INTERVALS[1] if serves else 1)
