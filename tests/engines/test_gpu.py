"""The driver's device, seen through a driver that is a fake: every call that is made has a counterpart here."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest

from castline.engines import gpu as gpu_module
from castline.engines.errors import EngineError
from castline.engines.gpu import detect_gpu
from castline.engines.manifest import Gpu


@dataclass
class FakeCuda:
    """libcuda, as far as it is called. Handles are 100 + index, so that an index taken for a handle is noticed."""

    devices: list[tuple[str, tuple[int, int], int]]
    init: int = 0
    failing: str = ""
    calls: list[str] = field(default_factory=list)

    def _status(self, call: str) -> int:
        self.calls.append(call)
        return 999 if call == self.failing else 0

    def cuInit(self, flags: int) -> int:
        assert flags == 0
        self.calls.append("cuInit")
        return self.init

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = len(self.devices)
        return self._status("cuDeviceGetCount")

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 100 + index
        return self._status("cuDeviceGet")

    def cuDeviceGetName(self, buffer: Any, size: int, device: ctypes.c_int) -> int:
        name = self.devices[device.value - 100][0].encode()
        assert len(name) < size == len(buffer)
        buffer.value = name
        return self._status("cuDeviceGetName")

    def cuDeviceGetAttribute(self, value: Any, which: int, device: ctypes.c_int) -> int:
        value._obj.value = self.devices[device.value - 100][1][{75: 0, 76: 1}[which]]
        return self._status("cuDeviceGetAttribute")

    def cuDeviceTotalMem_v2(self, total: Any, device: ctypes.c_int) -> int:
        total._obj.value = self.devices[device.value - 100][2]
        return self._status("cuDeviceTotalMem")

    def cuDriverGetVersion(self, version: Any) -> int:
        version._obj.value = 13020
        return self._status("cuDriverGetVersion")

    def cuDeviceGetPCIBusId(self, buffer: Any, size: int, device: ctypes.c_int) -> int:
        buffer.value = f"0000:{device.value:02x}:00.0".encode()
        return self._status("cuDeviceGetPCIBusId")


@dataclass
class FakeNvml:
    """libnvidia-ml: every initialisation must be undone."""

    free: int
    handle_status: int = 0
    open: int = 0
    asked: str = ""

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Any, handle: Any) -> int:
        self.asked = bus_id.value.decode()
        handle._obj.value = 7
        return self.handle_status

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        assert handle.value == 7
        memory._obj.total, memory._obj.free, memory._obj.used = 10, self.free, 10 - self.free
        return 0


L4 = ("NVIDIA L4", (8, 9), 23_000 << 20)
H100 = ("NVIDIA H100 80GB HBM3", (9, 0), 80_000 << 20)


def test_the_selected_device_is_described() -> None:
    """C02: with several devices it is the one asked for that is compared, memory and all."""
    nvml = FakeNvml(free=5)
    found = detect_gpu(1, FakeCuda([L4, H100]), nvml)
    assert found is not None
    assert (found.index, found.device_name, found.compute_capability) == (1, "NVIDIA H100 80GB HBM3", "9.0")
    assert (found.total_bytes, found.free_bytes, found.driver_version) == (80_000 << 20, 5, "13.2")
    assert found.manifest() == Gpu("h100-sxm", "NVIDIA H100 80GB HBM3", "9.0")
    assert nvml.asked == "0000:65:00.0"
    assert nvml.open == 0


def test_an_unknown_device_has_no_sku() -> None:
    """A chip without a file must not pass for a similar one."""
    found = detect_gpu(0, FakeCuda([("NVIDIA GeForce RTX 4080", (8, 9), 1 << 34)]), FakeNvml(1))
    assert found is not None
    assert found.manifest() == Gpu("", "NVIDIA GeForce RTX 4080", "8.9")


def test_free_memory_falls_back_to_the_total() -> None:
    """Containers often lack the management library's permissions: no reason to refuse to run."""
    nvml = FakeNvml(free=5, handle_status=3)
    found = detect_gpu(0, FakeCuda([L4]), nvml)
    assert found is not None
    assert found.free_bytes == found.total_bytes == 23_000 << 20
    assert nvml.open == 0


@pytest.mark.parametrize("cuda", [FakeCuda([], init=100), FakeCuda([L4], init=34), FakeCuda([])])
def test_a_driver_without_a_device_is_none(cuda: FakeCuda) -> None:
    """A CPU machine with the driver's package, or a toolkit's stub library, is a CPU machine."""
    assert detect_gpu(0, cuda, FakeNvml(1)) is None


def test_no_driver_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual build machine: nothing is installed, and nothing is asked."""
    monkeypatch.setattr(gpu_module, "CUDA_LIBRARY", "libno_such_driver_of_ours.so.1")
    assert detect_gpu() is None


@pytest.mark.parametrize("call", ["cuDeviceGetCount", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute"])
def test_a_broken_driver_names_call_and_number(call: str) -> None:
    """A driver that fails is not a missing one: silence here would serve from the wrong device."""
    with pytest.raises(EngineError, match=rf"{call} gave CUDA error 999; check it with nvidia-smi"):
        detect_gpu(0, FakeCuda([L4], failing=call), FakeNvml(1))


def test_a_version_mismatch_is_explained() -> None:
    """803 is what an upgraded driver says until the reboot."""
    with pytest.raises(EngineError, match=r"cuInit gave CUDA error 803.*different versions"):
        detect_gpu(0, FakeCuda([L4], init=803), FakeNvml(1))


@pytest.mark.parametrize("index", [-1, 2])
def test_a_device_that_is_not_there(index: int) -> None:
    """C02: asked for by number, refused with how many there are."""
    with pytest.raises(EngineError, match=rf"GPU {index} was asked for, and there are 2: give 0 to 1"):
        detect_gpu(index, FakeCuda([L4, H100]), FakeNvml(1))
