"""What the prefix cache finds, and what it must not."""

import pytest

from castline.runtime.block_pool import BlockPool
from castline.runtime.prefix_cache import PrefixCache

BS = 4


def insert_all(cache: PrefixCache, pool: BlockPool, tokens: list[int], salt: str | None = None) -> list[int]:
    """Computes and publishes the full blocks of *tokens*; returns their block ids."""
    keys: list[int] = []
    cache.extend_keys(keys, tokens, salt, len(tokens) // BS)
    parent, blocks = None, []
    for index, key in enumerate(keys):
        blocks.append(pool.allocate())
        parent = cache.insert(key, parent, tokens[index * BS : (index + 1) * BS], salt, blocks[-1])
        if parent is None:
            break
    return blocks


def find(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> list[int]:
    keys: list[int] = []
    cache.extend_keys(keys, tokens, salt, len(tokens) // BS)
    return [block.block_id for block in cache.lookup(keys, tokens, salt)]


def test_the_longest_run_of_full_blocks_is_found():
    """A partial block must not be found: its rest would be written by whoever found it."""
    pool = BlockPool(8)
    cache = PrefixCache(pool, BS)
    blocks = insert_all(cache, pool, list(range(11)))
    assert len(blocks) == 2
    assert find(cache, list(range(16))) == blocks
    assert find(cache, [*range(7), 99, *range(8, 12)]) == blocks[:1]
    assert find(cache, list(range(1, 12))) == []


def test_equal_tokens_after_other_tokens_are_another_block():
    """KV depends on everything before it, so a block is not identified by its own tokens."""
    pool = BlockPool(8)
    cache = PrefixCache(pool, BS)
    insert_all(cache, pool, [1, 1, 1, 1, 5, 5, 5, 5])
    assert find(cache, [5, 5, 5, 5]) == []
    assert len(find(cache, [1, 1, 1, 1, 5, 5, 5, 5])) == 2


@pytest.mark.parametrize(("stored", "asked"), [(None, "a"), ("a", None), ("a", "b")])
def test_a_salt_separates(stored, asked):
    """Timing of one tenant's requests must not tell another what has been asked."""
    pool = BlockPool(4)
    cache = PrefixCache(pool, BS)
    insert_all(cache, pool, list(range(8)), stored)
    assert find(cache, list(range(8)), asked) == []
    assert len(find(cache, list(range(8)), stored)) == 2


def test_another_engine_has_other_keys():
    """Blocks exported from one engine must never match another's, whose KV differs."""
    first, second = [], []
    PrefixCache(BlockPool(1), BS, engine="a").extend_keys(first, [1, 2, 3, 4], None, 1)
    PrefixCache(BlockPool(1), BS, engine="b").extend_keys(second, [1, 2, 3, 4], None, 1)
    assert first != second


@pytest.mark.parametrize(
    "asked", [[9, 9, 9, 9], [9, 9, 9, 9, 4, 5, 6, 7], [0, 1, 2, 3, 9, 9, 9, 9]], ids=["first", "parent", "child"]
)
def test_a_colliding_hash_finds_nothing_wrong(asked):
    """With every hash equal, only comparing tokens and parents keeps one prompt out of another's context."""
    pool = BlockPool(8)
    cache = PrefixCache(pool, BS, hash_fn=lambda _: 0)
    stored = insert_all(cache, pool, [0, 1, 2, 3])
    assert find(cache, asked) in ([], stored)
    assert find(cache, asked) == (stored if asked[:BS] == [0, 1, 2, 3] else [])
    colliding = insert_all(cache, pool, asked)
    assert len(cache) == 1, "the key belongs to what came first"
    assert find(cache, [0, 1, 2, 3]) == stored
    assert not set(find(cache, asked)) & set(colliding)


def test_eviction_shortens_a_chain_from_its_end():
    """A child without its parent could never be found again, and would hold its block for nothing."""
    pool = BlockPool(3)
    cache = PrefixCache(pool, BS)
    blocks = insert_all(cache, pool, list(range(12)))
    pool.release_table(blocks)
    for left in (2, 1, 0):
        pool.allocate()
        assert find(cache, list(range(12))) == blocks[:left]
        assert len(cache) == left
        cache.check()


def test_equal_content_is_stored_once():
    """Two sequences that computed the same block must end up sharing it, or the cache would hold it twice."""
    pool = BlockPool(4)
    cache = PrefixCache(pool, BS)
    (first,) = insert_all(cache, pool, list(range(4)))
    keys: list[int] = []
    cache.extend_keys(keys, list(range(4)), None, 1)
    again = cache.insert(keys[0], None, list(range(4)), None, pool.allocate())
    assert again is not None
    assert again.block_id == first
