"""What CUDA is asked for, with which arguments, and how its refusals read: on bindings that write down every call."""

import ctypes
import threading
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from castline.engines.errors import EngineError
from castline.plugins.tensorrt import cuda_driver
from castline.plugins.tensorrt.cuda_driver import CudaDriver


class Status(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2


ANSWERS: dict[str, tuple[Any, ...]] = {
    "cuDeviceGetCount": (2,),
    "cuDeviceGet": (1,),
    "cuDevicePrimaryCtxRetain": (70,),
    "cuMemAlloc": (0x7000,),
    "cuMemGetInfo": (3000, 8000),
    "cuStreamCreate": (11,),
    "cuEventCreate": (12,),
    "cuEventElapsedTime": (1.5,),
    "cuModuleLoadData": (13,),
    "cuModuleGetFunction": (14,),
    "cuStreamEndCapture": (15,),
    "cuGraphInstantiate": (16,),
    "cuDeviceGetName": (b"NVIDIA L4\0\0\0",),
    "cuDeviceGetAttribute": (89,),
    "cuDriverGetVersion": (13020,),
    "cuGetErrorName": (b"CUDA_ERROR_INVALID_VALUE",),
    "cuGetErrorString": (b"invalid argument",),
}


class Bindings:
    """Stands for `cuda.bindings.driver`: results as it gives them, a tuple that begins with a status."""

    CUresult = Status
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
    CUevent_flags = SimpleNamespace(CU_EVENT_DEFAULT=0)
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL="thread local")
    CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="max shared")
    CUdevice_attribute = SimpleNamespace(
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR=75,
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR=76,
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT=16,
        CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE=38,
    )

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing: dict[str, Status] = {}
        self.threads: set[int] = set()
        """That made the context current."""
        self.host: list[Any] = []

    def __getattr__(self, name: str) -> Callable[..., tuple[Any, ...]]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name in self.failing:
                return (self.failing[name], *[None] * len(ANSWERS.get(name, ())))
            if name == "cuCtxSetCurrent":
                self.threads.add(threading.get_ident())
            if name == "cuMemHostAlloc":
                self.host.append((ctypes.c_uint8 * arguments[0])())
                return Status.CUDA_SUCCESS, ctypes.addressof(self.host[-1])
            return (Status.CUDA_SUCCESS, *ANSWERS.get(name, ()))

        return call

    def last(self, count: int = 1) -> list[tuple[Any, ...]]:
        return self.calls[-count:]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    bindings = Bindings()
    monkeypatch.setattr(cuda_driver, "_bindings", lambda: bindings)
    return bindings


@pytest.fixture
def driver(cuda: Bindings) -> CudaDriver:
    return CudaDriver(1)


def test_context_is_the_devices_primary_and_given_back_once(cuda: Bindings, driver: CudaDriver) -> None:
    """A context of our own would not be TensorRT's; one that is not released keeps the GPU's memory."""
    assert cuda.calls == [
        ("cuInit", 0),
        ("cuDeviceGetCount",),
        ("cuDeviceGet", 1),
        ("cuDevicePrimaryCtxRetain", 1),
        ("cuCtxSetCurrent", 70),
    ]
    driver.close()
    driver.close()
    assert cuda.calls[5:] == [("cuDevicePrimaryCtxRelease", 1)]
    with pytest.raises(EngineError, match="the GPU was closed"):
        driver.allocate(5)


def test_context_is_current_in_whichever_thread_calls(cuda: Bindings, driver: CudaDriver) -> None:
    """An engine is loaded in one thread and may run in another, where no context is current until someone says so."""
    seen: list[int] = []

    def use() -> None:
        driver.synchronize(3)
        driver.synchronize(3)
        seen.append(threading.get_ident())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join(60)
    assert seen[0] in cuda.threads
    assert [call[0] for call in cuda.last(3)] == ["cuCtxSetCurrent", "cuStreamSynchronize", "cuStreamSynchronize"]


@pytest.mark.parametrize(("device", "count", "said"), [(2, 2, "there are 2: give 0 to 1"), (0, 0, "there is none")])
def test_missing_device_is_named(cuda: Bindings, monkeypatch: pytest.MonkeyPatch, device: int, count: int,
                                 said: str) -> None:  # fmt: skip
    monkeypatch.setitem(ANSWERS, "cuDeviceGetCount", (count,))
    with pytest.raises(EngineError, match=f"GPU {device} was asked for, and {said}"):
        CudaDriver(device)


def test_no_driver_is_said_in_words(cuda: Bindings, monkeypatch: pytest.MonkeyPatch) -> None:
    """What most users of a wrong machine see first."""

    def missing(_flags: int) -> None:
        raise RuntimeError("cannot be found")

    monkeypatch.setattr(cuda, "cuInit", missing, raising=False)
    with pytest.raises(EngineError, match=r"no NVIDIA driver \(libcuda.so.1\) on this machine: cannot be found"):
        CudaDriver()


def test_a_context_that_is_refused_is_released(cuda: Bindings) -> None:
    cuda.failing["cuCtxSetCurrent"] = Status.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(EngineError, match="making the GPU's context current: cuCtxSetCurrent gave"):
        CudaDriver()
    assert cuda.last() == [("cuDevicePrimaryCtxRelease", 1)]


def test_errors_have_cudas_name_its_words_and_what_was_done(cuda: Bindings, driver: CudaDriver) -> None:
    """ "Error 1" sends its reader to a header file."""
    cuda.failing["cuStreamSynchronize"] = Status.CUDA_ERROR_INVALID_VALUE
    words = r"waiting for the GPU: cuStreamSynchronize gave CUDA_ERROR_INVALID_VALUE \(invalid argument\)"
    with pytest.raises(EngineError, match=words):
        driver.synchronize(4)


def test_every_failing_call_raises(cuda: Bindings, driver: CudaDriver) -> None:
    """A status that is dropped turns into wrong tokens later."""
    pinned = driver.allocate_pinned(64)
    uses: dict[str, Callable[[], object]] = {
        "cuMemAlloc": lambda: driver.allocate(1),
        "cuMemFree": lambda: driver.free(1),
        "cuMemHostAlloc": lambda: driver.allocate_pinned(1),
        "cuMemFreeHost": lambda: driver.free_pinned(pinned),
        "cuMemcpyHtoDAsync": lambda: driver.copy_to_device(1, pinned, 2),
        "cuMemcpyDtoHAsync": lambda: driver.copy_to_host(pinned, 1, 2),
        "cuMemcpyDtoDAsync": lambda: driver.copy_on_device(1, 2, 3, 4),
        "cuMemsetD8Async": lambda: driver.fill(1, 2, 3, 4),
        "cuStreamCreate": driver.create_stream,
        "cuStreamDestroy": lambda: driver.destroy_stream(1),
        "cuEventCreate": driver.create_event,
        "cuEventDestroy": lambda: driver.destroy_event(1),
        "cuEventRecord": lambda: driver.record(1, 2),
        "cuStreamWaitEvent": lambda: driver.wait(1, 2),
        "cuEventSynchronize": lambda: driver.synchronize_event(1),
        "cuEventElapsedTime": lambda: driver.elapsed_ms(1, 2),
        "cuModuleLoadData": lambda: driver.load_module(b"x"),
        "cuModuleUnload": lambda: driver.unload_module(1),
        "cuModuleGetFunction": lambda: driver.function(1, "x", 0),
        "cuFuncSetAttribute": lambda: driver.function(1, "x", 60_000),
        "cuLaunchKernel": lambda: driver.launch(1, (1, 1, 1), 32, 0, 2, []),
        "cuStreamBeginCapture": lambda: driver.begin_capture(1),
        "cuStreamEndCapture": lambda: driver.end_capture(1),
        "cuGraphInstantiate": lambda: driver.end_capture(1),
        "cuGraphDestroy": lambda: driver.end_capture(1),
        "cuGraphLaunch": lambda: driver.launch_graph(1, 2),
        "cuGraphExecDestroy": lambda: driver.destroy_graph(1),
        "cuMemGetInfo": driver.memory,
        "cuDevicePrimaryCtxRelease": driver.close,
    }
    for name, use in uses.items():
        cuda.failing = {name: Status.CUDA_ERROR_INVALID_VALUE}
        with pytest.raises(EngineError, match=f"{name} gave CUDA_ERROR_INVALID_VALUE"):
            use()


def test_a_driver_too_old_is_said(cuda: Bindings, driver: CudaDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda-bindings looks a function up at its first use, and raises an error of its own where it is not there."""

    def missing(*_arguments: object) -> None:
        raise RuntimeError("function cuGraphInstantiateWithFlags is not found")

    monkeypatch.setattr(cuda, "cuGraphInstantiate", missing, raising=False)
    with pytest.raises(EngineError, match=r"instantiating a captured graph: .* is not found; update the NVIDIA driver"):
        driver.end_capture(1)


def test_out_of_memory_says_how_much(cuda: Bindings, driver: CudaDriver) -> None:
    cuda.failing["cuMemAlloc"] = Status.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(EngineError, match=r"5,000 bytes were asked for, 3,000 of 8,000 are free; lower --memory"):
        driver.allocate(5000)


def test_page_locked_memory_is_an_array_over_cudas_own(cuda: Bindings, driver: CudaDriver) -> None:
    """Copies from any other memory are synchronous, and one that outlives its free is written to by the GPU."""
    memory = driver.allocate_pinned(48)
    memory[:] = np.arange(48)
    assert bytes(cuda.host[0]) == bytes(range(48))
    assert memory.ctypes.data == ctypes.addressof(cuda.host[0])
    with pytest.raises(EngineError, match="no whole allocation"):
        driver.free_pinned(memory[8:])
    with pytest.raises(EngineError, match="1 allocations of page-locked memory were not freed"):
        CudaDriver.close(driver)
    other = CudaDriver(1)
    kept = other.allocate_pinned(8)
    other.free_pinned(kept)
    assert cuda.last() == [("cuMemFreeHost", kept.ctypes.data)]
    other.close()


def test_copies_and_fills(cuda: Bindings, driver: CudaDriver) -> None:
    """Source and target swapped, or bytes taken for elements, corrupts memory far from the mistake."""
    memory = driver.allocate_pinned(64)
    driver.copy_to_device(0x7000, memory[16:48], 9)
    driver.copy_to_host(memory[:8], 0x7100, 9)
    driver.copy_on_device(0x1, 0x2, 300, 9)
    driver.fill(0x7000, 255, 300, 9)
    base = memory.ctypes.data
    assert cuda.last(4) == [
        ("cuMemcpyHtoDAsync", 0x7000, base + 16, 32, 9),
        ("cuMemcpyDtoHAsync", base, 0x7100, 8, 9),
        ("cuMemcpyDtoDAsync", 0x1, 0x2, 300, 9),
        ("cuMemsetD8Async", 0x7000, 255, 300, 9),
    ]
    before = len(cuda.calls)
    driver.copy_to_device(0x7000, memory[:0], 9)  # CUDA takes a length of 0 for an error in some of these
    driver.fill(0x7000, 0, 0, 9)
    assert len(cuda.calls) == before
    with pytest.raises(EngineError, match="not contiguous"):
        driver.copy_to_device(0x7000, memory[::2], 9)


def test_arguments_of_a_launch(cuda: Bindings, driver: CudaDriver) -> None:
    """A kernel reads its arguments by size and place: each needs its own type, and Triton's kernels two more nulls."""
    typed = [("pointer", 2**40 + 16), ("i32", -1), ("i64", 2**33), ("f32", 0.5)]
    driver.launch(14, (7, 2, 1), 128, 4096, 11, typed)
    name, function, *sizes, stream, (values, types), extra = cuda.calls[-1]
    assert (name, function, sizes, stream, extra) == ("cuLaunchKernel", 14, [7, 2, 1, 128, 1, 1, 4096], 11, 0)
    assert values == (2**40 + 16, -1, 2**33, 0.5, 0, 0)
    pointer = ctypes.c_void_p
    assert types == (pointer, ctypes.c_int32, ctypes.c_int64, ctypes.c_float, pointer, pointer)


@pytest.mark.parametrize(("shared_bytes", "asked"), [(48 << 10, False), ((48 << 10) + 1, True)])
def test_leave_is_asked_for_large_shared_memory_alone(cuda: Bindings, driver: CudaDriver, shared_bytes: int,
                                                      asked: bool) -> None:  # fmt: skip
    """Without it the launch fails with "invalid argument"."""
    assert driver.function(13, "decode", shared_bytes) == 14
    calls = [call for call in cuda.calls if call[0] == "cuFuncSetAttribute"]
    assert calls == ([("cuFuncSetAttribute", 14, "max shared", shared_bytes)] if asked else [])
    assert ("cuModuleGetFunction", 13, b"decode") in cuda.calls


def test_capture(cuda: Bindings, driver: CudaDriver) -> None:
    """Thread-local: another thread's allocation must not break it; and the template is not kept beside the graph."""
    driver.begin_capture(11)
    graph = driver.end_capture(11)
    driver.launch_graph(graph, 11)
    driver.destroy_graph(graph)
    assert cuda.last(6) == [
        ("cuStreamBeginCapture", 11, "thread local"),
        ("cuStreamEndCapture", 11),
        ("cuGraphInstantiate", 15, 0),
        ("cuGraphDestroy", 15),
        ("cuGraphLaunch", 16, 11),
        ("cuGraphExecDestroy", 16),
    ]


def test_streams_and_events(cuda: Bindings, driver: CudaDriver) -> None:
    """A stream that waits for the default one would serialise what is meant to overlap."""
    stream, event = driver.create_stream(), driver.create_event()
    driver.record(event, stream)
    driver.wait(stream, event)
    driver.synchronize_event(event)
    assert driver.elapsed_ms(event, 99) == 1.5
    assert cuda.last(6) == [
        ("cuStreamCreate", 1),
        ("cuEventCreate", 0),
        ("cuEventRecord", 12, 11),
        ("cuStreamWaitEvent", 11, 12, 0),
        ("cuEventSynchronize", 12),
        ("cuEventElapsedTime", 12, 99),
    ]


def test_facts_of_the_device(cuda: Bindings, driver: CudaDriver) -> None:
    assert (driver.device_name, driver.cuda_version, driver.memory()) == ("NVIDIA L4", "13.2", (3000, 8000))
    assert driver.compute_capability == (89, 89)
    assert [call[1] for call in cuda.last(2)] == [75, 76]
    assert driver.multiprocessors == driver.l2_bytes == 89
    assert [call[1:] for call in cuda.last(2)] == [(16, 1), (38, 1)]


def test_the_real_bindings_have_what_is_called(cuda: Bindings) -> None:
    """A name that NVIDIA renamed fails on the first GPU, and nowhere before."""
    real = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    for name in (*ANSWERS, "cuInit", "cuCtxSetCurrent", "cuFuncSetAttribute", "cuLaunchKernel", "cuMemHostAlloc"):
        assert hasattr(real, name), name
    for group in ("CUstream_flags", "CUevent_flags", "CUstreamCaptureMode", "CUfunction_attribute",
                  "CUdevice_attribute"):  # fmt: skip
        for name in vars(getattr(Bindings, group)):
            assert hasattr(getattr(real, group), name), name
    assert hasattr(real.CUresult, "CUDA_ERROR_OUT_OF_MEMORY")
