"""What depends on a token's position alone, as a table with a row for each position.

The cosines and sines of RoPE are five to seven nodes a step when computed, and two when looked up. A table is computed
by ONNX Runtime from the graph's own nodes, so that the numbers are those that the nodes would give.
"""

import numpy as np
import onnx_ir as ir
import onnxruntime
from numpy.typing import NDArray

from castline.builder.passes.walk import add_constant, add_initializer, make, replace, users
from castline.builder.passes.weights import remove_dead_code
from castline.engines.device_memory import TABLE_BYTES
from castline.plugins.contract import POSITIONS

_SAMPLES = 7


def tabulate_positions(model: ir.Model, max_positions: int) -> int:
    """Values [T, w] or [1, T, w] that only depend on ``positions`` become lookups; the count is of tables."""
    positions = next((value for value in model.graph.inputs if value.name == POSITIONS), None)
    values = _frontier(model, positions, max_positions) if positions is not None else []
    if positions is None or not values:
        return 0
    tables = _evaluate(model, [str(value.name) for value in values], np.arange(max_positions))
    sample = np.random.default_rng(0).integers(0, max_positions, _SAMPLES)
    sampled = _evaluate(model, [str(value.name) for value in values], sample)
    done = 0
    for value, table, rows in zip(values, tables, sampled, strict=True):
        if not np.array_equal(table[sample], rows):  # a row depends on the other positions of its step
            continue
        _look_up(model, value, table, positions)
        done += 1
    return done


def _frontier(model: ir.Model, positions: ir.Value, max_positions: int) -> list[ir.Value]:
    """Values that depend on positions alone and are read by nodes that do not."""
    alone = {positions}
    inside: set[ir.Node] = set()
    for node in model.graph:
        inputs = [value for value in node.inputs if value is not None]
        if any(v in alone for v in inputs) and all(v in alone or v.const_value is not None for v in inputs):
            alone.update(node.outputs)
            inside.add(node)
    return [
        out
        for node in inside
        for out in node.outputs
        if any(user not in inside for user in users(out)) and _fits(out, max_positions)
    ]


def _fits(value: ir.Value, max_positions: int) -> bool:
    if value.dtype != ir.DataType.FLOAT or value.shape is None or len(value.shape) not in (2, 3):
        return False
    leading, width = value.shape[:-1], value.shape[-1]
    rows = leading[-1]
    packed = len(leading) == 1 or leading[0] == 1
    return packed and str(rows) == "T" and isinstance(width, int) and 4 * width * max_positions <= TABLE_BYTES


def _evaluate(model: ir.Model, names: list[str], positions: NDArray[np.int64]) -> list[NDArray[np.float32]]:
    """[positions, w] of each value."""
    part = model.clone()
    values = {value.name: value for node in part.graph for value in node.outputs}
    part.graph.outputs.clear()
    part.graph.outputs.extend(values[name] for name in names)
    remove_dead_code(part)
    kept = [value for value in part.graph.inputs if value.name == POSITIONS]
    part.graph.inputs.clear()
    part.graph.inputs.extend(kept)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(ir.to_proto(part).SerializeToString(), options, ["CPUExecutionProvider"])
    found: list[NDArray[np.float32]] = session.run(names, {POSITIONS: positions.astype(np.int64)})
    return [array.reshape(len(positions), -1) for array in found]


def _look_up(model: ir.Model, value: ir.Value, table: NDArray[np.float32], positions: ir.Value) -> None:
    producer = value.producer()
    assert producer is not None
    assert value.shape is not None
    name = f"positions.{value.name}"
    gather = make("Gather", [add_initializer(model, name, ir.tensor(table, name=name)), positions], axis=0)
    gather.outputs[0].type, gather.outputs[0].shape = value.type, ir.Shape(value.shape[-2:])
    new = [gather]
    if len(value.shape) == 3:
        axes = add_constant(model, "axes.0", np.array([0]))
        new.append(make("Unsqueeze", [gather.outputs[0], axes], like=value))
    model.graph.insert_before(producer, new)
    replace(value, new[-1].outputs[0])
