"""Physical cores that this process may use: two hardware threads of one core share the units that kernels fill."""

import os
from pathlib import Path

from castline.engines.resources import usable_cores

CPU_TOPOLOGY = Path("/sys/devices/system/cpu")


def physical_cores(topology: Path = CPU_TOPOLOGY) -> int:
    """Distinct cores of the affinity mask, cut to the CPU quota; logical ones where the kernel does not tell."""
    siblings = {_siblings(topology, cpu) for cpu in os.sched_getaffinity(0)}
    return max(1, min(len(siblings), usable_cores()))


def _siblings(topology: Path, cpu: int) -> str:
    """Names the physical core of *cpu* by its hardware threads."""
    try:
        return (topology / f"cpu{cpu}" / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)
