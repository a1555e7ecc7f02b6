"""A row's result depends on its own query and keys alone: bit for bit, however the step is put together or cut up."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from castline.plugins.contract import CPU_KV_DTYPES, AttentionAttributes, KvDtypeCode
from castline.plugins.cpu.library import available_isas

LENGTH = 530  # three key tiles
LONG = 4000  # sixteen


def by_token(output, steps):
    """{(sequence, position): row} of one step's output; *steps* is [(sequence, start, stop)]."""
    tokens = [(sequence, p) for sequence, start, stop in steps for p in range(start, stop)]
    return dict(zip(tokens, output, strict=True))


def run(tools, attributes, chunks, isa, threads=1):
    """All tokens' rows, computed chunk by chunk; *chunks* is a list of steps as for by_token."""
    sequences = tools.Sequences(attributes, [LENGTH, 40], seed=5)
    node = tools.Node(attributes, sequences.num_blocks, isa, threads)
    rows = {}
    for step in chunks:
        inputs = sequences.step([(start, stop) for _, start, stop in step], [sequence for sequence, _, _ in step])
        rows |= by_token(node(inputs), step)
    return rows


def assert_same(rows, expected):
    assert rows.keys() == expected.keys()
    for token, row in rows.items():
        np.testing.assert_array_equal(row, expected[token], err_msg=str(token))


CASES = [(isa, dtype, dim) for isa in available_isas() for dtype in CPU_KV_DTYPES for dim in (24, 40)]


@pytest.fixture(params=CASES, ids=str)
def isa_and_attributes(request, tools) -> tuple[str, AttentionAttributes]:
    """Heads of 24 are for the vector kernels of every instruction set, heads of 40 for the matrix ones where there are
    any."""
    isa, dtype, dim = request.param
    return isa, tools.attributes(kv_dtype=int(dtype), num_heads=6, num_kv_heads=2, head_dim=dim, window=301)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(cuts=st.sets(st.integers(1, LENGTH - 1), max_size=6))
def test_chunking(tools, cuts) -> None:
    """C27: a prompt cut into chunks gives other bits, and in time other tokens, than the prompt in one piece."""
    attributes = tools.attributes(kv_dtype=int(KvDtypeCode.INT8), head_dim=32, rotary_dim=32)
    bounds = [0, *sorted(cuts), LENGTH]
    chunks = [[(0, start, stop)] for start, stop in itertools.pairwise(bounds)]
    whole = run(tools, attributes, [[(0, 0, LENGTH)]], None)
    assert_same(run(tools, attributes, chunks, None), whole)


def test_chunking_on_every_isa(tools, isa_and_attributes) -> None:
    """C27, for each dtype's own inner loop: a tile of one row and a tile of many must add up in the same order."""
    isa, attributes = isa_and_attributes
    whole = run(tools, attributes, [[(0, 0, LENGTH)]], isa)
    pieces = [[(0, 0, 250)], [(0, 250, 257)], [(0, 257, 258)], [(0, 258, 517)], [(0, 517, 518)], [(0, 518, LENGTH)]]
    assert_same(run(tools, attributes, pieces, isa), whole)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize(("head_dim", "block_size", "group"), [(96, 32, 5), (256, 64, 3), (128, 16, 4)])
def test_chunking_of_wide_fp8_heads(tools, isa, head_dim, block_size, group) -> None:
    """As above where sums are taken in runs of dimensions and keys, and vectors of V are as many as a tile's rows leave
    registers for."""
    attributes = tools.attributes(
        kv_dtype=int(KvDtypeCode.FP8), num_heads=group, num_kv_heads=1, head_dim=head_dim, block_size=block_size
    )
    whole = run(tools, attributes, [[(0, 0, LENGTH)]], isa)
    pieces = [[(0, 0, 250)], [(0, 250, 257)], [(0, 257, 258)], [(0, 258, 517)], [(0, 517, 518)], [(0, 518, LENGTH)]]
    assert_same(run(tools, attributes, pieces, isa), whole)


def test_batching(tools, isa_and_attributes) -> None:
    """C27: a sequence's bits change when others run beside it."""
    isa, attributes = isa_and_attributes
    alone = run(tools, attributes, [[(0, 0, 500)], [(0, 500, LENGTH)], [(1, 0, 40)]], isa)
    together = run(tools, attributes, [[(0, 0, 500)], [(1, 0, 40), (0, 500, LENGTH)]], isa)
    assert_same(together, alone)


@pytest.mark.parametrize("change", [{"query_tile": 1}, {"query_tile": 7}, {"query_tile": 512}, {"kv_split": 256}])
@pytest.mark.parametrize("threads", [1, 2])
def test_work_partition(tools, isa_and_attributes, change, threads) -> None:
    """The tuner's choices and the number of threads may change the time of a step, never its result."""
    isa, attributes = isa_and_attributes
    steps = [[(0, 0, LENGTH - 1), (1, 0, 39)], [(0, LENGTH - 1, LENGTH), (1, 39, 40)]]
    expected = run(tools, attributes, steps, isa)
    values = {name: getattr(attributes, name) for name in AttentionAttributes.__slots__}
    assert_same(run(tools, AttentionAttributes(**values | change), steps, isa, threads), expected)


def test_number_of_threads(tools, isa_and_attributes) -> None:
    """Where work is scarce, the keys that one item takes follow from the number of threads: here all of them, then 4
    tiles, 2 and 1."""
    isa, attributes = isa_and_attributes
    sequences = tools.Sequences(attributes, [LONG, 40], seed=5)
    before = tools.Node(replace(attributes, window=1), sequences.num_blocks, isa)  # writes the same keys, sooner
    before(sequences.step([(0, LONG - 1), (0, 39)]))
    outputs = []
    for threads in (1, 2, 3, 7):
        node = tools.Node(replace(attributes, window=0), sequences.num_blocks, isa, threads)
        node.pool[:] = before.pool
        outputs.append(node(sequences.step([(LONG - 1, LONG), (39, 40)])))
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])
