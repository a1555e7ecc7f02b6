"""Reference-counted KV blocks. Every operation is O(1) a block.

A block is in exactly one state:

* **used**: at least one block table holds it;
* **evictable**: no table holds it, but the prefix cache can still find it; the least recently used is evicted first;
* **blank**: no table holds it and nothing can find it.

Evictable and blank blocks are free. A block may be written only while one table holds it and the prefix cache does not
know it; anyone else copies first.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence


class BlockPool:
    """Blocks ``0 .. num_blocks``; ``on_evict(block)`` is called when a cached block is taken for other content.

    Blank blocks that were used before are taken first, then those that never were, in ascending order, each with a call
    of ``on_first_use(block)``; cached ones only when no other is left. So the blocks that were ever used are
    ``0 .. num_opened``.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_opened = 0
        self.on_evict: Callable[[int], None] | None = None
        self.on_first_use: Callable[[int], None] | None = None
        self._refs = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """A blank block, held once; evicts the least recently used cached block when none is blank."""
        assert self.num_free, "the scheduler allocates only what is free"
        if not self._blank:
            self.evict()
        block = self._blank.pop()
        self._refs[block] = 1
        if block == self.num_opened:
            self.num_opened += 1
            if self.on_first_use is not None:
                self.on_first_use(block)
        return block

    def evict(self) -> int:
        """Makes the least recently used evictable block blank."""
        block, _ = self._evictable.popitem(last=False)
        self._cached[block] = False
        self._blank.append(block)
        if self.on_evict is not None:
            self.on_evict(block)
        return block

    def share(self, block: int) -> None:
        """One more table holds *block*, which is used or evictable."""
        if self._refs[block] == 0:
            del self._evictable[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One table fewer holds *block*."""
        assert self._refs[block] > 0, f"block {block} released more often than taken"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._cached[block]:
                self._evictable[block] = None
            else:
                self._blank.append(block)

    def fork(self, table: Sequence[int]) -> list[int]:
        """A second table over the same blocks."""
        for block in table:
            self.share(block)
        return list(table)

    def release_table(self, table: Sequence[int]) -> None:
        """Releases from the last block to the first, so that a prefix outlives what was built on it."""
        for block in reversed(table):
            self.release(block)

    def set_cached(self, block: int) -> None:
        """The prefix cache can find *block* from now on, so its content is final."""
        assert self._refs[block] > 0, "only a block in use has known content"
        self._cached[block] = True

    def is_writable(self, block: int) -> bool:
        return self._refs[block] == 1 and not self._cached[block]

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Asserts that the free lists and reference counts agree with *tables*, all the block tables there are."""
        held = Counter(block for table in tables for block in table)
        if self._refs != [held[block] for block in range(self.num_blocks)]:
            wrong = {b: (refs, held[b]) for b, refs in enumerate(self._refs) if refs != held[b]}
            raise AssertionError(f"refcount is not the number of tables, block: (refcount, tables) {wrong}")
        blank = set(self._blank)
        assert len(blank) == len(self._blank), "a block is twice in the free list"
        assert blank.isdisjoint(self._evictable), "a block is blank and evictable"
        assert not any(map(self._refs.__getitem__, blank | self._evictable.keys())), "a block is free and used"
        assert not any(map(self._cached.__getitem__, blank)), "a blank block can be found"
        assert all(map(self._cached.__getitem__, self._evictable)), "an evictable block cannot be found"
        assert self.num_free + len(held) == self.num_blocks, "free + used != total"
        never = list(range(self.num_blocks - 1, self.num_opened - 1, -1))
        assert self._blank[: len(never)] == never, "blocks are not used for the first time in order"
