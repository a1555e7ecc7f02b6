"""The fused graph as TensorRT takes it: strongly typed 16-bit floats, standard operators, pools as aliased outputs.

Every float becomes fp16 or bf16 but for two islands that stay float32: what depends on positions alone (RoPE's cosines
and sines, which go to the attention nodes as they are), and what follows the output head, so that logits are float32.
Weights are converted when they are written, one tensor at a time.
"""

from collections.abc import Iterable
from typing import Final, Literal

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from castline.builder.lower import lower_cpu
from castline.builder.passes.norms import MS, RMS_NORM, SKIP_RMS_NORM
from castline.builder.passes.walk import (
    add_initializer,
    attribute,
    is_op,
    is_weight,
    make,
    nodes,
    ours,
    present,
    replace,
)
from castline.builder.passes.weights import remove_dead_code
from castline.builder.tensorrt.matmuls import head_matmul
from castline.engines.errors import BuildError
from castline.engines.manifest import KvDtype
from castline.plugins.contract import (
    DOMAIN,
    INPUT_IDS,
    LOGITS_INDICES,
    PAGED_ATTENTION,
    POSITIONS,
    kv_pool_name,
    kv_pool_output_name,
)

Activations = Literal["fp16", "bf16"]

OPSET: Final = 23
"""Has RMSNormalization."""
IR_VERSION: Final = 11
HALF: Final = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}
_POOL, _OPTIONAL = 5, range(1, 5)
"""Inputs of the attention node, as the contract numbers them."""


def lower_tensorrt(model: ir.Model, *, activations: Activations, kv_dtype: KvDtype, block_size: int) -> ir.Model:
    """Lowers a fused (and perhaps quantised) graph in place, and returns it. Raises BuildError naming a node."""
    lower_cpu(model, kv_dtype=kv_dtype, block_size=block_size)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    standard_norms(model)
    _refuse_foreign(model)
    _name_nodes(model)
    _narrow_inputs(model)
    set_types(model, HALF[activations])
    _alias_pools(model)
    remove_dead_code(model)
    model.opset_imports.pop(MS, None)
    model.opset_imports[""] = OPSET
    model.ir_version = IR_VERSION
    return model


def standard_norms(model: ir.Model) -> int:
    """ONNX Runtime's RMSNorm nodes, with or without a residual, become RMSNormalization."""
    done = 0
    for node in [*nodes(model, RMS_NORM), *nodes(model, SKIP_RMS_NORM, MS)]:
        new: list[ir.Node] = []
        x = present(node.inputs[0])
        weight = present(node.inputs[-1])
        if node.op_type == SKIP_RMS_NORM:
            new.append(make("Add", node.inputs[:2], like=node.outputs[3]))
            replace(node.outputs[3], x := new[0].outputs[0])
        norm = make(
            "RMSNormalization",
            [x, weight],
            like=node.outputs[0],
            axis=-1,
            epsilon=float(attribute(node, "epsilon")),
            stash_type=1,
        )
        model.graph.insert_before(node, [*new, norm])
        replace(node.outputs[0], norm.outputs[0])
        model.graph.remove(node, safe=True)
        done += 1
    return done


def _refuse_foreign(model: ir.Model) -> None:
    for node in model.graph:
        if node.domain and (node.domain, node.op_type) != (DOMAIN, PAGED_ATTENTION):
            raise BuildError(f"lower: {node.domain}::{node.op_type} ({node.name}) is no operator that TensorRT has")


def _name_nodes(model: ir.Model) -> None:
    """Names that a builder's log and its errors can be read by."""
    for node in ours(model, PAGED_ATTENTION):
        node.name = f"attention.{attribute(node, 'layer')}"
    for number, node in enumerate(model.graph):
        node.name = node.name or f"{node.op_type}.{number}"


def _narrow_inputs(model: ir.Model) -> None:
    """Token ids, positions and rows as int32: what kernels on the device write. Only lookups take it as it is."""
    for value in model.graph.inputs:
        if value.name not in (INPUT_IDS, POSITIONS, LOGITS_INDICES):
            continue
        value.type = ir.TensorType(ir.DataType.INT32)
        others = [(node, i) for node, i in value.uses() if not (is_op(node, "Gather") and i == 1)]
        if not others:
            continue
        wide = make("Cast", [value], to=int(ir.DataType.INT64))
        wide.name = f"{value.name}.wide"
        wide.outputs[0].type, wide.outputs[0].shape = ir.TensorType(ir.DataType.INT64), value.shape
        model.graph.insert_before(model.graph[0], wide)
        for node, i in others:
            node.replace_input_with(i, wide.outputs[0])


def set_types(model: ir.Model, half: ir.DataType) -> None:
    """Gives every float of the graph its type, in place, with casts where the islands of float32 begin and end."""
    exact = _of_positions(model)
    head = head_matmul(model)
    after_head = _after(head)
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    if head is not None:
        _cast_logits(model, head, half)
    for node in list(model.graph):
        if node in exact or (is_op(node, "Cast") and node.name == _LOGITS_CAST):
            continue
        wanted = ir.DataType.FLOAT if node in after_head else half
        for i, value in enumerate(node.inputs):
            if value is None or (is_op(node, PAGED_ATTENTION, DOMAIN) and i in _OPTIONAL):
                continue
            if _float_type(value) not in (None, wanted):
                node.replace_input_with(i, _as_type(model, node, value, wanted, casts))
        if is_op(node, "Cast") and attribute(node, "to") == int(ir.DataType.FLOAT):
            node.attributes.add(ir.AttrInt64("to", int(wanted)))
        makes_floats = node.op_type not in _NO_FLOATS and any(_float_type(v) for v in node.inputs if v is not None)
        for out in node.outputs:
            if out.dtype == ir.DataType.FLOAT or (out.dtype is None and makes_floats):
                out.type = ir.TensorType(wanted)


_LOGITS_CAST: Final = "logits.float32"
_NO_FLOATS: Final = ("Shape", "Size", "QuantizeLinear")
"""Operators that make something else of floats."""


def _of_positions(model: ir.Model) -> set[ir.Node]:
    """Nodes that depend on positions, or on nothing, alone."""
    alone: set[ir.Value] = {value for value in model.graph.inputs if value.name == POSITIONS}
    found: set[ir.Node] = set()
    for node in model.graph:
        inputs = [value for value in node.inputs if value is not None]
        if any(v in alone for v in inputs) and all(v in alone or is_weight(v) for v in inputs):
            alone.update(node.outputs)
            found.add(node)
    return found


def _after(head: ir.Node | None) -> set[ir.Node]:
    found: set[ir.Node] = set()
    waiting = list(head.outputs[0].uses()) if head is not None else []
    while waiting:
        node = waiting.pop().node
        if node not in found:
            found.add(node)
            waiting += [use for out in node.outputs for use in out.uses()]
    return found


def _cast_logits(model: ir.Model, head: ir.Node, half: ir.DataType) -> None:
    out = head.outputs[0]
    cast = make("Cast", [out], to=int(ir.DataType.FLOAT))
    cast.name = _LOGITS_CAST
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), out.shape
    model.graph.insert_after(head, cast)
    replace(out, cast.outputs[0])
    cast.replace_input_with(0, out)
    out.type = ir.TensorType(half)


def _float_type(value: ir.Value) -> ir.DataType | None:
    """Its type where that is one of the graph's floats."""
    found = value.const_value.dtype if is_weight(value) and value.const_value is not None else value.dtype
    return found if found in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16) else None


def _as_type(
    model: ir.Model,
    before: ir.Node,
    value: ir.Value,
    wanted: ir.DataType,
    casts: dict[tuple[ir.Value, ir.DataType], ir.Value],
) -> ir.Value:
    """*value* in the type *wanted*: a weight is converted, anything else is cast once."""
    if (value, wanted) not in casts:
        if is_weight(value):
            tensor = present(value).const_value
            assert tensor is not None
            suffix = "fp32" if wanted == ir.DataType.FLOAT else "half"
            casts[value, wanted] = add_initializer(model, f"{value.name}.{suffix}", converted(tensor, wanted))
        else:
            cast = make("Cast", [value], to=int(wanted))
            cast.name = f"{value.name}.cast"
            cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(wanted), value.shape
            model.graph.insert_before(before, cast)
            casts[value, wanted] = cast.outputs[0]
    return casts[value, wanted]


def converted(tensor: ir.TensorProtocol, wanted: ir.DataType) -> ir.LazyTensor:
    """The tensor in another float type, converted when it is read; fp16 saturates."""

    def read() -> ir.TensorProtocol:
        array = tensor.numpy()
        if wanted == ir.DataType.FLOAT16:
            array = np.clip(array, -65504, 65504)
        return ir.tensor(array.astype(wanted.numpy()))

    return ir.LazyTensor(read, wanted, ir.Shape(tensor.shape), name=tensor.name)  # type: ignore[arg-type]


def _alias_pools(model: ir.Model) -> None:
    """Pools as int8, absent inputs of the nodes left out, and a second output that is the pool."""
    outputs: list[ir.Value] = []
    for node in ours(model, PAGED_ATTENTION):
        layer = attribute(node, "layer")
        pool = present(node.inputs[_POOL])
        pool.type = ir.TensorType(ir.DataType.INT8)
        node.resize_outputs(2)
        updated = node.outputs[1]
        updated.name = kv_pool_output_name(layer)
        updated.type, updated.shape = ir.TensorType(ir.DataType.INT8), pool.shape
        outputs.append(updated)
        _keep_inputs(node, [value for value in node.inputs if value is not None])
    model.graph.outputs.extend(outputs)


def _keep_inputs(node: ir.Node, values: Iterable[ir.Value]) -> None:
    kept = list(values)
    for i, value in enumerate(kept):
        node.replace_input_with(i, value)
    node.resize_inputs(len(kept))


def pool_inputs(model: ir.Model) -> list[str]:
    return [kv_pool_name(layer) for layer in range(len(ours(model, PAGED_ATTENTION)))]
