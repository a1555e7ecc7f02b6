"""Steps of a chosen shape, run again and again under a profiler: made-up requests in a core, without server or text."""

from dataclasses import dataclass, field, replace

import numpy as np

from castline.engines.errors import EngineError
from castline.runtime.client import EffectiveLimits
from castline.runtime.core import EngineCore
from castline.runtime.events import SequenceEvent
from castline.runtime.profiler import Profiler
from castline.runtime.request import Request
from castline.runtime.resolve import resolve_params
from castline.runtime.sampling_params import SamplingParams
from castline.runtime.step_profile import Phase

_DECODE, _PREFILL = "decode", "prefill"


@dataclass(frozen=True, slots=True)
class StepShape:
    batch: int = 1
    """Sequences that decode."""
    context: int = 128
    """Tokens of each when the recording begins, or some more where their prompts take several steps."""
    prefill: int = 0
    """Tokens of a prompt that is computed beside them, one prompt after the other. On a device that runs ahead, a step
    without it comes between: it was begun before the next prompt came."""
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    """How the sequences sample."""


class StepWorkload:
    """One use: `run`."""

    def __init__(self, shape: StepShape, core: EngineCore, limits: EffectiveLimits, vocab_size: int) -> None:
        """Raises EngineError for more sequences than the limits allow."""
        self._shape = shape
        self._core = core
        self._limits = limits
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(0)
        self._num_requests = 0
        sequences = shape.batch + (shape.prefill > 0)
        if not 0 < sequences <= limits.max_num_seqs:
            raise EngineError(
                f"the step has {sequences} sequences, and this engine runs 1 to {limits.max_num_seqs}: change --batch"
            )

    def run(self, profiler: Profiler) -> None:
        """Brings the sequences to their context, then lets *profiler* make one recording.

        Raises RequestError for a length that does not fit, EngineError where a sequence ends or loses its blocks before
        the recording is complete.
        """
        for _ in range(self._shape.batch):
            self._add(_DECODE, self._shape.context, replace(self._shape.params, max_tokens=None, ignore_eos=True))
        started: set[str] = set()
        while len(started) < self._shape.batch:
            started |= {event.request_id for event in self._step()}
        profiler.start()
        prefilling = False
        while profiler.recording:
            if self._shape.prefill and not prefilling:
                self._add(_PREFILL, self._shape.prefill, replace(self._shape.params, max_tokens=1))
            profiler.mark(Phase.RECEIVE)
            prefilling = not any(event.finish is not None for event in self._step())
            profiler.step_done()

    def _add(self, kind: str, length: int, params: SamplingParams) -> None:
        """Raises RequestError for a length or parameters that no request may have."""
        self._num_requests += 1
        prompt = tuple(self._rng.integers(0, self._vocab_size, length).tolist())
        params = resolve_params(replace(params, seed=self._num_requests), length, self._vocab_size, self._limits)
        self._core.add_request(Request(f"{kind}-{self._num_requests}", prompt, params))

    def _step(self) -> list[SequenceEvent]:
        events = self._core.step()
        for event in events:
            if event.finish is not None and event.finish.message is not None:
                raise EngineError(event.finish.message)
            if event.finish is not None and event.request_id.startswith(_DECODE):
                raise EngineError("a sequence reaches its greatest length before the end: lower --context or --steps")
        if self._core.stats().preemptions:
            raise EngineError("the KV pool is too small for this step: raise --kv-blocks, lower --batch or --context")
        return events
