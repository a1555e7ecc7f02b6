"""How many KV blocks fit, and what that serves. Pure arithmetic: the planner and the loader call the same functions.

Sizes are in bytes, lengths in tokens.
"""

from dataclasses import dataclass

from castline.engines.manifest import KvDtype, ModelFacts

KV_ELEMENT_BYTES: dict[KvDtype, int] = {"fp32": 4, "bf16": 2, "int8": 1, "fp8": 1, "fp16": 2}
SCALE_BYTES: dict[KvDtype, int] = {"fp32": 0, "bf16": 0, "int8": 4, "fp8": 0, "fp16": 0}
"""Bytes of scale kept for each (token, kv head) of K and again of V."""


def kv_block_bytes(num_kv_heads: int, head_dim: int, block_size: int, kv_dtype: KvDtype) -> int:
    """Bytes of one KV block of one layer: K and V of every kv head for *block_size* tokens, scales included."""
    per_token_head = head_dim * KV_ELEMENT_BYTES[kv_dtype] + SCALE_BYTES[kv_dtype]
    return 2 * num_kv_heads * block_size * per_token_head


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold *num_tokens*."""
    return -(-num_tokens // block_size)


@dataclass(frozen=True, slots=True)
class KvCapacity:
    """The KV pool of one engine on one host."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    """Over all layers."""
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """Sequences of max_model_len that fit at once."""
        return self.num_blocks / blocks_for(self.max_model_len, self.block_size)

    @property
    def total_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block


def plan_kv(
    model: ModelFacts,
    kv_dtype: KvDtype,
    block_size: int,
    max_model_len: int,
    available_bytes: int,
    num_blocks: int | None = None,
) -> KvCapacity:
    """The pool for *available_bytes* of memory, or of exactly *num_blocks* when given."""
    per_layer = kv_block_bytes(model.num_kv_heads, model.head_dim, block_size, kv_dtype)
    per_block = per_layer * model.num_layers
    if num_blocks is None:
        num_blocks = max(0, available_bytes) // per_block
    return KvCapacity(num_blocks, block_size, per_block, max_model_len)
