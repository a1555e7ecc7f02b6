"""Sequences that wait, in their lanes, and who of them is admitted next.

A sequence is admitted only when its whole prompt fits beside what the running prompts still need, with a margin, so
that admission does not cause preemption. One whose next prompt block is being computed by a running sequence waits for
it rather than compute it twice; who is behind it in line need not wait with it.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Line
from dataclasses import dataclass

from castline.engines.capacity import blocks_for
from castline.runtime.client import EffectiveLimits
from castline.runtime.kv_manager import KvManager
from castline.runtime.lanes import Lane, LaneQueue
from castline.runtime.prefix_cache import CachedBlock
from castline.runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Admission:
    """*seq* may run: forked from ``source``, or from the cached blocks ``found``."""

    seq: Sequence
    source: Sequence | None
    found: list[CachedBlock]


class WaitingRoom:
    """Adding and taking are O(1), whoever waits."""

    def __init__(self, limits: EffectiveLimits) -> None:
        self.limits = limits
        self._lanes = {lane: LaneQueue() for lane in Lane}

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def has(self, lane: Lane) -> bool:
        return bool(self._lanes[lane])

    def append(self, seq: Sequence) -> None:
        self._lanes[seq.lane].append(seq)

    def append_front(self, seq: Sequence) -> None:
        self._lanes[seq.lane].append_front(seq)

    def discard(self, seq: Sequence) -> None:
        self._lanes[seq.lane].discard(seq)

    def first(self, lane: Lane) -> list[Sequence]:
        """Of *lane*, as many as a step can look at."""
        return self._lanes[lane].first(self.limits.max_num_seqs)


class AdmissionRound:
    """The heads of line during one step. Who stood in line when it began is considered, at most once each."""

    def __init__(self, room: WaitingRoom, kv: KvManager) -> None:
        self._limits = room.limits
        self._kv = kv
        self._watermark = max(1, room.limits.num_blocks // 100)
        self._lines = {lane: iter(room.first(lane)) for lane in Lane}
        self._heads = {lane: next(line, None) for lane, line in self._lines.items()}
        self._blocked: Sequence | None = None
        """The older head that found no room."""

    def next(self, running: Line[Sequence], budgets: Mapping[Lane, int]) -> Admission | None:
        """The older head of the lanes that still have budget, if there is room for it beside *running*."""
        while ready := [seq for lane, seq in self._heads.items() if seq is not None and budgets[lane] > 0]:
            seq = min(ready, key=lambda seq: seq.seq_id)
            source = seq.group.fork_source(seq)
            found = [] if source else self._kv.lookup(seq)
            if not source and self._kv.is_next_computing(seq, len(found)):
                self._advance(seq.lane)
            elif self._has_room(seq, 1 if source else self._kv.cost(seq, found), running):
                self._advance(seq.lane)
                return Admission(seq, source, found)
            else:
                self._blocked = self._blocked or seq
                self._heads[seq.lane] = None
        return None

    def _advance(self, lane: Lane) -> None:
        self._heads[lane] = next(self._lines[lane], None)

    def _has_room(self, seq: Sequence, cost: int, running: Line[Sequence]) -> bool:
        """*cost* blocks for *seq* are free beyond what *running* needs."""
        if not running:
            return True
        size = self._kv.block_size
        promised = sum(max(0, blocks_for(s.num_tokens, size) - len(s.block_ids)) for s in running)
        if cost + self._watermark + promised > self._kv.pool.num_free:
            return False
        if self._blocked is None:
            return True
        # An older sequence waits for blocks: what is younger must fit beside it even when grown to its full length.
        younger = sum(blocks_for(s.max_len - 1, size) for s in running if s.seq_id > self._blocked.seq_id)
        wanted = blocks_for(self._blocked.num_tokens, size) + self._watermark
        return younger + blocks_for(seq.max_len - 1, size) + wanted <= self._limits.num_blocks
