"""Whether this host can hold a build, decided before a weight is read. Sizes in bytes."""

import os
from pathlib import Path

from castline.engines.errors import BuildError

BASE_BYTES = 768 << 20
"""torch, transformers, the exporter's graph and the tokenizer."""
WORKING_COPIES = 3
"""Copies of the largest tensor at one time: as stored, converted, packed."""


def build_bytes(num_parameters: int, largest_tensor: int) -> int:
    """Estimated peak of a build: the fp32 model once, room to work on its largest tensor, and the tools."""
    return 4 * (num_parameters + WORKING_COPIES * largest_tensor) + BASE_BYTES


def available_bytes() -> int:
    """Memory this process may still take: the host's, or what its control group leaves where that is less."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
        free = int(lines["MemAvailable"].split()[0]) * 1024
    else:
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, used = (_cgroup_number(name) for name in ("memory.max", "memory.current"))
    return free if limit is None or used is None else min(free, limit - used)


def _cgroup_number(name: str) -> int | None:
    try:
        return int(Path("/sys/fs/cgroup", name).read_text())
    except (OSError, ValueError):
        return None


def require_memory(num_parameters: int, largest_tensor: int) -> None:
    """Raises BuildError naming the estimate and what there is, where the build cannot fit."""
    needed, available = build_bytes(num_parameters, largest_tensor), available_bytes()
    if needed > available:
        raise BuildError(
            f"load: building {num_parameters / 1e6:,.0f}M parameters in fp32 needs about {needed / 2**30:.1f} GiB of "
            f"memory, {available / 2**30:.1f} GiB are available; build on a larger host (the engine itself needs less)"
        )
