"""A GPU in the processor's memory, on which Triton's interpreter runs what is launched."""

import ctypes
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from castline.plugins.tensorrt import compile as compiler
from castline.plugins.tensorrt.compile import Binary, KernelCompiler, ResourceUsage, Source, kernel_function

torch.set_num_threads(1)
TYPES = {
    "*fp16": torch.float16,
    "*bf16": torch.bfloat16,
    "*fp32": torch.float32,
    "*i32": torch.int32,
    "*u8": torch.uint8,
}


class InterpretedGpu:
    """See `castline.plugins.tensorrt.driver.Driver`. Everything happens at once; a graph is its launches again."""

    device_name, compute_capability, multiprocessors = "Interpreted", (8, 9), 4
    l2_bytes, cuda_version = 1 << 10, "13.0"

    def __init__(self) -> None:
        self.buffers: dict[int, Any] = {}
        self.modules: dict[int, dict[str, Any]] = {}
        self.captured: list[tuple[Any, ...]] | None = None
        self.graphs: dict[int, list[tuple[Any, ...]]] = {}
        self.live: set[int] = set()
        """Streams and events."""
        self.clock = 0.0
        self.spoil: str | None = None
        """Kernel whose results are made wrong."""

    def _handle(self) -> int:
        self.clock += 1
        return int(self.clock)

    def allocate(self, num_bytes: int) -> int:
        buffer = (ctypes.c_uint8 * (num_bytes + 256))()
        address = -(-ctypes.addressof(buffer) // 256) * 256
        self.buffers[address] = (buffer, num_bytes)
        return address

    def free(self, address: int) -> None:
        del self.buffers[address]

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        return np.zeros(num_bytes, np.uint8)

    def free_pinned(self, memory: NDArray[np.uint8]) -> None: ...

    def copy_to_device(self, address: int, source: NDArray[np.uint8], stream: int) -> None:
        assert self._room(address) >= source.nbytes
        ctypes.memmove(address, source.ctypes.data, source.nbytes)

    def copy_to_host(self, target: NDArray[np.uint8], address: int, stream: int) -> None:
        assert self._room(address) >= target.nbytes
        ctypes.memmove(target.ctypes.data, address, target.nbytes)

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        assert min(self._room(target), self._room(source)) >= num_bytes
        ctypes.memmove(target, source, num_bytes)

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        assert self._room(address) >= num_bytes
        ctypes.memset(address, value, num_bytes)

    def create_stream(self) -> int:
        handle = self._handle()
        self.live.add(handle)
        return handle

    create_event = create_stream

    def destroy_stream(self, stream: int) -> None:
        self.live.remove(stream)

    destroy_event = destroy_stream

    def synchronize(self, stream: int) -> None:
        assert stream in self.live

    def record(self, event: int, stream: int) -> None:
        assert {event, stream} <= self.live

    def elapsed_ms(self, start: int, end: int) -> float:
        return 0.25

    def load_module(self, cubin: bytes) -> int:
        handle = self._handle()
        self.modules[handle] = json.loads(cubin)
        return handle

    def unload_module(self, module: int) -> None:
        del self.modules[module]

    def function(self, module: int, entry: str, shared_bytes: int) -> int:
        assert self.modules[module]["name"] == entry
        return module

    def launch(self, function: int, grid: tuple[int, int, int], threads: int, shared_bytes: int, stream: int,
               arguments: Sequence[tuple[str, Any]]) -> None:  # fmt: skip
        launch = (function, grid, tuple(arguments))
        if self.captured is not None:
            self.captured.append(launch)
        else:
            self._run(*launch)

    def begin_capture(self, stream: int) -> None:
        self.captured = []

    def end_capture(self, stream: int) -> int:
        assert self.captured is not None
        handle = self._handle()
        self.graphs[handle], self.captured = self.captured, None
        return handle

    def launch_graph(self, graph: int, stream: int) -> None:
        for launch in self.graphs[graph]:
            self._run(*launch)

    def destroy_graph(self, graph: int) -> None:
        del self.graphs[graph]

    def memory(self) -> tuple[int, int]:
        return 1 << 30, 2 << 30

    def close(self) -> None:
        left = [*self.buffers, *self.modules, *self.graphs, *self.live]
        assert not left

    def _room(self, address: int) -> int:
        """Bytes from *address* to the end of its allocation."""
        for start, (_, size) in self.buffers.items():
            if start <= address < start + max(size, 1):
                return start + size - address
        raise AssertionError(f"{address:#x} is in no allocation")

    def _run(self, function: int, grid: tuple[int, int, int], arguments: Sequence[tuple[str, Any]]) -> None:
        kernel = self.modules[function]
        parameters = [name for name, kind in kernel["signature"].items() if kind != "constexpr"]
        values: dict[str, Any] = dict(kernel["constants"])
        for name, (kind, value) in zip(parameters, arguments, strict=True):
            values[name] = self._tensor(value, kernel["signature"][name]) if kind == "pointer" else value
        kernel_function(kernel["name"])[grid](**values)
        if kernel["name"] == self.spoil:
            values.get("out", values.get("tokens", values.get("q_out")))[0] += 1

    def _tensor(self, address: int, kind: str) -> torch.Tensor:
        """Everything from *address* to the end of its allocation; null is a tensor of one element."""
        if not address:
            return torch.zeros(1, dtype=TYPES[kind])
        array = np.frombuffer(memoryview((ctypes.c_uint8 * self._room(address)).from_address(address)), np.uint8)
        return torch.from_numpy(array).view(TYPES[kind])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> InterpretedGpu:
    """Kernels are "compiled" to their own description, which this GPU interprets."""

    def describe(self: KernelCompiler, source: Source) -> Binary:
        kept = {"name": source.name, "signature": source.signature, "constants": source.constants}
        return Binary(source.name, json.dumps(kept).encode(), source.shape.num_warps, 0)

    monkeypatch.setattr(KernelCompiler, "_assemble", describe)
    monkeypatch.setattr(compiler, "resource_usage", lambda cubin: ResourceUsage(64, 0))
    return InterpretedGpu()
