"""The block pool alone: states of a block, order of eviction, and that its self-check finds what it is for."""

import pytest

from castline.runtime.block_pool import BlockPool


def test_a_block_is_blank_used_evictable_and_blank_again():
    """A cached block must count as free and yet keep its content until it is needed."""
    pool = BlockPool(2)
    block = pool.allocate()
    pool.set_cached(block)
    assert (pool.num_free, pool.num_used) == (1, 1)
    pool.release(block)
    assert (pool.num_free, pool.num_used) == (2, 0)
    pool.share(block)
    assert (pool.num_free, pool.num_used) == (1, 1)
    pool.check([[block]])


def test_blank_blocks_are_taken_before_anything_is_evicted():
    """Evicting while blank blocks are left would throw prefix hits away for nothing."""
    pool, evicted = BlockPool(3), []
    pool.on_evict = evicted.append
    cached = pool.allocate()
    pool.set_cached(cached)
    pool.release(cached)
    taken = [pool.allocate() for _ in range(2)]
    assert cached not in taken
    assert evicted == []
    assert pool.allocate() == cached
    assert evicted == [cached]


def test_eviction_is_least_recently_used_and_a_chain_goes_from_its_end():
    """A table released front to back would evict the shared start of a prompt first, and its tail would be garbage."""
    pool, evicted = BlockPool(4), []
    pool.on_evict = evicted.append
    old, young = [pool.allocate(), pool.allocate()], [pool.allocate(), pool.allocate()]
    for block in old + young:
        pool.set_cached(block)
    pool.release_table(old)
    pool.release_table(young)
    pool.share(old[0])  # used again, so now the most recent
    pool.release(old[0])
    for _ in range(4):
        pool.allocate()
    assert evicted == [old[1], young[1], young[0], old[0]]


def test_only_a_private_unknown_block_is_writable():
    """Writing a shared or findable block would change another sequence's context."""
    pool = BlockPool(2)
    block = pool.allocate()
    assert pool.is_writable(block)
    table = pool.fork([block])
    assert not pool.is_writable(block)
    pool.release_table(table)
    assert pool.is_writable(block)
    pool.set_cached(block)
    assert not pool.is_writable(block)


def test_releasing_more_often_than_taken_is_caught():
    """A double free hands one block to two sequences."""
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(block)


@pytest.mark.parametrize("tables", [[], [[0], [0]], [[0, 1]]])
def test_check_finds_a_leak_a_missing_reference_and_an_unknown_holder(tables):
    """A self-check that cannot fail is worth nothing."""
    pool = BlockPool(3)
    assert pool.allocate() == 0
    pool.check([[0]])
    with pytest.raises(AssertionError, match="refcount"):
        pool.check(tables)


def test_first_uses_are_told_in_order():
    """Memory follows first uses: one out of order, told twice or not at all leaves steps to fault; a never-used block
    taken while a used blank one is left makes more of the pool resident than is needed."""
    pool, first = BlockPool(4), []
    pool.on_first_use = first.append
    a, b = pool.allocate(), pool.allocate()
    pool.release(a)
    assert pool.allocate() == a
    pool.set_cached(b)
    pool.release(b)
    rest = [pool.allocate(), pool.allocate()]
    assert first == [a, b, *rest] == [0, 1, 2, 3]
    assert pool.allocate() == b  # evicted only now
    pool.release_table([a, b, *rest])
    for _ in range(4):
        pool.allocate()
    assert (first, pool.num_opened) == ([0, 1, 2, 3], 4)
