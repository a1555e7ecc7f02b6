"""The step contract: the tensors of one forward pass, and the attention node that consumes them.

One forward pass serves prefill chunks and decodes together. T tokens of B sequences are packed with no padding; R rows
of logits are wanted. All graphs of all targets take these tensors under these names, and one KV pool a layer.

The pool of a layer is opaque outside the plugin: ``uint8 [num_blocks, block_bytes]``. What a block holds (element
layout, scales) is the plugin's affair; block_bytes is `castline.engines.capacity.kv_block_bytes`. The node mutates the
pool in place.
"""

from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

DOMAIN: Final = "castline"
PAGED_ATTENTION: Final = "PagedAttention"
OPSET_VERSION: Final = 1

INPUT_IDS: Final = "input_ids"
POSITIONS: Final = "positions"
SLOT_MAPPING: Final = "slot_mapping"
CU_QUERY_LENS: Final = "cu_query_lens"
KV_LENS: Final = "kv_lens"
BLOCK_TABLE: Final = "block_table"
LOGITS_INDICES: Final = "logits_indices"
LOGITS: Final = "logits"
LOGITS_MAXIMA: Final = "logits_maxima"
"""Optional output, for the sampler: the largest logit of each block of castline.plugins.linear.MAXIMA_BLOCK tokens."""

HEAD_DIM_STEP: Final = 8
MAX_HEAD_DIM: Final = 256
"""Heads that the kernels take: multiples of HEAD_DIM_STEP up to MAX_HEAD_DIM elements."""


def kv_pool_name(layer: int) -> str:
    """Graph input that carries the KV pool of *layer* (0-based)."""
    return f"kv_pool.{layer}"


def kv_pool_output_name(layer: int) -> str:
    """Graph output of that pool on GPUs: an alias of the input, bound to the same address."""
    return f"kv_pool_out.{layer}"


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Inputs of one forward pass. T packed tokens, B sequences, M blocks a table row, R rows of logits."""

    input_ids: NDArray[np.int64]
    """[T]"""
    positions: NDArray[np.int64]
    """[T] position of each token in its sequence."""
    slot_mapping: NDArray[np.int32]
    """[T] where K and V of the token go: block * block_size + offset; -1 writes nowhere."""
    cu_query_lens: NDArray[np.int32]
    """[B + 1] where each sequence's tokens start; first 0, last T, never decreasing."""
    kv_lens: NDArray[np.int32]
    """[B] tokens that each sequence has after this step, at least its query length."""
    block_table: NDArray[np.int32]
    """[B, M] physical block of each logical block; entries past ceil(kv_len / block_size) are never read."""
    logits_indices: NDArray[np.int64]
    """[R] rows of the packed tokens whose logits are wanted, in the order wanted."""

    def feeds(self) -> dict[str, NDArray[Any]]:
        """The tensors by graph input name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


class KvDtypeCode(IntEnum):
    """Attribute ``kv_dtype`` of the node."""

    FP32 = 0
    BF16 = 1
    INT8 = 2
    FP8 = 3
    FP16 = 4
    """GPUs only."""


CPU_KV_DTYPES: Final = (KvDtypeCode.FP32, KvDtypeCode.BF16, KvDtypeCode.INT8, KvDtypeCode.FP8)
GPU_KV_DTYPES: Final = (KvDtypeCode.FP8, KvDtypeCode.FP16, KvDtypeCode.BF16)

KV_DTYPE_CODES: Final = {
    "fp32": KvDtypeCode.FP32,
    "bf16": KvDtypeCode.BF16,
    "int8": KvDtypeCode.INT8,
    "fp8": KvDtypeCode.FP8,
    "fp16": KvDtypeCode.FP16,
}


class QkNorm(IntEnum):
    """Attribute ``qk_norm``: RMSNorm of Q and K before RoPE."""

    NONE = 0
    PER_HEAD = 1
    """Over head_dim, one weight vector [head_dim] each for Q and K (qwen3, gemma3)."""
    FULL = 2
    """Over all heads together, weights [num_heads * head_dim] and [num_kv_heads * head_dim] (olmo2)."""


@dataclass(frozen=True, slots=True)
class AttentionAttributes:
    """Attributes of the ``castline::PagedAttention`` node: numbers only, so that every parser passes them on.

    Inputs of the node, in order (float32 unless said; "" where absent):

    ==  =============  ==========================================================================
    0   qkv            [T, (num_heads + 2 * num_kv_heads) * head_dim]: Q heads, K heads, V heads
    1   cos            [T, rotary_dim / 2]; absent when rotary_dim is 0
    2   sin            as cos
    3   q_norm_weight  absent when qk_norm is NONE
    4   k_norm_weight  absent when qk_norm is NONE
    5   kv_pool        uint8 [num_blocks, block_bytes], mutated in place
    6   slot_mapping   int32 [T]
    7   cu_query_lens  int32 [B + 1]
    8   kv_lens        int32 [B]
    9   block_table    int32 [B, M]
    ==  =============  ==========================================================================

    Output: [T, num_heads * head_dim] float32.

    On GPUs qkv and the output are fp16 or bf16, cos, sin and the norm weights float32, and the pool is ``int8`` and a
    second output as well, an alias of the input: TensorRT returns what a node mutates. Inputs that are absent are left
    out there, so that those after them move up (`gpu_node_inputs`): rotary_dim and qk_norm say which there are.

    For each token: QK-norm, RoPE on the first rotary_dim elements of each Q and K head, quantise K and V and append
    them at the token's slot; then attention of every query over the keys of its sequence at positions
    ``max(0, p - window + 1) .. p`` where p is the query's position (``kv_len - query_len + i`` for query i). K and V
    of the step itself are read back from the pool, so that a token's value does not depend on how a prompt was chunked.
    Query heads h share kv head ``h // (num_heads / num_kv_heads)``. Scores are
    ``softcap * tanh(scale * q.k / softcap)`` where softcap > 0, else ``scale * q.k``.

    What the pool gives back for a K or V head x of a token: fp32, x; bf16, x rounded to nearest, ties to even; fp16,
    the same, saturating at 65504; fp8, x rounded to e4m3fn, ties to even, saturating at 448 (no infinity); int8,
    ``scale * clip(rint(x / scale), -127, 127)`` with ``scale = max|x| / 127`` in float32, one for each (token, kv head)
    of K and of V, and 0 where scale is 0. The norm's mean square is a float64 sum, and RoPE rounds every product, so
    that implementations agree to the bit there. `castline.plugins.reference` is this text in NumPy.

    Shapes, slots, lengths and the block ids that are read are checked: a wrong one is an error that names the tensor.
    query_tile and kv_split change the time of a step and nothing else: a row's result depends, to the bit, on its own
    query and keys alone, whichever kernels compute it. Queries, and the weights that multiply V, are float32, or with
    int8 pools integers of 16 bits. The cpu target's matrix instructions (CASTLINE_ISA amx) take both with 16 bits of
    mantissa for bf16 pools, and rounded to bf16 for fp8 pools, whose own steps are 16 times as coarse. Where it has
    AVX512_FP16 and no matrix instructions (avx512fp16), both are halves for fp8 pools, and add up as halves over 64
    dimensions or keys before they do in float32: an error of about two thirds of that.

    RoPE, half style (rope_interleaved = 0), r = rotary_dim / 2: ``out[i] = x[i] cos[i] - x[i + r] sin[i]`` and
    ``out[i + r] = x[i + r] cos[i] + x[i] sin[i]``; interleaved: the pair is (x[2i], x[2i + 1]).
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    block_size: int
    kv_dtype: int
    window: int = 0
    """0: full attention."""
    softcap: float = 0.0
    rotary_dim: int = 0
    rope_interleaved: int = 0
    qk_norm: int = 0
    norm_eps: float = 1e-6
    query_tile: int = 0
    """Query tokens of one work item; 0 lets the kernel choose."""
    kv_split: int = 0
    """Keys a split of a long decode takes (split-K), in whole key tiles of 256; 0 lets the kernel choose. A sequence
    whose queries fill more than one query tile is never split."""


def gpu_node_inputs(attributes: AttentionAttributes) -> tuple[str, ...]:
    """The inputs that a node has on GPUs, in order; the pool as ``kv_pool``, and the step's tensors by their names."""
    rope = ("cos", "sin") if attributes.rotary_dim else ()
    norm = ("q_norm_weight", "k_norm_weight") if attributes.qk_norm != QkNorm.NONE else ()
    return ("qkv", *rope, *norm, "kv_pool", SLOT_MAPPING, CU_QUERY_LENS, KV_LENS, BLOCK_TABLE)
