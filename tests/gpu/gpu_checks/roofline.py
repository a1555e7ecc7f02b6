"""Bytes that a launch must move, whatever the kernel: each input once, each output once."""

from castline.plugins.contract import AttentionAttributes, KvDtypeCode
from castline.plugins.tensorrt.kernel_bench import Workload

HALF = 2
"""Bytes of an activation."""


def kv_bytes(a: AttentionAttributes, tokens: int) -> int:
    """K and V of so many tokens of one layer."""
    element = 1 if a.kv_dtype == KvDtypeCode.FP8 else 2
    return 2 * tokens * a.num_kv_heads * a.head_dim * element


def visible_tokens(a: AttentionAttributes, workload: Workload) -> int:
    """Of one sequence: keys that any of its new tokens sees."""
    if not a.window:
        return workload.kv_len
    return min(workload.kv_len, a.window + workload.query_len - 1)


def attend_bytes(a: AttentionAttributes, workload: Workload) -> int:
    """Of decode and prefill: queries in, outputs out, visible keys and values, their blocks' numbers."""
    rows = 2 * workload.tokens * a.num_heads * a.head_dim * HALF
    tokens = visible_tokens(a, workload)
    table = 4 * -(-tokens // a.block_size)
    return rows + workload.sequences * (kv_bytes(a, tokens) + table)


def append_bytes(a: AttentionAttributes, workload: Workload) -> int:
    """Of rope_append: qkv and angles in, rotated queries out, keys and values into the pool."""
    qkv = workload.tokens * (a.num_heads + 2 * a.num_kv_heads) * a.head_dim * HALF
    angles = workload.tokens * a.rotary_dim * 4
    queries = workload.tokens * a.num_heads * a.head_dim * HALF
    return qkv + angles + queries + kv_bytes(a, workload.tokens) + 4 * workload.tokens


def sampling_bytes(rows: int, vocab: int) -> int:
    """The logits, read once."""
    return 4 * rows * vocab
