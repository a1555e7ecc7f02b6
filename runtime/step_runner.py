"""How a plan becomes tokens, as the engine core sees it, and what all ways of doing it share.

castline.runtime.host_runner samples on the host. Where the device does, castline.runtime.device_runner runs a step in
two parts, and castline.runtime.run_ahead begins the next step before it ends the last.
"""

from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from castline.runtime.batch import PromptRows
from castline.runtime.events import TokenLogprobs
from castline.runtime.plan import StepPlan
from castline.runtime.sampler_api import Sampler
from castline.runtime.scheduler import Scheduler
from castline.runtime.sequence import Sequence
from castline.runtime.step_sampler import StepSamples


class StepResult(msgspec.Struct, frozen=True):
    samples: StepSamples
    prompt_logprobs: list[tuple[PromptRows, list[TokenLogprobs]]]
    """Of prompt tokens ``rows.start + 1 ..``, as far as the rows reach."""


class StepRunner(Protocol):
    @property
    def in_flight(self) -> bool:
        """A step has begun that nobody has asked for the tokens of."""
        ...

    def adopt(self) -> StepPlan | None:
        """The plan in flight, which is the next to be run. None where nothing of it is of use any more."""
        ...

    def run(self, plan: StepPlan, *, go_ahead: bool) -> StepResult:
        """The tokens of *plan*. With *go_ahead*, what follows it may begin.

        Raises what any part raises; then the sampler has recorded nothing, and nothing is in flight.
        """
        ...

    def drop(self) -> None:
        """Waits for what is in flight, and forgets it."""
        ...


class SequenceSampler:
    """The sampler, told of the scheduler's sequences."""

    def __init__(self, sampler: Sampler, scheduler: Scheduler) -> None:
        self.tokens = sampler
        self._scheduler = scheduler
        self._introduced: tuple[int, ...] = ()
        """Of the last call: most steps sample the same sequences as the step before."""

    def introduce(self, seq_ids: tuple[int, ...]) -> None:
        """Tells the sampler of sequences that are about to get their first token."""
        if seq_ids == self._introduced:
            return
        for seq_id in seq_ids:
            seq = self._sequence(seq_id)
            if not seq.in_sampler:
                request = seq.group.request
                self.tokens.add(seq_id, request.params, request.prompt_token_ids, seq.index)
                seq.in_sampler = True
        self._introduced = seq_ids

    def is_live(self, seq_id: int) -> bool:
        return self._scheduler.get(seq_id) is not None

    def prompt_logprobs(
        self, rows: tuple[PromptRows, ...], logits: NDArray[np.float32], first_row: int = 0
    ) -> list[tuple[PromptRows, list[TokenLogprobs]]]:
        """*logits* are those of the step from *first_row* on."""
        return [(part, self._prompt_logprobs(part, logits[part.first_row - first_row :])) for part in rows]

    def _prompt_logprobs(self, rows: PromptRows, logits: NDArray[np.float32]) -> list[TokenLogprobs]:
        request = self._sequence(rows.seq_id).group.request
        following = request.prompt_token_ids[rows.start + 1 : rows.start + 1 + rows.num_rows]
        return self.tokens.prompt_logprobs(logits[: len(following)], following, request.params.prompt_logprobs or 0)

    def _sequence(self, seq_id: int) -> Sequence:
        seq = self._scheduler.get(seq_id)
        assert seq is not None, "a sequence left during its step"
        return seq
