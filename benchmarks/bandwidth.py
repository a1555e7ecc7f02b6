"""Measured memory read bandwidth, and the share of it that decoding one stream uses.

Two buffers: one well above the L2 that a large shared L3 may hold, as it may hold the weights of a small model; and one
above any L3, read from memory. Each thread reads a part of its own, several times; the fastest pass counts. NumPy asks
for huge pages for both, as castline does for its weights.
"""

import ctypes
import subprocess
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.errors import Unavailable

SOURCE = Path(__file__).with_suffix(".c")
SMALL_BYTES = 64 << 20
LARGE_BYTES = 3 << 29
"""1.5 GiB."""
PASSES = {SMALL_BYTES: 50, LARGE_BYTES: 6}
"""Of each buffer. Both together take about a second: they are read beside every round's W1."""


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Gigabytes a second, the fastest of several passes."""

    threads: int
    buffer_bytes: int
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """What a decode step of one stream reads, in bytes."""

    weight_bytes: int
    unread_bytes: int
    """Of the weights file: tables of which a step reads single rows."""
    kv_bytes: int
    """Of the mean context."""

    @property
    def step_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def share(self, tokens_per_s: float, bandwidth: Bandwidth) -> float:
        """Of the rate that reading these bytes alone would allow."""
        return tokens_per_s * self.step_bytes / (bandwidth.gb_per_s * 1e9)


def measure(library: ctypes.CDLL, threads: int) -> list[Bandwidth]:
    """Of both buffers, now. *library*: of `load_reader`."""
    return [_measure(library, threads, size) for size in PASSES]


def fastest(measured: Iterable[Bandwidth]) -> tuple[Bandwidth, ...]:
    """Of each buffer and number of threads."""
    best: dict[tuple[int, int], Bandwidth] = {}
    for one in measured:
        place = one.buffer_bytes, one.threads
        if place not in best or one.gb_per_s > best[place].gb_per_s:
            best[place] = one
    return tuple(best.values())


def load_reader(work: Path) -> ctypes.CDLL:
    """Compiles and loads the loop that is timed. Raises Unavailable without a C compiler."""
    work.mkdir(parents=True, exist_ok=True)
    target = (work / "bandwidth.so").resolve()
    command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", str(SOURCE), "-o", str(target)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise Unavailable(f"memory bandwidth: cannot compile {SOURCE.name}: {error}") from None
    library = ctypes.CDLL(str(target))
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.read_all.restype = ctypes.c_uint64
    return library


def _measure(library: ctypes.CDLL, threads: int, size: int) -> Bandwidth:
    words = size // 8 // threads
    barrier = threading.Barrier(threads)
    spans: list[list[tuple[float, float]]] = [[] for _ in range(threads)]

    def read(thread: int) -> None:
        part = np.ones(words, np.uint64)
        for _ in range(PASSES[size]):
            barrier.wait()
            begun = time.perf_counter()
            library.read_all(part.ctypes.data, words)
            spans[thread].append((begun, time.perf_counter()))

    workers = [threading.Thread(target=read, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = (max(end for _, end in one) - min(begin for begin, _ in one) for one in zip(*spans, strict=True))
    return Bandwidth(threads, size, words * 8 * threads / min(seconds) / 1e9)
