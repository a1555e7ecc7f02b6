"""The engine core: token ids in, events out, one step at a time, no threads.

A step is a transaction. If it fails, the scheduler rolls it back and the sequences in it become suspects: the next
steps run nothing but suspects, without guesses, half of the failed set at a time, down to single ones. A sequence that
fails alone ends with FinishReason.ERROR; the others go on with the tokens that they would have had anyway. So a request
that breaks a step costs its neighbours about 2 log2(batch) short steps, and a batch that fails only as a whole (memory)
ends nobody.

On a device that samples, a step may be in flight from one call of `step` to the next (castline.runtime.run_ahead). Each
call still commits one step.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from time import monotonic
from typing import Any

from castline.engines.errors import ErrorCode, RequestError
from castline.runtime.admission import validate_fits
from castline.runtime.batch import PromptRows
from castline.runtime.client import EffectiveLimits, Stats
from castline.runtime.device_executor import DeviceExecutor
from castline.runtime.device_runner import DeviceRunner
from castline.runtime.events import Finish, FinishReason, SequenceEvent, TokenLogprobs
from castline.runtime.executor import Executor
from castline.runtime.host_runner import HostRunner
from castline.runtime.lanes import LanePolicy
from castline.runtime.plan import StepPlan
from castline.runtime.request import Request
from castline.runtime.run_ahead import RunAhead
from castline.runtime.sampler_api import Sampler
from castline.runtime.scheduler import Scheduler
from castline.runtime.sequence import Sequence
from castline.runtime.speculation import Speculation
from castline.runtime.step_profile import NO_MARKS, Phase, StepMarks
from castline.runtime.step_runner import SequenceSampler, StepRunner
from castline.runtime.step_sampler import StepSamples

logger = logging.getLogger(__name__)


class EngineCore:
    """Not thread-safe: one loop owns it."""

    def __init__(
        self,
        executor: Executor | DeviceExecutor,
        limits: EffectiveLimits,
        eos_token_ids: Collection[int],
        sampler: Sampler,
        clock: Callable[[], float] = monotonic,
        policy: LanePolicy | None = None,
        step_seconds: Mapping[int, float] | None = None,
        marks: StepMarks = NO_MARKS,
    ) -> None:
        """*step_seconds* is what steps of so many tokens took at the warm-up, for the decision when guesses pay.

        A `DeviceExecutor` samples and runs ahead, and takes limits without guesses.
        """
        self.limits = limits
        speculation = Speculation(limits, step_seconds) if limits.max_drafts else None
        self.scheduler = Scheduler(limits, eos_token_ids, policy=policy, speculation=speculation)
        self._sampler = sampler
        self._clock = clock
        self._marks = marks
        self._runner: StepRunner
        counters = self.scheduler.counters
        sequences = SequenceSampler(sampler, self.scheduler)
        if isinstance(executor, DeviceExecutor):
            assert speculation is None, "a device that samples is given no guesses to check"
            device = DeviceRunner(executor, sequences, limits.block_size, marks, clock, counters)
            self._runner = RunAhead(device, self.scheduler, marks)
        else:
            self._runner = HostRunner(executor, sequences, limits.block_size, marks, clock, counters, speculation)
        self.report_interval = 1
        """Tokens of a continuation that make an event, but for its first event and its last."""
        self._events: list[SequenceEvent] = []
        """Of sequences that ended between steps."""
        self._suspects: list[list[int]] = []
        """Sets of seq_ids to be run apart from all others, the next one last."""
        self._deadlines: dict[str, float] = {}
        self._next_deadline = float("inf")
        """No deadline is earlier."""

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._events) or self._runner.in_flight

    def add_request(self, request: Request) -> None:
        """Queues a validated request, under an id that no live one has.

        Never raises for what a request holds: one that can never fit ends with an error event.
        """
        try:
            validate_fits(len(request.prompt_token_ids), request.params, self.limits)
        except RequestError as error:
            finish = Finish(FinishReason.ERROR, error_code=error.code, message=error.message)
            for index in range(request.params.n):
                self._events.append(SequenceEvent(request.request_id, index, finish=finish, cached_tokens=0))
            return
        self.scheduler.add(request)
        if request.deadline is not None:
            self._deadlines[request.request_id] = request.deadline
            self._next_deadline = min(self._next_deadline, request.deadline)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Ends one continuation, or all; unknown ids are ignored. Blocks are free on return.

        The next step reports FinishReason.ABORT for each.
        """
        self._end(request_id, index, Finish(FinishReason.ABORT, error_code=ErrorCode.CANCELLED))

    def step(self) -> list[SequenceEvent]:
        """One forward pass. A failed step is rolled back and ends only the sequences it concerns, with an error."""
        self._expire()
        if self.scheduler.has_work:
            self._run()
        else:
            self._runner.drop()
        if not self.scheduler.has_work:
            self._fell_idle()
        events, self._events = self._events, []
        self._marks.mark(Phase.COMMIT)
        return events

    def close(self) -> None:
        """Before the executor is: waits for a step that is in flight, and forgets it. Nothing may follow."""
        self._runner.drop()

    def stats(self) -> Stats:
        counters, pool = self.scheduler.counters, self.scheduler.kv.pool
        return Stats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            preemptions=counters.preemptions,
            steps=counters.steps,
            spec_drafted_tokens=counters.spec_drafted_tokens,
            spec_accepted_tokens=counters.spec_accepted_tokens,
            executor_s=counters.executor_s,
        )

    # One step

    def _run(self) -> None:
        isolated = bool(self._suspects)
        plan = self._runner.adopt() or self._next_plan()
        self._marks.scheduled(plan)
        try:
            result = self._runner.run(plan, go_ahead=not isolated)
        except Exception as error:
            self.scheduler.rollback(plan)
            self._step_failed(plan, error)
            return
        samples = result.samples
        for seq_id, cause in samples.broken.items():  # before the commit, which would make their blocks findable
            self._end_broken(self._sequence(seq_id), samples, _failed(cause.reasons[seq_id], cause.code))
        for rows, logprobs in result.prompt_logprobs:
            self._keep_prompt_logprobs(rows, logprobs)
        self._commit(plan, samples)

    def _next_plan(self) -> StepPlan:
        plan = self._schedule()
        for group in self.scheduler.newly_admitted:
            group.first_scheduled = self._clock()
        return plan

    def _schedule(self) -> StepPlan:
        while self._suspects:
            plan = self.scheduler.schedule(only=set(self._suspects.pop()))
            if plan.scheduled:
                return plan
            self.scheduler.rollback(plan)  # all of them have ended or were preempted meanwhile
        plan = self.scheduler.schedule()
        assert plan.scheduled, "there is work, yet nothing could be scheduled"
        return plan

    def _keep_prompt_logprobs(self, rows: PromptRows, logprobs: list[TokenLogprobs]) -> None:
        """A prompt that was preempted half way is computed again: what is known of it is kept."""
        seq = self.scheduler.get(rows.seq_id)
        if seq is not None and (kept := seq.group.prompt_logprobs) is not None:
            kept.extend(logprobs[len(kept) - rows.start - 1 :])

    def _commit(self, plan: StepPlan, samples: StepSamples) -> None:
        events, logprobs, interval = self._events, samples.logprobs, self.report_interval
        for part in self.scheduler.commit(plan, samples.token_ids):
            seq = part.seq
            if part.finish is not None or not seq.started or (logprobs and seq.seq_id in logprobs):
                token_ids = seq.take_unreported(len(part.token_ids))
                self._report(seq, token_ids, logprobs.get(seq.seq_id, []), part.finish)
                continue
            num_unreported, num_new = seq.num_unreported, len(part.token_ids)
            if num_unreported + num_new < interval * seq.patience:
                seq.num_unreported += num_new
            elif num_unreported:
                events.append(SequenceEvent(seq.request_id, seq.index, seq.take_unreported(num_new)))
            else:  # most events there are
                events.append(SequenceEvent(seq.request_id, seq.index, part.token_ids))

    def _end_broken(self, seq: Sequence, samples: StepSamples, finish: Finish) -> None:
        """Ends a sequence that can have no further token, with those that right guesses had given it before."""
        self.scheduler.remove(seq)
        token_ids = tuple(samples.token_ids.get(seq.seq_id, ()))
        self.scheduler.counters.generation_tokens += len(token_ids)
        self._report(seq, seq.take_unreported() + token_ids, samples.logprobs.get(seq.seq_id, []), finish)

    # Endings and failures

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        seq_ids = [part.seq_id for part in plan.scheduled]  # some may have ended while the step was in flight
        if len(seq_ids) > 1:
            logger.warning("a step of %d sequences failed and is retried in parts: %s", len(seq_ids), error)
            half = len(seq_ids) // 2
            self._suspects += [seq_ids[half:], seq_ids[:half]]
            return
        if plan.scheduled[0].num_drafts:
            logger.warning("a step failed and is retried without guesses: %s", error)
            self._suspects.append(seq_ids)
            return
        logger.error("a step failed", exc_info=error)
        self._end_sequence(self._sequence(seq_ids[0]), _failed(str(error) or type(error).__name__))

    def _expire(self) -> None:
        now = self._clock()
        if now < self._next_deadline:
            return
        for request_id in [request_id for request_id, deadline in self._deadlines.items() if deadline <= now]:
            message = "the deadline passed before the text was complete"
            self._end(request_id, None, Finish(FinishReason.ERROR, None, ErrorCode.DEADLINE_EXCEEDED, message))
        self._next_deadline = min(self._deadlines.values(), default=float("inf"))

    def _end(self, request_id: str, index: int | None, finish: Finish) -> None:
        group = self.scheduler.groups.get(request_id)
        if group is not None:
            for seq in list(group.members.values()):
                if index is None or seq.index == index:
                    self._end_sequence(seq, finish)

    def _end_sequence(self, seq: Sequence, finish: Finish) -> None:
        self.scheduler.remove(seq)
        self._report(seq, seq.take_unreported(), [], finish)

    def _report(
        self,
        seq: Sequence,
        token_ids: tuple[int, ...],
        logprobs: list[TokenLogprobs],
        finish: Finish | None,
    ) -> None:
        """Queues the event, and forgets a sequence that has ended. *logprobs*, where asked for, cover *token_ids*."""
        group, request_id = seq.group, seq.group.request.request_id
        wanted = group.request.params.logprobs is not None
        entries = tuple(logprobs[: len(token_ids)]) if wanted else None
        first: dict[str, Any] = {}
        if not seq.started:
            seq.started = True
            complete = seq.index == 0 and group.prompt_logprobs is not None and not group.wants_prompt_logprobs
            first["cached_tokens"] = group.cached_tokens or 0
            if group.first_scheduled is not None:
                first["queue_s"] = max(0.0, group.first_scheduled - group.request.arrival_time)
            first["prompt_logprobs"] = tuple(group.prompt_logprobs or ()) if complete else None
        self._events.append(SequenceEvent(request_id, seq.index, token_ids, entries, finish, **first))
        if finish is None:
            return
        if seq.in_sampler:
            self._sampler.remove(seq.seq_id)
        if not group.members:
            self._deadlines.pop(request_id, None)

    def _fell_idle(self) -> None:
        """No sequence lives, so no block may be in use. A leak is logged: the engine can go on with what is left.

        The last event is not out yet, so what takes time with each block (`Scheduler.check`) is for tests.
        """
        self._suspects.clear()
        try:
            self.scheduler.check_idle()
        except AssertionError:
            logger.exception("the KV block pool is inconsistent while the engine is idle")

    def _sequence(self, seq_id: int) -> Sequence:
        seq = self.scheduler.get(seq_id)
        assert seq is not None, "a sequence left during its step"
        return seq


def _failed(reason: str, code: ErrorCode = ErrorCode.ENGINE_FAILED) -> Finish:
    return Finish(FinishReason.ERROR, error_code=code, message=reason)
