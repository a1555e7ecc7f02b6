"""What the figures were measured on, and whether it was left alone meanwhile. Linux."""

import os
import platform
import re
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.processes import TICKS
from benchmarks.settings import num_threads

FEATURES = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_int8",
    "amx_bf16",
)
ABILITIES = {
    "matrix units (AMX)": ("amx_int8", "amx_bf16"),
    "8-bit dot products (VNNI)": ("avx512_vnni", "avx_vnni"),
    "bf16 dot products (AVX512_BF16)": ("avx512_bf16",),
    "half-precision arithmetic (AVX512_FP16)": ("avx512_fp16",),
}
"""What a processor has in plain words, of the features that each goes by."""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
QUIET_SHARE = 0.06
"""Of the processors' time: others' work above this is worth a warning."""


@dataclass(frozen=True, slots=True)
class Machine:
    cpu: str
    cores: int
    features: tuple[str, ...]
    caches: dict[str, str]
    memory_gib: float
    system: str
    python: str
    huge_pages: str | None = None
    """Which processes get transparent huge pages: ``always``, ``madvise``, ``never``; None where it is not known."""

    @classmethod
    def here(cls) -> "Machine":
        cpuinfo = Path("/proc/cpuinfo").read_text()
        flags = set(_field(cpuinfo, "flags").split())
        memory_kib = int(_field(Path("/proc/meminfo").read_text(), "MemTotal").split()[0])
        return cls(
            cpu=_field(cpuinfo, "model name"),
            cores=num_threads(),
            features=tuple(feature for feature in FEATURES if feature in flags),
            caches=_caches(),
            memory_gib=memory_kib / 2**20,
            system=platform.platform(),
            python=platform.python_version(),
            huge_pages=_chosen(HUGE_PAGES),
        )

    def has(self, ability: str) -> bool:
        """*ability*: of ABILITIES."""
        return any(feature in self.features for feature in ABILITIES[ability])


def _field(text: str, name: str) -> str:
    match = re.search(rf"^{name}\s*:\s*(.+)$", text, re.MULTILINE)
    return match.group(1).strip() if match else "unknown"


def _chosen(setting: Path) -> str | None:
    """The word in brackets of a file that lists all choices."""
    if not setting.exists():
        return None
    match = re.search(r"\[(\w+)\]", setting.read_text())
    return match.group(1) if match else None


def _caches() -> dict[str, str]:
    """Level and kind → size, of the first processor."""
    caches = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        caches[f"L{level} {kind.lower()}"] = size
    return caches


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """Seconds of all processors together, since the machine started."""

    at: float
    busy: float
    stolen: float

    @classmethod
    def now(cls) -> "CpuTimes":
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        return cls(time.monotonic(), (user + nice + system + irq + softirq) / TICKS, steal / TICKS)

    def others_share(self, later: "CpuTimes", own_seconds: float) -> float:
        """Of the processors' time until *later*: taken by other processes, or by the host. 0 to 1."""
        wall = (later.at - self.at) * (os.cpu_count() or 1)
        taken = later.busy - self.busy - own_seconds + later.stolen - self.stolen
        return min(1.0, max(0.0, taken / wall)) if wall > 0 else 0.0


def own_cpu_seconds() -> float:
    """Of this process, and of those it started and has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def noise(seconds: float = 2.0) -> float:
    """The share of the processors' time that others take right now."""
    before, own = CpuTimes.now(), own_cpu_seconds()
    time.sleep(seconds)
    return before.others_share(CpuTimes.now(), own_cpu_seconds() - own)


def read_into_page_cache(files: list[Path]) -> None:
    """So that a start is measured with its files in memory."""
    for path in files:
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 22):
                    pass
