"""A row's bits depend on the row alone: not on the rows beside it, the number of threads or how work is cut."""

from dataclasses import replace

import numpy as np
import pytest

from castline.plugins.cpu.library import available_isas

ISAS = available_isas()


def rows_of(inputs, rows):
    residual = None if inputs.residual is None else inputs.residual[rows]
    return replace(inputs, x=inputs.x[rows], residual=residual)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("gated", [0, 1])
def test_rows_do_not_see_each_other(tools, linear_tools, isa, format_and_group, gated) -> None:
    """C27: a sequence decodes to other tokens when others run beside it."""
    a = linear_tools.attributes(**format_and_group, k=150, n=83, norm=1, gated=gated, activation=gated)
    node = linear_tools.Node(tools, a, linear_tools.weight(a), residual=True, isa=isa)
    inputs = linear_tools.inputs(a, 23, residual=True)
    together = node(inputs)
    for size in (1, 2, 3, 4, 5, 7, 8, 9, 15):
        for first in range(0, 23 - size + 1, size):
            rows = slice(first, first + size)
            np.testing.assert_array_equal(node(rows_of(inputs, rows)), together[rows], err_msg=f"{rows}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 2, 12, 400])
def test_threads_and_blocks_of_rows(tools, linear_tools, isa, rows) -> None:
    """400 rows of 4,096 are several blocks; every thread must take its own rows and strips, each once."""
    a = linear_tools.attributes(k=4096, n=70, norm=1)
    packed = linear_tools.weight(a)
    inputs = linear_tools.inputs(a, rows, residual=True)
    one = linear_tools.Node(tools, a, packed, residual=True, isa=isa)
    expected = one(inputs)
    for row in (0, rows // 2, rows - 1):
        np.testing.assert_array_equal(one(rows_of(inputs, [row])), expected[[row]])
    for threads in (2, 3, 7):
        node = linear_tools.Node(tools, a, packed, residual=True, isa=isa, threads=threads)
        for _ in range(3):
            np.testing.assert_array_equal(node(inputs), expected)


def test_nodes_in_turn_keep_their_own_rows(tools, linear_tools) -> None:
    """A thread keeps the rows it prepared: those of another step must not be taken for them."""
    a = linear_tools.attributes(k=128, n=600)
    packed = linear_tools.weight(a)
    nodes = [linear_tools.Node(tools, a, packed, threads=threads) for threads in (1, 2, 3)]
    steps = [linear_tools.inputs(a, 1, seed) for seed in range(8)]
    expected = [nodes[0](step) for step in steps]
    for _ in range(20):
        for step, output in zip(steps, expected, strict=True):
            for node in nodes:
                np.testing.assert_array_equal(node(step), output)
