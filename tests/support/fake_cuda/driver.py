"""`castline.plugins.tensorrt.driver.Driver` in memory. Whatever a GPU would not forgive raises DriverMisuse.

Checked of every call: handles exist and are alive; copies and kernels stay within one live allocation and within live
pinned memory; launches have the kernel's own arguments, threads and shared memory; nothing is freed that queued work
uses; bytes are not touched by two streams, or by a stream and the host, with nothing that orders them; a capture
contains nothing that cannot be captured, and a graph's pointers are checked again whenever it is launched.

Work takes effect only when the host waits for it. Kernels do what their stand-in does (`fake_cuda.stand_ins`); without
one they only touch their bytes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.driver import LaunchValue
from castline.plugins.tensorrt.kernel_set import KernelSpec
from fake_cuda.hazards import DriverMisuse, Touched
from fake_cuda.kernels import REACHES, Call, Reaches
from fake_cuda.launches import MOST_SHARED_BYTES, Function, check_launch, touches, unknown_touches
from fake_cuda.memory import UNWRITTEN, DeviceMemory
from fake_cuda.pinned import PinnedArray, PinnedBuffer, address_of, pinned_array
from fake_cuda.queueing import WorkQueue
from fake_cuda.work import Record, Touch, Work

StandIn = Callable[[DeviceMemory, Call], None]


class FakeDriver:
    def __init__(
        self,
        cubins: Mapping[bytes, KernelSpec] | None = None,
        stand_ins: Mapping[str, StandIn] | None = None,
        reaches: Mapping[str, Callable[[Call], Reaches]] | None = None,
        total_bytes: int = 1 << 30,
    ) -> None:
        """*cubins* says what each image is; *stand_ins* and *reaches* (beside those of an engine's own kernels) say, by
        a kernel's name, what it does and which bytes it touches."""
        self.device = DeviceMemory(total_bytes)
        self.closed = False
        self.launched: list[str] = []
        """Kernels and ``graph``, as they were queued."""
        self.failing: dict[str, str] = {}
        """Kernel or driver call → the words it fails with: a kernel when it is executed, a call at once."""
        self._cubins, self._stand_ins = dict(cubins or {}), dict(stand_ins or {})
        self._reaches = {**REACHES, **(reaches or {})}
        self._queue = WorkQueue(self.device)
        self._next_handle = 1
        self._streams: set[int] = set()
        self._events: dict[int, Record | None] = {}
        self._modules: dict[int, bytes] = {}
        self._functions: dict[int, Function] = {}
        self._graphs: dict[int, tuple[Work, ...]] = {}
        self._graph_uses: dict[int, Touched] = {}
        self._module_uses: dict[int, Touched] = {}
        self._pinned: list[PinnedBuffer] = []
        self._capture: tuple[int, list[Work]] | None = None
        self._device_fault: str | None = None
        self._ready = False

    def forbid_allocation(self) -> None:
        """From now on nothing may be allocated, created, loaded or captured."""
        self._ready = True

    # Device memory

    def allocate(self, num_bytes: int) -> int:
        self._may("allocate", makes=True)
        if num_bytes <= 0:
            raise DriverMisuse(f"allocation of {num_bytes} bytes")
        if num_bytes > self.device.free_bytes:
            raise EngineError("out of memory")
        return self.device.allocate(num_bytes)

    def free(self, address: int) -> None:
        self._may("free")
        allocation = self.device.at(address)
        self._queue.not_busy(allocation.touched, "free")
        self.device.free(allocation)

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        self._may("allocate_pinned", makes=True)
        if num_bytes <= 0:
            raise DriverMisuse(f"pinned allocation of {num_bytes} bytes")
        buffer = PinnedBuffer(np.full(num_bytes, UNWRITTEN, np.uint8), self._queue.check_host)
        self._pinned.append(buffer)
        return pinned_array(buffer)

    def free_pinned(self, memory: NDArray[np.uint8]) -> None:
        self._may("free_pinned")
        buffer, offset = self._pinned_range(memory, "free_pinned")
        if offset or memory.nbytes != len(buffer.data):
            raise DriverMisuse("free_pinned: a part of pinned memory, and not all of it")
        self._queue.not_busy(buffer.touched, "free_pinned")
        buffer.alive = False

    def copy_to_device(self, address: int, source: NDArray[np.uint8], stream: int) -> None:
        self._may("copy_to_device", capturable=True)
        buffer, offset = self._pinned_range(source, "copy_to_device")
        data, size = buffer.data[offset : offset + source.nbytes], source.nbytes
        as_queued: list[NDArray[np.uint8]] = []

        def copy() -> None:
            if not np.array_equal(data, as_queued.pop(0)):
                raise DriverMisuse("copy_to_device: the host changed the source before it was copied")
            self.device.view(address, size)[:] = data

        touches = (Touch(offset, size, False, buffer), Touch(address, size, True))
        self._submit(stream, Work("copy_to_device", touches, copy, queued=lambda: as_queued.append(data.copy())))

    def copy_to_host(self, target: NDArray[np.uint8], address: int, stream: int) -> None:
        self._may("copy_to_host", capturable=True)
        buffer, offset = self._pinned_range(target, "copy_to_host")
        data, size = buffer.data[offset : offset + target.nbytes], target.nbytes

        def copy() -> None:
            data[:] = self.device.view(address, size)

        touches = (Touch(address, size, False), Touch(offset, size, True, buffer))
        self._submit(stream, Work("copy_to_host", touches, copy, queued=lambda: data.fill(UNWRITTEN)))

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        self._may("copy_on_device", capturable=True)
        if source < target + num_bytes and target < source + num_bytes:
            raise DriverMisuse("copy_on_device: source and target overlap")

        def copy() -> None:
            self.device.view(target, num_bytes)[:] = self.device.view(source, num_bytes)

        touches = (Touch(source, num_bytes, False), Touch(target, num_bytes, True))
        self._submit(stream, Work("copy_on_device", touches, copy))

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        self._may("fill", capturable=True)
        if not 0 <= value < 256:
            raise DriverMisuse(f"fill: {value} is no byte")
        work = Work(
            "fill",
            (Touch(address, num_bytes, True),),
            lambda: self.device.view(address, num_bytes).fill(value),
        )
        self._submit(stream, work)

    # Streams and events

    def create_stream(self) -> int:
        self._may("create_stream", makes=True)
        stream = self._handle()
        self._streams.add(stream)
        return stream

    def destroy_stream(self, stream: int) -> None:
        self._may("destroy_stream")
        self._known_stream(stream)
        if not self._queue.is_idle(stream):
            raise DriverMisuse(f"stream {stream} is destroyed with work queued on it")
        self._streams.discard(stream)

    def synchronize(self, stream: int) -> None:
        self._may("synchronize")
        self._known_stream(stream)
        self._queue.synchronize(stream)
        self._report_fault()

    def create_event(self) -> int:
        self._may("create_event", makes=True)
        event = self._handle()
        self._events[event] = None
        return event

    def destroy_event(self, event: int) -> None:
        self._may("destroy_event")
        self._known_event(event)
        del self._events[event]

    def record(self, event: int, stream: int) -> None:
        self._may("record")
        self._known_event(event)
        self._known_stream(stream)
        self._events[event] = self._queue.record(stream)

    def wait(self, stream: int, event: int) -> None:
        self._may("wait")
        self._known_stream(stream)
        self._queue.wait(stream, self._recorded(event))

    def synchronize_event(self, event: int) -> None:
        self._may("synchronize_event")
        self._queue.synchronize_record(self._recorded(event))
        self._report_fault()

    def elapsed_ms(self, start: int, end: int) -> float:
        self._may("elapsed_ms")
        records = [self._recorded(start), self._recorded(end)]
        if not all(map(self._queue.has_happened, records)):
            raise DriverMisuse("elapsed_ms: an event has not happened")
        return 0.01 * (sum(records[1].clock.values()) - sum(records[0].clock.values()))

    # Kernels

    def load_module(self, cubin: bytes) -> int:
        self._may("load_module", makes=True)
        module = self._handle()
        self._modules[module] = bytes(cubin)
        self._module_uses[module] = Touched()
        return module

    def unload_module(self, module: int) -> None:
        self._may("unload_module")
        if module not in self._modules:
            raise DriverMisuse(f"unload_module: {module} is no loaded module")
        self._queue.not_busy(self._module_uses[module], "unload_module")
        del self._modules[module]
        self._functions = {handle: one for handle, one in self._functions.items() if one.module != module}

    def function(self, module: int, entry: str, shared_bytes: int) -> int:
        self._may("function", makes=True)
        if module not in self._modules:
            raise DriverMisuse(f"function: {module} is no loaded module")
        kernel = self._cubins.get(self._modules[module])
        if kernel is not None and entry != kernel.entry:
            raise EngineError(f"named symbol not found: {entry}")
        if not 0 <= shared_bytes <= MOST_SHARED_BYTES:
            raise EngineError(f"invalid value: {shared_bytes} bytes of shared memory")
        handle = self._handle()
        self._functions[handle] = Function(module, kernel, entry, shared_bytes)
        return handle

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[tuple[str, LaunchValue]],
    ) -> None:
        self._may("launch", capturable=True)
        known = self._function(function)
        call = check_launch(known, grid, threads, shared_bytes, arguments)
        work = Work(
            f"launch of {known.name}",
            touches(call, self._reaches) if call else unknown_touches(arguments),
            partial(self._execute, call) if call else _nothing,
            needs=partial(self._function, function),
            uses=(self._module_uses[known.module],),
        )
        self._submit(stream, work)
        self.launched.append(known.name)

    # Graphs

    def begin_capture(self, stream: int) -> None:
        self._may("begin_capture", makes=True)
        self._known_stream(stream)
        self._capture = (stream, [])

    def end_capture(self, stream: int) -> int:
        if self._capture is None or self._capture[0] != stream:
            raise DriverMisuse(f"end_capture: stream {stream} is not captured")
        captured, self._capture = self._capture[1], None
        self._may("end_capture", makes=True)
        graph = self._handle()
        self._graphs[graph] = tuple(captured)
        self._graph_uses[graph] = Touched()
        return graph

    def launch_graph(self, graph: int, stream: int) -> None:
        self._may("launch_graph")
        self._known_stream(stream)
        if graph not in self._graphs:
            raise DriverMisuse(f"launch_graph: {graph} is no graph")
        for work in self._graphs[graph]:
            self._queue.enqueue(stream, work, self._graph_uses[graph])
        self.launched.append("graph")

    def destroy_graph(self, graph: int) -> None:
        self._may("destroy_graph")
        if graph not in self._graphs:
            raise DriverMisuse(f"destroy_graph: {graph} is no graph")
        self._queue.not_busy(self._graph_uses[graph], "destroy_graph")
        del self._graphs[graph]

    # Device

    def memory(self) -> tuple[int, int]:
        self._may("memory")
        return self.device.free_bytes, self.device.total_bytes

    def close(self) -> None:
        """Nothing may be left."""
        self._may("close")
        left = {
            "device memory": len(self.device.live),
            "pinned memory": sum(one.alive for one in self._pinned),
            "streams": len(self._streams),
            "events": len(self._events),
            "modules": len(self._modules),
            "graphs": len(self._graphs),
        }
        if any(left.values()):
            raise DriverMisuse(f"close: not released: {', '.join(f'{n} {what}' for what, n in left.items() if n)}")
        self.closed = True

    # Checks

    def _may(self, call: str, *, makes: bool = False, capturable: bool = False) -> None:
        if self.closed:
            raise DriverMisuse(f"{call} after close")
        if makes and self._ready:
            raise DriverMisuse(f"{call} after the engine was ready")
        if self._capture is not None and not capturable:
            raise DriverMisuse(f"{call} while a stream is captured")
        if call in self.failing:
            raise EngineError(self.failing[call])

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    def _known_stream(self, stream: int) -> None:
        if stream not in self._streams:
            raise DriverMisuse(f"{stream} is no stream")

    def _known_event(self, event: int) -> None:
        if event not in self._events:
            raise DriverMisuse(f"{event} is no event")

    def _recorded(self, event: int) -> Record:
        self._known_event(event)
        record = self._events[event]
        if record is None:
            raise DriverMisuse(f"event {event} was never recorded")
        return record

    def _function(self, function: int) -> Function:
        if function not in self._functions:
            raise DriverMisuse(f"launch: {function} is no function of a loaded module")
        return self._functions[function]

    def _pinned_range(self, memory: NDArray[np.uint8], what: str) -> tuple[PinnedBuffer, int]:
        if not isinstance(memory, PinnedArray) or memory.buffer is None:
            raise DriverMisuse(f"{what}: the host's memory is not pinned")
        if memory.dtype != np.uint8 or not memory.flags.c_contiguous:
            raise DriverMisuse(f"{what}: the host's memory is not contiguous bytes")
        if not memory.buffer.alive:
            raise DriverMisuse(f"{what}: use after free of pinned memory")
        return memory.buffer, address_of(memory) - memory.buffer.address

    # Work

    def _execute(self, call: Call) -> None:
        name = call.kernel.name
        if name in self.failing:
            self._device_fault = self.failing[name]
        stand_in = self._stand_ins.get(name)
        if stand_in is not None and self._device_fault is None:
            stand_in(self.device, call)

    def _submit(self, stream: int, work: Work) -> None:
        self._known_stream(stream)
        if self._capture is None:
            self._queue.enqueue(stream, work)
            return
        if self._capture[0] != stream:
            raise DriverMisuse(f"{work.what} on stream {stream} while stream {self._capture[0]} is captured")
        for touch in work.touches:
            self._queue.owner(touch, work.what)
        self._capture[1].append(work)

    def _report_fault(self) -> None:
        """As a real device: a fault is reported by whatever waits, and stays."""
        if self._device_fault is not None:
            raise EngineError(self._device_fault)


def _nothing() -> None:
    pass
