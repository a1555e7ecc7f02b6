"""What the next step computes, put together anew: who decodes, whose prompts go on, who is admitted, who is preempted.

Who goes first: see castline.runtime.lanes. Blocks are reserved as parts are added; where they are short, the latest
arrival that is not in the plan yet makes room.
"""

from collections.abc import Collection

from castline.runtime.client import EffectiveLimits
from castline.runtime.counters import Counters
from castline.runtime.kv_manager import KvManager
from castline.runtime.lanes import Lane, LanePolicy
from castline.runtime.plan import ScheduledSequence
from castline.runtime.roster import Roster
from castline.runtime.sequence import Sequence, SequenceGroup
from castline.runtime.waiting import Admission, AdmissionRound


class PlanFiller:
    """The plan that is being made. Blocks are *kv*'s, sequences *roster*'s; both change as it is filled."""

    def __init__(
        self, limits: EffectiveLimits, policy: LanePolicy, kv: KvManager, roster: Roster, counters: Counters
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._kv = kv
        self._roster = roster
        self._counters = counters
        self.start()

    def start(self) -> None:
        """An empty plan."""
        self.parts: list[ScheduledSequence] = []
        self.newly_admitted: list[SequenceGroup] = []
        """Requests that have their first part in it."""
        self.preempted: list[int] = []
        """seq_ids whose blocks were taken back for it."""
        self.budget = self._limits.max_num_batched_tokens
        """Tokens that are left."""

    def fill(self, only: Collection[int] | None) -> None:
        """All parts; with *only*, of nothing but these running sequences, and nobody is admitted."""
        self._schedule_decodes(only)
        if len(self.parts) < len(self._roster.sequences):  # else everyone there is decodes
            long_budget = self._long_budget() if only is None else self.budget
            long_budget -= self._schedule_prompts(Lane.LONG, long_budget, only)
            self._schedule_prompts(Lane.SHORT, self.budget, only)
            if only is None:
                self._admit_waiting(long_budget)

    def _schedule_decodes(self, only: Collection[int] | None) -> None:
        running, index = self._roster.running, 0
        size, is_writable = self._kv.block_size, self._kv.pool.is_writable
        while index < len(running) and self.budget:  # preemption takes from the end of the list
            seq = running[index]
            index += 1
            start, num_tokens, table = seq.num_computed, len(seq.token_ids), seq.block_ids
            if num_tokens - start != 1 or (only is not None and seq.seq_id not in only):
                continue
            block = start // size
            if seq.started and num_tokens < seq.max_len and block < len(table) and is_writable(table[block]):
                # As _schedule, for most sequences of most steps: what has its first token wants no prompt logprobs.
                self.parts.append(ScheduledSequence(seq.seq_id, (seq.token_ids[start],), start, table, True))
                self.budget -= 1
            else:
                self._schedule(seq, 1)

    def _schedule_prompts(self, lane: Lane, budget: int, only: Collection[int] | None) -> int:
        """Advances running prompts of *lane*, oldest first. Returns the tokens it took."""
        taken = 0
        for seq in [seq for seq in self._roster.running if seq.lane is lane and seq.num_uncomputed > 1]:
            if taken < budget and seq.running and (only is None or seq.seq_id in only):
                taken += self._schedule(seq, budget - taken)
        return taken

    def _long_budget(self) -> int:
        running, waiting = self._roster.running, self._roster.waiting
        shared = self.parts or waiting.has(Lane.SHORT) or any(seq.lane is Lane.SHORT for seq in running)
        share = self._policy.long_budget(self._limits.max_num_batched_tokens)
        return min(self.budget, share) if shared else self.budget

    def _admit_waiting(self, long_budget: int) -> None:
        """Fills free places.

        Who is admitted gets a token of the budget at once, so there are never more running than the budget can serve.
        """
        if len(self._roster.running) >= self._limits.max_num_seqs or not self._roster.waiting:
            return
        admissions = AdmissionRound(self._roster.waiting, self._kv)
        while len(self._roster.running) < self._limits.max_num_seqs:
            budgets = {Lane.LONG: min(long_budget, self.budget), Lane.SHORT: self.budget}
            admission = admissions.next(self._roster.running, budgets)
            if admission is None:
                return
            self._admit(admission)
            taken = self._schedule(admission.seq, budgets[admission.seq.lane])
            long_budget -= taken if admission.seq.lane is Lane.LONG else 0

    def _admit(self, admission: Admission) -> None:
        """Lets it run, from the blocks it can share; forked, it still computes the last prompt token for itself."""
        seq = admission.seq
        self._roster.run(seq)
        if admission.source:
            self._kv.fork(admission.source, seq, seq.num_prompt - 1)
        else:
            self._kv.attach(seq, admission.found)
        self._count_hits(seq)

    def _schedule(self, seq: Sequence, budget: int) -> int:
        """Puts up to *budget* tokens of *seq* in the plan. Returns how many there was room for."""
        start, num_tokens = seq.num_computed, len(seq.token_ids)
        count = min(budget, num_tokens - start)
        if count > 1 or not self._kv.has_room(seq):
            count = self._reserve(seq, count)
            if count == 0:
                return 0
        end = start + count
        samples = end == num_tokens and num_tokens < seq.max_len
        tokens = (seq.token_ids[start],) if count == 1 else tuple(seq.token_ids[start:end])
        all_logits = seq.group.wants_prompt_logprobs
        self.parts.append(ScheduledSequence(seq.seq_id, tokens, start, seq.block_ids, samples, all_logits))
        self.budget -= count
        return count

    def _reserve(self, seq: Sequence, count: int) -> int:
        """Blocks for *count* more tokens, preempting younger sequences if need be; else for as many as fit."""
        missing = self._kv.missing(seq, count)
        if missing == 0:
            return count
        while missing > self._kv.pool.num_free:
            victim = self._victim(seq)
            if victim is None:
                count = min(count, self._kv.capacity(seq))
                break
            self._kv.release(victim)
            self._roster.preempt(victim)
            self.preempted.append(victim.seq_id)
            self._counters.preemptions += 1
            missing = self._kv.missing(seq, count)
        if count:
            self._kv.reserve(seq, count)
        return count

    def _victim(self, seq: Sequence) -> Sequence | None:
        """The latest arrival that is younger than *seq* and not in the plan."""
        in_plan = {part.seq_id for part in self.parts}
        for candidate in reversed(self._roster.running):
            if candidate.seq_id <= seq.seq_id:
                break
            if candidate.seq_id not in in_plan:
                return candidate
        return None

    def _count_hits(self, seq: Sequence) -> None:
        group = seq.group
        if group.cached_tokens is not None:
            return
        group.cached_tokens = seq.num_computed
        self.newly_admitted.append(group)
        if not group.wants_prompt_logprobs:
            self._counters.prefix_cache_queries += seq.num_prompt
            self._counters.prefix_cache_hits += seq.num_computed
