"""What an engine takes of its GPU, for its manifest: what `castline plan` told of the model, held against the graph."""

import math

import onnx_ir as ir

from castline.builder.graph_facts import weight_sizes
from castline.builder.model_shape import read_shape
from castline.builder.passes.walk import is_weight
from castline.engines.device_memory import SLACK_BYTES, device_memory
from castline.engines.errors import BuildError
from castline.engines.manifest import DeviceMemory, Limits
from castline.engines.precision import gpu_weights

POINTWISE = frozenset(
    {"Add", "Cast", "DequantizeLinear", "Div", "Erf", "Gelu", "Identity", "Mul", "Neg", "Pow", "QuantizeLinear",
     "Sigmoid", "Sqrt", "Sub", "Swish", "Tanh"}
)  # fmt: skip
"""A chain of these is one kernel of TensorRT's, and nothing between them is written to memory."""


def footprint(model: ir.Model, source: str, recipe: str, limits: Limits) -> DeviceMemory:
    """Of the lowered graph *model* of the checkpoint *source*: the figures of `castline plan` for it, so that both give
    the pool as many blocks, or the graph's own where those are larger or where *source* cannot be planned."""
    weights = sum(weight_sizes(model).values())
    scratch = live_bytes(model, limits) + SLACK_BYTES
    try:
        told = device_memory(read_shape(source).weights, gpu_weights(recipe), limits)
    except BuildError:
        return DeviceMemory(weights, scratch)
    return DeviceMemory(max(told.weight_bytes, weights), max(told.scratch_bytes, scratch))


def live_bytes(model: ir.Model, limits: Limits) -> int:
    """Largest sum of the tensors that are needed at once in a step of the most tokens, each with logits. Inputs and
    outputs of the graph are the executor's, and weights are not counted."""
    sizes = {"T": limits.max_num_batched_tokens, "R": limits.max_num_batched_tokens}
    elements: dict[ir.Value, int] = {}
    kept: set[ir.Value] = set()
    last: dict[ir.Value, int] = {}
    outside = {*model.graph.inputs, *model.graph.outputs}
    nodes = list(model.graph)
    for at, node in enumerate(nodes):
        inputs = [value for value in node.inputs if value is not None]
        for value in inputs:
            last[value] = at
        if all(is_weight(value) or (value not in elements and value not in outside) for value in inputs):
            continue
        for out in node.outputs:
            elements[out] = _elements(out, inputs, elements, sizes)
            if out not in outside and not _is_fused(out):
                kept.add(out)
    live = most = 0
    ending: dict[int, list[ir.Value]] = {}
    for value in kept:
        ending.setdefault(last.get(value, 0), []).append(value)
    for at, node in enumerate(nodes):
        live += sum(_bytes(out, elements[out]) for out in node.outputs if out in kept)
        most = max(most, live)
        live -= sum(_bytes(value, elements[value]) for value in ending.get(at, ()))
    return most


def _elements(out: ir.Value, inputs: list[ir.Value], elements: dict[ir.Value, int], sizes: dict[str, int]) -> int:
    """By its shape, or, of a value whose shape is not known, as many as its inputs have together."""
    if out.shape is not None:
        dims = [dim if isinstance(dim, int) else sizes.get(str(dim)) for dim in out.shape]
        if None not in dims:
            return math.prod(dim for dim in dims if dim is not None)
    return sum(elements.get(value, 0) for value in inputs)


def _bytes(value: ir.Value, elements: int) -> int:
    return math.ceil(elements * (value.dtype.itemsize if value.dtype is not None else 4))


def _is_fused(value: ir.Value) -> bool:
    """Whether it is only passed on within a chain of pointwise operators."""
    producer, users = value.producer(), list(value.uses())
    assert producer is not None
    return (
        producer.op_type in POINTWISE and len(users) == 1 and users[0].node.op_type in POINTWISE and not producer.domain
    )
