"""The wide kernels against a reference that rounds as they do, and the invariance of their rows to the bit."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.plugins.cpu.library import available_isas
from castline.plugins.linear import LINEAR_GROUPS, Activation, LinearAttributes, LinearFormat
from castline.plugins.linear_packing import unpack, unpack_gated
from castline.plugins.linear_reference import activate, linear, normed, round_bf16

pytestmark = pytest.mark.skipif("amx" not in available_isas(), reason="this host has no tile registers")

FORMATS = [(fmt, group) for fmt, groups in LINEAR_GROUPS.items() for group in groups]
ROWS = (1, 2, 15, 16, 17, 31, 33, 64, 130, 513)

# Of outputs of size about 1: float32 sums, and activations that round otherwise where the norm differs by a bit.
TOLERANCE = 1e-4


def round_weights(weight):
    """To the 11 bits of float16 whatever the size, then to the 8 of bf16, halves away from zero."""
    mantissa, exponent = np.frexp(weight.astype(np.float64))
    eleven = np.ldexp(np.rint(mantissa * 2048), exponent - 11)
    mantissa, exponent = np.frexp(eleven)
    eight = np.floor(np.abs(mantissa) * 256 + 0.5) * np.sign(mantissa)
    return np.ldexp(eight, exponent - 8)


def round_row(h):
    """To integers of 16 bits, two signed bytes each, with one scale a row."""
    largest = np.abs(h).max(axis=1, keepdims=True).astype(np.float64)
    scale = largest / (127 * 256 + 127)
    return np.rint(np.divide(h, scale, out=np.zeros_like(h, np.float64), where=scale > 0)) * scale


def wide_reference(a, inputs, packed):
    whole_columns = a.format == LinearFormat.W8 and a.group == 0
    h = normed(a, inputs)
    h = round_row(h) if whole_columns else round_bf16(h).astype(np.float64)
    fmt = LinearFormat(a.format)
    weights = unpack_gated(packed, a.n, a.k, fmt, a.group) if a.gated else (unpack(packed, a.n, a.k, fmt, a.group),)
    biases = np.zeros((2, a.n)) if inputs.bias is None else inputs.bias.reshape(-1, a.n)
    sums = [
        h @ (w if whole_columns else round_weights(w)).astype(np.float64).T + b
        for w, b in zip(weights, biases, strict=False)
    ]
    y = activate(a.activation, sums[0])
    if a.gated:
        y = y * sums[1]
    return y if inputs.residual is None else y + inputs.residual


def rows_of(inputs, rows):
    residual = None if inputs.residual is None else inputs.residual[rows]
    return replace(inputs, x=inputs.x[rows], residual=residual)


def assert_near(output, expected):
    np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(initial=1.0))


@st.composite
def wide_attributes(draw: st.DrawFn) -> LinearAttributes:
    fmt, group = draw(st.sampled_from(FORMATS))
    return LinearAttributes(
        k=draw(st.one_of(st.integers(1, 200), st.sampled_from((64, 576, 1300)))),
        n=draw(st.one_of(st.integers(1, 120), st.sampled_from((16, 48, 96)))),
        format=int(fmt),
        group=group,
        activation=int(draw(st.sampled_from(Activation))),
        gated=draw(st.integers(0, 1)),
        norm=draw(st.integers(0, 1)),
        wide_rows=1,
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    attributes=wide_attributes(),
    bias=st.booleans(),
    residual=st.booleans(),
    threads=st.integers(1, 3),
    rows=st.sampled_from((0, *ROWS[:-1])),
    seed=st.integers(0, 2**16),
)
def test_linear(tools, linear_tools, attributes, bias, residual, threads, rows, seed) -> None:
    """Any disagreement: order of elements in a tile, rounding, scales of groups, row padding, epilogue, last strip."""
    packed = linear_tools.weight(attributes, seed)
    node = linear_tools.Node(tools, attributes, packed, bias=bias, residual=residual, threads=threads)
    inputs = linear_tools.inputs(attributes, rows, seed, bias=bias, residual=residual)
    expected = wide_reference(attributes, inputs, packed)
    output = node(inputs)
    assert output.shape == expected.shape == (rows, attributes.n)
    assert_near(output, expected)


@pytest.mark.parametrize("gated", [0, 1])
def test_rows_do_not_see_each_other(tools, linear_tools, format_and_group, gated) -> None:
    """C27, for every filling of row tiles, of pairs of them, and with K in several blocks: the same bits each time."""
    a = linear_tools.attributes(**format_and_group, k=1300, n=83, norm=1, gated=gated, activation=gated, wide_rows=1)
    packed = linear_tools.weight(a)
    node = linear_tools.Node(tools, a, packed, residual=True)
    inputs = linear_tools.inputs(a, ROWS[-1], residual=True)
    together = node(inputs)
    assert_near(together, wide_reference(a, inputs, packed))
    for rows in ROWS:
        np.testing.assert_array_equal(node(rows_of(inputs, slice(rows))), together[:rows], err_msg=f"{rows} rows")
    np.testing.assert_array_equal(node(rows_of(inputs, [200])), together[[200]])


def test_threads_take_their_own_strips(tools, linear_tools, format_and_group) -> None:
    """Strips are multiplied in pairs: however threads cut them, a strip's result is its own."""
    a = linear_tools.attributes(**format_and_group, k=160, n=16 * 31, wide_rows=1)
    packed = linear_tools.weight(a)
    inputs = linear_tools.inputs(a, 40)
    expected = linear_tools.Node(tools, a, packed)(inputs)
    for threads in (2, 3):
        node = linear_tools.Node(tools, a, packed, threads=threads)
        for _ in range(3):
            np.testing.assert_array_equal(node(inputs), expected)


@pytest.mark.parametrize("size", [2.0**-14, 2.0**-7, 1.0, 2.0**9])
def test_scales_of_any_size(tools, linear_tools, format_and_group, size) -> None:
    """Weights are computed in fp16: those near its limits must neither overflow nor lose their bits."""
    a = linear_tools.attributes(**format_and_group, k=192, n=48, wide_rows=1)
    packed = linear_tools.weight(a)
    factors = np.float16(size) * np.float16(2.0) ** (np.arange(packed.scales.shape[1]) % 3 - 1)
    packed = replace(packed, scales=packed.scales * factors.astype(np.float16))
    inputs = linear_tools.inputs(a, 20)
    expected = wide_reference(a, inputs, packed)
    output = linear_tools.Node(tools, a, packed)(inputs)
    np.testing.assert_allclose(output, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


def test_extreme_codes(tools, linear_tools, format_and_group) -> None:
    """Integer sums of the largest codes, and the ends of every table."""
    a = linear_tools.attributes(**format_and_group, k=4096, n=64, wide_rows=1)
    packed = linear_tools.weight(a)
    packed.weight[:] = np.random.default_rng(1).choice(np.array([0x00, 0xFF], np.uint8), packed.weight.shape)
    packed.weight[0] = 0xFF
    packed.weight[1] = 0x00
    node = linear_tools.Node(tools, a, packed)
    inputs = linear_tools.inputs(a, 18)
    for x in (np.ones_like(inputs.x), -np.ones_like(inputs.x), np.sign(inputs.x)):
        step = replace(inputs, x=x)
        assert_near(node(step), wide_reference(a, step, packed))


def test_an_outlier_leaves_the_other_elements(tools, linear_tools, format_and_group) -> None:
    """Rows of a language model hold elements a thousand times the others: with one scale a row in few bits these would
    all become zero. Wide kernels are at least as near to the exact result as narrow ones."""
    a = linear_tools.attributes(**format_and_group, k=576, n=256)
    packed = linear_tools.weight(a)
    inputs = linear_tools.inputs(a, 32)
    x = np.random.default_rng(3).standard_normal(inputs.x.shape).astype(np.float32)
    x[:, 77] = 1000
    inputs = replace(inputs, x=x)
    weight = unpack(packed, a.n, a.k, LinearFormat(a.format), a.group).astype(np.float64)
    exact = x.astype(np.float64) @ weight.T
    narrow = linear_tools.Node(tools, a, packed)(inputs)
    wide = linear_tools.Node(tools, replace(a, wide_rows=1), packed)(inputs)
    without = exact - 1000 * weight[:, 77]
    assert np.abs(wide - exact).mean() <= np.abs(narrow - exact).mean() + 0.01 * np.abs(without).mean()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_value_stays_in_its_row(tools, linear_tools, format_and_group, bad) -> None:
    """The row must show it, and no other row of its tile may."""
    a = linear_tools.attributes(**format_and_group, norm=1, wide_rows=1)
    node = linear_tools.Node(tools, a, linear_tools.weight(a))
    inputs = linear_tools.inputs(a, 20)
    clean = node(inputs)
    inputs.x[3, 40] = bad
    output = node(inputs)
    assert not np.isfinite(output[3]).any()
    np.testing.assert_array_equal(np.delete(output, 3, axis=0), np.delete(clean, 3, axis=0))


def test_wide_rows_chooses(tools, linear_tools) -> None:
    """The attribute decides from which row count on rounding is that of wide kernels; -1 and a narrower instruction
    set mean never."""
    a = linear_tools.attributes(k=256, n=64, wide_rows=8)
    packed = linear_tools.weight(a)
    inputs = linear_tools.inputs(a, 8)
    narrow = linear(a, inputs, packed)
    wide = wide_reference(a, inputs, packed)
    assert np.abs(narrow - wide).max() > 10 * TOLERANCE
    node = linear_tools.Node(tools, a, packed)
    assert_near(node(inputs), wide)
    assert_near(node(rows_of(inputs, slice(7))), narrow[:7])
    assert_near(linear_tools.Node(tools, replace(a, wide_rows=-1), packed)(inputs), narrow)
    assert_near(linear_tools.Node(tools, a, packed, isa="avx512")(inputs), narrow)
