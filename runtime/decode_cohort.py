"""Sequences that decode side by side, step after step: each step is planned from the one before, and not anew.

Between two steps of a cohort nobody comes, goes or guesses, so all that changes of a sequence is its last token and the
place of it. What is left to look at is who enters a new block, which is known from the places alone.
"""

from castline.runtime.decodes import Decodes
from castline.runtime.kv_manager import KvManager
from castline.runtime.one_token import OneToken
from castline.runtime.sequence import Progress, Sequence


class DecodeCohort:
    """All running sequences, each past its first token. Dropped as soon as one leaves or another may join."""

    def __init__(self, seqs: list[Sequence], first: Decodes, kv: KvManager) -> None:
        """*first* is the plan of the next step, for which blocks are reserved."""
        self.planned = first
        """The latest plan."""
        self._seqs = seqs
        self._kv = kv
        self._stops = frozenset().union(*{seq.group.stop_token_ids for seq in seqs})
        self._endless_steps = min(seq.max_len - len(seq.token_ids) for seq in seqs) - 1
        """In which nobody reaches its length."""
        self._following: Decodes | None = None
        """What the next plan has, but for blocks to be reserved; None before the latest is committed."""
        self._entering: list[int] = []
        """Places of those whose token in it is the first of a block."""
        self._steps_inside = self._count_steps_inside(first.starts)
        """Plans after the latest in which nobody enters a block."""

    def plan(self) -> Decodes | None:
        """The next step, with blocks reserved. None where the latest plan was not committed, or blocks are short."""
        following, size = self._following, self._kv.block_size
        if following is None or len(self._entering) > self._kv.pool.num_free:
            return None
        for place in self._entering:
            seq = self._seqs[place]
            self._kv.reserve(seq, 1)
            following.tables[place] = seq.block_ids
            following.slots[place] = seq.block_ids[following.starts[place] // size] * size
        self.planned, self._following = following, None
        return following

    def commit(self, sampled: OneToken) -> list[Progress] | None:
        """Applies the latest plan, which was executed. None, and nothing is changed, where it may end a sequence."""
        latest, tokens = self.planned, sampled.token_ids
        if not self._endless_steps or not self._stops.isdisjoint(tokens) or sampled.seq_ids != latest.seq_ids:
            return None
        self._endless_steps -= 1
        progress = []
        for seq, token in zip(self._seqs, tokens, strict=True):
            seq.token_ids.append(token)
            seq.num_computed += 1
            progress.append(Progress(seq, (token,), None))
        starts, size, tables = [start + 1 for start in latest.starts], self._kv.block_size, latest.tables
        self._entering = []
        if self._steps_inside:
            self._steps_inside -= 1
        else:
            self._entering = [place for place, start in enumerate(starts) if start % size == 0]
            self._steps_inside = self._count_steps_inside(starts)
            tables = tables.copy()
            for place in self._entering:
                self._kv.publish(self._seqs[place])
        self._following = Decodes(latest.seq_ids, tokens, starts, [slot + 1 for slot in latest.slots], tables)
        return progress

    def _count_steps_inside(self, starts: list[int]) -> int:
        size = self._kv.block_size
        return min(size - 1 - start % size for start in starts)
