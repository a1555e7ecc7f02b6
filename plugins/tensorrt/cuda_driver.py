"""The real driver: `castline.plugins.tensorrt.driver.Driver` over NVIDIA's `cuda-bindings`, with no toolkit.

One object is one device's primary context, the one that TensorRT uses as well, current in every thread that calls. One
thread calls at a time.
"""

import ctypes
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from castline.engines.errors import EngineError
from castline.plugins.tensorrt.driver import LaunchValue

PLAIN_SHARED_BYTES: Final = 48 << 10
"""Dynamic shared memory of a block that needs no leave."""
STATIC_NAME_BYTES: Final = 256
_C_TYPES: Final[dict[str, Any]] = {
    "pointer": ctypes.c_void_p,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
_SCRATCH: Final = ((0, ctypes.c_void_p), (0, ctypes.c_void_p))
"""Triton's kernels take two more pointers, to scratch memory that ours do not use."""


class CudaDriver:
    """See `Driver` for each method. `close` gives the context back."""

    def __init__(self, device: int = 0) -> None:
        """Raises EngineError where there is no driver, no such device, or it does not answer."""
        self._cuda = _bindings()
        self._pinned: dict[int, int] = {}
        """Address → bytes, of page-locked memory."""
        self._context: Any = None
        self._thread = threading.local()
        _start(self._cuda)
        count = self._plain("cuDeviceGetCount", what="counting GPUs")
        if not 0 <= device < count:
            have = f"there are {count}: give 0 to {count - 1}" if count else "there is none"
            raise EngineError(f"GPU {device} was asked for, and {have}")
        self._device = self._plain("cuDeviceGet", device, what=f"opening GPU {device}")
        self._context = self._plain("cuDevicePrimaryCtxRetain", self._device, what=f"opening GPU {device}")
        try:
            self._make_current()
        except EngineError:
            self.close()
            raise

    # About the device

    @property
    def device_name(self) -> str:
        name: bytes = self._call("cuDeviceGetName", STATIC_NAME_BYTES, self._device, what="reading the GPU's name")
        return name.split(b"\0")[0].decode(errors="replace")

    @property
    def compute_capability(self) -> tuple[int, int]:
        return self._attribute("COMPUTE_CAPABILITY_MAJOR"), self._attribute("COMPUTE_CAPABILITY_MINOR")

    @property
    def multiprocessors(self) -> int:
        return self._attribute("MULTIPROCESSOR_COUNT")

    @property
    def l2_bytes(self) -> int:
        return self._attribute("L2_CACHE_SIZE")

    @property
    def cuda_version(self) -> str:
        """Newest that the driver supports: ``13.0``."""
        number: int = self._call("cuDriverGetVersion", what="reading the driver's version")
        return f"{number // 1000}.{number % 1000 // 10}"

    # Memory

    def allocate(self, num_bytes: int) -> int:
        what = f"allocating {num_bytes:,} bytes of device memory"
        self._make_current()
        status, address = _parts(self._cuda.cuMemAlloc(num_bytes))
        if status == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            free, total = self.memory()
            raise EngineError(
                f"the GPU is out of memory: {num_bytes:,} bytes were asked for, {free:,} of {total:,} are free; "
                "lower --memory-utilization or --kv-blocks, or stop what else uses the GPU"
            )
        self._check(status, "cuMemAlloc", what)
        return int(address)

    def free(self, address: int) -> None:
        self._call("cuMemFree", address, what=f"freeing device memory at {address:#x}")

    def allocate_pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        what = f"allocating {num_bytes:,} bytes of page-locked host memory"
        address = int(self._call("cuMemHostAlloc", num_bytes, 0, what=what))
        self._pinned[address] = num_bytes
        return np.frombuffer(memoryview((ctypes.c_uint8 * num_bytes).from_address(address)).cast("B"), np.uint8)

    def free_pinned(self, memory: NDArray[np.uint8]) -> None:
        address = memory.ctypes.data
        if self._pinned.get(address) != memory.nbytes:
            raise EngineError(f"freeing page-locked memory at {address:#x}: it is no whole allocation of this driver's")
        self._call("cuMemFreeHost", address, what=f"freeing page-locked memory at {address:#x}")
        del self._pinned[address]

    def copy_to_device(self, address: int, source: NDArray[np.uint8], stream: int) -> None:
        if source.nbytes:
            what = f"copying {source.nbytes:,} bytes to the GPU"
            self._call("cuMemcpyHtoDAsync", address, _host(source, what), source.nbytes, stream, what=what)

    def copy_to_host(self, target: NDArray[np.uint8], address: int, stream: int) -> None:
        if target.nbytes:
            what = f"copying {target.nbytes:,} bytes from the GPU"
            self._call("cuMemcpyDtoHAsync", _host(target, what), address, target.nbytes, stream, what=what)

    def copy_on_device(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        if num_bytes:
            what = f"copying {num_bytes:,} bytes on the GPU"
            self._call("cuMemcpyDtoDAsync", target, source, num_bytes, stream, what=what)

    def fill(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        if num_bytes:
            what = f"setting {num_bytes:,} bytes on the GPU"
            self._call("cuMemsetD8Async", address, value, num_bytes, stream, what=what)

    # Streams and events

    def create_stream(self) -> int:
        """Independent of the default stream, on which nothing of ours runs."""
        flags = int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(self._call("cuStreamCreate", flags, what="creating a stream"))

    def destroy_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy", stream, what="destroying a stream")

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream, what="waiting for the GPU")

    def create_event(self) -> int:
        """With a time stamp, which `elapsed_ms` reads."""
        flags = int(self._cuda.CUevent_flags.CU_EVENT_DEFAULT)
        return int(self._call("cuEventCreate", flags, what="creating an event"))

    def destroy_event(self, event: int) -> None:
        self._call("cuEventDestroy", event, what="destroying an event")

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream, what="recording an event")

    def wait(self, stream: int, event: int) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0, what="making a stream wait")

    def synchronize_event(self, event: int) -> None:
        self._call("cuEventSynchronize", event, what="waiting for the GPU")

    def elapsed_ms(self, start: int, end: int) -> float:
        return float(self._call("cuEventElapsedTime", start, end, what="reading the time between events"))

    # Kernels

    def load_module(self, cubin: bytes) -> int:
        what = f"loading a kernel of {len(cubin):,} bytes"
        return int(self._call("cuModuleLoadData", cubin, what=what))

    def unload_module(self, module: int) -> None:
        self._call("cuModuleUnload", module, what="unloading a kernel")

    def function(self, module: int, entry: str, shared_bytes: int) -> int:
        function = int(self._call("cuModuleGetFunction", module, entry.encode(), what=f"finding kernel {entry}"))
        if shared_bytes > PLAIN_SHARED_BYTES:
            attribute = self._cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            what = f"giving kernel {entry} {shared_bytes:,} bytes of shared memory"
            self._call("cuFuncSetAttribute", function, attribute, shared_bytes, what=what)
        return function

    def launch(
        self,
        function: int,
        grid: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        arguments: Sequence[tuple[str, LaunchValue]],
    ) -> None:
        packed = [(value, _C_TYPES[kind]) for kind, value in arguments]
        values, types = zip(*packed, *_SCRATCH, strict=True)
        what = f"launching a kernel on a grid of {' x '.join(map(str, grid))} blocks of {threads} threads"
        block = (threads, 1, 1)
        self._call("cuLaunchKernel", function, *grid, *block, shared_bytes, stream, (values, types), 0, what=what)

    # Graphs

    def begin_capture(self, stream: int) -> None:
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call("cuStreamBeginCapture", stream, mode, what="beginning to capture a graph")

    def end_capture(self, stream: int) -> int:
        graph = self._call("cuStreamEndCapture", stream, what="capturing a graph")
        try:
            return int(self._call("cuGraphInstantiate", graph, 0, what="instantiating a captured graph"))
        finally:
            self._call("cuGraphDestroy", graph, what="destroying a captured graph")

    def launch_graph(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream, what="launching a graph")

    def destroy_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph, what="destroying a graph")

    # Device

    def memory(self) -> tuple[int, int]:
        free, total = self._call("cuMemGetInfo", what="reading the GPU's memory")
        return int(free), int(total)

    def close(self) -> None:
        """May be called again. Raises EngineError where page-locked memory was not freed, once the context is back."""
        if self._context is None:
            return
        self._context = None
        self._plain("cuDevicePrimaryCtxRelease", self._device, what="closing the GPU")
        if self._pinned:
            raise EngineError(f"closing the GPU: {len(self._pinned)} allocations of page-locked memory were not freed")

    def _attribute(self, name: str) -> int:
        attribute = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(self._call("cuDeviceGetAttribute", attribute, self._device, what=f"asking the GPU for {name}"))

    def _call(self, name: str, *arguments: Any, what: str) -> Any:
        """The result of a driver call in this driver's context: None, one value or several.

        Raises EngineError that says *what* failed.
        """
        self._make_current()
        return self._plain(name, *arguments, what=what)

    def _make_current(self) -> None:
        """A context is current in the threads that said so, and an engine need not run in the thread that loads it."""
        if self._context is None:
            raise EngineError("the GPU was closed")
        if not getattr(self._thread, "has_context", False):
            self._plain("cuCtxSetCurrent", self._context, what="making the GPU's context current")
            self._thread.has_context = True

    def _plain(self, name: str, *arguments: Any, what: str) -> Any:
        try:
            status, *results = getattr(self._cuda, name)(*arguments)
        except RuntimeError as error:  # of cuda-bindings: a function that came with a newer driver
            raise EngineError(f"{what}: {error}; update the NVIDIA driver") from None
        self._check(status, name, what)
        return results[0] if len(results) == 1 else tuple(results)

    def _check(self, status: Any, name: str, what: str) -> None:
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise EngineError(f"{what}: {name} gave {_words(self._cuda, status)}")


def _bindings() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError:
        raise EngineError(
            "cuda-bindings is not installed, and an engine for a GPU runs through it: pip install 'castline[rtx]' or "
            "'castline[tensorrt]'"
        ) from None


def _start(cuda: Any) -> None:
    try:
        (status,) = cuda.cuInit(0)
    except RuntimeError as error:  # what cuda-bindings raises where the driver's library is missing
        raise EngineError(
            f"no NVIDIA driver (libcuda.so.1) on this machine: {error}; an engine for a GPU needs both"
        ) from None
    if status != cuda.CUresult.CUDA_SUCCESS:
        raise EngineError(
            f"the NVIDIA driver does not start: cuInit gave {_words(cuda, status)}; check it with nvidia-smi"
        )


def _words(cuda: Any, status: Any) -> str:
    """CUDA's own name and description of an error: ``CUDA_ERROR_INVALID_VALUE (invalid argument)``."""
    texts = []
    for call in (cuda.cuGetErrorName, cuda.cuGetErrorString):
        found, text = _parts(call(status))
        texts.append(text.decode() if found == cuda.CUresult.CUDA_SUCCESS and text else f"error {int(status)}")
    return f"{texts[0]} ({texts[1]})"


def _parts(answer: tuple[Any, ...]) -> tuple[Any, Any]:
    return answer[0], answer[1] if len(answer) > 1 else None


def _host(memory: NDArray[np.uint8], what: str) -> int:
    """Address of contiguous memory: a copy takes bytes, not strides."""
    if not memory.flags.c_contiguous:
        raise EngineError(f"{what}: the host's array is not contiguous")
    return memory.ctypes.data
