"""When the wide kernels are used, where the host has them; and that they keep to the contract as the operator does."""

from dataclasses import replace

import numpy as np
import pytest

from castline.plugins.cpu.library import available_isas, has_wide_kernels
from castline.plugins.linear import LinearFormat
from castline.plugins.linear_reference import linear

pytestmark = pytest.mark.skipif("amx" not in available_isas(), reason="the host has no matrix units")

# Of outputs of size about 1: weights and activations rounded to 8 bits of mantissa.
TOLERANCE = 2e-2


def test_isas_with_wide_kernels(tools) -> None:
    """The self-test asks for the wide reference by it."""
    for isa in available_isas():
        with tools.isa(isa):
            assert has_wide_kernels() == (isa == "amx")


@pytest.mark.parametrize(
    ("wide_rows", "group", "first_wide"), [(-1, 32, None), (1, 32, 1), (5, 32, 5), (0, 32, 9), (0, 0, 3), (9, 0, 9)]
)
def test_rows_from_which_kernels_are_wide(tools, linear_tools, wide_rows, group, first_wide) -> None:
    """The tuner's choice must be what runs: on either side of it, and never where it says so."""
    a = linear_tools.attributes(k=192, n=64, format=int(LinearFormat.W8), group=group)
    packed = linear_tools.weight(a)
    narrow = linear_tools.Node(tools, a, packed, isa="avx512")
    node = linear_tools.Node(tools, replace(a, wide_rows=wide_rows), packed, isa="amx")
    for rows in (1, 2, 3, 4, 5, 8, 9, 30):
        inputs = linear_tools.inputs(a, rows)
        is_narrow = np.array_equal(node(inputs), narrow(inputs))
        assert is_narrow == (first_wide is None or rows < first_wide), rows


@pytest.mark.parametrize("gated", [0, 1])
def test_wide_equals_reference(tools, linear_tools, format_and_group, gated) -> None:
    """The wide kernels of every format, with everything around them, in ragged shapes and over several blocks."""
    for k, n, rows in ((100, 40, 1), (100, 40, 33), (576, 90, 17), (4096, 20, 400)):
        a = linear_tools.attributes(**format_and_group, k=k, n=n, gated=gated, activation=gated, norm=1, wide_rows=1)
        packed = linear_tools.weight(a)
        inputs = linear_tools.inputs(a, rows, bias=True, residual=True)
        node = linear_tools.Node(tools, a, packed, bias=True, residual=True, isa="amx", threads=2)
        expected = linear(a, inputs, packed, wide=True)
        np.testing.assert_allclose(node(inputs), expected, rtol=0, atol=TOLERANCE * np.abs(expected).max(initial=1.0))


def test_wide_rows_do_not_see_each_other(tools, linear_tools, format_and_group) -> None:
    """C27, within the wide kernels: neither the other rows nor the threads change a row's bits."""
    a = linear_tools.attributes(**format_and_group, k=150, n=83, norm=1, wide_rows=1)
    packed = linear_tools.weight(a)
    inputs = linear_tools.inputs(a, 50, residual=True)
    nodes = [linear_tools.Node(tools, a, packed, residual=True, isa="amx", threads=n) for n in (1, 2, 3)]
    together = nodes[0](inputs)
    for first, last in ((0, 1), (3, 20), (16, 32), (20, 50), (49, 50)):
        part = replace(inputs, x=inputs.x[first:last], residual=inputs.residual[first:last])
        for node in nodes:
            np.testing.assert_array_equal(node(part), together[first:last])
