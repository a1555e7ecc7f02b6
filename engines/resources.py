"""What this process may use of the machine. Reads /proc and cgroups; imports nothing heavy.

Inside a container the kernel's figures are the whole machine's, so cores and memory take the smallest of what the
machine, the affinity mask and every enclosing control group (v2, or v1) grant.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from castline.engines.affinity import granted_cores

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


def usable_cores(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Cores this process may keep busy: its affinity mask, cut to the CPU quota of its control groups; at least 1."""
    cores = len(granted_cores()) or os.cpu_count() or 1
    for group in _groups(proc, cgroup, "cpu"):
        quota = _cpu_quota(group)
        if quota is not None:
            cores = min(cores, max(1, int(quota)))
    return cores


def available_memory_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Bytes that can be allocated without swapping or an out-of-memory kill; reclaimable page cache counts as free."""
    available = _meminfo(proc / "meminfo", "MemAvailable")
    for group in _groups(proc, cgroup, "memory"):
        headroom = _memory_headroom(group)
        if headroom is not None:
            available = min(available, headroom)
    return max(0, available)


def _meminfo(path: Path, key: str) -> int:
    for line in (read_text(path) or "").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _groups(proc: Path, cgroup: Path, controller: str) -> Iterator[Path]:
    """Directories of the control groups this process is in, innermost first, up to the root that is visible here."""
    for line in (read_text(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        group = root / path.lstrip("/")
        while group != root and root in group.parents:
            yield group
            group = group.parent
        yield root


def _cpu_quota(group: Path) -> float | None:
    """Cores granted a period, or None where there is no quota."""
    v2 = (read_text(group / "cpu.max") or "").split()
    if v2:
        return None if v2[0] == "max" else int(v2[0]) / int(v2[1])
    quota, period = _read_int(group / "cpu.cfs_quota_us"), _read_int(group / "cpu.cfs_period_us")
    return quota / period if quota is not None and quota > 0 and period else None


def _memory_headroom(group: Path) -> int | None:
    """Bytes below the group's limit, or None where it has none. Clean file pages give way to an allocation."""
    v2_limit = _read_int(group / "memory.max")
    limit = v2_limit if v2_limit is not None else _read_int(group / "memory.limit_in_bytes")
    used = _read_int(group / ("memory.current" if v2_limit is not None else "memory.usage_in_bytes"))
    if limit is None or used is None:
        return None
    statistics = dict(line.split()[:2] for line in (read_text(group / "memory.stat") or "").splitlines() if " " in line)
    reclaimable = int(statistics.get("inactive_file", statistics.get("total_inactive_file", 0)))
    return limit - used + reclaimable


def read_text(path: Path) -> str | None:
    """None where it cannot be read: such files are not there on every system."""
    try:
        return path.read_text()
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (read_text(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None
