"""The bytes that one decode step of a bundle reads, from its graph: which initializers feed what."""

from collections import defaultdict
from pathlib import Path

import onnx

from benchmarks.bandwidth import Roofline
from castline.engines.capacity import kv_block_bytes
from castline.engines.manifest import Manifest
from castline.plugins.linear import EMBEDDING

ROW_LOOKUPS = ("Gather", "GatherBlockQuantized", EMBEDDING)
"""Operators that read single rows of a table."""


def roofline_of(bundle: Path, manifest: Manifest, context_tokens: int) -> Roofline:
    """*context_tokens*: the mean context of the steps that are judged by it."""
    model = onnx.load(bundle / manifest.graph_file, load_external_data=False)
    return Roofline(*weight_bytes(model), context_tokens * kv_token_bytes(manifest))


def weight_bytes(model: onnx.ModelProto) -> tuple[int, int]:
    """Bytes of the initializers that every step reads, and of those it only looks rows up in.

    A table that is looked up in and multiplied by (tied embeddings) is read; bytes with two names count once.
    """
    readers: dict[str, set[str]] = defaultdict(set)
    for node in model.graph.node:
        for name in node.input:
            readers[name].add(node.op_type)
    read, unread = set[tuple[str, int, int]](), set[tuple[str, int, int]]()
    for tensor in model.graph.initializer:
        only_rows = readers[tensor.name] <= set(ROW_LOOKUPS)
        (unread if only_rows else read).add(_place(tensor))
    return sum(size for *_, size in read), sum(size for *_, size in unread - read)


def kv_token_bytes(manifest: Manifest) -> int:
    """Of one token over all layers."""
    model, block_size = manifest.model, manifest.limits.block_size
    block = kv_block_bytes(model.num_kv_heads, model.head_dim, block_size, manifest.precision.kv_dtype)
    return block * model.num_layers // block_size


def _place(tensor: onnx.TensorProto) -> tuple[str, int, int]:
    """Where a tensor's bytes are, and how many."""
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        entries = {entry.key: entry.value for entry in tensor.external_data}
        return entries["location"], int(entries.get("offset", 0)), int(entries["length"])
    return tensor.name, 0, len(tensor.raw_data) or tensor.ByteSize()
