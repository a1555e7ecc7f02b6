"""Gives memory to a KV pool's blocks ahead of their first use, in a thread, so that no step waits for pages.

The memory that is resident follows what was ever used, by a margin. Where first uses outrun the thread, steps get their
pages by faulting: slower, and right.
"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from castline.engines.capacity import blocks_for
from castline.runtime.client import EffectiveLimits

_log = logging.getLogger(__name__)

GROWTH_BYTES = 16 << 20
"""Given at the start, and at least each time after: 2 to 20 ms of a core, and a fraction of a second of prompts."""


@dataclass(frozen=True, slots=True)
class GrowthPolicy:
    """How far ahead, in blocks."""

    margin: int
    """Fewer than these ahead of the last first use: more are given."""
    growth: int
    """So many at a time."""

    @classmethod
    def of(cls, limits: EffectiveLimits, bytes_per_block: int) -> "GrowthPolicy":
        """The margin is what the tokens of the largest step fill. *bytes_per_block* is over all layers."""
        margin = blocks_for(limits.max_num_batched_tokens, limits.block_size)
        return cls(margin, max(2 * margin, -(-GROWTH_BYTES // bytes_per_block)))


class PoolGrowth:
    """Hears of first uses, which come in ascending order, and provides what follows. Owned by one thread."""

    def __init__(self, provide: Callable[[int, int], bool], num_blocks: int, policy: GrowthPolicy) -> None:
        """``provide(begin, end)`` gives memory to these blocks, and says whether the system could; the first
        ``policy.growth`` blocks have theirs."""
        self._provide = provide
        self._num_blocks = num_blocks
        self._policy = policy
        self._asked = min(policy.growth, num_blocks)
        """Blocks that have memory or are going to have it: the first ones."""
        self._closing = False
        self._ranges: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-pool-growth", daemon=True)
        self._thread.start()

    def on_first_use(self, block: int) -> None:
        """Returns at once."""
        while block + self._policy.margin >= self._asked < self._num_blocks:
            begin, self._asked = self._asked, min(self._asked + self._policy.growth, self._num_blocks)
            self._ranges.put((begin, self._asked))

    def close(self) -> None:
        """Waits for what is being provided; what was only asked for is dropped."""
        self._closing = True
        self._ranges.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (blocks := self._ranges.get()) is not None and not self._closing:
            if not self._provide(*blocks):
                _log.warning("no memory ahead of use for KV blocks %d to %d: steps get it as they go", *blocks)
