"""The last step of the graph: the cpu target's pools, metadata and attributes, and the files of a bundle.

`lower_cpu` gives the graph the inputs of the step contract, under its names. `save_graph` writes it with the weights
beside it, one tensor in memory at a time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from castline.builder.passes.walk import attribute, ours, sizes
from castline.engines.capacity import kv_block_bytes
from castline.engines.manifest import KvDtype
from castline.plugins.contract import (
    BLOCK_TABLE,
    CU_QUERY_LENS,
    DOMAIN,
    KV_DTYPE_CODES,
    KV_LENS,
    LOGITS,
    LOGITS_INDICES,
    LOGITS_MAXIMA,
    OPSET_VERSION,
    PAGED_ATTENTION,
    SLOT_MAPPING,
    AttentionAttributes,
    kv_pool_name,
)
from castline.plugins.linear import LINEAR, MAXIMA_BLOCK

GRAPH_NAME = "model.onnx"
WEIGHTS_NAME = "weights.bin"
ALIGNMENT = 4096
"""Of every tensor in the weights file: whole pages, so that mapping one maps no part of another."""
INLINE_BYTES = 1024
"""Smaller tensors stay in the graph file."""
SAME_BYTES_AS = "castline.same_bytes_as"
"""Metadata of a tensor that is another initializer's bytes under another shape: both point to one place in the file."""

_POOL_INPUT = 5
_METADATA = {
    SLOT_MAPPING: ("T",),
    CU_QUERY_LENS: ("B_plus_1",),
    KV_LENS: ("B",),
    BLOCK_TABLE: ("B", "M"),
}


def lower_cpu(
    model: ir.Model, *, kv_dtype: KvDtype, block_size: int, query_tile: int = 0, kv_split: int = 0
) -> ir.Model:
    """Attaches KV pools and step metadata to every PagedAttention, in place, and returns *model*.

    May be called again with other values: the last call holds.
    """
    graph = model.graph
    inputs = {value.name: value for value in graph.inputs}
    for name, shape in _METADATA.items():
        if name not in inputs:
            inputs[name] = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(ir.DataType.INT32))
    for node in ours(model, PAGED_ATTENTION):
        facts = _attributes(node, kv_dtype, block_size, query_tile, kv_split)
        name = kv_pool_name(facts.layer)
        block_bytes = kv_block_bytes(facts.num_kv_heads, facts.head_dim, block_size, kv_dtype)
        pool = inputs.setdefault(name, ir.Value(name=name, type=ir.TensorType(ir.DataType.UINT8)))
        pool.shape = ir.Shape(["num_blocks", block_bytes])
        node.resize_inputs(_POOL_INPUT + 1 + len(_METADATA))
        for index, value in enumerate([pool, *(inputs[m] for m in _METADATA)], start=_POOL_INPUT):
            node.replace_input_with(index, value)
        for key in AttentionAttributes.__dataclass_fields__:
            value = getattr(facts, key)
            node.attributes.add(ir.AttrFloat32(key, value) if isinstance(value, float) else ir.AttrInt64(key, value))
    add_maxima(model)
    rows = inputs.pop(LOGITS_INDICES)
    pools = [inputs.pop(name) for name in list(inputs) if name is not None and name.startswith("kv_pool.")]
    graph.inputs.clear()
    graph.inputs.extend([*inputs.values(), rows, *pools])
    model.opset_imports[DOMAIN] = OPSET_VERSION
    return model


def add_maxima(model: ir.Model) -> None:
    """Names the second output of the Linear that gives the logits, for the sampler. Other heads have none."""
    logits = next((value for value in model.graph.outputs if value.name == LOGITS), None)
    head = None if logits is None else logits.producer()
    if head is None or head.domain != DOMAIN or head.op_type != LINEAR or len(head.outputs) > 1:
        return
    head.resize_outputs(2)
    maxima = head.outputs[1]
    maxima.name, maxima.type = LOGITS_MAXIMA, ir.TensorType(ir.DataType.FLOAT)
    maxima.shape = ir.Shape(["R", -(-int(attribute(head, "n")) // MAXIMA_BLOCK)])
    model.graph.outputs.append(maxima)


def _attributes(
    node: ir.Node, kv_dtype: KvDtype, block_size: int, query_tile: int, kv_split: int
) -> AttentionAttributes:
    chosen = {
        "kv_dtype": int(KV_DTYPE_CODES[kv_dtype]),
        "block_size": block_size,
        "query_tile": query_tile,
        "kv_split": kv_split,
    }
    names = [name for name in AttentionAttributes.__dataclass_fields__ if name not in chosen]
    return AttentionAttributes(**{name: attribute(node, name) for name in names}, **chosen)


def save_graph(model: ir.Model, directory: Path) -> Path:
    """Writes ``model.onnx`` and ``weights.bin`` into *directory*; the path of the graph. *model* keeps its tensors."""
    common.TopologicalSortPass()(model)
    path = directory / GRAPH_NAME
    with (directory / WEIGHTS_NAME).open("wb") as file, _external(model, file):
        proto = ir.to_proto(model)
    path.write_bytes(proto.SerializeToString())
    return path


@contextmanager
def _external(model: ir.Model, file: BinaryIO) -> Iterator[None]:
    """Streams large initializers to *file*; inside the block they are references into it."""
    tensors = {value: value.const_value for value in model.graph.initializers.values()}
    places: dict[str, tuple[int, int]] = {}
    ordered = sorted(tensors, key=lambda value: _owner(tensors[value]) is not None)
    try:
        for value in ordered:
            tensor = tensors[value]
            if tensor is None or tensor.nbytes < INLINE_BYTES:
                continue
            owner = _owner(tensor)
            offset, length = places[owner] if owner in places else _append(file, tensor)
            places[str(value.name)] = (offset, length)
            value.const_value = ir.ExternalTensor(
                WEIGHTS_NAME, offset, length, tensor.dtype, shape=ir.Shape(sizes(tensor)), name=str(value.name)
            )
        yield
    finally:
        for value, tensor in tensors.items():
            value.const_value = tensor


def _owner(tensor: ir.TensorProtocol | None) -> str | None:
    return None if tensor is None else tensor.metadata_props.get(SAME_BYTES_AS)


def _append(file: BinaryIO, tensor: ir.TensorProtocol) -> tuple[int, int]:
    file.write(b"\0" * (-file.tell() % ALIGNMENT))
    offset = file.tell()
    array = np.ascontiguousarray(tensor.numpy())
    packed = tensor.nbytes < array.nbytes  # two 4-bit values a byte
    file.write(tensor.tobytes() if packed else array.reshape(-1).view(np.uint8).data)
    return offset, file.tell() - offset
