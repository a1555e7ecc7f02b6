"""Made-up sequences over one paged pool: what attention kernels are proved and timed on.

The pool begins full of random keys and values, so that a case may have long sequences at no cost; block tables are
shuffled; every number comes from the seed. NumPy alone: kernels of every kind take these arrays.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import AttentionAttributes, KvDtypeCode, QkNorm
from castline.plugins.reference import AttentionInputs, ReferencePool, paged_attention, round_trip

Floats = NDArray[np.float32]
SOME_BLOCKS = 64
"""Different ones in a pool; further ones repeat them, so that a large pool is made at once."""


@dataclass
class AttentionCase:
    """Sequences and their pool; ``reference`` holds what the pool gives back. Steps raise ``lengths``."""

    attributes: AttentionAttributes
    num_blocks: int
    table_width: int
    lengths: list[int]
    seed: int = 0
    random: np.random.Generator = field(init=False)
    reference: ReferencePool = field(init=False)
    table: NDArray[np.int32] = field(init=False)
    q_weight: Floats = field(init=False)
    k_weight: Floats = field(init=False)

    def __post_init__(self) -> None:
        a = self.attributes
        self.random = np.random.default_rng(self.seed)
        some = min(self.num_blocks, SOME_BLOCKS)
        values = self.random.standard_normal((2, some, a.block_size, a.num_kv_heads, a.head_dim)).astype(np.float32)
        values = np.resize(round_trip(values, a.kv_dtype).swapaxes(0, 1), (self.num_blocks, 2, *values.shape[2:]))
        k, v = (values[:, i].reshape(-1, a.num_kv_heads, a.head_dim) for i in range(2))
        self.reference = ReferencePool(k.copy(), v.copy())
        shape = (len(self.lengths), self.table_width)
        if shape[0] * shape[1] > self.num_blocks:
            raise ValueError(f"{shape[0]} sequences of {shape[1]} blocks do not fit {self.num_blocks} blocks")
        self.table = self.random.permutation(self.num_blocks)[: shape[0] * shape[1]].reshape(shape).astype(np.int32)
        heads = (1, 1) if a.qk_norm == QkNorm.PER_HEAD else (a.num_heads, a.num_kv_heads)
        self.q_weight, self.k_weight = (self.random.uniform(0.5, 1.5, n * a.head_dim).astype(np.float32) for n in heads)

    def pool(self) -> NDArray[Any]:
        """As GPUs hold it now, [num_blocks, 2, num_kv_heads, block_size, head_dim]: fp16, or bits of e4m3 and bf16."""
        a = self.attributes
        values = np.stack([self.reference.k, self.reference.v])
        values = values.reshape(2, self.num_blocks, a.block_size, a.num_kv_heads, a.head_dim)
        return encode(values.transpose(1, 0, 3, 2, 4), a.kv_dtype)

    def slots_of(self, pool: NDArray[Any]) -> Floats:
        """What such a *pool* holds, [2, slots, num_kv_heads, head_dim]."""
        a = self.attributes
        values = decode(pool, a.kv_dtype).transpose(1, 0, 3, 2, 4)
        return values.reshape(2, -1, a.num_kv_heads, a.head_dim)

    def inputs(self, query_lens: list[int]) -> AttentionInputs:
        """The step that adds *query_lens* tokens to the sequences. qkv is of numbers that fp16 and bf16 both have."""
        a = self.attributes
        positions = [np.arange(n, n + q) for n, q in zip(self.lengths, query_lens, strict=True)]
        self.lengths = [n + q for n, q in zip(self.lengths, query_lens, strict=True)]
        packed = np.concatenate(positions).astype(np.int64)
        owner = np.repeat(np.arange(len(query_lens)), query_lens)
        slots = self.table[owner, packed // a.block_size] * a.block_size + packed % a.block_size
        half = max(a.rotary_dim // 2, 1)
        angles = packed[:, None] / 100.0 ** (np.arange(half) / half)
        width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        qkv = round_trip(self.random.standard_normal((len(packed), width)).astype(np.float32), KvDtypeCode.BF16)
        norm = a.qk_norm != QkNorm.NONE
        return AttentionInputs(
            qkv=qkv.astype(np.float16).astype(np.float32),
            slot_mapping=slots.astype(np.int32),
            cu_query_lens=np.cumsum([0, *query_lens]).astype(np.int32),
            kv_lens=np.array(self.lengths, np.int32),
            block_table=self.table,
            cos=np.cos(angles).astype(np.float32) if a.rotary_dim else None,
            sin=np.sin(angles).astype(np.float32) if a.rotary_dim else None,
            q_norm_weight=self.q_weight if norm else None,
            k_norm_weight=self.k_weight if norm else None,
        )

    def expected(self, inputs: AttentionInputs) -> Floats:
        """[T, num_heads * head_dim]; appends to ``reference``."""
        return paged_attention(self.attributes, inputs, self.reference)


def encode(values: Floats, kv_dtype: int) -> NDArray[Any]:
    """Elements as a GPU's pool has them, contiguous, of floats that the type has exactly."""
    values = np.ascontiguousarray(values, np.float32)
    if kv_dtype == KvDtypeCode.FP16:
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    if kv_dtype == KvDtypeCode.BF16:
        return (bits >> 16).astype(np.uint16)
    codes = np.searchsorted(_E4M3, np.abs(values)).astype(np.uint8)
    return codes | ((bits >> 24) & 0x80).astype(np.uint8)


def decode(elements: NDArray[Any], kv_dtype: int) -> Floats:
    if kv_dtype == KvDtypeCode.FP16:
        return elements.view(np.float16).astype(np.float32)
    if kv_dtype == KvDtypeCode.BF16:
        wide: Floats = (elements.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        return wide
    sizes = np.append(_E4M3, np.float32(np.nan))[elements.view(np.uint8) & 0x7F]
    signed: Floats = np.where(elements.view(np.uint8) & 0x80, -sizes, sizes).astype(np.float32)
    return signed


def _e4m3() -> Floats:
    """The 127 sizes of the type, by their code: 3 bits of mantissa; subnormal below 2^-6."""
    code = np.arange(127)
    exponent, mantissa = code >> 3, code & 7
    sizes: Floats = np.where(
        exponent > 0, (1 + mantissa / 8) * np.exp2(exponent - 7.0), mantissa * np.exp2(-9.0)
    ).astype(np.float32)
    return sizes


_E4M3 = _e4m3()
