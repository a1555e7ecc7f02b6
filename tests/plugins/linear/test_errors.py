"""A wrong call is an error that names the tensor; it never reads or writes outside its tensors."""

import numpy as np
import onnx
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

from castline.plugins.cpu.linear_model import IDS, SCALES, WEIGHT, serialise_embedding_model, serialise_linear_model
from castline.plugins.linear import MAX_K, EmbeddingAttributes, LinearFormat
from castline.plugins.linear_packing import pack

INVALID = (ort_errors.InvalidArgument, ort_errors.Fail)


def without_shapes(serialised):
    """The graph fixes no shape, so that the node itself must look."""
    model = onnx.load_from_string(serialised)
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.ClearField("shape")
    return model


def open_node(tools, linear_tools, attributes, **inputs):
    node = linear_tools.Node(tools, attributes, linear_tools.weight(attributes), **inputs)
    node.session = tools.session(without_shapes(serialise_linear_model(attributes, **inputs)).SerializeToString())
    return node


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("x", (5, 99)),
        ("x", (500,)),
        ("x", (5, 100, 1)),
        ("weight", (3, 1023)),
        ("weight", (2, 1024)),
        ("weight", (3, 2048)),
        ("scales", (3, 127)),
        ("scales", (6, 64)),
        ("norm_weight", (99,)),
        ("norm_weight", (1, 100)),
        ("bias", (39,)),
        ("bias", (1, 40)),
        ("residual", (4, 40)),
        ("residual", (5, 48)),
    ],
)
def test_bad_shape_is_named(tools, linear_tools, name, shape) -> None:
    """An address computed from an unchecked tensor is memory corruption in a server that goes on running."""
    a = linear_tools.attributes(norm=1)
    node = open_node(tools, linear_tools, a, bias=True, residual=True)
    inputs = linear_tools.inputs(a, 5, bias=True, residual=True)
    good = node(inputs)
    dtype = {"weight": np.uint8, "scales": np.float16}.get(name, np.float32)
    with pytest.raises(INVALID, match=f"Linear 100 x 40: {name if name != 'x' else '(x|residual)'} has shape"):
        node(inputs, **{name: np.zeros(shape, dtype)})
    np.testing.assert_array_equal(node(inputs), good)


def test_gated_shapes(tools, linear_tools) -> None:
    """A gated node wants twice the strips, and a bias for both matrices."""
    a = linear_tools.attributes(gated=1, activation=1)
    node = open_node(tools, linear_tools, a, bias=True)
    inputs = linear_tools.inputs(a, 2, bias=True)
    with pytest.raises(INVALID, match=r"weight has shape \[3, 1024\], wanted \[6, 1024\]"):
        node(inputs, weight=node.packed.weight[:3].copy())
    with pytest.raises(INVALID, match=r"bias has shape \[40\], wanted \[2, 40\]"):
        node(inputs, bias=inputs.bias[0].copy())


def test_norm_weight_must_fit_norm(tools, linear_tools) -> None:
    """A norm whose weights the graph forgot reads through a null pointer; weights without a norm would be ignored."""
    a = linear_tools.attributes(norm=1)
    inputs = linear_tools.inputs(a, 2)
    node = linear_tools.Node(tools, a, linear_tools.weight(a))
    for norm, feed, problem in ((1, "", "norm_weight is absent"), (0, "norm_weight", "norm_weight is given, but norm")):
        model = onnx.load_from_string(serialise_linear_model(a))
        model.graph.node[0].input[3] = feed
        next(p for p in model.graph.node[0].attribute if p.name == "norm").i = norm
        node.session = tools.session(model.SerializeToString())
        with pytest.raises(INVALID, match=problem):
            node(inputs)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"k": 0}, "k 0"),
        ({"k": 1 << 30}, "k 1073741824"),
        ({"k": MAX_K + 1}, f"k {MAX_K + 1} is not in 1 .. {MAX_K}$"),
        ({"n": 0}, "n 0"),
        ({"format": 3}, "format 3"),
        ({"format": -1}, "format -1"),
        ({"group": 64}, "format 0 takes no groups of 64"),
        ({"group": 0}, "format 0 takes no groups of 0"),
        ({"format": 1, "group": 16}, "format 1 takes no groups of 16"),
        ({"activation": 5}, "activation 5"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"norm_eps": float("nan")}, "norm_eps"),
    ],
)
def test_bad_attribute_is_named(tools, linear_tools, change, problem) -> None:
    """A node the kernel cannot run is refused when the engine is loaded, not in the middle of a step."""
    model = onnx.load_from_string(serialise_linear_model(linear_tools.attributes()))
    attributes = {a.name: a for a in model.graph.node[0].attribute}
    for name, value in change.items():
        attributes[name].CopyFrom(onnx.helper.make_attribute(name, value))
    with pytest.raises(Exception, match=problem):
        tools.session(model.SerializeToString())


@pytest.mark.parametrize("missing", ["k", "n", "format", "group"])
def test_missing_attribute_is_named(tools, linear_tools, missing) -> None:
    """A default for a number that every model sets would compute something plausible and wrong."""
    model = onnx.load_from_string(serialise_linear_model(linear_tools.attributes()))
    kept = [a for a in model.graph.node[0].attribute if a.name != missing]
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(kept)
    with pytest.raises(Exception, match=missing):
        tools.session(model.SerializeToString())


def test_refused_isa(tools, linear_tools) -> None:
    """CASTLINE_ISA misspelt must not silently run something else."""
    a = linear_tools.attributes()
    with pytest.raises(Exception, match="CASTLINE_ISA is 'avx1024'"):
        linear_tools.Node(tools, a, linear_tools.weight(a), isa="avx1024")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ({IDS: np.array([0, 20])}, r"ids\[1\] is 20, not in 0 .. 19"),
        ({IDS: np.array([-1])}, r"ids\[0\] is -1"),
        ({IDS: np.zeros((1, 1), np.int64)}, "ids has shape"),
        ({WEIGHT: np.zeros((1, 2048), np.uint8)}, "weight has shape"),
        ({SCALES: np.zeros((2, 15), np.float16)}, "scales has shape"),
    ],
)
def test_embedding_errors(tools, override, problem) -> None:
    """An id beyond the vocabulary would read another tensor's bytes."""
    attributes = EmbeddingAttributes(k=100, n=20, format=int(LinearFormat.W8), group=0)
    packed = pack(np.ones((20, 100), np.float32), LinearFormat.W8, 0)
    session = tools.session(without_shapes(serialise_embedding_model(attributes)).SerializeToString())
    feeds = {IDS: np.array([3]), WEIGHT: packed.weight, SCALES: packed.scales}
    assert session.run(None, feeds)[0].shape == (1, 100)
    with pytest.raises(INVALID, match=f"Embedding 20 x 100: {problem}"):
        session.run(None, feeds | override)
