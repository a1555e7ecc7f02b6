"""One step beyond the one whose tokens are being waited for, so that the device never waits for the host.

While a step is executed, the one after it is submitted, where nothing but tokens is missing for it: it goes on from
those that the device itself has drawn (castline.runtime.look_ahead says when). Then the first is collected, committed
and reported, and the second is what the next turn collects.

What may change in between is that sequences end: by their tokens, by an abort, by a deadline. Their parts of the step
in flight are ignored, and their blocks are free at once. That is sound, because

* steps and copies take effect in the order of submission, so whoever gets such a block writes it after the step in
  flight has, and reads of it only what was written for him;
* a step in flight writes only behind the tokens of a sequence, and what is findable in the prefix cache is full blocks
  of tokens that are confirmed and computed by a step that was collected: no findable block is ever written, and
  nothing of a step is findable that fails, or whose tokens are dropped;
* nothing is scheduled, so nobody is admitted, preempted, forked or copied, while a step is in flight that goes on.

A step whose predecessor fails is dropped: nothing of it was recorded, and the same random numbers give its tokens
again.
"""

import logging
from collections import deque

from castline.runtime.device_runner import DeviceRunner, StepInFlight
from castline.runtime.plan import StepPlan
from castline.runtime.scheduler import Scheduler
from castline.runtime.step_profile import Phase, StepMarks
from castline.runtime.step_runner import StepResult

logger = logging.getLogger(__name__)


class RunAhead:
    """Implements `castline.runtime.step_runner.StepRunner`."""

    def __init__(self, runner: DeviceRunner, scheduler: Scheduler, marks: StepMarks) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._marks = marks
        self._steps: deque[StepInFlight] = deque()
        """In flight, in order: between two calls of `run` at most one."""

    @property
    def in_flight(self) -> bool:
        """A step was submitted that nobody has collected."""
        return bool(self._steps)

    def adopt(self) -> StepPlan | None:
        """The plan in flight, which is to be run next. None where there is none, or all of its sequences have ended."""
        if not self._steps:
            return None
        plan = self._steps[0].plan
        if any(self._scheduler.get(part.seq_id) is not None for part in plan.scheduled):
            return plan
        self.drop()
        return None

    def run(self, plan: StepPlan, *, go_ahead: bool) -> StepResult:
        """The tokens of *plan*, which is the one in flight where there is one. With *go_ahead*, submits what follows.

        Raises what the sampler and the device raise. Then nothing is recorded, and nothing in flight.
        """
        if not self._steps:
            self._steps.append(self._runner.begin(plan))
        step = self._steps[0]
        assert step.plan is plan, "a step in flight is run before anything is scheduled"
        try:
            if go_ahead and not step.hosted:
                self._go_ahead(step)
            self._steps.popleft()
            return self._runner.finish(step)
        except BaseException:
            self.drop()
            raise

    def drop(self) -> None:
        """Waits for what is in flight, and forgets what it gives."""
        while self._steps:
            try:
                self._runner.discard(self._steps.popleft())
            except Exception as error:
                logger.warning("a step that is not needed any more failed: %s", error)

    def _go_ahead(self, step: StepInFlight) -> None:
        """Without the step ahead, should it be refused: what is wrong with it shows again in its own turn."""
        plan = self._scheduler.look_ahead(step.plan)
        if plan is None:
            return
        self._marks.mark(Phase.SCHEDULE)
        try:
            self._steps.append(self._runner.begin(plan, after=step))
        except Exception as error:
            logger.warning("a step could not be submitted ahead: %s", error)
