"""Attention of sequences with one new token. Query heads of a group share the loads of their kv head's keys.

`decode` takes a whole sequence a program; `decode_split` cuts its keys into *num_splits* parts (split-K), whose softmax
`decode_merge` joins: for batches too small to fill the GPU. Sequences with another number of new tokens are skipped:
`prefill` takes those, so that a mixed step launches both.
"""

import triton
import triton.language as tl

from castline.plugins.tensorrt.kernels.attention import add_tile, key_tile, score_tile


@triton.jit
def _attend(q, pool, table, kv_lens, cu_query_lens, table_width, num_blocks, first_part, num_parts,
            heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, padded: tl.constexpr,
            block_size: tl.constexpr, rows: tl.constexpr, tile: tl.constexpr, scale: tl.constexpr,
            window: tl.constexpr, softcap: tl.constexpr, kind: tl.constexpr):  # fmt: skip
    """Softmax over part *first_part* of *num_parts* of the keys, for the query heads of one kv head."""
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    group: tl.constexpr = heads // kv_heads
    token = tl.load(cu_query_lens + sequence).to(tl.int64)
    length = tl.minimum(tl.load(kv_lens + sequence), table_width * block_size)
    low = tl.maximum(length - window, 0) if window > 0 else 0
    first, last = low // tile, tl.cdiv(length, tile)
    per_part = tl.cdiv(last - first, num_parts)
    begin = first + first_part * per_part

    g, d = tl.arange(0, rows), tl.arange(0, padded)
    real = (g < group)[:, None] & (d < dim)[None, :]
    queries = tl.load(q + (token * heads + kv_head * group + g)[:, None] * dim + d[None, :], mask=real, other=0.0)
    highest = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    summed = tl.zeros([rows, padded], tl.float32)
    for i in range(begin, tl.minimum(begin + per_part, last)):
        keys = i * tile + tl.arange(0, tile)
        k, v = key_tile(pool, table + sequence * table_width, keys, length, kv_head, num_blocks, kv_heads, dim, padded,
                        block_size, kind, queries.dtype)  # fmt: skip
        visible = ((keys >= low) & (keys < length))[None, :]
        highest, total, summed = add_tile(score_tile(queries, k, scale, softcap), visible, v, highest, total, summed)
    return highest, total, summed


@triton.jit
def decode(
    q,  # [T, heads * dim]
    pool,
    table,  # int32 [B, table_width]
    kv_lens,  # int32 [B]
    cu_query_lens,  # int32 [B + 1]
    out,  # [T, heads * dim]
    table_width,
    num_blocks,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    block_size: tl.constexpr,
    rows: tl.constexpr,  # power of two from the group up, at least 16
    tile: tl.constexpr,  # keys a tile
    scale: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    kind: tl.constexpr,
):
    """Grid (B, kv_heads)."""
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(cu_query_lens + sequence).to(tl.int64)
    if tl.load(cu_query_lens + sequence + 1) - token != 1:
        return
    _highest, total, summed = _attend(q, pool, table, kv_lens, cu_query_lens, table_width, num_blocks, 0, 1, heads,
                                      kv_heads, dim, padded, block_size, rows, tile, scale, window, softcap,
                                      kind)  # fmt: skip
    group: tl.constexpr = heads // kv_heads
    g, d = tl.arange(0, rows), tl.arange(0, padded)
    real = (g < group)[:, None] & (d < dim)[None, :]
    result = summed / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + (token * heads + kv_head * group + g)[:, None] * dim + d[None, :],
             result.to(out.dtype.element_ty), mask=real)  # fmt: skip


@triton.jit
def decode_split(
    q,
    pool,
    table,
    kv_lens,
    cu_query_lens,
    partial,  # float32 [B, heads, num_splits, padded + 2]: weighted sum, highest score, sum of weights
    table_width,
    num_blocks,
    num_splits,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    block_size: tl.constexpr,
    rows: tl.constexpr,
    tile: tl.constexpr,
    scale: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    kind: tl.constexpr,
):
    """Grid (B, kv_heads, num_splits)."""
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(cu_query_lens + sequence)
    if tl.load(cu_query_lens + sequence + 1) - token != 1:
        return
    highest, total, summed = _attend(q, pool, table, kv_lens, cu_query_lens, table_width, num_blocks, part, num_splits,
                                     heads, kv_heads, dim, padded, block_size, rows, tile, scale, window, softcap,
                                     kind)  # fmt: skip
    group: tl.constexpr = heads // kv_heads
    g, d = tl.arange(0, rows), tl.arange(0, padded)
    row = ((sequence * heads + kv_head * group + g).to(tl.int64) * num_splits + part) * (padded + 2)
    tl.store(partial + row[:, None] + d[None, :], summed, mask=(g < group)[:, None] & (d < padded)[None, :])
    tl.store(partial + row + padded, highest, mask=g < group)
    tl.store(partial + row + padded + 1, total, mask=g < group)


@triton.jit
def decode_merge(
    partial,
    cu_query_lens,
    out,
    num_splits,
    heads: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    max_splits: tl.constexpr,  # power of two
):
    """Grid (B, heads)."""
    sequence, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(cu_query_lens + sequence).to(tl.int64)
    if tl.load(cu_query_lens + sequence + 1) - token != 1:
        return
    part, d = tl.arange(0, max_splits), tl.arange(0, padded)
    row = ((sequence * heads + head).to(tl.int64) * num_splits + part) * (padded + 2)
    real = part < num_splits
    highest = tl.load(partial + row + padded, mask=real, other=float("-inf"))
    total = tl.load(partial + row + padded + 1, mask=real, other=0.0)
    top = tl.max(highest)
    weight = tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top))  # a row of length 0: padding
    summed = tl.load(partial + row[:, None] + d[None, :], mask=real[:, None], other=0.0)
    result = tl.sum(summed * weight[:, None], 0) / tl.maximum(tl.sum(total * weight), 1e-30)
    tl.store(out + (token * heads + head) * dim + d, result.to(out.dtype.element_ty), mask=d < dim)
