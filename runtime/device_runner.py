"""How a plan becomes tokens, where the device samples: a step is begun, and finished when its tokens are needed.

The device chooses the token of each row that needs nothing of the host, by the random number of that sequence and
position: the one that the host would use. The host gets the logits of the other rows, whose sequences edit or report
them, and of prompts that are to be reported, and samples as ever.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from castline.plugins.cpu.sampling import NO_TOKEN
from castline.runtime.batch import StepBatch, build_batch
from castline.runtime.counters import Counters
from castline.runtime.device_executor import DeviceExecutor, DeviceStep
from castline.runtime.plan import StepPlan
from castline.runtime.sampler_api import UNSOUND_LOGITS, BrokenLogits
from castline.runtime.step_profile import Phase, StepMarks
from castline.runtime.step_runner import SequenceSampler, StepResult
from castline.runtime.step_sampler import Rows, StepSamples, sample_rows


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A step that was submitted and not collected."""

    plan: StepPlan
    batch: StepBatch
    ticket: int
    drawn: list[int]
    """seq_ids whose tokens the device chooses, draw by draw."""
    hosted: list[int]
    """seq_ids whose logits the host gets, row by row; those of prompts follow."""


class DeviceRunner:
    def __init__(
        self,
        executor: DeviceExecutor,
        sampler: SequenceSampler,
        block_size: int,
        marks: StepMarks,
        clock: Callable[[], float],
        counters: Counters,
    ) -> None:
        self._executor = executor
        self._sampler = sampler
        self._block_size = block_size
        self._marks = marks
        self._clock = clock
        self._counters = counters

    def begin(self, plan: StepPlan, after: StepInFlight | None = None) -> StepInFlight:
        """Submits *plan*, which guesses nothing. Raises what the sampler and the device raise.

        *after* is the step before it, where that is in flight: every sequence of *plan* then goes on from the token
        that the device draws there.
        """
        batch = build_batch(plan, self._block_size)
        assert not batch.draft_rows, "the host alone checks guesses"
        seq_ids = batch.sample_seq_ids
        if after is None:
            self._sampler.introduce(seq_ids)
        ahead = 0 if after is None else 1
        places = self._sampler.tokens.wants_logits(seq_ids, ahead)
        assert after is None or not places, "a sequence that was drawn never wants logits again"
        rows = np.delete(np.arange(len(seq_ids)), places)
        drawn = [seq_ids[row] for row in rows.tolist()]
        choices = self._sampler.tokens.choices(drawn, ahead).copy()
        choices["row"] = rows
        prompt_rows = range(len(seq_ids), len(batch.tensors.logits_indices))
        wanted = np.array([*places, *prompt_rows], np.int64)
        continues = None if after is None else _continues(batch, after)
        if plan.block_copies:
            self._executor.copy_blocks(plan.block_copies)
        ticket = self._executor.submit(DeviceStep(batch.tensors, choices, wanted, continues))
        self._marks.mark(Phase.BATCH)
        return StepInFlight(plan, batch, ticket, drawn, [seq_ids[place] for place in places])

    def finish(self, step: StepInFlight) -> StepResult:
        """Waits for *step*. Raises what the sampler and the device raise; then nothing is recorded.

        Sequences that have ended since it was begun get nothing.
        """
        begin = self._clock()
        output = self._executor.collect(step.ticket)
        self._counters.executor_s += self._clock() - begin
        self._marks.mark(Phase.EXECUTOR)
        split = len(step.hosted)
        first_prompt_row = len(step.batch.sample_seq_ids)
        prompt_logprobs = self._sampler.prompt_logprobs(step.batch.prompt_rows, output.logits[split:], first_prompt_row)
        samples = StepSamples()
        sample_rows(self._sampler.tokens, samples, Rows(output.logits[:split], None), step.hosted)
        self._take_draws(samples, step.drawn, output.tokens.tolist())
        self._marks.mark(Phase.SAMPLE)
        return StepResult(samples, prompt_logprobs)

    def discard(self, step: StepInFlight) -> None:
        """Waits for *step* and forgets it. Raises what the device raises."""
        self._executor.collect(step.ticket)

    def _take_draws(self, samples: StepSamples, drawn: list[int], tokens: list[int]) -> None:
        kept: dict[int, int] = {}
        for seq_id, token in zip(drawn, tokens, strict=True):
            if not self._sampler.is_live(seq_id):
                continue
            if token == NO_TOKEN:
                samples.broken[seq_id] = BrokenLogits({seq_id: UNSOUND_LOGITS})
            else:
                kept[seq_id] = token
        tokens = list(kept.values())
        self._sampler.tokens.record(list(kept), tokens)
        samples.add(tuple(kept), tokens)


def _continues(batch: StepBatch, after: StepInFlight) -> NDArray[np.int32]:
    draws = {seq_id: draw for draw, seq_id in enumerate(after.drawn)}
    return np.array([draws[seq_id] for seq_id in batch.sample_seq_ids], np.int32)
