"""The step after one that is being executed, planned before its tokens are known.

What is planned is what `Scheduler.schedule` would plan then, or nothing: one token more for each sequence that its
length does not end. A sequence that a token ends is in the plan all the same; its part is ignored.

Blocks are reserved; nobody is preempted, nobody admitted, and no block copied: the block of the new token is that of
the token before it, which its own step has made writable, or a new one.
"""

from collections.abc import Collection, Mapping

from castline.runtime.kv_manager import KvManager
from castline.runtime.lanes import Lane
from castline.runtime.plan import ScheduledSequence, StepPlan
from castline.runtime.sequence import Sequence
from castline.runtime.waiting import AdmissionRound, WaitingRoom

UNKNOWN_TOKEN = 0
"""In a plan, for the token that the step before it gives."""


def look_ahead(
    plan: StepPlan,
    sequences: Mapping[int, Sequence],
    running: Collection[Sequence],
    waiting: WaitingRoom,
    kv: KvManager,
) -> StepPlan | None:
    """The step after *plan*, which is not committed; some of its sequences may have ended.

    None where `schedule` may plan more than these decodes, and where blocks are short.
    """
    parts = [part for part in plan.scheduled if part.seq_id in sequences]
    if len(parts) < len(running):
        return None
    following: list[tuple[Sequence, int]] = []
    for part in parts:
        seq, computed = sequences[part.seq_id], part.start + len(part.token_ids)
        if computed < seq.num_tokens or seq.group.pending:
            return None
        if seq.num_tokens + 1 < seq.max_len:
            following.append((seq, computed))
    if not following or (waiting and _may_admit(parts, following, running, waiting, kv)):
        return None
    if sum(_is_full(seq, computed, kv) for seq, computed in following) > kv.pool.num_free:
        return None
    return StepPlan(tuple([_decode(seq, computed, kv) for seq, computed in following]))


def _may_admit(
    parts: list[ScheduledSequence],
    following: list[tuple[Sequence, int]],
    running: Collection[Sequence],
    waiting: WaitingRoom,
    kv: KvManager,
) -> bool:
    """Someone may be admitted when the step is over: now already, or where it ends a sequence or computes a prompt."""
    if len(following) < len(running) or any(len(part.token_ids) > 1 for part in parts):
        return True
    if len(running) >= waiting.limits.max_num_seqs:
        return False
    budget = waiting.limits.max_num_batched_tokens - len(following)
    return AdmissionRound(waiting, kv).next(list(running), dict.fromkeys(Lane, budget)) is not None


def _decode(seq: Sequence, computed: int, kv: KvManager) -> ScheduledSequence:
    if _is_full(seq, computed, kv):
        kv.reserve_more(seq, computed - seq.num_computed, 1)
    return ScheduledSequence(seq.seq_id, (UNKNOWN_TOKEN,), computed, seq.block_ids, samples=True)


def _is_full(seq: Sequence, computed: int, kv: KvManager) -> bool:
    """Its blocks end with those *computed* tokens."""
    return computed == len(seq.block_ids) * kv.block_size
