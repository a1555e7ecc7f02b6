"""The NVIDIA GPU of this machine, asked of the driver's own library: no torch, no toolkit, nothing allocated.

CUDA_VISIBLE_DEVICES is the driver's to honour, so device 0 is the one that a process would use.
"""

import ctypes
from dataclasses import dataclass
from typing import Any

from castline.engines.errors import EngineError
from castline.engines.manifest import Gpu
from castline.engines.sku import sku_of_device

CUDA_LIBRARY = "libcuda.so.1"
NVML_LIBRARY = "libnvidia-ml.so.1"
NO_DEVICE = (100, 34)
"""CUDA_ERROR_NO_DEVICE, and CUDA_ERROR_STUB_LIBRARY: a toolkit's stand-in for the driver's library."""
CAPABILITY_MAJOR, CAPABILITY_MINOR = 75, 76
NAME_BYTES = 256
BUS_ID_BYTES = 32


@dataclass(frozen=True, slots=True)
class FoundGpu:
    """One device. ``free_bytes`` is what a process could allocate now: the total where the driver does not say."""

    index: int
    device_name: str
    compute_capability: str
    total_bytes: int
    free_bytes: int
    driver_version: str
    """Of CUDA that the driver supports: ``13.0``."""

    def manifest(self) -> Gpu:
        """As a manifest records it; ``sku`` is empty for a device that castline does not know."""
        sku = sku_of_device(self.device_name)
        return Gpu(sku.name if sku else "", self.device_name, self.compute_capability)


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def detect_gpu(index: int = 0, cuda: Any = None, nvml: Any = None) -> FoundGpu | None:
    """Device *index*, or None where there is no driver or no device.

    *cuda* and *nvml* stand in for the driver's libraries. Raises EngineError where there is a driver that does not
    answer, or fewer devices than *index* asks for.
    """
    cuda = cuda if cuda is not None else _library(CUDA_LIBRARY)
    if cuda is None:
        return None
    status = cuda.cuInit(0)
    if status in NO_DEVICE:
        return None
    _check(status, "cuInit")
    count = ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    if count.value == 0:
        return None
    if not 0 <= index < count.value:
        raise EngineError(f"GPU {index} was asked for, and there are {count.value}: give 0 to {count.value - 1}")
    device = ctypes.c_int()
    _check(cuda.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    name = ctypes.create_string_buffer(NAME_BYTES)
    _check(cuda.cuDeviceGetName(name, NAME_BYTES, device), "cuDeviceGetName")
    total = ctypes.c_size_t()
    _check(cuda.cuDeviceTotalMem_v2(ctypes.byref(total), device), "cuDeviceTotalMem")
    version = ctypes.c_int()
    _check(cuda.cuDriverGetVersion(ctypes.byref(version)), "cuDriverGetVersion")
    capability = [_attribute(cuda, device, which) for which in (CAPABILITY_MAJOR, CAPABILITY_MINOR)]
    return FoundGpu(
        index=index,
        device_name=name.value.decode(errors="replace"),
        compute_capability=f"{capability[0]}.{capability[1]}",
        total_bytes=total.value,
        free_bytes=_free_bytes(cuda, device, nvml) or total.value,
        driver_version=f"{version.value // 1000}.{version.value % 1000 // 10}",
    )


def _attribute(cuda: Any, device: ctypes.c_int, which: int) -> int:
    value = ctypes.c_int()
    _check(cuda.cuDeviceGetAttribute(ctypes.byref(value), which, device), "cuDeviceGetAttribute")
    return value.value


def _free_bytes(cuda: Any, device: ctypes.c_int, nvml: Any) -> int | None:
    """From the management library: the driver itself tells only a process with a context, which takes memory."""
    nvml = nvml if nvml is not None else _library(NVML_LIBRARY)
    bus_id = ctypes.create_string_buffer(BUS_ID_BYTES)
    if nvml is None or cuda.cuDeviceGetPCIBusId(bus_id, BUS_ID_BYTES, device) or nvml.nvmlInit_v2():
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        if nvml.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle)):
            return None
        if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return int(memory.free)
    finally:
        nvml.nvmlShutdown()


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _check(status: int, call: str) -> None:
    if status:
        raise EngineError(
            f"the NVIDIA driver does not answer: {call} gave CUDA error {status}; check it with nvidia-smi "
            "(803 and 804: driver and kernel module are of different versions)"
        )
