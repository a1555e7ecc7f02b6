"""Kernels on a GPU by themselves: arrays there and back, and the time of what is launched on them.

Every time is the median of many, of launches that find nothing of theirs in the L2 cache: before each the cache is
overwritten, for long enough that the host has queued the launch by the time the GPU comes to it.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from castline.engines.kernel_choices import TunedKernel
from castline.plugins.attention_case import AttentionCase
from castline.plugins.contract import AttentionAttributes
from castline.plugins.tensorrt.compile import Compiled
from castline.plugins.tensorrt.driver import Driver
from castline.plugins.tensorrt.kernel_set import KernelName, KernelSet
from castline.plugins.tensorrt.launcher import (
    Launch,
    Launcher,
    StepShape,
    attention_launches,
    workspace_bytes,
)

FLUSH_BYTES: Final = 256 << 20
REPEATS: Final = 30
ALIGNMENT: Final = 256


class DeviceArrays:
    """Arrays of one stream. `close` frees them all."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.create_stream()
        self._addresses: list[int] = []

    def empty(self, num_bytes: int) -> int:
        """Filled with ones: NaN of every float, so that what no kernel writes is seen."""
        address = self.driver.allocate(max(num_bytes, 1))
        self._addresses.append(address)
        self.driver.fill(address, 0xFF, num_bytes, self.stream)
        return address

    def upload(self, array: NDArray[Any]) -> int:
        address = self.empty(array.nbytes)
        self.write(address, array)
        return address

    def write(self, address: int, array: NDArray[Any]) -> None:
        if not array.nbytes:
            return
        pinned = self.driver.allocate_pinned(array.nbytes)
        pinned[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.driver.copy_to_device(address, pinned, self.stream)
        self.driver.synchronize(self.stream)
        self.driver.free_pinned(pinned)

    def download(self, address: int, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
        array = np.empty(shape, dtype)
        if array.nbytes:
            pinned = self.driver.allocate_pinned(array.nbytes)
            self.driver.copy_to_host(pinned, address, self.stream)
            self.driver.synchronize(self.stream)
            array.reshape(-1).view(np.uint8)[:] = pinned
            self.driver.free_pinned(pinned)
        return array

    def close(self) -> None:
        self.driver.synchronize(self.stream)
        for address in self._addresses:
            self.driver.free(address)
        self._addresses.clear()
        self.driver.destroy_stream(self.stream)


@contextmanager
def device_arrays(driver: Driver) -> Iterator[DeviceArrays]:
    arrays = DeviceArrays(driver)
    try:
        yield arrays
    finally:
        arrays.close()


class Stopwatch:
    """Times what a function queues on a stream. `close` frees what overwrites the cache."""

    def __init__(self, driver: Driver, l2_bytes: int, repeats: int = REPEATS, flush_bytes: int = FLUSH_BYTES) -> None:
        self._driver, self._repeats = driver, repeats
        self._flush_bytes = max(4 * l2_bytes, flush_bytes)
        self._flush = driver.allocate(self._flush_bytes)
        self._events = [(driver.create_event(), driver.create_event()) for _ in range(repeats)]

    def microseconds(self, queue: Callable[[], None], stream: int) -> float:
        """Median; *queue* is called once before, so that nothing is loaded while the clock runs."""
        queue()
        for start, end in self._events:
            self._driver.fill(self._flush, 0, self._flush_bytes, stream)
            self._driver.record(start, stream)
            queue()
            self._driver.record(end, stream)
        self._driver.synchronize(stream)
        return 1e3 * median(self._driver.elapsed_ms(start, end) for start, end in self._events)

    def close(self) -> None:
        for pair in self._events:
            for event in pair:
                self._driver.destroy_event(event)
        self._driver.free(self._flush)


@dataclass(frozen=True, slots=True)
class Workload:
    """A step that a kernel is timed on: sequences alike, each with *query_len* new tokens, *kv_len* with them."""

    sequences: int
    query_len: int
    kv_len: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.query_len

    def __str__(self) -> str:
        return f"{self.sequences} x {self.query_len} at {self.kv_len}"


WORKLOADS: Final[dict[TunedKernel, Workload]] = {
    "decode": Workload(32, 1, 2048),
    "decode_split": Workload(1, 1, 8192),
    "prefill": Workload(1, 512, 1024),
}
SAMPLED_ROWS: Final = 32
PARTS: Final[dict[str, tuple[KernelName, ...]]] = {
    "rope_append": ("rope_append",),
    "decode": ("decode",),
    "decode_split": ("decode_split", "decode_merge"),
    "prefill": ("prefill",),
}
"""What is timed together: a split decode is done when its parts are joined."""


@dataclass(frozen=True, slots=True)
class WorkloadArrays:
    """A workload's step on the device."""

    shape: StepShape
    addresses: dict[str, int]
    workspace: int


def workload_arrays(
    arrays: DeviceArrays, a: AttentionAttributes, kernels: KernelSet, workload: Workload, multiprocessors: int
) -> WorkloadArrays:
    """Random inputs and a pool with a shuffled block of its own for every block of every sequence."""
    width = -(-workload.kv_len // a.block_size)
    num_blocks = workload.sequences * width
    some = AttentionCase(a, num_blocks=min(num_blocks, 64), table_width=1, lengths=[0])
    random = some.random
    packed = np.tile(np.arange(workload.kv_len - workload.query_len, workload.kv_len), workload.sequences)
    table = random.permutation(num_blocks).astype(np.int32).reshape(workload.sequences, width)
    owner = np.repeat(np.arange(workload.sequences), workload.query_len)
    slots = table[owner, packed // a.block_size] * a.block_size + packed % a.block_size
    pool = some.pool()
    heads = a.num_heads + 2 * a.num_kv_heads
    qkv = random.integers(0x3000, 0x3800, (workload.tokens, heads * a.head_dim)).astype(np.uint16)
    angles = random.uniform(0, 6, (workload.tokens, max(a.rotary_dim // 2, 1)))
    shape = StepShape(workload.tokens, workload.sequences, width, num_blocks)
    addresses = {
        "qkv": arrays.upload(qkv),
        "pool": arrays.upload(np.resize(pool, (num_blocks, *pool.shape[1:]))),
        "slots": arrays.upload(slots.astype(np.int32)),
        "cu_query_lens": arrays.upload(np.arange(workload.sequences + 1, dtype=np.int32) * workload.query_len),
        "kv_lens": arrays.upload(np.full(workload.sequences, workload.kv_len, np.int32)),
        "table": arrays.upload(table),
        "out": arrays.empty(workload.tokens * a.num_heads * a.head_dim * 2),
        "cos": arrays.upload(np.cos(angles).astype(np.float32)),
        "sin": arrays.upload(np.sin(angles).astype(np.float32)),
        "q_weight": arrays.upload(some.q_weight),
        "k_weight": arrays.upload(some.k_weight),
    }
    return WorkloadArrays(shape, addresses, arrays.empty(workspace_bytes(kernels, a, shape, multiprocessors)))


def queue_of(launcher: Launcher, launches: Sequence[Launch], stream: int) -> Callable[[], None]:
    """Queues those launches."""

    def queue() -> None:
        for one in launches:
            launcher.launch(one, stream)

    return queue


class KernelClock:
    """The `Clock` of `castline tune-kernels`: candidates on the GPU of this machine."""

    def __init__(self, driver: Driver, watch: Stopwatch, device_name: str, multiprocessors: int) -> None:
        self.device_name = device_name
        self._driver, self._watch, self._multiprocessors = driver, watch, multiprocessors

    def microseconds(
        self, kernel: TunedKernel, compiled: Sequence[Compiled], attributes: AttentionAttributes | None
    ) -> float:
        kernels = KernelSet("", "", tuple(one.spec for one in compiled))
        with tempfile.TemporaryDirectory() as home, device_arrays(self._driver) as arrays:
            for one in compiled:
                (Path(home) / one.spec.cubin).write_bytes(one.cubin)
            launcher = Launcher(Path(home), kernels, self._driver, self._multiprocessors)
            try:
                launches = self._launches(kernel, kernels, arrays, attributes)
                return self._watch.microseconds(queue_of(launcher, launches, arrays.stream), arrays.stream)
            finally:
                self._driver.synchronize(arrays.stream)
                launcher.close()

    def _launches(
        self, kernel: TunedKernel, kernels: KernelSet, arrays: DeviceArrays, a: AttentionAttributes | None
    ) -> list[Launch]:
        if a is None:
            return [sampling_launch(kernels, kernel, arrays, SAMPLED_ROWS)]
        made = workload_arrays(arrays, a, kernels, WORKLOADS[kernel], self._multiprocessors)
        # No multiprocessors to fill: nothing is split.
        units = 0 if kernel == "decode" else self._multiprocessors
        launches = attention_launches(kernels, a, made.shape, made.addresses, made.workspace, units)
        return [one for one in launches if one.kernel.name in PARTS[kernel]]


def sampling_launch(kernels: KernelSet, name: TunedKernel, arrays: DeviceArrays, rows: int) -> Launch:
    """Of greedy or sample, on random logits: every row truncated by top-k and by top-p."""
    spec = kernels.find(name)
    random = np.random.default_rng(0)
    logits = random.standard_normal((rows, int(spec.constants["vocab"])), np.float32) * 3
    values = {
        "logits": arrays.upload(logits),
        "tokens": arrays.empty(4 * rows),
        "finite": arrays.empty(4 * rows),
        "temperature": arrays.upload(np.ones(rows, np.float32)),
        "top_k": arrays.upload(np.full(rows, 50, np.int32)),
        "top_p": arrays.upload(np.full(rows, 0.9, np.float32)),
        "min_p": arrays.upload(np.zeros(rows, np.float32)),
        "uniform": arrays.upload(random.uniform(0, 1, rows).astype(np.float32)),
    }
    return Launch(spec, (rows, 1, 1), tuple(values[argument.name] for argument in spec.arguments))
