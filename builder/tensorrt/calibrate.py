"""The largest magnitude at the input of each matmul, over the shipped text: what fixed activation scales come from.

The fp32 graph runs in ONNX Runtime with the cpu plugin; each passage is one step, so that no step reads another's pool.
One scale for all tokens costs little: e4m3 is a float, and over the demo model's 120 matmuls it rounds a token's vector
by 2.6 % (3.3 % at the one input that has an outlier of 3,000), as it would at the best scale for each token.
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

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

BLOCK_SIZE: Final = 32
FP16_MAX: Final = 65504.0


def calibrate(
    fused: ir.Model, passages: Sequence[Sequence[int]], advance: Callable[[], None] = lambda: None
) -> dict[str, float]:
    """Weight name → largest |x| of its matmul, over token *passages*. *fused* stays as it is.

    Raises BuildError where a value is not finite or overflows fp16, in which an fp8 engine's activations are.
    """
    model = fused.clone()
    lower_cpu(model, kv_dtype="fp32", block_size=BLOCK_SIZE)
    names = _watch(model)
    found = np.zeros(len(names), np.float32)
    with tempfile.TemporaryDirectory(prefix="castline-calibrate-") as directory:
        graph = str(save_graph(model, Path(directory)))
        options = native_options(SessionOptions())
        session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        for passage in passages:
            found = np.maximum(found, session.run(list(names), _feeds(model, passage)))  # NaN stays NaN
            advance()
    absmax = dict(zip(names.values(), found.tolist(), strict=True))
    for name, value in absmax.items():
        if not value <= FP16_MAX:
            raise BuildError(f"calibrate: the input of {name} reaches {value:g}, which fp16 cannot hold: take bf16")
    return absmax


def _watch(model: ir.Model) -> dict[str, str]:
    """Makes the largest magnitude at each matmul the outputs of the graph; output → weight."""
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
    """One step that reads the whole passage, every row to the end, with a pool of its own."""
    [track] = make_tracks([passage], BLOCK_SIZE)
    step = step_of([track], [Rows(0, 0, len(passage))], BLOCK_SIZE)
    taken = {value.name for value in model.graph.inputs}
    feeds: dict[str, NDArray[Any]] = {name: array for name, array in step.feeds().items() if name in taken}
    for node in ours(model, PAGED_ATTENTION):
        attributes = {name: node.attributes[name].as_int() for name in ("layer", "num_kv_heads", "head_dim")}
        size = kv_block_bytes(attributes["num_kv_heads"], attributes["head_dim"], BLOCK_SIZE, "fp32")
        blocks = blocks_for(len(passage), BLOCK_SIZE)
        feeds[kv_pool_name(attributes["layer"])] = np.zeros((blocks, size), np.uint8)
    return feeds
