"""Where the event loop may run: off the step loop's core while that works, and anywhere again afterwards."""

import asyncio
import os
import sys
import threading
from collections.abc import Iterable

import pytest

from castline.runtime.core_placement import LoopCores, running_core
from castline.runtime.side_threads import SideThreads

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not let threads choose their cores")


class Kernel:
    """The affinity of one thread."""

    def __init__(self, *cores: int) -> None:
        self.cores = set(cores)
        self.granted = set(cores)
        self.num_calls = 0

    def get(self, thread: int) -> set[int]:
        assert thread == 0, "the caller's"
        return set(self.cores)

    def set(self, thread: int, cores: Iterable[int]) -> None:
        assert thread == 0, "the caller's"
        self.num_calls += 1
        if not self.granted & set(cores):
            raise OSError(22, "Invalid argument")
        self.cores = self.granted & set(cores)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    kernel = Kernel(0, 2, 3)
    monkeypatch.setattr(os, "sched_getaffinity", kernel.get)
    monkeypatch.setattr(os, "sched_setaffinity", kernel.set)
    return kernel


def test_it_keeps_off_one_core_and_comes_back(kernel: Kernel) -> None:
    loop = LoopCores()
    loop.keep_off(2)
    assert kernel.cores == {0, 3}
    loop.keep_off(3)
    assert kernel.cores == {0, 2}
    loop.keep_off(None)
    assert kernel.cores == {0, 2, 3}


def test_the_same_core_again_costs_nothing(kernel: Kernel) -> None:
    """Prevents a system call with each report."""
    loop = LoopCores()
    for core in (None, 2, 2, 2, None, None):
        loop.keep_off(core)
    assert kernel.num_calls == 2


def test_the_only_core_is_not_left(kernel: Kernel) -> None:
    """Prevents a server of one core from asking for none, which is refused."""
    kernel.cores = kernel.granted = {3}
    loop = LoopCores()
    loop.keep_off(3)
    assert kernel.cores == {3}
    loop.keep_off(None)
    assert (kernel.cores, kernel.num_calls) == ({3}, 0)


def test_what_somebody_else_says_meanwhile_stays(kernel: Kernel) -> None:
    """Prevents an administrator's ``taskset -p`` from being undone when the engine falls idle."""
    loop = LoopCores()
    loop.keep_off(2)
    kernel.cores = kernel.granted = {5, 6}
    loop.keep_off(5)
    assert kernel.cores == {6}
    loop.keep_off(None)
    assert kernel.cores == {5, 6}


def test_a_refusal_is_no_fault(kernel: Kernel) -> None:
    """Prevents a container whose cores are taken away between two calls from losing its engine."""
    loop = LoopCores()
    kernel.granted = {7}
    loop.keep_off(2)
    loop.keep_off(None)
    assert kernel.num_calls > 0


def test_the_running_core_is_a_core() -> None:
    assert running_core() in os.sched_getaffinity(0)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is no other core")
def test_threads_that_are_started_meanwhile_are_not_kept_off() -> None:
    """Prevents all texts of a server's life from being encoded on what the event loop was left when the first came."""
    before = os.sched_getaffinity(0)
    seen: list[set[int]] = []

    async def scenario() -> None:
        threads = SideThreads("test", 1)
        LoopCores().keep_off(min(before))
        assert os.sched_getaffinity(0) == before - {min(before)}
        seen.append(await threads.begin(lambda: os.sched_getaffinity(0), 0))

    thread = threading.Thread(target=lambda: asyncio.run(scenario()))  # whose affinity ends with it
    thread.start()
    thread.join(60)
    assert seen == [before]
    assert os.sched_getaffinity(0) == before
