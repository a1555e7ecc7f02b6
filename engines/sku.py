"""The GPUs that castline knows: one file each under ``engines/skus``, with the source of every figure.

Rates are dense (no structured sparsity) and accumulate in fp32, in int32 for int8: what an engine can reach at most.
A figure's unit is in its name: MiB of 2**20 bytes, GB/s and TFLOP/s of powers of ten.
"""

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from castline.engines.errors import EngineError
from castline.engines.manifest import KvDtype, Target
from castline.engines.precision import GPU_WEIGHTS, RateName, gpu_weights

SKU_DIRECTORY = Path(__file__).parent / "skus"
HOST_SKU = "cpu"
"""Stands for this machine's processor wherever the name of a SKU is asked for."""
RTX_CAPABILITIES = ("8.0", "8.6", "8.9", "12.0")
"""Of the GPUs below: what TensorRT for RTX builds for, on a machine with no GPU as well."""
FIGURES = frozenset({"compute_capability", "sm_count", "memory_mib", "bandwidth_gb_per_s", "l2_mib", "dense_tflops"})

Rate = Annotated[float, msgspec.Meta(ge=10, le=100_000)]
Flavour = Literal["tensorrt", "tensorrt_rtx"]


class DenseRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Peak of the tensor cores in TFLOP/s (TOP/s for int8); None where the chip has no such type."""

    fp16: Rate
    bf16: Rate
    int8: Rate
    fp8: Rate | None = None
    fp4: Rate | None = None


class SkuDefaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a build or a server takes where the user says nothing."""

    recipe: str
    kv_dtype: KvDtype
    max_num_seqs: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    max_num_batched_tokens: Annotated[int, msgspec.Meta(ge=1, le=131_072)]
    memory_utilization: Annotated[float, msgspec.Meta(gt=0, le=1)]
    """Share of the device's memory for weights, a step's buffers and the KV pool."""


class Sku(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU as it is sold. ``device_names`` are the driver's; the first is the one that the figures are of."""

    name: str
    title: str
    device_names: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    compute_capability: Annotated[str, msgspec.Meta(pattern=r"^\d{1,2}\.\d$")]
    flavours: Annotated[tuple[Flavour, ...], msgspec.Meta(min_length=1)]
    """That can build for it; the first is taken where both are installed."""
    sm_count: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    memory_mib: Annotated[int, msgspec.Meta(ge=4096, le=4_194_304)]
    """As nvidia-smi reports the total, with ECC as the board ships."""
    bandwidth_gb_per_s: Annotated[float, msgspec.Meta(ge=100, le=100_000)]
    l2_mib: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    dense_tflops: DenseRates
    defaults: SkuDefaults
    sources: dict[str, str]
    """For each figure: the public document that states it."""

    @property
    def memory_bytes(self) -> int:
        return self.memory_mib << 20

    @property
    def bytes_per_s(self) -> float:
        return self.bandwidth_gb_per_s * 1e9

    @property
    def has_fp8(self) -> bool:
        return self.dense_tflops.fp8 is not None

    def flops_per_s(self, rate: RateName) -> float:
        """Dense peak of a type. Raises EngineError where the chip has none."""
        tflops: float | None = getattr(self.dense_tflops, rate)
        if tflops is None:
            raise EngineError(f"{self.title} (compute capability {self.compute_capability}) has no {rate} tensor cores")
        return tflops * 1e12


def load_sku(name: str) -> Sku:
    """The SKU called *name*; case, spaces, ``-`` and ``_`` do not matter. Raises EngineError listing those known."""
    wanted = _plain(name)
    for sku in all_skus():
        if _plain(sku.name) == wanted:
            return sku
    raise EngineError(f"SKU {name!r} is unknown; known are {', '.join(sku.name for sku in all_skus())}")


def sku_of_device(device_name: str) -> Sku | None:
    """The SKU of a GPU that the driver calls *device_name*, or None for one that castline does not know."""
    return next((sku for sku in all_skus() if device_name in sku.device_names), None)


@cache
def all_skus() -> tuple[Sku, ...]:
    """Every SKU, by name. Raises EngineError for a file that is wrong."""
    return tuple(read_sku(path) for path in sorted(SKU_DIRECTORY.glob("*.toml")))


def read_sku(path: Path) -> Sku:
    """Reads and checks one file. Raises EngineError naming file and field."""
    try:
        sku = msgspec.toml.decode(path.read_bytes(), type=Sku)
    except (msgspec.DecodeError, OSError) as error:
        raise EngineError(f"{path}: {error}") from None
    for fault in _faults(sku, path.stem):
        raise EngineError(f"{path}: {fault}")
    return sku


def _faults(sku: Sku, stem: str) -> list[str]:
    """What the types cannot say, one sentence each, beginning with the field."""
    major, minor = map(int, sku.compute_capability.split("."))
    faults = []
    if sku.name != stem:
        faults.append(f"name {sku.name!r} must be the file's, {stem!r}")
    if missing := FIGURES - set(sku.sources):
        faults.append(f"sources lacks {', '.join(sorted(missing))}: every figure names the document that states it")
    if unknown := set(sku.sources) - FIGURES:
        faults.append(f"sources.{min(unknown)} is of no figure; figures are {', '.join(sorted(FIGURES))}")
    if empty := [name for name, text in sku.sources.items() if not text.strip()]:
        faults.append(f"sources.{empty[0]} is empty")
    for rate, since in (("fp8", (8, 9)), ("fp4", (10, 0))):
        if (getattr(sku.dense_tflops, rate) is not None) != ((major, minor) >= since):
            need = "is needed from" if (major, minor) >= since else "does not exist before"
            faults.append(f"dense_tflops.{rate} {need} compute capability {since[0]}.{since[1]}")
    if ("tensorrt_rtx" in sku.flavours) != (sku.compute_capability in RTX_CAPABILITIES):
        faults.append(f"flavours: tensorrt_rtx is for compute capability {', '.join(RTX_CAPABILITIES)} and no other")
    try:
        check_precision(sku, sku.defaults.recipe, sku.defaults.kv_dtype)
    except EngineError as error:
        faults.append(f"defaults: {error}")
    return faults


GPU_KV_DTYPES: tuple[KvDtype, ...] = ("fp8", "fp16", "bf16")
"""Of the attention kernels for GPUs; fp8 is decoded with integer operations where the chip has no such type."""


def check_precision(sku: Sku, recipe: str, kv_dtype: str) -> None:
    """Raises EngineError where *sku* cannot compute with those weights and KV blocks."""
    if getattr(sku.dense_tflops, gpu_weights(recipe).rate) is None:
        possible = [form.name for form in GPU_WEIGHTS.values() if getattr(sku.dense_tflops, form.rate) is not None]
        raise EngineError(
            f"{sku.title} (compute capability {sku.compute_capability}) cannot multiply {recipe} weights; "
            f"choose {', '.join(possible)}"
        )
    if kv_dtype not in GPU_KV_DTYPES:
        raise EngineError(f"KV blocks of {kv_dtype} are not for GPUs; choose {', '.join(GPU_KV_DTYPES)}")


def check_flavour(sku: Sku, target: Target) -> None:
    """Raises EngineError where *target* can never build for *sku*."""
    if target not in sku.flavours and target == "tensorrt_rtx":
        raise EngineError(
            f"TensorRT for RTX builds for compute capability {', '.join(RTX_CAPABILITIES)}, and {sku.name} has "
            f"{sku.compute_capability}; use --target tensorrt, on a machine with TensorRT and that GPU"
        )


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name.lower())
