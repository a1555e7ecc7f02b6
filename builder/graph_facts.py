"""What the tuner and the report read off a graph."""

from collections import Counter

import onnx_ir as ir

from castline.builder.lower import SAME_BYTES_AS
from castline.builder.parts import bytes_by_part
from castline.builder.passes.walk import attribute, ours
from castline.engines.manifest import KvDtype
from castline.plugins.contract import KV_DTYPE_CODES, PAGED_ATTENTION, AttentionAttributes


def count_operators(model: ir.Model) -> dict[str, int]:
    """Nodes of each operator; those outside ONNX's own domain with their domain."""
    counts = Counter(f"{node.domain}::{node.op_type}" if node.domain else node.op_type for node in model.graph)
    return dict(counts)


def weight_sizes(model: ir.Model) -> dict[str, int]:
    """Bytes of each part of the model, shared weights once."""
    tensors = {value.name: value.const_value for value in model.graph.initializers.values()}
    own = {name: t for name, t in tensors.items() if t is not None and SAME_BYTES_AS not in t.metadata_props}
    return bytes_by_part((str(name), int(tensor.nbytes)) for name, tensor in own.items())


def attention_attributes(model: ir.Model, kv_dtype: KvDtype, block_size: int) -> AttentionAttributes:
    """The attributes that most of the fused graph's attention nodes have, with layer 0 written in."""
    open_fields = {"layer": 0, "kv_dtype": int(KV_DTYPE_CODES[kv_dtype]), "block_size": block_size}
    names = [
        name
        for name in AttentionAttributes.__dataclass_fields__
        if name not in (*open_fields, "query_tile", "kv_split")
    ]
    kinds = Counter(tuple(attribute(node, name) for name in names) for node in ours(model, PAGED_ATTENTION))
    [(values, _)] = kinds.most_common(1)
    return AttentionAttributes(**dict(zip(names, values, strict=True)), **open_fields)
