"""Compiles variants of the GPU kernels for one compute capability, as a build does, and prints what came out as JSON.

    python tests/builder/tensorrt/compile_variants.py 8.9 [--all]

A program of its own: a process that has interpreted a kernel compiles none. The four variants that the tests ask for
have between them every value of every factor; ``--all`` takes the product: 288 variants, of eight kernels each.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from castline.builder.tensorrt.kernels import KernelTarget, compile_kernels
from castline.engines.errors import BuildError
from castline.plugins.contract import AttentionAttributes, KvDtypeCode, QkNorm

ACTIVATIONS = ("fp16", "bf16")
KV_DTYPES = (KvDtypeCode.FP8, KvDtypeCode.FP16, KvDtypeCode.BF16)
BLOCK_SIZES = (16, 32, 64)
HEAD_DIMS = (64, 128, 96, 256)
GROUPS = (1, 3, 4, 8)
SKUS = {
    "8.0": "a100-40",
    "8.6": "a10",
    "8.9": "rtx4090",
    "9.0": "h100-sxm",
    "10.0": "b200",
    "12.0": "rtx5090",
    "12.1": "",
}
"""Whose known shapes are taken for a compute capability."""
VOCABULARY = {"fp16": 49_152, "bf16": 262_144}


@dataclass(frozen=True)
class Variant:
    activations: str
    kv_dtype: KvDtypeCode
    block_size: int
    head_dim: int
    group: int
    extras: int = 0

    def attributes(self) -> AttentionAttributes:
        """*extras* 0 is plain; 1 has a window, a soft-cap and a norm over all heads; 2 a norm a head, half of RoPE."""
        heads, dim = 2 * self.group, self.head_dim
        return AttentionAttributes(
            layer=0, num_heads=heads, num_kv_heads=2, head_dim=dim, scale=dim**-0.5, block_size=self.block_size,
            kv_dtype=int(self.kv_dtype), rotary_dim=dim // 2 if self.extras == 2 else dim,
            window=1000 if self.extras == 1 else 0, softcap=50.0 if self.extras == 1 else 0.0,
            qk_norm=int((QkNorm.NONE, QkNorm.FULL, QkNorm.PER_HEAD)[self.extras]),
            rope_interleaved=int(self.extras == 2),
        )  # fmt: skip


def covering(shift: int) -> Iterator[Variant]:
    """Every value of every factor; *shift* pairs them up differently."""
    other = (KvDtypeCode.FP16, KvDtypeCode.BF16)
    kinds = [(activations, kv_dtype) for i, activations in enumerate(ACTIVATIONS)
             for kv_dtype in (KvDtypeCode.FP8, other[(i + shift) % 2])]  # fmt: skip
    for i, (activations, kv_dtype) in enumerate(kinds):
        dim, group = HEAD_DIMS[(i + shift) % 4], GROUPS[(3 * i + shift // 2) % 4]
        yield Variant(activations, kv_dtype, BLOCK_SIZES[(i + shift) % 3], dim, group, (i + shift // 3) % 3)


def everything() -> Iterator[Variant]:
    for factors in product(ACTIVATIONS, KV_DTYPES, BLOCK_SIZES, HEAD_DIMS, GROUPS):
        yield Variant(*factors)


def compiled(capability: str, variants: list[Variant]) -> Iterator[dict[str, object]]:
    """For each variant its kernels, or the error that it ended with."""
    for variant in variants:
        vocabulary = VOCABULARY[variant.activations]
        target = KernelTarget(capability, variant.activations, vocabulary, variant.block_size, SKUS[capability])  # type: ignore[arg-type]
        with tempfile.TemporaryDirectory(prefix="castline-kernels-") as directory:
            try:
                kernels = compile_kernels(target, [variant.attributes()], Path(directory)).kernels
            except BuildError as error:
                yield {"variant": repr(variant), "error": str(error)}
                continue
            files = {path.name: path.stat().st_size for path in Path(directory).rglob("*.cubin")}
        yield {
            "variant": repr(variant),
            "error": "",
            "kernels": {
                k.name: {"registers": k.registers, "spills": k.spill_bytes, "shared": k.shared_bytes,
                         "bytes": files[k.cubin], "constants": k.constants}
                for k in kernels
            },
        }  # fmt: skip


def main() -> None:
    capability, rest = sys.argv[1], sys.argv[2:]
    variants = list(everything() if "--all" in rest else covering(list(SKUS).index(capability)))
    for line in compiled(capability, variants):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
