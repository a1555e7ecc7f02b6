"""One forward pass, its logits, and a token for each sequence: where the host samples."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from castline.plugins.contract import StepTensors
from castline.runtime.counters import Counters
from castline.runtime.executor import Executor
from castline.runtime.packer import StepPacker
from castline.runtime.plan import StepPlan
from castline.runtime.speculation import Speculation
from castline.runtime.step_profile import Phase, StepMarks
from castline.runtime.step_runner import SequenceSampler, StepResult
from castline.runtime.step_sampler import Rows, sample_step


class HostRunner:
    """Implements `castline.runtime.step_runner.StepRunner`: a step ends where it begins, so none is ever in flight."""

    in_flight = False

    def __init__(
        self,
        executor: Executor,
        sampler: SequenceSampler,
        block_size: int,
        marks: StepMarks,
        clock: Callable[[], float],
        counters: Counters,
        speculation: Speculation | None,
    ) -> None:
        """*speculation*, where there is one, hears what steps cost."""
        self._executor = executor
        self._sampler = sampler
        self._packer = StepPacker(block_size)
        self._marks = marks
        self._clock = clock
        self._counters = counters
        self._speculation = speculation

    def adopt(self) -> StepPlan | None:
        return None

    def drop(self) -> None: ...

    def run(self, plan: StepPlan, *, go_ahead: bool) -> StepResult:
        batch = self._packer.pack(plan)
        self._marks.mark(Phase.BATCH)
        if plan.block_copies:
            self._executor.copy_blocks(plan.block_copies)
        logits = self._execute(batch.tensors)
        self._marks.mark(Phase.EXECUTOR)
        prompt_logprobs = self._sampler.prompt_logprobs(batch.prompt_rows, logits) if batch.prompt_rows else []
        self._sampler.introduce(batch.sample_seq_ids)
        samples = sample_step(self._sampler.tokens, batch, Rows(logits, self._executor.maxima))
        self._marks.mark(Phase.SAMPLE)
        return StepResult(samples, prompt_logprobs)

    def _execute(self, tensors: StepTensors) -> NDArray[np.float32]:
        begin = self._clock()
        logits = self._executor.execute(tensors)
        seconds = self._clock() - begin
        self._counters.executor_s += seconds
        if self._speculation is not None:
            self._speculation.costs.observe(len(tensors.input_ids), seconds)
        return logits
