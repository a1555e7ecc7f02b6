"""Attention of prompt chunks: causal tiles of queries over paged keys and values.

A program takes *queries* tokens of one sequence, for all query heads of one kv head: they share the loads of its keys.
Sequence b has the tiles from ``cu_query_lens[b] // queries + b`` on, so that a grid of ``T // queries + B`` tiles has
room for every sequence without the host counting them (the numbering of vLLM's unified attention kernel).
"""

import triton
import triton.language as tl

from castline.plugins.tensorrt.kernels.attention import add_tile, key_tile, score_tile


@triton.jit
def _sequence_of(tile_index, cu_query_lens, num_sequences, queries: tl.constexpr):
    """The last sequence whose tiles begin at or before *tile_index*."""
    low, high = 0, num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_query_lens + middle) // queries + middle <= tile_index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def prefill(
    q,  # [T, heads * dim]
    pool,
    table,  # int32 [B, table_width]
    kv_lens,  # int32 [B]
    cu_query_lens,  # int32 [B + 1]
    out,  # [T, heads * dim]
    num_sequences,
    table_width,
    num_blocks,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    dim: tl.constexpr,
    padded: tl.constexpr,
    block_size: tl.constexpr,
    queries: tl.constexpr,  # tokens a tile
    group_rows: tl.constexpr,  # power of two from the group up; queries * group_rows is at least 16
    tile: tl.constexpr,  # keys a tile
    scale: tl.constexpr,
    window: tl.constexpr,
    softcap: tl.constexpr,
    kind: tl.constexpr,
):
    """Grid (T // queries + B, kv_heads). Sequences with one new token are left to the decode kernels."""
    tile_index, kv_head = tl.program_id(0), tl.program_id(1)
    sequence = _sequence_of(tile_index, cu_query_lens, num_sequences, queries)
    start = tl.load(cu_query_lens + sequence)
    count = tl.load(cu_query_lens + sequence + 1) - start
    first_query = (tile_index - (start // queries + sequence)) * queries
    if (first_query >= count) | (count == 1):
        return
    group: tl.constexpr = heads // kv_heads
    length = tl.minimum(tl.load(kv_lens + sequence), table_width * block_size)
    r, d = tl.arange(0, queries * group_rows), tl.arange(0, padded)
    query, g = first_query + r // group_rows, r % group_rows
    real = ((query < count) & (g < group))[:, None] & (d < dim)[None, :]
    place = ((start + query).to(tl.int64) * heads + kv_head * group + g)[:, None] * dim + d[None, :]
    rows = tl.load(q + place, mask=real, other=0.0)
    position = length - count + query

    highest = tl.full([queries * group_rows], float("-inf"), tl.float32)
    total = tl.zeros([queries * group_rows], tl.float32)
    summed = tl.zeros([queries * group_rows, padded], tl.float32)
    first_position = length - count + first_query
    low = tl.maximum(first_position - window + 1, 0) if window > 0 else 0
    last = tl.minimum(length, first_position + queries)
    for i in range(low // tile, tl.cdiv(last, tile)):
        keys = i * tile + tl.arange(0, tile)
        k, v = key_tile(pool, table + sequence * table_width, keys, last, kv_head, num_blocks, kv_heads, dim, padded,
                        block_size, kind, rows.dtype)  # fmt: skip
        visible = keys[None, :] <= position[:, None]
        if window > 0:
            visible = visible & (keys[None, :] > position[:, None] - window)
        highest, total, summed = add_tile(score_tile(rows, k, scale, softcap), visible, v, highest, total, summed)
    result = summed / tl.maximum(total, 1e-30)[:, None]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=real)
