"""QK-norm, RoPE, rounding and appending to the pool: one program a (token, head of Q, K or V)."""

import triton
import triton.language as tl

from castline.plugins.tensorrt.kernels.elements import to_pool

NORM_PER_HEAD = tl.constexpr(1)
NORM_FULL = tl.constexpr(2)


@triton.jit
def _inverse_norm(row, head, heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr,
                  norm: tl.constexpr, padded_all: tl.constexpr, eps: tl.constexpr):  # fmt: skip
    """1 / sqrt(mean square + eps), over this head or over all heads of Q or of K together."""
    if norm == NORM_PER_HEAD:
        d = tl.arange(0, padded)
        x = tl.load(row + head * dim + d, mask=d < dim, other=0.0).to(tl.float32)
        mean = tl.sum(x * x) / dim
    else:
        start = tl.where(head < heads, 0, heads * dim)
        count = tl.where(head < heads, heads * dim, kv_heads * dim)
        d = tl.arange(0, padded_all)
        x = tl.load(row + start + d, mask=d < count, other=0.0).to(tl.float32)
        mean = tl.sum(x * x) / count
    return 1.0 / tl.sqrt(mean + eps)


@triton.jit
def rope_append(
    qkv,  # [T, (heads + 2 * kv_heads) * dim]
    cos,  # float32 [T, rotary / 2]
    sin,
    q_weight,  # float32; [dim] or [heads * dim]
    k_weight,
    pool,
    slots,  # int32 [T]
    q_out,  # [T, heads * dim]
    num_blocks,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,  # power of two from dim up
    block_size: tl.constexpr,
    rotary: tl.constexpr,
    interleaved: tl.constexpr,
    norm: tl.constexpr,
    padded_all: tl.constexpr,  # power of two from heads * dim up; norm over all heads only
    eps: tl.constexpr,
    kind: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = qkv + token * (heads + 2 * kv_heads) * dim
    d = tl.arange(0, padded)
    inside = d < dim
    # Of the head, for every lane: Triton's interpreter makes no mask of a scalar condition and a vector's.
    lane_head = head + tl.zeros([padded], tl.int32)
    is_q = lane_head < heads
    is_k = (lane_head >= heads) & (lane_head < heads + kv_heads)
    x = tl.load(row + head * dim + d, mask=inside, other=0.0).to(tl.float32)

    # The element that RoPE mixes with this one, its sign, and whose angle both turn by.
    if interleaved:
        partner = d ^ 1
        sign = tl.where(d % 2 == 0, -1.0, 1.0)
        angle = d // 2
    else:
        partner = tl.where(d < rotary // 2, d + rotary // 2, d - rotary // 2)
        sign = tl.where(d < rotary // 2, -1.0, 1.0)
        angle = tl.where(d < rotary // 2, d, d - rotary // 2)
    turned = (d < rotary) & (is_q | is_k)
    other = tl.load(row + head * dim + partner, mask=turned, other=0.0).to(tl.float32)

    if norm != 0:
        inverse = _inverse_norm(row, head, heads, kv_heads, dim, padded, norm, padded_all, eps)
        at = tl.where(head < heads, head, head - heads) * dim if norm == NORM_FULL else 0
        weight = tl.load(q_weight + at + d, mask=inside & is_q, other=0.0) + tl.load(
            k_weight + at + d, mask=inside & is_k, other=0.0
        )
        weight_other = tl.load(q_weight + at + partner, mask=turned & is_q, other=0.0) + tl.load(
            k_weight + at + partner, mask=turned & is_k, other=0.0
        )
        x = tl.where(is_q | is_k, x * inverse * weight, x)
        other = other * inverse * weight_other

    if rotary > 0:
        c = tl.load(cos + token * (rotary // 2) + angle, mask=turned, other=1.0)
        s = tl.load(sin + token * (rotary // 2) + angle, mask=turned, other=0.0)
        x = tl.where(turned, x * c + sign * (other * s), x)

    if head < heads:
        tl.store(q_out + (token * heads + head) * dim + d, x.to(q_out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + token)
        block = (slot // block_size).to(tl.int64)
        kv_head = head - heads  # V follows K: its heads count on
        place = (block * 2 * kv_heads + kv_head) * block_size * dim + (slot % block_size) * dim
        kept = inside & (slot + tl.zeros([padded], tl.int32) >= 0) & (block + tl.zeros([padded], tl.int64) < num_blocks)
        tl.store(pool + place + d, to_pool(x, kind, pool.dtype.element_ty), mask=kept)
