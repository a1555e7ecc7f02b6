"""Launches and graphs that the driver in memory refuses: one test for each kind of mistake."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda.hazards import misuse
from fake_cuda.model import FakeModel

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.launcher import Launcher

MODEL = FakeModel()


@dataclass
class Greedy:
    """A launch of ``greedy`` over two rows, whose parts a test replaces."""

    device: Any
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
def greedy(device: Any) -> Greedy:
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


def test_entries_are_those_of_the_cubin(device: Any) -> None:
    module = device.driver.load_module(b"image of greedy")
    with pytest.raises(EngineError, match="not found"):
        device.driver.function(module, "sample", 0)


def test_unknown_kernels_are_checked_by_their_pointers(device: Any) -> None:
    """A cubin that the fake was told nothing of, as a real engine's."""
    driver = device.driver
    function = driver.function(driver.load_module(b"ELF"), "anything", 512)
    driver.launch(function, (1, 1, 1), 128, 512, device.stream, [("pointer", device.address), ("i32", 4)])
    with misuse("no device memory"):
        driver.launch(function, (1, 1, 1), 128, 512, device.stream, [("pointer", 77), ("i32", 4)])


# Graphs


def test_captures_hold_no_allocation_wait_or_event(device: Any) -> None:
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


def test_a_graph_does_what_was_captured_whenever_it_is_launched(device: Any) -> None:
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


def test_a_graphs_pointers_are_checked_at_every_launch(device: Any) -> None:
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
