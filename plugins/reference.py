"""The paged-attention node in plain NumPy: what every implementation of `castline.plugins.contract` is compared with.

The pool here is of no layout at all: it holds K and V of every slot as the floats that the pool's dtype gives back. The
rounding is exact, so an implementation's quantised values must be equal; attention itself is computed in float64.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import AttentionAttributes, KvDtypeCode, QkNorm

Floats = NDArray[np.float32]
Ints = NDArray[np.int32]

FP8_MAX = 448.0
FP16_MAX = 65504.0
INT8_MAX = np.float32(127.0)


@dataclass(slots=True)
class ReferencePool:
    """K and V of every slot, [num_slots, num_kv_heads, head_dim], as read back from the pool's dtype."""

    k: Floats
    v: Floats

    @classmethod
    def zeros(cls, attributes: AttentionAttributes, num_blocks: int) -> "ReferencePool":
        shape = (num_blocks * attributes.block_size, attributes.num_kv_heads, attributes.head_dim)
        return cls(np.zeros(shape, np.float32), np.zeros(shape, np.float32))


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Inputs of one node but for the pool; see `AttentionAttributes` for shapes."""

    qkv: Floats
    slot_mapping: Ints
    cu_query_lens: Ints
    kv_lens: Ints
    block_table: Ints
    cos: Floats | None = None
    sin: Floats | None = None
    q_norm_weight: Floats | None = None
    k_norm_weight: Floats | None = None


def paged_attention(attributes: AttentionAttributes, inputs: AttentionInputs, pool: ReferencePool) -> Floats:
    """One call of the node: appends to *pool* in place, returns [T, num_heads * head_dim]."""
    a = attributes
    q, k, v = split_heads(a, inputs.qkv)
    q = rope(a, qk_norm(a, q, inputs.q_norm_weight), inputs.cos, inputs.sin)
    k = rope(a, qk_norm(a, k, inputs.k_norm_weight), inputs.cos, inputs.sin)
    written = inputs.slot_mapping >= 0
    pool.k[inputs.slot_mapping[written]] = round_trip(k[written], a.kv_dtype)
    pool.v[inputs.slot_mapping[written]] = round_trip(v[written], a.kv_dtype)

    out = np.zeros(q.shape, np.float32)
    for sequence, kv_len in enumerate(inputs.kv_lens):
        rows = slice(inputs.cu_query_lens[sequence], inputs.cu_query_lens[sequence + 1])
        positions = np.arange(kv_len)
        blocks = inputs.block_table[sequence, positions // a.block_size] if rows.stop > rows.start else positions[:0]
        slots = blocks * a.block_size + positions[: len(blocks)] % a.block_size
        out[rows] = attend(a, q[rows], pool.k[slots], pool.v[slots])
    return out.reshape(len(q), a.num_heads * a.head_dim)


def split_heads(a: AttentionAttributes, qkv: Floats) -> tuple[Floats, Floats, Floats]:
    """Q, K and V as [T, heads, head_dim]."""
    heads = qkv.reshape(len(qkv), a.num_heads + 2 * a.num_kv_heads, a.head_dim)
    return (
        heads[:, : a.num_heads],
        heads[:, a.num_heads : a.num_heads + a.num_kv_heads],
        heads[:, a.num_heads + a.num_kv_heads :],
    )


def qk_norm(a: AttentionAttributes, x: Floats, weight: Floats | None) -> Floats:
    """RMSNorm of Q or K [T, heads, head_dim]; the mean square is taken in float64, the rest in float32."""
    if a.qk_norm == QkNorm.NONE:
        return x
    assert weight is not None
    axes = (1, 2) if a.qk_norm == QkNorm.FULL else (2,)
    mean_square = np.mean(np.square(x, dtype=np.float64), axis=axes, keepdims=True)
    inverse = (1.0 / np.sqrt(mean_square + np.float64(np.float32(a.norm_eps)))).astype(np.float32)
    normed: Floats = x * inverse * weight.reshape(-1, a.head_dim)
    return normed


def rope(a: AttentionAttributes, x: Floats, cos: Floats | None, sin: Floats | None) -> Floats:
    """Rotates the first rotary_dim elements of each head of x [T, heads, head_dim]; cos and sin [T, rotary_dim / 2]."""
    if a.rotary_dim == 0:
        return x
    assert cos is not None
    assert sin is not None
    half = a.rotary_dim // 2
    first, second = (slice(0, a.rotary_dim, 2), slice(1, a.rotary_dim, 2))
    if not a.rope_interleaved:
        first, second = (slice(0, half), slice(half, a.rotary_dim))
    c, s = cos[:, None], sin[:, None]
    out = x.copy()
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out


def round_trip(x: Floats, kv_dtype: int) -> Floats:
    """What a pool of *kv_dtype* gives back for the heads *x* [..., head_dim]."""
    if kv_dtype == KvDtypeCode.BF16:
        return _bf16(x)
    if kv_dtype == KvDtypeCode.FP16:
        return np.clip(x, -FP16_MAX, FP16_MAX).astype(np.float16).astype(np.float32)
    if kv_dtype == KvDtypeCode.INT8:
        return _int8(x)
    if kv_dtype == KvDtypeCode.FP8:
        return _fp8(x)
    return x


def _bf16(x: Floats) -> Floats:
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    back: Floats = rounded.view(np.float32)
    return back


def _int8(x: Floats) -> Floats:
    scale = np.abs(x).max(axis=-1, keepdims=True) / INT8_MAX
    quantised = np.rint(np.divide(x, scale, out=np.zeros_like(x), where=scale > 0))
    back: Floats = np.clip(quantised, -INT8_MAX, INT8_MAX) * scale
    return back


def _fp8(x: Floats) -> Floats:
    """e4m3fn: 3 bits of mantissa; below 2^-6 multiples of 2^-9; saturating."""
    _, exponent = np.frexp(x)
    step = np.exp2(np.maximum(exponent - 1, -6) - 3).astype(np.float32)
    back: Floats = np.clip(np.rint(x / step) * step, -FP8_MAX, FP8_MAX)
    return back


def attend(a: AttentionAttributes, q: Floats, k: Floats, v: Floats) -> Floats:
    """Queries [n, num_heads, head_dim] of the last n of the positions of k and v [kv_len, num_kv_heads, head_dim]."""
    group = a.num_heads // a.num_kv_heads
    # By head; products of matrices, as einsum is many times slower at float64.
    queries = q.astype(np.float64).transpose(1, 0, 2)
    keys = np.repeat(k.astype(np.float64), group, axis=1).transpose(1, 2, 0)
    values = np.repeat(v.astype(np.float64), group, axis=1).transpose(1, 0, 2)
    scores = queries @ keys * a.scale
    if a.softcap > 0:
        scores = a.softcap * np.tanh(scores / a.softcap)
    position = np.arange(len(k) - len(q), len(k))[:, None]
    key_position = np.arange(len(k))[None]
    hidden = key_position > position
    if a.window > 0:
        hidden |= key_position <= position - a.window
    scores = np.where(hidden, -np.inf, scores)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-np.inf))
    weights /= weights.sum(axis=-1, keepdims=True)
    out: Floats = (weights @ values).transpose(1, 0, 2).astype(np.float32)
    return out
