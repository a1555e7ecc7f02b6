"""Where the time of engine steps goes, phase by phase.

The engine loop and the core *mark* the end of each phase; a phase lasts from the mark before it. So the phases of a
recording follow each other without gaps, and a phase costs one clock reading. Nothing is kept while nothing is
recorded, and a recording is bounded by its number of steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from time import perf_counter_ns
from typing import Final, Protocol

from castline.runtime.decodes import Decodes
from castline.runtime.plan import StepPlan


class Phase(StrEnum):
    """In the order of a step."""

    IDLE = "idle"
    """Nothing to do: blocked until a command comes. No part of a step."""
    RECEIVE = "receive"
    """Commands read and requests queued."""
    SCHEDULE = "schedule"
    BATCH = "batch"
    """The plan packed into arrays."""
    EXECUTOR = "executor"
    """The forward pass; where the device samples, what is left of it to wait for."""
    SAMPLE = "sample"
    COMMIT = "commit"
    """Tokens applied, events made; a failed step rolled back."""
    SEND = "send"
    """Events encoded and written to the serving process."""


@dataclass(frozen=True, slots=True)
class Span:
    phase: Phase
    start_ns: int
    end_ns: int


@dataclass(slots=True)
class StepRecord:
    """One step and what came before it since the last."""

    spans: list[Span] = field(default_factory=list)
    """In order, each starting where the one before ends; `perf_counter_ns` times."""
    num_sequences: int = 0
    num_tokens: int = 0
    decodes_only: bool = False
    """Every sequence computed one token, and guesses."""

    @property
    def step_spans(self) -> list[Span]:
        """Those after the engine was last idle."""
        idle = (place for place, span in enumerate(self.spans) if span.phase is Phase.IDLE)
        return self.spans[max(idle, default=-1) + 1 :]


class StepMarks(Protocol):
    """What the core and the loop tell of each step."""

    def mark(self, phase: Phase) -> None:
        """*phase* ends now."""
        ...

    def scheduled(self, plan: StepPlan) -> None:
        """The scheduling phase ends now, with *plan*."""
        ...

    def step_done(self) -> None: ...


class _NoMarks:
    """Nobody wants to know."""

    def mark(self, phase: Phase) -> None: ...

    def scheduled(self, plan: StepPlan) -> None: ...

    def step_done(self) -> None: ...


NO_MARKS: Final = _NoMarks()


class StepRecorder:
    """One recording, from its creation until it has *num_steps* steps."""

    def __init__(self, num_steps: int, clock: Callable[[], int] = perf_counter_ns) -> None:
        self._num_steps = num_steps
        self._clock = clock
        self._last = clock()
        self._current = StepRecord()
        self.records: list[StepRecord] = []

    @property
    def complete(self) -> bool:
        return len(self.records) >= self._num_steps

    def mark(self, phase: Phase) -> None:
        """Phases of the same name that follow each other are one: an idle engine may be woken any number of times."""
        now, spans = self._clock(), self._current.spans
        if spans and spans[-1].phase is phase:
            spans[-1] = Span(phase, spans[-1].start_ns, now)
        else:
            spans.append(Span(phase, self._last, now))
        self._last = now

    def scheduled(self, plan: StepPlan) -> None:
        self.mark(Phase.SCHEDULE)
        current, parts = self._current, plan.scheduled
        current.num_sequences = len(parts)
        if isinstance(parts, Decodes):  # its parts would be made for this, which is part of the next phase
            current.num_tokens, current.decodes_only = len(parts), True
        else:
            current.num_tokens = plan.num_tokens
            current.decodes_only = all(len(part.token_ids) - part.num_drafts == 1 for part in parts)

    def step_done(self) -> None:
        if not self.complete:
            self.records.append(self._current)
        self._current = StepRecord()
