"""The graph that TensorRT gets, made executable by ONNX Runtime with the cpu plugin: proof without the device.

What changes, and all that does:

- token ids, positions and rows come as int64, as every engine's step has them, and are cast to the graph's int32;
- pools are uint8 and no outputs: the cpu plugin writes in place. fp16 blocks, which it has not, stand as fp32;
- attention nodes get and give float32 through casts, and their absent inputs their places back;
- operators of 16-bit floats compute in float32 between casts that round each result, which is what a strongly typed
  network promises, and needs no 16-bit operators of ONNX Runtime.

Weights are the same bytes, e4m3 and 4-bit ones with their QuantizeLinear and DequantizeLinear among them.
"""

from typing import Final

import onnx_ir as ir

from castline.builder.passes.walk import attribute, make, ours, present
from castline.engines.capacity import kv_block_bytes
from castline.engines.manifest import KvDtype
from castline.plugins.contract import (
    INPUT_IDS,
    KV_DTYPE_CODES,
    LOGITS_INDICES,
    PAGED_ATTENTION,
    POSITIONS,
    QkNorm,
)

_MOVES: Final = frozenset(
    ("Cast", "Gather", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Split", "Concat", "Slice", "Identity", "Expand")
)
"""Operators that move elements and round nothing."""
_HALVES: Final = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_FLOAT: Final = ir.TensorType(ir.DataType.FLOAT)


def proof_kv_dtype(kv_dtype: KvDtype) -> KvDtype:
    """The cpu plugin's type that stands for *kv_dtype*."""
    return "fp32" if kv_dtype == "fp16" else kv_dtype


def proof_graph(lowered: ir.Model, kv_dtype: KvDtype) -> ir.Model:
    """A copy of *lowered* that `castline.plugins.cpu.session.CpuSession` executes."""
    model = lowered.clone()
    _widen_inputs(model)
    del model.graph.outputs[1:]
    for node in list(model.graph):
        if node.op_type == PAGED_ATTENTION:
            continue
        if node.op_type not in _MOVES and any(_is_half(value) for value in (*node.inputs, *node.outputs)):
            _compute_in_float(model, node, range(len(node.inputs)))
    for node in ours(model, PAGED_ATTENTION):
        _as_cpu_node(model, node, proof_kv_dtype(kv_dtype))
    return model


def _is_half(value: ir.Value | None) -> bool:
    return value is not None and value.dtype in _HALVES


def _widen_inputs(model: ir.Model) -> None:
    for value in model.graph.inputs:
        if value.name not in (INPUT_IDS, POSITIONS, LOGITS_INDICES):
            continue
        value.type = ir.TensorType(ir.DataType.INT64)
        narrow = make("Cast", [value], to=int(ir.DataType.INT32))
        narrow.outputs[0].type, narrow.outputs[0].shape = ir.TensorType(ir.DataType.INT32), value.shape
        ir.convenience.replace_all_uses_with(value, narrow.outputs[0])
        narrow.replace_input_with(0, value)
        model.graph.insert_before(model.graph[0], narrow)


def _compute_in_float(model: ir.Model, node: ir.Node, inputs: range) -> None:
    for i in inputs:
        value = node.inputs[i]
        if value is not None and _is_half(value):
            cast = make("Cast", [value], to=int(ir.DataType.FLOAT))
            cast.outputs[0].type, cast.outputs[0].shape = _FLOAT, value.shape
            model.graph.insert_before(node, cast)
            node.replace_input_with(i, cast.outputs[0])
    for out in node.outputs:
        if not _is_half(out):
            continue
        assert out.type is not None
        back = make("Cast", [out], like=out, to=int(out.type.dtype))
        ir.convenience.replace_all_uses_with(out, back.outputs[0])
        back.replace_input_with(0, out)
        out.type = _FLOAT
        model.graph.insert_after(node, back)


def _as_cpu_node(model: ir.Model, node: ir.Node, kv_dtype: KvDtype) -> None:
    _compute_in_float(model, node, range(1))
    rope = attribute(node, "rotary_dim") > 0
    norm = attribute(node, "qk_norm") != QkNorm.NONE
    given = iter(list(node.inputs))
    there = [True, rope, rope, norm, norm, *[True] * 5]
    places = [next(given) if has else None for has in there]
    pool = present(places[5])
    block_bytes = kv_block_bytes(
        attribute(node, "num_kv_heads"), attribute(node, "head_dim"), attribute(node, "block_size"), kv_dtype
    )
    pool.type, pool.shape = ir.TensorType(ir.DataType.UINT8), ir.Shape(["num_blocks", block_bytes])
    node.resize_inputs(len(places))
    for i, value in enumerate(places):
        node.replace_input_with(i, value)
    node.resize_outputs(1)
    node.attributes.add(ir.AttrInt64("kv_dtype", int(KV_DTYPE_CODES[kv_dtype])))
