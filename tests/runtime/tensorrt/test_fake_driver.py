"""The driver in memory refuses what a GPU would answer with wrong data or a crash: one test for each kind of mistake.

Without these, a fake that had stopped looking would let every other test pass.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda.driver import FakeDriver, misuse
from fake_cuda.model import FakeModel

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.driver import Driver
from castline.plugins.tensorrt.launcher import Launcher

MODEL = FakeModel()


@dataclass
class Device:
    """A driver with a stream, 1 KiB of device memory and as much of pinned memory."""

    driver: FakeDriver
    stream: int
    address: int
    pinned: Any

    def second_stream(self) -> int:
        return self.driver.create_stream()

    def marked(self, stream: int) -> int:
        event = self.driver.create_event()
        self.driver.record(event, stream)
        return event


@pytest.fixture
def device() -> Device:
    driver = MODEL.driver(total_bytes=1 << 20)
    return Device(driver, driver.create_stream(), driver.allocate(1024), driver.allocate_pinned(1024))


def test_it_is_a_driver() -> None:
    """The checks would be of an interface that nobody calls."""
    names = {name for name in vars(Driver) if not name.startswith("_")}
    assert names <= set(dir(FakeDriver))


def test_copies_take_effect_when_waited_for(device: Device) -> None:
    """A fake that copies at once hides every missing wait."""
    driver = device.driver
    device.pinned[:4] = [1, 2, 3, 4]
    driver.copy_to_device(device.address, device.pinned[:4], device.stream)
    assert driver.device.view(device.address, 4).tolist() != [1, 2, 3, 4]
    driver.copy_on_device(device.address + 8, device.address, 4, device.stream)
    driver.copy_to_host(device.pinned[8:12], device.address + 8, device.stream)
    driver.synchronize(device.stream)
    assert driver.device.view(device.address, 4).tolist() == [1, 2, 3, 4]
    assert device.pinned[8:12].tolist() == [1, 2, 3, 4]


def test_an_event_brings_only_what_is_before_it(device: Device) -> None:
    """Waiting for one step must not need the next one's."""
    driver = device.driver
    driver.fill(device.address, 1, 4, device.stream)
    event = device.marked(device.stream)
    driver.fill(device.address, 2, 4, device.stream)
    driver.synchronize_event(event)
    assert driver.device.view(device.address, 4).tolist() == [1] * 4


def test_a_stream_waits_for_an_event_of_another(device: Device) -> None:
    """The order that events make, and no more."""
    driver, other = device.driver, device.second_stream()
    driver.fill(device.address, 7, 4, other)
    driver.wait(device.stream, device.marked(other))
    driver.copy_to_host(device.pinned[:4], device.address, device.stream)
    driver.synchronize(device.stream)
    assert device.pinned[:4].tolist() == [7] * 4


# Bounds and lifetimes


@pytest.mark.parametrize("shift", [1, -1, 1 << 30])
def test_copies_stay_in_one_allocation(device: Device, shift: int) -> None:
    """The neighbour's memory would be written."""
    driver = device.driver
    driver.allocate(1024)
    for copy in (
        lambda: driver.copy_to_device(device.address + shift, device.pinned, device.stream),
        lambda: driver.copy_to_host(device.pinned, device.address + shift, device.stream),
        lambda: driver.fill(device.address + shift, 0, 1024, device.stream),
        lambda: driver.copy_on_device(device.address, device.address + shift + (1 << 20), 1024, device.stream),
    ):
        with pytest.raises(AssertionError, match=r"out of bounds|no device memory"):
            copy()


def test_addresses_are_aligned_and_never_used_again(device: Device) -> None:
    """Else a stale pointer would be another's good one."""
    driver = device.driver
    seen = set()
    for size in (1, 255, 256, 257):
        address = driver.allocate(size)
        assert address % 256 == 0
        driver.free(address)
        seen.add(address)
    assert len(seen) == 4


def test_freed_memory_is_not_used(device: Device) -> None:
    driver = device.driver
    driver.free(device.address)
    with misuse("use after free"):
        driver.copy_to_device(device.address, device.pinned, device.stream)
    with misuse("use after free"):
        driver.free(device.address)
    driver.free_pinned(device.pinned)
    with misuse("use after free of pinned"):
        driver.copy_to_device(driver.allocate(1024), device.pinned, device.stream)
    with misuse("was freed"):
        device.pinned[0] = 1


def test_memory_in_use_is_not_freed(device: Device) -> None:
    """Queued work would read what somebody else has by then."""
    driver = device.driver
    driver.copy_to_device(device.address, device.pinned, device.stream)
    with misuse("is queued and uses it"):
        driver.free(device.address)
    with misuse("is queued and uses it"):
        driver.free_pinned(device.pinned)
    with misuse("with work queued"):
        driver.destroy_stream(device.stream)
    driver.synchronize(device.stream)
    driver.free(device.address)
    driver.free_pinned(device.pinned)
    driver.destroy_stream(device.stream)


def test_only_starts_of_allocations_are_freed(device: Device) -> None:
    with misuse("not its start"):
        device.driver.free(device.address + 256)
    with misuse("a part of pinned memory"):
        device.driver.free_pinned(device.pinned[:8])


def test_host_memory_must_be_pinned(device: Device) -> None:
    """A copy from ordinary memory waits, or reads what was there before."""
    driver = device.driver
    with misuse("not pinned"):
        driver.copy_to_device(device.address, np.zeros(8, np.uint8), device.stream)
    with misuse("not pinned"):
        driver.copy_to_host(np.zeros(8, np.uint8), device.address, device.stream)
    with misuse("contiguous bytes"):
        driver.copy_to_host(device.pinned[::2], device.address, device.stream)


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.driver.synchronize(99),
        lambda d: d.driver.destroy_stream(99),
        lambda d: d.driver.record(99, d.stream),
        lambda d: d.driver.synchronize_event(99),
        lambda d: d.driver.destroy_event(99),
        lambda d: d.driver.wait(d.stream, 99),
        lambda d: d.driver.wait(d.stream, d.driver.create_event()),
        lambda d: d.driver.unload_module(99),
        lambda d: d.driver.function(99, "greedy", 0),
        lambda d: d.driver.launch(99, (1, 1, 1), 32, 0, d.stream, []),
        lambda d: d.driver.launch_graph(99, d.stream),
        lambda d: d.driver.destroy_graph(99),
        lambda d: d.driver.end_capture(d.stream),
        lambda d: d.driver.fill(d.address, 0, 1, 99),
        lambda d: d.driver.allocate(0),
    ],
)
def test_handles_exist(device: Device, call: Callable[[Device], None]) -> None:
    with misuse(""):
        call(device)


def test_more_than_there_is_cannot_be_had(device: Device) -> None:
    """A full device is the environment's fault, and not a mistake."""
    with pytest.raises(EngineError, match="out of memory"):
        device.driver.allocate(1 << 20)


def test_close_finds_every_leak(device: Device) -> None:
    driver = device.driver
    driver.create_event()
    driver.load_module(b"")
    with misuse("1 device memory, 1 pinned memory, 1 streams, 1 events, 1 modules"):
        driver.close()


def test_nothing_after_close() -> None:
    driver = FakeDriver()
    driver.close()
    with misuse("after close"):
        driver.create_stream()


def test_nothing_is_made_once_ready(device: Device) -> None:
    driver = device.driver
    driver.forbid_allocation()
    for make in (
        lambda: driver.allocate(1),
        lambda: driver.allocate_pinned(1),
        driver.create_stream,
        driver.create_event,
        lambda: driver.load_module(b""),
        lambda: driver.begin_capture(device.stream),
    ):
        with misuse("after the engine was ready"):
            make()


# Order


def test_host_must_not_write_what_a_copy_reads(device: Device) -> None:
    """The next step's inputs, packed over the last one's."""
    driver = device.driver
    driver.copy_to_device(device.address, device.pinned[:8], device.stream)
    device.pinned[8:16] = 1
    for write in (
        lambda: device.pinned.__setitem__(3, 1),
        lambda: device.pinned[4:8].view(np.int32).__setitem__(slice(None), 1),
        lambda: np.copyto(device.pinned[:8], 1),
        lambda: np.add(device.pinned[:4], 1, out=device.pinned[:4]),
    ):
        with misuse("the host writes"):
            write()
    assert device.pinned[0] is not None  # reading what is only read is allowed
    driver.synchronize(device.stream)
    device.pinned[3] = 1


def test_host_must_not_read_what_a_copy_writes(device: Device) -> None:
    """Tokens taken before they have come."""
    driver = device.driver
    driver.copy_to_host(device.pinned[:8], device.address, device.stream)
    for read in (
        lambda: device.pinned[0],
        lambda: device.pinned[:4].tolist(),
        lambda: device.pinned[:4].view(np.int32) + 1,
        lambda: device.pinned[np.array([1, 2])],
        lambda: np.concatenate([device.pinned[:2], device.pinned[8:9]]),
        lambda: np.zeros(8).__setitem__(slice(None), device.pinned[:8]) or device.pinned[:8].copy(),
    ):
        with misuse("the host reads"):
            read()
    assert device.pinned[8:].sum() >= 0
    driver.synchronize(device.stream)
    device.pinned[:4].tolist()


def test_writes_behind_its_back_are_found(device: Device) -> None:
    """NumPy can be led around the watch; a copy's source that has changed is found at the copy."""
    driver = device.driver
    driver.copy_to_device(device.address, device.pinned[:8], device.stream)
    np.asarray(device.pinned)[0] ^= 1
    with misuse("changed the source"):
        driver.synchronize(device.stream)


@pytest.mark.parametrize("order", ["none", "event", "host", "late event"])
def test_two_streams_need_an_order(device: Device, order: str) -> None:
    """A copy on a stream of its own, of what another stream is computing."""
    driver, other = device.driver, device.second_stream()
    early = device.marked(other)
    driver.fill(device.address, 1, 64, other)
    if order == "event":
        driver.wait(device.stream, device.marked(other))
    elif order == "host":
        driver.synchronize(other)
    elif order == "late event":
        driver.wait(device.stream, early)
    driver.fill(device.address + 64, 1, 64, device.stream)  # other bytes
    if order in ("event", "host"):
        driver.copy_to_host(device.pinned[:64], device.address, device.stream)
        return
    with misuse("unsynchronised"):
        driver.copy_to_host(device.pinned[:64], device.address, device.stream)
    with misuse("unsynchronised"):
        driver.fill(device.address + 63, 0, 1, device.stream)


def test_two_streams_may_read_together(device: Device) -> None:
    driver, other = device.driver, device.second_stream()
    driver.copy_to_host(device.pinned[:64], device.address, other)
    driver.copy_to_host(device.pinned[64:128], device.address, device.stream)
    with misuse("unsynchronised"):
        driver.fill(device.address, 0, 1, device.stream)


def test_times_are_of_events_that_happened(device: Device) -> None:
    driver = device.driver
    start = device.marked(device.stream)
    driver.fill(device.address, 0, 1, device.stream)
    end = device.marked(device.stream)
    with misuse("has not happened"):
        driver.elapsed_ms(start, end)
    driver.synchronize(device.stream)
    assert driver.elapsed_ms(start, end) > 0


# Launches


@dataclass
class Greedy:
    """A launch of ``greedy`` over two rows, whose parts a test replaces."""

    device: Device
    function: int
    threads: int
    shared: int
    arguments: list[tuple[str, Any]]

    def launch(self, **changes: Any) -> None:
        values = {"grid": (2, 1, 1), "threads": self.threads, "shared": self.shared, "arguments": self.arguments}
        values |= changes
        self.device.driver.launch(
            self.function, values["grid"], values["threads"], values["shared"], self.device.stream, values["arguments"]
        )


@pytest.fixture
def greedy(device: Device) -> Greedy:
    kernel = MODEL.kernels().find("greedy")
    module = device.driver.load_module(b"image of greedy")
    function = device.driver.function(module, "greedy", kernel.shared_bytes)
    pointers = [device.driver.allocate(2 * MODEL.vocab_size * 4), device.address, device.address + 8]
    return Greedy(device, function, kernel.threads, kernel.shared_bytes, [("pointer", p) for p in pointers])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"grid": (0, 1, 1)}, "grid"),
        ({"grid": (2, 65536, 1)}, "grid"),
        ({"grid": (3, 1, 1)}, "out of bounds"),
        ({"threads": 0}, "threads"),
        ({"threads": 48}, "threads"),
        ({"threads": 2048}, "threads"),
        ({"threads": 64}, "threads"),
        ({"shared": 4096}, "shared memory"),
        ({"shared": 0}, "shared memory"),
    ],
)
def test_launches_have_a_grid_and_the_kernels_own_sizes(greedy: Greedy, changes: Any, words: str) -> None:
    """A driver takes some of these, and the kernel then computes something else."""
    greedy.launch()
    with misuse(words):
        greedy.launch(**changes)


@pytest.mark.parametrize(
    ("place", "argument", "words"),
    [
        (0, ("i32", 5), "arguments"),
        (0, ("pointer", 0), "no device memory"),
        (0, ("pointer", 5), "no device memory"),
        (1, ("pointer", -1), "does not fit"),
        (1, ("pointer", 1.5), "as pointer"),
        (1, ("i32", 1 << 31), "does not fit"),
        (1, ("f32", 1), "as f32"),
        (1, ("u8", 1), "as u8"),
    ],
)
def test_arguments_are_the_kernels(greedy: Greedy, place: int, argument: Any, words: str) -> None:
    arguments = list(greedy.arguments)
    arguments[place] = argument
    with misuse(words):
        greedy.launch(arguments=arguments)
    with misuse("arguments"):
        greedy.launch(arguments=greedy.arguments[:2])


def test_a_kernels_reach_is_checked_against_streams(greedy: Greedy) -> None:
    """Not only its pointers: the last byte that it touches."""
    device = greedy.device
    other = device.second_stream()
    greedy.launch()
    last = greedy.arguments[0][1] + 2 * MODEL.vocab_size * 4 - 1
    with misuse("unsynchronised"):
        device.driver.fill(last, 0, 1, other)
    device.driver.copy_to_host(device.pinned[:1], last, other)  # logits are only read
    with misuse("unsynchronised"):
        device.driver.copy_to_host(device.pinned[1:2], device.address + 15, other)


def test_modules_in_use_stay(greedy: Greedy) -> None:
    driver = greedy.device.driver
    module = next(iter(driver._modules))
    greedy.launch()
    with misuse("is queued and uses it"):
        driver.unload_module(module)
    driver.synchronize(greedy.device.stream)
    driver.unload_module(module)
    with misuse("no function of a loaded module"):
        greedy.launch()


def test_entries_are_those_of_the_cubin(device: Device) -> None:
    module = device.driver.load_module(b"image of greedy")
    with pytest.raises(EngineError, match="not found"):
        device.driver.function(module, "sample", 0)


def test_unknown_kernels_are_checked_by_their_pointers(device: Device) -> None:
    """A cubin that the fake was told nothing of, as a real engine's."""
    driver = device.driver
    function = driver.function(driver.load_module(b"ELF"), "anything", 512)
    driver.launch(function, (1, 1, 1), 128, 512, device.stream, [("pointer", device.address), ("i32", 4)])
    with misuse("no device memory"):
        driver.launch(function, (1, 1, 1), 128, 512, device.stream, [("pointer", 77), ("i32", 4)])


# Graphs


def test_captures_hold_no_allocation_wait_or_event(device: Device) -> None:
    """What a stream's capture fails on, or silently leaves out."""
    driver = device.driver
    event, spare = device.marked(device.stream), driver.allocate(8)
    driver.begin_capture(device.stream)
    for call in (
        lambda: driver.allocate(8),
        lambda: driver.allocate_pinned(8),
        lambda: driver.free(spare),
        lambda: driver.synchronize(device.stream),
        lambda: driver.synchronize_event(event),
        lambda: driver.record(event, device.stream),
        lambda: driver.begin_capture(device.stream),
        driver.close,
    ):
        with misuse("while a stream is captured"):
            call()
    with misuse("not pinned"):
        driver.copy_to_device(device.address, np.zeros(8, np.uint8), device.stream)
    with misuse("out of bounds"):
        driver.fill(device.address, 0, 2000, device.stream)
    driver.destroy_graph(driver.end_capture(device.stream))


def test_a_graph_does_what_was_captured_whenever_it_is_launched(device: Device) -> None:
    driver = device.driver
    driver.begin_capture(device.stream)
    driver.copy_on_device(device.address + 8, device.address, 4, device.stream)
    graph = driver.end_capture(device.stream)
    driver.synchronize(device.stream)
    assert driver.device.view(device.address + 8, 1)[0] == 0xA5, "a capture executes nothing"
    for value in (1, 2):
        driver.fill(device.address, value, 4, device.stream)
        driver.launch_graph(graph, device.stream)
        driver.synchronize(device.stream)
        assert driver.device.view(device.address + 8, 1)[0] == value


def test_a_graphs_pointers_are_checked_at_every_launch(device: Device) -> None:
    """A buffer that was freed and made again lies elsewhere; the graph still has the old address."""
    driver = device.driver
    driver.begin_capture(device.stream)
    driver.fill(device.address, 0, 8, device.stream)
    graph = driver.end_capture(device.stream)
    driver.launch_graph(graph, device.stream)
    with misuse("is queued and uses it"):
        driver.destroy_graph(graph)
    with misuse("is queued and uses it"):
        driver.free(device.address)
    with misuse("unsynchronised"):
        driver.fill(device.address, 0, 8, device.second_stream())
    driver.synchronize(device.stream)
    driver.free(device.address)
    with misuse("use after free"):
        driver.launch_graph(graph, device.stream)


def test_kernels_check_what_they_find(tmp_path: Path) -> None:
    """Slots, tables and lengths lie in memory: the stand-ins look at them when they are executed."""
    driver = MODEL.driver()
    launcher = Launcher(tmp_path, MODEL.write_kernels(tmp_path), driver, MODEL.multiprocessors)
    stream, memory = driver.create_stream(), driver.allocate(1 << 16)
    pool = driver.allocate(4 * MODEL.block_bytes)
    kernel = launcher.kernels.find("rope_append", launcher.kernels.kernels[0].attributes)
    names = [argument.name for argument in kernel.arguments]
    values = dict.fromkeys(names, 0) | {"qkv": memory, "slots": memory + 4096, "q_out": memory + 8192}
    values |= {"pool": pool, "num_blocks": 4}

    def append(*slots: int) -> None:
        driver.device.view(memory + 4096, 4 * len(slots)).view(np.int32)[:] = slots
        arguments = [(a.type, values[a.name]) for a in kernel.arguments]
        function = launcher._functions[kernel.cubin]
        driver.launch(function, (len(slots), 4, 1), kernel.threads, kernel.shared_bytes, stream, arguments)
        driver.synchronize(stream)

    append(0, 15, -1, -1)
    with misuse("beyond the pool"):
        append(16)
    with misuse("two tokens"):
        append(3, 3)
