"""A device that samples, made of the scripted executor: queued steps run late, or at once, and always in order.

The scripted executor keeps what each slot of the KV pool holds, so a step that runs with a wrong block, slot or token
gives wrong tokens, and so does one that reads what a later step has overwritten.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from castline.engines.errors import EngineError
from castline.plugins.contract import StepTensors
from castline.plugins.cpu.sampling import CHOICE, draw_rows
from castline.runtime.device_executor import MAX_IN_FLIGHT, DeviceStep, StepOutput
from castline.runtime.sampler import Sampler

VOCAB_SIZE = 97
EOS = 96


class FakeDevice:
    """Implements `castline.runtime.device_executor.DeviceExecutor`, and holds the host to its contract.

    With ``eager`` a step runs when it is submitted, else when someone waits for it. A step that fails has written the
    pool, and its tokens, from which the next step may go on, are garbage.
    """

    vocab_size = VOCAB_SIZE

    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.eager = False
        self.refuse: Callable[[DeviceStep], None] | None = None
        """Raises where a submission is to fail."""
        self.break_logits: Callable[[StepTensors, np.ndarray], None] | None = None
        """Changes the logits of a step."""
        self.num_steps = 0
        self.num_ahead = 0
        """Steps that went on from tokens only the device knew."""
        self.num_wanted = 0
        """Rows of logits that the host got."""
        self.kept_busy: list[bool] = []
        """For each step collected: another one was in flight."""
        self.faults: list[AssertionError] = []
        """Broken promises of the host, which the core takes for failed steps."""
        self._queue: deque[Callable[[], None]] = deque()
        self._tickets: deque[int] = deque()
        self._outputs: dict[int, StepOutput | Exception] = {}
        self._drawn = np.empty(0, np.int64)
        """Of the step that ran last."""
        self._num_draws = -1
        """Of the step that was submitted last."""
        self._given: list[list[Any]] = []
        """[logits that the host may read, submissions since]."""

    @property
    def num_in_flight(self) -> int:
        return len(self._tickets)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        copies = list(copies)
        self._enqueue(lambda: self.executor.copy_blocks(copies))

    def submit(self, step: DeviceStep) -> int:
        with self._noting_faults():
            self._check(step)
        if self.refuse is not None:
            self.refuse(step)
        ticket = self.num_steps
        self.num_steps += 1
        self.num_ahead += step.continues is not None
        self.num_wanted += len(step.wanted)
        self._num_draws = len(step.draws)
        self._tickets.append(ticket)
        own = _copy(step)
        self._enqueue(lambda: self._run(ticket, own))
        for given in self._given:
            given[1] += 1
            if given[1] == 2:
                given[0][:] = np.nan  # the buffer has been used again
        return ticket

    def collect(self, ticket: int) -> StepOutput:
        with self._noting_faults():
            assert self._tickets, "nothing is in flight"
            assert ticket == self._tickets.popleft(), "tickets are collected in order"
        while ticket not in self._outputs:
            self._queue.popleft()()
        self.kept_busy.append(bool(self._tickets))
        output = self._outputs.pop(ticket)
        if isinstance(output, Exception):
            raise output
        self._given.append([output.logits, 0])
        return output

    def close(self) -> None:
        assert not self._tickets, "a step is in flight"

    def _enqueue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)
        while self.eager and self._queue:
            self._queue.popleft()()

    def _check(self, step: DeviceStep) -> None:
        assert len(self._tickets) < MAX_IN_FLIGHT, "too many steps in flight"
        num_rows = len(step.tensors.logits_indices)
        assert step.draws.dtype == CHOICE
        assert step.wanted.dtype == np.int64
        drawn, wanted = step.draws["row"].tolist(), step.wanted.tolist()
        assert len(set(drawn)) == len(drawn), "a row is drawn twice"
        assert sorted(drawn + wanted) == list(range(num_rows)), "a row is neither drawn nor wanted, or both"
        if step.continues is not None:
            assert step.continues.dtype == np.int32
            assert len(step.continues) == len(step.tensors.input_ids) == len(step.tensors.kv_lens)
            assert self._tickets, "the step that it goes on from was collected: its tokens are known"
            assert step.continues.min() >= -1
            assert step.continues.max() < self._num_draws

    def _run(self, ticket: int, step: DeviceStep) -> None:
        tokens = step.tensors.input_ids
        if step.continues is not None:
            before = np.maximum(self._drawn, 0)  # a row with no token goes on from any
            known = step.continues < 0
            tokens = np.where(known, tokens, before[np.where(known, 0, step.continues)])
        try:
            with self._noting_faults():
                logits = self.executor.execute(_with_tokens(step.tensors, tokens))
            if self.break_logits is not None:
                self.break_logits(step.tensors, logits)
            self._drawn = draw_rows(logits, step.draws)
            self._outputs[ticket] = StepOutput(self._drawn.copy(), logits[step.wanted])
        except EngineError as error:
            self._drawn = np.full(len(step.draws), (ticket * 31) % VOCAB_SIZE)
            self._outputs[ticket] = error

    @contextmanager
    def _noting_faults(self) -> Iterator[None]:
        try:
            yield
        except AssertionError as fault:
            self.faults.append(fault)
            raise


def _copy(step: DeviceStep) -> DeviceStep:
    tensors = StepTensors(*(array.copy() for array in _arrays(step.tensors)))
    continues = None if step.continues is None else step.continues.copy()
    return DeviceStep(tensors, step.draws.copy(), step.wanted.copy(), continues)


def _with_tokens(tensors: StepTensors, tokens: np.ndarray) -> StepTensors:
    return StepTensors(tokens, *_arrays(tensors)[1:])


def _arrays(tensors: StepTensors) -> list[np.ndarray]:
    return [getattr(tensors, name) for name in StepTensors.__dataclass_fields__]


class RecordingSampler(Sampler):
    """The real one, with the name by which the engine fixture looks for what was left behind."""

    def __init__(self) -> None:
        super().__init__(VOCAB_SIZE, (EOS,))

    @property
    def sequences(self) -> Any:
        return self._sequences


@pytest.fixture
def make_device_engine(make_engine):
    """An engine whose device samples; *device* False gives the plain one to compare with."""

    def make(*, device: bool = True, eager: bool = False, **limits: Any) -> Any:
        engine = make_engine(sampler=RecordingSampler(), device=FakeDevice if device else None, **limits)
        if device:
            engine.device.eager = eager
        return engine

    return make


@pytest.fixture
def answers() -> Callable[[Any], dict]:
    return _answers


def _answers(engine: Any) -> dict:
    """Everything a client sees, but how the tokens were spread over steps and what the cache held."""
    assert engine.device is None or not engine.device.faults, engine.device.faults
    seen = {}
    for request_id, request in engine.requests.items():
        for index in range(request.params.n):
            events = [e for e in engine.events if (e.request_id, e.index) == (request_id, index)]
            assert all(len(e.token_ids) == 1 for e in events if e.finish is None), "one event a token"
            assert all(e.logprobs is None or len(e.logprobs) == len(e.token_ids) for e in events)
            logprobs = [entry for e in events for entry in e.logprobs or ()]
            finish = engine.finish(request_id, index)
            seen[request_id, index] = (engine.tokens(request_id, index), finish, logprobs, events[0].prompt_logprobs)
    return seen
