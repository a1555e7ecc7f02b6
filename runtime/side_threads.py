"""Threads beside the event loop, for what takes too long on it: long texts, large requests."""

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from queue import PriorityQueue
from threading import Lock, Thread
from typing import Any, TypeVar

from castline.engines.affinity import on_granted_cores
from castline.engines.errors import EngineError
from castline.runtime.serving_time import standing_apart

T = TypeVar("T")
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]


class SideThreads:
    """The smallest job first, on *num_threads* threads, which the first job starts. Thread-safe.

    The threads are daemons: a process that is to end does not wait for what nobody wants any more.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._name = name
        self._num_threads = num_threads
        self._jobs: PriorityQueue[tuple[int, int, _Job]] = PriorityQueue()
        self._order = itertools.count()
        """Of jobs of one size."""
        self._num_started = 0
        self._starting = Lock()

    def begin(self, job: Callable[[], T], size: int) -> "asyncio.Future[T]":
        """A future of the running loop, for what *job* returns or raises; done before its turn, the job is not run."""
        if self._num_started < self._num_threads:
            self._start()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put((size, next(self._order), (loop, future, job)))
        return future

    def _start(self) -> None:
        with self._starting, on_granted_cores():
            while self._num_started < self._num_threads:
                Thread(target=self._work, name=self._name, daemon=True).start()
                self._num_started += 1

    def _work(self) -> None:
        with standing_apart():
            while True:
                _do(*self._jobs.get()[-1])


def _do(loop: asyncio.AbstractEventLoop, future: "asyncio.Future[Any]", job: Callable[[], Any]) -> None:
    if future.done():  # nobody waits any more
        return
    settle: Callable[[Any], None]
    try:
        outcome: Any = job()
        settle = future.set_result
    except Exception as error:
        outcome, settle = error, future.set_exception
    except BaseException as error:  # a panic in a library's Rust: the thread lives on
        outcome, settle = EngineError(f"internal error: {error!r}"), future.set_exception
    with suppress(RuntimeError):  # the loop has closed meanwhile
        loop.call_soon_threadsafe(_settle, future, settle, outcome)


def _settle(future: "asyncio.Future[Any]", settle: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():
        settle(outcome)
