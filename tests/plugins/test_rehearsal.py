"""A rehearsal takes a step's memory and leaves everything else as it was. Attention nodes."""

import numpy as np
import pytest

from castline.plugins.contract import KvDtypeCode
from castline.plugins.cpu.library import rehearsal


@pytest.mark.parametrize("kv_dtype", [KvDtypeCode.FP32, KvDtypeCode.INT8])
@pytest.mark.parametrize("spans", [[(0, 300)], [(299, 300)], [(0, 40), (39, 40), (0, 7)]])
def test_attention_writes_nothing(tools, spans, kv_dtype) -> None:
    """A warm-up over a pool that holds a prefix, as when a recording begins."""
    attributes = tools.attributes(kv_dtype=int(kv_dtype))
    sequences = tools.Sequences(attributes, [stop for _, stop in spans])
    node, plain = (tools.Node(attributes, sequences.num_blocks, threads=2) for _ in range(2))
    before = sequences.step([(0, start) for start, _ in spans])
    step = sequences.step(spans)
    for each in (node, plain):
        each(before)
    pool = node.pool.copy()
    with rehearsal():
        node(step)
    np.testing.assert_array_equal(node.pool, pool)
    np.testing.assert_array_equal(node(step), plain(step))
    np.testing.assert_array_equal(node.pool, plain.pool)


def test_what_a_step_must_not_be_is_refused_all_the_same(tools) -> None:
    attributes = tools.attributes()
    sequences = tools.Sequences(attributes, [5])
    node = tools.Node(attributes, sequences.num_blocks)
    step = sequences.step([(0, 5)])
    with rehearsal(), pytest.raises(Exception, match="kv_lens"):
        node(step, kv_lens=np.array([4], np.int32))
