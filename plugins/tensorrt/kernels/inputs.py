"""The inputs of the next decode step, from what is on the device already: only new tokens need to cross the bus."""

import triton
import triton.language as tl


@triton.jit
def gather_inputs(
    sampled,  # int32 [previous R]: tokens of the step before
    source,  # int32 [B]: row of `sampled` that a sequence continues, or -1 for one whose token the host gives
    given,  # int32 [B]: that token
    table,  # int32 [B, table_width]
    kv_lens,  # int32 [B]: raised by one
    input_ids,  # int32 [B]
    positions,  # int32 [B]
    slots,  # int32 [B]
    batch,
    table_width,
    block_size: tl.constexpr,
    width: tl.constexpr,
):
    """Grid (ceil(B / width),). A row of length 0 is padding: its token is 0 and it writes nowhere."""
    i = tl.program_id(0) * width + tl.arange(0, width)
    inside = i < batch
    length = tl.load(kv_lens + i, mask=inside, other=0)
    live = inside & (length > 0)
    row = tl.load(source + i, mask=live, other=-1)
    token = tl.where(row >= 0, tl.load(sampled + row, mask=live & (row >= 0), other=0),
                     tl.load(given + i, mask=live & (row < 0), other=0))  # fmt: skip
    block = tl.load(table + i.to(tl.int64) * table_width + length // block_size, mask=live, other=0)
    tl.store(input_ids + i, token, mask=inside)
    tl.store(positions + i, tl.where(live, length, 0), mask=inside)
    tl.store(slots + i, tl.where(live, block * block_size + length % block_size, -1), mask=inside)
    tl.store(kv_lens + i, length + 1, mask=live)
