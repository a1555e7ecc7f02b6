"""Huge pages under the weights and the heap of a process that already works."""

import ctypes
import errno
import mmap
import os
import threading
from pathlib import Path

import pytest

from castline.engines.pages import HUGE_PAGE, MAKE_HUGE
from castline.runtime.huge_heap import available, environment
from castline.runtime.huge_pages import Settling, collapse_heap, heap

COUNT = 4


class Memory:
    """*COUNT* huge pages' worth of address space, in small pages, aligned."""

    def __init__(self) -> None:
        self._mapped = mmap.mmap(-1, (COUNT + 1) * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapped))
        self.offset = -start % HUGE_PAGE
        self.address = start + self.offset

    def write(self, every: int) -> None:
        """Touches a byte of every so many."""
        for at in range(self.offset, self.offset + COUNT * HUGE_PAGE, every):
            self._mapped[at] = at // every % 251

    def holds(self, every: int) -> bool:
        places = range(self.offset, self.offset + COUNT * HUGE_PAGE, every)
        return all(self._mapped[at] == at // every % 251 for at in places)

    def huge(self) -> int:
        """How many huge pages lie within."""
        inside = found = 0
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, *rest = line.split()
            if not first.endswith(":"):
                begin, end = (int(part, 16) for part in first.split("-"))
                inside = begin < self.address + COUNT * HUGE_PAGE and end > self.address
            elif inside and first == "AnonHugePages:":
                found += int(rest[0]) << 10
        return found // HUGE_PAGE


@pytest.fixture
def memory() -> Memory:
    memory = Memory()
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    memory.write(HUGE_PAGE)
    if madvise(memory.address, HUGE_PAGE, MAKE_HUGE) != 0:
        assert ctypes.get_errno() == errno.EINVAL, "the advice is known, and was not taken"
        pytest.skip("this kernel makes no huge pages of small ones (Linux 6.1 does)")
    if memory.huge() == COUNT:
        pytest.skip("this system's pages are huge from the start")
    return memory


def test_pages_that_are_used_become_huge(memory: Memory) -> None:
    """What was written before the start is what every step touches: it must move, with what is in it."""
    memory.write(mmap.PAGESIZE)
    assert collapse_heap() >= COUNT
    assert memory.huge() == COUNT
    assert memory.holds(mmap.PAGESIZE)


def test_space_that_is_hardly_used_stays_small(memory: Memory) -> None:
    """A byte in 16 KiB would cost four times the memory; a KV pool that is only reserved would become resident."""
    memory.write(4 * mmap.PAGESIZE)
    before = memory.huge()
    collapse_heap()
    assert memory.huge() == before < COUNT
    assert memory.holds(4 * mmap.PAGESIZE)


def test_it_stops_when_told(memory: Memory) -> None:
    """An engine that closes would wait until the whole heap has moved."""
    memory.write(mmap.PAGESIZE)
    before = memory.huge()
    assert collapse_heap(lambda: True) == 0
    assert memory.huge() == before


def test_settling_moves_all_weights() -> None:
    """Weights come in parts, so that it can be stopped in between: it must ask for the next until there is none."""
    parts, asked = [5, 5, 2, 0], []

    def move(enough: int) -> int:
        asked.append(enough)
        return parts[len(asked) - 1]

    settling = Settling(move, delay_s=0)
    settling.join()
    assert len(asked) == 4
    assert all(enough > 0 for enough in asked)


def test_settling_ends_between_parts() -> None:
    """A server that stops must not wait for gigabytes of weights."""
    began, go_on, asked = threading.Event(), threading.Event(), []

    def move(enough: int) -> int:
        asked.append(enough)
        began.set()
        assert go_on.wait(60)
        return 1

    settling = Settling(move, delay_s=0)
    assert began.wait(60)
    settling.stop()
    go_on.set()
    settling.join()
    assert len(asked) == 1


def test_settling_leaves_the_start_alone_and_ends_at_once() -> None:
    """A server that is stopped before its weights began to move must not wait for them, nor move them."""
    asked = []
    settling = Settling(lambda enough: asked.append(enough) or 0, delay_s=3600)
    settling.stop()
    settling.join()
    assert asked == []


def test_a_thread_that_may_not_give_way_works_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process without the right to its priorities would say that weights move, and move none."""
    given = []

    def refuse(which: int, who: int, priority: int) -> None:
        given.append(priority)
        raise PermissionError

    monkeypatch.setattr("os.setpriority", refuse)
    monkeypatch.setattr("os.getpriority", lambda which, who: 15)
    asked = []
    Settling(lambda enough: asked.append(enough) or 0, delay_s=0).join()
    assert given == [15], "and it does not come before an engine that gives way more"
    assert len(asked) == 1


SMAPS = b"""\
200000-800000 rw-p 00000000 00:00 0
Rss:                6144 kB
AnonHugePages:      2048 kB
VmFlags:
900000-e00000 rw-p 00000000 00:00 0                          [heap]
Rss:                   8 kB
AnonHugePages:         0 kB
1000000-1400000 rw-p 00000000 00:00 0
Rss:                4096 kB
AnonHugePages:      4096 kB
2000000-2400000 rw-p 00000000 fe:00 77    /caf\xe9/\xe2\x80\xa8\x0c0-1 rw-p of ours
Rss:                4096 kB
AnonHugePages:         0 kB
3000000-3400000 r-xp 00000000 00:00 0
Rss:                4096 kB
AnonHugePages:         0 kB
4000000-4400000 rw-p 00000000 00:00 0                        [stack]
Rss:                4096 kB
AnonHugePages:         0 kB
"""


def test_the_heap_is_found_among_mappings() -> None:
    """A pool that is huge already, a file's pages, code or a stack are not it; a path may have any bytes."""
    assert list(heap(SMAPS)) == [0x200000, 0x400000, 0x600000, 0xA00000, 0xC00000]


@pytest.mark.parametrize(
    ("text", "size", "given"),
    [
        ("always [madvise] never\n", HUGE_PAGE, True),
        ("[always] madvise never\n", HUGE_PAGE, True),
        ("always madvise [never]\n", HUGE_PAGE, False),
        ("[always] madvise never\n", 512 << 20, False),
    ],
)
def test_the_system_says_whether_it_gives_them(text: str, size: int, given: bool, tmp_path: Path) -> None:
    """Where it gives none, or none of this size, copied weights would take time and memory for nothing."""
    (tmp_path / "enabled").write_text(text)
    (tmp_path / "hpage_pmd_size").write_text(f"{size}\n")
    assert available(tmp_path) is given


def test_a_system_without_them(tmp_path: Path) -> None:
    """A kernel built without them, or a system that is not Linux, has no such files."""
    assert not available(tmp_path)


def test_a_process_environment_is_one_to_add_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """os.environ takes no questions but about strings: no server would start."""
    monkeypatch.setenv("PYTHONMALLOC", "debug")
    assert environment(os.environ, "glibc 2.36")["PYTHONMALLOC"] == "debug"
    assert environment(os.environ)["PATH"] == os.environ["PATH"]


def test_the_users_own_settings_prevail() -> None:
    """glibc takes the last of two values of a tunable, and a tunable before the variable that came before it."""
    user = {"A": "1", "PYTHONMALLOC": "debug", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0:glibc.malloc.arena_max=1"}
    given = environment(user, "glibc 2.36")
    assert (given["A"], given["PYTHONMALLOC"]) == ("1", "debug")
    assert given["GLIBC_TUNABLES"].split(":")[-2:] == ["glibc.malloc.hugetlb=0", "glibc.malloc.arena_max=1"]
    older = environment({"MALLOC_TRIM_THRESHOLD_": "1", "MALLOC_MMAP_THRESHOLD_": "1"}, "glibc 2.36")
    assert older["GLIBC_TUNABLES"] == "glibc.malloc.hugetlb=1"
    assert "PYTHONMALLOC" not in environment({"PYTHONDEVMODE": "1"}, "glibc 2.36")


def test_what_a_process_is_told() -> None:
    """An empty part would make some releases of glibc refuse them all."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GLIBC", "MALLOC"))}
    for outer in ({}, {"GLIBC_TUNABLES": ""}, clean):
        given = environment(outer, "glibc 2.36")
        assert given["PYTHONMALLOC"] == "malloc"
        assert "glibc.malloc.hugetlb=1" in given["GLIBC_TUNABLES"].split(":")
        assert all(part.startswith("glibc.malloc.") for part in given["GLIBC_TUNABLES"].split(":"))


@pytest.mark.parametrize("libc", ["glibc 2.34", "glibc 1.99", "musl 2.36", ""])
def test_others_are_told_nothing(libc: str) -> None:
    """Older releases would take part of it, which is worse than none."""
    assert environment({"A": "1"}, libc) == {"A": "1"}
