"""KV blocks of sequences: prefix hits, growth, forks, copy on write. Policy (who gets blocks) is the scheduler's.

Within a step, `reserve` may replace a block that must not be written by a copy. The copies are a transaction: the
source stays held until `commit_copies` or `undo_copies`, so it can be neither evicted nor rewritten before it is read.
"""

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass

from castline.engines.capacity import blocks_for
from castline.runtime.block_pool import BlockPool
from castline.runtime.prefix_cache import CachedBlock, PrefixCache
from castline.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Block ``index`` of *seq* is being replaced: ``source`` is copied to ``destination`` before the step."""

    seq: Sequence
    index: int
    source: int
    destination: int


class KvManager:
    def __init__(
        self, num_blocks: int, block_size: int, engine: str = "", hash_fn: Callable[[Hashable], int] = hash
    ) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.pool, block_size, engine, hash_fn)
        self._copies: list[BlockCopy] = []
        self._computing: dict[int, Sequence] = {}
        """For each key of a prompt block not computed yet: the running sequence that is going to."""

    # Prefix hits

    def lookup(self, seq: Sequence) -> list[CachedBlock]:
        """Cached blocks from the start of *seq*. Its last token is always left to compute, for its logits."""
        if seq.group.wants_prompt_logprobs or not seq.cacheable:
            return []
        limit = (seq.num_tokens - 1) // self.block_size
        self.cache.extend_keys(seq.prefix_keys, seq.token_ids, seq.group.request.cache_salt, limit)
        return self.cache.lookup(seq.prefix_keys[:limit], seq.token_ids, seq.group.request.cache_salt)

    def is_next_computing(self, seq: Sequence, num_found: int) -> bool:
        """A running sequence is about to compute the block after the *num_found* that `lookup` found."""
        if seq.group.wants_prompt_logprobs or not seq.cacheable:
            return False
        limit = (seq.num_tokens - 1) // self.block_size
        return num_found < limit and seq.prefix_keys[num_found] in self._computing

    def cost(self, seq: Sequence, found: list[CachedBlock]) -> int:
        """Free blocks that all of *seq*'s tokens take when it starts from *found*."""
        revived = sum(self.pool.is_free(block.block_id) for block in found)
        return blocks_for(seq.num_tokens, self.block_size) - len(found) + revived

    def attach(self, seq: Sequence, found: list[CachedBlock]) -> None:
        """Starts *seq*, which holds nothing, from cached blocks, and announces the prompt blocks it will compute."""
        assert not seq.block_ids, "a waiting sequence holds no blocks"
        seq.block_ids = tuple(self.pool.fork([block.block_id for block in found]))
        seq.cached_blocks = list(found)
        seq.num_computed = len(found) * self.block_size
        self._announce(seq)

    def fork(self, source: Sequence, seq: Sequence, num_tokens: int) -> None:
        """Starts *seq*, which holds nothing, from the blocks of the first *num_tokens*, equal in both sequences."""
        assert not seq.block_ids, "a waiting sequence holds no blocks"
        seq.block_ids = tuple(self.pool.fork(source.block_ids[: blocks_for(num_tokens, self.block_size)]))
        seq.cached_blocks = source.cached_blocks[: num_tokens // self.block_size]
        seq.prefix_keys = source.prefix_keys[: num_tokens // self.block_size]
        seq.cacheable = source.cacheable
        seq.num_computed = num_tokens

    # Growth

    def has_room(self, seq: Sequence) -> bool:
        """The next token goes into a block that *seq* holds and may write: nothing is to be reserved for it."""
        index = seq.num_computed // self.block_size
        return index < len(seq.block_ids) and self.pool.is_writable(seq.block_ids[index])

    def missing(self, seq: Sequence, count: int) -> int:
        """Free blocks needed to compute *count* more tokens, a copy on write included."""
        grown = blocks_for(seq.num_computed + count, self.block_size) - len(seq.block_ids)
        return max(0, grown) + self._must_copy(seq)

    def capacity(self, seq: Sequence) -> int:
        """Tokens that can be computed with the blocks held and those free."""
        free = self.pool.num_free - self._must_copy(seq)
        return 0 if free < 0 else (len(seq.block_ids) + free) * self.block_size - seq.num_computed

    def reserve(self, seq: Sequence, count: int) -> None:
        """Makes room for *count* more tokens in blocks that *seq* may write; `missing` blocks are free."""
        if self._must_copy(seq):
            index = seq.num_computed // self.block_size
            copy = BlockCopy(seq, index, seq.block_ids[index], self.pool.allocate())
            _put(seq, index, copy.destination)
            self._copies.append(copy)
        self._grow(seq, seq.num_computed + count)

    def reserve_more(self, seq: Sequence, reserved: int, count: int) -> int:
        """Room for up to *count* tokens after *reserved* ones that have theirs, as far as blocks are free.

        Returns for how many. Nothing is copied: what is shared of the block that the reserved ones go into, by a fork
        of this very step, are the tokens before them.
        """
        end = seq.num_computed + reserved
        count = min(count, (len(seq.block_ids) + self.pool.num_free) * self.block_size - end)
        self._grow(seq, end + count)
        return count

    def _grow(self, seq: Sequence, num_tokens: int) -> None:
        missing = blocks_for(num_tokens, self.block_size) - len(seq.block_ids)
        if missing > 0:
            seq.block_ids += tuple([self.pool.allocate() for _ in range(missing)])

    def _must_copy(self, seq: Sequence) -> bool:
        """The next token goes into a block that others hold or can find. Only the first block written can be such."""
        index = seq.num_computed // self.block_size
        return index < len(seq.block_ids) and not self.pool.is_writable(seq.block_ids[index])

    # The end of a step

    @property
    def block_copies(self) -> tuple[tuple[int, int], ...]:
        return tuple([(copy.source, copy.destination) for copy in self._copies]) if self._copies else ()

    def commit_copies(self) -> None:
        for copy in self._copies:
            self.pool.release(copy.source)
        self._copies.clear()

    def undo_copies(self) -> None:
        for copy in self._copies:
            _put(copy.seq, copy.index, copy.source)
            self.pool.release(copy.destination)
        self._copies.clear()

    def trim(self, seq: Sequence) -> None:
        """Gives back the blocks past the computed tokens."""
        kept = blocks_for(seq.num_computed, self.block_size)
        self.pool.release_table(seq.block_ids[kept:])
        seq.block_ids = seq.block_ids[:kept]

    def publish(self, seq: Sequence) -> None:
        """Makes the newly computed full blocks findable; one that was cached meanwhile is shared instead."""
        full = seq.num_computed // self.block_size
        if len(seq.cached_blocks) == full or not seq.cacheable:
            return
        salt = seq.group.request.cache_salt
        self.cache.extend_keys(seq.prefix_keys, seq.token_ids, salt, full)
        for index in range(len(seq.cached_blocks), full):
            parent = seq.cached_blocks[-1] if index else None
            key = seq.prefix_keys[index]
            tokens = seq.token_ids[index * self.block_size : (index + 1) * self.block_size]
            cached = self.cache.insert(key, parent, tokens, salt, seq.block_ids[index])
            if cached is None:
                self._withdraw(seq)
                seq.cacheable = False
                return
            self._share_instead(seq, index, cached.block_id)
            seq.cached_blocks.append(cached)
            if self._computing.get(key) is seq:
                del self._computing[key]

    def release(self, seq: Sequence) -> None:
        """*seq* stops running: its blocks are free, and findable as far as published."""
        self._withdraw(seq)
        self.pool.release_table(seq.block_ids)
        seq.block_ids = ()
        seq.cached_blocks = []
        seq.num_computed = 0

    def check(self, seqs: Iterable[Sequence]) -> None:
        """Asserts, between steps, that *seqs* hold exactly the used blocks, and that the cache is consistent."""
        assert not self._copies, "a step is open"
        live = list(seqs)
        self.pool.check(seq.block_ids for seq in live)
        self.cache.check()
        assert all(seq in live for seq in self._computing.values()), "a sequence that has left was to compute a block"

    def check_idle(self) -> None:
        """Asserts that nobody holds a block, or is to compute one. O(1)."""
        assert self.pool.num_used == 0, f"blocks in use, though no sequence lives: {self.pool.num_used}"
        assert not self._copies, "a step is open"
        assert not self._computing, "a sequence that has left was to compute a block"

    def _share_instead(self, seq: Sequence, index: int, block: int) -> None:
        own = seq.block_ids[index]
        if own != block:
            self.pool.share(block)
            self.pool.release(own)
            _put(seq, index, block)

    def _announce(self, seq: Sequence) -> None:
        if not seq.cacheable:
            return
        full = seq.num_prompt // self.block_size
        self.cache.extend_keys(seq.prefix_keys, seq.token_ids, seq.group.request.cache_salt, full)
        for key in seq.prefix_keys[len(seq.cached_blocks) : full]:
            self._computing.setdefault(key, seq)

    def _withdraw(self, seq: Sequence) -> None:
        full = seq.num_prompt // self.block_size
        for key in seq.prefix_keys[len(seq.cached_blocks) : full]:
            if self._computing.get(key) is seq:
                del self._computing[key]


def _put(seq: Sequence, index: int, block: int) -> None:
    seq.block_ids = (*seq.block_ids[:index], block, *seq.block_ids[index + 1 :])
