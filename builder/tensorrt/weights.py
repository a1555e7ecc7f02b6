"""Precision of the layers' matmuls: e4m3 weights and activations, or 4-bit weights, as QuantizeLinear and
DequantizeLinear around the matmul. The output head, the embedding and the norms keep 16 bits, and with e4m3 the matmuls
behind the last attention node (`e4m3_matmuls`).

Scales are rounded to the activations' type before anything is divided by them, so that a weight is exactly its code
times its scale. Weights are quantised when they are written, one tensor at a time.
"""

from collections.abc import Mapping
from typing import Any, Final

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from castline.builder.passes.walk import add_constant, add_initializer, make, present, replace, sizes
from castline.builder.passes.weights import remove_dead_code
from castline.builder.tensorrt.matmuls import e4m3_matmuls, is_turned, layer_matmuls
from castline.engines.errors import BuildError
from castline.engines.precision import INT4_BLOCKS

E4M3_MAX: Final = 448.0
INT4_MAX: Final = 7
LEAST_SHIFT: Final = -10
"""Of a channel's scale: a channel that is smaller still is as good as zero."""
HALF: Final[dict[str, Any]] = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16}


def quantize_fp8(model: ir.Model, absmax: Mapping[str, float], activations: str) -> int:
    """e4m3 for the matmuls of the layers (`e4m3_matmuls`), in place; the count is of matmuls.

    A weight has a scale for each output channel (one, and a power of two each), an activation one for all:
    *absmax* has the largest magnitude seen at the input of each matmul, by the name of its weight.
    """
    half = HALF[activations]
    quantised: dict[tuple[ir.Value, float], ir.Value] = {}
    matmuls = e4m3_matmuls(model)
    for node in matmuls:
        x, weight = present(node.inputs[0]), present(node.inputs[1])
        if weight.name not in absmax:
            raise BuildError(f"quantize: the input of {weight.name} was not seen in calibration")
        scale = _rounded(np.array(absmax[str(weight.name)] / E4M3_MAX), half)
        key = (x, float(scale))
        if key not in quantised:
            quantised[key] = _through_e4m3(model, node, x, scale, str(weight.name))
        node.replace_input_with(0, quantised[key])
        node.replace_input_with(1, _e4m3_weight(model, node, weight, half))
    remove_dead_code(model)
    return len(matmuls)


def quantize_int4(model: ir.Model, activations: str) -> int:
    """4-bit weights in blocks along K for the matmuls of the layers, in place; the count is of matmuls.

    A matmul whose K is no multiple of a block keeps 16 bits.
    """
    done = 0
    for node in layer_matmuls(model):
        weight = present(node.inputs[1])
        tensor = weight.const_value
        assert tensor is not None
        axis = 1 if is_turned(node) else 0
        block = next((size for size in INT4_BLOCKS if sizes(tensor)[axis] % size == 0), None)
        if block is not None:
            node.replace_input_with(1, _int4_weight(model, node, weight, axis, block, HALF[activations]))
            done += 1
    remove_dead_code(model)
    return done


def _through_e4m3(model: ir.Model, before: ir.Node, x: ir.Value, scale: NDArray[Any], name: str) -> ir.Value:
    """*x* rounded to e4m3 at one scale for all of it."""
    operands = [
        add_initializer(model, f"{name}.x_scale", ir.tensor(scale.astype(np.float32))),
        add_constant(model, "zero.e4m3", np.zeros((), ml_dtypes.float8_e4m3fn)),
    ]
    quantise = make("QuantizeLinear", [x, *operands])
    restore = make("DequantizeLinear", [quantise.outputs[0], *operands], like=x)
    quantise.name, restore.name = f"{name}.x_quantize", f"{name}.x_dequantize"
    quantise.outputs[0].type = ir.TensorType(ir.DataType.FLOAT8E4M3FN)
    quantise.outputs[0].shape = x.shape
    model.graph.insert_before(before, [quantise, restore])
    return restore.outputs[0]


def _e4m3_weight(model: ir.Model, node: ir.Node, weight: ir.Value, half: Any) -> ir.Value:
    """The weight as e4m3 at one scale, and the matmul's result times a power of two for each channel.

    A scale a channel on DequantizeLinear would be the same numbers, but TensorRT multiplies by it behind the matmul,
    whose fp16 result it leaves divided by scales of a thousandth: that overflows.
    """
    tensor = weight.const_value
    assert tensor is not None
    channels = 0 if is_turned(node) else 1
    along, shape = 1 - channels, sizes(tensor)
    largest = np.abs(tensor.numpy()).max(along)
    shifts = _powers_of_two(largest)
    scale = _rounded(np.array(largest.max() / E4M3_MAX), half)

    def codes() -> NDArray[Any]:
        scaled = tensor.numpy() / (np.expand_dims(shifts, along) * scale)
        clipped: NDArray[Any] = np.clip(scaled, -E4M3_MAX, E4M3_MAX)
        return clipped.astype(ml_dtypes.float8_e4m3fn)

    values = [
        add_initializer(model, f"{weight.name}.e4m3", _lazy(codes, ir.DataType.FLOAT8E4M3FN, shape)),
        add_initializer(model, f"{weight.name}.scale", ir.tensor(scale)),
    ]
    if (shifts != 1).any():
        out = node.outputs[0]
        shift = make("Mul", [out, add_initializer(model, f"{weight.name}.shift", ir.tensor(shifts))], like=out)
        shift.name = f"{weight.name}.rescale"
        model.graph.insert_after(node, shift)
        replace(out, shift.outputs[0])
        shift.replace_input_with(0, out)
    return _dequantised(model, node, weight, values)


def _powers_of_two(largest: NDArray[Any]) -> NDArray[np.float32]:
    """For each channel the power of two, at most 1, that lifts it to the upper half of the largest one's range.

    e4m3 is a float: all that a scale a channel has to spare it are its subnormals, and a power of two rounds nothing.
    """
    ratio = np.where(largest > 0, largest, largest.max()) / max(float(largest.max()), np.finfo(np.float32).tiny)
    shifts: NDArray[np.float32] = np.exp2(np.clip(np.ceil(np.log2(np.maximum(ratio, 1e-9))), LEAST_SHIFT, 0))
    return shifts.astype(np.float32)


def _int4_weight(model: ir.Model, node: ir.Node, weight: ir.Value, axis: int, block: int, half: Any) -> ir.Value:
    tensor = weight.const_value
    assert tensor is not None
    shape = sizes(tensor)
    blocked = [shape[0] // block, block, shape[1]] if axis == 0 else [shape[0], shape[1] // block, block]
    within = 1 if axis == 0 else 2

    def scales() -> NDArray[np.float32]:
        return _rounded(np.abs(tensor.numpy().reshape(blocked)).max(within) / INT4_MAX, half)

    def codes() -> NDArray[Any]:
        scaled = tensor.numpy().reshape(blocked) / np.expand_dims(scales(), within)
        return np.clip(np.rint(scaled), -INT4_MAX, INT4_MAX).reshape(shape).astype(ml_dtypes.int4)

    groups = [size for i, size in enumerate(blocked) if i != within]
    values = [
        add_initializer(model, f"{weight.name}.int4", _lazy(codes, ir.DataType.INT4, shape)),
        add_initializer(model, f"{weight.name}.scale", _lazy(scales, ir.DataType.FLOAT, groups)),
    ]
    return _dequantised(model, node, weight, values, axis=axis, block_size=block)


def _dequantised(
    model: ir.Model, before: ir.Node, weight: ir.Value, values: list[ir.Value], **attributes: int
) -> ir.Value:
    restore = make("DequantizeLinear", values, like=weight, **attributes)  # type: ignore[arg-type]
    restore.name = f"{weight.name}.dequantize"
    model.graph.insert_before(before, restore)
    return restore.outputs[0]


def _rounded(scale: NDArray[Any], half: Any) -> NDArray[np.float32]:
    """The scale as *half* holds it; 1 where it would be 0."""
    rounded = scale.astype(half).astype(np.float32)
    return np.where(rounded > 0, rounded, 1).astype(np.float32)


def _lazy(read: Any, kind: ir.DataType, shape: list[int]) -> ir.LazyTensor:
    return ir.LazyTensor(lambda: ir.tensor(read(), dtype=kind), kind, ir.Shape(shape))
