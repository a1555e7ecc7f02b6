"""Finds KV blocks by the tokens they hold and everything before them.

The key of a block is a chained hash: ``hash(parent key, tokens)``, and the first parent is ``hash(engine, salt)``. A
hash only finds a candidate; it counts when its tokens, its salt and its parent block are the very ones asked for, so a
collision costs a miss and never a wrong token. Only full blocks whose KV has been computed can be found.

Chains are evicted from their end to their start, so every block that can be found has its parent in the cache.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from castline.runtime.block_pool import BlockPool


@dataclass(frozen=True, slots=True, eq=False)
class CachedBlock:
    """A full, computed block. ``parent`` is the block before it, None for the first of a prompt."""

    block_id: int
    key: int
    parent: "CachedBlock | None"
    token_ids: tuple[int, ...]
    salt: str | None

    def holds(self, parent: "CachedBlock | None", token_ids: tuple[int, ...], salt: str | None) -> bool:
        return self.token_ids == token_ids and self.parent is parent and self.salt == salt


class PrefixCache:
    """Over one pool. ``engine`` identifies what computed the blocks; ``hash_fn`` is injected by tests."""

    def __init__(
        self, pool: BlockPool, block_size: int, engine: str = "", hash_fn: Callable[[Hashable], int] = hash
    ) -> None:
        self.block_size = block_size
        self._pool = pool
        self._engine = engine
        self._hash = hash_fn
        self._by_key: dict[int, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}
        pool.on_evict = self._forget

    def __len__(self) -> int:
        return len(self._by_key)

    def extend_keys(self, keys: list[int], token_ids: Sequence[int], salt: str | None, num_blocks: int) -> None:
        """Extends *keys*, those of the first blocks of *token_ids*, to *num_blocks*."""
        for index in range(len(keys), num_blocks):
            parent = keys[-1] if keys else self._hash((self._engine, salt))
            keys.append(self._hash((parent, self._tokens_of(token_ids, index))))

    def lookup(self, keys: Sequence[int], token_ids: Sequence[int], salt: str | None) -> list[CachedBlock]:
        """The longest run of cached blocks from the start of *token_ids*, at most one for each of *keys*."""
        found: list[CachedBlock] = []
        parent = None
        for index, key in enumerate(keys):
            block = self._by_key.get(key)
            if block is None or not block.holds(parent, self._tokens_of(token_ids, index), salt):
                break
            found.append(block)
            parent = block
        return found

    def insert(
        self, key: int, parent: CachedBlock | None, token_ids: Sequence[int], salt: str | None, block_id: int
    ) -> CachedBlock | None:
        """Makes block ``parent + 1`` of *token_ids* findable.

        Returns the cached block, which is another than *block_id* when equal content is cached already, or None when
        the key belongs to different content (a collision): that block and what follows it stay unfindable.
        """
        present = self._by_key.get(key)
        if present is not None:
            return present if present.holds(parent, tuple(token_ids), salt) else None
        block = CachedBlock(block_id, key, parent, tuple(token_ids), salt)
        self._by_key[key] = self._by_block[block_id] = block
        self._pool.set_cached(block_id)
        return block

    def check(self) -> None:
        """Asserts that every cached block is reachable from the start of its chain."""
        assert len(self._by_key) == len(self._by_block)
        for block in self._by_key.values():
            assert self._by_block[block.block_id] is block
            assert block.parent is None or self._by_key.get(block.parent.key) is block.parent, "orphaned cached block"

    def _tokens_of(self, token_ids: Sequence[int], index: int) -> tuple[int, ...]:
        return tuple(token_ids[index * self.block_size : (index + 1) * self.block_size])

    def _forget(self, block_id: int) -> None:
        del self._by_key[self._by_block.pop(block_id).key]
