"""The compiled GPU kernels of one engine: cubins with what a launch must know, as files of a bundle.

Kernels are compiled when an engine is built (`castline.plugins.tensorrt.compile`, which needs Triton) and launched when
it runs, through the CUDA driver alone. ``kernels/kernels.json`` describes the cubins beside it.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec
import numpy as np

from castline.engines.errors import EngineError
from castline.plugins.contract import AttentionAttributes

KERNELS_DIRECTORY: Final = "kernels"
KERNELS_INDEX: Final = "kernels.json"

KernelName = Literal[
    "rope_append",
    "decode",
    "decode_split",
    "decode_merge",
    "prefill",
    "greedy",
    "sample",
    "gather_inputs",
]
"""What each does, with its arguments, is said in `castline.plugins.tensorrt.kernels`."""

ArgumentType = Literal["pointer", "i32", "i64", "f32"]


def attributes_key(a: AttentionAttributes) -> str:
    """Name of everything about a node that a kernel is compiled for; nodes that differ only in their layer share it.

    Floats count as float32 has them: that is how TensorRT hands a node's attributes back.
    """
    parts = [f"h{a.num_heads}", f"kv{a.num_kv_heads}", f"d{a.head_dim}", f"bs{a.block_size}", f"t{a.kv_dtype}"]
    parts += [
        f"s{np.float32(a.scale)}",
        f"w{a.window}",
        f"c{np.float32(a.softcap)}",
        f"r{a.rotary_dim}{'i' if a.rope_interleaved else ''}",
    ]
    parts += [f"n{a.qk_norm}", f"e{np.float32(a.norm_eps)}"]
    return "-".join(parts)


@dataclass(frozen=True, slots=True)
class Argument:
    """A run-time argument of a kernel, in launch order."""

    name: str
    type: ArgumentType
    alignment: int = 1
    """Bytes that an address must be a multiple of: the kernel loads that many at once."""


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One compiled kernel. Triton's cubins take two more pointers after the arguments, which are null."""

    name: KernelName
    entry: str
    """Symbol in the cubin."""
    cubin: str
    """File name beside kernels.json."""
    arguments: tuple[Argument, ...]
    constants: dict[str, int | float | str]
    """What was fixed when it was compiled: head_dim, block_size, query tile, keys a split, …"""
    num_warps: int
    shared_bytes: int
    """Dynamic shared memory of a launch."""
    registers: int
    spill_bytes: int
    attributes: str = ""
    """Key of the attention attributes it serves (`attributes_key`); empty for kernels that serve every layer."""
    chosen: str = ""
    """How its shape of work was chosen: "timed on DEVICE, DATE", or that it was not timed."""

    @property
    def threads(self) -> int:
        return 32 * self.num_warps


@dataclass(frozen=True, slots=True)
class KernelSet:
    """All kernels of an engine, for one compute capability."""

    compute_capability: str
    """``8.9``"""
    compiler: str
    """``triton 3.9.0``"""
    kernels: tuple[KernelSpec, ...]

    def find(self, name: KernelName, attributes: str = "") -> KernelSpec:
        """The kernel of that name for those attributes. Raises EngineError where the engine lacks it."""
        for kernel in self.kernels:
            if kernel.name == name and kernel.attributes == attributes:
                return kernel
        raise EngineError(f"the engine has no kernel {name} for {attributes or 'every layer'}; rebuild it")


def write_kernel_set(directory: Path, kernels: KernelSet) -> None:
    """Writes the index; the cubins are written by who compiles them."""
    encoded = msgspec.json.format(msgspec.json.encode(kernels), indent=2)
    (directory / KERNELS_INDEX).write_bytes(encoded + b"\n")


def read_kernel_set(directory: Path) -> KernelSet:
    """Raises EngineError where the index is missing, damaged, or names a cubin that is not there."""
    path = directory / KERNELS_INDEX
    try:
        kernels = msgspec.json.decode(path.read_bytes(), type=KernelSet)
    except OSError as error:
        raise EngineError(f"cannot read {path} ({error.strerror}); rebuild the engine") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise EngineError(f"{path} is damaged: {error}; rebuild the engine") from None
    for kernel in kernels.kernels:
        if not (directory / kernel.cubin).is_file():
            raise EngineError(f"{path} names {kernel.cubin}, which is not there; rebuild the engine")
    return kernels
