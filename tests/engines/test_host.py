"""What the host offers, read from the files of made-up machines."""

from pathlib import Path

import pytest

from castline.engines.host import detect_host
from castline.engines.resources import available_memory_bytes, usable_cores

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """proc/ and cgroup/ of a machine with 16 GiB available and no limits."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "cgroup").mkdir()
    write(tmp_path / "proc/meminfo", "MemTotal:       33554432 kB\nMemAvailable:   16777216 kB\n")
    write(tmp_path / "proc/self/cgroup", "0::/pod/app\n")
    write(tmp_path / "proc/cpuinfo", "processor\t: 0\nmodel name\t: Fast CPU\nflags\t\t: fpu fma avx2 avx512f sse\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def memory(machine: Path) -> int:
    return available_memory_bytes(machine / "proc", machine / "cgroup")


def cores(machine: Path) -> int:
    return usable_cores(machine / "proc", machine / "cgroup")


def test_isa_lists_only_what_kernels_use_in_a_fixed_order(machine: Path) -> None:
    """A flag that no kernel uses (sse) must not make two equal hosts differ; nor may the order of the kernel's list."""
    host = detect_host("cpu", machine / "proc", machine / "cgroup")
    assert host.isa == ("avx2", "fma", "avx512f")
    assert host.cpu == "Fast CPU"


def test_arm_features_are_read(machine: Path) -> None:
    """aarch64 spells its flags `Features` and has no model name: the host must not come out without an ISA."""
    write(machine / "proc/cpuinfo", "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm sve\nCPU implementer\t: 0x41\n")
    host = detect_host("cpu", machine / "proc", machine / "cgroup")
    assert host.isa == ("asimd", "asimddp", "i8mm")
    assert host.cpu == "0x41"


def test_memory_without_limits_is_what_the_machine_has(machine: Path) -> None:
    """No control group files at all (a bare machine) must not read as no memory."""
    assert memory(machine) == 16 * GIB


def test_memory_is_cut_to_an_enclosing_group_and_counts_its_page_cache(machine: Path) -> None:
    """Planning for the machine's 16 GiB in a 4 GiB container gets the process killed; an ancestor may set the limit."""
    write(machine / "cgroup/pod/app/memory.max", "max\n")
    write(machine / "cgroup/pod/app/memory.current", f"{GIB}\n")
    write(machine / "cgroup/pod/memory.max", f"{4 * GIB}\n")
    write(machine / "cgroup/pod/memory.current", f"{3 * GIB}\n")
    write(machine / "cgroup/pod/memory.stat", f"anon 5\ninactive_file {GIB}\n")
    assert memory(machine) == 2 * GIB


def test_memory_of_version_1_groups(machine: Path) -> None:
    """Version 1 hierarchies put the controller in the path and in other file names."""
    write(machine / "proc/self/cgroup", "4:memory:/app\n1:cpu,cpuacct:/app\n0::/\n")
    write(machine / "cgroup/memory/app/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(machine / "cgroup/memory/app/memory.usage_in_bytes", f"{GIB}\n")
    assert memory(machine) == GIB


def test_memory_is_never_negative(machine: Path) -> None:
    """A group over its limit would make a negative block count."""
    write(machine / "cgroup/memory.max", f"{GIB}\n")
    write(machine / "cgroup/memory.current", f"{2 * GIB}\n")
    assert memory(machine) == 0


@pytest.mark.parametrize(("quota", "expected"), [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1)])
def test_cores_follow_the_quota(machine: Path, quota: str, expected: int | None) -> None:
    """Two threads on a quota of one core are throttled for half of every period; half a core still needs a thread."""
    unlimited = cores(machine)
    write(machine / "cgroup/pod/app/cpu.max", quota + "\n")
    assert cores(machine) == (unlimited if expected is None else expected)


def test_cores_of_version_1_groups(machine: Path) -> None:
    """-1 is no quota in version 1."""
    unlimited = cores(machine)
    write(machine / "proc/self/cgroup", "1:cpu,cpuacct:/app\n")
    write(machine / "cgroup/cpu/app/cpu.cfs_quota_us", "-1\n")
    write(machine / "cgroup/cpu/app/cpu.cfs_period_us", "100000\n")
    assert cores(machine) == unlimited
    write(machine / "cgroup/cpu/cpu.cfs_quota_us", "100000\n")
    write(machine / "cgroup/cpu/cpu.cfs_period_us", "100000\n")
    assert cores(machine) == 1
