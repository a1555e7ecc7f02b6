"""One tile of keys against a tile of query rows: what the decode and the prefill kernels share.

Online softmax (Milakov and Gimelshein 2018), tiles over a block table as in PagedAttention (Kwon et al. 2023). Weights
are powers of two: scores are multiplied by log2(e) beforehand.
"""

import triton
import triton.language as tl

from castline.plugins.tensorrt.kernels.elements import from_pool

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def key_tile(pool, table, keys, last, kv_head, num_blocks, kv_heads: tl.constexpr, dim: tl.constexpr,
             padded: tl.constexpr, block_size: tl.constexpr, kind: tl.constexpr, compute: tl.constexpr):  # fmt: skip
    """K and V [tile, padded] at the positions *keys* below *last*, found through the sequence's row of the table."""
    d = tl.arange(0, padded)
    known = keys < last
    block = tl.load(table + keys // block_size, mask=known, other=0)
    block = tl.minimum(tl.maximum(block, 0), num_blocks - 1).to(tl.int64)
    place = (block * 2 * kv_heads + kv_head) * block_size * dim + (keys % block_size) * dim
    mask = known[:, None] & (d < dim)[None, :]
    k = tl.load(pool + place[:, None] + d[None, :], mask=mask, other=0)
    v = tl.load(pool + (place + kv_heads * block_size * dim)[:, None] + d[None, :], mask=mask, other=0)
    return from_pool(k, kind, compute), from_pool(v, kind, compute)


@triton.jit
def score_tile(q, k, scale: tl.constexpr, softcap: tl.constexpr):
    """Scores [rows, tile] in units of log2."""
    scores = tl.dot(q, tl.trans(k), out_dtype=tl.float32) * scale
    if softcap > 0:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    return scores * LOG2_E


@triton.jit
def add_tile(scores, visible, v, highest, total, summed):
    """The running softmax of the rows (highest score, sum of weights, weighted sum of V) with one more tile."""
    scores = tl.where(visible, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    shift = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a row that sees no key yet
    weights = tl.exp2(scores - shift[:, None])
    keep = tl.exp2(highest - shift)
    total = total * keep + tl.sum(weights, 1)
    summed = summed * keep[:, None] + tl.dot(weights.to(v.dtype), v, out_dtype=tl.float32)
    return new_highest, total, summed
