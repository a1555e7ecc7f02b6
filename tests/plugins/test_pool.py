"""What a step may write to the pool and read from it."""

from dataclasses import replace

import numpy as np
import pytest

from castline.plugins.contract import CPU_KV_DTYPES
from castline.plugins.cpu.library import available_isas


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_only_the_steps_slots_change(tools, isa, kv_dtype, head_dim) -> None:
    """A store that spills past its slot corrupts another sequence's cache, and shows up as a wrong token much later."""
    attributes = tools.attributes(kv_dtype=int(kv_dtype), head_dim=head_dim)
    sequences = tools.Sequences(attributes, [37, 20], spare_blocks=3)
    node = tools.Node(attributes, sequences.num_blocks, isa)
    node.pool[:] = np.random.default_rng(1).integers(0, 256, node.pool.shape, np.uint8)
    node(sequences.step([(0, 30), (0, 20)]))
    before = node.pool.copy()
    step = sequences.step([(30, 37), (20, 20)])
    node(step)

    slots = np.zeros((sequences.num_blocks, attributes.block_size), bool)
    slots.reshape(-1)[step.slot_mapping] = True
    changed = node.pool != before
    assert changed.any()
    assert not changed[~slots.any(axis=1)].any()
    # Within the touched blocks: mark every byte of the written slots, by writing them again with other values.
    assert not (changed & ~bytes_of_slots(tools, attributes, node, step)).any()


def bytes_of_slots(tools, attributes, node, step):
    """Bytes that belong to the step's slots: those that many different values of K and V make differ, in any bit."""
    kept = node.pool.copy()
    marks = np.zeros(node.pool.shape, bool)
    rng = np.random.default_rng(2)
    node(step)
    first = node.pool.copy()
    for _ in range(40):
        node(replace(step, qkv=(rng.standard_normal(step.qkv.shape) * 10 ** rng.uniform(-3, 2)).astype(np.float32)))
        marks |= node.pool != first
    node.pool[:] = kept
    return marks


@pytest.mark.parametrize("isa", available_isas())
def test_slot_minus_one_writes_nothing(tools, isa) -> None:
    """A token whose K and V are already cached (slot -1) must attend to them and leave them."""
    attributes = tools.attributes()
    sequences = tools.Sequences(attributes, [20])
    node = tools.Node(attributes, sequences.num_blocks, isa)
    step = sequences.step([(0, 20)])
    expected = node(step)
    before = node.pool.copy()
    again = replace(step, slot_mapping=np.full(20, -1, np.int32))
    np.testing.assert_array_equal(node(again), expected)
    np.testing.assert_array_equal(node.pool, before)


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("kv_dtype", CPU_KV_DTYPES)
@pytest.mark.parametrize("head_dim", [16, 40, 64])
@pytest.mark.parametrize("stale", [0xFF, 0x7F, 0x7E])
def test_stale_slots_are_not_read(tools, isa, kv_dtype, head_dim, stale) -> None:
    """A block is reused with another sequence's leftovers in its tail; a NaN there must not reach this sequence. Heads
    of 40 and 64 are for matrix kernels, where fp8's NaN is another byte."""
    attributes = tools.attributes(kv_dtype=int(kv_dtype), block_size=32, head_dim=head_dim)
    sequences = tools.Sequences(attributes, [33, 1, 32])
    step = sequences.step([(0, 33), (0, 1), (0, 32)])
    node = tools.Node(attributes, sequences.num_blocks, isa)
    node.pool[:] = stale
    poisoned = node(step)
    clean = tools.Node(attributes, sequences.num_blocks, isa)
    clean.pool[:] = 0
    np.testing.assert_array_equal(poisoned, clean(step))
    assert np.isfinite(poisoned).all()


def test_shared_blocks(tools) -> None:
    """Two sequences that share a prefix's blocks, as the prefix cache makes them, each read the shared K and V."""
    attributes = tools.attributes()
    sequences = tools.Sequences(attributes, [48, 48])
    sequences.qkv[1][:32], sequences.angles[1][:32] = sequences.qkv[0][:32], sequences.angles[0][:32]
    node = tools.Node(attributes, sequences.num_blocks)
    node(sequences.step([(0, 48), (0, 48)]))
    expected = node(sequences.step([(40, 48), (40, 48)]))
    sequences.block_table[1, :2] = sequences.block_table[0, :2]
    np.testing.assert_array_equal(node(sequences.step([(40, 48), (40, 48)])), expected)
