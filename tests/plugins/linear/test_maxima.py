"""The node's second output: the largest of each block of columns, which the sampler reads in place of the row."""

from dataclasses import replace

import numpy as np
import pytest

from castline.plugins.cpu.library import available_isas
from castline.plugins.linear import MAXIMA_BLOCK

ISAS = available_isas()
LOWEST = np.finfo(np.float32).min


def block_maxima(y):
    """[T, blocks] of finite *y*."""
    padded = np.pad(y, ((0, 0), (0, -y.shape[1] % MAXIMA_BLOCK)), constant_values=-np.inf)
    return padded.reshape(len(y), -1, MAXIMA_BLOCK).max(axis=2)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("n", [1, 40, 64, 65, 500, 1000])
@pytest.mark.parametrize("wide_rows", [-1, 0])
def test_are_those_of_the_output(tools, linear_tools, isa, n, wide_rows) -> None:
    """A block that a thread shares with its neighbour, or a last one that is short, would lack its best column."""
    a = linear_tools.attributes(k=128, n=n, wide_rows=wide_rows)
    packed = linear_tools.weight(a)
    for threads in (1, 3):
        node = linear_tools.Node(tools, a, packed, residual=True, maxima=True, isa=isa, threads=threads)
        for rows in (1, 7, 40, 0):
            y, maxima = node.outputs(linear_tools.inputs(a, rows, residual=True))
            np.testing.assert_array_equal(maxima, block_maxima(y) if rows else np.empty((0, -(-n // MAXIMA_BLOCK))))


@pytest.mark.parametrize("isa", ISAS)
def test_blocks_of_rows_have_their_own(tools, linear_tools, isa) -> None:
    """400 rows of 4,096 are several blocks: the maxima of the second must not land on the first's."""
    a = linear_tools.attributes(k=4096, n=70)
    node = linear_tools.Node(tools, a, linear_tools.weight(a), maxima=True, isa=isa, threads=2)
    y, maxima = node.outputs(linear_tools.inputs(a, 400))
    np.testing.assert_array_equal(maxima, block_maxima(y))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("place", [0, 70, 299])
def test_what_is_not_finite(tools, linear_tools, isa, place) -> None:
    """A NaN that a vector maximum drops would let a broken row be sampled."""
    a = linear_tools.attributes(k=64, n=300)
    node = linear_tools.Node(tools, a, linear_tools.weight(a), residual=True, maxima=True, isa=isa)
    inputs = linear_tools.inputs(a, 5, residual=True)
    residual = inputs.residual.copy()
    residual[1, place], residual[2, place], residual[3, place], residual[4] = np.nan, np.inf, -np.inf, -np.inf
    y, maxima = node.outputs(replace(inputs, residual=residual))
    assert np.isnan(maxima).any(axis=1).tolist() == [False, True, True, False, False]
    np.testing.assert_array_equal(maxima[[0, 3]], block_maxima(y[[0, 3]]))
    assert (maxima[4] == LOWEST).all()
