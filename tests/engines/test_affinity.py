"""The cores that a thread keeps off are not lost: not to it, nor to what it starts."""

import os
import threading
from collections.abc import Callable, Iterable

import pytest

from castline.engines import affinity
from castline.engines.affinity import granted_cores, keep_off, on_granted_cores
from castline.engines.resources import usable_cores


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
    monkeypatch.setattr(os, "sched_getaffinity", kernel.get, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", kernel.set, raising=False)
    monkeypatch.setattr(affinity, "_thread", affinity._Thread())
    return kernel


def test_it_keeps_off_one_core_and_comes_back(kernel: Kernel) -> None:
    keep_off("a", 2)
    assert kernel.cores == {0, 3}
    keep_off("a", 3)
    assert kernel.cores == {0, 2}
    keep_off("a", None)
    assert kernel.cores == {0, 2, 3}


def test_the_same_core_again_costs_nothing(kernel: Kernel) -> None:
    """Prevents a system call with each report."""
    for core in (None, 2, 2, 2, None, None):
        keep_off("a", core)
    assert kernel.num_calls == 2


def test_the_only_core_is_not_left(kernel: Kernel) -> None:
    """Prevents a server of one core from asking for none, which is refused."""
    kernel.cores = kernel.granted = {3}
    keep_off("a", 3)
    keep_off("a", None)
    assert (kernel.cores, kernel.num_calls) == ({3}, 0)


def test_owners_do_not_take_each_others_cores_for_ever(kernel: Kernel) -> None:
    """Prevents two engines of one event loop from mistaking what the other avoids for what the system says."""
    keep_off("a", 0)
    keep_off("b", 2)
    assert kernel.cores == {3}
    keep_off("a", None)
    assert kernel.cores == {0, 3}
    keep_off("a", 3)
    keep_off("c", 0)  # nothing is left, so nothing is avoided
    assert kernel.cores == {0, 2, 3}
    for owner in "abc":
        keep_off(owner, None)
    assert kernel.cores == {0, 2, 3}


def test_what_somebody_else_says_meanwhile_stays(kernel: Kernel) -> None:
    """Prevents an administrator's ``taskset -p`` from being undone when the engine falls idle."""
    keep_off("a", 2)
    kernel.cores = kernel.granted = {5, 6}
    keep_off("a", 5)
    assert kernel.cores == {6}
    keep_off("a", None)
    assert kernel.cores == {5, 6}


def test_a_refusal_is_no_fault(kernel: Kernel) -> None:
    """Prevents a container whose cores are taken away between two calls from losing its engine."""
    kernel.granted = {7}
    keep_off("a", 2)
    kernel.cores = {7}
    keep_off("a", None)
    assert granted_cores() == {7}


def test_a_plan_made_meanwhile_is_for_all_cores(kernel: Kernel) -> None:
    """Prevents a second engine, planned while a first one works, from running on a core less for good."""
    before = usable_cores()
    keep_off("a", 2)
    assert usable_cores() == before
    with on_granted_cores():
        assert kernel.cores == {0, 2, 3}
    assert kernel.cores == {0, 3}


def test_a_change_while_something_starts_is_not_undone(kernel: Kernel) -> None:
    keep_off("a", 2)
    with on_granted_cores():
        kernel.cores = kernel.granted = {5, 6}
        granted_cores()
    assert kernel.cores == {5, 6}


@pytest.mark.skipif(len(granted_cores()) < 2, reason="there is no other core, or threads cannot choose theirs")
def test_each_thread_has_its_own() -> None:
    """Prevents one thread's choice from being taken for another's, of the real system."""
    before = os.sched_getaffinity(0)
    seen = dict[str, set[int]]()

    def in_a_thread(name: str, do: Callable[[], None]) -> None:
        def run() -> None:
            do()
            seen[name] = os.sched_getaffinity(0)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)

    in_a_thread("keeps off", lambda: keep_off("a", min(before)))
    in_a_thread("does not", lambda: None)
    assert seen == {"keeps off": before - {min(before)}, "does not": before}
    assert os.sched_getaffinity(0) == before
