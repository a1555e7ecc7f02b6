"""Decides what each step computes. Plain Python: no array, no inference library, no clock.

There is no prefill phase and no decode phase: every running sequence has ``num_computed`` tokens that catch up with
``num_tokens``, under one token budget. A step is a transaction: `schedule` returns a plan and reserves its blocks,
`commit` applies the tokens that were sampled, `rollback` undoes the plan of a step that failed.

Who goes first (see castline.runtime.lanes): decodes, then long prompts within their share, then short prompts.

**Blocks.** Admission (castline.runtime.waiting) does not cause preemption. When a running sequence finds no block, the
latest arrival that is not in the step yet is preempted: its blocks are released, it goes back to the head of its lane,
and it recomputes (from what the prefix cache still holds). Nothing older than a sequence is ever preempted for it, so
the oldest always advances: every step computes at least one token while there is work.

**Continuations** of one request wait for the first to compute the prompt, then fork from it.

**Guesses** (castline.runtime.speculation) take what the step leaves: of its budget, and of the free blocks. Only those
that the model confirms are ever part of a sequence, of its computed tokens, or of the prefix cache.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Parts
from collections.abc import Sequence as Tokens

from castline.runtime.admission import length_limit
from castline.runtime.client import EffectiveLimits
from castline.runtime.counters import Counters
from castline.runtime.decode_cohort import DecodeCohort
from castline.runtime.decodes import Decodes
from castline.runtime.events import Finish, FinishReason
from castline.runtime.kv_manager import KvManager
from castline.runtime.lanes import Lane, LanePolicy
from castline.runtime.look_ahead import look_ahead
from castline.runtime.one_token import MANY, OneToken
from castline.runtime.plan import ScheduledSequence, StepPlan
from castline.runtime.request import Request
from castline.runtime.roster import Roster
from castline.runtime.sequence import Progress, Sequence, SequenceGroup, new_group
from castline.runtime.speculation import Speculation
from castline.runtime.waiting import Admission, AdmissionRound


class Scheduler:
    def __init__(
        self,
        limits: EffectiveLimits,
        eos_token_ids: Collection[int],
        kv: KvManager | None = None,
        policy: LanePolicy | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """*speculation* is as `limits.max_drafts` says unless given."""
        assert limits.max_num_seqs > 0, "max_num_seqs is reconciled at start-up"
        assert limits.max_num_batched_tokens > 0, "max_num_batched_tokens is reconciled at start-up"
        self.limits = limits
        self.kv = kv or KvManager(limits.num_blocks, limits.block_size)
        self.counters = Counters()
        self._roster = Roster(limits)
        self._policy = policy or LanePolicy()
        self._eos = frozenset(eos_token_ids)
        self._speculation = speculation or (Speculation(limits) if limits.max_drafts else None)
        self._next_seq_id = 0
        self._cohort: DecodeCohort | None = None
        """While nobody came or went since all of its sequences decoded in the last step."""
        self._reset_step()

    # Requests come and go

    @property
    def has_work(self) -> bool:
        return bool(self._roster.sequences)

    @property
    def groups(self) -> dict[str, SequenceGroup]:
        """Requests with a live continuation."""
        return self._roster.groups

    @property
    def num_running(self) -> int:
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        return self._roster.num_waiting

    def get(self, seq_id: int) -> Sequence | None:
        """The live sequence of that id."""
        return self._roster.sequences.get(seq_id)

    def add(self, request: Request) -> None:
        """Queues a request that fits (castline.runtime.admission), under an id that no live request has."""
        assert request.request_id not in self.groups, f"request id {request.request_id!r} is in use"
        params, prompt = request.params, request.prompt_token_ids
        stop = frozenset() if params.ignore_eos else self._eos  # one set for all, in cache, where it is enough
        if params.stop_token_ids:
            stop = stop.union(params.stop_token_ids)
        group = new_group(request, stop, length_limit(len(prompt), params, self.limits), self._next_seq_id)
        self._next_seq_id += params.n
        self._cohort = None
        uncached = len(prompt) - len(self.kv.lookup(group.members[0])) * self.kv.block_size
        self._roster.add(group, self._policy.lane_of(uncached, self.limits.max_num_batched_tokens))

    def remove(self, seq: Sequence) -> None:
        """*seq* has ended, for whatever reason. Between steps, or between the execution of a step and its commit."""
        self._cohort = None
        if seq.running:
            self.kv.release(seq)
        self._roster.remove(seq)

    # A step

    def schedule(self, only: Collection[int] | None = None) -> StepPlan:
        """The next step. With *only*, nothing but these running sequences, and nobody is admitted."""
        self._reset_step()
        parts: Parts[ScheduledSequence] | None = None
        if only is None and self._cohort is not None:
            parts = self._cohort.plan()
        if parts is not None:
            self._budget -= len(parts)
        else:
            self._fill_plan(only)
            self._cohort = self._new_cohort()
            parts = tuple(self._plan) if self._cohort is None else self._cohort.planned
        if only is None and self._speculation is not None:
            parts = self._speculation.extend(parts, self._roster.sequences, self.kv, self._budget)
        return StepPlan(parts, self.kv.block_copies, tuple(self._preempted))

    def look_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after *plan*, which is being executed: see castline.runtime.look_ahead."""
        return look_ahead(plan, self._roster.sequences, self._roster.running, self._roster.waiting, self.kv)

    def commit(self, plan: StepPlan, sampled: Mapping[int, Tokens[int]]) -> list[Progress]:
        """Applies an executed plan: *sampled* has the new tokens by seq_id. Returns who got a token or ended.

        Tokens after one that ends the sequence are dropped. With draft tokens in the plan, *sampled* holds those that
        were accepted and one more; the KV of the rest counts as not computed.
        """
        self.kv.commit_copies()
        self.counters.steps += 1
        if self._cohort is not None and self._cohort.planned is plan.scheduled and isinstance(sampled, OneToken):
            side_by_side = self._cohort.commit(sampled)
            if side_by_side is not None:
                self.counters.generation_tokens += len(side_by_side)
                return side_by_side
        self._cohort = None
        progress, num_generated, block_size = [], 0, self.kv.block_size
        sequences = self._roster.sequences
        for part in plan.scheduled:
            seq = sequences.get(part.seq_id)
            if seq is None:  # removed since
                continue
            num_tokens = len(seq.token_ids)
            token_ids, finish = seq.append(sampled.get(part.seq_id, ()))
            num_generated += len(token_ids)
            known = max(num_tokens, len(seq.token_ids) - 1)
            seq.num_computed = min(part.start + len(part.token_ids), known)
            if seq.num_computed // block_size > len(seq.cached_blocks):
                self.kv.publish(seq)
            if not seq.group.prompt_computed and seq.num_computed >= seq.num_prompt:
                self._roster.let_follow(seq.group)
                self.counters.prompt_tokens += seq.num_prompt
            if finish is None and not part.samples and seq.num_computed >= seq.max_len:
                finish = Finish(FinishReason.LENGTH)
            if part.num_drafts:
                self._settle_drafts(part, seq, len(token_ids) - 1)
            if finish is not None:
                self.remove(seq)
            if token_ids or finish is not None:
                progress.append(Progress(seq, token_ids, finish))
        self.counters.generation_tokens += num_generated
        return progress

    def rollback(self, plan: StepPlan) -> None:
        """Undoes a plan that was not executed: no token counts as computed, copied blocks are the old ones again.

        Sequences it admitted stay running, those it preempted stay waiting.
        """
        self._cohort = None
        self.kv.undo_copies()
        for part in plan.scheduled:
            if (seq := self._roster.sequences.get(part.seq_id)) is not None:
                self.kv.trim(seq)
                if part.num_drafts and self._speculation is not None:
                    self._speculation.record(seq, part.num_drafts, 0)

    def check(self) -> None:
        """Asserts, between steps, that blocks, tables and queues agree."""
        self.kv.check(self._roster.sequences.values())
        self._roster.check()

    # Parts of a step

    def _reset_step(self) -> None:
        self.newly_admitted: list[SequenceGroup] = []
        """Requests that had their first part in this step."""
        self._plan: list[ScheduledSequence] = []
        self._preempted: list[int] = []
        self._budget = self.limits.max_num_batched_tokens

    def _fill_plan(self, only: Collection[int] | None) -> None:
        self._schedule_decodes(only)
        if len(self._plan) < len(self._roster.sequences):  # else everyone there is decodes
            long_budget = self._long_budget() if only is None else self._budget
            long_budget -= self._schedule_prompts(Lane.LONG, long_budget, only)
            self._schedule_prompts(Lane.SHORT, self._budget, only)
            if only is None:
                self._admit_waiting(long_budget)

    def _new_cohort(self) -> DecodeCohort | None:
        """Of everyone there, if all of them do nothing but decode in this step."""
        sequences = self._roster.sequences
        if not MANY <= len(sequences) == len(self._plan) or self.kv.block_copies:
            return None
        seqs = [sequences[part.seq_id] for part in self._plan]
        decodes = Decodes.of(self._plan, self.kv.block_size) if all(seq.started for seq in seqs) else None
        return None if decodes is None else DecodeCohort(seqs, decodes, self.kv)

    def _schedule_decodes(self, only: Collection[int] | None) -> None:
        running, index = self._roster.running, 0
        size, is_writable = self.kv.block_size, self.kv.pool.is_writable
        while index < len(running) and self._budget:  # preemption takes from the end of the list
            seq = running[index]
            index += 1
            start, num_tokens, table = seq.num_computed, len(seq.token_ids), seq.block_ids
            if num_tokens - start != 1 or (only is not None and seq.seq_id not in only):
                continue
            block = start // size
            if seq.started and num_tokens < seq.max_len and block < len(table) and is_writable(table[block]):
                # As _schedule, for most sequences of most steps: what has its first token wants no prompt logprobs.
                self._plan.append(ScheduledSequence(seq.seq_id, (seq.token_ids[start],), start, table, True))
                self._budget -= 1
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
        shared = self._plan or waiting.has(Lane.SHORT) or any(seq.lane is Lane.SHORT for seq in running)
        share = self._policy.long_budget(self.limits.max_num_batched_tokens)
        return min(self._budget, share) if shared else self._budget

    def _admit_waiting(self, long_budget: int) -> None:
        """Fills free places.

        Who is admitted gets a token of the budget at once, so there are never more running than the budget can serve.
        """
        if len(self._roster.running) >= self.limits.max_num_seqs or not self._roster.waiting:
            return
        admissions = AdmissionRound(self._roster.waiting, self.kv)
        while len(self._roster.running) < self.limits.max_num_seqs:
            budgets = {Lane.LONG: min(long_budget, self._budget), Lane.SHORT: self._budget}
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
            self.kv.fork(admission.source, seq, seq.num_prompt - 1)
        else:
            self.kv.attach(seq, admission.found)
        self._count_hits(seq)

    def _schedule(self, seq: Sequence, budget: int) -> int:
        """Puts up to *budget* tokens of *seq* in the plan. Returns how many there was room for."""
        start, num_tokens = seq.num_computed, len(seq.token_ids)
        count = min(budget, num_tokens - start)
        if count > 1 or not self.kv.has_room(seq):
            count = self._reserve(seq, count)
            if count == 0:
                return 0
        end = start + count
        samples = end == num_tokens and num_tokens < seq.max_len
        tokens = (seq.token_ids[start],) if count == 1 else tuple(seq.token_ids[start:end])
        all_logits = seq.group.wants_prompt_logprobs
        self._plan.append(ScheduledSequence(seq.seq_id, tokens, start, seq.block_ids, samples, all_logits))
        self._budget -= count
        return count

    def _settle_drafts(self, part: ScheduledSequence, seq: Sequence, num_accepted: int) -> None:
        """Leaves a sequence as if its accepted tokens had come one by one: with no block for the others."""
        self.counters.spec_drafted_tokens += part.num_drafts
        self.counters.spec_accepted_tokens += num_accepted
        self.kv.trim(seq)
        if self._speculation is not None:
            self._speculation.record(seq, part.num_drafts, num_accepted)

    def _reserve(self, seq: Sequence, count: int) -> int:
        """Blocks for *count* more tokens, preempting younger sequences if need be; else for as many as fit."""
        missing = self.kv.missing(seq, count)
        if missing == 0:
            return count
        while missing > self.kv.pool.num_free:
            victim = self._victim(seq)
            if victim is None:
                count = min(count, self.kv.capacity(seq))
                break
            self.kv.release(victim)
            self._roster.preempt(victim)
            self._preempted.append(victim.seq_id)
            self.counters.preemptions += 1
            missing = self.kv.missing(seq, count)
        if count:
            self.kv.reserve(seq, count)
        return count

    def _victim(self, seq: Sequence) -> Sequence | None:
        """The latest arrival that is younger than *seq* and not in the plan."""
        in_plan = {part.seq_id for part in self._plan}
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
            self.counters.prefix_cache_queries += seq.num_prompt
            self.counters.prefix_cache_hits += seq.num_computed
