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
from castline.runtime.lanes import LanePolicy
from castline.runtime.look_ahead import look_ahead
from castline.runtime.one_token import OneToken
from castline.runtime.plan import ScheduledSequence, StepPlan
from castline.runtime.plan_filler import PlanFiller
from castline.runtime.request import Request
from castline.runtime.roster import Roster
from castline.runtime.sequence import Progress, Sequence, SequenceGroup, new_group
from castline.runtime.speculation import Speculation


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
        self._filler = PlanFiller(limits, self._policy, self.kv, self._roster, self.counters)
        self._eos = frozenset(eos_token_ids)
        self._speculation = speculation or (Speculation(limits) if limits.max_drafts else None)
        self._next_seq_id = 0
        self._cohort: DecodeCohort | None = None
        """All that run, while none of them has ended, and none was added, since all decoded in the last step."""

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

    @property
    def newly_admitted(self) -> list[SequenceGroup]:
        """Requests that have their first part in the latest plan."""
        return self._filler.newly_admitted

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
        if not self._is_full:
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
        filler = self._filler
        filler.start()
        parts: Parts[ScheduledSequence] | None = None
        if only is None and self._cohort is not None:
            parts = self._cohort.plan()
        if parts is not None:
            filler.budget -= len(parts)
        else:
            self._cohort = None
            filler.fill(only)
            parts = tuple(filler.parts)
        unguessed = parts
        if only is None and self._speculation is not None:
            parts = self._speculation.extend(parts, self._roster.sequences, self.kv, filler.budget)
        if self._cohort is None and parts is unguessed:
            self._cohort = self._new_cohort(filler.parts)
            if self._cohort is not None:
                parts = self._cohort.planned
        return StepPlan(parts, self.kv.block_copies, tuple(filler.preempted))

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

    def check_idle(self) -> None:
        """Asserts, while no sequence lives, that nothing is left of any. O(1)."""
        self.kv.check_idle()
        self._roster.check()

    @property
    def _is_full(self) -> bool:
        """Nobody is admitted, whoever waits."""
        return len(self._roster.running) >= self.limits.max_num_seqs

    def _new_cohort(self, parts: list[ScheduledSequence]) -> DecodeCohort | None:
        """Of all that run, if they do nothing but decode in this step, and nobody can be admitted to the next."""
        running, sequences = self._roster.running, self._roster.sequences
        if len(parts) < len(running) or self.kv.block_copies:
            return None
        if not (self._is_full or len(running) == len(sequences)):
            return None
        seqs = [sequences[part.seq_id] for part in parts]
        if seqs != running:  # one that was preempted comes last in the step that takes it back
            return None
        decodes = Decodes.of(parts, self.kv.block_size) if all(seq.started for seq in seqs) else None
        return None if decodes is None else DecodeCohort(seqs, decodes, self.kv)

    def _settle_drafts(self, part: ScheduledSequence, seq: Sequence, num_accepted: int) -> None:
        """Leaves a sequence as if its accepted tokens had come one by one: with no block for the others."""
        self.counters.spec_drafted_tokens += part.num_drafts
        self.counters.spec_accepted_tokens += num_accepted
        self.kv.trim(seq)
        if self._speculation is not None:
            self._speculation.record(seq, part.num_drafts, num_accepted)
