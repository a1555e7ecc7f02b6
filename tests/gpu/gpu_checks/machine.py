"""The GPU that is checked: its driver, its facts, and how fast it copies."""

import platform
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol

from castline import __version__
from castline.engines.sku import sku_of_device
from castline.plugins.tensorrt.driver import Driver
from castline.plugins.tensorrt.kernel_bench import Stopwatch

PACKAGES = ("triton", "cuda-bindings", "tensorrt", "tensorrt_rtx_cu13_bindings", "numpy")
COPY_BYTES = 1 << 30


class GpuDriver(Driver, Protocol):
    """A driver that also tells what it drives, as `castline.plugins.tensorrt.cuda_driver.CudaDriver` does."""

    device_name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    l2_bytes: int
    cuda_version: str


@dataclass
class Machine:
    driver: GpuDriver
    quick: bool = False
    repeats: int = 30
    flush_bytes: int = 256 << 20
    copy_bytes: int = COPY_BYTES
    copy_gb_per_s: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self.watch = Stopwatch(self.driver, self.driver.l2_bytes, self.repeats, self.flush_bytes)
        self.copy_gb_per_s = self._measure_copy()

    @property
    def sku(self) -> str:
        found = sku_of_device(self.driver.device_name)
        return found.name if found is not None else ""

    def facts(self) -> dict[str, str]:
        major, minor = self.driver.compute_capability
        free, total = self.driver.memory()
        return {
            "GPU": f"{self.driver.device_name} (SKU {self.sku or 'unknown'})",
            "compute capability": f"{major}.{minor}, {self.driver.multiprocessors} multiprocessors",
            "memory": f"{total / 2**20:,.0f} MiB, {free / 2**20:,.0f} free, L2 {self.driver.l2_bytes / 2**20:,.0f} MiB",
            "copy bandwidth": f"{self.copy_gb_per_s:,.0f} GB/s, bytes read and written",
            "CUDA of the driver": self.driver.cuda_version,
            "versions": ", ".join([f"castline {__version__}", *map(_version, PACKAGES), platform.python_version()]),
        }

    def close(self) -> None:
        self.watch.close()

    def _measure_copy(self) -> float:
        driver = self.driver
        stream = driver.create_stream()
        source, target = driver.allocate(self.copy_bytes), driver.allocate(self.copy_bytes)
        try:
            took = self.watch.microseconds(
                lambda: driver.copy_on_device(target, source, self.copy_bytes, stream), stream
            )
        finally:
            driver.free(source)
            driver.free(target)
            driver.destroy_stream(stream)
        return 2 * self.copy_bytes / took / 1e3


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return f"no {package}"
