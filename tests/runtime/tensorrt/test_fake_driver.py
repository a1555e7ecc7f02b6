"""The driver in memory refuses what a GPU would answer with wrong data or a crash: one test for each kind of mistake.

Without these, a fake that had stopped looking would let every other test pass.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_cuda.driver import FakeDriver
from fake_cuda.hazards import misuse
from fake_cuda.model import FakeModel

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.driver import Driver

MODEL = FakeModel()


def test_it_is_a_driver() -> None:
    """The checks would be of an interface that nobody calls."""
    names = {name for name in vars(Driver) if not name.startswith("_")}
    assert names <= set(dir(FakeDriver))


def test_copies_take_effect_when_waited_for(device: Any) -> None:
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


def test_an_event_brings_only_what_is_before_it(device: Any) -> None:
    """Waiting for one step must not need the next one's."""
    driver = device.driver
    driver.fill(device.address, 1, 4, device.stream)
    event = device.marked(device.stream)
    driver.fill(device.address, 2, 4, device.stream)
    driver.synchronize_event(event)
    assert driver.device.view(device.address, 4).tolist() == [1] * 4


def test_a_stream_waits_for_an_event_of_another(device: Any) -> None:
    """The order that events make, and no more."""
    driver, other = device.driver, device.second_stream()
    driver.fill(device.address, 7, 4, other)
    driver.wait(device.stream, device.marked(other))
    driver.copy_to_host(device.pinned[:4], device.address, device.stream)
    driver.synchronize(device.stream)
    assert device.pinned[:4].tolist() == [7] * 4


# Bounds and lifetimes


@pytest.mark.parametrize("shift", [1, -1, 1 << 30])
def test_copies_stay_in_one_allocation(device: Any, shift: int) -> None:
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


def test_addresses_are_aligned_and_never_used_again(device: Any) -> None:
    """Else a stale pointer would be another's good one."""
    driver = device.driver
    seen = set()
    for size in (1, 255, 256, 257):
        address = driver.allocate(size)
        assert address % 256 == 0
        driver.free(address)
        seen.add(address)
    assert len(seen) == 4


def test_freed_memory_is_not_used(device: Any) -> None:
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


def test_memory_in_use_is_not_freed(device: Any) -> None:
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


def test_only_starts_of_allocations_are_freed(device: Any) -> None:
    with misuse("not its start"):
        device.driver.free(device.address + 256)
    with misuse("a part of pinned memory"):
        device.driver.free_pinned(device.pinned[:8])


def test_host_memory_must_be_pinned(device: Any) -> None:
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
def test_handles_exist(device: Any, call: Callable[[Any], None]) -> None:
    with misuse(""):
        call(device)


def test_more_than_there_is_cannot_be_had(device: Any) -> None:
    """A full device is the environment's fault, and not a mistake."""
    with pytest.raises(EngineError, match="out of memory"):
        device.driver.allocate(1 << 20)


def test_close_finds_every_leak(device: Any) -> None:
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


def test_nothing_is_made_once_ready(device: Any) -> None:
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


def test_host_must_not_write_what_a_copy_reads(device: Any) -> None:
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


def test_host_must_not_read_what_a_copy_writes(device: Any) -> None:
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


def test_writes_behind_its_back_are_found(device: Any) -> None:
    """NumPy can be led around the watch; a copy's source that has changed is found at the copy."""
    driver = device.driver
    driver.copy_to_device(device.address, device.pinned[:8], device.stream)
    np.asarray(device.pinned)[0] ^= 1
    with misuse("changed the source"):
        driver.synchronize(device.stream)


@pytest.mark.parametrize("order", ["none", "event", "host", "late event"])
def test_two_streams_need_an_order(device: Any, order: str) -> None:
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


def test_two_streams_may_read_together(device: Any) -> None:
    driver, other = device.driver, device.second_stream()
    driver.copy_to_host(device.pinned[:64], device.address, other)
    driver.copy_to_host(device.pinned[64:128], device.address, device.stream)
    with misuse("unsynchronised"):
        driver.fill(device.address, 0, 1, device.stream)


def test_times_are_of_events_that_happened(device: Any) -> None:
    driver = device.driver
    start = device.marked(device.stream)
    driver.fill(device.address, 0, 1, device.stream)
    end = device.marked(device.stream)
    with misuse("has not happened"):
        driver.elapsed_ms(start, end)
    driver.synchronize(device.stream)
    assert driver.elapsed_ms(start, end) > 0
