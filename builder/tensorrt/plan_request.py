"""What the process that builds a plan is told, and what it answers: plain data, as JSON files."""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from castline.engines.capacity import blocks_for
from castline.engines.manifest import Limits
from castline.engines.sku import Flavour
from castline.plugins.contract import (
    BLOCK_TABLE,
    CU_QUERY_LENS,
    INPUT_IDS,
    KV_LENS,
    LOGITS_INDICES,
    POSITIONS,
    SLOT_MAPPING,
    kv_pool_name,
)

Range = tuple[int, int, int]
"""Smallest, usual, largest."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    flavour: Flavour
    compute_capability: str
    multiprocessors: int
    graph: Path
    kernels: Path
    """Directory of the compiled kernels: their workspace is part of the plan."""
    plan: Path
    """Where to write it."""
    pool_bytes: tuple[int, ...]
    """Bytes of one KV block, for each layer."""
    max_blocks: int
    """More than fit the GPU."""
    limits: Limits
    timing_cache: Path | None = None
    """Read where it is there, and written afterwards; `tensorrt` only."""


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """``errors`` is empty exactly where a plan was written."""

    seconds: float
    layers: int
    errors: tuple[str, ...]
    log: tuple[str, ...]
    """Every message of the builder, each with its severity in front."""


def profiles(request: PlanRequest) -> tuple[dict[str, tuple[tuple[int, ...], ...]], ...]:
    """For each profile: input → its smallest, usual and largest shape.

    Mixed: prefill chunks and decodes of any proportion, with logits of every token at most (prompt log-probabilities).
    Decode: one token a sequence. A pool may have as many blocks as the GPU of the day has memory for; nothing but the
    attention node reads it, so that nothing is chosen by its size.
    """
    limits = request.limits
    tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
    usual = max(1, sequences // 4)
    mixed = _shapes(request, (1, tokens, tokens), (1, usual, sequences), (1, usual, tokens))
    decode = _shapes(request, *[(1, usual, sequences)] * 3)
    return mixed, decode


def _shapes(request: PlanRequest, t: Range, b: Range, r: Range) -> dict[str, tuple[tuple[int, ...], ...]]:
    width = blocks_for(request.limits.max_model_len, request.limits.block_size)
    shapes: dict[str, tuple[tuple[int, ...], ...]] = {name: _each(t) for name in (INPUT_IDS, POSITIONS, SLOT_MAPPING)}
    shapes[CU_QUERY_LENS] = tuple((n + 1,) for n in b)
    shapes[KV_LENS] = _each(b)
    shapes[BLOCK_TABLE] = tuple(zip(b, (1, width, width), strict=True))
    shapes[LOGITS_INDICES] = _each(r)
    for layer, block_bytes in enumerate(request.pool_bytes):
        shapes[kv_pool_name(layer)] = tuple((n, block_bytes) for n in (1, 1, request.max_blocks))
    return shapes


def _each(sizes: Range) -> tuple[tuple[int, ...], ...]:
    return tuple((n,) for n in sizes)


def encode(message: PlanRequest | PlanAnswer) -> bytes:
    return msgspec.json.encode(message, enc_hook=str)


def decode_request(text: bytes) -> PlanRequest:
    return msgspec.json.decode(text, type=PlanRequest, dec_hook=lambda kind, value: kind(value))


def decode_answer(text: bytes) -> PlanAnswer:
    return msgspec.json.decode(text, type=PlanAnswer)
