"""The largest magnitude at the input of each matmul, over the shipped text: what fixed activation scales come from.

The fp32 graph runs in ONNX Runtime with the cpu plugin; each passage is one step, so that no step reads another's pool.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from castline.builder.lower import lower_cpu, save_graph
from castline.builder.passes.walk import make, ours, present
from castline.builder.replay import Rows, make_tracks, step_of
from castline.builder.tensorrt.matmuls import layer_matmuls
from castline.engines.capacity import blocks_for, kv_block_bytes
from castline.engines.errors import BuildError
from castline.plugins.contract import PAGED_ATTENTION, kv_pool_name
from castline.plugins.cpu.session import SessionOptions, native_options

BLOCK_SIZE = 32


def calibrate(
    fused: ir.Model, passages: Sequence[Sequence[int]], advance: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Weight name → largest |x| of its matmul, over token *passages*. *fused* stays as it is.

    Raises BuildError where a value is not finite: such a model has no scale.
    """
    model = fused.clone()
    lower_cpu(model, kv_dtype="fp32", block_size=BLOCK_SIZE)
    names = _watch(model)
    found = dict.fromkeys(names.values(), 0.0)
    with tempfile.TemporaryDirectory(prefix="castline-calibrate-") as directory:
        options = native_options(SessionOptions())
        graph = str(save_graph(model, Path(directory)))
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        taken = {one.name for one in session.get_inputs()}
        for passage in passages:
            feeds = _feeds(model, passage)
            outputs = session.run(list(names), {name: array for name, array in feeds.items() if name in taken})
            for output, largest in zip(names, outputs, strict=True):
                found[names[output]] = max(found[names[output]], _finite(float(largest), names[output]))
            advance()
    return found


def _watch(model: ir.Model) -> dict[str, str]:
    """Adds an output for the largest magnitude at each matmul; output → weight."""
    names: dict[str, str] = {}
    for number, node in enumerate(layer_matmuls(model)):
        size = make("Abs", [node.inputs[0]])
        largest = make("ReduceMax", [size.outputs[0]], keepdims=0)
        out = largest.outputs[0]
        out.name, out.type, out.shape = f"absmax.{number}", ir.TensorType(ir.DataType.FLOAT), ir.Shape([])
        model.graph.insert_before(node, [size, largest])
        model.graph.outputs.append(out)
        names[out.name] = str(present(node.inputs[1]).name)
    return names


def _feeds(model: ir.Model, passage: Sequence[int]) -> dict[str, NDArray[Any]]:
    """One step that reads the whole passage, with a pool of its own."""
    [track] = make_tracks([passage], BLOCK_SIZE)
    step = step_of([track], [Rows(0, 0, len(passage))], BLOCK_SIZE, last_only=True)
    feeds: dict[str, NDArray[Any]] = dict(step.feeds())
    for node in ours(model, PAGED_ATTENTION):
        attributes = {name: node.attributes[name].as_int() for name in ("layer", "num_kv_heads", "head_dim")}
        size = kv_block_bytes(attributes["num_kv_heads"], attributes["head_dim"], BLOCK_SIZE, "fp32")
        blocks = blocks_for(len(passage), BLOCK_SIZE)
        feeds[kv_pool_name(attributes["layer"])] = np.zeros((blocks, size), np.uint8)
    return feeds


def _finite(value: float, name: str) -> float:
    if not np.isfinite(value):
        raise BuildError(f"calibrate: the input of {name} is {value} on the shipped text; take a 16-bit recipe")
    return value
