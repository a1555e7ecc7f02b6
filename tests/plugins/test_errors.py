"""A wrong call is an error that names the tensor; it never reads or writes outside its tensors."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from castline.plugins.contract import KvDtypeCode, QkNorm
from castline.plugins.cpu.node_model import serialise_node_model

INVALID = (ort_errors.InvalidArgument, ort_errors.Fail)


def ints(*values):
    return np.array(values, np.int32)


@pytest.fixture
def sequences(tools):
    return tools.Sequences(tools.attributes(qk_norm=int(QkNorm.PER_HEAD)), [20, 5])


@pytest.fixture
def step(sequences):
    return sequences.step([(0, 20), (0, 5)])


@pytest.fixture
def node(tools, sequences):
    """A node whose graph fixes no shape, so that the node itself must look."""
    node = tools.Node(sequences.attributes, sequences.num_blocks)
    model = onnx.load_from_string(serialise_node_model(sequences.attributes))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    node.session = tools.session(model.SerializeToString())
    return node


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slot_mapping", ints(*range(24), 80)),
        ("slot_mapping", ints(*range(24), -2)),
        ("slot_mapping", ints(*range(24), 2**31 - 1)),
        ("slot_mapping", ints(*range(24))),
        ("cu_query_lens", ints(1, 20, 25)),
        ("cu_query_lens", ints(0, 20, 24)),
        ("cu_query_lens", ints(0, 26, 25)),
        ("cu_query_lens", ints(0, -3, 25)),
        ("cu_query_lens", ints(0, 25)),
        ("kv_lens", ints(19, 5)),
        ("kv_lens", ints(20, -1)),
        ("kv_lens", ints(20, 5, 1)),
        ("block_table", ints([0, 1])),
        ("block_table", ints([0], [1])),
        ("block_table", ints([0, 5], [1, 0])),
        ("block_table", ints([0, -1], [1, 0])),
        ("block_table", ints(0, 1)),
        ("kv_pool", np.zeros((5, 4095), np.uint8)),
        ("kv_pool", np.zeros((5, 4096, 1), np.uint8)),
        ("qkv", np.zeros((25, 127), np.float32)),
        ("qkv", np.zeros((24, 128), np.float32)),
        ("qkv", np.zeros(25 * 128, np.float32)),
        ("cos", np.zeros((25, 7), np.float32)),
        ("sin", np.zeros((24, 8), np.float32)),
        ("q_norm_weight", np.zeros(15, np.float32)),
        ("k_norm_weight", np.zeros((16, 1), np.float32)),
    ],
)
def test_bad_tensor_is_named(node, step, name, value) -> None:
    """An address computed from an unchecked tensor is memory corruption in a server that goes on running."""
    before = node.pool.copy()
    feed = "kv_pool.0" if name == "kv_pool" else name
    culprits = {"qkv": "qkv|cos|slot_mapping", "kv_lens": "kv_lens|cu_query_lens|block_table"}.get(name, name)
    with pytest.raises(INVALID, match=culprits):
        node(step, **{feed: value})
    np.testing.assert_array_equal(node.pool, before)


def test_long_context_needs_its_columns(tools) -> None:
    """kv_lens beyond the table's width reads past the row, into the next sequence's blocks."""
    attributes = tools.attributes()
    sequences = tools.Sequences(attributes, [40])
    step = sequences.step([(39, 40)])
    node = tools.Node(attributes, sequences.num_blocks)
    with pytest.raises(INVALID, match=r"block_table has 2 columns, kv_lens\[0\] = 40 needs 3"):
        node(replace(step, block_table=step.block_table[:, :2].copy()))


def test_the_next_call_succeeds(node, step, tools, sequences) -> None:
    """An error leaves nothing behind that spoils the step after it."""
    with pytest.raises(INVALID):
        node(step, kv_lens=ints(19, 5))
    np.testing.assert_allclose(node(step), tools.reference(sequences, step), rtol=0, atol=1e-5)


def test_a_finished_sequence_is_not_looked_at(tools) -> None:
    """A sequence with no query in the step may have any kv_len and table row: nothing of it is read."""
    attributes = tools.attributes()
    sequences = tools.Sequences(attributes, [20, 5])
    step = sequences.step([(0, 20), (5, 5)])
    step.block_table[1] = 12345
    step.kv_lens[1] = 999
    output = tools.Node(attributes, sequences.num_blocks)(step)
    assert np.isfinite(output).all()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"head_dim": 12}, "head_dim 12"),
        ({"head_dim": 264}, "head_dim 264"),
        ({"block_size": 24}, "block_size 24"),
        ({"block_size": 0}, "block_size 0"),
        ({"kv_dtype": 9}, "kv_dtype 9"),
        ({"qk_norm": 3}, "qk_norm 3"),
        ({"rotary_dim": 3}, "rotary_dim 3"),
        ({"rotary_dim": 18}, "rotary_dim 18"),
        ({"window": -1}, "window"),
        ({"softcap": -1.0}, "softcap"),
        ({"softcap": float("nan")}, "softcap"),
        ({"layer": 7, "block_size": 17}, "layer 7"),
    ],
)
def test_bad_attribute_is_named(tools, change, problem) -> None:
    """A node the kernel cannot run is refused when the engine is loaded, not in the middle of a step."""
    model = onnx.load_from_string(serialise_node_model(tools.attributes()))
    attributes = {a.name: a for a in model.graph.node[0].attribute}
    for name, value in change.items():
        attributes[name].CopyFrom(onnx.helper.make_attribute(name, value))
    with pytest.raises(Exception, match=problem):
        tools.session(model.SerializeToString())


def test_absent_optional_input_is_named(tools) -> None:
    """A node with QK-norm whose weights the graph forgot must not read through a null pointer."""
    attributes = tools.attributes(qk_norm=int(QkNorm.PER_HEAD), kv_dtype=int(KvDtypeCode.FP8))
    sequences = tools.Sequences(attributes, [3])
    node = tools.Node(attributes, sequences.num_blocks)
    model = onnx.load_from_string(serialise_node_model(attributes))
    model.graph.node[0].input[4] = ""
    kept = [i for i in model.graph.input if i.name != "k_norm_weight"]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    node.session = tools.session(model.SerializeToString())
    with pytest.raises(INVALID, match="k_norm_weight is absent"):
        node(replace(sequences.step([(0, 3)]), k_norm_weight=None))


@pytest.mark.parametrize("missing", ["layer", "num_heads", "scale", "kv_dtype"])
def test_missing_attribute_is_named(tools, missing) -> None:
    """A default for a number that every model sets would compute something plausible and wrong."""
    model = onnx.load_from_string(serialise_node_model(tools.attributes()))
    kept = [a for a in model.graph.node[0].attribute if a.name != missing]
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(kept)
    with pytest.raises(Exception, match=missing):
        tools.session(model.SerializeToString())


def test_empty_step(tools) -> None:
    """No token, with and without sequences: an empty output, not a division by zero."""
    attributes = tools.attributes()
    for capacity in ([], [20, 5]):
        sequences = tools.Sequences(attributes, capacity)
        output = tools.Node(attributes, sequences.num_blocks)(sequences.step([(0, 0)] * len(capacity)))
        assert output.shape == (0, 64)
