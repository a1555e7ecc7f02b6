"""A serialised ONNX model of one attention node: the self-test runs it; so do measurements of the kernel alone."""

from dataclasses import asdict

from castline.engines.capacity import kv_block_bytes
from castline.engines.manifest import KvDtype
from castline.plugins.contract import (
    BLOCK_TABLE,
    CU_QUERY_LENS,
    KV_DTYPE_CODES,
    KV_LENS,
    PAGED_ATTENTION,
    SLOT_MAPPING,
    AttentionAttributes,
    QkNorm,
    kv_pool_name,
)
from castline.plugins.cpu.model_writer import FLOAT, INT32, UINT8, ValueType, serialise_node

QKV, COS, SIN, Q_NORM_WEIGHT, K_NORM_WEIGHT = "qkv", "cos", "sin", "q_norm_weight", "k_norm_weight"


def block_bytes(attributes: AttentionAttributes) -> int:
    """Bytes of one KV block of the node's layer."""
    dtypes: dict[int, KvDtype] = {int(code): name for name, code in KV_DTYPE_CODES.items()}  # type: ignore[misc]
    a = attributes
    return kv_block_bytes(a.num_kv_heads, a.head_dim, a.block_size, dtypes[a.kv_dtype])


def node_inputs(attributes: AttentionAttributes) -> list[str]:
    """Graph input of each node input, "" where the node has none."""
    rope, norm = attributes.rotary_dim > 0, attributes.qk_norm != QkNorm.NONE
    return [
        QKV,
        COS if rope else "",
        SIN if rope else "",
        Q_NORM_WEIGHT if norm else "",
        K_NORM_WEIGHT if norm else "",
        kv_pool_name(0),
        SLOT_MAPPING,
        CU_QUERY_LENS,
        KV_LENS,
        BLOCK_TABLE,
    ]


def serialise_node_model(attributes: AttentionAttributes) -> bytes:
    """A ModelProto whose graph is the one node; all its inputs are graph inputs, its output is ``output``."""
    a = attributes
    width = (a.num_heads + 2 * a.num_kv_heads) * a.head_dim
    norm_width = a.head_dim if a.qk_norm == QkNorm.PER_HEAD else 0
    types: dict[str, ValueType] = {
        QKV: (FLOAT, ("T", width)),
        COS: (FLOAT, ("T", a.rotary_dim // 2)),
        SIN: (FLOAT, ("T", a.rotary_dim // 2)),
        Q_NORM_WEIGHT: (FLOAT, (norm_width or a.num_heads * a.head_dim,)),
        K_NORM_WEIGHT: (FLOAT, (norm_width or a.num_kv_heads * a.head_dim,)),
        kv_pool_name(0): (UINT8, ("num_blocks", block_bytes(a))),
        SLOT_MAPPING: (INT32, ("T",)),
        CU_QUERY_LENS: (INT32, ("B_plus_1",)),
        KV_LENS: (INT32, ("B",)),
        BLOCK_TABLE: (INT32, ("B", "M")),
    }
    return serialise_node(PAGED_ATTENTION, asdict(a), node_inputs(a), types, ("T", a.num_heads * a.head_dim))
