"""The machine that castline runs on, as far as an engine cares."""

import platform
from pathlib import Path

from castline.engines.manifest import Host, Target
from castline.engines.resources import CGROUP, PROC, read_text, usable_cores

KERNEL_ISA = (
    # x86-64, as /proc/cpuinfo spells them: those of the plugin's kernels, which are also those its matmuls come down to
    "avx2",
    "fma",
    "f16c",
    "avx512f",
    "avx512bw",
    "avx512dq",
    "avx512vl",
    "avx512_vnni",
    "avx_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    # aarch64: ONNX Runtime's matmuls
    "asimd",
    "asimddp",
    "i8mm",
)
"""Extensions that some kernel of an engine may use; any other makes no difference to an engine."""


def detect_host(target: Target = "cpu", proc: Path = PROC, cgroup: Path = CGROUP) -> Host:
    """This machine as a manifest records it. ``isa`` lists what the host offers, in the order of KERNEL_ISA."""
    cpu, flags = _cpuinfo(proc / "cpuinfo")
    isa = tuple(name for name in KERNEL_ISA if name in flags)
    return Host(target, platform.machine(), cpu, isa, usable_cores(proc, cgroup))


def _cpuinfo(path: Path) -> tuple[str, frozenset[str]]:
    """Model name and feature flags of the first processor listed."""
    fields: dict[str, str] = {}
    for line in (read_text(path) or "").splitlines():
        key, colon, value = line.partition(":")
        if colon:
            fields.setdefault(key.strip().lower(), value.strip())
    flags = fields.get("flags") or fields.get("features") or ""
    name = fields.get("model name") or fields.get("cpu implementer") or platform.processor() or "unknown"
    return name, frozenset(flags.split())
