"""The narrow kernels of every instruction set, and the embedding, against the NumPy reference."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.plugins.cpu.library import available_isas
from castline.plugins.cpu.linear_model import IDS, SCALES, WEIGHT, serialise_embedding_model
from castline.plugins.linear import LINEAR_GROUPS, Activation, EmbeddingAttributes, LinearAttributes, LinearFormat
from castline.plugins.linear_packing import pack
from castline.plugins.linear_reference import embedding, linear

FORMATS = [(fmt, group) for fmt, groups in LINEAR_GROUPS.items() for group in groups]
ROWS = (0, 1, 2, 3, 5, 8, 17, 64)

# Of outputs of size about 1: float32 sums, and a polynomial erf.
TOLERANCE = 2e-5


@st.composite
def linear_attributes(draw: st.DrawFn) -> LinearAttributes:
    fmt, group = draw(st.sampled_from(FORMATS))
    return LinearAttributes(
        k=draw(st.one_of(st.integers(1, 200), st.sampled_from((64, 128, 576)))),
        n=draw(st.one_of(st.integers(1, 120), st.sampled_from((16, 48, 96)))),
        format=int(fmt),
        group=group,
        activation=int(draw(st.sampled_from(Activation))),
        gated=draw(st.integers(0, 1)),
        norm=draw(st.integers(0, 1)),
        norm_eps=draw(st.sampled_from((1e-6, 1e-5))),
        wide_rows=-1,
    )


@pytest.mark.parametrize("isa", available_isas())
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    attributes=linear_attributes(),
    bias=st.booleans(),
    residual=st.booleans(),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
def test_linear(tools, linear_tools, isa, attributes, bias, residual, threads, seed) -> None:
    """Any disagreement with the contract: layout, scales, rounding in groups, padding, epilogue, the last strip."""
    packed = linear_tools.weight(attributes, seed)
    node = linear_tools.Node(tools, attributes, packed, bias=bias, residual=residual, isa=isa, threads=threads)
    for rows in ROWS:
        inputs = linear_tools.inputs(attributes, rows, seed, bias=bias, residual=residual)
        expected = linear(attributes, inputs, packed)
        output = node(inputs)
        assert output.shape == expected.shape == (rows, attributes.n)
        np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(initial=1.0))


@pytest.mark.parametrize("isa", available_isas())
def test_extreme_codes_do_not_saturate(tools, linear_tools, isa, format_and_group) -> None:
    """Products of the largest codes with the largest activations overflow 16 bits in kernels without dot products."""
    a = linear_tools.attributes(**format_and_group, k=256, n=64)
    packed = linear_tools.weight(a)
    packed.weight[:] = np.random.default_rng(1).choice(np.array([0x00, 0xFF], np.uint8), packed.weight.shape)
    packed.weight[0] = 0xFF
    packed.weight[1] = 0x00
    node = linear_tools.Node(tools, a, packed, isa=isa)
    inputs = linear_tools.inputs(a, 9)
    signs = np.where(np.random.default_rng(2).random(inputs.x.shape) < 0.5, 1, -1)
    for x in (np.ones_like(inputs.x), -np.ones_like(inputs.x), signs.astype(np.float32)):
        step = replace(inputs, x=x)
        expected = linear(a, step, packed)
        np.testing.assert_allclose(node(step), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("activation", Activation)
def test_activations_of_large_values(tools, linear_tools, isa, activation) -> None:
    """exp overflows, and x^3 too: far from zero an activation is 0 or x, never NaN."""
    a = linear_tools.attributes(k=64, n=48, format=int(LinearFormat.W8), group=0, activation=int(activation))
    packed = linear_tools.weight(a)
    inputs = linear_tools.inputs(a, 6)
    sizes = np.array([1e-20, 1e-3, 10, 1e3, 1e6, 1e18], np.float32)
    inputs = replace(inputs, x=inputs.x * sizes[:, None])
    expected = linear(a, inputs, packed)
    output = linear_tools.Node(tools, a, packed, isa=isa)(inputs)
    np.testing.assert_allclose(output, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_stays_in_its_row(tools, linear_tools, isa, format_and_group, bad) -> None:
    """A NaN rounded to an integer becomes an ordinary number: the row must show it, and no other row may."""
    a = linear_tools.attributes(**format_and_group, norm=1)
    packed = linear_tools.weight(a)
    node = linear_tools.Node(tools, a, packed, isa=isa)
    inputs = linear_tools.inputs(a, 7)
    clean = node(inputs)
    inputs.x[3, 40] = bad
    output = node(inputs)
    assert not np.isfinite(output[3]).any()
    np.testing.assert_array_equal(np.delete(output, 3, axis=0), np.delete(clean, 3, axis=0))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    fmt_group=st.sampled_from(FORMATS),
    n=st.integers(1, 70),
    k=st.integers(1, 200),
    rows=st.integers(0, 50),
    seed=st.integers(0, 2**16),
)
def test_embedding(tools, fmt_group, n, k, rows, seed) -> None:
    """To the bit: a tied embedding read in its packed form is the head's weights."""
    fmt, group = fmt_group
    rng = np.random.default_rng(seed)
    packed = pack(rng.standard_normal((n, k)).astype(np.float32), fmt, group)
    attributes = EmbeddingAttributes(k=k, n=n, format=int(fmt), group=group)
    session = tools.session(serialise_embedding_model(attributes), 2)
    ids = rng.integers(0, n, rows)
    (output,) = session.run(None, {IDS: ids, WEIGHT: packed.weight, SCALES: packed.scales})
    np.testing.assert_array_equal(output, embedding(attributes, ids, packed))
