"""Small models that the tuner times: one matmul with its surroundings, as the quantize stage makes it.

The model is written as a fused graph would have it, and `quantize` itself puts the kernel in, so that what is timed is
what is built. Packed weights are replaced by random bytes: packing real ones would take longer than the timing.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from castline.builder.linear_sites import Surroundings
from castline.builder.lower import ALIGNMENT
from castline.builder.passes.norms import RMS_NORM
from castline.builder.passes.walk import add_constant, add_initializer, make, typed
from castline.builder.quantize import quantize
from castline.builder.recipes import MatmulKernel
from castline.plugins.linear import Activation

Feeds = dict[str, NDArray[Any]]
X, RESIDUAL, Y = "x", "residual", "y"
SCALE = 0.01


def matmul_model(
    k: int, n: int, kernel: MatmulKernel, around: Surroundings, random: np.random.Generator
) -> tuple[bytes, Feeds]:
    """A model of ``x [T, k] @ W [k, n]`` and *around*, and its weights, which are to be handed over by name."""
    model = _fused(k, n, around, random)
    quantize(model, {(k, n): kernel})
    weights: Feeds = {}
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if isinstance(tensor, ir.LazyTensor):
            weights[name] = array = _aligned(_random_like(tensor, random))
            value.const_value = ir.ExternalTensor(
                "memory", 0, array.nbytes, tensor.dtype, shape=ir.Shape(array.shape), name=name
            )
    return ir.to_proto(model).SerializeToString(), weights


def inputs(k: int, n: int, around: Surroundings, rows: int, random: np.random.Generator) -> Feeds:
    """Random inputs of the model."""
    feeds: Feeds = {X: _aligned(random.standard_normal((rows, k), np.float32))}
    if around.residual:
        feeds[RESIDUAL] = _aligned(random.standard_normal((rows, _width(n, around)), np.float32))
    return feeds


def _width(n: int, around: Surroundings) -> int:
    return n // 2 if around.gated else n


def _aligned(array: NDArray[Any]) -> NDArray[Any]:
    """*array* at the start of a page, as weights are in a mapped file: NumPy's own arrays begin 16 bytes into a cache
    line, and every load of 64 bytes would touch two."""
    raw = np.empty(array.nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    placed: NDArray[Any] = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


def _random_like(tensor: ir.LazyTensor, random: np.random.Generator) -> NDArray[Any]:
    shape = tensor.shape.numpy()
    if tensor.dtype == ir.DataType.UINT8:
        return random.integers(0, 256, shape, np.uint8)
    if str(tensor.name).endswith(".scales"):
        return np.full(shape, SCALE, tensor.dtype.numpy())
    return tensor.numpy()


def _fused(k: int, n: int, around: Surroundings, random: np.random.Generator) -> ir.Model:
    width = _width(n, around)
    x = typed(ir.Value(name=X), ["T", k])
    residual = typed(ir.Value(name=RESIDUAL), ["T", width])
    graph = ir.Graph([x, residual] if around.residual else [x], [], nodes=[], opset_imports={"": 21}, name="matmul")
    model = ir.Model(graph, ir_version=10)

    def constant(name: str, *shape: int) -> ir.Value:
        return add_initializer(model, name, ir.tensor(np.ones(shape, np.float32), name=name))

    def emit(op_type: str, *operands: ir.Value, width: int = width, outputs: int = 1, **attributes: Any) -> ir.Value:
        node = make(op_type, operands, outputs=outputs, **attributes)
        graph.append(node)
        for out in node.outputs:
            typed(out, ["T", width])
        return node.outputs[0]

    y = emit(RMS_NORM, x, constant("norm", k), width=k, axis=-1, epsilon=1e-6, stash_type=1) if around.norm else x
    y = emit("MatMul", y, _weight(model, k, n, random), width=n)
    if around.bias:
        y = emit("Add", y, constant("bias", n), width=n)
    if around.gated:
        gate = emit("Split", y, add_constant(model, "halves", np.array([width, width])), outputs=2, axis=-1)
        up = graph[-1].outputs[1]
        y = emit("Mul", _activated(emit, gate, around.activation), up)
    else:
        y = _activated(emit, y, around.activation)
    if around.residual:
        y = emit("Add", y, residual)
    y.name = Y
    graph.outputs.append(y)
    return model


def _weight(model: ir.Model, k: int, n: int, random: np.random.Generator) -> ir.Value:
    def read() -> ir.TensorProtocol:
        return ir.tensor(random.standard_normal((k, n), np.float32))

    return add_initializer(model, "w", ir.LazyTensor(read, ir.DataType.FLOAT, ir.Shape((k, n)), name="w"))


def _activated(emit: Callable[..., ir.Value], value: ir.Value, activation: Activation) -> ir.Value:
    if activation == Activation.SILU:
        return emit("Mul", value, emit("Sigmoid", value))
    if activation in (Activation.GELU, Activation.GELU_TANH):
        return emit("Gelu", value, approximate="tanh" if activation == Activation.GELU_TANH else "none")
    return emit("Relu", value) if activation == Activation.RELU else value
