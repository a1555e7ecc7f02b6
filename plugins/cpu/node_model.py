"""A serialised ONNX model of one attention node, written without the onnx package, which serving does not have.

The self-test runs it; so do measurements of the kernel alone. Only the few protobuf fields needed are known here; their
numbers are those of onnx.proto.
"""

from collections.abc import Iterable
from dataclasses import fields

import numpy as np

from castline.engines.capacity import kv_block_bytes
from castline.engines.manifest import KvDtype
from castline.plugins.contract import (
    BLOCK_TABLE,
    CU_QUERY_LENS,
    DOMAIN,
    KV_DTYPE_CODES,
    KV_LENS,
    OPSET_VERSION,
    PAGED_ATTENTION,
    SLOT_MAPPING,
    AttentionAttributes,
    QkNorm,
    kv_pool_name,
)

QKV, COS, SIN, Q_NORM_WEIGHT, K_NORM_WEIGHT, OUTPUT = "qkv", "cos", "sin", "q_norm_weight", "k_norm_weight", "output"

_FLOAT, _UINT8, _INT32 = 1, 2, 6
_IR_VERSION = 10
_ONNX_OPSET = 21
_ATTRIBUTE_FLOAT, _ATTRIBUTE_INT = 1, 2


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
    shapes: dict[str, tuple[int, tuple[str | int, ...]]] = {
        QKV: (_FLOAT, ("T", width)),
        COS: (_FLOAT, ("T", a.rotary_dim // 2)),
        SIN: (_FLOAT, ("T", a.rotary_dim // 2)),
        Q_NORM_WEIGHT: (_FLOAT, (norm_width or a.num_heads * a.head_dim,)),
        K_NORM_WEIGHT: (_FLOAT, (norm_width or a.num_kv_heads * a.head_dim,)),
        kv_pool_name(0): (_UINT8, ("num_blocks", block_bytes(a))),
        SLOT_MAPPING: (_INT32, ("T",)),
        CU_QUERY_LENS: (_INT32, ("B_plus_1",)),
        KV_LENS: (_INT32, ("B",)),
        BLOCK_TABLE: (_INT32, ("B", "M")),
    }
    names = node_inputs(a)
    node = [_string(1, name) for name in names]
    node += [_string(2, OUTPUT), _string(3, "attention"), _string(4, PAGED_ATTENTION)]
    node += [_message(5, _attribute(f.name, getattr(a, f.name))) for f in fields(a)]
    node.append(_string(7, DOMAIN))
    graph = [_message(1, node), _string(2, "paged_attention")]
    graph += [_message(11, _value_info(name, *shapes[name])) for name in names if name]
    graph.append(_message(12, _value_info(OUTPUT, _FLOAT, ("T", a.num_heads * a.head_dim))))
    model = [_varint(1, _IR_VERSION), _message(7, graph)]
    for domain, version in (("", _ONNX_OPSET), (DOMAIN, OPSET_VERSION)):
        model.append(_message(8, [_string(1, domain), _varint(2, version)]))
    return b"".join(model)


def _attribute(name: str, value: float) -> list[bytes]:
    if isinstance(value, float):
        return [_string(1, name), _key(2, 5) + np.float32(value).tobytes(), _varint(20, _ATTRIBUTE_FLOAT)]
    return [_string(1, name), _varint(3, int(value)), _varint(20, _ATTRIBUTE_INT)]


def _value_info(name: str, element: int, shape: Iterable[str | int]) -> list[bytes]:
    dims = [_message(1, [_varint(1, d) if isinstance(d, int) else _string(2, d)]) for d in shape]
    tensor = _message(1, [_varint(1, element), _message(2, dims)])
    return [_string(1, name), _message(2, [tensor])]


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _key(number: int, wire_type: int) -> bytes:
    return _unsigned(number << 3 | wire_type)


def _varint(number: int, value: int) -> bytes:
    return _key(number, 0) + _unsigned(value & 0xFFFFFFFFFFFFFFFF)


def _message(number: int, parts: Iterable[bytes]) -> bytes:
    body = b"".join(parts)
    return _key(number, 2) + _unsigned(len(body)) + body


def _string(number: int, text: str) -> bytes:
    return _message(number, [text.encode()])
