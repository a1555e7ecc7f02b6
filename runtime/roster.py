"""The live sequences: which run, which wait in the lanes, and which wait for the first of their request.

Continuations of one request wait until the first has computed the prompt. Where it ends before that, the next is its
heir.
"""

from bisect import insort

from castline.runtime.client import EffectiveLimits
from castline.runtime.lanes import Lane
from castline.runtime.sequence import Sequence, SequenceGroup
from castline.runtime.waiting import WaitingRoom


class Roster:
    """Blocks, which only running sequences hold, are the caller's affair."""

    def __init__(self, limits: EffectiveLimits) -> None:
        self.groups: dict[str, SequenceGroup] = {}
        """Requests with a live continuation."""
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        """Oldest first."""
        self.waiting = WaitingRoom(limits)

    @property
    def num_waiting(self) -> int:
        return len(self.sequences) - len(self.running)

    def add(self, group: SequenceGroup, lane: Lane) -> None:
        """The first continuation waits in *lane*, the others for it."""
        self.groups[group.request.request_id] = group
        self.sequences |= {seq.seq_id: seq for seq in group.members.values()}
        first, *group.pending = group.members.values()
        first.lane = lane
        self.waiting.append(first)

    def remove(self, seq: Sequence) -> None:
        """*seq* has ended."""
        group = seq.group
        del self.sequences[seq.seq_id]
        del group.members[seq.index]
        if not group.members:
            del self.groups[group.request.request_id]
        if seq in group.pending:
            group.pending.remove(seq)
            return
        if seq.running:
            self._stop(seq)
        else:
            self.waiting.discard(seq)
        if group.pending:
            heir = group.pending.pop(0)
            heir.lane = seq.lane
            self.waiting.append_front(heir)

    def run(self, seq: Sequence) -> None:
        """It waits no longer."""
        self.waiting.discard(seq)
        seq.own_tokens()
        seq.running = True
        insort(self.running, seq, key=lambda seq: seq.seq_id)

    def preempt(self, seq: Sequence) -> None:
        """It waits again, at the head of its lane."""
        self._stop(seq)
        self.waiting.append_front(seq)

    def let_follow(self, group: SequenceGroup) -> None:
        """The prompt has been computed: the other continuations wait in their lanes."""
        group.prompt_computed = True
        for seq in reversed(group.pending):
            self.waiting.append_front(seq)
        group.pending.clear()

    def check(self) -> None:
        """Asserts, between steps, that tables and queues agree."""
        assert all(seq.running for seq in self.running)
        assert all(not seq.block_ids for seq in self.sequences.values() if not seq.running), "a waiter holds blocks"
        queued = len(self.waiting) + sum(len(group.pending) for group in self.groups.values())
        assert self.num_waiting == queued, "a sequence is lost"

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        seq.running = False
