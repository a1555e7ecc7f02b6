"""Which nodes are checked, and on which steps."""

from dataclasses import dataclass
from typing import Any

from castline.plugins.attention_case import AttentionCase
from castline.plugins.contract import AttentionAttributes, KvDtypeCode, QkNorm

CAPACITY = 448
"""Tokens that a sequence's blocks hold."""
LENGTHS = (300, 0, 31)
STEPS = ((20, 1, 0), (1, 5, 1), (1, 1, 1))
"""Chunks and decodes together, a row of no token, rows of one; then decodes alone."""
TOLERANCES = {"fp16": 4e-3, "bf16": 3e-2}
"""Of outputs of about 1: bf16 rounds rotated queries, weights and outputs to 8 bits."""


@dataclass(frozen=True)
class KernelCase:
    attributes: AttentionAttributes
    activations: str

    @property
    def name(self) -> str:
        a = self.attributes
        kv = KvDtypeCode(a.kv_dtype).name.lower()
        said = [self.activations, f"KV {kv}", f"blocks {a.block_size}", f"heads {a.num_heads}/{a.num_kv_heads}",
                f"dim {a.head_dim}"]  # fmt: skip
        said += [f"window {a.window}"] if a.window else []
        said += [f"softcap {a.softcap:g}"] if a.softcap else []
        said += [f"norm {QkNorm(a.qk_norm).name.lower()}"] if a.qk_norm else []
        said += [f"rotary {a.rotary_dim}"] if a.rotary_dim != a.head_dim else []
        said += ["interleaved"] if a.rope_interleaved else []
        return ", ".join(said)

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.activations]

    def sequences(self) -> AttentionCase:
        width = CAPACITY // self.attributes.block_size
        return AttentionCase(self.attributes, len(LENGTHS) * width + 3, width, list(LENGTHS), seed=1)


def attributes(group: int = 4, kv_heads: int = 2, dim: int = 64, kv: KvDtypeCode = KvDtypeCode.FP8, block: int = 32,
               **changes: Any) -> AttentionAttributes:  # fmt: skip
    fields = {"layer": 0, "scale": dim**-0.5, "rotary_dim": dim} | changes
    return AttentionAttributes(num_heads=group * kv_heads, num_kv_heads=kv_heads, head_dim=dim, kv_dtype=int(kv),
                               block_size=block, **fields)  # fmt: skip


def kernel_cases(quick: bool = False) -> list[KernelCase]:
    """Every type of activations and KV with every block size, group, size of head and feature; *quick* has few."""
    types = (KvDtypeCode.FP8, KvDtypeCode.FP16, KvDtypeCode.BF16)
    if quick:
        return [
            KernelCase(attributes(group=3), "fp16"),
            KernelCase(attributes(group=4, dim=128, kv=KvDtypeCode.FP16, block=16), "fp16"),
            KernelCase(attributes(group=1, kv=KvDtypeCode.BF16, block=64, window=40), "bf16"),
        ]
    found = []
    for i, kv in enumerate(types):
        for j, block in enumerate((16, 32, 64)):
            for k, group in enumerate((1, 3, 4, 8)):
                activations = ("fp16", "bf16")[(i + j + k) % 2]
                dim = (64, 128)[(j + k // 2) % 2]
                found.append(KernelCase(attributes(group, dim=dim, kv=kv, block=block), activations))
    for activations, kv in (("fp16", KvDtypeCode.FP8), ("bf16", KvDtypeCode.FP8), ("fp16", KvDtypeCode.FP16)):
        found += [KernelCase(one, activations) for one in features(kv)]
    return list(dict.fromkeys(found))


def features(kv: KvDtypeCode) -> list[AttentionAttributes]:
    """One node for each thing that the contract allows beside sizes."""
    return [
        attributes(kv=kv, window=1),
        attributes(kv=kv, window=100),
        attributes(kv=kv, dim=128, window=33, block=16),
        attributes(kv=kv, softcap=2.0),
        attributes(kv=kv, qk_norm=int(QkNorm.PER_HEAD)),
        attributes(kv=kv, group=3, qk_norm=int(QkNorm.FULL)),
        attributes(kv=kv, rope_interleaved=1),
        attributes(kv=kv, rotary_dim=16),
        attributes(kv=kv, rotary_dim=0),
        attributes(kv=kv, dim=256),
        attributes(kv=kv, dim=80, rotary_dim=32),
        attributes(kv=kv, dim=96, group=8),
    ]


def timed_attributes(quick: bool = False) -> list[AttentionAttributes]:
    """Nodes of usual models: the demo's, and one of 8 kv heads of 128."""
    fp8, fp16 = KvDtypeCode.FP8, KvDtypeCode.FP16
    demo = [attributes(group=3, kv_heads=3, kv=fp8)]
    if quick:
        return demo
    return [*demo, *(attributes(group=4, kv_heads=8, dim=128, kv=kv) for kv in (fp8, fp16))]
